/* SPDX-License-Identifier: Apache-2.0 */

/* Sums one chunk of a reduction, on a worker. */

#include "daemon/step/step-reduce.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "daemon/step/speculation.h"
#include "daemon/step/step-kept.h"

/*
 * The leaves of one chunk: the sources (struct reduction) that have gradients of the chunk, and how the rank tree joins
 * these leaves.
 */
struct leaves {
    const void *data[STEP_MAX_RANKS];
    unsigned source[STEP_MAX_RANKS]; /* index into reduction->sources */
    struct reduce_join joins[STEP_MAX_RANKS];
    unsigned n;
};

static unsigned rank_of(const struct reduction *reduction, unsigned source)
{
    return reduction->combining ? reduction->source_ranks[source] : reduction->step->first_local + source;
}

/*
 * Finds the sources in [first, first + n) that are in the mask of a part. elem: the chunk's first element, counted from
 * the parcel's start.
 */
static void find_leaves(const struct reduction *reduction, uint64_t elem, size_t elem_bytes, uint64_t mask,
                        unsigned first, unsigned n, struct leaves *leaves)
{
    const struct step *step = reduction->step;
    bool present[STEP_MAX_WORLD];

    assert(first + n <= STEP_MAX_RANKS);
    leaves->n = 0;
    memset(present, 0, step->layout->world_size);
    for (unsigned i = first; i < first + n; i++) {
        unsigned rank = rank_of(reduction, i);

        if (!(mask >> i & 1))
            continue;
        assert(rank < step->layout->world_size);
        leaves->data[leaves->n] = reduction->sources[i] + elem * elem_bytes;
        leaves->source[leaves->n] = i;
        leaves->n++;
        present[rank] = true;
    }
    if (leaves->n > 0)
        reduce_joins(present, step->layout->world_size, leaves->joins);
}

static bool finding_is_before(const struct step_finding *a, const struct step_finding *b)
{
    if (a->micro_batch != b->micro_batch)
        return a->micro_batch < b->micro_batch;
    if (a->param != b->param)
        return a->param < b->param;
    return a->elem < b->elem;
}

void step_keep_finding(struct step *step, const struct step_finding *finding)
{
    pthread_mutex_lock(&step->finding_lock);
    if (!step->finding.found || finding_is_before(finding, &step->finding)) {
        step->finding = *finding;
        step_keep_found(step);
    }
    pthread_mutex_unlock(&step->finding_lock);
}

/*
 * Finds the rank whose gradient made a chunk's accumulator not finite. Call it while the ranks' slots are still held.
 */
static void blame(struct reduction *reduction, const struct reduce_args *args, const struct leaves *leaves,
                  uint32_t param)
{
    struct step *step = reduction->step;
    struct reduce_finding findings[STEP_MAX_RANKS], overflow;

    reduce_find_nonfinite(args, findings, &overflow);
    for (unsigned i = 0; i <= leaves->n; i++) {
        const struct reduce_finding *f = i < leaves->n ? &findings[i] : &overflow;
        unsigned source = i < leaves->n ? leaves->source[i] : 0;

        if (f->n_nan + f->n_inf == 0)
            continue;
        /* Skips a source that is a sum of several ranks. The node that made this sum reports the rank. */
        if (reduction->combining && i < leaves->n && !(reduction->slots >> source & 1))
            continue;
        step_keep_finding(step, &(struct step_finding){
                                    .found = true,
                                    .overflowed = i == leaves->n,
                                    .micro_batch = reduction->micro_batch,
                                    .param = param,
                                    .rank = rank_of(reduction, source),
                                    .elem = f->first_elem,
                                    .value = f->first_value,
                                    .n_nan = f->n_nan,
                                    .n_inf = f->n_inf,
                                });
    }
}

/*
 * Makes the kernel's arguments for the sources in [first, first + n) that have gradients of the chunk. args->n_leaves
 * is 0 if no source has any.
 */
static void make_args(const struct reduction *reduction, const struct layout_chunk *chunk, unsigned first, unsigned n,
                      struct leaves *leaves, struct reduce_args *args)
{
    const struct step *step = reduction->step;
    const struct layout_param *param = &step->layout->params[chunk->param];
    const struct layout_parcel *parcel = &step->layout->parcels[reduction->parcel];
    enum dtype dtype = reduction->combining ? step->wire : param->grad_dtype;

