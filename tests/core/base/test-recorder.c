/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The recorder returns what was recorded, by step. Full rings lose the oldest records and report the oldest complete
 * step. Pieces of the same work become one record. A copy made while threads write has no half-written record. Under
 * thread sanitizer this file also tests that writers and the reader share no plain memory.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdatomic.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/recorder.h"
#include "core/base/worker.h"
#include "tests/group.h"

static struct record a_record(uint64_t begin_ns, uint32_t item)
{
    return (struct record){.begin_ns = begin_ns, .end_ns = begin_ns + 10, .item = item, .kind = RECORD_WORK_REDUCE};
}

static void test_nothing_before_the_start(void **state)
{
    struct record record = a_record(1, 1), *all;
    uint64_t oldest;
    size_t n;

    (void)state;
    recorder_note(&record);
    recorder_work(RECORD_WORK_REDUCE, 1, 0);
    recorder_rest();
    all = recorder_copy(10, &n, &oldest);
    assert_non_null(all);
    assert_int_equal(n, 0);
    free(all);
}

static void test_steps(void **state)
{
    struct record *all;
    uint64_t oldest;
    size_t n;

    (void)state;
    assert_int_equal(recorder_start(1), 0);
    for (uint32_t step = 0; step < 10; step++) {
        struct record record = a_record(1000 * step + 1, step + 100);

        recorder_set_step(step);
        recorder_note(&record);
    }
    all = recorder_copy(3, &n, &oldest);
    assert_int_equal(oldest, 6);
    assert_int_equal(n, 4);
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(all[i].step, 6 + i);
        assert_int_equal(all[i].item, 106 + i);
        assert_int_equal(all[i].begin_ns, 1000 * (6 + i) + 1);
        assert_int_equal(all[i].end_ns, all[i].begin_ns + 10);
        assert_int_equal(all[i].thread, 0);
    }
    free(all);
    all = recorder_copy(UINT64_MAX, &n, &oldest);
    assert_int_equal(oldest, 0);
    assert_int_equal(n, 10);
    free(all);
    recorder_stop();
}

/* Steps beyond 32 bits. */
static void test_late_steps(void **state)
{
    const uint64_t late = UINT64_C(5) << 32;
    struct record record = a_record(1, 1), *all;
    uint64_t oldest;
    size_t n;

    (void)state;
    assert_int_equal(recorder_start(1), 0);
    recorder_set_step(late - 1);
    recorder_note(&record);
    recorder_set_step(late);
    recorder_note(&record);
    all = recorder_copy(1, &n, &oldest);
    assert_int_equal(oldest, late - 1);
    assert_int_equal(n, 2);
    free(all);
    all = recorder_copy(0, &n, &oldest);
    assert_int_equal(oldest, late);
    assert_int_equal(n, 1);
    free(all);
    recorder_stop();
}

/* From the step that recorder_copy() reports as the oldest, all records are there. */
static void test_full_ring(void **state)
{
    enum { PER_STEP = 1000, STEPS = 100 };

    unsigned n_of[STEPS] = {0};
    struct record *all;
    uint64_t oldest;
    size_t n;

    (void)state;
    assert_int_equal(recorder_start(1), 0);
    for (uint32_t i = 0; i < PER_STEP * STEPS; i++) {
        struct record record = a_record(i, i);

        recorder_set_step(i / PER_STEP);
        recorder_note(&record);
    }
    all = recorder_copy(STEPS, &n, &oldest);
    assert_in_range(oldest, STEPS - RECORDER_LOOP_RECORDS / PER_STEP, STEPS - RECORDER_LOOP_RECORDS / PER_STEP + 1);
    for (size_t i = 0; i < n; i++)
        n_of[all[i].step]++;
    for (uint64_t step = 0; step < STEPS; step++)
        assert_int_equal(n_of[step], step < oldest ? 0 : PER_STEP);
    free(all);
    recorder_stop();
}

/* A step that does not fit into the ring is returned as far as it fits. */
static void test_step_larger_than_the_ring(void **state)
{
    struct record *all;
    uint64_t oldest;
    size_t n;

    (void)state;
    assert_int_equal(recorder_start(1), 0);
    recorder_set_step(7);
    for (uint32_t i = 0; i < RECORDER_LOOP_RECORDS + 5; i++) {
        struct record record = a_record(i, i);

        recorder_note(&record);
    }
    all = recorder_copy(3, &n, &oldest);
    assert_int_equal(oldest, 7);
    assert_in_range(n, RECORDER_LOOP_RECORDS - 1, RECORDER_LOOP_RECORDS);
    assert_int_equal(all[n - 1].item, RECORDER_LOOP_RECORDS + 4);
    free(all);
    recorder_stop();
}

