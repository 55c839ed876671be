/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Collecting reduces a parcel that all ranks have pushed, and credits its slots.
 *
 * Each parcel has a position, the (micro-batch, pass) that is reduced next. The parcel is complete when every rank has
 * pushed all of its parts at that position, or has ended that micro-batch. So the order of sums is that of
 * docs/numerics.md whatever the order of arrival, and a parcel is reduced as early as possible.
 */

#include "daemon/job/transaction/collect.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/layout/layout.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/parcels.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/stats.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/transaction/admit.h"
#include "daemon/job/transaction/collect-inside.h"
#include "daemon/job/transaction/speculate.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/ring.h"
#include "daemon/step/step.h"

/* ---- what is complete ---------------------------------------------------------------------------------- */

bool collect_has_ended(const struct job *job, const struct job_rank *rank, uint32_t micro_batch)
{
    const struct ledger_rank *ledger = &job->ledger.ranks[rank->rank];

    return ledger->asked || rank->kept.left || ledger->n_ended > micro_batch;
}

static struct ring_slot *find_slot(const struct job_rank *rank, uint32_t parcel, struct parcel_position at,
                                   struct ring **ring)
{
    for (size_t i = 0; i < ARRAY_SIZE(rank->rings); i++) {
        struct ring_slot *slot = rank->rings[i] ? ring_find(rank->rings[i], parcel, at.micro_batch, at.pass) : NULL;

        if (slot && slot->n_pushed > 0 && !slot->redo) {
            *ring = rank->rings[i];
            return slot;
        }
    }
    return NULL;
}

struct ring_slot *collect_find_slot(const struct job_rank *rank, uint32_t parcel, uint32_t micro_batch, uint32_t pass,
                                    struct ring **ring)
{
    return find_slot(rank, parcel, (struct parcel_position){.micro_batch = micro_batch, .pass = pass}, ring);
}

enum completeness { OPEN, COMPLETE, EMPTY };

static enum completeness find_completeness(const struct job *job, uint32_t parcel, struct parcel_position at)
{
    bool any = false;

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        const struct job_rank *rank = &job->ranks[r];
        struct ring *ring;
        const struct ring_slot *slot = find_slot(rank, parcel, at, &ring);

        if (!collect_has_ended(job, rank, at.micro_batch) &&
            (!slot || slot->n_pushed < job->layout->parcels[parcel].n_parts))
            return OPEN;
        any |= slot != NULL;
    }
    return any ? COMPLETE : EMPTY;
}

/* Returns the latest micro-batch in which a rank may have pushed. */
static uint32_t furthest(const struct job *job)
{
    uint32_t most = 0;

    for (unsigned r = job->world.first; r < job->world.end; r++)
        most = MAX(most, job->ledger.ranks[r].n_ended);
    return most;
}

/* ---- reducing ------------------------------------------------------------------------------------------ */

void collect_begin_work(struct job *job)
{
    if (job->work.n_under_way++ == 0)
        job->stats.times.reduce_busy_since_ns = job_now(job);
}

void collect_end_work(struct job *job)
{
    assert(job->work.n_under_way > 0);
    if (--job->work.n_under_way == 0)
        job->stats.times.reduce_now_ns += job_now(job) - job->stats.times.reduce_busy_since_ns;
}

void collect_settled(struct job *job, uint32_t parcel)
{
    if (job->work.parcels[parcel].state != PARCEL_SUMMED)
        return;
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];
        struct ring *ring;
        struct ring_slot *slot = find_slot(rank, parcel, job->work.parcels[parcel].at, &ring);

        if (!slot || !slot->posted)
            continue;
        ring_credit(ring, slot);
        rank->process.slot_credited = true;
        admit_settle(job, rank);
    }
    speculate_parcel(job, parcel);
    parcel_settle(&job->work.parcels[parcel]);
    collect_parcel(job, parcel);
}

static void fill_masks(struct job *job, struct reduction *reduction, unsigned rank)
{
    const struct layout_parcel *parcel = &job->layout->parcels[reduction->parcel];

    for (uint32_t i = 0; i < parcel->n_parts; i++)
        if (ledger_entry(&job->ledger, rank, parcel->first_part + i)->n_pushed > reduction->pass)
            reduction->masks[i] |= UINT64_C(1) << (rank - job->world.first);
}

