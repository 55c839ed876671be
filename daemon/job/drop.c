/* SPDX-License-Identifier: Apache-2.0 */

/* Drops a formed job when no rank is attached and no work is running. */

#include "daemon/job/drop.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/base/segment.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/state/read-state.h"
#include "daemon/job/state/resume.h"
#include "daemon/job/state/save.h"
#include "daemon/job/state/window.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/journal.h"
#include "daemon/memory/quota.h"
#include "daemon/memory/ring.h"
#include "daemon/step/executor.h"
#include "daemon/step/step.h"

/* If the job has no weights, no run is lost, so the diagnostic says why the job was not formed. */
struct diagnostic *drop_describe(const struct job *job)
{
    struct evidence_at at = {
        .rank = -1, .step = job->kept.has_weights ? (int64_t)job->ledger.step : -1, .micro_batch = -1};
    struct diagnostic *differ;

    if (job->kept.has_weights)
        return cause_node_reborn(&(struct evidence_node){.at = at, .why = job->run.drop_why});
    if (job->run.drop_code == E_OTHER_RUN)
        return cause_runs_differ(&at, job->run.drop_why);
    differ = coordinator_compare_manifests(job->coordinator);
    if (differ)
        return differ;
    if (job->run.drop_code)
        return cause_refused_elsewhere(&at, job->run.drop_code, job->run.drop_why);
    return cause_declare(&at, job->run.drop_why, "see what the other nodes say");
}

static void tell_ranks(struct job *job)
{
    struct diagnostic *diagnostic = drop_describe(job);

    if (job->phase == JOB_WAITING || job->phase == JOB_RESERVING) {
        job_refuse_forming(job, diagnostic);
        return;
    }
    diagnostic = job_keep(job, diagnostic);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        job_disconnect(job, &job->ranks[r], diagnostic);
}

static void begin_drop(struct job *job, unsigned code, const char *why, bool tells)
{
    if (job->run.drop_why)
        return;
    job->run.drop_code = code;
    job->run.drop_why = strdup(why);
    if (!job->run.drop_why) {
        job->run.drop_for_next = false;
        return;
    }
    if (tells)
        tell_ranks(job);
    if (job->layout)
        report_progress(job, (struct report){REPORT_DROPPING});
    if (job->phase != JOB_WAITING)
        executor_cancel(job->executor); /* work may wait for GPUs of other nodes, which will not answer */
    drop_settle(job);
}

void drop_begin(struct job *job, unsigned code, const char *why)
{
    begin_drop(job, code, why, true);
}

void drop_forming(struct job *job, const char *why)
{
    begin_drop(job, 0, why, false);
}

void drop_for_next(struct job *job, const char *why)
{
    if (job->run.drop_why)
        return;
    log_notice("run %s ends at step %" PRIu64 ": %s", job->kept.run_id ? job->kept.run_id : "without a name",
               job->ledger.step, why);
    job->run.drop_for_next = true;
    begin_drop(job, 0, why, false);
}

/*
 * Can the job be dropped now? No rank may be attached to a formed job, and no work may use the memory that will be
 * freed.
 */
static bool may_drop(const struct job *job)
{
    if (job->work.n_under_way > 0 || job->work.n_io > 0 || gather_is_busy(job) || window_is_busy(job->window))
        return false;
    for (unsigned r = job->world.first; job->phase != JOB_WAITING && job->phase != JOB_RESERVING && r < job->world.end;
         r++)
        if (job->ranks[r].peer)
            return false;
    return true;
}

void drop_settle(struct job *job)
{
    if (!job->run.drop_why || !may_drop(job))
        return;
    assert(job->work.n_inits == 0);
    free(steal_ptr(job->run.drop_why));
    if (job->phase == JOB_WAITING || job->phase == JOB_RESERVING)
        drop_now(job); /* not drop_all(), because ranks may be declaring again */
    else
        drop_all(job);
    job->run.is_next = job->run.drop_for_next;
    job->run.drop_for_next = false;
    job_todo(job);
}

