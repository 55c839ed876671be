/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Collecting: a parcel that all ranks have pushed is reduced, and its slots are credited.
 *
 * Each parcel has a position, the (micro-batch, pass) that is reduced next. The parcel is complete when every rank has
 * pushed all of its parts at that position, or has ended that micro-batch. So the order of sums is that of
 * docs/numerics.md whatever the order of arrival, and a parcel is reduced as early as it can be.
 */

#include "daemon/job/transaction/collect.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/diagnosis/cause.h"
#include "core/layout/layout.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/parcels.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/stats.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/admit.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/ring.h"
#include "daemon/step/executor.h"
#include "daemon/step/step.h"

/* ---- what is complete ---------------------------------------------------------------------------------- */

/* Has the rank ended that micro-batch? A rank that has asked for the step, or left, counts as having ended all. */
static bool has_ended_micro_batch(const struct job *job, const struct job_rank *rank, uint32_t micro_batch)
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

        if (!has_ended_micro_batch(job, rank, at.micro_batch) &&
            (!slot || slot->n_pushed < job->layout->parcels[parcel].n_parts))
            return OPEN;
        any |= slot != NULL;
    }
    return any ? COMPLETE : EMPTY;
}

/* Returns the micro-batch of the furthest rank. No push is beyond it. */
static uint32_t furthest(const struct job *job)
{
    uint32_t most = 0;

    for (unsigned r = job->world.first; r < job->world.end; r++)
        most = MAX(most, job->ledger.ranks[r].n_ended);
    return most;
}

/* ---- reducing ------------------------------------------------------------------------------------------ */

/*
 * Do GPUs of several nodes add all ranks' gradients at once? Then this node makes no sum of its own ranks, and slots
 * are read until all nodes have the elements that they own.
 */
static bool sums_at_once(const struct job *job)
{
    return job->coordinator->sums_at_once;
}

static void clock_start(struct job *job)
{
    if (job->work.n_under_way++ == 0)
        job->stats.times.reduce_busy_since_ns = job_now(job);
}

static void clock_stop(struct job *job)
{
    assert(job->work.n_under_way > 0);
    if (--job->work.n_under_way == 0)
        job->stats.times.reduce_now_ns += job_now(job) - job->stats.times.reduce_busy_since_ns;
}

/* Counts the bytes that were reduced before the last rank ended its backward: overlap_comm increases them. */
static void count_overlap(struct job *job, const struct reduction *reduction, uint64_t n_bytes)
{
    struct job_counters *counters = &job->stats.counters;
    bool overlapped = false;

    if (counters->batch != reduction->micro_batch) {
        counters->batch = reduction->micro_batch;
        counters->batch_bytes = counters->batch_reduced_bytes = 0;
    }
    for (unsigned r = job->world.first; r < job->world.end; r++)
        overlapped |= !has_ended_micro_batch(job, &job->ranks[r], reduction->micro_batch);
    counters->batch_bytes += n_bytes;
    if (overlapped)
        counters->batch_reduced_bytes += n_bytes;
}

/* The index of the sum of a rank's part among the sums of a reduction, in the order of the journal. */
static size_t sum_index(const struct job *job, const struct reduction *reduction, unsigned local, uint32_t i)
{
    return local * (size_t)job->layout->parcels[reduction->parcel].n_parts + i;
}

static uint64_t sum_of(const struct job *job, const struct reduction *reduction, unsigned local, uint32_t i)
{
    const struct job_survival *survival = &job->run.survival;

    if (survival->replays)
        return survival->sums[sum_index(job, reduction, local, i)];
    return step_sum(job->step, reduction, local, job->layout->parcels[reduction->parcel].first_part + i);
}

/* Records the reduction's sums in the ledger, except those of a micro-batch that has ended meanwhile. */
static void tell_sums(struct job *job, const struct reduction *reduction, unsigned rank)
{
    const struct layout_parcel *parcel = &job->layout->parcels[reduction->parcel];

    unsigned local = rank - job->world.first;

    for (uint32_t i = 0; i < parcel->n_parts; i++) {
        uint32_t part = parcel->first_part + i;
        const struct ledger_entry *entry = ledger_entry(&job->ledger, rank, part);

        if (reduction->masks[i] >> local & 1 && entry->n_summed < entry->n_posted)
            (void)ledger_sum(&job->ledger, rank, part, sum_of(job, reduction, local, i));
    }
}

