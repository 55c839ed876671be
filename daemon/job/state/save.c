/* SPDX-License-Identifier: Apache-2.0 */

/* Checkpoints of the job (save.h). */

#include "daemon/job/state/save.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "core/base/base.h"
#include "core/base/blob.h"
#include "core/base/failpoint.h"
#include "core/base/log.h"
#include "core/checkpoint/folder.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/wire/wire-request.h"
#include "daemon/checkpoint/disk.h"
#include "daemon/checkpoint/write.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/timeline.h"
#include "daemon/job/state/window.h"
#include "daemon/memory/quota.h"
#include "daemon/memory/snapshot.h"
#include "daemon/memory/state.h"
#include "daemon/step/executor.h"

enum { WRITER_NICE = 5 }; /* measured: docs/benchmarks.md */

enum saving_stage {
    SAVING_LOADS,     /* GPUs: the state is being copied into the staging copy; no thread */
    SAVING_WRITES,    /* a thread writes the checkpoint; several nodes: this node's part of it */
    SAVING_WAITS,     /* several nodes: waits for the other nodes; no thread */
    SAVING_PUBLISHES, /* several nodes: a thread of node 0 joins the parts */
};

/* A checkpoint that is being written. */
struct saving {
    struct checkpoint_order order;
    const struct job *job;
    enum saving_stage stage;
    pthread_t thread;
    atomic_bool written; /* the thread has nothing more to do */
    int result;
    char why[512];
    uint64_t began_ns, ended_ns;    /* ended: when the checkpoint, or this node's part, was on the disk */
    uint64_t waited_ns, peak_bytes; /* of the snapshot, set when the snapshot was read */
    bool has_failed;                /* several nodes: another node has failed, so the checkpoint ends */
    char failed_why[640];
};

/* ---- memory for values put aside ----------------------------------------------------------------------- */

/*
 * The pool of memory for values that updates put aside. A thread allocates the pool's pages while the first steps run.
 */
struct save_pool {
    struct snapshot_pool *pool;
    pthread_t thread;
    bool has_thread;
    atomic_bool warm; /* the thread has ended, or could not start */
};

static uint64_t pool_bytes(const struct job *job)
{
    const struct config_checkpoint *config = &job->config->checkpoint;
    uint64_t all = job->state->state.n_bytes + job->state->weights.n_bytes;
    struct memory_headroom headroom;
    uint64_t free_bytes;

    if (job->executor->copy_bytes > 0)
        return 0; /* the staging copy is saved, to which updates do not write */
    if (config->memory_bytes > 0)
        return MIN(config->memory_bytes, all);
    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    free_bytes = MIN(headroom.available_bytes, headroom.cgroup_bytes);
    return MIN(all, free_bytes / 2);
}

static void *warm(void *userdata)
{
    struct save_pool *pool = userdata;

    snapshot_pool_warm(pool->pool);
    atomic_store(&pool->warm, true);
    return NULL;
}

/* Makes the pool. If its thread cannot start, each update allocates the pages that it needs. Return: 0 or -ENOMEM. */
static int make_pool(struct job *job)
{
    struct save_pool *pool = calloc(1, sizeof(*pool));

    if (!pool || snapshot_pool_new(&pool->pool, pool_bytes(job)) < 0) {
        free(pool);
        return -ENOMEM;
    }
    pool->has_thread = pthread_create(&pool->thread, NULL, warm, pool) == 0;
    if (!pool->has_thread)
        pool->warm = true;
    job->save.pool = pool;
    return 0;
}

static void free_pool(struct job *job)
{
    struct save_pool *pool = steal_ptr(job->save.pool);

    if (!pool)
        return;
    snapshot_pool_stop_warming(pool->pool);
    if (pool->has_thread)
        pthread_join(pool->thread, NULL);
    snapshot_pool_free(pool->pool);
    free(pool);
}

/* ---- the snapshot -------------------------------------------------------------------------------------- */

/* Fills in the description of the checkpoint. Return: false if there is no memory. */
static bool describe_checkpoint(const struct job *job, struct description *d)
{
    const struct lossscale *scale = &job->decision.lossscale;

    *d = (struct description){
        .version = strdup(ZEROD_VERSION),
        .job = strdup(job->config->job),
        .run = job->kept.run_id ? strdup(job->kept.run_id) : NULL,
        .optimizer = strdup(config_optimizer_name(&job->config->optimizer)),
        .configuration = config_shared_text(job->config),
        .step = job->state->progress.epoch,
        .n_applied = job->state->progress.n_applied,
        .world_size = job->world.size,
        .n_nodes = (unsigned)MAX(job->config->world.nodes.n_items, (size_t)1),
        .stage = (unsigned)job->config->zero.stage,
        .loss_scale = {.dynamic = scale->dynamic,
                       .scale = scale->scale,
                       .hysteresis_left = scale->hysteresis_left,
                       .n_steps = scale->n_steps,
                       .window_start = scale->window_start},
    };
    return d->version && d->job && (d->run || !job->kept.run_id) && d->optimizer && d->configuration;
}

