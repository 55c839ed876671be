/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Collecting: what all ranks have pushed is reduced, what is reduced is credited.
 *
 * Each bucket has a cursor, the (micro-batch, pass) that is reduced next. It is
 * complete when every rank has pushed all of the bucket's parameters there, or has
 * ended that micro-batch. So the order of sums is that of docs/numerics.md
 * whatever the order of arrival, and a bucket is reduced as early as it can be.
 */

#include <assert.h>
#include <string.h>

#include "daemon/base.h"
#include "daemon/cause.h"
#include "daemon/failpoint.h"
#include "daemon/job.h"

/* ---- what is complete ---------------------------------------------------------------------------------- */

/* A rank that has asked for the step, or left, has ended every later micro-batch with nothing. */
static bool has_ended(const struct job *job, const struct job_rank *rank, uint32_t micro_batch)
{
    const struct ledger_rank *ledger = &job->ledger.ranks[rank->rank];

    return ledger->asked || rank->left || ledger->n_ended > micro_batch;
}

static struct ring_slot *find_slot(const struct job_rank *rank, uint32_t bucket, struct cursor at, struct ring **ring)
{
    for (size_t i = 0; i < ARRAY_SIZE(rank->rings); i++) {
        struct ring_slot *slot = rank->rings[i] ? ring_find(rank->rings[i], bucket, at.micro_batch, at.pass) : NULL;

        if (slot && slot->n_pushed > 0 && !slot->redo) {
            *ring = rank->rings[i];
            return slot;
        }
    }
    return NULL;
}

enum completeness { OPEN, COMPLETE, EMPTY };

static enum completeness look_at(const struct job *job, uint32_t bucket, struct cursor at)
{
    bool any = false;

    for (unsigned r = 0; r < job->world_size; r++) {
        const struct job_rank *rank = &job->ranks[r];
        struct ring *ring;
        const struct ring_slot *slot = find_slot(rank, bucket, at, &ring);

        if (!has_ended(job, rank, at.micro_batch) && (!slot || slot->n_pushed < job->layout->buckets[bucket].n_params))
            return OPEN;
        any |= slot != NULL;
    }
    return any ? COMPLETE : EMPTY;
}

/* Nothing can lie beyond the furthest rank's position. */
static uint32_t furthest(const struct job *job)
{
    uint32_t most = 0;

    for (unsigned r = 0; r < job->world_size; r++)
        most = MAX(most, job->ledger.ranks[r].n_ended);
    return most;
}

/* ---- reducing ------------------------------------------------------------------------------------------ */

static void clock_start(struct job *job)
{
    if (job->n_under_way++ == 0)
        job->times.reduce_busy_since_ns = job_now(job);
}

static void clock_stop(struct job *job)
{
    assert(job->n_under_way > 0);
    if (--job->n_under_way == 0)
        job->times.reduce_last_ns += job_now(job) - job->times.reduce_busy_since_ns;
}

/* How much was reduced before the last rank ended its backward: what overlap_comm is for. */
static void count_overlap(struct job *job, const struct reduction *reduction, uint64_t n_bytes)
{
    struct job_counters *counters = &job->counters;
    bool overlapped = false;

    if (counters->batch != reduction->micro_batch) {
        counters->batch = reduction->micro_batch;
        counters->batch_bytes = counters->batch_reduced_bytes = 0;
    }
    for (unsigned r = 0; r < job->world_size; r++)
        overlapped |= !has_ended(job, &job->ranks[r], reduction->micro_batch);
    counters->batch_bytes += n_bytes;
    if (overlapped)
        counters->batch_reduced_bytes += n_bytes;
}

static void record_sums(struct job *job, const struct reduction *reduction, unsigned rank)
{
    const struct layout_bucket *bucket = &job->layout->buckets[reduction->bucket];

    for (uint32_t i = 0; i < bucket->n_params; i++) {
        uint32_t param = job->layout->bucket_params[bucket->first_param + i];

        if (reduction->masks[i] >> rank & 1)
            (void)ledger_sum(&job->ledger, rank, param, step_sum(job->step, reduction, rank, param));
    }
}

