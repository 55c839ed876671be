/* SPDX-License-Identifier: Apache-2.0 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/worker.h"
#include "core/budget/step-sizes.h"
#include "core/layout/layout.h"
#include "daemon/memory/state.h"
#include "daemon/step/published.h"
#include "daemon/step/step.h"
#include "proto/published.h"
#include "tests/golden/gradients.h"

/* ---- pieces -------------------------------------------------------------------------------------------- */

struct node {
    unsigned first, n, parent_first, parent_n;
};

/* Lists all subtrees of the tree over [lo, lo + n), as docs/numerics.md defines them. Return: their number. */
static unsigned list_nodes(unsigned lo, unsigned n, unsigned parent_lo, unsigned parent_n, struct node *nodes)
{
    unsigned split = 1, n_left;

    *nodes = (struct node){lo, n, parent_lo, parent_n};
    if (n == 1)
        return 1;
    while (split * 2 < n)
        split *= 2;
    n_left = list_nodes(lo, split, lo, n, nodes + 1);
    return 1 + n_left + list_nodes(lo + split, n - split, lo, n, nodes + 1 + n_left);
}

static bool is_inside(unsigned first, unsigned n, unsigned outer_first, unsigned outer_n)
{
    return first >= outer_first && first + n <= outer_first + outer_n;
}

/* Asserts that the pieces follow one another, are subtrees, and that none could be replaced by its parent. */
static void check_pieces(const struct node *nodes, unsigned world, unsigned first, unsigned n)
{
    struct subtree pieces[SUBTREE_MAX];
    unsigned n_pieces = subtree_find(world, first, n, pieces), at = first;

    assert_true(n_pieces >= 1 && n_pieces <= SUBTREE_MAX);
    for (unsigned i = 0; i < n_pieces; i++) {
        const struct node *node = NULL;

        for (unsigned k = 0; k < 2 * world - 1; k++)
            if (nodes[k].first == pieces[i].first && nodes[k].n == pieces[i].n)
                node = &nodes[k];
        assert_non_null(node);
        assert_int_equal(pieces[i].first, at);
        at += pieces[i].n;
        assert_true(node->n == world || !is_inside(node->parent_first, node->parent_n, first, n));
    }
    assert_int_equal(at, first + n);
}

static void test_pieces(void **userdata)
{
    static const unsigned large[] = {96, 100, 127, 128, 129, 1000, 1023, STEP_MAX_WORLD};
    static const unsigned counts[] = {1, 2, 3, 8, 31, 33, 47, 62, 63, STEP_MAX_RANKS};
    struct node nodes[2 * STEP_MAX_WORLD];

    (void)userdata;
    for (unsigned world = 1; world <= 40; world++) {
        assert_int_equal(list_nodes(0, world, 0, world, nodes), 2 * world - 1);
        for (unsigned first = 0; first < world; first++)
            for (unsigned n = 1; first + n <= world; n++)
                check_pieces(nodes, world, first, n);
    }
    for (size_t i = 0; i < ARRAY_SIZE(large); i++) {
        list_nodes(0, large[i], 0, large[i], nodes);
        for (size_t k = 0; k < ARRAY_SIZE(counts); k++)
            for (unsigned first = 0; first + counts[k] <= large[i]; first += 1 + large[i] / 100)
                check_pieces(nodes, large[i], first, counts[k]);
    }
}

static void test_known_pieces(void **userdata)
{
    struct subtree pieces[SUBTREE_MAX];

    (void)userdata;
    assert_int_equal(subtree_find(6, 0, 6, pieces), 1);
    assert_int_equal(pieces[0].n, 6);
    assert_int_equal(subtree_find(6, 2, 4, pieces), 2); /* sum ((0+1)+(2+3))+(4+5) */
    assert_int_equal(pieces[0].first, 2);
    assert_int_equal(pieces[0].n, 2);
    assert_int_equal(pieces[1].first, 4);
    assert_int_equal(subtree_find(4, 0, 3, pieces), 2);
    assert_int_equal(pieces[0].n, 2);
    assert_int_equal(subtree_find(3, 1, 2, pieces), 2); /* in the sum (0+1)+2, ranks 1 and 2 are no subtree */
    assert_int_equal(subtree_find(5, 1, 0, pieces), 0);
}

/* ---- a model and its gradients ------------------------------------------------------------------------- */

enum {
    WORLD = 6,
    N_PARAMS = 5,
    BUCKET_ELEMS = 300,
    LARGE_ELEMS = 2 * CHUNK_ELEMS + 77,
};

/* In the order of buckets, last declared first: {4}, {3, 2} of bf16, {1}, {0}. */
static const uint64_t shapes[N_PARAMS] = {LARGE_ELEMS, 0, 65, 130, 1};
static const enum dtype grad_dtypes[N_PARAMS] = {DTYPE_F32, DTYPE_F32, DTYPE_BF16, DTYPE_BF16, DTYPE_F16};

struct core {
    struct state *state;
    struct step *step;
};