static bool copy_blobs(const struct job *job, struct checkpoint_order *order)
{
    order->blobs = calloc(job->world.size, sizeof(*order->blobs));
    for (unsigned r = job->world.first; order->blobs && r < job->world.end; r++) {
        const struct blob *blob = &job->ranks[r].kept.blob;
        struct checkpoint_blob *copy = &order->blobs[order->n_blobs];

        if (!blob->data)
            continue;
        *copy = (struct checkpoint_blob){.rank = r, .data = malloc(blob->n_bytes + 1), .n_bytes = blob->n_bytes};
        if (!copy->data)
            return false;
        memcpy(copy->data, blob->data, blob->n_bytes);
        order->n_blobs++;
    }
    return order->blobs != NULL;
}

static void on_disk(void *userdata)
{
    struct saving *saving = userdata;

    saving->ended_ns = saving->job->ops.now_ns(saving->job->ops.userdata);
}

static void *write_it(void *userdata)
{
    struct saving *saving = userdata;

    /* Trainers and workers get processors first. This thread gets one while they wait for it. */
    (void)setpriority(PRIO_PROCESS, (id_t)gettid(), WRITER_NICE);
    (void)failpoint("save");
    if (saving->stage == SAVING_WRITES)
        saving->result = checkpoint_write(&saving->order, saving->why, sizeof(saving->why));
    else
        saving->result = checkpoint_publish(&saving->order, saving->why, sizeof(saving->why));
    atomic_store(&saving->written, true);
    return NULL;
}

static void saving_free(struct saving *saving)
{
    snapshot_free(saving->order.snapshot);
    checkpoint_order_deinit(&saving->order);
    free(saving);
}

static int prepare_order(struct job *job, struct saving *saving)
{
    struct checkpoint_order *order = &saving->order;
    const uint32_t n_params = job->layout->n_params;

    order->dir = job->config->checkpoint.dir;
    order->disk = &disk_system;
    order->state = job->state;
    order->kernels = job->kernels;
    order->optimizer = job->config->optimizer.type;
    order->slices_frozen = !job->coordinator->alone && config_partitions_all(job->config);
    order->node = job->coordinator->alone ? -1 : (int)job->config->world.node;
    order->save_total_limit = job->config->checkpoint.save_total_limit;
    order->on_disk = on_disk;
    order->userdata = saving;
    order->counts = calloc(n_params, sizeof(*order->counts));
    if (!describe_checkpoint(job, &order->description) || !order->counts || !copy_blobs(job, order))
        return -ENOMEM;
    memcpy(order->counts, job->state->progress.counts, n_params * sizeof(*order->counts));
    return 0;
}

/* ---- end of a checkpoint ------------------------------------------------------------------------------- */

/* why: why this node failed; "": it did not. */
static void report_saved(struct job *job, uint64_t token, bool whole, const char *why)
{
    report_progress(job, (struct report){REPORT_SAVED, .saved = {.token = token, .whole = whole, .why = why}});
}

static void note_saved(struct job *job, const struct saving *saving)
{
    struct job_save *save = &job->save;
    char name[FOLDER_NAME_BYTES];

    folder_name(name, saving->order.description.step);
    save->n_saved++;
    job->kept.saved_step = saving->order.description.step;
    save->last_bytes = saving->order.n_bytes;
    save->last_ns = saving->ended_ns - saving->began_ns;
    save->last_waited_ns = saving->waited_ns;
    save->last_ended_ns = job_now(job);
    timeline_saved(job, saving->began_ns);
    free(steal_ptr(save->why));
    log_notice("saved %s/%s: %.1f MB in %.1f s; at most %.1f MB were put aside, and updates waited %.1f s for the disk",
               job->config->checkpoint.dir, name, (double)save->last_bytes / 1e6, (double)save->last_ns / 1e9,
               (double)saving->peak_bytes / 1e6, (double)save->last_waited_ns / 1e9);
    if (saving->order.replaced_run)
        log_line(LOG_WARNING,
                 "%s replaces that of another run%s%s: runs that share a checkpoint.dir overwrite one another's steps",
                 name, *saving->order.replaced_run ? ", " : "", saving->order.replaced_run);
}

