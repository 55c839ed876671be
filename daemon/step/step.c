/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Creates and frees a step, runs its reductions, and computes the norm. step-reduce.c and step-update.c process one
 * chunk.
 */

#include "daemon/step/step.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/recorder.h"
#include "core/budget/step-sizes.h"
#include "core/config/config.h"
#include "daemon/step/published.h"
#include "daemon/step/speculation.h"
#include "daemon/step/step-kept.h"
#include "daemon/step/step-reduce.h"

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

    if (step_is_alone(step) || step->ops->elsewhere)
        return 0;
    r = segment_init(&step->staging_segment, "staging",
                     step_staging_bytes(step->layout, step->n_local, step->n_pieces, step->wire));
    step->staging = step->staging_segment.map;
    return r;
}

/*
 * Makes the step's segments and reductions, and the memory that its ops need. Return: 0 or -errno, for example if too
 * few descriptors are left.
 */
static int make_parts(struct step *step, const struct step_options *options)
{
    int r = step_keep(step);

    if (r == 0 && options->publishes)
        r = published_new(&step->published, step->layout);
    if (r == 0 && step->turns)
        r = speculation_new(&step->speculation, step);
    if (r == 0)
        r = make_reductions(step, &step->reductions);
    if (r == 0)
        r = make_staging(step);
    if (r == 0 && !step_is_alone(step))
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
    speculation_free(step->speculation);
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
    if (step->speculation)
        speculation_forget(step->speculation);
}

/* ---- reduce -------------------------------------------------------------------------------------------- */

static void reduction_run(struct work *work, uint32_t item)
{
    struct reduction *reduction = container_of(work, struct reduction, work);
    const struct layout_parcel *parcel = &reduction->step->layout->parcels[reduction->parcel];

    recorder_work(RECORD_WORK_REDUCE, reduction->parcel, reduction->micro_batch);
    step_reduce_item(reduction, parcel->first_chunk + item);
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
        if (step_is_alone(step) || reduction->combining)
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

void step_complete(struct step *step, uint32_t parcel, step_ready ready, void *userdata)
{
    if (step->ops->complete)
        step->ops->complete(step, parcel, ready, userdata);
    else
        ready(userdata, parcel);
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

void step_reduce_here(struct reduction *reduction)
{
    worker_post(reduction->step->pool, &reduction->work);
}

static const struct step_ops here = {.reduce = step_reduce_here, .update = step_update_here};

/* ---- replay -------------------------------------------------------------------------------------------- */

static void await_record(struct reduction *reduction)
{
    assert(reduction->busy); /* busy until step_was_reduced() or step_end_replay() */
}

void step_begin_replay(struct step *step)
{
    assert(!step->ops_after);
    step->ops_after = step->ops;
    step->replay_ops = *step->ops;
    step->replay_ops.reduce = await_record;
    step->ops = &step->replay_ops;
}

void step_was_reduced(struct reduction *reduction, const uint64_t *sums)
{
    assert(reduction->busy && reduction->step->ops_after);
    reduction->step->found_sums = sums;
    step_reduced(reduction);
    reduction->step->found_sums = NULL;
}

/* Finishes the torn chunks of a reduction (step-kept.h), which workers of a killed daemon were reducing. */
static void finish_torn(struct reduction *reduction)
{
    struct step *step = reduction->step;
    const struct layout_parcel *parcel = &step->layout->parcels[reduction->parcel];
    struct step_slot *slot;
    uint32_t chunk;

    for (unsigned i = 0; step_find_torn(step, reduction->op, &i, &slot, &chunk);) {
        assert(chunk - parcel->first_chunk < parcel->n_chunks);
        step_reduce_chunk(reduction, chunk, slot);
        step_end_chunk(step, reduction->op, chunk, slot);
    }
}

void step_end_replay(struct step *step)
{
    assert(step->ops_after);
    step->ops = steal_ptr(step->ops_after);
    /*
     * Finishes all torn chunks before any work is posted, because a worker that begins another chunk overwrites a slot.
     */
    for (uint32_t p = 0; p < step->layout->n_parcels; p++)
        if (step->reductions[p].busy)
            finish_torn(&step->reductions[p]);
    for (uint32_t p = 0; p < step->layout->n_parcels; p++)
        if (step->reductions[p].busy)
            step->ops->reduce(&step->reductions[p]);
}

/* ---- sums ---------------------------------------------------------------------------------------------- */

uint64_t step_sum(const struct step *step, const struct reduction *reduction, unsigned local_rank, uint32_t part)
{
    const struct layout_part *p = &step->layout->parts[part];
    const struct layout_parcel *parcel = &step->layout->parcels[reduction->parcel];
    uint32_t i = part - parcel->first_part;
    struct position_sum total = {0};

    assert(p->parcel == reduction->parcel);
    assert(local_rank < step->n_local);
    assert(reduction->masks[i] >> local_rank & 1);
    if (step->found_sums)
        return step->found_sums[local_rank * (size_t)parcel->n_parts + i];
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
