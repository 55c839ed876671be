/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Motions between the GPUs of several nodes. Node 0 announces each parcel, the gathering after an update and, in stage
 * 3, each gather of a rank. Each node submits these motions to its GPUs' engine in the sequence of the announcements.
 */

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/wire/device-wire.h"
#include "daemon/exchange/exchange-inside.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/memory/ring.h"
#include "daemon/step/step-device.h"

static const char *give_waiting(struct exchange *exchange);

/* Submits the next motions. Call it when a motion has ended. Ends the generation if a motion cannot be submitted. */
static void go_on_giving(struct exchange *exchange)
{
    const char *wrong = give_waiting(exchange);

    if (wrong)
        exchange->ops.wrong(exchange->ops.userdata, wrong);
    job_todo(exchange->job);
}

static void reduced_there(void *userdata, struct reduction *reduction)
{
    struct motion *motion = userdata;
    struct exchange *exchange = motion->exchange;

    assert(motion->working);
    assert(motion->serves || exchange->job->work.n_under_way > 0);
    motion->working = false;
    if (!motion->serves)
        exchange->job->work.n_under_way--;
    for (unsigned i = 0; i < reduction->step->n_local; i++)
        if (reduction->held[i])
            ring_unhold(steal_ptr(reduction->held[i]));
    if (reduction->cancelled) { /* the generation has ended, and node 0 announces the motion again */
        exchange_drop_motion(motion);
        return;
    }
    if (!motion->serves &&
        parcel_keeps(&exchange->job->work.parcels[motion->parcel], motion->micro_batch, motion->pass))
        collect_combined(exchange->job, motion->parcel);
    exchange_finish(motion);
    go_on_giving(exchange);
}

/* Finds and holds the slots of the local ranks. A rank that pushed the parcel still has its slot. */
static void take_slots(struct exchange *exchange, struct reduction *reduction)
{
    const struct job *job = exchange->job;

    for (unsigned i = 0; i < reduction->step->n_local; i++) {
        struct ring *ring;
        const struct ring_slot *slot = collect_find_slot(&job->ranks[job->world.first + i], reduction->parcel,
                                                         reduction->micro_batch, reduction->pass, &ring);

        reduction->sources[i] = slot ? slot->data : NULL;
        if (!slot)
            continue;
        reduction->held[i] = ring;
        ring_hold(ring);
    }
}

static const char *reduce_there(struct motion *motion)
{
    struct exchange *exchange = motion->exchange;
    struct job *job = exchange->job;
    struct reduction *reduction = step_combine(job->step, motion->parcel, motion->micro_batch, motion->pass);
    uint32_t n_parts = job->layout->parcels[motion->parcel].n_parts;

    assert(exchange->n_sources == job->layout->world_size);
    assert(!motion->working);
    memcpy(reduction->masks, motion->masks, n_parts * sizeof(*motion->masks)); /* source i is rank i */
    reduction->give_only = motion->serves;
    reduction->op = motion->tag; /* unchanged when node 0 announces the motion again */
    take_slots(exchange, reduction);
    motion->working = true;
    if (!motion->serves)
        job->work.n_under_way++;
    if (step_device_combine(reduction, reduced_there, motion) == 0)
        return NULL;
    reduction->cancelled = true;
    reduced_there(motion, reduction);
    return EXCHANGE_NO_MEMORY;
}

static void gathered_there(void *userdata, int result)
{
    struct motion *motion = userdata;
    struct exchange *exchange = motion->exchange;

    assert(motion->working);
    motion->working = false;
    if (result < 0) { /* the generation has ended, and node 0 announces the motion again */
        exchange_drop_motion(motion);
        return;
    }
    exchange_finish(motion);
    go_on_giving(exchange);
}

/* Submits a gather of all weights for all ranks, after an update, or of the parameters of a fetch for one rank. */
static const char *gather_there(struct motion *motion)
{
    struct step *step = motion->exchange->job->step;
    int r;

    assert(!motion->working);
    motion->working = true;
    if (motion->kind == MOTION_GATHER)
        r = step_device_gather(step, gathered_there, motion);
    else
        r = step_device_fetch(step,
                              &(struct device_order_fetch){
                                  .rank = motion->rank, .params = motion->gathered, .n_params = motion->n_gathered},
                              gathered_there, motion);
    if (r == 0)
        return NULL;
    motion->working = false;
    return EXCHANGE_NO_MEMORY;
}

/* Return: whether an earlier motion of the same parcel, in which this node only sends, is unfinished. */
static bool is_before(const struct motion *motion)
{
    for (const struct motion *other = motion->next; other; other = other->next)
        if (other->kind == MOTION_PARCEL && motion->kind == MOTION_PARCEL && other->parcel == motion->parcel)
            return true;
    return false;
}

/* Submits motions in the sequence of node 0's announcements, so that the engines of all nodes get the same sequence. */
static const char *give_waiting(struct exchange *exchange)
{
    for (;;) {
        struct motion *oldest = NULL;
        const char *wrong;

        for (struct motion *motion = exchange->motions; motion; motion = motion->next)
            if (motion->on_devices && !motion->given)
                oldest = motion; /* the list begins with the newest */
        if (!oldest || is_before(oldest))
            return NULL;
        oldest->given = true;
        wrong = oldest->kind == MOTION_PARCEL ? reduce_there(oldest) : gather_there(oldest);
        if (wrong)
            return wrong;
    }
}

const char *exchange_give_to_devices(struct motion *motion)
{
    assert(!motion->given);
    motion->on_devices = true;
    return give_waiting(motion->exchange);
}
