/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Transfers copy whole parameters from the state to a segment and back, for every stage and every choice of places.
 * They copy only the named parameters, reserve only their pages, and call done() once, on the thread that reaps, also
 * when memory runs out.
 */

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "daemon/memory/transfer.h"
#include "daemon/memory/weights.h"
#include "tests/golden/gradients.h"
#include "tests/group.h"

enum { WORLD = 2, N_PARAMS = 5, LARGE_ELEMS = 300 * 1000 };

/* Parameter 0 is copied in several pieces, 2 has no elements, and the last two are frozen. */
static const uint64_t shapes[N_PARAMS] = {LARGE_ELEMS, 1000, 0, 70 * 1000, 3};
static const enum dtype dtypes[N_PARAMS] = {DTYPE_BF16, DTYPE_F32, DTYPE_F32, DTYPE_F16, DTYPE_F32};

struct fixture {
    struct layout *layout;
    struct state *state;
    struct segment segment;
    struct worker_pool *pool;
    const struct kernels *kernels;
    pthread_t thread;
    bool range;
    unsigned n_done;
    int result;
};

static void ignore_notice(void *userdata)
{
    (void)userdata;
}

static struct state *make_state(const struct fixture *f, unsigned stage)
{
    struct state *s = NULL;

    assert_int_equal(state_new(&s, &(struct state_options){.layout = f->layout, .stage = stage, .n_ranks = WORLD}), 0);
    return s;
}

/* Makes a fixture whose segment has exactly the size that all places need. */
static void make(struct fixture *f, unsigned stage, bool range)
{
    struct layout_decl decls[N_PARAMS];
    char names[N_PARAMS][4];
    uint32_t bad;

    *f = (struct fixture){.kernels = kernels_nth(0), .thread = pthread_self(), .range = range, .result = 12345};
    for (unsigned p = 0; p < N_PARAMS; p++) {
        snprintf(names[p], sizeof(names[p]), "p%u", p);
        decls[p] = (struct layout_decl){
            .name = names[p], .name_len = 2, .dtype = dtypes[p], .trainable = p < 3, .n_dims = 1, .shape = &shapes[p]};
    }
    assert_int_equal(layout_new(&f->layout, decls, N_PARAMS, WORLD, LARGE_ELEMS, &bad), 0);
    f->state = make_state(f, stage);
    assert_int_equal(segment_init(&f->segment, "window", range ? f->layout->range_bytes : f->layout->weight_bytes), 0);
    assert_int_equal(worker_pool_new(&f->pool, 3, ignore_notice, NULL), 0);
}

static void done_with(struct fixture *f)
{
    worker_pool_free(f->pool);
    segment_deinit(&f->segment);
    state_free(f->state);
    layout_free(f->layout);
}

static void note_done(void *userdata, int result)
{
    struct fixture *f = userdata;

    assert_true(pthread_equal(pthread_self(), f->thread));
    f->n_done++;
    f->result = result;
}

static struct transfer_options options_of(struct fixture *f, enum transfer_direction direction)
{
    return (struct transfer_options){.state = f->state,
                                     .kernels = f->kernels,
                                     .segment = &f->segment,
                                     .n_params = N_PARAMS,
                                     .range = f->range,
                                     .direction = direction,
                                     .done = note_done,
                                     .userdata = f};
}

static int transfer(struct fixture *f, const struct transfer_options *options)
{
    unsigned n_done = f->n_done;

    assert_int_equal(transfer_start(f->pool, options), 0);
    assert_int_equal(f->n_done, n_done); /* done() is called only when a thread reaps */
    while (f->n_done == n_done)
        assert_true(worker_pool_wait(f->pool) > 0);
    assert_int_equal(f->n_done, n_done + 1);
    return f->result;
}

static uint8_t *place_of(const struct fixture *f, uint32_t param)
{
    const struct layout_param *p = &f->layout->params[param];

    return f->segment.map + (f->range ? p->range_offset_bytes : p->weight_offset_bytes);
}

/* Return: a parameter's weights, which are finite and differ between elements. The caller frees them. */
static uint8_t *values_of(const struct fixture *f, uint32_t param, uint64_t seed)
{
    uint64_t key = gradient_weights_key(seed, param);
    uint8_t *values = malloc(shapes[param] * 4 + 1);

    assert_non_null(values);
    for (uint64_t i = 0; i < shapes[param]; i++) {
        float value = gradient_value(key, i);

        f->kernels->convert_from_f32(values + i * dtype_size(dtypes[param]), &value, dtypes[param], 1);
    }
    return values;
}

