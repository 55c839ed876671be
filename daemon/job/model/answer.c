/* SPDX-License-Identifier: Apache-2.0 */

/* Answers to ranks. An answer ends the rank's wait: it is done, a refusal, or a sticky fault instead of the result. */

#include "daemon/job/model/answer.h"

#include <assert.h>
#include <unistd.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "core/config/lossscale.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/manifest.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/phases.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/timeline.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/state.h"

uint64_t job_now(const struct job *job)
{
    return job->ops.now_ns(job->ops.userdata);
}

const char *job_client(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].kept.client)
            return job->ranks[r].kept.client;
    return NULL;
}

struct evidence_at job_at(const struct job *job, const struct job_rank *rank)
{
    struct evidence_at at = {
        .layout = job->layout, .rank = rank->rank, .step = -1, .micro_batch = -1, .client = rank->kept.client};

    assert(rank->rank < job->world.size);
    if (job->layout) {
        at.step = (int64_t)job->ledger.step;
        at.micro_batch = job->ledger.ranks[rank->rank].n_ended;
    }
    return at;
}

bool job_is_collective(enum job_wait wait)
{
    return wait == WAIT_SLOT || wait == WAIT_END || wait == WAIT_OTHERS || wait == WAIT_STEP || wait == WAIT_NORM ||
           wait == WAIT_WINDOW_BEGIN || wait == WAIT_WINDOW_END || wait == WAIT_ABANDON || wait == WAIT_ABORTED;
}

void job_wait(struct job *job, struct job_rank *rank, enum job_wait wait)
{
    assert(wait != WAIT_NONE);
    assert(job_is_own(job, rank->rank));
    rank->wait = wait;
    rank->wait_ns = job_now(job);
    phases_wait(rank, wait, rank->wait_ns);
    waits_look(job, rank->wait_ns);
}

/*
 * Keeps an answer for a rank that is away (RANK_IS_AWAY). An answer with descriptors is not kept, because the client
 * repeats its request.
 */
static void keep_answer(struct job_rank *rank, const struct reply *reply, size_t n_fds)
{
    struct wire_arena arena = WIRE_ARENA_NULL;
    uint8_t *packed = n_fds == 0 && wire_arena_init(&arena) == 0 ? malloc(FRAME_MAX_BYTES) : NULL;
    int n = packed ? wire_pack_reply(&arena, reply, packed, FRAME_MAX_BYTES) : -ENOMEM;

    free(steal_ptr(rank->away.answer));
    if (n > 0) {
        rank->away.answer = realloc(packed, (size_t)n);
        rank->away.n_answer_bytes = (size_t)n;
    } else {
        free(packed);
    }
    wire_arena_deinit(&arena);
}

void job_answer(struct job *job, struct job_rank *rank, const struct reply *reply, int *fds, size_t n_fds)
{
    uint64_t now = job_now(job);

    assert(job_is_own(job, rank->rank));
    timeline_answers(job, rank);
    phases_go_on(rank, now);
    rank->wait = WAIT_NONE;
    waits_look(job, now);
    if (rank->peer == RANK_IS_AWAY)
        keep_answer(rank, reply, n_fds);
    if (rank->peer && rank->peer != RANK_IS_AWAY)
        job->ops.answer(job->ops.userdata, rank->peer, reply, fds, n_fds);
    else
        for (size_t i = 0; i < n_fds; i++)
            close(fds[i]);
}

void job_tell(struct job *job, const struct job_rank *rank, const struct reply *reply)
{
    if (rank->peer && rank->peer != RANK_IS_AWAY)
        job->ops.answer(job->ops.userdata, rank->peer, reply, NULL, 0);
}

double job_loss_scale(const struct job *job)
{
    return job->decision.lossscale.scale;
}

struct wire_position job_position(const struct job *job, const struct job_rank *rank)
{
    struct ledger_position next;

    if (!job->layout)
        return (struct wire_position){0};
    next = ledger_next(&job->ledger, rank->rank);
    return (struct wire_position){
        .step = next.step,
        .micro_batch = next.micro_batch,
        .attempt = job->ledger.attempt,
        .n_windows = (uint32_t)job->state->progress.n_windows,
    };
}

void job_answer_done(struct job *job, struct job_rank *rank)
{
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_DONE,
                   .done = {.position = job_position(job, rank), .loss_scale = job_loss_scale(job)},
               },
               NULL, 0);
}

void job_refuse(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic, bool aborted)
{
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_REFUSED,
                   .refused = {.diagnostic = wire_diagnostic(diagnostic),
                               .aborted = aborted,
                               .position = job_position(job, rank)},
               },
               NULL, 0);
}

struct job_rank *job_who_left(struct job *job)
{
    for (unsigned r = 0; r < job->world.size; r++)
        if (job->ranks[r].kept.left && job->config->diagnostics.on_leave == CONFIG_LEAVE_STOP)
            return &job->ranks[r];
    return NULL;
}

bool job_is_held(struct job *job, struct job_rank *rank)
{
    struct diagnostic *notice = steal_ptr(rank->process.abort_notice);

    if (notice) {
        job_refuse(job, rank, notice, true);
        diagnostic_unref(notice);
        return true;
    }
    if (!rank->process.fault.code)
        return false;
    rank->process.fault.told = true;
    job_refuse(job, rank, job_fault_diagnostic(job, rank, &rank->process.fault, false), false);
    return true;
}

bool job_is_stopped(struct job *job, struct job_rank *rank)
{
    struct job_rank *left = job_who_left(job);

    if (!rank->process.fault.code && !rank->process.abort_notice && left)
        job_fault(
            job, rank,
            cause_rank_lost(&(struct evidence_lost){
                .at = job_at(job, left), .pid = left->kept.pid, .left = true, .last_message = left->last_request}));
    return job_is_held(job, rank);
}

struct evidence_at job_at_forming(const struct job_rank *rank)
{
    return (struct evidence_at){.rank = rank ? (int64_t)rank->rank : -1, .step = -1, .micro_batch = -1};
}

void job_refuse_forming(struct job *job, struct diagnostic *diagnostic)
{
    job_keep(job, diagnostic);
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->wait != WAIT_FORM && rank->wait != WAIT_READY)
            continue; /* the rank may still be declaring */
        if (rank->wait == WAIT_FORM) {
            rank->process.declared = false;
            manifest_deinit(&rank->process.manifest);
        }
        job_refuse(job, rank, diagnostic, false);
    }
}

void job_reset_loss_scale(struct job *job)
{
    if (job->config->fp16.enabled)
        lossscale_init(&job->decision.lossscale, &job->config->fp16.scale);
    else
        lossscale_init_off(&job->decision.lossscale);
}