struct fixture {
    struct layout *layout;
    struct worker_pool *pool;
    enum dtype wire;       /* between the two nodes */
    struct core whole;     /* has all ranks */
    struct core halves[2]; /* ranks before the split, and the others */
    uint8_t *slots[WORLD]; /* an arena for each rank */
    bool pushed[WORLD][N_PARAMS];
    struct reduction *last;
    unsigned n_done;
};

static void ignore_notice(void *userdata)
{
    (void)userdata;
}

static void make_core_with(struct core *core, struct fixture *f, unsigned stage, unsigned first, unsigned n,
                           bool publishes)
{
    const struct kernels *kernels;
    char why[128];

    assert_int_equal(kernels_select(&kernels, NULL, why, sizeof(why)), 0);
    assert_int_equal(state_new(&core->state, &(struct state_options){.layout = f->layout,
                                                                     .stage = stage,
                                                                     .first_rank = first,
                                                                     .n_ranks = n,
                                                                     .moments = {.m = true, .v = true}}),
                     0);
    assert_int_equal(step_new(&core->step, &(struct step_options){.state = core->state,
                                                                  .kernels = kernels,
                                                                  .pool = f->pool,
                                                                  .first_local = first,
                                                                  .n_local = n,
                                                                  .wire = f->wire,
                                                                  .publishes = publishes,
                                                                  .optimizer = OPTIMIZER_ADAMW}),
                     0);
}

static void make_core(struct core *core, struct fixture *f, unsigned stage, unsigned first, unsigned n)
{
    make_core_with(core, f, stage, first, n, false);
}

static void make_with(struct fixture *f, unsigned stage, unsigned split, enum dtype wire)
{
    struct layout_decl decls[N_PARAMS];
    char names[N_PARAMS][8];
    uint32_t bad;

    *f = (struct fixture){.wire = wire};
    for (unsigned p = 0; p < N_PARAMS; p++) {
        snprintf(names[p], sizeof(names[p]), "p%u", p);
        decls[p] = (struct layout_decl){.name = names[p],
                                        .name_len = 2,
                                        .grad_dtype = grad_dtypes[p],
                                        .dtype = DTYPE_BF16,
                                        .trainable = true,
                                        .n_dims = 1,
                                        .shape = &shapes[p]};
    }
    assert_int_equal(layout_new(&f->layout, decls, N_PARAMS, WORLD, BUCKET_ELEMS, &bad), 0);
    assert_int_equal(worker_pool_new(&f->pool, 2, ignore_notice, NULL), 0);
    make_core(&f->whole, f, stage, 0, WORLD);
    if (split > 0) {
        make_core(&f->halves[0], f, stage, 0, split);
        make_core(&f->halves[1], f, stage, split, WORLD - split);
    }
    for (unsigned rank = 0; rank < WORLD; rank++) {
        f->slots[rank] = malloc(f->layout->arena_bytes);
        memset(f->slots[rank], 0xff, f->layout->arena_bytes); /* NaN */
    }
}

static void make(struct fixture *f, unsigned stage, unsigned split)
{
    make_with(f, stage, split, DTYPE_F32);
}

static void done_with(struct fixture *f)
{
    worker_pool_free(f->pool);
    step_free(f->whole.step);
    state_free(f->whole.state);
    for (unsigned i = 0; i < 2; i++) {
        step_free(f->halves[i].step);
        state_free(f->halves[i].state);
    }
    for (unsigned rank = 0; rank < WORLD; rank++)
        free(f->slots[rank]);
    layout_free(f->layout);
}

static uint8_t *gradient_of(const struct fixture *f, unsigned rank, unsigned param)
{
    const struct layout_param *p = &f->layout->params[param];

    return f->slots[rank] + f->layout->buckets[p->bucket].arena_offset_bytes +
           p->offset_elems * dtype_size(p->grad_dtype);
}

static void set(const struct fixture *f, unsigned rank, unsigned param, uint64_t elem, float value)
{
    uint8_t *dst = gradient_of(f, rank, param);

    switch (grad_dtypes[param]) {
    case DTYPE_F32:
        ((float *)dst)[elem] = value;
        break;
    case DTYPE_BF16:
        ((uint16_t *)dst)[elem] = gradient_to_bf16(value);
        break;
    default:
        ((uint16_t *)dst)[elem] = gradient_to_fp16(value);
        break;
    }
}

/* Return: the value as it is stored, rounded to the gradient's dtype. */
static float value_of(const struct fixture *f, unsigned rank, unsigned param, uint64_t elem)
{
    const uint8_t *src = gradient_of(f, rank, param);
    float value;

    f->whole.step->kernels->convert_to_f32(&value, src + elem * dtype_size(grad_dtypes[param]), grad_dtypes[param], 1);
    return value;
}

/* Fills one parameter of one rank. Every eighth value is a zero of either sign. */
static void fill(struct fixture *f, unsigned rank, unsigned param, uint64_t seed)
{
    uint64_t key = gradient_key(&(struct gradient_place){.seed = seed, .rank = rank, .param = param});

    f->pushed[rank][param] = true;
    for (uint64_t i = 0; i < shapes[param]; i++)
        set(f, rank, param, i, gradient_mix(key + i) % 8 ? gradient_value(key, i) : i % 2 ? -0.0f : 0.0f);
}