/* Records a failed checkpoint. Training continues, and earlier checkpoints stay on the disk. */
static void note_failure(struct job *job, uint64_t step, const char *why)
{
    struct evidence_at at = {.rank = -1, .step = (int64_t)step, .micro_batch = -1};

    job->save.n_failed++;
    free(job->save.why);
    job->save.why = strdup(why);
    job_keep(job, cause_not_saved(&at, job->config->checkpoint.dir, why));
}

/* Answers the ranks that wait for the checkpoint. failure: NULL if the checkpoint is on the disk. */
static void answer_ranks(struct job *job, uint64_t step, const char *failure)
{
    struct evidence_at at = {.rank = -1, .step = (int64_t)step, .micro_batch = -1};

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->wait != WAIT_SAVE || rank->process.save_step > step)
            continue;
        if (failure)
            job_refuse(job, rank, job_keep(job, cause_not_saved(&at, job->config->checkpoint.dir, failure)), false);
        else
            job_answer_done(job, rank);
    }
}

/* Frees the staging copy, if the checkpoint has one. */
static void give_copy_back(struct job *job)
{
    if (!job->save.copy_charge.quota)
        return;
    executor_empty(job->executor);
    charge_deinit(&job->save.copy_charge);
}

/* Frees the snapshot when it was read. From then on, updates need not put values aside. */
static void release_snapshot(struct job *job)
{
    struct saving *saving = job->save.now;

    assert(!job->state->snapshot || job->state->snapshot == saving->order.snapshot);
    job->state->snapshot = NULL;
    saving->waited_ns = snapshot_waited_ns(saving->order.snapshot);
    saving->peak_bytes = snapshot_peak_bytes(saving->order.snapshot);
    snapshot_free(steal_ptr(saving->order.snapshot));
    give_copy_back(job);
    snapshot_pool_rest(job->save.pool->pool);
}

/* Ends the checkpoint. why: why it failed; "": it was given up; NULL: it is on the disk. */
static void end_saving(struct job *job, const char *why)
{
    struct saving *saving = steal_ptr(job->save.now);
    uint64_t step = saving->order.description.step;

    assert(!job->state->snapshot); /* saving_free() frees the snapshot, and updates look at it */
    if (!why)
        note_saved(job, saving);
    else if (*why)
        note_failure(job, step, why);
    answer_ranks(job, step, why && !*why ? "it was given up" : why);
    saving_free(saving); /* last, because why may point into saving */
    window_go_on(job);
    job_todo(job);
}

/* Starts the thread of that stage. Return: 0 or -errno. */
static int start_thread(struct job *job, enum saving_stage stage)
{
    struct saving *saving = job->save.now;
    int r;

    assert(stage == SAVING_WRITES || stage == SAVING_PUBLISHES);
    assert(saving->stage == SAVING_WAITS);
    saving->stage = stage;
    saving->written = false;
    r = -pthread_create(&saving->thread, NULL, write_it, saving);
    if (r < 0)
        saving->stage = SAVING_WAITS;
    return r;
}

/* Called when the thread has nothing more to do. */
static void written(struct job *job)
{
    struct saving *saving = job->save.now;
    bool whole = saving->stage == SAVING_PUBLISHES;
    const char *why = saving->result == 0 ? "" : saving->result == -ECANCELED ? "it was given up" : saving->why;

    pthread_join(saving->thread, NULL);
    if (!whole)
        release_snapshot(job);
    if (job->coordinator->alone) {
        end_saving(job, saving->result == 0 ? NULL : saving->result == -ECANCELED ? "" : saving->why);
        return;
    }
    saving->stage = SAVING_WAITS;
    if (saving->has_failed) {
        end_saving(job, saving->failed_why);
        return;
    }
    report_saved(job, saving->order.token, whole, why);
    window_go_on(job); /* a window's commit may continue, because the state was read */
    job_todo(job);
}

/* Ends the thread, if there is one. */
static void stop_thread(struct job *job)
{
    struct saving *saving = job->save.now;

    assert(saving->stage != SAVING_LOADS); /* this stage has no thread */
    if (saving->stage == SAVING_WAITS)
        return;
    atomic_store(&saving->order.cancelled, true);
    if (saving->stage == SAVING_WRITES)
        snapshot_give_up(saving->order.snapshot);
    pthread_join(saving->thread, NULL);
    if (saving->stage == SAVING_WRITES)
        release_snapshot(job);
    saving->stage = SAVING_WAITS;
}

