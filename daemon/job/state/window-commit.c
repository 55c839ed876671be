/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The commit of a write window. The window's weights become masters and weights, and its edits become moments and step
 * counts. State on GPUs is first copied into the staging copy, and copied back at the end.
 */

#include <assert.h>
#include <errno.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/process-limit.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "core/layout/layout.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/state/save.h"
#include "daemon/job/state/window-inside.h"
#include "daemon/job/state/window.h"
#include "daemon/memory/transfer.h"
#include "daemon/step/executor.h"
#include "daemon/step/pools.h"

/* ---- stages -------------------------------------------------------------------------------------------- */

/* Waits while a checkpoint reads the state, because storing would change the state. window_go_on() ends the wait. */
static int wait_for_save(void *userdata)
{
    struct job *job = userdata;

    job->window->awaits_save = save_reads(job);
    return job->window->awaits_save ? SEQUENCE_WAITS : SEQUENCE_OVER;
}

void window_go_on(struct job *job)
{
    if (!job->window || !job->window->awaits_save)
        return;
    assert(job->window->busy);
    job->window->awaits_save = false;
    sequence_advance(&job->window->commit, 0);
}

static int load_for_window(void *userdata)
{
    struct job *job = userdata;
    int r;

    if (job->window->brings)
        return SEQUENCE_OVER;
    r = job_charge_copy(job, &job->window->copy_charge);
    return r < 0 ? r : executor_load(job->executor, sequence_done, &job->window->commit);
}

static void weights_are_stored(void *userdata, int result)
{
    struct job *job = userdata;

    (void)result; /* storing reserves nothing, and cannot fail */
    sequence_advance(&job->window->commit, 0);
}

static int store_weights(void *userdata)
{
    struct job *job = userdata;

    return transfer_start(job->pool, &(struct transfer_options){
                                         .state = job->state,
                                         .kernels = job->kernels,
                                         .segment = &job->window->segment,
                                         .n_params = job->layout->n_params,
                                         .range = config_stage(job->config) == 3,
                                         .direction = TRANSFER_STORE,
                                         .done = weights_are_stored,
                                         .userdata = job,
                                     });
}

static void edits_are_stored(void *userdata)
{
    struct job *job = userdata;

    sequence_advance(&job->window->commit, 0);
}

/*
 * Runs after store_weights(), because a master that rank 0 has written replaces the master that comes from the weights.
 */
static int store_edits(void *userdata)
{
    struct job *job = userdata;

    if (!job->window->edits)
        return SEQUENCE_OVER;
    state_edits_store(job->window->edits, job->pool, edits_are_stored, job);
    return SEQUENCE_WAITS;
}

/*
 * Copies the state back to the GPUs. This is recorded first, because a daemon that is killed while it copies an array
 * leaves undefined values in the array. The next daemon must not load that array.
 */
static int bring_back(void *userdata)
{
    struct job *job = userdata;

    if (job->executor->copy_bytes > 0)
        job_record(job, NULL, JOURNAL_BRINGING, NULL, 0, NULL, 0);
    (void)failpoint("bringing");
    return executor_store(job->executor, sequence_done, &job->window->commit);
}

enum { WAIT_FOR_SAVE, LOAD, STORE_WEIGHTS, STORE_EDITS, BRING_BACK, N_STAGES };

static const sequence_stage stages[] = {
    [WAIT_FOR_SAVE] = wait_for_save, [LOAD] = load_for_window,  [STORE_WEIGHTS] = store_weights,
    [STORE_EDITS] = store_edits,     [BRING_BACK] = bring_back, [N_STAGES] = NULL,
};

/* ---- end of the commit --------------------------------------------------------------------------------- */

/* Called when the window is stored on this node. The window is committed when all nodes have stored it. */
static void window_stored(struct job *job)
{
    assert(job->window->busy);
    job->window->busy = false;
    (void)failpoint("stored");
    /* Recorded, because storing again would replace newer weights of other nodes with old ones. */
    if (!job->coordinator->alone)
        job_record(job, NULL, JOURNAL_STORED, NULL, 0, NULL, 0);
    if (job->window->forgotten) { /* node 0 ended the window before this node had stored it */
        window_end(job);
        executor_empty(job->executor);
    } else {
        report_progress(job, (struct report){REPORT_STORED});
    }
}

/* Opens the window again, because there is no memory for the staging copy. Call it only when nothing was stored. */
static void reopen_window(struct job *job)
{
    executor_empty(job->executor);
    window_discharge_copy(job);
    job->window->busy = job->window->stores = false;
    job_set_writing(job, true);
    job_record(job, NULL, JOURNAL_WINDOW, NULL, 0, NULL, 0);
    job->phase = JOB_WINDOW;
    for (unsigned i = job->world.first; i < job->world.end; i++)
        if (job->ranks[i].wait == WAIT_WINDOW_END)
            job_refuse(
                job, &job->ranks[i],
                job_keep(job, cause_quota(&(struct evidence_quota){.at = job_at(job, &job->ranks[i]),
                                                                   .what = "write window",
                                                                   .unit = "bytes",
                                                                   .asked = job->executor->copy_bytes,
                                                                   .fix = "free memory, then end the window again",
                                                                   .limit = process_limit_met(-ENOMEM)})),
                false);
}

static void retry(struct work *work)
{
    sequence_run(&container_of(work, struct window, retry)->commit);
}

/*
 * Called when the stages have ended or one has failed. After a failure, refuses only if the job has one node and
 * nothing was stored. Otherwise retries until the few KiB that are lacking are free, because all nodes have decided to
 * commit, or a part is stored.
 */
static void ended(void *userdata, int result)
{
    struct job *job = userdata;
    struct window *window = job->window;
    bool may_refuse = window->commit.at <= STORE_WEIGHTS && (job->coordinator->alone || job->run.drop_why);

    if (result == -ECANCELED && !job->run.drop_why) /* the job is freed */
        return;
    if (result < 0 && may_refuse)
        reopen_window(job);
    else if (result < 0 && result != -ECANCELED)
        executor_post_nothing(job->executor, &window->retry, retry);
    else
        window_stored(job);
}

void window_commit(struct job *job)
{
    assert(job->phase == JOB_WINDOW);
    assert(job->window->stores);
    assert(!job->window->busy);
    job_record(job, NULL, JOURNAL_STORING, NULL, 0, NULL, 0);
    job->phase = JOB_COMMITTING_WINDOW;
    job->window->busy = true;
    job_set_writing(job, false);
    job->window->commit = (struct sequence){.stages = stages, .ended = ended, .userdata = job};
    sequence_run(&job->window->commit);
}

/* ---- the window is over on all nodes ------------------------------------------------------------------- */

static void refreshed(void *userdata)
{
    struct job *job = userdata;

    job_set_writing(job, false);
    window_finish(job);
}

void job_window_closed(struct job *job)
{
    if (job->phase == JOB_COMMITTING_WINDOW && !pools_refresh(job->executor->pools, refreshed, job))
        refreshed(job);
    else if (job->phase == JOB_WINDOW)
        window_finish(job);
}
