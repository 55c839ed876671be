/* SPDX-License-Identifier: Apache-2.0 */

/* The step in host memory. Workers reduce, measure and update chunk by chunk. */

#include "daemon/step/step.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/recorder.h"
#include "core/budget/step-sizes.h"
#include "core/config/config.h"
#include "daemon/memory/snapshot.h"
#include "daemon/step/published.h"
#include "daemon/step/step-kept.h"
#include "kernels/muon.h"

_Static_assert((int)STEP_MAX_RANKS == (int)CONFIG_MAX_LOCAL_RANKS, "what config admits, a mask must hold");
_Static_assert(sizeof(struct reduction) == STEP_REDUCTION_BYTES, "as step_fixed_bytes() counts it");

/* ---- life ---------------------------------------------------------------------------------------------- */

static const struct step_ops here;
static void reduction_run(struct work *work, uint32_t item);
static void reduction_done(struct work *work);

static int make_reductions(struct step *step, struct reduction **reductions)
{
    const struct layout *layout = step->layout;
    uint64_t before = 0;

    *reductions = calloc(layout->n_parcels + 1, sizeof(**reductions));
    if (!*reductions)
        return -ENOMEM;
    for (uint32_t i = 0; i < layout->n_parcels; i++) {
        struct reduction *reduction = &(*reductions)[i];

        reduction->step = step;
        reduction->parcel = i;
        reduction->staging_elems = before * step->n_pieces;
        before += step_sends_slots(step, i) ? 0 : layout->parcels[i].n_elems;
        reduction->work = (struct work){.run = reduction_run, .done = reduction_done};
        reduction->masks = calloc(layout->parcels[i].n_parts, sizeof(*reduction->masks));
        reduction->sources = calloc(STEP_MAX_RANKS, sizeof(*reduction->sources));
        if (!reduction->masks || !reduction->sources)
            return -ENOMEM;
    }
    return 0;
}

static void free_reductions(const struct step *step, struct reduction *reductions)
{
    for (uint32_t i = 0; reductions && i < step->layout->n_parcels; i++) {
        assert(!reductions[i].busy);
        free(reductions[i].masks);
        free(reductions[i].sources);
    }
    free(reductions);
}

static bool is_alone(const struct step *step)
{
    return step->n_local == step->layout->world_size;
}

bool step_gets_slots(const struct step *step, unsigned n_ranks, uint32_t parcel)
{
    return !step->ops->elsewhere &&
           step_sends_bucket(step->layout, n_ranks, step->wire, step->layout->parcels[parcel].bucket);
}

bool step_sends_slots(const struct step *step, uint32_t parcel)
{
    return step_gets_slots(step, step->n_local, parcel);
}

static int make_staging(struct step *step)
{
    int r;

    if (is_alone(step) || step->ops->elsewhere)
        return 0;
    r = segment_init(&step->staging_segment, "staging",
                     step_staging_bytes(step->layout, step->n_local, step->n_pieces, step->wire));
    step->staging = step->staging_segment.map;
    return r;
}

/* Return: 0 or -errno, which may be a lack of descriptors. */
static int make_parts(struct step *step, const struct step_options *options)
{
    int r = step_keep(step);

    if (r == 0 && options->publishes)
        r = published_new(&step->published, step->layout);
    if (r == 0)
        r = make_reductions(step, &step->reductions);
    if (r == 0)
        r = make_staging(step);
    if (r == 0 && !is_alone(step))
        r = make_reductions(step, &step->combinations);
    if (r == 0 && step->ops->make)
        r = step->ops->make(step);
    return r;
}

int step_new(struct step **out, const struct step_options *options)
{
    const struct layout *layout = options->state->layout;
    struct step *step = calloc(1, sizeof(*step));
    int r;

    if (!step)
        return -ENOMEM;
    assert(options->n_local <= STEP_MAX_RANKS && layout->world_size <= STEP_MAX_WORLD);
    assert(options->first_local + options->n_local <= layout->world_size);
    assert(options->state->first_rank == options->first_local && options->state->n_ranks == options->n_local);
    pthread_mutex_init(&step->finding_lock, NULL);
    step->staging_segment = step->kept = SEGMENT_NULL;
    step->layout = layout;
    step->state = options->state;
    step->kernels = options->kernels;
    step->pool = options->pool;
    step->first_local = options->first_local;
    step->n_local = options->n_local;
    step->optimizer = options->optimizer;
    step->ops = options->ops ? options->ops : &here;
    step->devices = options->devices;
    step->past_caches = options->state->gradient.n_bytes > options->cache_bytes / 2;
    step->wire = options->wire;
    step->n_pieces = subtree_find(layout->world_size, step->first_local, step->n_local, step->pieces);
    step->begun = calloc(layout->n_parts + 1, 1);
    step->contributed = calloc(layout->n_params, 1);
    step->scalars = calloc(layout->n_params, sizeof(*step->scalars));
    r = step->begun && step->contributed && step->scalars ? make_parts(step, options) : -ENOMEM;
    if (r < 0) {
        step_free(step);
        return r;
    }
    *out = step;
    return 0;
}