void save_cancel(struct job *job)
{
    if (job->save.now && job->save.now->stage != SAVING_LOADS) { /* else loaded() follows when the executor stops */
        stop_thread(job);
        end_saving(job, "");
    }
    free_pool(job);
    /* The next run may have another step with that number. */
    job->save.wanted = job->save.is_ordered = job->save.has_step = false;
    job->kept.saved_step = job->save.last_ended_ns = 0;
}

void save_forget(struct job *job)
{
    assert(!job->save.pool);
    free(job->save.why);
    job->save = (struct job_save){0};
}

/* ---- begin of a checkpoint ----------------------------------------------------------------------------- */

/* Ends a checkpoint that cannot begin. r: the reason, a negative errno. */
static void give_up_save(struct job *job, int r)
{
    const char *why = r == -ENOMEM && job->executor->copy_bytes > 0
                          ? "there is no memory for a copy of what is on the GPUs, from which it is written"
                          : strerror(-r);

    job->state->snapshot = NULL;
    if (job->save.now)
        saving_free(steal_ptr(job->save.now));
    give_copy_back(job);
    if (!job->coordinator->alone) {
        report_saved(job, job->save.token, false, why);
        return;
    }
    note_failure(job, job->save.step, why);
    answer_ranks(job, job->save.step, why);
}

/* Starts to write the state. Call it when the state is in host memory. Return: 0 or -errno. */
static int start_writing(struct job *job)
{
    struct saving *saving = job->save.now;
    int r = snapshot_new(&saving->order.snapshot, job->state, job->save.pool->pool);

    if (r < 0)
        return r;
    if (job->executor->copy_bytes == 0)
        job->state->snapshot = saving->order.snapshot;
    return start_thread(job, SAVING_WRITES);
}

static void loaded(void *userdata, int result)
{
    struct job *job = userdata;
    int r;

    assert(job->save.now->stage == SAVING_LOADS);
    assert(job->work.n_io > 0);
    job->work.n_io--;
    if (result == -ECANCELED) { /* the job is freed */
        saving_free(steal_ptr(job->save.now));
        charge_deinit(&job->save.copy_charge);
        job_todo(job);
        return;
    }
    job->save.now->stage = SAVING_WAITS;
    if (job->save.now->has_failed) {
        give_copy_back(job);
        end_saving(job, job->save.now->failed_why);
    } else {
        r = result < 0 ? result : start_writing(job);
        if (r < 0)
            give_up_save(job, r);
    }
    job_todo(job);
}

/*
 * Copies the state from GPUs to host memory. Return: 0, and loaded() follows; 1 if the state is always in host memory;
 * or -errno.
 */
static int load_for_save(struct job *job)
{
    int r = job_charge_copy(job, &job->save.copy_charge);

    if (r < 0)
        return r;
    r = executor_load(job->executor, loaded, job);
    job->save.now->stage = r == 0 ? SAVING_LOADS : SAVING_WAITS;
    job->work.n_io += r == 0;
    return r;
}

/* token: on several nodes, the number of the checkpoint; else 0. */
static void begin_saving(struct job *job, uint64_t token)
{
    struct saving *saving = job->save.pool ? calloc(1, sizeof(*saving)) : NULL;
    bool is_own = job->save.has_step && job->save.step == job->state->progress.epoch;
    int r = -ENOMEM;

    assert(!job->save.now);
    job->save.now = saving;
    job->save.wanted = false;
    job->save.has_step = true;
    job->save.step = job->state->progress.epoch;
    job->save.n_windows = job->state->progress.n_windows;
    job->save.token = token;
    job->save.begun_ns = job_now(job);
    if (saving) {
        saving->stage = SAVING_WAITS;
        saving->job = job;
        saving->began_ns = job->save.begun_ns;
        saving->order.token = token;
        saving->order.follows_another = job->run.is_next && !is_own;
        r = prepare_order(job, saving);
    }
    if (r == 0)
        r = load_for_save(job);
    if (r == 1)
        r = start_writing(job);
    if (r < 0)
        give_up_save(job, r);
}

