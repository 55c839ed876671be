/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Two steps with the same gradients, of which one updates chunks before the decision: all values are equal to the bit,
 * whatever was assumed.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/worker.h"
#include "core/layout/layout.h"
#include "daemon/memory/snapshot.h"
#include "daemon/memory/spare.h"
#include "daemon/memory/weights.h"
#include "daemon/step/speculation.h"
#include "daemon/step/step.h"
#include "tests/golden/gradients.h"

enum { WORLD = 2, N_PARAMS = 4, BUCKET_ELEMS = 100000, LARGEST = 2 * CHUNK_ELEMS + 77 };

static const uint64_t shapes[N_PARAMS] = {LARGEST, 130, 5000, 1};
static const enum dtype dtypes[N_PARAMS] = {DTYPE_BF16, DTYPE_F32, DTYPE_F16, DTYPE_BF16};

/* What the optimizer keeps, and in which types. */
struct kind {
    const char *name;
    enum optimizer optimizer;
    struct optimizer_moments moments;
};

static const struct kind kinds[] = {
    {"AdamW", OPTIMIZER_ADAMW, {.m = true, .v = true}},
    {"AdamW, bf16", OPTIMIZER_ADAMW, {.m = true, .v = true, .type = {.dtype = DTYPE_BF16, .stochastic = true}}},
    {"AdamW, 8 bits",
     OPTIMIZER_ADAMW,
     {.m = true, .v = true, .type = {.dtype = DTYPE_SIGNED8, .stochastic = true}, .master24 = true}},
    {"SGD", OPTIMIZER_SGD, {.m = true}},
    {"SGD without momentum", OPTIMIZER_SGD, {.m = false}},
    {"Lion, 24 bits", OPTIMIZER_LION, {.m = true, .master24 = true}},
    {"Adagrad", OPTIMIZER_ADAGRAD, {.v = true}},
};

static uint32_t n_spares = UINT32_MAX; /* buckets with spare places in the fixture */

/* make() sets their momentum. */
static struct hyper usual = {
    .lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.01, .adam_w_mode = true};
static struct hyper slower = {
    .lr = 0.05, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.01, .adam_w_mode = true};

struct fixture {
    struct layout *layout;
    struct worker_pool *pool;
    const struct kernels *kernels;
    struct state *state[2]; /* [1]: with spare places */
    struct step *step[2];
    uint8_t *slots[WORLD];
    unsigned n_done, n_speculated, n_posted; /* sums and updates; parcels that are done, and posted */
};

static void ignore_notice(void *userdata)
{
    (void)userdata;
}

static void make_core(struct fixture *f, const struct kind *kind, unsigned which)
{
    assert_int_equal(state_new(&f->state[which], &(struct state_options){.layout = f->layout,
                                                                         .stage = 2,
                                                                         .n_ranks = WORLD,
                                                                         .moments = kind->moments,
                                                                         .n_spares = which * n_spares}),
                     0);
    assert_int_equal(step_new(&f->step[which], &(struct step_options){.state = f->state[which],
                                                                      .kernels = f->kernels,
                                                                      .pool = f->pool,
                                                                      .n_local = WORLD,
                                                                      .optimizer = kind->optimizer}),
                     0);
}

static void make(struct fixture *f, const struct kind *kind)
{
    struct layout_decl decls[N_PARAMS];
    char names[N_PARAMS][8], why[128];
    uint32_t bad;

    *f = (struct fixture){0};
    usual.momentum = slower.momentum = kind->moments.m ? 0.9 : 0;
    for (unsigned p = 0; p < N_PARAMS; p++) {
        snprintf(names[p], sizeof(names[p]), "p%u", p);
        decls[p] = (struct layout_decl){.name = names[p],
                                        .name_len = 2,
                                        .grad_dtype = DTYPE_F32,
                                        .dtype = dtypes[p],
                                        .trainable = true,
                                        .n_dims = 1,
                                        .shape = &shapes[p]};
    }
    assert_int_equal(layout_new(&f->layout, decls, N_PARAMS, WORLD, BUCKET_ELEMS, &bad), 0);
    assert_int_equal(worker_pool_new(&f->pool, 2, ignore_notice, NULL), 0);
    assert_int_equal(kernels_select(&f->kernels, NULL, why, sizeof(why)), 0);
    for (unsigned which = 0; which < 2; which++)
        make_core(f, kind, which);
    for (unsigned rank = 0; rank < WORLD; rank++)
        f->slots[rank] = malloc(f->layout->arena_bytes);
}

