/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Write windows: between two steps rank 0 writes into a segment that shows the
 * weights; when all ranks end the window it becomes the weights and masters.
 * Until then nothing of the state has changed, so a window that is forgotten leaves no trace. What 16-bit weights
 * do not show, moments and step counts, is written beside it, into state edits, which share the window's fate.
 */

#include "daemon/job/state/window.h"

#include <stdio.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/open-files.h"
#include "core/base/segment.h"
#include "core/base/worker.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/wire/node-wire.h"
#include "core/wire/wire.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/journal.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/state/gather.h"
#include "daemon/memory/ledger.h"
#include "daemon/memory/quota.h"
#include "daemon/memory/state-edits.h"
#include "daemon/memory/state.h"
#include "daemon/memory/transfer.h"
#include "daemon/step/executor.h"
#include "daemon/step/fetch.h"

/* Pages for a place of the edits. Rank 0 waits for them, or is gone. */
struct writing {
    struct work work;
    struct job *job;
    uint32_t param;
    enum state_kind kind;
    struct state_edits_place place;
    int result;
};

struct window {
    struct segment segment;
    struct charge charge;
    struct state_edits *edits; /* NULL: nothing of the state was written yet */
    struct charge edits_charge;
    struct charge copy_charge; /* of the staging copy, while it is filled; several nodes: until the window is over */
    struct job *job;             /* while it is committed */
    struct work again;
    struct writing writing;
    bool ready;         /* shows the weights */
    bool stores;        /* node 0 has said so: when nothing is under way in it */
    bool busy;          /* a transfer, storing edits or reserving their pages is under way */
    bool stale;         /* its writer died: to be filled again for the successor */
    bool lacks_memory;  /* several nodes, on which it is open: to be tried again when a rank asks again */
    bool forgotten;     /* while a transfer was under way: goes when that ends */
    unsigned n_filling; /* what is here, and what other nodes have */
    int fill_result;
};

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

bool window_is_busy(const struct window *window)
{
    return window && window->busy;
}

/* What is under way in it frees it at its end. */
static void let_go(struct job *job)
{
    coordinator_window(job->coordinator, NULL);
    if (job->window && job->window->busy)
        job->window->forgotten = true;
    else
        window_free(steal_ptr(job->window));
}

void window_forget(struct job *job)
{
    let_go(job);
    job->phase = JOB_TRAINING;
}

static const struct misplaced inside_step = {"a write window",
                                             "windows open between two steps, and this rank has begun one",
                                             "zerod_write_begin before the step's first micro-batch, on all ranks"};
static const struct misplaced not_open = {"the end of a write window", "no write window is open",
                                          "zerod_write_begin first, on all ranks"};
static const struct misplaced written_outside = {"state to be written (zerod_write_state)", "no write window is open",
                                                 "zerod_write_begin first, on all ranks"};

/* ---- begin --------------------------------------------------------------------------------------------- */

/* r: why it cannot be given, a negative errno. */
static void refuse_begin(struct job *job, struct job_rank *rank, uint64_t n_bytes, int r)
{
    struct evidence_quota evidence = {.at = job_at(job, rank),
                                      .what = "write window",
                                      .unit = "bytes",
                                      .asked = n_bytes,
                                      .fix = "free memory on this machine",
                                      .open_files = open_files_if_short(r)};

    job_refuse(job, rank, job_keep(job, cause_quota(&evidence)), false);
}

static void answer_begin(struct job *job, struct job_rank *rank)
{
    bool stage3 = job->config->zero.stage == 3;
    const struct segment *shown = &job->window->segment;
    struct wire_segment segment = {.kind = WIRE_SEGMENT_WINDOW, .n_bytes = shown->n_bytes};
    /* In stages 1 and 2 the others have the weights to map a private copy of. */
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
    return job->config->zero.stage == 3 ? job->layout->range_bytes : job->layout->weight_bytes;
}