/*
 * Prepares the reduction of the parcel at that position: lists the ranks that have pushed it, and the parts that each
 * has pushed.
 */
static struct reduction *prepare_reduction(struct job *job, uint32_t parcel, struct parcel_position at)
{
    struct reduction *reduction = step_prepare(job->step, parcel, at.micro_batch, at.pass);

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct ring *ring;
        struct ring_slot *slot = find_slot(&job->ranks[r], parcel, at, &ring);

        reduction->sources[r - job->world.first] = slot ? slot->data : NULL;
        if (slot)
            fill_masks(job, reduction, r);
    }
    return reduction;
}

static void post_rank(struct job *job, struct reduction *reduction, unsigned rank)
{
    const struct layout_parcel *parcel = &job->layout->parcels[reduction->parcel];
    unsigned local = rank - job->world.first;
    struct ring *ring;

    if (!reduction->sources[local])
        return;
    find_slot(&job->ranks[rank], reduction->parcel, job->work.parcels[reduction->parcel].at, &ring)->posted = true;
    if (parcels_sends_slots(job->coordinator, reduction->parcel))
        parcels_lend(job->coordinator, reduction->parcel, ring);
    for (uint32_t i = 0; i < parcel->n_parts; i++)
        if (reduction->masks[i] >> local & 1)
            ledger_post(&job->ledger, rank, parcel->first_part + i);
}

/* Posts the reduction: from now on its gradients belong to the step's sum. */
static void post_reduction(struct job *job, struct reduction *reduction)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        post_rank(job, reduction, r);
    step_number(reduction);
    job_record(job, NULL, JOURNAL_POSTED,
               &(struct journal_posted){.op = reduction->op,
                                        .parcel = reduction->parcel,
                                        .micro_batch = reduction->micro_batch,
                                        .pass = reduction->pass},
               sizeof(struct journal_posted), NULL, 0);
    (void)failpoint("posted");
}

void collect_take(struct job *job, uint32_t parcel)
{
    parcel_take(&job->work.parcels[parcel]);
    post_reduction(job, &job->step->reductions[parcel]);
    job->work.summing->start(job, parcel);
}

/* Are the rank's gradients of the parcel announced to the other nodes, but in no sum yet? */
static bool is_promised(const struct job *job, const struct job_rank *rank, uint32_t parcel)
{
    return job->work.parcels[parcel].state == PARCEL_PROMISED &&
           job->step->reductions[parcel].sources[rank->rank - job->world.first];
}

bool collect_has_promised(const struct job *job, const struct job_rank *rank)
{
    for (uint32_t p = 0; p < job->layout->n_parcels; p++)
        if (is_promised(job, rank, p))
            return true;
    return false;
}

void collect_keep_promises(struct job *job, const struct job_rank *rank)
{
    for (uint32_t p = 0; job->phase == JOB_TRAINING && p < job->layout->n_parcels; p++)
        if (is_promised(job, rank, p))
            collect_take(job, p);
}

void collect_parcel(struct job *job, uint32_t parcel)
{
    struct parcel *its = &job->work.parcels[parcel];
    uint32_t last;

    assert(parcel < job->layout->n_parcels);
    job->work.summing->start(job, parcel); /* a taken parcel may have waited for another sum */
    if (job->phase != JOB_TRAINING || its->state != PARCEL_OPEN || parcels_withdraws(job->coordinator))
        return;
    last = furthest(job);
    while (its->at.micro_batch <= last) {
        switch (find_completeness(job, parcel, its->at)) {
        case OPEN:
            return;
        case COMPLETE:
            parcel_complete(its);
            parcels_complete(job->coordinator, prepare_reduction(job, parcel, its->at));
            return;
        case EMPTY:
            if (its->at.micro_batch == last)
                return; /* a successor of a rank that left may still push in this micro-batch */
            parcels_passed(job->coordinator, parcel, its->at.micro_batch);
            parcel_pass(its);
            break;
        }
    }
}

void collect_all(struct job *job)
{
    for (uint32_t i = 0; i < job->layout->n_parcels; i++)
        collect_parcel(job, i);
}