/* Is no work under way or due that reads or writes masters, moments or weights? */
static bool is_at_rest(const struct job *job)
{
    bool step = job->phase == JOB_TRAINING || job->phase == JOB_ABORTING || job->phase == JOB_WINDOW;

    /* A window may need the staging copy, even a forgotten window that is still being filled. */
    if (job->executor->copy_bytes > 0)
        step = job->phase == JOB_TRAINING && !job->window;
    return job->kept.has_weights && !job->run.survival.replay && !job->run.stopping && step;
}

/* Was a checkpoint of the last committed step begun already? */
static bool was_begun(const struct job *job)
{
    const struct state_progress *now = &job->state->progress;

    return job->save.has_step && job->save.step == now->epoch && job->save.n_windows == now->n_windows;
}

/* Is the last committed step on the disk? */
static bool is_saved(const struct job *job)
{
    return was_begun(job) && !job->save.now && !job->save.why;
}

static bool saves_by_itself(const struct job *job)
{
    return job->config->checkpoint.save_steps > 0 || job->config->checkpoint.save_interval_ms > 0;
}

static bool is_due(const struct job *job)
{
    const struct config_checkpoint *config = &job->config->checkpoint;
    const struct job_save *save = &job->save;
    uint64_t step = job->state->progress.epoch, since = save->has_step ? save->step : 0;

    if (save->wanted) /* a requested checkpoint that failed before is tried again */
        return !is_saved(job);
    if (step == 0 || was_begun(job) || job->config->world.node > 0) /* on several nodes, node 0 decides */
        return false;
    return (config->save_steps > 0 && step / config->save_steps > since / config->save_steps) ||
           (config->save_interval_ms > 0 &&
            job_now(job) - save->begun_ns >= config->save_interval_ms * UINT64_C(1000000));
}

/* Several nodes: begins the checkpoint that node 0 has ordered. */
static void take_ordered(struct job *job)
{
    job->save.is_ordered = false;
    if (!job->save.pool)
        (void)make_pool(job);
    if (job->state->progress.epoch == job->save.ordered_step &&
        job->state->progress.n_windows == job->save.ordered_windows) {
        begin_saving(job, job->save.ordered_token);
        return;
    }
    job->save.token = job->save.ordered_token;
    job->save.step = job->save.ordered_step;
    job->save.n_windows = job->save.ordered_windows;
    report_saved(job, job->save.token, false, "the checkpoint before it took too long to end");
}

static bool has_thread(const struct saving *saving)
{
    return saving->stage == SAVING_WRITES || saving->stage == SAVING_PUBLISHES;
}

void save_settle(struct job *job)
{
    /* Not during an update, because written() frees the snapshot, at which the update may be looking. */
    if (job->save.now && has_thread(job->save.now) && job->phase != JOB_UPDATING &&
        atomic_load(&job->save.now->written))
        written(job);
    if (!job->state || !job->config->checkpoint.dir || job->save.now || !is_at_rest(job))
        return;
    if (!job->save.begun_ns)
        job->save.begun_ns = job_now(job); /* save_interval counts from the job's first step */
    if (job->save.is_ordered) {
        take_ordered(job);
        return;
    }
    if (!job->save.pool && (saves_by_itself(job) || job->save.wanted) && make_pool(job) < 0) {
        note_failure(job, job->state->progress.epoch, "no memory");
        job->save.wanted = false;
    }
    if (!job->save.pool || !atomic_load(&job->save.pool->warm))
        return;
    if (!is_due(job))
        job->save.wanted = false; /* the step is saved already */
    else if (!report_progress(job, (struct report){REPORT_WANT_SAVE}))
        begin_saving(job, 0);
}

uint64_t save_rest_ns(const struct job *job)
{
    const struct job_save *save = &job->save;
    uint64_t due_ns = save->begun_ns + job->config->checkpoint.save_interval_ms * UINT64_C(1000000);

    if (!job->state || !job->config->checkpoint.dir)
        return UINT64_MAX;
    if (save->now || save->is_ordered || is_due(job) || (save->pool && !atomic_load(&save->pool->warm)))
        return 0;
    if (job->config->checkpoint.save_interval_ms == 0 || job->state->progress.epoch == 0 || was_begun(job))
        return UINT64_MAX;
    return due_ns - MIN(job_now(job), due_ns);
}

/* ---- several nodes ------------------------------------------------------------------------------------- */

void save_take(struct job *job, uint64_t step, uint32_t n_windows, uint64_t token)
{
    job->save.wanted = false;
    job->save.is_ordered = true;
    job->save.ordered_step = step;
    job->save.ordered_windows = n_windows;
    job->save.ordered_token = token;
}