/* Does a window take the staging copy when it is opened? In stage 3 to be filled; of several nodes so that it can be
 * committed, as all nodes have to do that when all have said so. */
static bool opening_copies(const struct job *job)
{
    return job->executor->copy_bytes > 0 && (!job->coordinator->alone || job->executor->gathers);
}

/* What opening takes. */
static uint64_t opening_bytes(const struct job *job)
{
    return segment_bytes(job) + (opening_copies(job) ? job->executor->copy_bytes : 0);
}

static void fill_done(void *userdata, int result)
{
    struct job *job = userdata;
    struct window *window = job->window;

    if (result == -ECANCELED && !job->run.drop_why)
        return; /* with the job */
    if (result < 0)
        window->fill_result = result;
    if (--window->n_filling > 0)
        return;
    window->busy = false;
    if (window->forgotten) {
        window_free(steal_ptr(job->window));
    } else if (window->fill_result < 0) {
        for (unsigned r = job->world.first; r < job->world.end; r++)
            if (job->ranks[r].wait == WAIT_WINDOW_BEGIN)
                refuse_begin(job, &job->ranks[r], opening_bytes(job), window->fill_result);
        window->lacks_memory = true;
        coordinator_lacks_memory(job->coordinator);
    } else {
        window->ready = true;
    }
    job_todo(job);
}

/* Stage 3: what other nodes own. Return: 0, or -ENOMEM. */
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

/* For a staging copy with all of the state. Return: 0, also when it is charged already or there is none, or -ENOMEM. */
static int charge_copy(struct job *job)
{
    uint64_t n_bytes = job->executor->copy_bytes;
    struct memory_headroom headroom;

    if (n_bytes == 0 || job->window->copy_charge.quota)
        return 0;
    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    if (n_bytes > headroom.available_bytes || n_bytes > headroom.cgroup_bytes || failpoint("mirror") < 0 ||
        quota_charge(&job->memory.quota, &job->window->copy_charge, n_bytes) != 0)
        return -ENOMEM;
    return 0;
}

/* Its pages are given back. Several nodes: they are wanted again when all have said that the window is to be committed,
 * and then they have to be there. */
static void discharge_copy(struct job *job)
{
    if (job->coordinator->alone)
        charge_deinit(&job->window->copy_charge);
}

static void shown(void *userdata, int result)
{
    struct job *job = userdata;

    if (result != -ECANCELED || job->run.drop_why) /* else with the job */
        discharge_copy(job);
    fill_done(job, result);
}

static int fill(struct job *job)
{
    int r;

    job->window->n_filling = 1;
    job->window->fill_result = 0;
    coordinator_window(job->coordinator, &job->window->segment);
    r = executor_show(job->executor, &job->window->segment, shown, job);
    if (r == 0 && job->config->zero.stage == 3 && fill_remote(job) < 0)
        job->window->fill_result = -ENOMEM;
    job->window->ready = job->window->stale = job->window->lacks_memory = false;
    job->window->busy = r == 0;
    /* A successor begins with nothing written. */
    state_edits_free(steal_ptr(job->window->edits));
    charge_deinit(&job->window->edits_charge);
    return r;
}

/* What ranks map; once. Return: 0 or -errno. */
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
    r = segment_init(&window->segment, "window", n_bytes);
    if (r < 0)
        charge_deinit(&window->charge);
    return r;
}