static void fill_state(const struct fixture *f, uint64_t seed)
{
    for (uint32_t p = 0; p < N_PARAMS; p++) {
        _cleanup_free_ uint8_t *values = values_of(f, p, seed);

        weights_store(f->state, f->kernels, p, 0, shapes[p], values);
    }
}

static void assert_values(const struct fixture *f, uint32_t param, uint64_t seed, const uint8_t *actual)
{
    _cleanup_free_ uint8_t *values = values_of(f, param, seed);

    assert_memory_equal(actual, values, shapes[param] * dtype_size(dtypes[param]));
}

static void assert_state(const struct fixture *f, uint32_t param, uint64_t seed)
{
    _cleanup_free_ uint8_t *actual = malloc(shapes[param] * 4 + 1);

    assert_non_null(actual);
    weights_fetch(f->state, f->kernels, param, 0, shapes[param], actual);
    assert_values(f, param, seed, actual);
}

static uint64_t held_bytes(const struct segment *segment)
{
    struct stat st;

    assert_int_equal(fstat(segment->fd, &st), 0);
    return (uint64_t)st.st_blocks * 512;
}

/* ---- everything there and back ------------------------------------------------------------------------- */

/* Gathers, or fills a window. Then commits the segment into a state whose weights are not set. */
static void there_and_back(unsigned stage, bool range)
{
    struct transfer_options fetch, store;
    struct fixture f;

    make(&f, stage, range);
    fill_state(&f, 1);
    fetch = options_of(&f, TRANSFER_FETCH);
    assert_int_equal(transfer(&f, &fetch), 0);
    for (uint32_t p = 0; p < N_PARAMS; p++)
        assert_values(&f, p, 1, place_of(&f, p));

    state_free(f.state);
    f.state = make_state(&f, stage);
    store = options_of(&f, TRANSFER_STORE);
    assert_int_equal(transfer(&f, &store), 0);
    for (uint32_t p = 0; p < N_PARAMS; p++)
        assert_state(&f, p, 1);
    done_with(&f);
}

static void test_there_and_back(void **state)
{
    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++) {
        there_and_back(stage, true);
        there_and_back(stage, false);
    }
}

/* ---- some of them -------------------------------------------------------------------------------------- */

/* Fetches parameters in any order. The caller may change its list as soon as the call returns. */
static void test_fetch_some(void **state)
{
    static const bool named[N_PARAMS] = {false, true, false, true, false};
    struct transfer_options fetch;
    uint64_t n_bytes = 0;
    struct fixture f;

    (void)state;
    make(&f, 3, true);
    fill_state(&f, 1);
    for (unsigned round = 0; round < 2; round++) { /* in round 1 the pages exist */
        uint32_t params[] = {3, 1};

        fetch = options_of(&f, TRANSFER_FETCH);
        fetch.params = params;
        fetch.n_params = ARRAY_SIZE(params);
        assert_int_equal(transfer_start(f.pool, &fetch), 0);
        params[0] = params[1] = 0;
        fetch.params = NULL;
        while (f.n_done == round)
            assert_true(worker_pool_wait(f.pool) > 0);
        assert_int_equal(f.result, 0);
    }
    /* Only pages of the named parameters are reserved, because a rank may have a limited number of elements. */
    for (uint32_t p = 0; p < N_PARAMS; p++)
        if (named[p])
            n_bytes += round_up(shapes[p] * dtype_size(dtypes[p]), page_size());
    assert_int_equal(held_bytes(&f.segment), n_bytes);
    for (uint32_t p = 0; p < N_PARAMS; p++)
        if (named[p])
            assert_values(&f, p, 1, place_of(&f, p));
    done_with(&f);
}

