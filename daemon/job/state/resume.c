/* SPDX-License-Identifier: Apache-2.0 */

/* Begins a job with a checkpoint (resume.h). */

#include "daemon/job/state/resume.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/blob.h"
#include "core/base/log.h"
#include "core/base/sequence.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "daemon/checkpoint/load.h"
#include "daemon/job/drop.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/timeline.h"
#include "daemon/job/state/window.h"
#include "daemon/memory/quota.h"
#include "daemon/memory/state.h"
#include "daemon/step/executor.h"
#include "daemon/step/step.h"

struct resume {
    struct work work; /* opens a checkpoint, or reads it */
    struct job *job;
    struct loading *loading; /* NULL: none is open */
    struct loading_options options;
    int result; /* of loading_open(); then the last failure of a worker, written atomically */
    char why[LOADING_WHY_BYTES];
    uint64_t began_ns;
    struct charge copy_charge; /* GPUs: charges the staging copy, from which the GPUs load the state */
};

static void open_next(struct resume *resume);
static void resume_is_over(struct job *job, int result);

void resume_free(struct resume *resume)
{
    if (!resume)
        return;
    loading_free(resume->loading);
    charge_deinit(&resume->copy_charge);
    free(resume);
}

/* ---- end of loading ------------------------------------------------------------------------------------ */

/* Reports which checkpoint is loaded, or that none is. Return: whether other nodes must agree. */
static bool tell_loaded(struct job *job)
{
    const struct loading *loading = job->resume->loading;

    if (!loading)
        return report_progress(job, (struct report){REPORT_LOADED, .loaded = {.found = false}});
    return report_progress(job,
                           (struct report){REPORT_LOADED, .loaded = {.found = true,
                                                                     .step = loading_description(loading)->step,
                                                                     .digest = loading_description(loading)->digest}});
}

static struct diagnostic *describe_failure(const struct resume *resume)
{
    const struct evidence_at at = {.rank = -1, .step = -1, .micro_batch = -1};
    const struct loading_options *options = &resume->options;

    if (resume->result == LOADING_NO_FOLDER)
        return cause_no_folder(&at, options->dir, resume->why);
    return cause_not_loaded(&at, options->path ? options->path : options->dir, resume->why);
}

/* Ends the stage. On several nodes, a successful stage ends only when all nodes have loaded the same checkpoint. */
static void end_stage(struct resume *resume, int result)
{
    struct job *job = resume->job;

    assert(!job->forming.refusal);
    if (result < 0)
        job->forming.refusal = describe_failure(resume);
    if (result == 0 && tell_loaded(job))
        return;
    resume_is_over(job, result);
}

static void resume_is_over(struct job *job, int result)
{
    assert(job->phase == JOB_RESERVING);
    if (!job->resume->loading)
        resume_free(steal_ptr(job->resume));
    sequence_advance(&job->forming.sequence, result);
}

void resume_is_agreed(struct job *job)
{
    if (job->resume)
        resume_is_over(job, 0);
}

void resume_older(struct job *job, uint64_t step)
{
    struct resume *resume = job->resume;

    if (!resume || !resume->loading || loading_description(resume->loading)->step <= step)
        return;
    log_notice("%s is not loaded, because another node cannot read it; the one before it is tried",
               loading_path(resume->loading));
    resume->options.before_step = loading_description(resume->loading)->step;
    loading_free(steal_ptr(resume->loading));
    open_next(resume);
}

/*
 * Called when a work has ended. If the job is being dropped, frees resume, and continues the drop, which has waited for
 * the work. Return: whether the job is being dropped.
 */
static bool is_dropped(struct job *job)
{
    assert(job->work.n_io > 0);
    job->work.n_io--;
    if (!job->run.drop_why)
        return false;
    resume_free(steal_ptr(job->resume));
    drop_settle(job);
    return true;
}

/* ---- GPUs: through the staging copy -------------------------------------------------------------------- */

