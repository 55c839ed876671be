/* SPDX-License-Identifier: Apache-2.0 */

/* Writes the job's records, and the head of its journal. The head is one message with all data that outlasts a step. */

#include "daemon/job/model/survival.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/segment.h"
#include "core/diagnosis/diagnosis.h"
#include "core/wire/journal-wire.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/state.h"
#include "daemon/step/step.h"

void job_record(struct job *job, const struct job_rank *rank, enum journal_type type, const void *data, size_t n_bytes,
                const void *more, size_t n_more)
{
    const struct job_survival *survival = &job->run.survival;

    assert(!rank || job_is_own(job, rank->rank)); /* the next daemon replays only records of this node's ranks */
    if (!survival->journal || survival->replay || job->run.stopping)
        return;
    journal_append(survival->journal,
                   &(struct journal_record){.type = type,
                                            .rank = rank ? rank->rank : job->world.first,
                                            .time_ns = job_now(job),
                                            .data = data,
                                            .n_bytes = n_bytes},
                   more, n_more);
}

/* ---- the head ------------------------------------------------------------------------------------------ */

static enum stored_wait stored_wait(const struct job_rank *rank)
{
    switch (rank->wait) {
    case WAIT_READY:
        return STORED_WAIT_READY;
    case WAIT_STEP:
        return STORED_WAIT_STEP;
    case WAIT_ABORT:
        return STORED_WAIT_ABORT;
    case WAIT_END:
    case WAIT_OTHERS:
    case WAIT_ABANDON:
    case WAIT_ABORTED:
        return STORED_WAIT_OTHER;
    default:
        return STORED_WAIT_NONE; /* no wait, or a wait whose request the client repeats */
    }
}

static size_t store_slots(const struct job *job, const struct ring *ring, struct stored_slot *slots)
{
    size_t n = 0;

    for (uint32_t i = 0; ring && ring->n_held > 0 && i < ring->n_tickets; i++) {
        const struct ring_slot *slot = &ring->slots[i];

        assert(n + slot->held <= ring->n_held); /* slots has room for n_held entries */
        if (slot->held)
            slots[n++] = (struct stored_slot){.ticket = i,
                                              .use = slot->use,
                                              .parcel = slot->parcel,
                                              .micro_batch = slot->micro_batch,
                                              .pass = slot->pass,
                                              .attempt = slot->attempt,
                                              .overflow = slot->overflow,
                                              .point = slot->point,
                                              .offset_bytes = slot->offset_bytes,
                                              .n_bytes = layout_parcel_bytes(job->layout, slot->parcel)};
    }
    assert(!ring || n == ring->n_held);
    return n;
}

static void store_rank(const struct job *job, const struct job_rank *rank, struct stored_rank *out,
                       struct stored_slot *slots)
{
    const struct ledger_rank *ledger = &job->ledger.ranks[rank->rank];

    *out = (struct stored_rank){
        .kept = rank->kept,
        .rank = rank->rank,
        .is_here = rank->peer != NULL,
        .last_sequence = ledger->last_sequence,
        .has_ended = ledger->last_ended.valid,
        .ended_step = ledger->last_ended.step,
        .ended_micro_batch = ledger->last_ended.micro_batch,
        .has_blob = rank->kept.blob.data != NULL,
        .has_notice = rank->process.abort_notice != NULL,
        .wait = stored_wait(rank),
        .slots = slots,
        .n_slots = store_slots(job, rank->rings[0], slots),
        .has_ring = rank->kept.formed && rank->rings[0],
    };
}

static struct stored_head describe_head(const struct job *job)
{
    const struct state_progress *progress = &job->state->progress;
    const struct lossscale *scale = &job->decision.lossscale;

    assert(job->ledger.step == progress->epoch); /* the next daemon sets both to head.step */
    return (struct stored_head){
        .kept = job->kept,
        .step = job->ledger.step,
        .attempt = job->ledger.attempt,
        .n_applied = progress->n_applied,
        .n_windows = progress->n_windows,
        .counts_copy = progress->copy,
        .squares_copy = job->step->squares_copy,
        .norm_scale = job->step->norm_scale,
        .n_ops = job->step->n_ops,
        .loss_scale = scale->scale,
        .hysteresis_left = scale->hysteresis_left,
        .n_scaled_steps = scale->n_steps,
        .window_start = scale->window_start,
        .has_learnt = job->decision.has_learnt,
        .learnt = job->decision.has_learnt ? job->decision.learnt : NULL,
        .n_learnt_bytes = job->decision.has_learnt ? job->layout->n_params : 0,
    };
}

/* Returns an upper bound for the size of the packed head. A packed number has at most 11 bytes. */
static size_t bound_head(const struct stored_head *head)
{
    enum { FIXED_BYTES = 128 * 1024, RANK_BYTES = 1024, SLOT_BYTES = 128 };
    size_t n = FIXED_BYTES + head->n_learnt_bytes;

    for (size_t i = 0; i < head->n_ranks; i++)
        n += RANK_BYTES + head->ranks[i].kept.blob.n_bytes + head->ranks[i].n_slots * SLOT_BYTES;
    return n;
}

static int pack_and_turn(struct job *job, const struct stored_head *head)
{
    struct wire_arena arena = WIRE_ARENA_NULL;
    size_t size = bound_head(head);
    _cleanup_free_ uint8_t *buffer = malloc(size);
    int r = buffer ? wire_arena_init(&arena) : -ENOMEM;

    if (r == 0)
        r = head_pack(&arena, head, buffer, size);
    if (r >= 0)
        journal_turn(job->run.survival.journal, buffer, (size_t)r);
    wire_arena_deinit(&arena);
    return r;
}

void job_turn(struct job *job, unsigned what)
{
    struct job_survival *survival = &job->run.survival;
    struct stored_head head;
    _cleanup_free_ struct stored_rank *ranks = NULL;
    _cleanup_free_ struct stored_slot *slots = NULL;
    size_t n_slots = 0, n_used = 0;
    int r = -ENOMEM;

    if (!survival->journal)
        return;
    for (unsigned i = job->world.first; i < job->world.end; i++)
        n_slots += job->ranks[i].rings[0] ? job->ranks[i].rings[0]->n_held : 0;
    ranks = calloc(job_n_local(job), sizeof(*ranks));
    slots = calloc(n_slots + 1, sizeof(*slots));
    head = describe_head(job);
    head.turn = what;
    head.ranks = ranks;
    for (unsigned i = job->world.first; ranks && slots && i < job->world.end; i++) {
        store_rank(job, &job->ranks[i], &ranks[head.n_ranks], slots + n_used);
        n_used += ranks[head.n_ranks++].n_slots;
        if (job->ranks[i].process.abort_notice && !head.has_notice) {
            head.has_notice = true;
            head.notice = wire_diagnostic(job->ranks[i].process.abort_notice);
        }
    }
    journal_beat(survival->journal, job_now(job));
    (void)failpoint("flip");
    if (ranks && slots)
        r = pack_and_turn(job, &head);
    if (r < 0)
        journal_give_up(survival->journal, r);
    (void)failpoint("flipped");
    segments_forget(); /* of processes that were replaced before this turn */
}
