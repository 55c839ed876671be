/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Stage 3: ranks gather whole parameters. This file tracks which parameters each rank has gathered, and how many it may
 * hold. The executor has the pools (pools.h).
 */

#include "daemon/job/state/gather.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "core/layout/layout.h"
#include "core/wire/node-wire.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/step/executor.h"
#include "daemon/step/pools.h"

bool gather_is_busy(const struct job *job)
{
    return executor_is_busy(job->executor);
}

/* Does the job have pools? If not, all weights are published. */
static bool has_pools(const struct job *job)
{
    return job->executor->gathers;
}

static struct pools *pools_of(const struct job *job)
{
    assert(job->executor->pools);
    return job->executor->pools;
}

static unsigned local_rank(const struct job *job, const struct job_rank *rank)
{
    assert(job_is_own(job, rank->rank));
    return rank->rank - job->world.first;
}

static void release_param(struct job *job, struct job_rank *rank, uint32_t param)
{
    rank->gathers.counts[param] = 0;
    assert(rank->gathers.live_elems >= job->layout->params[param].n_elems);
    rank->gathers.live_elems -= job->layout->params[param].n_elems;
    pools_release(pools_of(job), param);
}

/* Counts the parameter as gathered. Return: the number of elements that the rank did not hold before. */
static uint64_t hold_param(struct job *job, struct job_rank *rank, uint32_t param)
{
    uint64_t n_elems = job->layout->params[param].n_elems;

    if (rank->gathers.counts[param]++ > 0)
        return 0;
    rank->gathers.live_elems += n_elems;
    pools_hold(pools_of(job), param);
    return n_elems;
}

static void undo_gather(struct job *job, struct job_rank *rank)
{
    for (uint32_t i = 0; i < rank->gathers.n_params; i++) {
        assert(rank->gathers.counts[rank->gathers.params[i]] > 0);
        if (--rank->gathers.counts[rank->gathers.params[i]] == 0)
            release_param(job, rank, rank->gathers.params[i]);
    }
    rank->gathers.n_params = 0;
}

static void refuse_lost(struct job *job, struct job_rank *rank)
{
    struct evidence_quota evidence = {.at = job_at(job, rank),
                                      .what = "pool of gathered weights",
                                      .unit = "bytes",
                                      .held = pools_held_bytes(job->executor->pools),
                                      .allowed = job->memory.planned.pool,
                                      .fix = "free memory on this machine"};

    undo_gather(job, rank);
    job_fault(job, rank, cause_quota(&evidence));
    job_is_held(job, rank);
}

/* Answers with the places of the gathered parameters in the pool. Return: 0 or -ENOMEM. */
static int answer_with_places(struct job *job, struct job_rank *rank)
{
    _cleanup_free_ uint64_t *offsets = calloc(rank->gathers.n_params + 1, sizeof(*offsets));
    bool moves;

    if (!offsets)
        return -ENOMEM;
    moves = pools_places(pools_of(job), local_rank(job, rank), rank->gathers.params, rank->gathers.n_params, offsets);
    job_answer(job, rank,
               &(struct reply){.type = REPLY_DONE,
                               .done = {.position = job_position(job, rank),
                                        .loss_scale = job_loss_scale(job),
                                        .pool_offsets = moves ? offsets : NULL,
                                        .n_pool_offsets = moves ? rank->gathers.n_params : 0}},
               NULL, 0);
    return 0;
}

void gather_settle(struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];
        enum gathered found;

        if (rank->wait != WAIT_GATHER)
            continue;
        found = pools_find(pools_of(job), local_rank(job, rank), rank->gathers.params, rank->gathers.n_params);
        if (found == GATHER_LOADS)
            continue;
        if (found == GATHER_THERE && answer_with_places(job, rank) == 0)
            rank->gathers.n_params = 0;
        else
            refuse_lost(job, rank);
    }
}

/* Charges the parameters to the rank. Return: false, and the rank has a fault, if its quota does not allow them. */
static bool charge_gather(struct job *job, struct job_rank *rank, const struct request_gather *request)
{
    uint64_t asked = 0, allowed = job->config->zero.stage3_max_live_parameters;

    for (size_t i = 0; i < request->n_params; i++)
        asked += hold_param(job, rank, request->params[i]);
    for (size_t i = 0; i < request->n_params; i++)
        rank->gathers.params[rank->gathers.n_params++] = request->params[i];
    if (rank->gathers.live_elems <= allowed)
        return true;
    undo_gather(job, rank);
    job_fault(
        job, rank,
        cause_quota(&(struct evidence_quota){
            .at = job_at(job, rank),
            .what = "live parameters (stage3_max_live_parameters)",
            .unit = "elements",
            .asked = asked,
            .held = rank->gathers.live_elems,
            .allowed = allowed,
            .fix = "release modules before gathering others, or raise zero_optimization.stage3_max_live_parameters"}));
    return false;
}