/* Compares the sums of the ranks' parts, until two differ. */
static void note_alike(struct job *job, const struct reduction *reduction)
{
    uint32_t n_parts = job->layout->parcels[reduction->parcel].n_parts;

    for (uint32_t i = 0; !job->alike.differs && !job->alike.is_said && i < n_parts; i++) {
        uint64_t all = job_n_local(job) < 64 ? (UINT64_C(1) << job_n_local(job)) - 1 : UINT64_MAX;

        if (reduction->masks[i] == 0)
            continue;
        job->alike.n_compared++;
        job->alike.differs = reduction->masks[i] != all;
        for (unsigned local = 1; !job->alike.differs && local < job_n_local(job); local++)
            job->alike.differs = sum_of(job, reduction, local, i) != sum_of(job, reduction, 0, i);
    }
}

/* Records the sums before they are used, so that the next daemon knows them and does not sum again. */
static void record_sums(struct job *job, const struct reduction *reduction, enum journal_type type)
{
    uint32_t n_parts = job->layout->parcels[reduction->parcel].n_parts;
    size_t n = (size_t)job_n_local(job) * n_parts, n_bytes = n * sizeof(uint64_t);
    struct journal_summed summed = {.parcel = reduction->parcel, .n_sums = (uint32_t)n};
    uint64_t *sums;

    if (!job->run.survival.journal || job->run.survival.replays || job->phase == JOB_ABORTING)
        return;
    sums = calloc(n + 1, sizeof(*sums));
    for (unsigned local = 0; sums && local < job_n_local(job); local++)
        for (uint32_t i = 0; i < n_parts; i++)
            if (reduction->masks[i] >> local & 1)
                sums[sum_index(job, reduction, local, i)] = sum_of(job, reduction, local, i);
    if (sums)
        job_record(job, NULL, type, &summed, sizeof(summed), sums, n_bytes);
    else
        journal_give_up(job->run.survival.journal, -ENOMEM);
    free(sums);
}

static bool sends_slots(const struct job *job, uint32_t parcel)
{
    return parcels_sends_slots(job->coordinator, parcel);
}

/* Is part of the parcel's 64-bit sum computed when the pieces of all nodes are added? */
static bool is_summed_later(const struct job *job, uint32_t parcel)
{
    return sends_slots(job, parcel) && parcels_owns_any(job->coordinator, parcel);
}

static void reduction_is_done(void *userdata, struct reduction *reduction);

void collect_combined(struct job *job, uint32_t parcel)
{
    assert(parcel < job->layout->n_parcels);
    if (sums_at_once(job)) {
        if (parcel_begin_sum(&job->work.parcels[parcel]))
            reduction_is_done(job, &job->step->reductions[parcel]);
        return;
    }
    if (!is_summed_later(job, parcel))
        return;
    record_sums(job, &job->step->reductions[parcel], JOURNAL_COMBINED);
    (void)failpoint("combined");
    for (unsigned r = job->world.first; r < job->world.end; r++)
        tell_sums(job, &job->step->reductions[parcel], r);
    collect_settle(job);
}

/*
 * Credits a slot that was read. A slot that is itself sent to other nodes is credited when all nodes have it, or its
 * rank is gone.
 */
static void give_back(struct job *job, struct job_rank *rank, struct ring *ring, struct ring_slot *slot)
{
    if (sums_at_once(job))
        return; /* credited when all nodes have the sum */
    if (sends_slots(job, slot->parcel) && ring == rank->rings[0]) {
        ring_lend(ring, slot);
        return;
    }
    ring_credit(ring, slot);
    rank->process.slot_credited = true;
}