bool collect_is_done(const struct job *job, const struct job_rank *rank)
{
    /* A comparison may outlive the slot and the process that pushed. */
    for (const struct verification *v = job->work.verifications; v; v = v->next)
        if (v->rank == rank->rank && v->attempt == job->ledger.attempt)
            return false;
    for (size_t i = 0; i < ARRAY_SIZE(rank->rings); i++)
        if (rank->rings[i] && rank->rings[i]->n_held > rank->rings[i]->n_lent)
            return false;
    return true;
}

/* ---- slots that are dropped ---------------------------------------------------------------------------- */

void collect_close(struct job *job, struct job_rank *rank)
{
    struct ring *ring = rank->rings[0];

    for (uint32_t i = 0; ring && ring->n_held > 0 && i < ring->n_tickets; i++) {
        struct ring_slot *slot = &ring->slots[i];

        if (!slot->held || slot->attempt != job->ledger.attempt)
            continue;
        if (slot->redo)
            collect_credit_redo(job, rank, ring, slot);
        else if (slot->n_pushed == 0)
            ring_credit(ring, slot);
    }
    if (ring)
        ring_reclaim(ring);
    rank->process.impatient = false;
}

/*
 * Credits the slots of the open micro-batch that are not posted. Slots of ended micro-batches wait to be reduced, and
 * are credited only with `all`.
 */
static void drop_open_slots(struct job *job, struct job_rank *rank, struct ring *ring, bool all)
{
    uint32_t n_ended = job->ledger.ranks[rank->rank].n_ended;

    for (uint32_t i = 0; ring->n_held > 0 && i < ring->n_tickets; i++) {
        struct ring_slot *slot = &ring->slots[i];

        if (slot->held && !slot->posted &&
            (all || slot->redo || slot->micro_batch >= n_ended || slot->attempt != job->ledger.attempt))
            ring_credit(ring, slot);
    }
}

void collect_drop_open(struct job *job, struct job_rank *rank)
{
    if (!rank->rings[0])
        return;
    drop_open_slots(job, rank, rank->rings[0], false);
    ring_reclaim(rank->rings[0]);
    rank->process.impatient = false;
}

void collect_release_ring(struct job *job, struct job_rank *rank, bool abort)
{
    struct ring *ring = steal_ptr(rank->rings[0]);

    if (rank->rings[1] && (abort || rank->rings[1]->n_held == 0))
        ring_orphan(steal_ptr(rank->rings[1]));
    rank->extent.reserving = false;
    if (!ring)
        return;
    assert(!rank->rings[1]);
    drop_open_slots(job, rank, ring, abort);
    ring_credit_lent(ring);
    /* An incarnation gets no ring before its predecessor's ring is empty, so there are never three rings. */
    if (ring->n_held > 0 && !abort)
        rank->rings[1] = ring;
    else
        ring_orphan(ring);
}

/* ---- what an earlier daemon has done ------------------------------------------------------------------- */

/*
 * Passes over the micro-batches without pushes, and completes the parcel as the earlier daemon did. Return: false if
 * that is impossible.
 */
static bool complete_again(struct job *job, struct parcel *its, const struct journal_posted *posted)
{
    while (!parcel_is_at(its, posted->micro_batch, posted->pass)) {
        if (its->at.micro_batch >= posted->micro_batch || find_completeness(job, posted->parcel, its->at) != EMPTY)
            return false;
        parcel_pass(its);
    }
    if (find_completeness(job, posted->parcel, its->at) != COMPLETE)
        return false;
    parcel_complete(its);
    prepare_reduction(job, posted->parcel, its->at);
    return true;
}

bool collect_was_posted(struct job *job, const struct journal_posted *posted)
{
    struct parcel *its = job_parcel(job, posted->parcel);
    struct reduction *reduction;

    if (!its)
        return false;
    if (its->state == PARCEL_OPEN && !complete_again(job, its, posted))
        return false;
    if (its->state == PARCEL_PROMISED)
        collect_take(job, posted->parcel);
    if ((its->state != PARCEL_TAKEN && its->state != PARCEL_SUMMING) ||
        !parcel_is_at(its, posted->micro_batch, posted->pass))
        return false;
    reduction = &job->step->reductions[posted->parcel];
    reduction->op = posted->op;
    job->step->n_ops = MAX(job->step->n_ops, posted->op);
    return true;
}