void step_free(struct step *step)
{
    if (!step)
        return;
    if (step->ops->unmake)
        step->ops->unmake(step);
    free_reductions(step, step->reductions);
    free_reductions(step, step->combinations);
    free(step->begun);
    free(step->contributed);
    free(step->scalars);
    segment_deinit(&step->staging_segment);
    segment_deinit(&step->kept);
    published_free(step->published);
    pthread_mutex_destroy(&step->finding_lock);
    free(step);
}

void step_open(struct step *step)
{
    memset(step->begun, 0, step->layout->n_parts);
    memset(step->contributed, 0, step->layout->n_params);
    step->finding = (struct step_finding){0};
    step->opened_op = step->n_ops;
    step->n_reduced_bytes = 0;
}

/* ---- reduce -------------------------------------------------------------------------------------------- */

/* The leaves of one chunk: the sources that have pushed it, their data, and how the tree joins them. */
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

/* Finds the sources in [first, first + n) that are in the mask of a part. elem: from the parcel's start. */
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

/* Finds the rank whose gradient made a chunk's accumulator not finite. The slots are still held. */
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
        /* Only the node that summed a piece knows the rank, unless the source is the slot of one rank. */
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

/* Collects the sources in [first, first + n) that have pushed the chunk. args->n_leaves: 0 if no source has. */
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
    bool first;             /* the first contribution in this step */
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
            step->sums[chunk_id] = sums[i]; /* the sum of the only local rank */
        }
    }
}

/*
 * Computes the 64-bit sum of a chunk that is sent from the slot and added by another node. step_combine() computes the
 * sums of chunks that this node owns.
 */
static void sum_sent_chunk(struct reduction *reduction, const struct layout_chunk *chunk, uint32_t chunk_id)
{
    struct step *step = reduction->step;
    struct position_sum *sum = &step->sums[chunk_id];
    struct leaves leaves;
    struct reduce_args args;

    assert(step->n_local == 1); /* sums has one for each chunk */
    make_args(reduction, chunk, 0, 1, &leaves, &args);
    if (leaves.n == 0 || state_owns(step->state, chunk->rank))
        return;
    *sum = (struct position_sum){0};
    step->kernels->position_sum_update(sum, args.dtype, args.leaves[0], args.n_elems, args.start_elem);
}

enum { BF16_OVERFLOW_EXPONENT = 127 }; /* rounding can make a value infinite only from 2^127 */

/* Records finite sums that became infinite by rounding. */
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

/* As reduce_into(), but rounds to bf16. Works by blocks that stay in the nearest cache. */
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

    assert(step->wire == DTYPE_BF16); /* as blame_rounding() looks at it */
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

/* Computes the partial sums of piece i of this node. */
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

/* Adds all sources of a chunk to its accumulator, which is in host memory. */
static void reduce_chunk(struct reduction *reduction, uint32_t chunk_id, struct step_slot *slot)
{
    const struct step *step = reduction->step;
    const struct layout_chunk *chunk = &step->layout->chunks[chunk_id];

    assert(state_owns(step->state, chunk->rank)); /* else its accumulator is outside the segment */
    reduce_into(reduction, chunk, chunk_id, 0, reduction->n_sources,
                &(struct target){.elems = step_acc_here(step, chunk_id),
                                 .first = !step->begun[chunk->part],
                                 .past_caches = step->past_caches,
                                 .slot = slot});
}

