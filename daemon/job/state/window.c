/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Write windows: between two steps rank 0 writes into a segment that shows the weights. When all ranks end the window,
 * its values become the weights and masters. Until then the state has not changed, so a window that is forgotten leaves
 * no trace. Rank 0 writes masters, moments and step counts into state edits, because 16-bit weights do not show them.
 * State edits are stored or forgotten with the window.
 */

#include "daemon/job/state/window.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/keep.h"
#include "core/base/process-limit.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/wire/journal-wire.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/state/save.h"
#include "daemon/job/state/window-inside.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/state.h"
#include "daemon/step/executor.h"
#include "daemon/step/fetch.h"
#include "daemon/step/speculation.h"
#include "daemon/step/step.h"

void window_free(struct window *window)
{
    if (!window)
        return;
    segment_deinit(&window->segment);
    charge_deinit(&window->charge);
    state_edits_free(window->edits);
    charge_deinit(&window->edits_charge);
    charge_deinit(&window->copy_charge);
    free(window);
}

bool window_stores(const struct job *job)
{
    return job->window && job->window->stores;
}

bool job_is_undecided(const struct job *job)
{
    return job->phase == JOB_TRAINING || (job->phase == JOB_WINDOW && !window_stores(job));
}

bool window_is_busy(const struct window *window)
{
    return window && window->busy;
}

void window_end(struct job *job)
{
    assert(!window_is_busy(job->window));
    assert(!job->window || job->window->n_filling == 0);
    report_progress(job, (struct report){REPORT_WINDOW, .window = NULL});
    window_free(steal_ptr(job->window));
}

/* Forgets the window. If work on it is under way, also between nodes, the window is freed when that work ends. */
static void forget_window(struct job *job)
{
    if (job->window && job->window->busy)
        job->window->forgotten = true;
    else
        window_end(job);
}

void window_forget(struct job *job)
{
    forget_window(job);
    job->phase = JOB_TRAINING;
}

static const struct misplaced inside_step = {"a write window",
                                             "windows open between two steps, and this rank has begun one",
                                             {"zerod_write_begin before the step's first micro-batch, on all ranks",
                                              "zerod.writable(model) before the step's first backward, on all ranks; a "
                                              "forward with other\nweights inside a step: "
                                              "torch.func.functional_call(model, {name: tensor}, args)"}};
static const struct misplaced not_open = {
    "the end of a write window",
    "no write window is open",
    {"zerod_write_begin first, on all ranks", "zerod.writable(model) on all ranks"}};

/* ---- begin --------------------------------------------------------------------------------------------- */

/* r: why the window cannot be opened, a negative errno. */
static void refuse_begin(struct job *job, struct job_rank *rank, uint64_t n_bytes, int r)
{
    struct evidence_quota evidence = {.at = job_at(job, rank),
                                      .what = "write window",
                                      .unit = "bytes",
                                      .asked = n_bytes,
                                      .fix = "free memory on this machine",
                                      .limit = process_limit_met(r)};

    job_refuse(job, rank, job_keep(job, cause_quota(&evidence)), false);
}

static void answer_begin(struct job *job, struct job_rank *rank)
{
    bool stage3 = config_stage(job->config) == 3;
    const struct segment *shown = &job->window->segment;
    struct wire_segment segment = {.kind = WIRE_SEGMENT_WINDOW, .n_bytes = shown->n_bytes};
    /* In stages 1 and 2 the other ranks map a private copy of the weights. */
    bool has_segment = shown->n_bytes > 0 && (rank->rank == 0 || stage3);
    int fd = !has_segment ? -1 : rank->rank == 0 ? segment_open_rw(shown) : segment_open_ro(shown);

    if (has_segment && fd < 0) {
        refuse_begin(job, rank, shown->n_bytes, fd);
        return;
    }
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_DONE,
                   .done = {.position = job_position(job, rank),
                            .segments = &segment,
                            .n_segments = has_segment,
                            .loss_scale = job_loss_scale(job)},
               },
               &fd, has_segment);
}