static void reduction_is_done(void *userdata, struct reduction *reduction)
{
    struct job *job = userdata;
    struct cursor *cursor = &job->cursors[reduction->bucket];
    const struct layout_bucket *bucket = &job->layout->buckets[reduction->bucket];
    uint64_t n_bytes = 0;

    clock_stop(job);
    for (uint32_t i = 0; i < bucket->n_params; i++)
        n_bytes += (uint64_t)__builtin_popcountll(reduction->masks[i]) *
                   job->layout->params[job->layout->bucket_params[bucket->first_param + i]].n_elems *
                   dtype_size(bucket->grad_dtype);
    for (unsigned r = 0; r < job->world_size; r++) {
        struct job_rank *rank = &job->ranks[r];
        struct ring *ring;
        struct ring_slot *slot = find_slot(rank, reduction->bucket, *cursor, &ring);

        if (job->phase == JOB_ABORTING || !slot || !slot->posted)
            continue;
        record_sums(job, reduction, r);
        ring_credit(ring, slot);
        rank->slot_credited = true;
    }
    for (unsigned r = 0; r < job->world_size; r++)
        if (reduction->held[r])
            ring_unhold(reduction->held[r]);
    if (job->phase != JOB_ABORTING) {
        count_overlap(job, reduction, n_bytes);
        cursor->pass++;
        collect_settle(job);
        collect_bucket(job, reduction->bucket);
        for (unsigned r = 0; r < job->world_size; r++)
            admit_settle(job, &job->ranks[r]);
    }
    job_settle(job);
}

static void fill_masks(struct job *job, struct reduction *reduction, unsigned rank)
{
    const struct layout_bucket *bucket = &job->layout->buckets[reduction->bucket];

    for (uint32_t i = 0; i < bucket->n_params; i++) {
        uint32_t param = job->layout->bucket_params[bucket->first_param + i];

        if (ledger_entry(&job->ledger, rank, param)->n_pushed <= reduction->pass)
            continue;
        reduction->masks[i] |= UINT64_C(1) << rank;
        ledger_post(&job->ledger, rank, param);
    }
}

static void post(struct job *job, uint32_t bucket, struct cursor at)
{
    struct reduction *reduction = step_prepare(job->step, bucket, at.micro_batch, at.pass);

    for (unsigned r = 0; r < job->world_size; r++) {
        struct ring *ring = NULL;
        struct ring_slot *slot = find_slot(&job->ranks[r], bucket, at, &ring);

        reduction->sources[r] = slot ? slot->data : NULL;
        reduction->held[r] = ring;
        if (!slot)
            continue;
        slot->posted = true;
        ring_hold(ring);
        fill_masks(job, reduction, r);
    }
    clock_start(job);
    step_post(reduction, reduction_is_done, job);
}

void collect_bucket(struct job *job, uint32_t bucket)
{
    struct cursor *cursor = &job->cursors[bucket];
    uint32_t last;

    if (job->phase != JOB_TRAINING || job->step->reductions[bucket].busy)
        return;
    last = furthest(job);
    while (cursor->micro_batch <= last) {
        switch (look_at(job, bucket, *cursor)) {
        case OPEN:
            return;
        case COMPLETE:
            post(job, bucket, *cursor);
            return;
        case EMPTY:
            if (cursor->micro_batch == last)
                return; /* of ranks that left a successor may still come and push there */
            *cursor = (struct cursor){.micro_batch = cursor->micro_batch + 1};
            break;
        }
    }
}

void collect_all(struct job *job)
{
    for (uint32_t b = 0; b < job->layout->n_buckets; b++)
        collect_bucket(job, b);
}

bool collect_is_done(const struct job *job, const struct job_rank *rank)
{
    /* A comparison outlives the slot and the incarnation that it is of. */
    for (const struct verification *v = job->verifications; v; v = v->next)
        if (v->rank == rank->rank && v->attempt == job->ledger.attempt)
            return false;
    return (!rank->rings[0] || rank->rings[0]->n_held == 0) && (!rank->rings[1] || rank->rings[1]->n_held == 0);
}