static void fill_all(struct fixture *f, uint64_t seed)
{
    for (unsigned rank = 0; rank < WORLD; rank++)
        for (unsigned param = 0; param < N_PARAMS; param++)
            fill(f, rank, param, seed);
}

/* ---- reducing ------------------------------------------------------------------------------------------ */

static void note_done(void *userdata, struct reduction *reduction)
{
    struct fixture *f = userdata;

    f->last = reduction;
    f->n_done++;
}

static void wait_for(struct fixture *f, unsigned n_done)
{
    while (f->n_done < n_done)
        assert_true(worker_pool_wait(f->pool) > 0);
}

/* The core sums what its ranks have pushed of a parcel. */
static void reduce(struct fixture *f, struct core *core, uint32_t at, uint32_t micro)
{
    const struct layout_parcel *parcel = &f->layout->parcels[at];
    const struct layout_bucket *bucket = &f->layout->buckets[parcel->bucket];
    uint64_t offset_bytes = bucket->arena_offset_bytes + parcel->offset_elems * dtype_size(bucket->grad_dtype);
    struct reduction *reduction = step_prepare(core->step, at, micro, 0);

    for (unsigned i = 0; i < core->step->n_local; i++) {
        unsigned rank = core->step->first_local + i;

        reduction->sources[i] = f->slots[rank] + offset_bytes;
        for (uint32_t k = 0; k < parcel->n_parts; k++)
            if (f->pushed[rank][f->layout->parts[parcel->first_part + k].param])
                reduction->masks[k] |= UINT64_C(1) << i;
    }
    step_post(reduction, note_done, f);
    wait_for(f, f->n_done + 1);
}

static void reduce_whole(struct fixture *f, uint32_t micro)
{
    for (uint32_t at = 0; at < f->layout->n_parcels; at++)
        reduce(f, &f->whole, at, micro);
}

/* Reduces all parcels of a parameter. */
static void reduce_param(struct fixture *f, uint32_t param, uint32_t micro)
{
    const struct layout_param *p = &f->layout->params[param];

    for (uint32_t i = 0; i < p->n_parts; i++)
        reduce(f, &f->whole, f->layout->parts[p->first_part + i].parcel, micro);
}

/* After both halves have reduced the parcel, adds the pieces of both to the accumulators that `core` owns. */
static void combine(struct fixture *f, struct core *core, uint32_t at, uint32_t micro)
{
    const struct layout_parcel *parcel = &f->layout->parcels[at];
    struct reduction *reduction = step_combine(core->step, at, micro, 0);

    for (unsigned h = 0; h < 2; h++) {
        const struct step *from = f->halves[h].step;

        for (unsigned i = 0; i < from->n_pieces; i++) {
            unsigned source = reduction->n_sources++;

            reduction->sources[source] = step_piece(from, at, i);
            if (step_gets_slots(from, from->n_local, at))
                reduction->slots |= UINT64_C(1) << source;
            reduction->source_ranks[source] = from->pieces[i].first;
            for (uint32_t k = 0; k < parcel->n_parts; k++)
                for (unsigned r = from->pieces[i].first; r < from->pieces[i].first + from->pieces[i].n; r++)
                    if (f->pushed[r][f->layout->parts[parcel->first_part + k].param])
                        reduction->masks[k] |= UINT64_C(1) << source;
        }
    }
    step_post(reduction, note_done, f);
    wait_for(f, f->n_done + 1);
}

static void reduce_halves(struct fixture *f, uint32_t micro)
{
    for (uint32_t at = 0; at < f->layout->n_parcels; at++) {
        reduce(f, &f->halves[0], at, micro);
        reduce(f, &f->halves[1], at, micro);
        combine(f, &f->halves[0], at, micro);
        combine(f, &f->halves[1], at, micro);
    }
}

static float tree(const struct fixture *f, unsigned lo, unsigned n, unsigned param, uint64_t elem)
{
    unsigned split = 1;

    if (n == 1)
        return f->pushed[lo][param] ? value_of(f, lo, param, elem) : 0.0f;
    while (split * 2 < n)
        split *= 2;
    return tree(f, lo, split, param, elem) + tree(f, lo + split, n - split, param, elem);
}

static float acc_of(const struct fixture *f, const struct core *core, unsigned param, uint64_t elem)
{
    const struct layout_param *p = &f->layout->params[param];

    return *state_acc(core->state, p->bucket, p->offset_elems + elem);
}

static bool anybody_pushed(const struct fixture *f, unsigned param)
{
    for (unsigned rank = 0; rank < WORLD; rank++)
        if (f->pushed[rank][param])
            return true;
    return false;
}

static void push_at_random(struct fixture *f, uint64_t seed)
{
    memset(f->pushed, 0, sizeof(f->pushed));
    for (unsigned rank = 0; rank < WORLD; rank++)
        for (unsigned param = 0; param < N_PARAMS; param++)
            if (gradient_mix(seed * 1000 + rank * N_PARAMS + param) % 3 > 0)
                fill(f, rank, param, seed);
            else
                memset(gradient_of(f, rank, param), 0xff, shapes[param] * dtype_size(grad_dtypes[param]));
}

