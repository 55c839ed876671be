/* SPDX-License-Identifier: Apache-2.0 */

/* A table with the verb of each type of request. */

#include "daemon/job/request.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/wire/wire-request.h"
#include "daemon/job/attendance.h"
#include "daemon/job/form.h"
#include "daemon/job/init.h"
#include "daemon/job/job.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/client-report.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/state/read-state.h"
#include "daemon/job/state/save.h"
#include "daemon/job/state/window.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/admit.h"
#include "daemon/job/transaction/boundary.h"

/*
 * Requests whose verb has the request's name. WITH: the verb gets the request's contents. BARE: the request has none.
 */
#define JOB_VERBS(WITH, BARE)                                                                                          \
    WITH(DECLARE, declare)                                                                                             \
    WITH(FORM, form)                                                                                                   \
    WITH(INIT, init)                                                                                                   \
    BARE(READY, ready)                                                                                                 \
    WITH(BEGIN_BACKWARD, begin_backward)                                                                               \
    WITH(INTERN, intern)                                                                                               \
    WITH(PUSH, push)                                                                                                   \
    WITH(SLOT_REQUEST, slot_request)                                                                                   \
    WITH(END_BACKWARD, end_backward)                                                                                   \
    WITH(ABANDON_BACKWARD, abandon_backward)                                                                           \
    WITH(STEP, step)                                                                                                   \
    BARE(GRAD_NORM, grad_norm)                                                                                         \
    WITH(GATHER, gather)                                                                                               \
    WITH(RELEASE, release)                                                                                             \
    WITH(PREFETCH, prefetch)                                                                                           \
    WITH(HELD, held)                                                                                                   \
    BARE(WRITE_BEGIN, write_begin)                                                                                     \
    WITH(WRITE_END, write_end)                                                                                         \
    WITH(READ_STATE, read_state)                                                                                       \
    WITH(WRITE_STATE, write_state)                                                                                     \
    WITH(SAVE_CHECKPOINT, save_checkpoint)                                                                             \
    BARE(CLEAR_FAULT, clear_fault)                                                                                     \
    WITH(REPORT, report)                                                                                               \
    WITH(EVIDENCE, evidence)

#define FORWARD_WITH(type, name)                                                                                       \
    static void on_##name(struct job *job, struct job_rank *rank, const struct request *request)                       \
    {                                                                                                                  \
        job_##name(job, rank, &request->name);                                                                         \
    }
#define FORWARD_BARE(type, name)                                                                                       \
    static void on_##name(struct job *job, struct job_rank *rank, const struct request *request)                       \
    {                                                                                                                  \
        (void)request;                                                                                                 \
        job_##name(job, rank);                                                                                         \
    }

JOB_VERBS(FORWARD_WITH, FORWARD_BARE)

/* Serves each push as if it were a request of its own. */
static void on_pushes(struct job *job, struct job_rank *rank, const struct request *request)
{
    const struct request_pushes *pushes = &request->pushes;
    struct request_push push = pushes->first;
    uint32_t n_disconnects = rank->n_disconnects;

    job_push(job, rank, &push);
    for (size_t i = 0; i < pushes->n_others && rank->n_disconnects == n_disconnects; i++) {
        job_settle(job);
        push.param = pushes->others[i];
        push.sequence++;
        job_push(job, rank, &push);
    }
}

static void on_abort_step(struct job *job, struct job_rank *rank, const struct request *request)
{
    job_abort_step(job, rank, request->abort_step.why);
}

static void on_abort_seen(struct job *job, struct job_rank *rank, const struct request *request)
{
    job_abort_seen(job, rank, request->abort_seen.attempt);
}

static void on_leave(struct job *job, struct job_rank *rank, const struct request *request)
{
    (void)request;
    job_leave(job, rank);
}

#define ROW(type, name) [REQUEST_##type] = on_##name,

static void (*const verbs[N_REQUEST_TYPES])(struct job *job, struct job_rank *rank, const struct request *request) = {
    JOB_VERBS(ROW, ROW)[REQUEST_ABORT_STEP] = on_abort_step,
    [REQUEST_ABORT_SEEN] = on_abort_seen,
    [REQUEST_PUSHES] = on_pushes,
    [REQUEST_LEAVE] = on_leave,
};

void request_serve(struct job *job, struct job_rank *rank, const struct request *request)
{
    assert(rank->peer);
    assert(job_is_own(job, rank->rank));
    assert(rank == &job->ranks[rank->rank]);
    assert((unsigned)request->type < N_REQUEST_TYPES);
    rank->last_request = request_type_name(request->type);
    rank->kept.n_received += request_is_recorded(request->type);
    if (request_is_recorded(request->type))
        free(steal_ptr(rank->away.answer)); /* the kept answer is that to the previous request */
    verbs[request->type](job, rank, request);
}

void request_take(struct job *job, struct job_rank *rank, const struct request *request, const uint8_t *packed,
                  size_t n_packed_bytes)
{
    bool recorded = request_is_recorded(request->type);

    assert(!job->run.survival.replay); /* the request would not be recorded */
    assert(rank->peer != RANK_IS_AWAY);
    if (recorded) {
        job_record(job, rank, JOURNAL_REQUEST, packed, n_packed_bytes, NULL, 0);
        (void)failpoint_at(request_type_name(request->type), "log");
    }
    request_serve(job, rank, request);
    if (recorded)
        (void)failpoint_at(request_type_name(request->type), "judged");
}
