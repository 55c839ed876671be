/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compares the 64-bit sum of a push that a successor repeats with the sum of the predecessor's push (struct
 * verification).
 */

#include <assert.h>
#include <stdlib.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "core/layout/layout.h"
#include "core/wire/journal-wire.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/stats.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/collect-inside.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/ring.h"
#include "daemon/step/executor.h"

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
    if (result < 0 && !job->run.drop_why) { /* the job is freed */
        while (*link != v)
            link = &(*link)->next;
        *link = v->next;
        ring_unhold(v->ring);
        free(v);
        return;
    }
    if (result < 0)
        v->attempt = job->ledger.attempt - 1; /* only the drop of the job still waits for the comparison */
    collect_settle(job);
    job_todo(job);
}

void collect_credit_redo(struct job *job, struct job_rank *rank, struct ring *ring, struct ring_slot *slot)
{
    bool full = slot->n_pushed == job->layout->parcels[slot->parcel].n_parts;

    if (slot->held && slot->redo && slot->n_pending == 0 && (full || collect_has_ended(job, rank, slot->micro_batch))) {
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
        collect_end_work(job);
        if (!stale) {
            bool is_held = v->slot->held && v->slot->use == v->use; /* else the slot was credited meanwhile */

            assert(!is_held || v->slot->n_pending > 0);
            v->slot->n_pending -= is_held;
            if (is_held && expected == v->sum)
                collect_credit_redo(job, &job->ranks[v->rank], v->ring, v->slot);
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

    assert(slot->redo); /* else the slot would be summed, too */
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
    collect_begin_work(job);
    start_verification(v);
}

/* ---- what an earlier daemon has done ------------------------------------------------------------------- */

bool collect_was_compared(struct job *job, unsigned rank, const struct journal_compared *compared)
{
    for (struct verification *v = job->work.verifications; v; v = v->next) {
        if (v->rank != rank || v->summed || v->part != compared->part || v->pass != compared->pass ||
            v->slot != &v->ring->slots[compared->ticket])
            continue;
        v->sum = compared->sum;
        v->summed = true;
        collect_settle(job);
        job_todo(job); /* the rank may have waited only for this comparison */
        return true;
    }
    return false;
}

void collect_verify_rest(struct job *job)
{
    for (struct verification *v = job->work.verifications, *next; v; v = next) {
        next = v->next;
        if (!v->summed)
            start_verification(v);
    }
}