static void done_with(struct fixture *f)
{
    worker_pool_free(f->pool);
    for (unsigned which = 0; which < 2; which++) {
        step_free(f->step[which]);
        state_free(f->state[which]);
    }
    for (unsigned rank = 0; rank < WORLD; rank++)
        free(f->slots[rank]);
    layout_free(f->layout);
}

/* ---- a step -------------------------------------------------------------------------------------------- */

static void note_reduced(void *userdata, struct reduction *reduction)
{
    (void)reduction;
    ((struct fixture *)userdata)->n_done++;
}

static void note_updated(void *userdata, int result)
{
    assert_int_equal(result, 0);
    ((struct fixture *)userdata)->n_done++;
}

static void note_speculated(void *userdata)
{
    ((struct fixture *)userdata)->n_speculated++;
}

static void wait_for(struct fixture *f, unsigned n_done)
{
    while (f->n_done < n_done)
        assert_true(worker_pool_wait(f->pool) > 0);
}

/* Both steps add the gradients of a micro-batch. The last parameter has none in it. */
static void reduce(struct fixture *f, uint64_t seed, uint32_t micro)
{
    for (unsigned rank = 0; rank < WORLD; rank++) {
        uint64_t key = gradient_key(&(struct gradient_place){.seed = seed, .rank = rank, .param = micro});

        for (uint64_t i = 0; i < f->layout->arena_bytes / sizeof(float); i++)
            ((float *)(void *)f->slots[rank])[i] = gradient_value(key, i);
    }
    for (uint32_t at = 0; at < f->layout->n_parcels; at++) {
        const struct layout_parcel *parcel = &f->layout->parcels[at];
        uint64_t offset = f->layout->buckets[parcel->bucket].arena_offset_bytes + parcel->offset_elems * sizeof(float);

        for (unsigned which = 0; which < 2; which++) {
            struct reduction *reduction = step_prepare(f->step[which], at, micro, 0);

            for (unsigned rank = 0; rank < WORLD; rank++)
                reduction->sources[rank] = f->slots[rank] + offset;
            for (uint32_t k = 0; k < parcel->n_parts; k++)
                reduction->masks[k] = f->layout->parts[parcel->first_part + k].param == N_PARAMS - 1 ? 0 : 3;
            step_post(reduction, note_reduced, f);
        }
    }
    wait_for(f, f->n_done + 2 * f->layout->n_parcels);
}

static void speculate(struct fixture *f, const struct step_update *expected)
{
    uint32_t last = 0;

    assert_int_equal(f->n_speculated, 0);
    assert_int_equal(f->n_posted, 0);
    for (uint32_t at = 0; at < f->layout->n_parcels; at++)
        if (speculation_post(f->step[1]->speculation, at, expected, note_speculated, f)) {
            f->n_posted++;
            last = at;
        }
    assert_true(f->n_posted > 0 && f->n_posted < f->layout->n_parcels); /* one parcel has no gradients */
    assert_false(speculation_post(f->step[1]->speculation, last, expected, note_speculated, f)); /* still under way */
}

static void wait_for_speculation(struct fixture *f)
{
    while (f->n_speculated < f->n_posted)
        assert_true(worker_pool_wait(f->pool) > 0);
    f->n_speculated = f->n_posted = 0;
}

static void open_both(struct fixture *f)
{
    step_open(f->step[0]);
    step_open(f->step[1]);
}