static void test_store_some(void **state)
{
    const uint32_t params[] = {0, 4};
    struct transfer_options fetch, store;
    struct fixture f;

    (void)state;
    make(&f, 1, false);
    fill_state(&f, 2);
    fetch = options_of(&f, TRANSFER_FETCH);
    assert_int_equal(transfer(&f, &fetch), 0);
    fill_state(&f, 1);
    store = options_of(&f, TRANSFER_STORE);
    store.params = params;
    store.n_params = ARRAY_SIZE(params);
    assert_int_equal(transfer(&f, &store), 0);
    for (uint32_t p = 0; p < N_PARAMS; p++)
        assert_state(&f, p, p == 0 || p == 4 ? 2 : 1);
    done_with(&f);
}

/* A transfer of no parameter, or of one without elements, calls done() like any other. */
static void test_nothing(void **state)
{
    const uint32_t empty[] = {2, 2};
    struct transfer_options fetch;
    struct fixture f;

    (void)state;
    make(&f, 3, true);
    fetch = options_of(&f, TRANSFER_FETCH);
    fetch.n_params = 0;
    assert_int_equal(transfer(&f, &fetch), 0);
    fetch.params = empty;
    fetch.n_params = ARRAY_SIZE(empty);
    assert_int_equal(transfer(&f, &fetch), 0);
    assert_int_equal(held_bytes(&f.segment), 0);
    done_with(&f);
}

/* A window without writes changes nothing, not even the bits of masters that 16-bit weights lack. */
static void test_commit_unchanged(void **state)
{
    struct transfer_options options;
    struct fixture f;
    float *master;

    (void)state;
    make(&f, 3, true);
    master = state_master(f.state, f.layout->params[0].bucket, f.layout->params[0].offset_elems + LARGE_ELEMS - 1);
    *master = 1.0f + 0x1p-15f;
    options = options_of(&f, TRANSFER_FETCH);
    assert_int_equal(transfer(&f, &options), 0);
    options.direction = TRANSFER_STORE;
    assert_int_equal(transfer(&f, &options), 0);
    assert_int_equal(gradient_bits(*master), gradient_bits(1.0f + 0x1p-15f));
    done_with(&f);
}

/* ---- no memory ----------------------------------------------------------------------------------------- */

/* Pages cannot be reserved, because they are beyond the segment's end, where a write would raise SIGBUS. */
static void test_reserving_fails(void **state)
{
    struct transfer_options fetch;
    const uint32_t small = 1;
    struct fixture f;

    (void)state;
    make(&f, 3, true);
    fill_state(&f, 1);
    segment_deinit(&f.segment);
    assert_int_equal(segment_init(&f.segment, "window", LARGE_ELEMS), 0); /* half of parameter 0 */
    fetch = options_of(&f, TRANSFER_FETCH);
    fetch.n_params = 1;
    assert_int_equal(transfer(&f, &fetch), -EPERM);
    assert_int_equal(f.n_done, 1); /* called once, although several pieces failed */

    /* The next transfer is not affected. */
    segment_deinit(&f.segment);
    assert_int_equal(segment_init(&f.segment, "window", f.layout->range_bytes), 0);
    fetch.params = &small;
    assert_int_equal(transfer(&f, &fetch), 0);
    assert_values(&f, 1, 1, place_of(&f, 1));
    done_with(&f);
}

/* Several transfers at once, each with its own done(). */
static void test_several(void **state)
{
    struct transfer_options fetch;
    struct fixture f;

    (void)state;
    make(&f, 2, true);
    fill_state(&f, 1);
    for (uint32_t p = 0; p < N_PARAMS; p++) {
        fetch = options_of(&f, TRANSFER_FETCH);
        fetch.params = &p;
        fetch.n_params = 1;
        assert_int_equal(transfer_start(f.pool, &fetch), 0);
    }
    while (f.n_done < N_PARAMS)
        assert_true(worker_pool_wait(f.pool) > 0);
    for (uint32_t p = 0; p < N_PARAMS; p++)
        assert_values(&f, p, 1, place_of(&f, p));
    assert_int_equal(f.n_done, N_PARAMS);
    done_with(&f);
}

TEST_GROUP(transfer)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_there_and_back),   cmocka_unit_test(test_fetch_some),
        cmocka_unit_test(test_store_some),       cmocka_unit_test(test_nothing),
        cmocka_unit_test(test_commit_unchanged), cmocka_unit_test(test_reserving_fails),
        cmocka_unit_test(test_several),
    };

    return cmocka_run_group_tests_name("transfer", tests, NULL, NULL);
}
