/* SPDX-License-Identifier: Apache-2.0 */

/*
 * An abort ends a step without applying it. It is possible until the step is decided (commit.c), and leaves no trace of
 * the step except attempt + 1. Work of the attempt that is under way ends first. On several nodes, node 0 sends the
 * abort to all nodes.
 */

#include "daemon/job/transaction/abort.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/blob.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/manifest.h"
#include "core/wire/journal-wire.h"
#include "core/wire/node-wire.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/parcels.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/model/timeline.h"
#include "daemon/job/state/window.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/job/transaction/speculate.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/ring.h"
#include "daemon/step/step.h"

static void rewind_rank(struct job *job, struct job_rank *rank)
{
    struct ring *ring = rank->rings[0];

    rank_forget_step(rank);
    blob_reset(&rank->blob);
    blob_reset(&rank->request.blob);
    if (rank->kept.blob.data)
        blob_set(&rank->blob, rank->kept.blob.data, rank->kept.blob.n_bytes);
    job_fault_reset(&rank->process.fault);
    job_fault_reset(&rank->process.again);
    rank->process.partial = (struct partial_push){0};
    ring_orphan(steal_ptr(rank->rings[1]));
    if (!rank->peer || rank->kept.left) { /* no client will send AbortSeen */
        collect_release_ring(job, rank, true);
        /* A successor gets a new ring when it is formed. */
        rank->process.declared = rank->kept.formed = rank->kept.ready = false;
        manifest_deinit(&rank->process.manifest);
        return;
    }
    /*
     * The client may still write into these slots, so they are credited when it sends AbortSeen. Their contents are
     * void.
     */
    for (uint32_t i = 0; ring && i < ring->n_tickets; i++) {
        ring->slots[i].posted = ring->slots[i].lent = false;
        ring->slots[i].n_pushed = 0;
    }
    if (ring)
        ring->n_lent = 0;
    if (ring && ring->ready)
        atomic_store_explicit(&ring_credit_page(ring)->attempt, job->ledger.attempt, memory_order_release);
}

/* Delivers the abort to the rank with its next answer, unless the rank asked for the abort. */
static void note_abort(struct job_rank *rank, struct diagnostic *notice)
{
    if (!rank->kept.formed || !rank->peer || rank->kept.left || rank->wait == WAIT_ABORT)
        return;
    diagnostic_unref(rank->process.abort_notice);
    rank->process.abort_notice = diagnostic_ref(notice);
}

void abort_answer(struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->wait == WAIT_ABORT)
            job_answer_done(job, rank);
        else if (rank->process.abort_notice &&
                 (job_is_collective(rank->wait) || rank->wait == WAIT_WRITE)) /* WAIT_WRITE: the window is gone */
            job_is_held(job, rank);
    }
}

static void finish_abort(struct job *job)
{
    struct diagnostic *reason = steal_ptr(job->abort.reason), *notice;

    assert(!job->work.verifications);
    timeline_aborted(job);
    ledger_abort(&job->ledger);
    job->ledger.attempt = MAX(job->ledger.attempt, job->abort.said_attempt);
    memset(job->work.parcels, 0, job->layout->n_parcels * sizeof(*job->work.parcels));
    step_open(job->step);
    speculate_forget(job);
    job->kept.n_aborts++;
    job->stats.counters.batch_bytes = job->stats.counters.batch_reduced_bytes = 0;
    job->phase = JOB_TRAINING;
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        rewind_rank(job, &job->ranks[r]);
        phases_forget(&job->ranks[r]);
    }
    notice = job_keep(job, cause_aborted(&(struct evidence_abort){
                               .at = {.layout = job->layout,
                                      .rank = job->abort.rank,
                                      .step = (int64_t)job->ledger.step,
                                      .micro_batch = -1,
                                      .client = job_client(job)},
                               .why = reason || job->abort.text ? NULL : job->abort.why,
                               .new_attempt = job->ledger.attempt,
                               .reason = reason,
                               .reason_text = job->abort.text,
                               .reason_class = job->abort.class,
                           }));
    for (unsigned r = job->world.first; r < job->world.end; r++)
        note_abort(&job->ranks[r], notice);
    job_turn(job, TURN_ABORTED);
    abort_answer(job);
    diagnostic_unref(reason);
    free(steal_ptr(job->abort.why));
    free(steal_ptr(job->abort.text));
    free(steal_ptr(job->abort.class));
    job_todo(job);
}