static uint64_t segment_bytes(const struct job *job)
{
    return config_stage(job->config) == 3 ? job->layout->range_bytes : job->layout->weight_bytes;
}

/*
 * Does opening a window need the staging copy? In stage 3, the copy fills the window. On several nodes, the copy is
 * charged early, because no commit may fail when all nodes have agreed.
 */
static bool opening_copies(const struct job *job)
{
    return job->executor->copy_bytes > 0 && (!job->coordinator->alone || job->executor->gathers);
}

/* Return: the bytes of memory that opening a window needs. */
static uint64_t opening_bytes(const struct job *job)
{
    return segment_bytes(job) + (opening_copies(job) ? job->executor->copy_bytes : 0);
}

static void fill_done(void *userdata, int result)
{
    struct job *job = userdata;
    struct window *window = job->window;

    if (result == -ECANCELED && !job->run.drop_why)
        return; /* the window is freed with the job */
    if (result < 0)
        window->fill_result = result;
    assert(window->n_filling > 0);
    if (--window->n_filling > 0)
        return;
    window->busy = false;
    if (window->forgotten) {
        window_end(job);
    } else if (window->fill_result < 0) {
        for (unsigned r = job->world.first; r < job->world.end; r++)
            if (job->ranks[r].wait == WAIT_WINDOW_BEGIN)
                refuse_begin(job, &job->ranks[r], opening_bytes(job), window->fill_result);
        window->lacks_memory = true;
        report_progress(job, (struct report){REPORT_LACKS_MEMORY});
    } else {
        job_record(job, NULL, JOURNAL_WINDOW, NULL, 0, NULL, 0);
        window->ready = true;
    }
    job_todo(job);
}

/* Stage 3: fetches the weights that other nodes own. Return: 0, or -ENOMEM. */
static int fill_remote(struct job *job)
{
    _cleanup_free_ uint32_t *params = calloc(job->layout->n_params, sizeof(*params));
    int r;

    for (uint32_t p = 0; params && p < job->layout->n_params; p++)
        params[p] = p;
    r = params ? coordinator_fetch(job->coordinator, &(struct fetch){.kind = FETCH_PUBLISHED,
                                                                     .window = true,
                                                                     .params = params,
                                                                     .n_params = job->layout->n_params,
                                                                     .done = fill_done,
                                                                     .userdata = job})
               : -ENOMEM;
    if (r == 0)
        job->window->n_filling++;
    return MIN(r, 0);
}

int job_charge_copy(struct job *job, struct charge *charge)
{
    uint64_t n_bytes = job->executor->copy_bytes;
    struct memory_headroom headroom;

    if (n_bytes == 0 || charge->quota)
        return 0;
    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    if (n_bytes > headroom.available_bytes || n_bytes > headroom.cgroup_bytes || failpoint("mirror") < 0 ||
        quota_charge(&job->memory.quota, charge, n_bytes) != 0)
        return -ENOMEM;
    return 0;
}

void window_discharge_copy(struct job *job)
{
    if (job->coordinator->alone)
        charge_deinit(&job->window->copy_charge);
}

static void shown(void *userdata, int result)
{
    struct job *job = userdata;

    if (result != -ECANCELED || job->run.drop_why) /* else the window is freed with the job */
        window_discharge_copy(job);
    fill_done(job, result);
}

static void prepare_run(struct work *work, uint32_t item)
{
    struct window *window = container_of(work, struct window, prepare);

    (void)item;
    window->prepare_result = 0;
    if (window->edits)
        state_edits_punch(window->edits);
    if (window->job->run.survival.journal)
        window->prepare_result = keep_confirm(KEEP_TIMEOUT_MS);
}

static void prepare_done(struct work *work)
{
    struct window *window = container_of(work, struct window, prepare);

    fill_done(window->job, window->prepare_result);
}

/*
 * Clears the edits, because a successor of rank 0 starts without any. The edits' segment stays, because the journal
 * refers to it until the window is over. Then a worker waits until the memory that ranks write to is kept, so that the
 * next daemon finds it.
 */
