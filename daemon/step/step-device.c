/* SPDX-License-Identifier: Apache-2.0 */

/* Runs a step whose data are on GPUs. Reductions, gathers, fetches and updates are orders to the engine. */

#include "daemon/step/step-device.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/budget/muon-cost.h"
#include "daemon/engines/device-keep.h"
#include "daemon/engines/devices.h"
#include "daemon/memory/ring.h"
#include "daemon/step/step.h"

/* ---- reduce ---------------------------------------------------------------------------------------------- */

/* Return: whether the local rank has pushed the part. Mask bits are ranks of the world. */
static bool is_pusher(const struct reduction *reduction, uint32_t part, unsigned local)
{
    return reduction->masks[part] >> (reduction->step->first_local + local) & 1;
}

/* Sets the engine's inputs: which ranks have pushed which parts, and which accumulators are already in use. */
static void set_inputs(const struct reduction *reduction, struct device_keep *keep)
{
    const struct step *step = reduction->step;
    const struct layout_parcel *parcel = &step->layout->parcels[reduction->parcel];
    uint32_t n_words = keep->plan.head->mask_words;

    assert(step->first_local + step->n_local <= STEP_MAX_RANKS); /* a mask has bits for all ranks of the world */
    assert(n_words > 0);
    for (uint32_t i = 0; i < parcel->n_parts; i++) {
        uint64_t *mask = &keep->inputs.masks[(size_t)(parcel->first_part + i) * n_words];

        memset(mask, 0, n_words * sizeof(*mask));
        mask[0] = reduction->masks[i];
        keep->inputs.begun[parcel->first_part + i] = step->begun[parcel->first_part + i];
    }
}

static bool has_pushed_any(const struct reduction *reduction, unsigned local)
{
    const struct layout_parcel *parcel = &reduction->step->layout->parcels[reduction->parcel];

    for (uint32_t i = 0; i < parcel->n_parts; i++)
        if (is_pusher(reduction, i, local))
            return true;
    return false;
}

static size_t find_slots(const struct reduction *reduction, struct device_slot *slots)
{
    size_t n = 0;

    for (unsigned local = 0; local < reduction->step->n_local; local++) {
        const struct ring *ring = reduction->held[local];
        const struct ring_slot *slot;

        if (!has_pushed_any(reduction, local))
            continue;
        slot = ring_find(ring, reduction->parcel, reduction->micro_batch, reduction->pass);
        assert(slot && slot->data == reduction->sources[local]);
        assert(n < DEVICE_MAX_LOCAL);
        slots[n++] =
            (struct device_slot){.local_rank = local, .offset_bytes = slot->offset_bytes, .point = slot->point};
    }
    return n;
}

/* Copies the engine's sums, squares and finding to the step. */
static void take_results(const struct reduction *reduction)
{
    struct step *step = reduction->step;
    const struct device_results *results = &devices_keep(step->devices)->results;
    const struct device_result_finding *found = &results->findings[reduction->parcel];
    const struct layout_parcel *parcel = &step->layout->parcels[reduction->parcel];

    for (uint32_t c = parcel->first_chunk; c < parcel->first_chunk + parcel->n_chunks; c++) {
        const struct layout_chunk *chunk = &step->layout->chunks[c];
        uint32_t part = chunk->part - parcel->first_part;

        if (reduction->masks[part] && state_owns(step->state, chunk->rank))
            step->results[c].squares = results->squares[c];
        for (unsigned local = 0; local < step->n_local; local++)
            if (is_pusher(reduction, part, local))
                step->sums[(size_t)c * step->n_local + local] = results->sums[(size_t)c * step->n_local + local];
    }
    if (found->found)
        step_keep_finding(step, &(struct step_finding){.found = true,
                                                       .overflowed = found->overflowed,
                                                       .micro_batch = reduction->micro_batch,
                                                       .param = found->param,
                                                       .rank = found->rank,
                                                       .elem = found->elem,
                                                       .value = found->value,
                                                       .n_nan = found->n_nan,
                                                       .n_inf = found->n_inf});
}

/*
 * Releases the rings that the reduction holds. Call it when the job ends, because then no engine carries out the
 * reduction.
 */
static void cancel(struct reduction *reduction)
{
    assert(reduction->busy);
    reduction->busy = false;
    for (unsigned local = 0; local < reduction->step->n_local; local++)
        if (reduction->held[local])
            ring_unhold(reduction->held[local]);
}

static void reduce_done(void *userdata, int result)
{
    struct reduction *reduction = userdata;

    if (result < 0) {
        cancel(reduction);
        return;
    }
    take_results(reduction);
    step_reduced(reduction);
}

static void combine_done(void *userdata, int result)
{
    struct reduction *reduction = userdata;

    assert(reduction->busy && reduction->combining);
    reduction->cancelled = result < 0;
    if (result == 0 && !reduction->give_only)
        take_results(reduction);
    if (result == 0 && !reduction->give_only) {
        step_reduced(reduction);
        return;
    }
    reduction->busy = false;
    reduction->done(reduction->userdata, reduction);
}

/* Retries a reduction's order that failed for lack of memory. Loop thread. */
static void post_again(struct work *work)
{
    step_device_reduce(container_of(work, struct reduction, work));
}

static void skip_item(struct work *work, uint32_t item)
{
    (void)work;
    (void)item;
}

