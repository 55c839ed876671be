/* SPDX-License-Identifier: Apache-2.0 */

/* A rank whose process or connection has ended (rank-lost.h). */

#include "daemon/job/rank-lost.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/diagnosis/evidence.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/pushed.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/state/read-state.h"
#include "daemon/job/state/window.h"
#include "daemon/ledger/ledger.h"
#include "daemon/step/executor.h"
#include "daemon/step/pools.h"

static uint64_t timeout_ns(const struct job *job)
{
    return job->config->limits.reattach_timeout_ms * UINT64_C(1000000);
}

/*
 * Is the process of an away rank gone? If the daemon cannot see the process's PID namespace, kept.pid is 0, and only
 * the time-out decides.
 */
static bool is_gone(const struct job *job, const struct job_rank *rank)
{
    return rank->away.dropped || (rank->kept.pid > 0 && kill((pid_t)rank->kept.pid, 0) < 0 && errno == ESRCH) ||
           job_now(job) - job->run.survival.found_ns > timeout_ns(job);
}

bool job_has_live_ranks(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        const struct job_rank *rank = &job->ranks[r];

        if (rank->peer && (rank->peer != RANK_IS_AWAY || !is_gone(job, rank)))
            return true;
    }
    return false;
}

void rank_lost_tick(struct job *job)
{
    assert(!job->run.survival.replay); /* replay must not record a loss */
    for (unsigned r = job->world.first; job->run.survival.found_ns && r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->peer != RANK_IS_AWAY || !is_gone(job, rank))
            continue;
        job_record(job, rank, JOURNAL_DETACH, NULL, 0, NULL, 0);
        job_detach(job, rank);
    }
    if (job->run.survival.found_ns && job_now(job) - job->run.survival.found_ns > timeout_ns(job))
        pools_let_go(job->executor->pools);
}

uint64_t rank_lost_rest_ns(const struct job *job)
{
    enum { LATER_NS = 100000000 }; /* so that the next tick is after the time-out */
    uint64_t until_ns = job->run.survival.found_ns + timeout_ns(job) + LATER_NS, now = job_now(job);

    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].peer == RANK_IS_AWAY)
            return 0;
    return job->run.survival.found_ns && now <= until_ns ? until_ns - now : UINT64_MAX;
}

static void describe_debt(const struct job *job, const struct job_rank *rank, char *dst, size_t size)
{
    const struct ledger_rank *ledger = &job->ledger.ranks[rank->rank];
    uint32_t n_trainable = job_n_trainable(job);

    if (ledger->asked)
        snprintf(dst, size, "nothing: it had asked for the step");
    else if (!ledger->open && ledger->n_ended > 0)
        snprintf(dst, size, "the request for the step, or more micro-batches than the %u it had ended",
                 ledger->n_ended);
    else
        snprintf(dst, size, "%u of %u parameters of micro-batch %u", n_trainable - job_n_pushed_open(job, rank),
                 n_trainable, ledger->n_ended);
}

static void report_lost(struct job *job, struct job_rank *rank)
{
    char outstanding[128];
    struct diagnostic *diagnostic;

    if (job->config->no_successors || job->run.is_over) {
        log_notice("rank %u (pid %" PRId64 ") is gone and is not started again", rank->rank, (int64_t)rank->kept.pid);
        return;
    }
    describe_debt(job, rank, outstanding, sizeof(outstanding));
    diagnostic = cause_rank_lost(&(struct evidence_lost){
        .at = job_at(job, rank),
        .pid = rank->kept.pid,
        .last_message = rank->last_request,
        .outstanding = outstanding,
    });
    job_keep(job, diagnostic);
}

void job_detach(struct job *job, struct job_rank *rank)
{
    assert(rank->peer);
    assert(job_is_own(job, rank->rank));
    rank->peer = NULL;
    rank_forget_away(rank);
    job_release_reading(job, rank);
    rank->wait = WAIT_NONE; /* the ledger keeps a request for the step */
    if (rank->kept.formed)
        executor_attend(job->executor, rank->rank - job->world.first, TRAINER_LOST, rank->kept.incarnation);
    job_fault_reset(&rank->process.fault);
    rank_evidence_reset(&rank->step.evidence); /* the evidence explains why this process pushed nothing */
    if (!job->layout) {
        rank_forget_incarnation(rank);
        rank->kept.incarnation = 0;
        if (!job_anybody_is_here(job)) /* the job holds no data of the run */
            free(steal_ptr(job->kept.run_id));
    } else {
        gather_detach(job, rank);
        window_detach(job, rank);
        /* If a successor dies before it is formed, the time of the loss stays that of its predecessor. */
        if (!rank->kept.left && job->kept.has_weights && !rank->kept.lost_ns)
            rank->kept.lost_ns = job_now(job);
        /* If a process with is_last fails, no rank gets a successor. */
        job->run.is_over |= !rank->kept.left && rank->process.is_last;
        if (!rank->kept.left && rank->kept.formed && !job->run.stopping && !job->run.drop_why)
            report_lost(job, rank);
    }
    job_todo(job);
}