void save_publish(struct job *job, uint64_t token)
{
    struct saving *saving = job->save.now;
    int r;

    if (!saving || saving->order.token != token || saving->stage != SAVING_WAITS)
        return;
    r = start_thread(job, SAVING_PUBLISHES);
    if (r < 0)
        report_saved(job, token, false, strerror(-r));
}

/* Ends a checkpoint that has not begun on this node, or could not begin. */
static void end_unbegun(struct job *job, uint64_t step, const char *why)
{
    note_failure(job, step, why);
    answer_ranks(job, step, why);
    job_todo(job);
}

void save_end(struct job *job, uint64_t token, const char *why)
{
    struct saving *saving = job->save.now;

    if (job->state && job->save.is_ordered && token == job->save.ordered_token) {
        job->save.is_ordered = false;
        end_unbegun(job, job->save.ordered_step, why);
        return;
    }
    if (!job->state || token != job->save.token)
        return; /* this daemon does not know the checkpoint */
    if (!saving) {
        end_unbegun(job, job->save.step, why);
        return;
    }
    if (saving->stage == SAVING_WAITS) {
        end_saving(job, *why ? why : NULL);
        return;
    }
    saving->has_failed = true;
    snprintf(saving->failed_why, sizeof(saving->failed_why), "%s", why);
    atomic_store(&saving->order.cancelled, true);
    if (saving->stage == SAVING_WRITES)
        snapshot_give_up(saving->order.snapshot); /* the thread ends soon */
}

void save_lose(struct job *job)
{
    static const char why[] = "node 0's daemon was replaced while the checkpoint was written";

    if (job->save.is_ordered)
        save_end(job, job->save.ordered_token, why);
    if (job->save.now)
        save_end(job, job->save.now->order.token, why);
}

void save_was_made(struct job *job, uint64_t step, uint32_t n_windows)
{
    if (job->save.now)
        return;
    job->save.has_step = true;
    job->save.step = step;
    job->save.n_windows = n_windows;
}

/* ---- on request ---------------------------------------------------------------------------------------- */

const char *job_save(struct job *job)
{
    if (!job->config->checkpoint.dir)
        return "the configuration has no checkpoint.dir";
    if (!job->kept.has_weights)
        return "the job has no weights yet";
    job->save.wanted = true;
    job_todo(job);
    return NULL;
}

void job_save_checkpoint(struct job *job, struct job_rank *rank, const struct request_save_checkpoint *request)
{
    struct evidence_at at = job_at(job, rank);
    const char *why = job_save(job);

    if (why) {
        job_refuse(job, rank, job_keep(job, cause_not_saved(&at, job->config->checkpoint.dir, why)), false);
        return;
    }
    if (!request->wait || is_saved(job)) {
        job_answer_done(job, rank);
        return;
    }
    rank->process.save_step = job->state->progress.epoch;
    job_wait(job, rank, WAIT_SAVE);
}

bool save_loads(const struct job *job)
{
    return job->save.now && job->save.now->stage == SAVING_LOADS;
}

bool save_reads(const struct job *job)
{
    return save_loads(job) || (job->save.now && job->save.now->stage == SAVING_WRITES);
}

bool save_has_copy(const struct job *job)
{
    return job->save.copy_charge.quota;
}

bool save_waits_for_others(const struct job *job)
{
    const struct job_save *save = &job->save;

    return !job->coordinator->alone && (save->now ? save->now->stage == SAVING_WAITS : save->wanted || save->is_ordered);
}

bool save_is_busy(const struct job *job)
{
    return job->save.now || job->save.wanted || job->save.is_ordered;
}

const char *save_failure(const struct job *job)
{
    return job->save.why;
}

uint64_t save_progress(const struct job *job)
{
    return job->save.now ? atomic_load_explicit(&job->save.now->order.n_bytes_done, memory_order_relaxed) : 0;
}

void save_describe(const struct job *job, struct save_view *out)
{
    const struct saving *saving = job->save.now;

    *out = (struct save_view){.is_saved = job->state && job->config->checkpoint.dir && is_saved(job)};
    if (!saving)
        return;
    out->is_saving = true;
    out->is_current = was_begun(job);
    out->step = saving->order.description.step;
    out->n_bytes_done = save_progress(job);
    out->n_bytes = atomic_load_explicit(&saving->order.n_bytes, memory_order_relaxed);
    out->began_ns = saving->began_ns;
    out->waited_ns = saving->order.snapshot ? snapshot_waited_ns(saving->order.snapshot) : saving->waited_ns;
}