/*
 * Ranks that did not push count as +0, and their slots are not read. The first contribution is 0.0f + x; later ones are
 * added.
 */
static void test_absent_ranks(void **userdata)
{
    static float expected[N_PARAMS][LARGE_ELEMS];
    struct fixture f;

    (void)userdata;
    make(&f, 2, 0);
    for (uint64_t seed = 0; seed < 6; seed++) {
        bool contributed[N_PARAMS] = {false};

        memset(expected, 0, sizeof(expected));
        step_open(f.whole.step);
        for (uint32_t micro = 0; micro < 2; micro++) {
            push_at_random(&f, seed * 2 + micro);
            reduce_whole(&f, micro);
            for (unsigned param = 0; param < N_PARAMS; param++) {
                contributed[param] |= anybody_pushed(&f, param);
                for (uint64_t i = 0; anybody_pushed(&f, param) && i < shapes[param]; i++)
                    expected[param][i] = expected[param][i] + tree(&f, 0, WORLD, param, i);
            }
        }
        for (unsigned param = 0; param < N_PARAMS; param++) {
            assert_int_equal(f.whole.step->contributed[param], contributed[param]);
            for (uint64_t i = 0; contributed[param] && i < shapes[param]; i++)
                assert_int_equal(gradient_bits(acc_of(&f, &f.whole, param, i)), gradient_bits(expected[param][i]));
        }
    }
    done_with(&f);
}

/* Sums of an earlier step are not added. If no rank pushes a parameter, its sums are not changed. */
static void test_open_forgets(void **userdata)
{
    struct fixture f;
    float before;

    (void)userdata;
    make(&f, 1, 0);
    fill_all(&f, 1);
    reduce_whole(&f, 0);
    before = acc_of(&f, &f.whole, 3, 7);
    assert_true(f.whole.step->n_reduced_bytes > 0);

    step_open(f.whole.step);
    assert_int_equal(f.whole.step->n_reduced_bytes, 0);
    fill_all(&f, 2);
    for (unsigned rank = 0; rank < WORLD; rank++)
        f.pushed[rank][3] = f.pushed[rank][4] = false;
    reduce_whole(&f, 0);
    assert_int_equal(f.whole.step->contributed[3], 0);
    assert_int_equal(gradient_bits(acc_of(&f, &f.whole, 3, 7)), gradient_bits(before));
    assert_int_equal(gradient_bits(acc_of(&f, &f.whole, 2, 7)), gradient_bits(0.0f + tree(&f, 0, WORLD, 2, 7)));
    assert_int_equal(f.whole.step->n_reduced_bytes, WORLD * (4 * (uint64_t)LARGE_ELEMS + 2 * 65));

    step_commit(f.whole.step);
    assert_int_equal(f.whole.state->progress.counts[2], 1);
    assert_int_equal(f.whole.state->progress.counts[1], 1); /* no elements, but pushed */
    assert_int_equal(f.whole.state->progress.counts[3], 0);
    done_with(&f);
}

/* ---- sums and norms ------------------------------------------------------------------------------------ */

static void check_sums(struct fixture *f, struct core *core)
{
    for (uint32_t at = 0; at < f->layout->n_parcels; at++) {
        const struct layout_parcel *parcel = &f->layout->parcels[at];

        reduce(f, core, at, 0);
        for (uint32_t k = 0; k < parcel->n_parts; k++) {
            uint32_t number = parcel->first_part + k;
            const struct layout_part *part = &f->layout->parts[number];
            uint32_t param = part->param;
            size_t size = dtype_size(grad_dtypes[param]);

            for (unsigned i = 0; i < core->step->n_local; i++) {
                unsigned rank = core->step->first_local + i;
                struct position_sum sum = {0};
                uint64_t expected;

                position_sum_update(&sum, grad_dtypes[param], gradient_of(f, rank, param) + part->start_elem * size,
                                    part->n_elems, part->start_elem);
                expected = position_sum_finish(&sum, part->n_elems * size);
                if (f->pushed[rank][param])
                    assert_true(step_sum(core->step, f->last, i, number) == expected);
            }
        }
    }
}

/* The sum of a push's bytes does not depend on chunks, partitions, or where the push is reduced. */
static void test_sums(void **userdata)
{
    struct fixture f;

    (void)userdata;
    make(&f, 2, 4);
    for (uint64_t seed = 1; seed < 4; seed++) {
        push_at_random(&f, seed);
        check_sums(&f, &f.whole);
        check_sums(&f, &f.halves[0]);
        check_sums(&f, &f.halves[1]);
    }
    done_with(&f);
}

static double norm_of(const struct fixture *f, uint32_t param)
{
    return step_param_norm(f->whole.step, step_squares(f->whole.step, param));
}