/* Shows the weights as they are committed, whatever it has shown before. */
static void show_weights(struct job *job)
{
    int r = make_segment(job);

    if (r == 0 && opening_copies(job))
        r = charge_copy(job);
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
        return; /* as if nobody had asked yet */
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

/* ---- writing state ------------------------------------------------------------------------------------- */

/* Return: NULL, or why it cannot be written; a sentence in what. */
static const char *check_write(const struct job *job, const struct request_write_state *request, char *what,
                               size_t size)
{
    static const char *const names[] = {[STATE_EXP_AVG] = "exp_avg", [STATE_EXP_AVG_SQ] = "exp_avg_sq"};
    const struct layout_param *p;
    char name[128];

    if (request->param >= job->layout->n_params) {
        snprintf(what, size, "WriteState.param: %u, expected 0 to %u", request->param, job->layout->n_params - 1);
        return what;
    }
    p = &job->layout->params[request->param];
    layout_print_name(name, sizeof(name), p->name, p->name_len);
    if (!p->trainable) {
        snprintf(what, size,
                 "WriteState.param: %s is frozen and has no optimizer state; zerod_window() has its weights", name);
        return what;
    }
    if (request->kind != WIRE_STATE_STEP_COUNT && p->n_elems > 0 &&
        !state_values(job->state, (enum state_kind)request->kind, p->bucket, p->offset_elems)) {
        snprintf(what, size, "WriteState.kind: %s, which the optimizer of this daemon (optimizer.type) does not keep",
                 names[request->kind]);
        return what;
    }
    return NULL;
}

static void refuse_write(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic)
{
    job_fault(job, rank, diagnostic); /* sticky: what is missing is not to be committed by mistake */
    job_is_held(job, rank);
}

static void refuse_pages(struct job *job, struct job_rank *rank, const struct evidence_quota *bound, uint64_t n_bytes)
{
    struct evidence_quota evidence = *bound;

    evidence.at = job_at(job, rank);
    evidence.what = "state in a write window";
    evidence.unit = "bytes";
    evidence.asked = n_bytes;
    if (!evidence.fix)
        evidence.fix = "free memory on this machine";
    refuse_write(job, rank, cause_quota(&evidence));
}

/* Return: true when so many bytes more may be held, and are charged; else the rank has been told. */
static bool charge_pages(struct job *job, struct job_rank *rank, uint64_t n_bytes)
{
    struct memory_headroom headroom;
    uint64_t free_bytes;

    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    free_bytes = MIN(headroom.available_bytes, headroom.cgroup_bytes);
    if (n_bytes > free_bytes) {
        refuse_pages(job, rank, &(struct evidence_quota){0}, n_bytes);
        return false;
    }
    if (quota_charge_more(&job->memory.quota, &job->window->edits_charge, n_bytes) == 0)
        return true;
    refuse_pages(job, rank,
                 &(struct evidence_quota){.held = job->memory.quota.used,
                                          .allowed = job->memory.quota.limit,
                                          .of_job = true,
                                          .fix = "raise limits.memory, or write the state in several windows"},
                 n_bytes);
    return false;
}

/* place: NULL when there is nothing to fill. Return: false when it could not be handed out, and the rank was told. */
static bool answer_write(struct job *job, struct job_rank *rank, uint32_t param, const struct state_edits_place *place)
{
    const struct segment *segment = place ? &job->window->edits->segment : NULL;
    int fd = segment ? segment_open_rw(segment) : -1;

    if (segment && fd < 0) {
        refuse_pages(job, rank, &(struct evidence_quota){.open_files = open_files_if_short(fd)}, 0);
        return false;
    }
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_STATE_IS,
                   .state_is = {.segments = segment ? &(struct wire_segment){.kind = WIRE_SEGMENT_WINDOW_STATE,
                                                                             .n_bytes = segment->n_bytes}
                                                    : NULL,
                                .n_segments = segment != NULL,
                                .n_elems = job->layout->params[param].n_elems,
                                .count = state_journal(job->state)->counts[param],
                                .offset_bytes = place ? place->offset_bytes : 0},
               },
               &fd, segment != NULL);
    return true;
}

static void writing_run(struct work *work, uint32_t item)
{
    struct writing *writing = container_of(work, struct writing, work);

    (void)item;
    writing->result = failpoint("writing");
    if (writing->result == 0)
        writing->result = state_edits_reserve(writing->job->window->edits, &writing->place);
}