    assert(chunk->part - parcel->first_part < parcel->n_parts);
    find_leaves(reduction, param->offset_elems + chunk->start_elem - parcel->offset_elems, dtype_size(dtype),
                reduction->masks[chunk->part - parcel->first_part], first, n, leaves);
    *args = (struct reduce_args){
        .dtype = dtype,
        .n_leaves = leaves->n,
        .leaves = leaves->data,
        .joins = leaves->joins,
        .n_elems = chunk->n_elems,
        .start_elem = chunk->start_elem,
    };
}

/* The destination of a chunk's sum. */
struct target {
    float *elems;
    bool first;             /* this is the first contribution in this step */
    bool past_caches;       /* write past the caches */
    struct step_slot *slot; /* the undo slot, or NULL */
};

/* Adds the sources [first, first + n) of one chunk to target. */
static void reduce_into(struct reduction *reduction, const struct layout_chunk *chunk, uint32_t chunk_id,
                        unsigned first, unsigned n, const struct target *target)
{
    struct step *step = reduction->step;
    struct position_sum sums[STEP_MAX_RANKS];
    struct reduce_result *result = &step->results[chunk_id];
    struct leaves leaves;
    struct reduce_args args;

    make_args(reduction, chunk, first, n, &leaves, &args);
    if (leaves.n == 0)
        return;
    args.acc = target->elems;
    args.first = target->first;
    args.past_caches = target->past_caches;
    result->sums = sums;
    if (target->slot)
        step_reduce_in_slot(step, target->slot, &args, result);
    else
        step->kernels->reduce(&args, result);
    if (result->nonfinite)
        blame(reduction, &args, &leaves, chunk->param);
    for (unsigned i = 0; i < leaves.n; i++) {
        unsigned source = leaves.source[i];

        if (!reduction->combining)
            step->sums[(size_t)chunk_id * step->n_local + source] = sums[i];
        else if (reduction->slots >> source & 1 && rank_of(reduction, source) == step->first_local) {
            assert(step->n_local == 1);
            step->sums[chunk_id] = sums[i]; /* the 64-bit sum of the only local rank */
        }
    }
}

/*
 * Computes the 64-bit sum of a chunk that another node owns, when slots are sent (step.h). The reduction of
 * step_combine() computes the 64-bit sums of chunks that this node owns.
 */
static void sum_sent_chunk(struct reduction *reduction, const struct layout_chunk *chunk, uint32_t chunk_id)
{
    struct step *step = reduction->step;
    struct position_sum *sum = &step->sums[chunk_id];
    struct leaves leaves;
    struct reduce_args args;

    assert(step->n_local == 1); /* `sums` then has one element per chunk */
    make_args(reduction, chunk, 0, 1, &leaves, &args);
    if (leaves.n == 0 || state_owns(step->state, chunk->rank))
        return;
    *sum = (struct position_sum){0};
    step->kernels->position_sum_update(sum, args.dtype, args.leaves[0], args.n_elems, args.start_elem);
}

enum { BF16_OVERFLOW_EXPONENT = 127 }; /* rounding can make a value infinite only from 2^127 */

/* Records a finding for each finite sum that became infinite by rounding. */
static void blame_rounding(struct reduction *reduction, const struct reduce_args *args, const uint16_t *rounded,
                           uint32_t param)
{
    struct step_finding finding = {
        .overflowed = true, .micro_batch = reduction->micro_batch, .param = param, .value = INFINITY};

    for (size_t i = 0; i < args->n_elems; i++) {
        if (!isfinite(args->acc[i]) || (rounded[i] & 0x7fff) != 0x7f80)
            continue;
        if (!finding.found)
            finding.elem = args->start_elem + i;
        finding.found = true;
        finding.n_inf++;
    }
    if (finding.found)
        step_keep_finding(reduction->step, &finding);
}