static void check_equal(const struct fixture *f)
{
    static float values[2][CHUNK_ELEMS];

    for (uint32_t c = 0; c < f->layout->n_chunks; c++) {
        const struct layout_chunk *chunk = &f->layout->chunks[c];
        uint32_t bucket = f->layout->params[chunk->param].bucket;

        for (enum state_kind kind = STATE_MASTER; kind < STATE_N_KINDS; kind++) {
            if (!state_has(f->state[0], kind, bucket))
                continue;
            for (unsigned which = 0; which < 2; which++)
                weights_widen(f->state[which], f->kernels, c, kind, values[which]);
            assert_memory_equal(values[0], values[1], chunk->n_elems * sizeof(float));
        }
    }
    assert_memory_equal(f->state[0]->weights.map, f->state[1]->weights.map, f->layout->weight_bytes);
}

/* Both steps are decided. Checks that all values are equal. */
static void update(struct fixture *f, const struct step_update *decided)
{
    unsigned n_before = f->n_done;

    for (unsigned which = 0; which < 2; which++)
        step_update(f->step[which], decided, note_updated, f);
    wait_for(f, n_before + 2);
    for (unsigned which = 0; which < 2; which++) {
        step_commit(f->step[which]);
        f->state[which]->progress.epoch++;
    }
    check_equal(f);
    open_both(f);
}

static struct speculation_counts counts_since(const struct fixture *f, struct speculation_counts *before)
{
    struct speculation_counts now = speculation_counts(f->step[1]->speculation);
    struct speculation_counts since = {.n_accepted = now.n_accepted - before->n_accepted,
                                       .n_elems_accepted = now.n_elems_accepted - before->n_elems_accepted,
                                       .n_dropped = now.n_dropped - before->n_dropped};

    *before = now;
    return since;
}

/* ---- tests --------------------------------------------------------------------------------------------- */

static const struct step_update whole = {.groups = &usual, .s = 0.5}, clipped = {.groups = &usual, .s = 0.25},
                                other_lr = {.groups = &slower, .s = 0.5};

/* One micro-batch, expected as `expected`, and decided as `whole`. */
static void one_step(struct fixture *f, uint64_t seed, const struct step_update *expected)
{
    reduce(f, seed, 0);
    speculate(f, expected);
    wait_for_speculation(f);
    update(f, &whole);
}

static void test_kind(const struct kind *kind)
{
    struct speculation_counts counts = {0}, since;
    struct fixture f;
    uint32_t n_chunks;

    make(&f, kind);
    n_chunks = f.layout->n_chunks - f.layout->params[N_PARAMS - 1].n_chunks;
    for (uint64_t seed = 1; seed <= 3; seed++) { /* as expected; the second step goes back to the first places */
        one_step(&f, seed, &whole);
        since = counts_since(&f, &counts);
        assert_int_equal(since.n_accepted, n_chunks);
        assert_int_equal(since.n_elems_accepted, LARGEST + 130 + 5000);
        assert_int_equal(since.n_dropped, 0);
    }
    one_step(&f, 4, &clipped);
    one_step(&f, 5, &other_lr);
    since = counts_since(&f, &counts);
    assert_int_equal(since.n_accepted + since.n_elems_accepted, 0);
    assert_int_equal(since.n_dropped, 2 * n_chunks);

    /* Another micro-batch came. Its sums are speculated on, too. */
    reduce(&f, 6, 0);
    speculate(&f, &whole);
    wait_for_speculation(&f);
    reduce(&f, 6, 1);
    speculate(&f, &whole);
    wait_for_speculation(&f);
    update(&f, &whole);
    since = counts_since(&f, &counts);
    assert_int_equal(since.n_accepted, n_chunks);
    assert_int_equal(since.n_dropped, n_chunks);

    /* The attempt is aborted while workers are at it, and the step is decided while they are. */
    reduce(&f, 7, 0);
    speculate(&f, &whole);
    open_both(&f);
    reduce(&f, 8, 0);
    wait_for_speculation(&f);
    update(&f, &whole);
    since = counts_since(&f, &counts);
    assert_int_equal(since.n_accepted + since.n_dropped, 0);
    for (uint64_t seed = 9; seed < 15; seed++) {
        reduce(&f, seed, 0);
        speculate(&f, &whole);
        update(&f, &whole);
        wait_for_speculation(&f);
    }
    done_with(&f);
}