/*
 * Is the rank's fault reported only at the boundary? If the gathers of the running backward were refused, the backward
 * would end early, and only its first fault would be reported.
 */
static bool is_told_later(const struct job *job, const struct job_rank *rank)
{
    return rank->process.fault.code && !rank->process.fault.told && !rank->process.abort_notice &&
           job->ledger.ranks[rank->rank].open;
}

/* Return: NULL, or why the request is invalid. */
static const char *check_gather(const struct job *job, const struct job_rank *rank,
                                const struct request_gather *request)
{
    if (!job->kept.has_weights) /* values loaded now would be used as the weights later */
        return "Gather: sent before the answer to Ready";
    for (size_t i = 0; i < request->n_params; i++)
        if (request->params[i] >= job->layout->n_params)
            return "Gather.params: no such parameter";
    if (has_pools(job) && !pools_fits(pools_of(job), local_rank(job, rank), request->params, request->n_params))
        return "Gather.params: more than fits into the rank's pool";
    return NULL;
}

void job_gather(struct job *job, struct job_rank *rank, const struct request_gather *request)
{
    const char *wrong;
    uint32_t *gathering;

    if (!is_told_later(job, rank) && job_is_held(job, rank))
        return;
    wrong = check_gather(job, rank, request);
    if (wrong) {
        job_drop_peer(job, rank, wrong);
        return;
    }
    if (!has_pools(job)) {
        job_answer_done(job, rank);
        return;
    }
    rank->gathers.n_params = 0;
    gathering = realloc(rank->gathers.params, (request->n_params + 1) * sizeof(*gathering));
    if (!gathering) {
        refuse_lost(job, rank);
        return;
    }
    rank->gathers.params = gathering;
    if (!charge_gather(job, rank, request)) {
        job_is_held(job, rank);
        return;
    }
    pools_gather(pools_of(job), local_rank(job, rank), rank->gathers.params, rank->gathers.n_params);
    job_wait(job, rank, WAIT_GATHER);
    gather_settle(job);
}

void job_release(struct job *job, struct job_rank *rank, const struct request_release *request)
{
    for (size_t i = 0; i < request->n_params; i++) {
        uint32_t param = request->params[i];

        if (param >= job->layout->n_params || (has_pools(job) && rank->gathers.counts[param] == 0)) {
            job_drop_peer(job, rank, "Release.params: not gathered by this rank");
            return;
        }
        if (has_pools(job) && --rank->gathers.counts[param] == 0)
            release_param(job, rank, param);
    }
}

/*
 * The rank has held these parameters since an earlier daemon. They keep their places in the pool, and get the current
 * weights.
 */
void job_held(struct job *job, struct job_rank *rank, const struct request_held *request)
{
    for (size_t i = 0; i < request->n_params; i++) {
        if (request->params[i] >= job->layout->n_params || !has_pools(job)) {
            job_drop_peer(job, rank, "Held.params: no such parameter, or no pool");
            return;
        }
        hold_param(job, rank, request->params[i]);
    }
}

void job_prefetch(struct job *job, struct job_rank *rank, const struct request_prefetch *request)
{
    for (size_t i = 0; i < request->n_params; i++) {
        if (request->params[i] >= job->layout->n_params) {
            job_drop_peer(job, rank, "Prefetch.params: no such parameter");
            return;
        }
    }
    /* Outside of training a hint is dropped, because a load while weights change would mix old and new weights. */
    if (has_pools(job) && job->kept.has_weights && job->phase == JOB_TRAINING)
        pools_hint(pools_of(job), local_rank(job, rank), request->params, request->n_params);
}

void gather_detach(struct job *job, struct job_rank *rank)
{
    if (!has_pools(job) || !rank->gathers.counts)
        return;
    for (uint32_t p = 0; p < job->layout->n_params; p++)
        if (rank->gathers.counts[p] > 0)
            release_param(job, rank, p);
    assert(rank->gathers.live_elems == 0);
    rank->gathers.n_params = 0;
}