static void store_done(void *userdata, int result)
{
    struct resume *resume = userdata;
    struct job *job = resume->job;

    if (is_dropped(job) || result == -ECANCELED) /* the job is freed */
        return;
    executor_empty(job->executor);
    charge_deinit(&resume->copy_charge);
    end_stage(resume, result);
}

/* Copies the state to the executor's memory. Call it when the state is completely read. */
static void store(struct resume *resume)
{
    int r;

    resume->job->work.n_io++;
    r = executor_store(resume->job->executor, store_done, resume);
    if (r == 0)
        return;
    resume->job->work.n_io--;
    end_stage(resume, MIN(r, 0));
}

static void read_pieces(struct resume *resume);

static void copied(void *userdata, int result)
{
    struct resume *resume = userdata;

    if (is_dropped(resume->job) || result == -ECANCELED) /* the job is freed */
        return;
    if (result == 0)
        read_pieces(resume);
    else
        end_stage(resume, result);
}

/* Fills the staging copy first, so that the copy has zeroes where the checkpoint has nothing. */
static void make_copy(struct resume *resume)
{
    struct job *job = resume->job;
    int r = job_charge_copy(job, &resume->copy_charge);

    snprintf(resume->why, sizeof(resume->why),
             "there is no host memory for the copy of the state from which GPUs load it");
    job->work.n_io++;
    if (r == 0)
        r = executor_load(job->executor, copied, resume);
    if (r == 0)
        return;
    job->work.n_io--;
    if (r == 1)
        read_pieces(resume);
    else
        end_stage(resume, r);
}

/* ---- reading the checkpoint ---------------------------------------------------------------------------- */

static void read_run(struct work *work, uint32_t item)
{
    struct resume *resume = container_of(work, struct resume, work);
    int r = __atomic_load_n(&resume->result, __ATOMIC_RELAXED);

    if (r == 0)
        r = loading_read(resume->loading, item);
    if (r < 0)
        __atomic_store_n(&resume->result, r, __ATOMIC_RELAXED);
}

/* If the checkpoint has wrong bytes, replaces its state with that of the next older checkpoint. */
static void read_done(struct work *work)
{
    struct resume *resume = container_of(work, struct resume, work);
    struct job *job = resume->job;

    if (is_dropped(job))
        return;
    if (resume->result == 0) {
        store(resume);
        return;
    }
    snprintf(resume->why, sizeof(resume->why), "%s", loading_why(resume->loading));
    if (resume->options.dir) {
        log_notice("%s is not loaded, and the one before it is tried: %s", loading_path(resume->loading), resume->why);
        resume->options.before_step = loading_description(resume->loading)->step;
        loading_free(steal_ptr(resume->loading));
        open_next(resume);
        return;
    }
    loading_free(steal_ptr(resume->loading));
    end_stage(resume, -EINVAL);
}

static void post(struct resume *resume, void (*run)(struct work *, uint32_t), void (*done)(struct work *),
                 uint32_t n_items)
{
    resume->result = 0;
    resume->work = (struct work){.run = run, .done = done, .n_items = n_items};
    resume->job->work.n_io++;
    worker_post(resume->job->pool, &resume->work);
}

static void read_pieces(struct resume *resume)
{
    post(resume, read_run, read_done, loading_n_pieces(resume->loading));
}

/* ---- finding the checkpoint ---------------------------------------------------------------------------- */

static void open_run(struct work *work, uint32_t item)
{
    struct resume *resume = container_of(work, struct resume, work);

    (void)item;
    resume->result = loading_open(&resume->loading, &resume->options, resume->why);
}

static void open_done(struct work *work)
{
    struct resume *resume = container_of(work, struct resume, work);

    if (is_dropped(resume->job))
        return;
    if (resume->result == 0)
        make_copy(resume);
    else if (resume->result == LOADING_NONE) /* no checkpoint: the job begins with the program's weights */
        end_stage(resume, 0);
    else
        end_stage(resume, -EINVAL);
}

static void open_next(struct resume *resume)
{
    assert(!resume->loading);
    post(resume, open_run, open_done, 1);
}

/*
 * A run that follows another one begins with its program's weights, because the checkpoints on the disk are of an
 * earlier run.
 */