static void reduce_item(struct reduction *reduction, uint32_t chunk_id)
{
    struct step *step = reduction->step;
    const struct layout_chunk *chunk = &step->layout->chunks[chunk_id];

    (void)failpoint("reduce");
    if (is_alone(step) || reduction->combining) {
        struct step_slot *slot;

        if (!state_owns(step->state, chunk->rank) || !step_begin_chunk(step, reduction->op, chunk_id, &slot))
            return;
        reduce_chunk(reduction, chunk_id, slot);
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

static void reduction_run(struct work *work, uint32_t item)
{
    struct reduction *reduction = container_of(work, struct reduction, work);
    const struct layout_parcel *parcel = &reduction->step->layout->parcels[reduction->parcel];

    recorder_work(RECORD_WORK_REDUCE, reduction->parcel, reduction->micro_batch);
    reduce_item(reduction, parcel->first_chunk + item);
}

static void reduction_done(struct work *work)
{
    step_reduced(container_of(work, struct reduction, work));
}

void step_reduced(struct reduction *reduction)
{
    struct step *step = reduction->step;
    const struct layout_parcel *parcel = &step->layout->parcels[reduction->parcel];

    assert(reduction->busy);
    recorder_note(&(struct record){.kind = reduction->combining ? RECORD_COMBINE : RECORD_REDUCE,
                                   .rank = RECORD_NO_RANK,
                                   .item = reduction->parcel,
                                   .micro_batch = (uint16_t)reduction->micro_batch,
                                   .begin_ns = reduction->posted_ns,
                                   .end_ns = recorder_now()});
    reduction->busy = false;
    for (uint32_t i = 0; i < parcel->n_parts; i++) {
        uint32_t part = parcel->first_part + i;
        unsigned n = (unsigned)__builtin_popcountll(reduction->masks[i]);

        if (n == 0)
            continue;
        if (is_alone(step) || reduction->combining)
            step->begun[part] = step->contributed[step->layout->parts[part].param] = 1;
        if (!reduction->combining)
            step->n_reduced_bytes += n * layout_part_bytes(step->layout, part);
    }
    reduction->done(reduction->userdata, reduction);
}

static struct reduction *reset_reduction(struct reduction *reduction, uint32_t micro_batch, uint32_t pass)
{
    const struct step *step = reduction->step;
    const struct layout_parcel *parcel = &step->layout->parcels[reduction->parcel];

    assert(!reduction->busy);
    reduction->micro_batch = micro_batch;
    reduction->pass = pass;
    reduction->combining = false;
    reduction->op = 0;
    reduction->n_sources = step->n_local;
    reduction->work.n_items = parcel->n_chunks;
    memset(reduction->masks, 0, parcel->n_parts * sizeof(*reduction->masks));
    return reduction;
}

struct reduction *step_prepare(struct step *step, uint32_t parcel, uint32_t micro_batch, uint32_t pass)
{
    assert(parcel < step->layout->n_parcels);
    return reset_reduction(&step->reductions[parcel], micro_batch, pass);
}

struct reduction *step_combine(struct step *step, uint32_t parcel, uint32_t micro_batch, uint32_t pass)
{
    struct reduction *reduction = reset_reduction(&step->combinations[parcel], micro_batch, pass);

    reduction->combining = true;
    reduction->slots = 0;
    reduction->give_only = reduction->cancelled = false;
    reduction->n_sources = 0;
    memset(reduction->held, 0, sizeof(reduction->held));
    return reduction;
}

void step_number(struct reduction *reduction)
{
    assert(!reduction->busy);
    assert(reduction->op == 0); /* a second number would let the next daemon add finished chunks again */
    reduction->op = ++reduction->step->n_ops;
}

void step_finish_torn(struct reduction *reduction)
{
    struct step *step = reduction->step;
    const struct layout_parcel *parcel = &step->layout->parcels[reduction->parcel];
    struct step_slot *slot;
    uint32_t chunk;

    assert(!reduction->busy);
    for (unsigned i = 0; step_find_torn(step, reduction->op, &i, &slot, &chunk);) {
        assert(chunk - parcel->first_chunk < parcel->n_chunks);
        reduce_chunk(reduction, chunk, slot);
        step_end_chunk(step, reduction->op, chunk, slot);
    }
}

void step_post(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction), void *userdata)
{
    assert(!reduction->busy);
    assert(reduction->n_sources <= STEP_MAX_RANKS);
    reduction->busy = true;
    reduction->posted_ns = recorder_now();
    reduction->done = done;
    reduction->userdata = userdata;
    reduction->step->ops->reduce(reduction);
}

void step_was_reduced(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction),
                      void *userdata)
{
    assert(!reduction->busy);
    reduction->busy = true;
    reduction->posted_ns = recorder_now();
    reduction->done = done;
    reduction->userdata = userdata;
    step_reduced(reduction);
}