static void writing_done(struct work *work)
{
    struct writing *writing = container_of(work, struct writing, work);
    struct job *job = writing->job;
    struct window *window = job->window;
    struct job_rank *rank = &job->ranks[0];

    job->work.n_io--;
    window->busy = false;
    if (window->forgotten) { /* by an abort, of which the rank is told */
        window_free(steal_ptr(job->window));
    } else if (rank->wait == WAIT_WRITE && writing->result < 0) {
        refuse_pages(job, rank, &(struct evidence_quota){0}, writing->place.n_bytes);
    } else if (rank->wait == WAIT_WRITE) {
        if (answer_write(job, rank, writing->param, &writing->place)) /* else nobody fills it */
            state_edits_mark(window->edits, writing->param, writing->kind);
    }
    job_todo(job);
}

static void give_place(struct job *job, struct job_rank *rank, const struct request_write_state *request)
{
    struct window *window = job->window;
    enum state_kind kind = (enum state_kind)request->kind;
    struct state_edits_place place = state_edits_place(window->edits, request->param, kind);

    if (state_edits_is_marked(window->edits, request->param, kind)) {
        answer_write(job, rank, request->param, &place);
        return;
    }
    if (!charge_pages(job, rank, place.n_bytes))
        return;
    window->writing = (struct writing){.work = {.run = writing_run, .done = writing_done, .n_items = 1},
                                       .job = job,
                                       .param = request->param,
                                       .kind = kind,
                                       .place = place};
    window->busy = true;
    job->work.n_io++;
    job_wait(job, rank, WAIT_WRITE);
    worker_post(job->pool, &window->writing.work);
}

/* Rank 0 inside a window whose weights it was given; a successor has to begin first. */
static bool may_write(const struct job *job, const struct job_rank *rank)
{
    const struct window *window = job->window;

    return job->phase == JOB_WINDOW && (rank->rank != 0 || (window->ready && !window->busy && !window->stale));
}

void job_write_state(struct job *job, struct job_rank *rank, const struct request_write_state *request)
{
    struct evidence_at at = job_at(job, rank);
    char buffer[256];
    const char *wrong;
    int r = 0;

    if (job_is_held(job, rank))
        return;
    if (!may_write(job, rank)) {
        job_refuse_early(job, rank, &written_outside);
        return;
    }
    wrong = check_write(job, request, buffer, sizeof(buffer));
    if (wrong) {
        refuse_write(job, rank, cause_bad_message(&at, wrong));
        return;
    }
    if (rank->rank == 0 && !job->window->edits)
        r = state_edits_new(&job->window->edits, job->state, job->kernels);
    if (r < 0) {
        refuse_pages(job, rank, &(struct evidence_quota){.open_files = open_files_if_short(r)}, 0);
        return;
    }
    if (rank->rank == 0 && request->kind == WIRE_STATE_STEP_COUNT)
        state_edits_set_count(job->window->edits, request->param, request->count);
    if (rank->rank == 0 && request->kind != WIRE_STATE_STEP_COUNT && job->layout->params[request->param].n_elems > 0)
        give_place(job, rank, request);
    else
        answer_write(job, rank, request->param, NULL);
}

/* ---- end ----------------------------------------------------------------------------------------------- */

static void finish_window(struct job *job)
{
    let_go(job); /* a node whose ranks have all left may still be filling it when the others have forgotten it */
    state_journal(job->state)->n_windows++; /* a forgotten one too: a successor must not wait for it again */
    job->phase = JOB_TRAINING;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait == WAIT_WINDOW_END)
            job_answer_done(job, &job->ranks[r]);
    job_todo(job);
}

static void committed(void *userdata)
{
    struct job *job = userdata;

    job_advance_generation(job);
    finish_window(job);
}

static void stored(void *userdata);

