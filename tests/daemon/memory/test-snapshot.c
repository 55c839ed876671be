/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A snapshot. Several workers put chunks aside and overwrite them, while one thread reads all arrays in a random order.
 * It must find the values of the moment of the snapshot. No thread may hang, whatever the pool's size.
 */

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "daemon/memory/snapshot.h"
#include "daemon/memory/state.h"
#include "tests/group.h"
#include "tests/tiers.h"

enum { WORLD = 2, N_WORKERS = 4, SLOT_BYTES = 64 * 1024, HANG_S = 120 };

struct worker {
    struct world *world;
    pthread_t thread;
    uint64_t random;
};

struct world {
    struct layout *layout;
    struct state *state;
    struct snapshot_pool *pool;
    struct snapshot *snapshot;
    uint8_t **expected; /* [SNAPSHOT_N_ARRAYS for each chunk]; NULL if there is no such array */
    pthread_mutex_t *chunk_locks;
    atomic_bool over;
    atomic_uint n_written;
    struct worker workers[N_WORKERS];
};

static uint64_t next(uint64_t *random)
{
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    return *random;
}

static struct layout *make_layout(void)
{
    static const uint64_t shapes[] = {150000, 300, 70000, 0, 5000, 33, 1};
    static const enum dtype dtypes[] = {DTYPE_BF16, DTYPE_F32, DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_F32, DTYPE_F16};
    struct layout_decl decls[ARRAY_SIZE(shapes)];
    struct layout *layout = NULL;
    uint32_t bad;

    for (unsigned p = 0; p < ARRAY_SIZE(shapes); p++)
        decls[p] = (struct layout_decl){.name = &"abcdefg"[p],
                                        .name_len = 1,
                                        .dtype = dtypes[p],
                                        .trainable = p != 5,
                                        .n_dims = 1,
                                        .shape = &shapes[p]};
    assert_int_equal(layout_new(&layout, decls, ARRAY_SIZE(shapes), WORLD, 100000, &bad), 0);
    return layout;
}

/* Return: the place of a chunk's array, as state.h defines it for updates. Sets n_bytes. */
static uint8_t *place_of(const struct state *state, uint32_t id, unsigned array, size_t *n_bytes)
{
    const struct layout_chunk *chunk = &state->layout->chunks[id];
    const struct layout_param *p = &state->layout->params[chunk->param];
    bool is_short = p->dtype != DTYPE_F32, master24 = state_is_master24(state, p->bucket);
    struct master24 masters = {0};

    if (master24)
        masters = state_master24(state, p->bucket, p->offset_elems + chunk->start_elem);
    *n_bytes = snapshot_bytes(state, array, chunk->n_elems);
    if (array == SNAPSHOT_LOWER || (master24 && array == SNAPSHOT_MASTER))
        return array == SNAPSHOT_LOWER ? (uint8_t *)masters.lower : NULL;
    if (array == SNAPSHOT_WEIGHTS && master24)
        return (uint8_t *)masters.weights;
    if (array == SNAPSHOT_WEIGHTS)
        return is_short && state->stage != 3 ? state_weights(state, chunk->param, chunk->start_elem) : NULL;
    return (uint8_t *)state_values(state, array, p->bucket, p->offset_elems + chunk->start_elem);
}

static struct world *world_new(unsigned stage, struct optimizer_moments moments, uint64_t pool_bytes)
{
    struct world *w = calloc(1, sizeof(*w));
    struct state_options options;
    uint64_t random = 99;

    w->layout = make_layout();
    options = (struct state_options){.layout = w->layout, .stage = stage, .n_ranks = WORLD, .moments = moments};
    assert_int_equal(state_new(&w->state, &options), 0);
    w->expected = calloc(w->layout->n_chunks * SNAPSHOT_N_ARRAYS, sizeof(*w->expected));
    w->chunk_locks = calloc(w->layout->n_chunks, sizeof(*w->chunk_locks));
    assert_int_equal(snapshot_pool_new(&w->pool, pool_bytes), 0);
    assert_int_equal(snapshot_new(&w->snapshot, w->state, w->pool), 0);
    for (uint32_t c = 0; c < w->layout->n_chunks; c++) {
        pthread_mutex_init(&w->chunk_locks[c], NULL);
        for (unsigned array = 0; array < SNAPSHOT_N_ARRAYS; array++) {
            size_t n_bytes;
            uint8_t *at = place_of(w->state, c, array, &n_bytes);

            if (!at)
                continue;
            for (size_t i = 0; i + 2 <= n_bytes; i += 2)
                memcpy(at + i, &(uint16_t){(uint16_t)next(&random)}, 2);
            w->expected[c * SNAPSHOT_N_ARRAYS + array] = memcpy(malloc(n_bytes), at, n_bytes);
        }
    }
    return w;
}

