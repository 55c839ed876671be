/* SPDX-License-Identifier: Apache-2.0 */

/* Tests the executor in host memory, without a job. Executors on GPUs are tested with daemons (tests/e2e). */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/segment.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/layout/layout.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/spare.h"
#include "daemon/step/executor.h"
#include "daemon/step/pools.h"
#include "kernels/kernels.h"

enum { N_ELEMS = 1000, FROZEN = 1, N_PARAMS = 2, POOL_BYTES = 1 << 20 };

struct fixture {
    struct config *config;
    struct layout *layout;
    struct worker_pool *pool;
    struct executor *executor;
    struct ring *ring;
    unsigned n_reserved, n_formed, n_loaded, n_done;
    int result;
    uint64_t sum;
};

static void ignore_notice(void *userdata)
{
    (void)userdata;
}

static void on_reserved(void *userdata)
{
    struct fixture *f = userdata;

    assert_int_equal(f->n_formed, 1); /* the job must be able to answer other nodes by now */
    f->n_reserved++;
}

static void on_formed(void *userdata)
{
    ((struct fixture *)userdata)->n_formed++;
}

static void on_loaded(void *userdata, int result)
{
    struct fixture *f = userdata;

    assert_int_equal(result, 0);
    f->n_loaded++;
}

static void on_done(void *userdata, int result)
{
    struct fixture *f = userdata;

    f->n_done++;
    f->result = result;
}

static void on_sum(void *userdata, int result, uint64_t sum)
{
    on_done(userdata, result);
    ((struct fixture *)userdata)->sum = sum;
}

/* Waits until the work in progress has ended. */
static void finish(struct fixture *f)
{
    unsigned n_before = f->n_done;

    while (worker_pool_wait(f->pool) > 0)
        ;
    assert_int_equal(f->n_done, n_before + 1);
    assert_int_equal(f->result, 0);
}

static struct layout *make_layout(unsigned world)
{
    static const uint64_t shape = N_ELEMS;
    struct layout *layout;
    uint32_t bad;
    struct layout_decl decls[N_PARAMS] = {
        {.name = "w", .name_len = 1, .grad_dtype = DTYPE_F32, .dtype = DTYPE_F32, .trainable = true},
        {.name = "f", .name_len = 1, .grad_dtype = DTYPE_F32, .dtype = DTYPE_F32}};

    for (unsigned p = 0; p < N_PARAMS; p++) {
        decls[p].n_dims = 1;
        decls[p].shape = &shape;
    }
    assert_int_equal(layout_new(&layout, decls, N_PARAMS, world, 2000, &bad), 0);
    return layout;
}

static void make_with_spares(struct fixture *f, unsigned stage, uint32_t spare_buckets)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    const struct kernels *kernels;
    char text[128], why[128];

    *f = (struct fixture){.layout = make_layout(1)};
    snprintf(text, sizeof(text), "listen: {socket: /unused}\nworld: {size: 1}\nzero_optimization: {stage: %u, stage3_on_one_node: gathered}\n",
             stage);
    assert_int_equal(
        config_load_string(&f->config, &(struct config_source){.text = {"f.yaml", text, strlen(text)}}, &problems), 0);
    config_problems_deinit(&problems);
    f->config->zero.spare_buckets = spare_buckets;
    assert_int_equal(kernels_select(&kernels, NULL, why, sizeof(why)), 0);
    assert_int_equal(worker_pool_new(&f->pool, 2, ignore_notice, NULL), 0);
    assert_int_equal(
        executor_new(&f->executor,
                     &(struct executor_options){
                         .config = f->config,
                         .layout = f->layout,
                         .kernels = kernels,
                         .pool = f->pool,
                         .gather_bytes = POOL_BYTES,
                         .events = {.reserved = on_reserved, .formed = on_formed, .loaded = on_loaded, .userdata = f}}),
        0);
    for (uint32_t i = 0; i < executor_n_reserve_pieces(f->executor); i++)
        assert_int_equal(executor_reserve(f->executor, i), 0);
    executor_start(f->executor, false);
    assert_int_equal(f->n_formed, 1);
    assert_int_equal(f->n_reserved, 1);
    assert_int_equal(ring_new(&f->ring, &(struct ring_options){.ring_bytes = f->executor->ring_bytes,
                                                               .overflow_bytes = f->layout->arena_bytes,
                                                               .n_parcels = f->layout->n_parcels,
                                                               .n_tickets = 8}),
                     0);
    assert_int_equal(segment_reserve(&f->ring->ring, 0, f->ring->ring.n_bytes), 0);
}