/* Pieces of the same work are one record. Another parcel, kind or micro-batch, or recorder_rest(), ends the record. */
static void test_work(void **state)
{
    static const struct record expected[] = {{.kind = RECORD_WORK_REDUCE, .item = 5},
                                             {.kind = RECORD_WORK_REDUCE, .item = 6},
                                             {.kind = RECORD_WORK_UPDATE, .item = 6},
                                             {.kind = RECORD_WORK_UPDATE, .item = 6, .micro_batch = 1},
                                             {.kind = RECORD_WORK_UPDATE, .item = 6, .micro_batch = 1}};
    struct record *all;
    uint64_t oldest;
    size_t n;

    (void)state;
    assert_int_equal(recorder_start(1), 0);
    recorder_set_step(0);
    recorder_rest(); /* no record is open */
    recorder_work(RECORD_WORK_REDUCE, 5, 0);
    recorder_work(RECORD_WORK_REDUCE, 5, 0);
    recorder_work(RECORD_WORK_REDUCE, 6, 0);
    recorder_work(RECORD_WORK_UPDATE, 6, 0);
    recorder_work(RECORD_WORK_UPDATE, 6, 1);
    recorder_rest();
    recorder_rest();
    recorder_work(RECORD_WORK_UPDATE, 6, 1);
    all = recorder_copy(1, &n, &oldest);
    assert_int_equal(n, 4); /* the last record is still open */
    free(all);
    recorder_rest();
    all = recorder_copy(1, &n, &oldest);
    assert_int_equal(n, ARRAY_SIZE(expected));
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(all[i].kind, expected[i].kind);
        assert_int_equal(all[i].item, expected[i].item);
        assert_int_equal(all[i].micro_batch, expected[i].micro_batch);
        assert_true(all[i].end_ns >= all[i].begin_ns);
        assert_true(i == 0 || all[i].begin_ns >= all[i - 1].end_ns);
    }
    free(all);
    recorder_stop();
}

/* ---- threads ------------------------------------------------------------------------------------------- */

enum { N_WORKERS = 3, N_EACH = 4 * RECORDER_WORKER_RECORDS };

/* All words of a record have the same value, which shows a record that is half old and half new. */
static void write_many(struct work *work, uint32_t item)
{
    (void)work;
    (void)item;
    for (uint32_t i = 1; i <= N_EACH; i++) {
        struct record record = {.begin_ns = i, .end_ns = i, .item = i, .rank = (uint16_t)i, .kind = RECORD_WORK_UPDATE};

        recorder_note(&record);
    }
}

static void note_done(struct work *work)
{
    (void)work;
}

static void ignore(void *userdata)
{
    (void)userdata;
}

static void look(const struct record *all, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        assert_in_range(all[i].thread, 1, N_WORKERS);
        assert_int_equal(all[i].end_ns, all[i].begin_ns);
        assert_int_equal(all[i].item, all[i].begin_ns);
        assert_int_equal(all[i].rank, (uint16_t)all[i].begin_ns);
    }
}

static void test_copied_while_it_is_written(void **state)
{
    struct work work = {.run = write_many, .done = note_done, .n_items = N_WORKERS};
    struct worker_pool *pool;
    uint64_t oldest, n_done = 0;
    struct record *all;
    size_t n;

    (void)state;
    assert_int_equal(recorder_start(N_WORKERS), 0);
    assert_int_equal(worker_pool_new(&pool, N_WORKERS, ignore, NULL), 0);
    recorder_set_step(0);
    worker_post(pool, &work);
    while (worker_pool_progress(pool, &n_done)) {
        all = recorder_copy(0, &n, &oldest);
        assert_non_null(all);
        look(all, n);
        free(all);
    }
    assert_int_equal(worker_pool_wait(pool), 1);
    all = recorder_copy(0, &n, &oldest);
    look(all, n);
    assert_true(n >= RECORDER_WORKER_RECORDS - 1);
    free(all);
    worker_pool_free(pool);
    recorder_stop();
}

static size_t n_when_told;

/* Runs on the worker that ends the last item. */
static void count_records(void *userdata)
{
    uint64_t oldest;

    (void)userdata;
    free(recorder_copy(0, &n_when_told, &oldest));
}

static void record_work(struct work *work, uint32_t item)
{
    (void)work;
    recorder_work(RECORD_WORK_UPDATE, item, 0);
}

/* When a work is done no record is open. Otherwise the record would count for the step that the loop begins next. */
static void test_work_that_is_done_is_recorded(void **state)
{
    enum { N_ITEMS = 5 };

    struct work work = {.run = record_work, .done = note_done, .n_items = N_ITEMS};
    struct worker_pool *pool;

    (void)state;
    assert_int_equal(recorder_start(N_WORKERS), 0);
    assert_int_equal(worker_pool_new(&pool, N_WORKERS, count_records, NULL), 0);
    recorder_set_step(0);
    worker_post(pool, &work);
    assert_int_equal(worker_pool_wait(pool), 1);
    worker_pool_free(pool); /* count_records() has returned */
    assert_int_equal(n_when_told, N_ITEMS);
    recorder_stop();
}

TEST_GROUP(recorder)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_before_the_start),
        cmocka_unit_test(test_steps),
        cmocka_unit_test(test_late_steps),
        cmocka_unit_test(test_full_ring),
        cmocka_unit_test(test_step_larger_than_the_ring),
        cmocka_unit_test(test_work),
        cmocka_unit_test(test_copied_while_it_is_written),
        cmocka_unit_test(test_work_that_is_done_is_recorded),
    };

    return cmocka_run_group_tests_name("recorder", tests, NULL, NULL);
}