static void test_norm_of_each_parameter(void **userdata)
{
    struct exact_sum total = {0};
    long double whole = 0;
    struct fixture f;
    double norm;

    (void)userdata;
    make(&f, 3, 0);
    fill_all(&f, 5);
    for (unsigned rank = 0; rank < WORLD; rank++)
        f.pushed[rank][4] = false;
    reduce_whole(&f, 0);
    step_norm(f.whole.step, &total);
    step_decide(f.whole.step, 1);
    for (unsigned param = 0; param < 4; param++) {
        long double sum = 0;

        for (uint64_t i = 0; i < shapes[param]; i++)
            sum += (long double)acc_of(&f, &f.whole, param, i) * acc_of(&f, &f.whole, param, i);
        assert_true(fabsl(sqrtl(sum) - norm_of(&f, param)) <= 1e-14L * sqrtl(sum));
        whole += sum;
    }
    assert_true(norm_of(&f, 4) == 0);
    assert_true(fabsl(whole - exact_sum_round(&total)) <= 1e-14L * whole);

    /* Norms are those of the decided step. A parameter that only an earlier step pushed has none. */
    step_open(f.whole.step);
    for (unsigned rank = 0; rank < WORLD; rank++)
        f.pushed[rank][3] = false;
    reduce_whole(&f, 0);
    exact_sum_reset(&total);
    step_norm(f.whole.step, &total);
    assert_true(norm_of(&f, 3) > 0);
    norm = norm_of(&f, 2);
    step_decide(f.whole.step, 0.5);
    assert_true(norm_of(&f, 2) > 0 && norm_of(&f, 2) != norm);
    assert_true(norm_of(&f, 3) == 0);
    done_with(&f);
}

/* ---- two cores ----------------------------------------------------------------------------------------- */

/* Asserts that the accumulators that this half owns are those of `whole`. */
static void check_half(struct fixture *f, struct core *half)
{
    for (uint32_t c = 0; c < f->layout->n_chunks; c++) {
        const struct layout_chunk *chunk = &f->layout->chunks[c];

        assert_int_equal(half->step->contributed[chunk->param], f->whole.step->contributed[chunk->param]);
        if (!half->step->contributed[chunk->param] || !state_owns(half->state, chunk->rank))
            continue;
        for (uint64_t i = chunk->start_elem; i < chunk->start_elem + chunk->n_elems; i++)
            assert_int_equal(gradient_bits(acc_of(f, half, chunk->param, i)),
                             gradient_bits(acc_of(f, &f->whole, chunk->param, i)));
    }
}

/* Overwrites the elements that another node owns with NaN. A node must not read them: it may not even have a copy. */
static void poison_foreign(struct fixture *f, struct core *half, uint32_t at)
{
    const struct layout_parcel *parcel = &f->layout->parcels[at];
    uint64_t slice = layout_partition_elems(f->layout, parcel->bucket);

    for (unsigned i = 0; i < half->step->n_pieces; i++)
        for (unsigned rank = 0; rank < WORLD; rank++)
            for (uint64_t k = slice * rank; !state_owns(half->state, rank) && k < slice * (rank + 1); k++)
                if (k >= parcel->offset_elems && k - parcel->offset_elems < parcel->n_elems)
                    ((float *)(void *)step_piece(half->step, at, i))[k - parcel->offset_elems] = NAN;
}

static void check_two_cores(unsigned stage, unsigned split)
{
    struct exact_sum one = {0}, two = {0};
    struct fixture f;

    make(&f, stage, split);
    for (uint32_t micro = 0; micro < 3; micro++) {
        push_at_random(&f, 100 * stage + 10 * split + micro);
        reduce_whole(&f, micro);
        reduce_halves(&f, micro);
    }
    check_half(&f, &f.halves[0]);
    check_half(&f, &f.halves[1]);

    step_norm(f.whole.step, &one);
    step_norm(f.halves[0].step, &two);
    step_norm(f.halves[1].step, &two);
    exact_sum_carry(&one);
    exact_sum_carry(&two);
    assert_memory_equal(&one, &two, sizeof(one));
    assert_true(exact_sum_round(&one) > 0);
    done_with(&f);
}

static void test_two_cores(void **userdata)
{
    (void)userdata;
    for (unsigned stage = 1; stage <= 3; stage++)
        for (unsigned split = 1; split < WORLD; split++)
            check_two_cores(stage, split);
}

/* Combining reads only the node's own partitions of a piece. */
static void test_combine_reads_what_it_owns(void **userdata)
{
    struct fixture f;

    (void)userdata;
    make(&f, 2, 4);
    fill_all(&f, 3);
    reduce_whole(&f, 0);
    for (uint32_t at = 0; at < f.layout->n_parcels; at++) {
        reduce(&f, &f.halves[0], at, 0);
        reduce(&f, &f.halves[1], at, 0);
        poison_foreign(&f, &f.halves[0], at);
        combine(&f, &f.halves[0], at, 0);
    }
    assert_false(f.halves[0].step->finding.found);
    for (uint32_t c = 0; c < f.layout->n_chunks; c++) {
        const struct layout_chunk *chunk = &f.layout->chunks[c];

        if (chunk->rank == 0)
            assert_int_equal(gradient_bits(acc_of(&f, &f.halves[0], chunk->param, chunk->start_elem)),
                             gradient_bits(acc_of(&f, &f.whole, chunk->param, chunk->start_elem)));
    }
    done_with(&f);
}

/* ---- values that are not finite ------------------------------------------------------------------------ */