uint64_t step_sum(const struct step *step, const struct reduction *reduction, unsigned local_rank, uint32_t part)
{
    const struct layout_part *p = &step->layout->parts[part];
    struct position_sum total = {0};

    assert(p->parcel == reduction->parcel);
    assert(local_rank < step->n_local);
    assert(reduction->masks[part - step->layout->parcels[p->parcel].first_part] >> local_rank & 1);
    for (uint32_t c = p->first_chunk; c < p->first_chunk + p->n_chunks; c++)
        position_sum_add(&total, &step->sums[(size_t)c * step->n_local + local_rank]);
    return position_sum_finish(&total, layout_part_bytes(step->layout, part));
}

const uint8_t *step_piece(const struct step *step, uint32_t parcel, unsigned piece)
{
    return step_sends_slots(step, parcel) ? step->reductions[parcel].sources[0] : step_staging(step, parcel, piece);
}

void *step_staging(const struct step *step, uint32_t parcel, unsigned piece)
{
    assert(piece < step->n_pieces);
    assert((step->reductions[parcel].staging_elems + step->layout->parcels[parcel].n_elems * (piece + 1)) *
               dtype_size(step->wire) <=
           step->staging_segment.n_bytes);
    return step->staging + (step->reductions[parcel].staging_elems + step->layout->parcels[parcel].n_elems * piece) *
                               dtype_size(step->wire);
}

void step_contribute(struct step *step, uint32_t param)
{
    assert(param < step->layout->n_params);
    step->contributed[param] = 1;
}

/* ---- norm ---------------------------------------------------------------------------------------------- */

void step_norm(struct step *step, struct exact_sum *total)
{
    const struct layout *layout = step->layout;

    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];
        struct exact_sum *sum = &step->measured[p];

        exact_sum_reset(sum);
        if (!step->contributed[p])
            continue;
        for (uint32_t c = param->first_chunk; c < param->first_chunk + param->n_chunks; c++)
            if (state_owns(step->state, layout->chunks[c].rank))
                exact_sum_merge(sum, &step->results[c].squares);
        exact_sum_carry(sum);
        exact_sum_merge(total, sum);
    }
}

void step_decide(struct step *step, double norm_scale)
{
    struct exact_sum *measured = step->measured;

    step->measured = step->squares;
    step->squares = measured;
    step->squares_copy = 1 - step->squares_copy;
    step->norm_scale = norm_scale;
}

const struct exact_sum *step_squares(const struct step *step, uint32_t param)
{
    assert(param < step->layout->n_params);
    return &step->squares[param];
}

double step_param_norm(const struct step *step, const struct exact_sum *squares)
{
    return sqrt(exact_sum_round(squares)) * step->norm_scale;
}

/* ---- update -------------------------------------------------------------------------------------------- */

struct update_args step_update_args(const struct step *step, uint32_t id, const float *acc)
{
    const struct layout_chunk *chunk = &step->layout->chunks[id];
    const struct layout_param *param = &step->layout->params[chunk->param];
    uint64_t elem = param->offset_elems + chunk->start_elem;
    bool publish = step->state->stage != 3 && param->dtype != DTYPE_F32;
    struct update_args args = {
        .m = state_exp_avg(step->state, param->bucket, elem),
        .v = state_exp_avg_sq(step->state, param->bucket, elem),
        .acc = acc,
        .n_elems = chunk->n_elems,
        .moments = step->state->moments,
        .start_elem = chunk->start_elem,
        .k = &step->scalars[chunk->param],
    };

    assert(state_owns(step->state, chunk->rank));
    if (state_is_master24(step->state, param->bucket)) {
        struct master24 masters = state_master24(step->state, param->bucket, elem);

        args.w16 = masters.weights;
        args.w16_dtype = DTYPE_BF16;
        args.lower = masters.lower;
        return args;
    }
    args.p = state_master(step->state, param->bucket, elem);
    args.w16 = publish ? state_weights(step->state, chunk->param, chunk->start_elem) : NULL;
    args.w16_dtype = publish ? param->dtype : DTYPE_F32;
    return args;
}

static void update_chunk(const struct step *step, uint32_t id, const float *acc, struct step_slot *slot)
{
    step_kernel *kernel = step->kernels->update[step_optimizer(step, step->layout->chunks[id].param)];
    struct update_args args = step_update_args(step, id, acc);

    step_update_in_slot(slot, kernel, &args);
}

void step_update_chunk(struct step *step, uint32_t id, const float *acc)
{
    const struct layout_chunk *chunk = &step->layout->chunks[id];
    struct step_slot *slot;

    (void)failpoint("update");
    if (!state_owns(step->state, chunk->rank) || !step->contributed[chunk->param] ||
        !step_begin_chunk(step, step->update_op, id, &slot))
        return;
    recorder_work(RECORD_WORK_UPDATE, step->layout->parts[chunk->part].parcel, 0);
    if (step->state->snapshot)
        snapshot_put_aside(step->state->snapshot, id);
    update_chunk(step, id, acc, slot);
    step_end_chunk(step, step->update_op, id, slot);
}