static void test_kinds(void **userdata)
{
    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        print_message("%s\n", kinds[i].name);
        test_kind(&kinds[i]);
    }
}

/* Values of a chunk are read, stored and brought home wherever they are. */
static void test_places(void **userdata)
{
    static float ones[CHUNK_ELEMS], values[CHUNK_ELEMS];
    struct fixture f;
    uint32_t id;

    (void)userdata;
    for (size_t i = 0; i < CHUNK_ELEMS; i++)
        ones[i] = 1;
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        make(&f, &kinds[i]);
        one_step(&f, 1, &whole);
        id = f.layout->params[0].first_chunk;
        assert_true(spare_is_turned(f.state[1], id));
        for (unsigned which = 0; which < 2; which++)
            weights_store_masters(f.state[which], f.kernels, id, ones);
        weights_widen(f.state[1], f.kernels, id, STATE_MASTER, values);
        assert_memory_equal(values, ones, f.layout->chunks[id].n_elems * sizeof(float));
        check_equal(&f);
        for (uint32_t c = 0; c < f.layout->n_chunks; c++)
            spare_bring_home(f.state[1], c);
        assert_false(spare_is_turned(f.state[1], id));
        check_equal(&f);
        one_step(&f, 2, &whole);
        done_with(&f);
    }
}

/* Buckets without spare places are updated after the decision. */
static void test_a_part(void **userdata)
{
    struct fixture f;
    uint32_t n_chunks = 0;

    (void)userdata;
    n_spares = 2;
    make(&f, &kinds[0]);
    n_spares = UINT32_MAX;
    assert_true(f.layout->n_buckets > 2);
    for (uint32_t c = 0; c < f.layout->n_chunks; c++)
        n_chunks += f.layout->params[f.layout->chunks[c].param].bucket < 2 && f.layout->chunks[c].param != N_PARAMS - 1;
    for (uint64_t seed = 1; seed <= 3; seed++)
        one_step(&f, seed, &whole);
    assert_int_equal(speculation_counts(f.step[1]->speculation).n_accepted, 3 * n_chunks);
    assert_true(n_chunks > 0);
    done_with(&f);
}

static void check_snapshot(struct snapshot *snapshot, const struct fixture *f, uint32_t id, const float *expected)
{
    static float read[CHUNK_ELEMS];

    snapshot_read(snapshot, id, SNAPSHOT_EXP_AVG, read, false);
    assert_memory_equal(expected, read, f->layout->chunks[id].n_elems * sizeof(float));
}

/* A snapshot shows the values of its time, while the chunk turns twice. */
static void test_snapshot(void **userdata)
{
    static float before[CHUNK_ELEMS];
    struct snapshot_pool *pool;
    struct snapshot *snapshot;
    struct fixture f;
    uint32_t id;

    (void)userdata;
    make(&f, &kinds[0]);
    id = f.layout->params[0].first_chunk;
    assert_int_equal(snapshot_pool_new(&pool, 64 << 20), 0);
    for (uint64_t seed = 1; seed <= 4; seed += 3) {
        one_step(&f, seed, &whole);
        weights_widen(f.state[1], f.kernels, id, STATE_EXP_AVG, before);
        assert_int_equal(snapshot_new(&snapshot, f.state[1], pool), 0);
        f.state[1]->snapshot = snapshot;
        check_snapshot(snapshot, &f, id, before);
        for (uint64_t more = 1; more <= 2; more++) {
            one_step(&f, seed + more, &whole);
            check_snapshot(snapshot, &f, id, before);
        }
        f.state[1]->snapshot = NULL;
        snapshot_free(snapshot);
    }
    snapshot_pool_free(pool);
    done_with(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_a_part),
        cmocka_unit_test(test_snapshot),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