static void check_finding(const struct step *step, unsigned rank, uint32_t micro, uint32_t param, uint64_t elem)
{
    assert_true(step->finding.found);
    assert_false(step->finding.overflowed);
    assert_int_equal(step->finding.rank, rank);
    assert_int_equal(step->finding.micro_batch, micro);
    assert_int_equal(step->finding.param, param);
    assert_int_equal(step->finding.elem, elem);
}

static double total_of(struct step *step)
{
    struct exact_sum total = {0};

    step_norm(step, &total);
    return exact_sum_round(&total);
}

static void test_finding(void **userdata)
{
    struct fixture f;

    (void)userdata;
    make(&f, 2, 0);
    fill_all(&f, 1);
    reduce_whole(&f, 0);
    assert_false(f.whole.step->finding.found);
    assert_true(isfinite(total_of(f.whole.step)));

    /* A later micro-batch has the first values that are not finite. Two of them are in one chunk, and are counted. */
    set(&f, 3, 2, 64, INFINITY);
    set(&f, 3, 2, 60, NAN);
    set(&f, 3, 2, 63, -INFINITY);
    reduce_whole(&f, 1);
    check_finding(f.whole.step, 3, 1, 2, 60);
    assert_true(isnan(f.whole.step->finding.value));
    assert_int_equal(f.whole.step->finding.n_nan, 1);
    assert_true(isnan(total_of(f.whole.step)));

    /*
     * A lower parameter of a later micro-batch is not the finding. One of the same micro-batch is, and so is a lower
     * element.
     */
    set(&f, 1, 0, CHUNK_ELEMS + 3, INFINITY);
    reduce_whole(&f, 2);
    check_finding(f.whole.step, 3, 1, 2, 60);
    reduce_param(&f, 0, 1);
    check_finding(f.whole.step, 1, 1, 0, CHUNK_ELEMS + 3);
    set(&f, 5, 0, 9, NAN);
    reduce_param(&f, 0, 1);
    check_finding(f.whole.step, 5, 1, 0, 9);

    step_open(f.whole.step);
    assert_false(f.whole.step->finding.found);
    done_with(&f);
}

/* A rank that did not push is not named, whatever its slot contains. */
static void test_finding_leaves_absent_ranks_out(void **userdata)
{
    struct fixture f;

    (void)userdata;
    make(&f, 2, 0);
    fill_all(&f, 1);
    set(&f, 0, 3, 1, NAN);
    set(&f, 4, 3, 1, INFINITY);
    f.pushed[0][3] = false;
    reduce_whole(&f, 0);
    check_finding(f.whole.step, 4, 0, 3, 1);
    assert_true(f.whole.step->finding.value == INFINITY);
    done_with(&f);
}

static void test_overflow_is_nobodys(void **userdata)
{
    struct fixture f;

    (void)userdata;
    make(&f, 1, 0);
    fill_all(&f, 1);
    set(&f, 0, 0, 100, 3e38f);
    set(&f, 1, 0, 100, 3e38f);
    reduce_whole(&f, 0);
    assert_true(f.whole.step->finding.found && f.whole.step->finding.overflowed);
    assert_int_equal(f.whole.step->finding.param, 0);
    assert_int_equal(f.whole.step->finding.elem, 100);
    assert_true(f.whole.step->finding.value == INFINITY);
    done_with(&f);
}

/* The node that has the slot names the rank. The other node's sum is not finite either, but it names no rank. */
static void test_finding_on_two_cores(void **userdata)
{
    struct fixture f;

    (void)userdata;
    make(&f, 1, 4);
    fill_all(&f, 1);
    set(&f, 5, 3, 1, NAN); /* in the other node's partition */
    reduce_halves(&f, 2);
    check_finding(f.halves[1].step, 5, 2, 3, 1);
    assert_false(f.halves[0].step->finding.found);
    assert_true(isnan(acc_of(&f, &f.halves[0], 3, 1)));

    /* Each piece is finite, but their sum is not. The node that owns the element finds it. */
    step_open(f.halves[0].step);
    step_open(f.halves[1].step);
    fill_all(&f, 1);
    set(&f, 0, 0, 5, -3e38f);
    set(&f, 4, 0, 5, -3e38f);
    reduce_halves(&f, 0);
    assert_true(f.halves[0].step->finding.found && f.halves[0].step->finding.overflowed);
    assert_int_equal(f.halves[0].step->finding.elem, 5);
    assert_false(f.halves[1].step->finding.found);
    done_with(&f);
}

/* ---- slots that travel --------------------------------------------------------------------------------- */

static uint64_t sum_of(const struct fixture *f, unsigned rank, const struct layout_part *part)
{
    enum dtype dtype = grad_dtypes[part->param];
    struct position_sum sum = {0};

    position_sum_update(&sum, dtype, gradient_of(f, rank, part->param) + part->start_elem * dtype_size(dtype),
                        part->n_elems, part->start_elem);
    return position_sum_finish(&sum, part->n_elems * dtype_size(dtype));
}

/*
 * For the only rank of a node: asserts its pushes' sums. Half of them are computed when pieces are added, half before.
 */