static int begin_without(struct job *job)
{
    if (tell_loaded(job))
        return SEQUENCE_WAITS;
    resume_free(steal_ptr(job->resume));
    return SEQUENCE_OVER;
}

int resume_start(struct job *job)
{
    const struct config_checkpoint *config = &job->config->checkpoint;
    bool is_latest = strcmp(config->load, CONFIG_LOAD_LATEST) == 0;
    struct resume *resume;

    assert(!job->resume);
    if (!config_loads(job->config))
        return SEQUENCE_OVER;
    resume = calloc(1, sizeof(*resume));
    if (!resume)
        return -ENOMEM;
    resume->job = job;
    resume->began_ns = job_now(job);
    resume->options = (struct loading_options){
        .dir = is_latest ? config->dir : NULL,
        .path = is_latest ? NULL : config->load,
        .before_step = UINT64_MAX,
        .state = job->state,
        .optimizer = job->config->optimizer.type,
        .optimizer_name = config_optimizer_name(&job->config->optimizer),
        .strict = config->strict,
    };
    job->resume = resume;
    if (job->run.is_next)
        return begin_without(job);
    open_next(resume);
    return SEQUENCE_WAITS;
}

/* ---- the job continues with the checkpoint ------------------------------------------------------------- */

static void restore_scale(struct lossscale *scale, const struct description_scale *stored)
{
    if (!scale->dynamic || !stored->dynamic)
        return;
    scale->scale = stored->scale;
    scale->hysteresis_left = (unsigned)stored->hysteresis_left;
    scale->n_steps = stored->n_steps;
    scale->window_start = stored->window_start;
}

static void restore_rank(struct job_rank *rank, const struct loading *loading)
{
    size_t n_bytes;
    const void *blob = loading_blob(loading, rank->rank, &n_bytes);

    rank->kept.resumes = true;
    if (!blob)
        return;
    blob_set(&rank->blob, blob, n_bytes);
    blob_set(&rank->kept.blob, blob, n_bytes);
}

static void log_resumed(const struct job *job, const struct resume *resume)
{
    const struct description *d = loading_description(resume->loading);

    log_notice("loaded %s in %.2f s: training goes on with step %" PRIu64, loading_path(resume->loading),
               (double)(job_now(job) - resume->began_ns) / 1e9, d->step);
    if (d->world_size != job->world.size)
        log_notice(
            "it was written by %u ranks, and this job has %u: what ranks had stored (loader position, random state) "
            "is left out",
            d->world_size, job->world.size);
    if (*loading_note(resume->loading))
        log_notice("%s: %s", loading_path(resume->loading), loading_note(resume->loading));
}

void resume_apply(struct job *job)
{
    struct resume *resume = job->resume;
    const struct description *d;

    assert(job->phase == JOB_INITIALISING);
    if (!resume)
        return;
    d = loading_description(resume->loading);
    loading_finish(resume->loading);
    job->state->progress.epoch = job->ledger.step = d->step;
    job->state->progress.n_applied = d->n_applied;
    restore_scale(&job->decision.lossscale, &d->loss_scale);
    for (unsigned r = job->world.first; d->world_size == job->world.size && r < job->world.end; r++)
        restore_rank(&job->ranks[r], resume->loading);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        job->ranks[r].kept.resumes = true;
    job->kept.given_weights = job->run.was_loaded = true;
    job->run.loaded_digest = d->digest;
    job->save.n_windows = 0;
    job->save.has_step = resume->options.dir != NULL; /* the loaded step need not be saved again */
    job->save.step = job->kept.saved_step = job->save.has_step ? d->step : 0;
    log_resumed(job, resume);
    resume_free(steal_ptr(job->resume));
    if (!job->coordinator->alone)
        return; /* job_train() follows when all nodes have loaded the checkpoint */
    job->kept.has_weights = true;
    job->phase = JOB_TRAINING;
    job->stats.times.last_commit_ns = job_now(job);
    step_open(job->step);
    timeline_opened(job);
}
