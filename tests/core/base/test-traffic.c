/* SPDX-License-Identifier: Apache-2.0 */

/* Orders of several kinds that overlap, end out of order, or are cancelled. */

#include "core/base/base.h"
#include "core/base/traffic.h"
#include "tests/group.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void check(const struct traffic *t, uint64_t n_orders, uint64_t n_sent, uint64_t n_received, uint64_t busy_ns)
{
    assert_int_equal(t->n_orders, n_orders);
    assert_int_equal(t->n_bytes_sent, n_sent);
    assert_int_equal(t->n_bytes_received, n_received);
    assert_int_equal(t->busy_ns, busy_ns);
}

/* Two orders overlap from 100 to 190; the next begins at 300. Time with two orders counts once. */
static void test_overlapping_orders(void **state)
{
    struct traffic traffic[N_TRAFFIC] = {0};
    struct traffic *t = &traffic[TRAFFIC_REDUCE_SCATTER];

    traffic_begin(traffic, TRAFFIC_REDUCE_SCATTER, 100);
    traffic_begin(traffic, TRAFFIC_REDUCE_SCATTER, 120);
    traffic_end(traffic, TRAFFIC_REDUCE_SCATTER, 10, 20, 150);
    check(t, 1, 10, 20, 0);
    traffic_end(traffic, TRAFFIC_REDUCE_SCATTER, 1, 2, 190);
    check(t, 2, 11, 22, 90);
    traffic_begin(traffic, TRAFFIC_REDUCE_SCATTER, 300);
    traffic_end(traffic, TRAFFIC_REDUCE_SCATTER, 0, 5, 301);
    check(t, 3, 11, 27, 91);
}

static void test_kinds(void **state)
{
    struct traffic traffic[N_TRAFFIC] = {0};

    for (unsigned kind = 0; kind < N_TRAFFIC; kind++)
        traffic_begin(traffic, kind, 1000 * kind);
    traffic_begin(traffic, N_TRAFFIC, 0);
    traffic_end(traffic, N_TRAFFIC, 7, 7, 1);
    for (unsigned kind = 0; kind < N_TRAFFIC; kind++)
        traffic_end(traffic, kind, kind, 2 * kind, 1000 * kind + 10 + kind);
    for (unsigned kind = 0; kind < N_TRAFFIC; kind++)
        check(&traffic[kind], 1, kind, 2 * kind, 10 + kind);
    assert_string_equal(traffic_name(TRAFFIC_REDUCE_SCATTER), "reduce-scatter");
    assert_string_equal(traffic_name(TRAFFIC_FETCH), "fetch");
}

/* The engine is killed. The time until then counts, the unfinished orders do not. Later orders are counted normally. */
static void test_stop(void **state)
{
    struct traffic traffic[N_TRAFFIC] = {0};

    traffic_begin(traffic, TRAFFIC_ALL_GATHER, 10);
    traffic_begin(traffic, TRAFFIC_ALL_GATHER, 20);
    traffic_begin(traffic, TRAFFIC_FETCH, 30);
    traffic_end(traffic, TRAFFIC_FETCH, 4, 4, 35);
    traffic_stop(traffic, 50);
    traffic_stop(traffic, 90);
    check(&traffic[TRAFFIC_ALL_GATHER], 0, 0, 0, 40);
    check(&traffic[TRAFFIC_FETCH], 1, 4, 4, 5);
    check(&traffic[TRAFFIC_BROADCAST], 0, 0, 0, 0);
    traffic_begin(traffic, TRAFFIC_ALL_GATHER, 100);
    traffic_end(traffic, TRAFFIC_ALL_GATHER, 1, 1, 101);
    check(&traffic[TRAFFIC_ALL_GATHER], 1, 1, 1, 41);
}

TEST_GROUP(traffic)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_overlapping_orders),
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