static void reduction_is_done(void *userdata, struct reduction *reduction)
{
    struct job *job = userdata;
    const struct layout_parcel *parcel = &job->layout->parcels[reduction->parcel];
    uint64_t n_bytes = 0;

    assert(reduction == &job->step->reductions[reduction->parcel]); /* not that of all nodes' pieces */
    if (!sums_at_once(job))
        clock_stop(job);
    (void)failpoint("reduced");
    record_sums(job, reduction, JOURNAL_SUMMED);
    (void)failpoint("summed");
    note_alike(job, reduction);
    if (job->phase != JOB_ABORTING)
        rank_norm_look_at(job, reduction);
    for (uint32_t i = 0; i < parcel->n_parts; i++)
        n_bytes += (uint64_t)__builtin_popcountll(reduction->masks[i]) *
                   layout_part_bytes(job->layout, parcel->first_part + i);
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];
        struct ring *ring;
        struct ring_slot *slot = find_slot(rank, reduction->parcel, job->work.parcels[reduction->parcel].at, &ring);

        if (job->phase == JOB_ABORTING || !slot || !slot->posted)
            continue;
        if (!is_summed_later(job, reduction->parcel))
            tell_sums(job, reduction, r);
        give_back(job, rank, ring, slot);
    }
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (reduction->held[r - job->world.first])
            ring_unhold(reduction->held[r - job->world.first]);
    parcel_end_sum(&job->work.parcels[reduction->parcel]);
    if (job->phase != JOB_ABORTING) {
        count_overlap(job, reduction, n_bytes);
        collect_settle(job);
        collect_parcel(job, reduction->parcel);
        for (unsigned r = job->world.first; r < job->world.end; r++)
            admit_settle(job, &job->ranks[r]);
    }
    parcels_summed(job->coordinator, reduction->parcel);
    job_todo(job);
}

void collect_settled(struct job *job, uint32_t parcel)
{
    if (job->work.parcels[parcel].state != PARCEL_SUMMED)
        return;
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];
        struct ring *ring;
        struct ring_slot *slot = find_slot(rank, parcel, job->work.parcels[parcel].at, &ring);

        if (!slot || !(slot->lent || (sums_at_once(job) && slot->posted)))
            continue;
        ring_credit(ring, slot);
        rank->process.slot_credited = true;
        admit_settle(job, rank);
    }
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

/* Lists the ranks that have pushed the parcel at that position, and the parts that each has pushed. */
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
    struct ring *ring = NULL;

    if (reduction->sources[local])
        find_slot(&job->ranks[rank], reduction->parcel, job->work.parcels[reduction->parcel].at, &ring)->posted = true;
    /* If GPUs sum at once, exchange-device.c holds the ring for each order: there may be several orders, or none. */
    reduction->held[local] = sums_at_once(job) ? NULL : ring;
    if (!ring)
        return;
    if (reduction->held[local])
        ring_hold(ring);
    if (sends_slots(job, reduction->parcel))
        parcels_lend(job->coordinator, reduction->parcel, ring);
    for (uint32_t i = 0; i < parcel->n_parts; i++)
        if (reduction->masks[i] >> local & 1)
            ledger_post(&job->ledger, rank, parcel->first_part + i);
}

/* Makes the gradients of the reduction part of the sum. */
static void post(struct job *job, struct reduction *reduction)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        post_rank(job, reduction, r);
    if (!sums_at_once(job))
        clock_start(job);
    if (job->run.survival.replays)
        return;
    step_number(reduction);
    job_record(job, NULL, JOURNAL_POSTED,
               &(struct journal_posted){.op = reduction->op,
                                        .parcel = reduction->parcel,
                                        .micro_batch = reduction->micro_batch,
                                        .pass = reduction->pass},
               sizeof(struct journal_posted), NULL, 0);
    (void)failpoint("posted");
}

/* Starts the sum of a parcel that was taken, unless another sum of the parcel is under way. */
static void sum_promised(struct job *job, uint32_t parcel)
{
    if (sums_at_once(job) || job->run.survival.replays) /* during replay the journal says when it began */
        return;
    if (parcel_begin_sum(&job->work.parcels[parcel]))
        step_post(&job->step->reductions[parcel], reduction_is_done, job);
}

void collect_take(struct job *job, uint32_t parcel)
{
    parcel_take(&job->work.parcels[parcel]);
    post(job, &job->step->reductions[parcel]);
    sum_promised(job, parcel);
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
    if (job->run.survival.replays && job->coordinator->alone) /* during replay the journal says what was posted */
        return;
    sum_promised(job, parcel);
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
                return; /* a successor of a rank that left may still push there */
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
    /* A comparison may outlive its slot and its incarnation. */
    for (const struct verification *v = job->work.verifications; v; v = v->next)
        if (v->rank == rank->rank && v->attempt == job->ledger.attempt)
            return false;
    for (size_t i = 0; i < ARRAY_SIZE(rank->rings); i++)
        if (rank->rings[i] && rank->rings[i]->n_held > rank->rings[i]->n_lent)
            return false;
    return true;
}

