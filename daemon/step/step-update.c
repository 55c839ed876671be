/* SPDX-License-Identifier: Apache-2.0 */

/* The update in host memory, chunk by chunk, and the scalars of an update in host memory or on GPUs. */

#include <assert.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/recorder.h"
#include "daemon/memory/snapshot.h"
#include "daemon/step/published.h"
#include "daemon/step/step-kept.h"
#include "kernels/muon.h"

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

void step_update_here(struct step *step)
{
    step_finish_torn_update(step, 0, step->layout->n_chunks, acc_of, step);
    if (step->published) {
        published_begin(step->published, step->state->progress.epoch + 1);
        step->update_work.run = update_and_publish_run;
    }
    worker_post(step->pool, &step->update_work);
}

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
        step_update_here(step); /* without buckets no parameter is updated */
}

void step_commit(struct step *step)
{
    uint64_t *counts = state_begin_counts(step->state);

    for (uint32_t p = 0; p < step->layout->n_params; p++)
        counts[p] += step->contributed[p];
    state_use_counts(step->state, state_other_copy(step->state));
}