static void make(struct fixture *f, unsigned stage)
{
    make_with_spares(f, stage, 0);
}

static void end(struct fixture *f)
{
    ring_orphan(f->ring);
    executor_stop(f->executor);
    executor_free(f->executor);
    worker_pool_free(f->pool);
    layout_free(f->layout);
    config_free(f->config);
}

static float value(uint32_t param, uint64_t i)
{
    return (float)(i + 1) / (float)(param + 2);
}

static void give_weights(struct fixture *f)
{
    for (uint32_t p = 0; p < N_PARAMS; p++) {
        for (uint64_t i = 0; i < N_ELEMS; i++)
            ((float *)(void *)f->ring->ring.map)[i] = value(p, i);
        assert_int_equal(executor_init(f->executor, &(struct executor_init){.ring = f->ring,
                                                                            .request = {.param = p, .n_elems = N_ELEMS},
                                                                            .done = on_done,
                                                                            .userdata = f}),
                         0);
        finish(f);
    }
}

static void expect(uint32_t param, const float *values)
{
    for (uint64_t i = 0; i < N_ELEMS; i++)
        assert_true(values[i] == value(param, i));
}

/* In each stage, the weights that were set are read back, and a window shows them. */
static void test_weights(unsigned stage)
{
    struct segment window;
    float values[N_ELEMS];
    struct fixture f;

    make(&f, stage);
    assert_int_equal(segment_init(&window, "window", stage == 3 ? f.layout->range_bytes : f.layout->weight_bytes), 0);
    give_weights(&f);
    for (uint32_t p = 0; p < N_PARAMS; p++) {
        memset(values, 0, sizeof(values));
        assert_int_equal(executor_read(f.executor, &(struct executor_read){.param = p,
                                                                               .kind = STATE_MASTER,
                                                                               .dst = values,
                                                                               .done = on_done,
                                                                               .userdata = &f}), 0);
        finish(&f);
        expect(p, values);
    }
    assert_int_equal(executor_show(f.executor, &window, on_done, &f), 0);
    finish(&f);
    for (uint32_t p = 0; p < N_PARAMS; p++) {
        const struct layout_param *param = &f.layout->params[p];

        expect(p,
               (float *)(void *)(window.map + (stage == 3 ? param->range_offset_bytes : param->weight_offset_bytes)));
    }
    assert_int_equal(executor_load(f.executor, on_done, &f), 1); /* in host memory all are loaded */
    assert_int_equal(executor_store(f.executor, on_done, &f), 1);
    segment_deinit(&window);
    end(&f);
}

static void test_stage2(void **state)
{
    (void)state;
    test_weights(2);
}

static void test_stage3(void **state)
{
    (void)state;
    test_weights(3);
}

/* A parameter is loaded once, stays loaded when it is released, and is loaded again after the weights have changed. */
static void test_gather(void **state)
{
    static const uint32_t params[] = {FROZEN, 0, FROZEN};
    uint64_t offsets[ARRAY_SIZE(params)];
    struct fixture f;

    (void)state;
    make(&f, 3);
    give_weights(&f);
    assert_true(f.executor->gathers);
    assert_true(pools_fits(f.executor->pools, 0, params, ARRAY_SIZE(params)));
    pools_hold(f.executor->pools, 0);
    pools_hold(f.executor->pools, FROZEN);
    pools_gather(f.executor->pools, 0, params, ARRAY_SIZE(params));
    assert_true(executor_is_busy(f.executor));
    assert_int_equal(pools_find(f.executor->pools, 0, params, ARRAY_SIZE(params)), GATHER_LOADS);
    while (worker_pool_wait(f.pool) > 0)
        ;
    assert_int_equal(f.n_loaded, 1);
    assert_int_equal(pools_find(f.executor->pools, 0, params, ARRAY_SIZE(params)), GATHER_THERE);
    assert_false(pools_places(f.executor->pools, 0, params, ARRAY_SIZE(params), offsets));
    for (uint32_t p = 0; p < N_PARAMS; p++)
        expect(p, (float *)(void *)(f.executor->landing->map + f.layout->params[p].range_offset_bytes));
    pools_release(f.executor->pools, FROZEN);
    pools_hint(f.executor->pools, 0, params, ARRAY_SIZE(params)); /* nothing is missing */
    assert_false(executor_is_busy(f.executor));
    assert_true(pools_held_bytes(f.executor->pools) >= 2 * N_ELEMS * sizeof(float));
    assert_int_equal(pools_find(f.executor->pools, 0, params, ARRAY_SIZE(params)), GATHER_THERE);
    pools_release(f.executor->pools, 0);
    end(&f);
}