/* What was stored here is where the executor works. */
static void brought(void *userdata, int result)
{
    struct job *job = userdata;

    if (result == -ECANCELED && !job->run.drop_why) /* with the job */
        return;
    executor_empty(job->executor);
    discharge_copy(job);
    stored(job);
}

/* There is no way back from here: for want of a few KiB it is tried until there are. */
static void store_again(struct work *work)
{
    struct window *window = container_of(work, struct window, again);
    struct job *job = window->job;
    int r = executor_store(job->executor, brought, job);

    if (r > 0)
        stored(job);
    else if (r == -ECANCELED)
        brought(job, r);
    else if (r < 0)
        worker_post(job->pool, &window->again);
}

static void do_nothing(struct work *work, uint32_t item)
{
    (void)work;
    (void)item;
}

static void all_stored(void *userdata)
{
    struct job *job = userdata;

    job->window->again = (struct work){.run = do_nothing, .done = store_again, .n_items = 1};
    store_again(&job->window->again);
}

static void stored(void *userdata)
{
    struct job *job = userdata;

    job->window->busy = false;
    if (job->window->forgotten) /* node 0 has said that it is over before it could be */
        window_free(steal_ptr(job->window));
    else
        coordinator_stored(job->coordinator); /* it is committed when it is stored everywhere */
}

/* After the weights: a master that was written itself is the one that counts. */
static void store_done(void *userdata, int result)
{
    struct job *job = userdata;

    (void)result;
    if (job->window->edits)
        state_edits_store(job->window->edits, job->pool, all_stored, job);
    else
        all_stored(job);
}

/* There is no memory for it: nothing was written, everybody is told. */
static void refuse_commit(struct job *job)
{
    executor_empty(job->executor);
    discharge_copy(job);
    job->window->busy = job->window->stores = false;
    job_advance_generation(job);
    job->phase = JOB_WINDOW;
    for (unsigned i = job->world.first; i < job->world.end; i++)
        if (job->ranks[i].wait == WAIT_WINDOW_END)
            job_refuse(job, &job->ranks[i],
                       job_keep(job, cause_quota(&(struct evidence_quota){
                                         .at = job_at(job, &job->ranks[i]),
                                         .what = "write window",
                                         .unit = "bytes",
                                         .asked = job->executor->copy_bytes,
                                         .fix = "free memory, then end the window again"})),
                       false);
}

static void begin_storing(struct work *work);

/* What all nodes have decided has no way back either; what it takes is charged since the window is open. */
static void cannot_commit(struct job *job)
{
    if (job->coordinator->alone || job->run.drop_why) {
        refuse_commit(job);
        return;
    }
    job->window->again = (struct work){.run = do_nothing, .done = begin_storing, .n_items = 1};
    worker_post(job->pool, &job->window->again);
}

/* The window to the state of this node. */
static int store_window(struct job *job)
{
    return transfer_start(job->pool, &(struct transfer_options){
                                         .state = job->state,
                                         .kernels = job->kernels,
                                         .segment = &job->window->segment,
                                         .n_params = job->layout->n_params,
                                         .range = job->config->zero.stage == 3,
                                         .direction = TRANSFER_STORE,
                                         .done = store_done,
                                         .userdata = job,
                                     });
}

/* The state is in the memory of this process: the window is stored there. */
static void loaded(void *userdata, int result)
{
    struct job *job = userdata;

    if (result == -ECANCELED && !job->run.drop_why) /* with the job */
        return;
    if (result < 0 || store_window(job) < 0)
        cannot_commit(job);
}

static void begin_storing(struct work *work)
{
    struct job *job = container_of(work, struct window, again)->job;
    int r = charge_copy(job);

    if (r == 0)
        r = executor_load(job->executor, loaded, job);
    if (r > 0)
        loaded(job, 0);
    else if (r < 0)
        loaded(job, r);
}