/* ---- what a successor pushes again --------------------------------------------------------------------- */

static void verify_run(struct work *work, uint32_t item)
{
    struct verification *v = container_of(work, struct verification, work);
    const struct layout_param *param = &v->job->layout->params[v->param];
    struct position_sum sum = {0};

    (void)item;
    (void)failpoint("verify");
    v->job->kernels->position_sum_update(&sum, param->grad_dtype, v->data, param->n_elems, 0);
    v->sum = position_sum_finish(&sum, param->n_elems * dtype_size(param->grad_dtype));
}

static void verify_done(struct work *work)
{
    struct verification *v = container_of(work, struct verification, work);
    struct job *job = v->job;

    v->summed = true;
    collect_settle(job);
    job_settle(job);
}

/* A redo slot is given back when all that it can hold has been compared, or its micro-batch has ended. */
static void credit_redo(struct job *job, struct job_rank *rank, struct ring *ring, struct ring_slot *slot)
{
    bool full = slot->n_pushed == job->layout->buckets[slot->bucket].n_params;

    if (slot->held && slot->redo && slot->n_pending == 0 && (full || has_ended(job, rank, slot->micro_batch))) {
        ring_credit(ring, slot);
        rank->slot_credited = true;
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
                         .client = rank->client},
                  .pid = rank->pid,
                  .aborted = true,
                  .differs = true,
                  .param = v->param,
                  .last_message = rank->last_request,
              }));
}

void collect_settle(struct job *job)
{
    struct verification **link = &job->verifications;
    uint64_t expected;

    while (*link) {
        struct verification *v = *link;
        bool stale = v->attempt != job->ledger.attempt || job->phase == JOB_ABORTING;

        if (!v->summed || (!stale && !ledger_find_sum(&job->ledger, v->rank, v->param, v->pass, &expected))) {
            link = &v->next;
            continue;
        }
        *link = v->next;
        clock_stop(job);
        if (!stale) {
            v->slot->n_pending--;
            if (expected == v->sum)
                credit_redo(job, &job->ranks[v->rank], v->ring, v->slot);
            else
                successor_differs(job, v);
        }
        ring_unhold(v->ring);
        free(v);
        link = &job->verifications; /* an abort may have changed the list */
    }
}

void collect_verify(struct job *job, struct job_rank *rank, struct ring_slot *slot, uint32_t param, uint16_t pass)
{
    const struct layout_param *p = &job->layout->params[param];
    struct verification *v = calloc(1, sizeof(*v));

    if (!v) {
        job_abort(job, rank->rank, NULL); /* cannot compare: rather redo the step than trust it */
        return;
    }
    *v = (struct verification){
        .work = {.run = verify_run, .done = verify_done, .n_items = 1},
        .job = job,
        .ring = rank->rings[0],
        .slot = slot,
        .rank = rank->rank,
        .param = param,
        .pass = pass,
        .attempt = job->ledger.attempt,
        .data = slot->data + p->offset_elems * dtype_size(p->grad_dtype),
        .next = job->verifications,
    };
    job->verifications = v;
    job->counters.redone++;
    slot->n_pending++;
    ring_hold(v->ring);
    clock_start(job);
    worker_post(job->pool, &v->work);
}

/* ---- slots that nothing will come of ------------------------------------------------------------------- */

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
    rank->impatient = false;
}

/* Slots of the open micro-batch that are not posted leave with the incarnation; ended ones wait to be reduced. */
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
}

void collect_release_ring(struct job *job, struct job_rank *rank, bool abort)
{
    struct ring *ring = steal_ptr(rank->rings[0]);

    if (rank->rings[1] && (abort || rank->rings[1]->n_held == 0))
        ring_orphan(steal_ptr(rank->rings[1]));
    rank->reserving = false;
    if (!ring)
        return;
    drop_open_slots(job, rank, ring, abort);
    /* An incarnation gets no ring before its predecessor's is empty, so there is never a third. */
    if (ring->n_held > 0 && !abort)
        rank->rings[1] = ring;
    else
        ring_orphan(ring);
}