void abort_start(struct job *job, int64_t rank, struct diagnostic *reason)
{
    assert(job->phase == JOB_TRAINING);
    job->phase = JOB_ABORTING;
    job->abort.rank = rank;
    job->abort.reason = reason;
    for (uint32_t i = 0; i < job->layout->n_parcels; i++)
        parcel_forget(&job->work.parcels[i]);
    job_todo(job);
}

/* Has all work of the aborted attempt ended, on workers and between nodes? */
static bool is_quiet(const struct job *job)
{
    return job->work.n_under_way == 0 && !parcels_is_busy(job->coordinator);
}

void abort_settle(struct job *job)
{
    if (job->phase == JOB_TRAINING && job->abort.next) {
        job->abort.next = false;
        diagnostic_unref(steal_ptr(job->abort.reason)); /* of a later abort by this node; node 0's reason came first */
        abort_start(job, job->abort.rank, NULL);
    }
    if (job->phase != JOB_ABORTING)
        return;
    collect_settle(job);
    if (is_quiet(job))
        finish_abort(job);
}

void job_abort(struct job *job, int64_t rank, struct diagnostic *reason)
{
    if (!job_is_undecided(job)) {
        diagnostic_unref(reason);
        return;
    }
    if (reason && reason->id == 0) /* else the reason is kept already */
        job_keep(job, diagnostic_ref(reason));
    report_progress(job, (struct report){REPORT_ABORT, .abort = {.rank = rank,
                                                                 .why = !reason && job->abort.why ? job->abort.why : "",
                                                                 .reason = reason}});
}

void job_abort_step(struct job *job, struct job_rank *rank, const char *why)
{
    struct diagnostic *notice = steal_ptr(rank->process.abort_notice);
    bool open = job_is_undecided(job) || job->phase == JOB_ABORTING;

    if (notice) { /* the attempt was aborted already, as the rank asks */
        diagnostic_unref(notice);
        job_answer_done(job, rank);
        return;
    }
    job_fault_reset(&rank->process.fault);
    job_wait(job, rank, WAIT_ABORT);
    if (open && job->phase != JOB_ABORTING) {
        free(job->abort.why); /* the reason of another rank, whose abort is on its way to node 0 */
        job->abort.why = strdup(why);
    }
    job_abort(job, rank->rank, NULL);
    if (!open) /* there is no step to abort */
        job_answer_done(job, rank);
}

void job_abort_seen(struct job *job, struct job_rank *rank, uint32_t attempt)
{
    struct ring *ring = rank->rings[0];

    if (attempt ==
        job->ledger.attempt) /* the rank knows of the abort, perhaps from an unrecorded answer of an earlier daemon */
        rank->process.abort_notice = (diagnostic_unref(rank->process.abort_notice), NULL);
    for (uint32_t i = 0; ring && ring->n_held > 0 && i < ring->n_tickets; i++)
        if (ring->slots[i].held && ring->slots[i].attempt < job->ledger.attempt)
            ring_credit(ring, &ring->slots[i]);
    rank->process.slot_credited = true;
    if (ring)
        ring_reclaim(ring);
}

/* ---- messages of node 0 -------------------------------------------------------------------------------- */

/* Keeps the reason in node 0's message. Node 0 sends such a message for this node's own abort, too. */
static void keep_reason(struct job *job, const struct node_message *message)
{
    free(job->abort.why);
    free(job->abort.text);
    free(job->abort.class);
    job->abort.why = message->text && message->text[0] ? strdup(message->text) : NULL;
    job->abort.text = message->reason && message->reason[0] ? strdup(message->reason) : NULL;
    job->abort.class = message->cause_class ? strdup(message->cause_class) : NULL;
}

void job_aborted(struct job *job, const struct node_message *message)
{
    struct diagnostic *reason = steal_ptr(job->abort.reason);
    int64_t rank = message->has_rank ? (int64_t)message->rank : -1;

    job->abort.said_attempt = message->attempt;
    if (job->phase == JOB_ABORTING) { /* other nodes have ended this abort and aborted again: this abort covers both */
        job->abort.reason = reason;
        return;
    }
    keep_reason(job, message);
    if (reason && (!job->abort.text || strcmp(reason->text, job->abort.text) != 0))
        diagnostic_unref(steal_ptr(reason)); /* another reason came first */
    if (job->phase == JOB_UPDATING || job->phase == JOB_COMMITTING_WINDOW ||
        window_stores(job)) { /* the next step is aborted, while this node still carries out the last decision */
        diagnostic_unref(reason);
        job->abort.rank = rank;
        job->abort.next = true;
        return;
    }
    if (job->phase == JOB_WINDOW)
        window_forget(job);
    abort_start(job, rank, reason);
}