static void commit_window(struct job *job)
{
    job->phase = JOB_COMMITTING_WINDOW;
    job->window->busy = true;
    job->window->job = job;
    job_advance_generation(job);
    begin_storing(&job->window->again);
}

void job_write_end(struct job *job, struct job_rank *rank, bool forget)
{
    if (job_is_stopped(job, rank))
        return;
    if (job->phase != JOB_WINDOW || job->window->lacks_memory ||
        (rank->rank == 0 && job->window->stale)) { /* stale: its predecessor's, half written */
        job_refuse_early(job, rank, &not_open);
        return;
    }
    rank->forget = forget;
    job_wait(job, rank, WAIT_WINDOW_END);
    job_todo(job);
}

void window_detach(struct job *job, struct job_rank *rank)
{
    if (job->phase == JOB_WINDOW && rank->rank == 0)
        job->window->stale = true;
}

/* ---- who can be answered ------------------------------------------------------------------------------- */

static bool all_wait(const struct job *job, enum job_wait wait)
{
    bool any = false;

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        if (job->ranks[r].wait != wait && !job->ranks[r].left)
            return false;
        any |= job->ranks[r].wait == wait;
    }
    return any;
}

static bool any_waits(const struct job *job, enum job_wait wait)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait == wait)
            return true;
    return false;
}

/* A successor of rank 0 must not see what its predecessor had begun to write. */
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
    if (job->phase == JOB_TRAINING && !job->window && all_wait(job, WAIT_WINDOW_BEGIN)) {
        coordinator_want_window(job->coordinator);
        return;
    }
    if (job->phase != JOB_WINDOW || job->window->busy)
        return;
    if (job->window->stores) {
        commit_window(job);
        return;
    }
    settle_open(job);
    /* What loads while weights change would be a mixture. */
    if (job->phase != JOB_WINDOW || gather_is_busy(job) || !all_wait(job, WAIT_WINDOW_END))
        return;
    coordinator_end_window(job->coordinator, job->window->edits, job->ranks[0].forget || job->ranks[0].left);
}

/* ---- what node 0 says ---------------------------------------------------------------------------------- */

void job_window_open(struct job *job)
{
    if (job->phase == JOB_TRAINING && !job->window)
        open_window(job);
}

/* Makes edits like those that another node's rank 0 has written, to receive them. Return: 0 or -ENOMEM. */
static int copy_edits(struct job *job, const uint64_t *written, size_t n)
{
    int r = job->window->edits ? 0 : state_edits_new(&job->window->edits, job->state, job->kernels);

    for (size_t i = 0; r == 0 && i < n; i++) {
        uint64_t param = written[i] >> 8, kind = written[i] & 0xff;

        if (param >= job->layout->n_params || !job->layout->params[param].trainable)
            return -EINVAL;
        if (kind == STATE_EDITS_COUNT_FOLLOWS && i + 1 < n)
            state_edits_set_count(job->window->edits, (uint32_t)param, written[++i]);
        else if (kind < STATE_N_KINDS)
            state_edits_mark(job->window->edits, (uint32_t)param, (enum state_kind)kind);
        else
            return -EINVAL;
    }
    return r;
}

int job_window_written(struct job *job, const uint64_t *written, size_t n, const struct state_edits **edits)
{
    if (job->phase != JOB_WINDOW || !job->window)
        return -ENOENT;
    if (n > 0 && job->world.first > 0 && copy_edits(job, written, n) < 0)
        return -ENOMEM;
    *edits = job->window->edits;
    return 0;
}

void job_window_store(struct job *job)
{
    if (job->phase != JOB_WINDOW || !job->window)
        return;
    job->window->stores = true; /* a node whose ranks have all left may still be filling it */
    job_todo(job);
}

void job_window_closed(struct job *job)
{
    if (job->phase == JOB_COMMITTING_WINDOW && !executor_refresh(job->executor, committed, job))
        committed(job);
    else if (job->phase == JOB_WINDOW)
        finish_window(job);
}