static void prepare_edits(struct job *job)
{
    struct window *window = job->window;

    if (window->edits)
        state_edits_clear(window->edits);
    charge_deinit(&window->edits_charge);
    if (!window->edits && !job->run.survival.journal)
        return;
    window->job = job;
    window->prepare = (struct work){.run = prepare_run, .done = prepare_done, .n_items = 1};
    window->n_filling++;
    worker_post(job->pool, &window->prepare);
}

static int fill(struct job *job)
{
    int r;

    assert(!job->window->busy);
    assert(job->window->n_filling == 0);
    job->window->n_filling = 1;
    job->window->fill_result = 0;
    report_progress(job, (struct report){REPORT_WINDOW, .window = &job->window->segment});
    r = executor_show(job->executor, &job->window->segment, shown, job);
    if (r == 0 && config_stage(job->config) == 3 && fill_remote(job) < 0)
        job->window->fill_result = -ENOMEM;
    if (r == 0)
        prepare_edits(job);
    job->window->ready = job->window->stale = job->window->lacks_memory = false;
    job->window->busy = r == 0;
    return r;
}

/* Makes the segment that ranks map, unless the window has one already. Return: 0 or -errno. */
static int make_segment(struct job *job)
{
    uint64_t n_bytes = segment_bytes(job);
    struct window *window = job->window;
    struct memory_headroom headroom;
    int r;

    if (window->segment.n_bytes > 0 || n_bytes == 0)
        return 0;
    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    if (n_bytes > headroom.available_bytes || n_bytes > headroom.cgroup_bytes ||
        quota_charge(&job->memory.quota, &window->charge, n_bytes) != 0)
        return -ENOMEM;
    r = segment_init_written_kept(&window->segment, "window", n_bytes);
    if (r < 0)
        charge_deinit(&window->charge);
    return r;
}

/* Fills the window with the committed weights, whatever it has shown before. */
static void show_weights(struct job *job)
{
    int r = make_segment(job);

    if (r == 0 && opening_copies(job))
        r = job_charge_copy(job, &job->window->copy_charge);
    if (r == 0)
        r = fill(job);
    if (r == 0)
        return;
    job->window->n_filling = 1;
    fill_done(job, r);
}

static void open_window(struct job *job)
{
    job->window = calloc(1, sizeof(*job->window));
    if (!job->window)
        return; /* the ranks keep waiting */
    job->window->segment = SEGMENT_NULL;
    job->phase = JOB_WINDOW;
    show_weights(job);
}

void job_write_begin(struct job *job, struct job_rank *rank)
{
    const struct ledger_rank *ledger = &job->ledger.ranks[rank->rank];

    if (job_is_stopped(job, rank))
        return;
    if (ledger->open || ledger->n_ended > 0) {
        job_refuse_early(job, rank, &inside_step);
        return;
    }
    job_wait(job, rank, WAIT_WINDOW_BEGIN);
    job_todo(job);
}

/* ---- end ----------------------------------------------------------------------------------------------- */

void window_finish(struct job *job)
{
    assert(job->phase == JOB_WINDOW || job->phase == JOB_COMMITTING_WINDOW);
    forget_window(job);               /* a node whose ranks have all left may still be filling the window */
    job->state->progress.n_windows++; /* a forgotten window counts, too: a successor must not wait for it again */
    job->phase = JOB_TRAINING;
    job_turn(job, TURN_WINDOW);
    /*
     * Gradients of a rank that died before its micro-batch ended may stand, and chunks may be updated early with the
     * state that the window has replaced.
     */
    if (job->step->speculation)
        speculation_forget(job->step->speculation);
    executor_empty(job->executor); /* after the turn, because until then the next daemon needs the staging copy */
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait == WAIT_WINDOW_END)
            job_answer_done(job, &job->ranks[r]);
    job_todo(job);
}

/* Did an earlier daemon end the window, and did its answer not reach the rank? */
static bool is_over_already(const struct job *job, const struct request_write_end *request)
{
    return job->run.survival.found_ns && !job->window && request->n_windows + 1 == job->state->progress.n_windows;
}

