/* SPDX-License-Identifier: Apache-2.0 */

/* Which diagnostics are kept, and how many of them reach the log. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "daemon/job/model/kept.h"
#include "daemon/server/diagnostic-log.h"
#include "tests/group.h"

static struct diagnostic *make(int64_t rank)
{
    return cause_bad_message(&(struct evidence_at){.rank = rank, .step = -1, .micro_batch = -1}, "nonsense");
}

static void test_order(void **state)
{
    struct kept_diagnostics kept = {0};
    const struct diagnostic *list[KEPT_MAX];

    (void)state;
    assert_null(kept_last(&kept));
    for (int i = 0; i < 6; i++)
        kept_add(&kept, make(i % 2 ? -1 : 0), i % 2);
    assert_int_equal(kept_list(&kept, list), 6);
    for (uint64_t i = 0; i < 6; i++)
        assert_int_equal(list[i]->id, i + 1);
    assert_ptr_equal(kept_last(&kept), list[5]);
    kept_deinit(&kept);
}

static void test_strangers_push_nothing_out(void **state)
{
    struct kept_diagnostics kept = {0};
    const struct diagnostic *list[KEPT_MAX];
    size_t n;

    (void)state;
    kept_add(&kept, make(3), false);
    for (unsigned i = 0; i < 1000; i++)
        kept_add(&kept, make(-1), true);
    n = kept_list(&kept, list);
    assert_int_equal(n, 1 + KEPT_OF_STRANGERS);
    assert_int_equal(list[0]->rank, 3);
    assert_int_equal(list[n - 1]->id, 1001);
    for (unsigned i = 0; i < KEPT_OF_RANKS; i++)
        kept_add(&kept, make(4), false);
    n = kept_list(&kept, list);
    assert_int_equal(n, KEPT_MAX);
    for (size_t i = 1; i < n; i++)
        assert_true(list[i - 1]->id < list[i]->id);
    kept_deinit(&kept);
}

static void test_log_of_a_loop(void **state)
{
    struct diagnostic_log log = {0};
    struct diagnostic *of_rank = make(1), *of_stranger = make(-1);

    (void)state;
    diagnostic_log_put(&log, of_rank, 5000);
    assert_true(diagnostic_log_until_ms(&log) == UINT64_MAX); /* none is delayed */
    for (unsigned i = 1; i < 100; i++)
        diagnostic_log_put(&log, of_rank, 5000);
    diagnostic_log_put(&log, of_stranger, 5000);
    assert_int_equal(diagnostic_log_until_ms(&log), 5000 + DIAGNOSTIC_LOG_MS);
    assert_int_equal(log.kinds[0].n_logged, DIAGNOSTIC_LOG_BURST);
    assert_int_equal(log.kinds[0].n_held, 100 - DIAGNOSTIC_LOG_BURST);
    assert_int_equal(log.kinds[1].n_logged, 1);
    diagnostic_log_flush(&log, 5000 + DIAGNOSTIC_LOG_MS - 1);
    assert_int_equal(log.kinds[0].n_held, 100 - DIAGNOSTIC_LOG_BURST);
    diagnostic_log_flush(&log, 5000 + DIAGNOSTIC_LOG_MS);
    assert_int_equal(log.kinds[0].until_ms, 0);
    assert_true(diagnostic_log_until_ms(&log) == UINT64_MAX);
    diagnostic_log_put(&log, of_rank, 5000 + DIAGNOSTIC_LOG_MS);
    assert_int_equal(log.kinds[0].n_logged, 1);
    diagnostic_unref(of_rank);
    diagnostic_unref(of_stranger);
}

/* When there are more kinds than places, the oldest is dropped. */
static void test_log_of_many_kinds(void **state)
{
    struct diagnostic_log log = {0};

    (void)state;
    for (unsigned i = 0; i < 2 * DIAGNOSTIC_LOG_KINDS; i++) {
        struct diagnostic *d = make(i);

        diagnostic_log_put(&log, d, 5000 + i);
        diagnostic_unref(d);
    }
    for (unsigned i = 0; i < DIAGNOSTIC_LOG_KINDS; i++)
        assert_true(log.kinds[i].rank >= DIAGNOSTIC_LOG_KINDS && log.kinds[i].n_logged == 1);
}

TEST_GROUP(kept)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_strangers_push_nothing_out),
        cmocka_unit_test(test_log_of_a_loop),
        cmocka_unit_test(test_log_of_many_kinds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