/* ---- what a successor pushes again --------------------------------------------------------------------- */

/* Called when the sum is known. result < 0: there is no sum, because the job is being dropped. */
static void verify_done(void *userdata, int result, uint64_t sum)
{
    struct verification *v = userdata, **link = &v->job->work.verifications;
    struct job *job = v->job;

    v->sum = sum;
    v->summed = true;
    if (result == 0)
        job_record(job, &job->ranks[v->rank], JOURNAL_COMPARED,
                   &(struct journal_compared){
                       .ticket = (uint32_t)(v->slot - v->ring->slots), .part = v->part, .pass = v->pass, .sum = sum},
                   sizeof(struct journal_compared), NULL, 0);
    if (result < 0 && !job->run.drop_why) { /* freed with the job */
        while (*link != v)
            link = &(*link)->next;
        *link = v->next;
        ring_unhold(v->ring);
        free(v);
        return;
    }
    if (result < 0)
        v->attempt = job->ledger.attempt - 1; /* only the drop of the job still waits for it */
    collect_settle(job);
    job_todo(job);
}

/* Credits a redo slot when all its parts have been compared, or its micro-batch has ended. */
static void credit_redo(struct job *job, struct job_rank *rank, struct ring *ring, struct ring_slot *slot)
{
    bool full = slot->n_pushed == job->layout->parcels[slot->parcel].n_parts;

    if (slot->held && slot->redo && slot->n_pending == 0 &&
        (full || has_ended_micro_batch(job, rank, slot->micro_batch))) {
        ring_credit(ring, slot);
        rank->process.slot_credited = true;
    }
}

static void successor_differs(struct job *job, const struct verification *v)
{
    const struct job_rank *rank = &job->ranks[v->rank];

    job_abort(job, v->rank,
              cause_rank_lost(&(struct evidence_lost){
                  .at = {.layout = job->layout,
                         .rank = v->rank,
                         .step = (int64_t)job->ledger.step,
                         .micro_batch = job->ledger.ranks[v->rank].n_ended,
                         .client = rank->kept.client},
                  .pid = rank->kept.pid,
                  .aborted = true,
                  .differs = true,
                  .on_gpu = job->executor->on_gpus,
                  .param = job->layout->parts[v->part].param,
                  .last_message = rank->last_request,
              }));
}

void collect_settle(struct job *job)
{
    struct verification **link = &job->work.verifications;
    uint64_t expected;

    while (*link) {
        struct verification *v = *link;
        bool stale = v->attempt != job->ledger.attempt || job->phase == JOB_ABORTING;

        if (!v->summed || (!stale && !ledger_find_sum(&job->ledger, v->rank, v->part, v->pass, &expected))) {
            link = &v->next;
            continue;
        }
        *link = v->next;
        clock_stop(job);
        if (!stale) {
            bool is_held = v->slot->held && v->slot->use == v->use; /* else it was credited meanwhile */

            assert(!is_held || v->slot->n_pending > 0);
            v->slot->n_pending -= is_held;
            if (is_held && expected == v->sum)
                credit_redo(job, &job->ranks[v->rank], v->ring, v->slot);
            else if (expected != v->sum)
                successor_differs(job, v);
        }
        ring_unhold(v->ring);
        free(v);
        link = &job->work.verifications; /* an abort may have changed the list */
    }
}

static void start_verification(struct verification *v)
{
    struct job *job = v->job;

    if (executor_verify(job->executor, &(struct executor_verify){.slot = v->slot,
                                                                 .local_rank = v->rank - job->world.first,
                                                                 .part = v->part,
                                                                 .done = verify_done,
                                                                 .userdata = v}) == 0)
        return;
    v->summed = true;
    v->attempt = job->ledger.attempt - 1;
    job_abort(job, v->rank, NULL); /* the push cannot be compared */
}