static int order_reduction(struct reduction *reduction, devices_done done)
{
    struct step *step = reduction->step;
    struct device_slot slots[DEVICE_MAX_LOCAL];
    struct device_command command = {.type = DEVICE_COMMAND_REDUCE,
                                     .reduce = {.parcel = reduction->parcel,
                                                .micro_batch = reduction->micro_batch,
                                                .pass = reduction->pass,
                                                .slots = slots,
                                                .n_slots = find_slots(reduction, slots),
                                                .give_only = reduction->give_only,
                                                .op = reduction->op}};
    uint64_t n_bytes = layout_parcel_bytes(step->layout, reduction->parcel) * step->n_local;

    (void)failpoint("reduce");
    set_inputs(reduction, devices_keep(step->devices));
    return devices_order(step->devices, &command, n_bytes, done, reduction);
}

int step_device_combine(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction),
                        void *userdata)
{
    int r;

    assert(!reduction->busy && reduction->combining);
    reduction->busy = true;
    reduction->done = done;
    reduction->userdata = userdata;
    r = order_reduction(reduction, combine_done);
    if (r < 0)
        reduction->busy = false;
    return r;
}

void step_device_reduce(struct reduction *reduction)
{
    struct step *step = reduction->step;

    assert(reduction->busy && !reduction->combining);
    if (order_reduction(reduction, reduce_done) == 0)
        return;
    reduction->work = (struct work){.run = skip_item, .done = post_again, .n_items = 1};
    worker_post(step->pool, &reduction->work);
}

/* ---- weights --------------------------------------------------------------------------------------------- */

int step_device_gather(const struct step *step, devices_done done, void *userdata)
{
    const struct device_command command = {.type = DEVICE_COMMAND_GATHER,
                                           .gather = {.n_buckets = step->layout->n_buckets}};

    return devices_order(step->devices, &command, step->layout->weight_bytes, done, userdata);
}

int step_device_fetch(const struct step *step, const struct device_order_fetch *fetch, devices_done done,
                      void *userdata)
{
    const struct device_command command = {.type = DEVICE_COMMAND_FETCH, .fetch = *fetch};
    uint64_t n_bytes = 0;

    assert(fetch->n_params <= DEVICE_MAX_FETCHES);
    for (size_t i = 0; i < fetch->n_params; i++) {
        const struct layout_param *p = &step->layout->params[fetch->params[i].param];

        n_bytes += p->n_elems * dtype_size(p->dtype);
    }
    return devices_order(step->devices, &command, n_bytes, done, userdata);
}

/* ---- update ---------------------------------------------------------------------------------------------- */

static void device_update_done(void *userdata, int result)
{
    struct step *step = userdata;

    assert(step->n_updating > 0);
    if (--step->n_updating == 0)
        step->update_done(step->update_userdata, result);
}

static void order_rest(struct step *step);

static void order_again(struct work *work)
{
    order_rest(container_of(work, struct step, update_work));
}

bool step_device_gathers(const struct step *step)
{
    return step->layout->world_size > 1 && step->n_local == step->layout->world_size && step->state->stage != 3;
}

/*
 * Return: the cost of Muon's matrix products as bytes for an order's time limit. One byte per 10,000 operations allows
 * for 100 Gflop/s.
 */
static uint64_t matrix_bytes(const struct step *step)
{
    unsigned ns_steps = 0;
    struct muon_cost cost;

    for (uint32_t i = 0; i < step->layout->n_groups; i++)
        ns_steps = MAX(ns_steps, step->groups[i].ns_steps);
    muon_cost_count(step->layout, step->first_local, step->n_local, ns_steps, &cost);
    return (uint64_t)(cost.flops / 1e4);
}

/* Orders the update, and then the gathering. The engine runs the orders one after the other. */
static void order_rest(struct step *step)
{
    const struct device_command update = {.type = DEVICE_COMMAND_UPDATE,
                                          .update = {.step = step->state->progress.epoch + 1}};
    const struct device_command gather = {.type = DEVICE_COMMAND_GATHER,
                                          .gather = {.n_buckets = step->layout->n_buckets}};
    uint64_t n_bytes = step->layout->padded_elems * 3 * sizeof(float) + matrix_bytes(step);

    for (; step->n_to_order > 0; step->n_to_order--) {
        bool first = !step_device_gathers(step) || step->n_to_order == 2;
        int r = devices_order(step->devices, first ? &update : &gather, n_bytes, device_update_done, step);

        if (r == 0)
            continue;
        if (r == -ECANCELED) { /* only on several nodes, where no gathering is ordered */
            device_update_done(step, r);
            return; /* the step may have been freed */
        }
        /* Out of memory for the order. The loop retries. */
        step->update_work = (struct work){.run = skip_item, .done = order_again, .n_items = 1};
        worker_post(step->pool, &step->update_work);
        return;
    }
}

static void order_update(struct step *step)
{
    struct device_keep *keep = devices_keep(step->devices);

    assert(step->n_updating == 0);
    (void)failpoint("update");
    memcpy(keep->inputs.contributed, step->contributed, step->layout->n_params);
    memcpy(keep->inputs.scalars, step->scalars, step->layout->n_params * sizeof(*step->scalars));
    memcpy(keep->inputs.groups, step->groups, step->layout->n_groups * sizeof(*step->groups));
    step->n_updating = step->n_to_order = step_device_gathers(step) ? 2 : 1;
    order_rest(step);
}

const struct step_ops step_device_ops = {.reduce = step_device_reduce, .update = order_update, .elsewhere = true};