static void check_sums_of_one(const struct fixture *f, const struct core *core)
{
    for (uint32_t k = 0; k < f->layout->n_parts; k++) {
        const struct layout_part *part = &f->layout->parts[k];

        assert_true(step_sum(core->step, &core->step->reductions[part->parcel], 0, k) ==
                    sum_of(f, core->step->first_local, part));
    }
}

/*
 * If gradients travel in fp32, only fp32 gradients are sent from their slots. Gradients that must be converted have a
 * place in staging.
 */
static void check_places(const struct fixture *f, const struct core *core)
{
    uint64_t n_elems = 0;

    for (uint32_t at = 0; at < f->layout->n_parcels; at++) {
        bool same = f->layout->buckets[f->layout->parcels[at].bucket].grad_dtype == f->wire;

        assert_int_equal(step_sends_slots(core->step, at), same);
        assert_true((step_piece(core->step, at, 0) == core->step->reductions[at].sources[0]) == same);
        n_elems += same ? 0 : f->layout->parcels[at].n_elems;
    }
    assert_true(n_elems > 0 && n_elems < f->layout->padded_elems);
    assert_int_equal(step_staging_bytes(f->layout, 1, 1, f->wire), n_elems * sizeof(float));
    assert_int_equal(core->step->staging_segment.n_bytes, round_up(n_elems * sizeof(float), page_size()));
}

static void test_slots_travel(void **userdata)
{
    struct fixture f;
    uint8_t *before;

    (void)userdata;
    for (unsigned alone = 0; alone < 2; alone++) {
        make(&f, 2, alone == 0 ? 1 : WORLD - 1);
        fill_all(&f, 9);
        before = malloc(f.layout->arena_bytes);
        memcpy(before, f.slots[alone == 0 ? 0 : WORLD - 1], f.layout->arena_bytes);
        reduce_halves(&f, 0);
        check_places(&f, &f.halves[alone]);
        check_sums_of_one(&f, &f.halves[alone]);
        assert_memory_equal(before, f.slots[alone == 0 ? 0 : WORLD - 1], f.layout->arena_bytes);
        for (uint32_t at = 0; at < f.layout->n_parcels; at++)
            assert_false(step_sends_slots(f.halves[1 - alone].step, at) || step_sends_slots(f.whole.step, at));
        assert_true(step_sends_any_slots(f.layout, 1, DTYPE_F32));
        assert_false(step_sends_any_slots(f.layout, 2, DTYPE_F32));
        free(before);
        done_with(&f);
    }
}

/* A value that is not finite in a slot is reported with the slot's rank. */
static void test_finding_in_a_slot(void **userdata)
{
    struct fixture f;

    (void)userdata;
    make(&f, 2, 1);
    fill_all(&f, 1);
    set(&f, 0, 0, 7, INFINITY);                /* in rank 0's partition */
    set(&f, 0, 0, LARGE_ELEMS - 3, -INFINITY); /* in another node's partition */
    reduce_halves(&f, 1);
    check_finding(f.halves[0].step, 0, 1, 0, 7);
    check_finding(f.halves[1].step, 0, 1, 0, LARGE_ELEMS - 3);
    assert_true(f.halves[1].step->finding.value == -INFINITY);
    assert_int_equal(f.halves[1].step->finding.n_inf, 1);

    /* In a sum of several ranks, only the node of these ranks can find which rank has the value. */
    step_open(f.halves[0].step);
    step_open(f.halves[1].step);
    fill_all(&f, 1);
    set(&f, 3, 0, 7, NAN);
    reduce_halves(&f, 1);
    assert_false(f.halves[0].step->finding.found);
    check_finding(f.halves[1].step, 3, 1, 0, 7);
    done_with(&f);
}

/* Each rank's push is checked before it is rounded. If rounding makes a sum infinite, no rank is named. */
static void test_rounded_pieces(void **userdata)
{
    static const uint64_t elems[] = {0, 2047, 2048, CHUNK_ELEMS + 2049};
    struct fixture f;

    (void)userdata;
    make_with(&f, 2, 4, DTYPE_BF16);
    fill_all(&f, 1);
    check_sums(&f, &f.halves[0]);
    check_sums(&f, &f.halves[1]);
    for (size_t i = 0; i < ARRAY_SIZE(elems); i++) {
        step_open(f.halves[0].step);
        fill_all(&f, 1);
        set(&f, 2, 0, elems[i], NAN);
        reduce_halves(&f, 0);
        check_finding(f.halves[0].step, 2, 0, 0, elems[i]);

        step_open(f.halves[0].step);
        fill_all(&f, 1);
        set(&f, 0, 0, elems[i], 3.4e38f); /* the largest bf16 value is 3.39e38 */
        reduce_halves(&f, 0);
        assert_true(f.halves[0].step->finding.found && f.halves[0].step->finding.overflowed);
        assert_int_equal(f.halves[0].step->finding.param, 0);
        assert_int_equal(f.halves[0].step->finding.elem, elems[i]);
        assert_int_equal(f.halves[0].step->finding.n_inf, 1);
    }
    done_with(&f);
}

/* ---- what is published ----------------------------------------------------------------------------------- */

static const struct hyper hyper = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .adam_w_mode = true};

