/* SPDX-License-Identifier: Apache-2.0 */

/* Makes, drops and frees the job. job_settle() ends each event. */

#include "daemon/job/job.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "core/diagnosis/diagnosis.h"
#include "daemon/job/adopt.h"
#include "daemon/job/alone.h"
#include "daemon/job/drop.h"
#include "daemon/job/form.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/kept.h"
#include "daemon/job/model/model.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/state/save.h"
#include "daemon/job/state/window.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/boundary.h"
#include "daemon/job/transaction/commit.h"
#include "daemon/memory/quota.h"
#include "daemon/step/step.h"
#include "kernels/kernels.h"

/* ---- making and freeing the job ------------------------------------------------------------------------ */

int job_new(struct job **out, const struct config *config, const struct kernels *kernels, struct worker_pool *pool,
            const struct job_ops *ops)
{
    struct job *job = calloc(1, sizeof(*job));

    if (!job)
        return -ENOMEM;
    job->run.configured = config;
    job->run.chosen = *config;
    job->config = &job->run.chosen;
    job->kernels = kernels;
    job->pool = pool;
    job->ops = *ops;
    job->world.size = config->world.size;
    job->world.first = config_first_rank(config);
    job->world.end = job->world.first + config_local_ranks(config);
    assert(job_n_local(job) <= STEP_MAX_RANKS);
    assert(job->world.first < job->world.end && job->world.end <= job->world.size);
    job->abort.rank = -1;
    job->memory.quota.limit = config->limits.memory_bytes ? config->limits.memory_bytes : UINT64_MAX;
    job->ranks = calloc(MAX(job->world.size, (unsigned)CONFIG_MAX_LOCAL_RANKS), sizeof(*job->ranks));
    if (!job->ranks) {
        free(job);
        return -ENOMEM;
    }
    for (unsigned r = job->world.first; r < job->world.end; r++)
        job->ranks[r].rank = r;
    job_reset_loss_scale(job);
    if (alone_new(&job->coordinator, job) < 0) { /* job_free() reports to a coordinator */
        kept_deinit(&job->diagnostics.kept);
        free(job->ranks);
        free(job);
        return -ENOMEM;
    }
    *out = job;
    return 0;
}

void job_join(struct job *job, struct coordinator *coordinator)
{
    assert(job->phase == JOB_WAITING);
    assert(!job_anybody_is_here(job));
    coordinator_free(job->coordinator);
    job->coordinator = coordinator;
}

void job_free(struct job *job)
{
    if (!job)
        return;
    drop_now(job);
    save_forget(job);
    coordinator_free(job->coordinator);
    for (unsigned r = 0; r < job->world.size; r++)
        drop_rank(&job->ranks[r]);
    kept_deinit(&job->diagnostics.kept);
    diagnostic_unref(job->abort.reason);
    charge_deinit(&job->memory.charge);
    free(job->abort.why);
    free(job->abort.text);
    free(job->abort.class);
    free(job->run.drop_why);
    free(job->kept.run_id);
    free(job->run.survival.holds);
    for (size_t i = 0; i < job->run.survival.n_held; i++)
        free(job->run.survival.held[i]);
    free(job->run.survival.held);
    free(job->ranks);
    free(job);
}

/* ---- idle jobs, and dropping the job ------------------------------------------------------------------- */

bool job_is_idle(const struct job *job)
{
    if (job_anybody_is_here(job) || job->work.n_under_way > 0 || job->work.n_io > 0 || gather_is_busy(job) ||
        window_is_busy(job->window))
        return false;
    /* An open window counts as idle, because no rank can end it, and it has changed nothing. */
    return job->phase == JOB_WAITING || job->phase == JOB_TRAINING || job->phase == JOB_INITIALISING ||
           job->phase == JOB_WINDOW;
}

enum job_phase job_shown_phase(const struct job *job)
{
    return job->phase == JOB_TRAINING && job_is_idle(job) ? JOB_WAITING : job->phase;
}

int job_drop(struct job *job, char **why)
{
    if (job->run.survival.holds) {
        job_give_up_kept(job);
        return 0;
    }
    if (!job_is_idle(job)) {
        *why = strdup("trainers are still attached: end them first (zerodctl ranks lists them)");
        return 1;
    }
    report_progress(job, (struct report){REPORT_GIVE_UP});
    return 0;
}

/* ---- small requests ------------------------------------------------------------------------------------ */

static void settle_job(struct job *job)
{
    coordinator_tell(job->coordinator, false); /* first, because other nodes judge the reports below by it */
    if (job->phase == JOB_WAITING || job->phase == JOB_RESERVING || job->phase == JOB_INITIALISING) {
        form_settle(job);
        return;
    }
    assert(job->layout);
    boundary_settle(job);
    abort_settle(job);
    commit_settle(job);
    window_settle(job);
    save_settle(job);
    form_settle(job); /* forms successors */
    coordinator_tell(job->coordinator, false);
}

void job_settle(struct job *job)
{
    bool changed = job->todo;

    while (job->todo) {
        job->todo = false;
        settle_job(job);
    }
    if (changed)
        waits_look(job, job_now(job));
}