void job_write_end(struct job *job, struct job_rank *rank, const struct request_write_end *request)
{
    if (job_is_stopped(job, rank))
        return;
    if (is_over_already(job, request)) {
        job_answer_done(job, rank);
        return;
    }
    if (job->run.survival.found_ns && job->window && (job->phase == JOB_COMMITTING_WINDOW || job->window->stores)) {
        job_wait(job, rank,
                 WAIT_WINDOW_END); /* an earlier daemon had this request, and the window is being stored again */
        return;
    }
    if (job->phase != JOB_WINDOW || job->window->lacks_memory ||
        (rank->rank == 0 && job->window->stale)) { /* stale: rank 0's predecessor has written into it */
        job_refuse_early(job, rank, &not_open);
        return;
    }
    rank->process.forget = request->forget;
    job_wait(job, rank, WAIT_WINDOW_END);
    job_todo(job);
}

void window_detach(struct job *job, struct job_rank *rank)
{
    if (job->phase == JOB_WINDOW && rank->rank == 0)
        job->window->stale = true;
}

/* ---- who can be answered ------------------------------------------------------------------------------- */

static bool all_want_window(const struct job *job)
{
    bool any = false;

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        if (job->ranks[r].wait != WAIT_WINDOW_BEGIN && !job->ranks[r].kept.left)
            return false;
        any |= job->ranks[r].wait == WAIT_WINDOW_BEGIN;
    }
    return any;
}

/*
 * Do all ranks that have not left wait for the window's end? The answer is true if all have left, because a new leader
 * does not know that they have left, and waits for this node.
 */
static bool all_have_ended(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait != WAIT_WINDOW_END && !job->ranks[r].kept.left)
            return false;
    return true;
}

static bool any_waits(const struct job *job, enum job_wait wait)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait == wait)
            return true;
    return false;
}

/*
 * Answers the ranks that wait for the window. For a successor of rank 0, fills the window again, because the successor
 * must not see the writes of its predecessor.
 */
static void settle_open(struct job *job)
{
    if ((job->window->stale && job->ranks[0].wait == WAIT_WINDOW_BEGIN) ||
        (job->window->lacks_memory && any_waits(job, WAIT_WINDOW_BEGIN))) {
        show_weights(job);
        return;
    }
    if (!job->window->ready)
        return;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait == WAIT_WINDOW_BEGIN && (r != 0 || !job->window->stale))
            answer_begin(job, &job->ranks[r]);
}

void window_settle(struct job *job)
{
    if (job->phase == JOB_TRAINING && !job->window && all_want_window(job)) {
        if (save_has_copy(job)) /* the window opens when the checkpoint is written */
            return;
        report_progress(job, (struct report){REPORT_WANT_WINDOW});
        return;
    }
    if (job->phase != JOB_WINDOW || job->window->busy)
        return;
    if (job->window->stores) {
        window_commit(job);
        return;
    }
    settle_open(job);
    /* No commit during a gather: a parameter that is loaded while weights change would mix old and new weights. */
    if (job->phase != JOB_WINDOW || gather_is_busy(job) || !all_have_ended(job))
        return;
    report_progress(job, (struct report){REPORT_WINDOW_END, .window_end = {.edits = job->window->edits,
                                                                           .forget = job->ranks[0].process.forget ||
                                                                                     job->ranks[0].kept.left}});
}

/* ---- what an earlier daemon has done --------------------------------------------------------------------- */

int window_again(struct job *job)
{
    uint64_t n_bytes = segment_bytes(job);
    struct window *window = job->window;
    int r;

    if (!window)
        window = job->window = calloc(1, sizeof(*window));
    if (!window)
        return -ENOMEM;
    job->phase = JOB_WINDOW;
    window->ready = true;
    window->stale = window->stores = window->brings = false;
    if (window->edits) /* the next records say which edits the segment has */
        state_edits_clear(window->edits);
    charge_deinit(&window->edits_charge);
    if (n_bytes == 0 || window->segment.n_bytes > 0)
        return 0;
    (void)quota_charge(&job->memory.quota, &window->charge, n_bytes); /* the memory exists already */
    r = segment_init_written_kept(&window->segment, "window", n_bytes);
    if (r == 0)
        report_progress(job, (struct report){REPORT_WINDOW, .window = &window->segment});
    return r;
}