static void update_is_done(void *userdata, int result)
{
    bool *is_done = userdata;

    assert_int_equal(result, 0);
    *is_done = true;
}

static void end_update(struct fixture *f, struct core *core, const bool *is_done)
{
    while (!*is_done)
        assert_true(worker_pool_wait(f->pool) > 0);
    step_commit(core->step);
    core->state->progress.epoch++;
}

static void reduce_core(struct fixture *f, struct core *core)
{
    step_open(core->step);
    for (uint32_t at = 0; at < f->layout->n_parcels; at++)
        reduce(f, core, at, 0);
}

/*
 * When a parameter's word is published, its weights are complete, while workers update others. They are the weights of
 * any update.
 */
static void test_published(void **userdata)
{
    const struct step_update update = {.groups = &hyper, .s = 1};
    const struct published_page *page;
    struct core publishing;
    struct fixture f;

    (void)userdata;
    make(&f, 2, 0);
    make_core_with(&publishing, &f, 2, 0, WORLD, true);
    page = (const struct published_page *)(const void *)published_segment(publishing.step->published)->map;
    assert_int_equal(page->n_params, N_PARAMS);
    for (uint64_t n_steps = 1; n_steps <= 20; n_steps++) {
        bool is_done = false, is_published = false;

        fill_all(&f, n_steps);
        reduce_core(&f, &f.whole);
        reduce_core(&f, &publishing);
        step_update(f.whole.step, &update, update_is_done, &is_done);
        end_update(&f, &f.whole, &is_done);
        for (uint32_t p = 0; p < N_PARAMS; p++)
            assert_false(published_is_there(page, p, n_steps));
        step_update(publishing.step, &update, update_is_done, &is_published);
        for (uint32_t p = 0; p < N_PARAMS; p++) {
            while (!published_is_there(page, p, n_steps))
                ;
            assert_memory_equal(state_weights(publishing.state, p, 0), state_weights(f.whole.state, p, 0),
                                shapes[p] * sizeof(uint16_t));
        }
        end_update(&f, &publishing, &is_published);
    }
    step_free(publishing.step);
    state_free(publishing.state);
    done_with(&f);
}

/*
 * Small parameters of all layers share a bucket. In the order of buckets, the first layer's would be updated last.
 * Parameters that are neighbours in memory are updated together, up to the size of a chunk.
 */
static void test_order_of_updates(void **userdata)
{
    enum { N = 8, LARGE = 2 * CHUNK_ELEMS };
    static const uint64_t sizes[N] = {LARGE, 3, 100, 30000, 100, 30000, LARGE, 30000}; /* weight, bias, ... */
    /*
     * Group 0 has parameters 0, 2 and 6. Group 1 has 1, 3, 5 and 7, of which three together fit into a chunk. Parameter
     * 4 is frozen.
     */
    static const uint32_t order[] = {0, 0, 3, 1, 2, 7, 5, 6, 6};
    struct layout_decl decls[N];
    struct published *published;
    const struct published_page *page;
    struct layout *layout;
    char names[N][8];
    uint32_t bad;

    (void)userdata;
    for (unsigned p = 0; p < N; p++) {
        snprintf(names[p], sizeof(names[p]), "p%u", p);
        decls[p] = (struct layout_decl){
            .name = names[p], .name_len = 2, .group = p % 2, .trainable = p != 4, .n_dims = 1, .shape = &sizes[p]};
    }
    assert_int_equal(layout_new(&layout, decls, N, 1, 1 << 20, &bad), 0);
    assert_int_equal(layout->n_buckets, 2);
    assert_int_equal(layout->n_chunks, ARRAY_SIZE(order));
    assert_int_equal(published_new(&published, layout), 0);
    page = (const struct published_page *)(const void *)published_segment(published)->map;
    published_begin(published, 7);
    for (uint32_t i = 0; i < layout->n_chunks; i++) {
        uint32_t chunk = published_chunk(published, i), param = layout->chunks[chunk].param;

        assert_int_equal(param, order[i]);
        assert_false(published_is_there(page, param, 7));
        published_add(published, chunk);
        assert_int_equal(published_is_there(page, param, 7),
                         chunk + 1 == layout->params[param].first_chunk + layout->params[param].n_chunks);
        assert_false(published_is_there(page, param, 8));
    }
    for (uint32_t p = 0; p < N; p++)
        assert_true(published_is_there(page, p, 7));
    published_free(published);
    layout_free(layout);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_known_pieces),
        cmocka_unit_test(test_absent_ranks),
        cmocka_unit_test(test_open_forgets),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_norm_of_each_parameter),
        cmocka_unit_test(test_two_cores),
        cmocka_unit_test(test_combine_reads_what_it_owns),
        cmocka_unit_test(test_finding),
        cmocka_unit_test(test_finding_leaves_absent_ranks_out),
        cmocka_unit_test(test_overflow_is_nobodys),
        cmocka_unit_test(test_finding_on_two_cores),
        cmocka_unit_test(test_slots_travel),
        cmocka_unit_test(test_finding_in_a_slot),
        cmocka_unit_test(test_rounded_pieces),
        cmocka_unit_test(test_published),
        cmocka_unit_test(test_order_of_updates),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