void step_finish_chunk(struct step *step, uint32_t id, const float *acc, struct step_slot *slot)
{
    update_chunk(step, id, acc, slot);
    step_end_chunk(step, step->update_op, id, slot);
}

void step_finish_torn_update(struct step *step, uint32_t first, uint32_t end, step_acc acc, const void *userdata)
{
    struct step_slot *slot;
    uint32_t chunk;

    for (unsigned i = 0; step_find_torn(step, step->update_op, &i, &slot, &chunk);) {
        if (chunk < first || chunk >= end)
            continue;
        step_finish_chunk(step, chunk, acc(userdata, chunk), slot);
    }
}

float *step_acc_here(const struct step *step, uint32_t id)
{
    const struct layout_chunk *chunk = &step->layout->chunks[id];
    const struct layout_param *param = &step->layout->params[chunk->param];

    return state_acc(step->state, param->bucket, param->offset_elems + chunk->start_elem);
}

static const float *acc_of(const void *userdata, uint32_t id)
{
    return step_acc_here(userdata, id);
}

static void update_run(struct work *work, uint32_t item)
{
    struct step *step = container_of(work, struct step, update_work);

    step_update_chunk(step, item, step_acc_here(step, item));
}

static void update_and_publish_run(struct work *work, uint32_t item)
{
    struct step *step = container_of(work, struct step, update_work);
    uint32_t chunk = published_chunk(step->published, item);

    step_update_chunk(step, chunk, step_acc_here(step, chunk));
    published_add(step->published, chunk);
}

static void update_done(struct work *work)
{
    struct step *step = container_of(work, struct step, update_work);

    step->update_done(step->update_userdata, 0);
}

static void update_here(struct step *step)
{
    step_finish_torn_update(step, 0, step->layout->n_chunks, acc_of, step);
    if (step->published) {
        published_begin(step->published, step->state->progress.epoch + 1);
        step->update_work.run = update_and_publish_run;
    }
    worker_post(step->pool, &step->update_work);
}

void step_reduce_here(struct reduction *reduction)
{
    worker_post(reduction->step->pool, &reduction->work);
}

static const struct step_ops here = {.reduce = step_reduce_here, .update = update_here};

static float matrix_lr(const struct layout_param *param, const struct hyper *hyper)
{
    struct muon_shape shape = {.rows = param->shape[0], .cols = param->shape[1]};

    return (float)(hyper->lr * muon_lr_factor(shape, hyper->adjust_lr_fn));
}

void step_update(struct step *step, const struct step_update *update, void (*done)(void *userdata, int result),
                 void *userdata)
{
    const struct state_progress *progress = &step->state->progress;
    const struct update_scalars *last = NULL;
    uint64_t last_count = 0;
    uint32_t last_group = 0;
    bool last_muon = false;

    for (uint32_t p = 0; p < step->layout->n_params; p++) {
        uint32_t group = step->layout->params[p].group;
        bool muon = step->layout->params[p].muon;

        if (!step->contributed[p])
            continue;
        /* Reuses the scalars, because pow() is slow, and neighbours nearly always share group and count. */
        if (last && last_group == group && last_count == progress->counts[p] && last_muon == muon)
            step->scalars[p] = *last;
        else
            update_scalars_compute(step_optimizer(step, p), &update->groups[group], update->s, progress->counts[p] + 1,
                                   &step->scalars[p]);
        step->scalars[p].rounding_key = update_rounding_key(p, progress->counts[p] + 1);
        if (muon)
            step->scalars[p].a = matrix_lr(&step->layout->params[p], &update->groups[group]);
        last = &step->scalars[p];
        last_muon = muon;
        last_group = group;
        last_count = progress->counts[p];
    }
    step->groups = update->groups;
    step->update_op = ++step->n_ops;
    step->update_done = done;
    step->update_userdata = userdata;
    step->update_work = (struct work){.run = update_run, .done = update_done, .n_items = step->layout->n_chunks};
    if (step->layout->n_buckets > 0)
        step->ops->update(step);
    else
        update_here(step); /* without buckets no parameter is updated */
}

void step_commit(struct step *step)
{
    uint64_t *counts = state_begin_counts(step->state);

    for (uint32_t p = 0; p < step->layout->n_params; p++)
        counts[p] += step->contributed[p];
    state_use_counts(step->state, state_other_copy(step->state));
}