int window_edit_again(struct job *job, const struct journal_edit *edit)
{
    int r = 0;

    if (job->phase != JOB_WINDOW || edit->param >= job->layout->n_params || edit->kind > STATE_N_KINDS)
        return -EINVAL;
    if (!job->window->edits)
        r = state_edits_new(&job->window->edits, job->state, job->kernels);
    if (r < 0)
        return r;
    if (edit->kind == STATE_N_KINDS)
        state_edits_set_count(job->window->edits, edit->param, edit->count);
    else
        state_edits_mark(job->window->edits, edit->param, (enum state_kind)edit->kind, edit->is_marked);
    return 0;
}

int window_store_again(struct job *job)
{
    if (job->phase != JOB_WINDOW)
        return -EINVAL;
    job->window->stores = job->window->busy = true;
    return 0;
}

int window_bring_again(struct job *job)
{
    if (!window_stores(job))
        return -EINVAL;
    if (!job->window->brings) /* the memory exists already */
        (void)quota_charge(&job->memory.quota, &job->window->copy_charge, job->executor->copy_bytes);
    job->window->brings = true;
    return 0;
}

int window_stored_again(struct job *job)
{
    if (job->phase != JOB_WINDOW || !job->window->stores)
        return -EINVAL;
    job->phase = JOB_COMMITTING_WINDOW;
    job->window->busy = false;
    /*
     * The earlier daemon changed the arrays in place. Only a turn records which copy of the counts is current, so the
     * counts are stored again.
     */
    if (job->window->edits)
        state_edits_store_counts(job->window->edits);
    report_progress(job, (struct report){REPORT_STORED});
    return 0;
}

void window_end_replay(struct job *job)
{
    if (!job->window || !job->window->stores)
        return;
    job->window->busy = false;
    if (job->window->forgotten) /* node 0 ended the window before this node had stored it */
        window_end(job);
}

/* ---- messages of node 0 -------------------------------------------------------------------------------- */

void job_window_open(struct job *job)
{
    if (job->phase == JOB_TRAINING && !job->window)
        open_window(job);
}

/* Clears edits that a dead rank 0 has marked, because only the edits of its successor count. */
static void forget_edits(struct job *job)
{
    if (!job->window->edits)
        return;
    state_edits_clear(job->window->edits);
    job_record(job, NULL, JOURNAL_WINDOW, NULL, 0, NULL, 0);
}

/* Marks the same edits as on rank 0's node, so that this node can receive them. Return: 0, -ENOMEM or -EINVAL. */
static int copy_edits(struct job *job, const uint64_t *written, size_t n)
{
    int r = 0;

    forget_edits(job);
    if (n > 0 && !job->window->edits)
        r = state_edits_new(&job->window->edits, job->state, job->kernels);
    for (size_t i = 0; r == 0 && i < n; i++) {
        uint64_t param = written[i] >> 8, kind = written[i] & 0xff;

        if (param >= job->layout->n_params || !job->layout->params[param].trainable)
            return -EINVAL;
        if (kind == STATE_EDITS_COUNT_FOLLOWS && i + 1 < n)
            window_set_count(job, (uint32_t)param, written[++i]);
        else if (kind < STATE_N_KINDS)
            window_mark(job, (uint32_t)param, (enum state_kind)kind, true);
        else
            return -EINVAL;
    }
    return r;
}

int job_window_written(struct job *job, const uint64_t *written, size_t n, const struct state_edits **edits)
{
    if (job->phase != JOB_WINDOW || !job->window)
        return -ENOENT;
    if (job->world.first > 0 && copy_edits(job, written, n) < 0)
        return -ENOMEM;
    *edits = job->window->edits;
    return 0;
}

void job_window_store(struct job *job)
{
    if (job->phase != JOB_WINDOW || !job->window)
        return;
    job->window->stores = true; /* window_settle() commits: a node whose ranks have left may still fill the window */
    job_todo(job);
}
