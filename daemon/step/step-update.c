/* SPDX-License-Identifier: Apache-2.0 */

/* The update in host memory, chunk by chunk, and the scalars of an update in host memory or on GPUs. */

#include <assert.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/recorder.h"
#include "daemon/memory/snapshot.h"
#include "daemon/memory/spare.h"
#include "daemon/step/published.h"
#include "daemon/step/speculation.h"
#include "daemon/step/step-kept.h"

static void update_chunk(const struct step *step, uint32_t id, const float *acc, struct step_slot *slot)
{
    step_kernel *kernel = step->kernels->update[step_optimizer(step, step->layout->chunks[id].param)];
    struct update_args args = step_update_args(step, id, acc);

    step_update_in_slot(slot, kernel, &args);
}

/* Accepts the chunk's speculative update: publishes its weights, and makes its spare place the valid one. */
static void accept_chunk(const struct step *step, uint32_t id)
{
    (void)failpoint("accept");
    spare_publish(step->state, id);
    (void)failpoint("turn");
    spare_turn(step->state, id, step->update_op);
}

void step_update_chunk(struct step *step, uint32_t id, const float *acc)
{
    const struct layout_chunk *chunk = &step->layout->chunks[id];
    struct step_slot *slot;
    bool accepts;

    (void)failpoint("update");
    if (!state_owns(step->state, chunk->rank) || !step->contributed[chunk->param])
        return;
    accepts = step->speculation && speculation_holds(step->speculation, id, &step->scalars[chunk->param]);
    if (!step_begin_chunk(step, step->update_op, id, &slot))
        return;
    recorder_work(RECORD_WORK_UPDATE, step->layout->parts[chunk->part].parcel, 0);
    if (step->state->snapshot)
        snapshot_put_aside(step->state->snapshot, id);
    if (accepts) {
        step_accept_in_slot(slot);
        accept_chunk(step, id);
    } else {
        update_chunk(step, id, acc, slot);
    }
    step_end_chunk(step, step->update_op, id, slot);
}

void step_finish_chunk(struct step *step, uint32_t id, const float *acc, struct step_slot *slot)
{
    if (slot->accepts)
        accept_chunk(step, id);
    else
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

void step_update(struct step *step, const struct step_update *update, void (*done)(void *userdata, int result),
                 void *userdata)
{
    const struct update_scalars *last = NULL;
    uint32_t last_param = 0;

    for (uint32_t p = 0; p < step->layout->n_params; p++) {
        if (!step->contributed[p])
            continue;
        step_scalars(step, update, p, last, last_param, &step->scalars[p]);
        last = &step->scalars[p];
        last_param = p;
    }
    if (step->speculation)
        speculation_close(step->speculation);
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