void drop_now(struct job *job)
{
    save_cancel(job);
    executor_stop(job->executor); /* first, because the work that it cancels uses rings and job->resume */
    resume_free(steal_ptr(job->resume));
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        ring_orphan(steal_ptr(rank->rings[0]));
        ring_orphan(steal_ptr(rank->rings[1]));
        free(rank->gathers.counts);
        rank->gathers.counts = NULL;
        rank->kept.formed = false;
    }
    if (!job->run.stopping)
        journal_clear(job->run.survival.journal); /* first, because the journal is useless without the memory */
    report_progress(job, (struct report){REPORT_DROPPED});
    window_free(job->window);
    ledger_deinit(&job->ledger);
    executor_free(job->executor);
    layout_free(job->layout);
    free(job->work.parcels);
    free(job->decision.hypers);
    free(job->speculation.hypers);
    job->speculation = (struct job_speculation){0};
    free(job->decision.learnt);
    config_choose_gpu_room(&job->run.chosen, CONFIG_GPU_ROOM_NONE); /* until the next job is formed */
    job->run.chosen.zero.spare_buckets = job->run.chosen.zero.early_buckets = 0;
    job->abort.said_attempt = 0;
    job->abort.next = false;
    job->window = NULL;
    job->executor = NULL;
    job->step = NULL;
    job->state = NULL;
    job->layout = NULL;
    job->work.parcels = NULL;
    job->decision.hypers = NULL;
    job->decision.has_hypers = job->decision.holds_back = false;
    job->decision.learnt = NULL;
    missing_deinit(&job->missing);
    zero_gradient_deinit(&job->zero_gradient);
    job->rank_norm = (struct job_rank_norm){0};
    job->zero_lr = (struct job_zero_lr){0};
    job->slow = (struct job_slow){0};
    job->alike = (struct job_alike){0};
    job->kept.given_weights = job->run.was_loaded = job->run.was_spread = job->kept.has_weights =
        job->decision.has_learnt = job->kept.has_norm = false;
    job->kept.n_missing = job->kept.n_all_backs = 0;
    job->kept.asks_all_back = false;
    job->run.loaded_digest = 0;
    journal_free(steal_ptr(job->run.survival.journal));
    if (!job->run.stopping)
        segments_forget();
    charge_deinit(&job->memory.charge);
    job->phase = JOB_WAITING;
}

void drop_rank(struct job_rank *rank)
{
    reading_free(rank->given);
    rank_deinit(rank);
}

static void forget_ranks(struct job *job, unsigned first, unsigned end)
{
    for (unsigned r = first; r < end; r++) {
        assert(!job->ranks[r].peer || job->ranks[r].peer == RANK_IS_AWAY); /* no session refers to the rank */
        drop_rank(&job->ranks[r]);
        job->ranks[r] = (struct job_rank){.rank = r};
    }
}

void drop_ranks(struct job *job, unsigned n_ranks)
{
    struct config_world *world = &job->run.chosen.world;

    assert(job->coordinator->alone && job->world.first == 0);
    assert(n_ranks > 0 && n_ranks <= CONFIG_MAX_LOCAL_RANKS); /* job->ranks has room for as many */
    forget_ranks(job, 0, MAX(job->world.size, n_ranks));
    job->world.size = job->world.end = world->size = n_ranks;
    world->nodes.n_items = 0; /* a node in this list would have the configured number of ranks */
}

void drop_all(struct job *job)
{
    drop_now(job);
    job_reset_loss_scale(job);
    free(job->kept.run_id);
    job->kept.run_id = NULL;
    job->kept.draining = false;
    /* The next run must not inherit settings that this run has from an earlier version. */
    job->run.chosen.zero = job->run.configured->zero;
    if (job->coordinator->alone)
        drop_ranks(job, job->run.configured->world.size);
    else
        forget_ranks(job, job->world.first, job->world.end);
}