static void world_free(struct world *w)
{
    for (uint32_t c = 0; c < w->layout->n_chunks; c++)
        pthread_mutex_destroy(&w->chunk_locks[c]);
    for (uint32_t i = 0; i < w->layout->n_chunks * SNAPSHOT_N_ARRAYS; i++)
        free(w->expected[i]);
    free(w->expected);
    free(w->chunk_locks);
    snapshot_free(w->snapshot);
    snapshot_pool_rest(w->pool);
    snapshot_pool_free(w->pool);
    state_free(w->state);
    layout_free(w->layout);
    free(w);
}

/* ---- workers ------------------------------------------------------------------------------------------- */

/* Does one update of one chunk. Updates of the same chunk exclude each other. */
static void update(struct world *w, uint32_t chunk, uint8_t value)
{
    pthread_mutex_lock(&w->chunk_locks[chunk]);
    snapshot_put_aside(w->snapshot, chunk);
    for (unsigned array = 0; array < SNAPSHOT_N_ARRAYS; array++) {
        size_t n_bytes;
        uint8_t *at = place_of(w->state, chunk, array, &n_bytes);

        if (at)
            memset(at, value, n_bytes);
    }
    pthread_mutex_unlock(&w->chunk_locks[chunk]);
    atomic_fetch_add(&w->n_written, 1);
}

static void *run_worker(void *userdata)
{
    struct worker *worker = userdata;
    struct world *w = worker->world;

    while (!w->over)
        update(w, (uint32_t)(next(&worker->random) % w->layout->n_chunks), (uint8_t)worker->random);
    return NULL;
}

static void begin_workers(struct world *w)
{
    for (unsigned i = 0; i < N_WORKERS; i++) {
        w->workers[i] = (struct worker){.world = w, .random = i + 1};
        assert_int_equal(pthread_create(&w->workers[i].thread, NULL, run_worker, &w->workers[i]), 0);
    }
}

static void end_workers(struct world *w)
{
    w->over = true;
    for (unsigned i = 0; i < N_WORKERS; i++)
        pthread_join(w->workers[i].thread, NULL);
}

/* ---- the reader ---------------------------------------------------------------------------------------- */

static void check_array(struct world *w, uint32_t id, bool last)
{
    static uint8_t values[CHUNK_ELEMS * sizeof(float)];
    uint32_t chunk = id / SNAPSHOT_N_ARRAYS;
    unsigned array = id % SNAPSHOT_N_ARRAYS;
    size_t n_bytes;

    if (!place_of(w->state, chunk, array, &n_bytes))
        return;
    memset(values, 0, n_bytes);
    snapshot_read(w->snapshot, chunk, array, values, last);
    assert_memory_equal(values, w->expected[id], n_bytes);
}

/* Reads each array in a random order, and some of them twice. */
static void read_all(struct world *w, uint64_t random)
{
    uint32_t n = w->layout->n_chunks * SNAPSHOT_N_ARRAYS;
    uint32_t *order = malloc(n * sizeof(*order));

    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = (uint32_t)(next(&random) % (i + 1));

        order[i] = order[k];
        order[k] = i;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (next(&random) % 4 == 0)
            check_array(w, order[next(&random) % (n - i) + i], false);
        if (next(&random) % 4 == 0)
            usleep(100); /* as with a slow disk */
        check_array(w, order[i], true);
        (void)snapshot_waited_ns(w->snapshot);
        (void)snapshot_peak_bytes(w->snapshot);
    }
    free(order);
}

static void check_round(unsigned stage, struct optimizer_moments moments, uint64_t pool_bytes, uint64_t random)
{
    struct world *w = world_new(stage, moments, pool_bytes);
    unsigned n_written;

    snapshot_pool_warm(w->pool);
    begin_workers(w);
    read_all(w, random);
    n_written = w->n_written;
    while (w->n_written < n_written + 2 * N_WORKERS) /* no worker waits any more */
        usleep(100);
    snapshot_give_up(w->snapshot);
    end_workers(w);
    assert_true(snapshot_peak_bytes(w->snapshot) <= pool_bytes);
    if (pool_bytes == 0)
        assert_int_equal(snapshot_peak_bytes(w->snapshot), 0);
    world_free(w);
}