/* Like reduce_into(), but rounds the sum to bf16. Works in blocks that fit into the nearest cache. */
static void reduce_rounded(struct reduction *reduction, const struct layout_chunk *chunk, uint32_t chunk_id,
                           unsigned first, unsigned n, uint16_t *target)
{
    enum { BLOCK_ELEMS = 2048 };

    struct step *step = reduction->step;
    struct position_sum sums[STEP_MAX_RANKS], *totals = &step->sums[(size_t)chunk_id * step->n_local];
    struct reduce_result *result = &step->results[chunk_id];
    float block[BLOCK_ELEMS];
    struct leaves leaves;
    struct reduce_args args;

    assert(step->wire == DTYPE_BF16); /* blame_rounding() assumes bf16 */
    make_args(reduction, chunk, first, n, &leaves, &args);
    args.acc = block;
    args.first = true;
    result->sums = sums;
    for (unsigned i = 0; i < leaves.n; i++)
        totals[leaves.source[i]] = (struct position_sum){0};
    for (uint64_t at = 0; leaves.n > 0 && at < chunk->n_elems; at += args.n_elems) {
        args.n_elems = MIN((size_t)BLOCK_ELEMS, chunk->n_elems - at);
        args.start_elem = chunk->start_elem + at;
        step->kernels->reduce(&args, result);
        step->kernels->convert_from_f32(target + at, block, step->wire, args.n_elems);
        if (result->nonfinite)
            blame(reduction, &args, &leaves, chunk->param);
        if (exact_sum_may_reach(&result->squares, 2 * BF16_OVERFLOW_EXPONENT))
            blame_rounding(reduction, &args, target + at, chunk->param);
        for (unsigned i = 0; i < leaves.n; i++) {
            position_sum_add(&totals[leaves.source[i]], &sums[i]);
            leaves.data[i] = (const uint8_t *)leaves.data[i] + args.n_elems * dtype_size(args.dtype);
        }
    }
}

/* Writes the chunk's partial sums for piece i of this node to staging. */
static void reduce_piece(struct reduction *reduction, const struct layout_chunk *chunk, uint32_t chunk_id, unsigned i)
{
    struct step *step = reduction->step;
    const struct subtree *piece = &step->pieces[i];
    uint64_t elem = step->layout->params[chunk->param].offset_elems + chunk->start_elem -
                    step->layout->parcels[reduction->parcel].offset_elems;
    uint8_t *target = (uint8_t *)step_staging(step, reduction->parcel, i) + elem * dtype_size(step->wire);

    assert(elem + chunk->n_elems <= step->layout->parcels[reduction->parcel].n_elems);
    assert(piece->first >= step->first_local && piece->first + piece->n <= step->first_local + step->n_local);
    if (step->wire == DTYPE_F32)
        reduce_into(reduction, chunk, chunk_id, piece->first - step->first_local, piece->n,
                    &(struct target){.elems = (float *)(void *)target, .first = true});
    else
        reduce_rounded(reduction, chunk, chunk_id, piece->first - step->first_local, piece->n,
                       (uint16_t *)(void *)target);
}

void step_reduce_chunk(struct reduction *reduction, uint32_t chunk_id, struct step_slot *slot)
{
    const struct step *step = reduction->step;
    const struct layout_chunk *chunk = &step->layout->chunks[chunk_id];

    assert(state_owns(step->state, chunk->rank)); /* the accumulator of another chunk is outside the segment */
    reduce_into(reduction, chunk, chunk_id, 0, reduction->n_sources,
                &(struct target){.elems = step_acc_here(step, chunk_id),
                                 .first = !step->begun[chunk->part],
                                 .past_caches = step->past_caches,
                                 .slot = slot});
}

void step_reduce_item(struct reduction *reduction, uint32_t chunk_id)
{
    struct step *step = reduction->step;
    const struct layout_chunk *chunk = &step->layout->chunks[chunk_id];

    (void)failpoint("reduce");
    if (step_is_alone(step) || reduction->combining) {
        struct step_slot *slot;

        if (!state_owns(step->state, chunk->rank) || !step_begin_chunk(step, reduction->op, chunk_id, &slot))
            return;
        if (step->speculation)
            speculation_drop(step->speculation, chunk_id);
        step_reduce_chunk(reduction, chunk_id, slot);
        step_end_chunk(step, reduction->op, chunk_id, slot);
        return;
    }
    if (step_sends_slots(step, reduction->parcel)) {
        sum_sent_chunk(reduction, chunk, chunk_id);
        return;
    }
    for (unsigned i = 0; i < step->n_pieces; i++)
        reduce_piece(reduction, chunk, chunk_id, i);
}