void collect_verify(struct job *job, struct job_rank *rank, struct ring_slot *slot, uint32_t part, uint16_t pass)
{
    struct verification *v = calloc(1, sizeof(*v));

    assert(slot->redo); /* else it would be summed again */
    if (!v) {
        job_abort(job, rank->rank, NULL); /* the step is redone, because the push cannot be compared */
        return;
    }
    *v = (struct verification){
        .job = job,
        .ring = rank->rings[0],
        .slot = slot,
        .use = slot->use,
        .rank = rank->rank,
        .part = part,
        .pass = pass,
        .attempt = job->ledger.attempt,
        .next = job->work.verifications,
    };
    job->work.verifications = v;
    job->stats.counters.redone += layout_is_last_part(job->layout, part);
    slot->n_pending++;
    ring_hold(v->ring);
    clock_start(job);
    if (!job->run.survival.replays)
        start_verification(v);
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
            credit_redo(job, rank, ring, slot);
        else if (slot->n_pushed == 0)
            ring_credit(ring, slot);
    }
    if (ring)
        ring_reclaim(ring);
    rank->process.impatient = false;
}

/*
 * Credits the slots of the open micro-batch that are not posted. Slots of ended micro-batches stay, because they wait
 * to be reduced. all: credits these, too.
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
    rank->reserving = false;
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

    if (!its)
        return false;
    if (its->state == PARCEL_OPEN && !complete_again(job, its, posted))
        return false;
    if (its->state == PARCEL_PROMISED) {
        parcel_take(its);
        post(job, &job->step->reductions[posted->parcel]);
    }
    if (its->state != PARCEL_TAKEN || !parcel_is_at(its, posted->micro_batch, posted->pass))
        return false;
    job->step->reductions[posted->parcel].op = posted->op;
    job->step->n_ops = MAX(job->step->n_ops, posted->op);
    return sums_at_once(job) || parcel_begin_sum(its);
}

/* Return: the parcel, or NULL if there is none, or it has another number of sums. */
static const struct parcel *parcel_of(const struct job *job, const struct journal_summed *summed)
{
    const struct parcel *its = job_parcel(job, summed->parcel);
    size_t n = its ? (size_t)job_n_local(job) * job->layout->parcels[summed->parcel].n_parts : 0;

    return its && summed->n_sums == n ? its : NULL;
}

bool collect_was_summed(struct job *job, const struct journal_summed *summed)
{
    const struct parcel *its = parcel_of(job, summed);

    if (!its || its->state != (sums_at_once(job) ? PARCEL_TAKEN : PARCEL_SUMMING))
        return false;
    job->run.survival.sums = summed->sums;
    if (sums_at_once(job))
        collect_combined(job, summed->parcel);
    else
        step_was_reduced(&job->step->reductions[summed->parcel], reduction_is_done, job);
    job->run.survival.sums = NULL;
    return true;
}

bool collect_was_combined(struct job *job, const struct journal_summed *summed)
{
    const struct parcel *its = parcel_of(job, summed);

    if (!its || its->state != PARCEL_SUMMED || !is_summed_later(job, summed->parcel))
        return false;
    job->run.survival.sums = summed->sums;
    collect_combined(job, summed->parcel);
    job->run.survival.sums = NULL;
    return true;
}

bool collect_was_compared(struct job *job, unsigned rank, const struct journal_compared *compared)
{
    for (struct verification *v = job->work.verifications; v; v = v->next) {
        if (v->rank != rank || v->summed || v->part != compared->part || v->pass != compared->pass ||
            v->slot != &v->ring->slots[compared->ticket])
            continue;
        v->sum = compared->sum;
        v->summed = true;
        collect_settle(job);
        job_todo(job); /* its rank may have waited for this alone */
        return true;
    }
    return false;
}

void collect_go_on(struct job *job)
{
    assert(!job->run.survival.replays);
    for (uint32_t i = 0; i < job->layout->n_parcels; i++)
        if (job->work.parcels[i].state == PARCEL_SUMMING)
            step_finish_torn(&job->step->reductions[i]);
    for (uint32_t i = 0; i < job->layout->n_parcels; i++)
        if (job->work.parcels[i].state == PARCEL_SUMMING)
            step_post(&job->step->reductions[i], reduction_is_done, job);
    for (struct verification *v = job->work.verifications, *next; v; v = next) {
        next = v->next;
        if (!v->summed)
            start_verification(v);
    }
    collect_all(job);
}