static void test_model(void **state)
{
    static const uint64_t pools[] = {
        0, SLOT_BYTES, 3 * SLOT_BYTES + 5, 4 * SLOT_BYTES, 9 * SLOT_BYTES, UINT64_C(1) << 30};
    static const struct optimizer_moments moments[] = {
        {true, true, {DTYPE_SIGNED8}, true}, {false, true}, {true, false}, {false, false}, {true, true, {DTYPE_BF16}}};

    (void)state;
    alarm(HANG_S);
    for (unsigned round = 0; round < tests_some(16); round++)
        for (size_t i = 0; i < ARRAY_SIZE(pools); i++)
            check_round(2 + round % 2, moments[round / 2 % ARRAY_SIZE(moments)], pools[i], 1 + round);
    alarm(0);
}

/* ---- without a reader ---------------------------------------------------------------------------------- */

/* All chunks are put aside before anything is read. */
static void test_everything_aside(void **state)
{
    struct world *w = world_new(2, (struct optimizer_moments){true, true, {DTYPE_SIGNED8}}, UINT64_C(1) << 30);
    uint64_t n_bytes = 0;

    (void)state;
    for (uint32_t c = 0; c < w->layout->n_chunks; c++) {
        update(w, c, 1);
        update(w, c, 2); /* the second update puts nothing aside */
        for (unsigned array = 0; array < SNAPSHOT_N_ARRAYS; array++) {
            size_t n;

            if (place_of(w->state, c, array, &n))
                n_bytes += round_up(n, SLOT_BYTES);
        }
    }
    assert_int_equal(snapshot_peak_bytes(w->snapshot), n_bytes);
    assert_int_equal(snapshot_waited_ns(w->snapshot), 0);
    read_all(w, 5);
    world_free(w);
}

/* The pool has room for one chunk. Its arrays must be read before the next chunk is put aside. */
static void test_room_again(void **state)
{
    struct world *w = world_new(2, (struct optimizer_moments){true, true}, 14 * SLOT_BYTES);

    (void)state;
    alarm(HANG_S);
    for (uint32_t c = 0; c < w->layout->n_chunks; c++) {
        update(w, c, 1);
        for (unsigned array = 0; array < SNAPSHOT_N_ARRAYS; array++) {
            check_array(w, c * SNAPSHOT_N_ARRAYS + array, false);
            check_array(w, c * SNAPSHOT_N_ARRAYS + array, true);
        }
    }
    alarm(0);
    assert_int_equal(snapshot_peak_bytes(w->snapshot), 14 * SLOT_BYTES);
    world_free(w);
}

/* A chunk that was read already is not put aside. */
static void test_read_before(void **state)
{
    struct world *w = world_new(3, (struct optimizer_moments){true, true}, UINT64_C(1) << 30);

    (void)state;
    read_all(w, 5);
    for (uint32_t c = 0; c < w->layout->n_chunks; c++)
        update(w, c, 1);
    assert_int_equal(snapshot_peak_bytes(w->snapshot), 0);
    world_free(w);
}

/* The workers wait for a reader that does not read, until the snapshot is given up. */
static void test_give_up(void **state)
{
    struct world *w = world_new(2, (struct optimizer_moments){true, true}, 2 * SLOT_BYTES);
    unsigned n_written;

    (void)state;
    alarm(HANG_S);
    begin_workers(w);
    do {
        n_written = w->n_written;
        usleep(20000);
    } while (w->n_written != n_written);
    snapshot_give_up(w->snapshot);
    while (w->n_written < n_written + 100)
        usleep(100);
    end_workers(w);
    assert_true(snapshot_waited_ns(w->snapshot) > 0);
    alarm(0);
    world_free(w);
}

static void test_free_nothing(void **state)
{
    (void)state;
    snapshot_free(NULL);
}

TEST_GROUP(snapshot)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),      cmocka_unit_test(test_everything_aside),
        cmocka_unit_test(test_room_again), cmocka_unit_test(test_read_before),
        cmocka_unit_test(test_give_up),    cmocka_unit_test(test_free_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