/* Equal bytes have equal sums, wherever they are. */
static void test_verify(void **state)
{
    struct ring_slot slot = {0};
    struct fixture f;
    uint64_t first;

    (void)state;
    make(&f, 2);
    give_weights(&f);
    slot.data = f.ring->ring.map;
    assert_int_equal(
        executor_verify(f.executor, &(struct executor_verify){.slot = &slot, .done = on_sum, .userdata = &f}), 0);
    finish(&f);
    first = f.sum;
    f.ring->ring.map[0] ^= 1;
    assert_int_equal(
        executor_verify(f.executor, &(struct executor_verify){.slot = &slot, .done = on_sum, .userdata = &f}), 0);
    finish(&f);
    assert_true(f.sum != first);
    assert_false(executor_awaits(f.executor, 0, 1));
    executor_attend(f.executor, 0, TRAINER_LOST, 1);
    end(&f);
}

/* Makes chunks' second places valid, as accepted early updates do, with these exp_avg there. */
static void turn_all(const struct fixture *f, uint64_t op, float exp_avg)
{
    const struct state *state = f->executor->state;

    for (uint32_t c = 0; c < f->layout->n_chunks; c++) {
        struct state_place spare = spare_place(state, c);

        assert_true(spare_has(state, c));
        for (uint32_t i = 0; i < f->layout->chunks[c].n_elems; i++)
            ((float *)spare.exp_avg)[i] = exp_avg;
        spare_turn(state, c, op);
    }
}

static void expect_exp_avg(struct fixture *f, float expected)
{
    float values[N_ELEMS] = {0};

    assert_int_equal(executor_read(f->executor, &(struct executor_read){.param = 0,
                                                                        .kind = STATE_EXP_AVG,
                                                                        .dst = values,
                                                                        .done = on_done,
                                                                        .userdata = f}),
                     0);
    finish(f);
    for (uint64_t i = 0; i < N_ELEMS; i++)
        assert_true(values[i] == expected);
}

/* A resize, also one that fails for lack of descriptors, keeps the values of chunks that were updated early. */
static void test_resize(void **state)
{
    struct layout *wider = make_layout(2);
    struct rlimit before, none;
    struct fixture f;

    (void)state;
    make_with_spares(&f, 2, 1);
    give_weights(&f);
    turn_all(&f, 1, 7);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = (struct rlimit){.rlim_cur = 3, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    assert_int_equal(executor_repartition(f.executor, wider, 0), -EMFILE);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    expect_exp_avg(&f, 7);

    turn_all(&f, 2, 8);
    expect_exp_avg(&f, 8);
    assert_int_equal(executor_repartition(f.executor, wider, 0), 0);
    expect_exp_avg(&f, 8);
    layout_free(f.layout);
    f.layout = wider;
    turn_all(&f, 3, 9);
    expect_exp_avg(&f, 9);
    end(&f);
}

/* Before a job is formed there is no executor. */
static void test_none(void **state)
{
    (void)state;
    executor_cancel(NULL);
    executor_stop(NULL);
    executor_free(NULL);
    assert_false(executor_is_busy(NULL));
    assert_false(executor_awaits(NULL, 0, 1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stage2), cmocka_unit_test(test_stage3), cmocka_unit_test(test_gather),
        cmocka_unit_test(test_verify), cmocka_unit_test(test_resize), cmocka_unit_test(test_none),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
