/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Write windows: between two steps rank 0 writes into a segment that shows the
 * weights; when all ranks end the window it becomes the weights and masters.
 * Until then nothing of the state has changed, so a window that is forgotten leaves no trace.
 */

#include <stdio.h>
#include <string.h>

#include "daemon/base.h"
#include "daemon/job.h"
#include "daemon/transfer.h"

struct window {
    struct segment segment;
    bool ready;     /* shows the weights */
    bool busy;      /* a transfer is under way */
    bool stale;     /* its writer died: to be filled again for the successor */
    bool forgotten; /* while a transfer was under way: goes when that ends */
};

void window_free(struct window *window)
{
    if (!window)
        return;
    segment_deinit(&window->segment);
    free(window);
}

bool window_is_busy(const struct window *window)
{
    return window && window->busy;
}

void window_forget(struct job *job)
{
    if (job->window && job->window->busy)
        job->window->forgotten = true;
    else
        window_free(steal_ptr(job->window));
    job->phase = JOB_TRAINING;
}

static const struct misplaced inside_step = {"a write window",
                                             "windows open between two steps, and this rank has begun one",
                                             "zerod_write_begin before the step's first micro-batch, on all ranks"};
static const struct misplaced not_open = {"the end of a write window", "no write window is open",
                                          "zerod_write_begin first, on all ranks"};

/* ---- begin --------------------------------------------------------------------------------------------- */

static void answer_begin(struct job *job, struct job_rank *rank)
{
    bool stage3 = job->config->zero.stage == 3;
    struct wire_segment segment = {.kind = WIRE_SEGMENT_WINDOW, .n_bytes = job->window->segment.n_bytes};
    int fd = -1;

    /* In stages 1 and 2 the others have the weights to map a private copy of. */
    if (rank->rank == 0)
        fd = segment_open_rw(&job->window->segment);
    else if (stage3)
        fd = segment_open_ro(&job->window->segment);
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_DONE,
                   .done = {.position = job_position(job, rank),
                            .segments = &segment,
                            .n_segments = fd >= 0,
                            .loss_scale = job_loss_scale(job)},
               },
               &fd, fd >= 0);
}

static void fill_done(void *userdata, int result)
{
    struct job *job = userdata;
    struct window *window = job->window;

    window->busy = false;
    if (window->forgotten) {
        window_free(steal_ptr(job->window));
    } else if (result < 0) {
        for (unsigned r = 0; r < job->world_size; r++)
            if (job->ranks[r].wait == WAIT_WINDOW_BEGIN)
                job_refuse(job, &job->ranks[r],
                           job_keep(job, cause_quota(&(struct evidence_quota){.at = job_at(job, &job->ranks[r]),
                                                                              .what = "write window",
                                                                              .unit = "bytes",
                                                                              .asked = window->segment.n_bytes,
                                                                              .fix = "free memory on this machine"})),
                           false);
        window_forget(job);
    } else {
        window->ready = true;
    }
    job_settle(job);
}

static int fill(struct job *job)
{
    int r = transfer_start(job->pool, &(struct transfer_options){
                                          .state = job->state,
                                          .kernels = job->kernels,
                                          .segment = &job->window->segment,
                                          .n_params = job->layout->n_params,
                                          .range = job->config->zero.stage == 3,
                                          .direction = TRANSFER_FETCH,
                                          .done = fill_done,
                                          .userdata = job,
                                      });

    job->window->ready = false;
    job->window->busy = r == 0;
    job->window->stale = false;
    return r;
}

static void open_window(struct job *job)
{
    uint64_t n_bytes = job->config->zero.stage == 3 ? job->layout->range_bytes : job->layout->weight_bytes;
    struct memory_headroom headroom;
    int r = -ENOMEM;

    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    job->phase = JOB_WINDOW;
    job->window = calloc(1, sizeof(*job->window));
    if (job->window)
        job->window->segment = SEGMENT_NULL;
    if (job->window && n_bytes <= headroom.available_bytes && n_bytes <= headroom.cgroup_bytes &&
        n_bytes <= job->memory.limit - job->memory.used)
        r = segment_init(&job->window->segment, "window", n_bytes);
    if (r == 0)
        r = fill(job);
    if (r < 0 && job->window)
        fill_done(job, r);
    else if (r < 0)
        job->phase = JOB_TRAINING;
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
    job_settle(job);
}

/* ---- end ----------------------------------------------------------------------------------------------- */

static void set_generations(struct job *job)
{
    for (unsigned r = 0; r < job->world_size; r++)
        if (job->ranks[r].rings[0] && job->ranks[r].rings[0]->ready)
            atomic_fetch_add_explicit(&ring_credit_page(job->ranks[r].rings[0])->generation, 1, memory_order_acq_rel);
}

static void finish_window(struct job *job)
{
    state_journal(job->state)->n_windows++; /* a forgotten one too: a successor must not wait for it again */
    window_free(steal_ptr(job->window));
    job->phase = JOB_TRAINING;
    for (unsigned r = 0; r < job->world_size; r++)
        if (job->ranks[r].wait == WAIT_WINDOW_END)
            job_answer_done(job, &job->ranks[r]);
    job_settle(job);
}

static void committed(struct job *job)
{
    set_generations(job);
    finish_window(job);
}

static void store_done(void *userdata, int result)
{
    struct job *job = userdata;

    (void)result;
    job->window->busy = false;
    if (!pool_refresh(job, committed))
        committed(job);
}

static void commit_window(struct job *job)
{
    int r;

    job->phase = JOB_COMMITTING_WINDOW;
    job->window->busy = true;
    set_generations(job);
    r = transfer_start(job->pool, &(struct transfer_options){
                                      .state = job->state,
                                      .kernels = job->kernels,
                                      .segment = &job->window->segment,
                                      .n_params = job->layout->n_params,
                                      .range = job->config->zero.stage == 3,
                                      .direction = TRANSFER_STORE,
                                      .done = store_done,
                                      .userdata = job,
                                  });
    if (r < 0) { /* a few KiB for the list of pieces are not to be had: nothing was written, everybody is told */
        job->window->busy = false;
        set_generations(job);
        job->phase = JOB_WINDOW;
        for (unsigned i = 0; i < job->world_size; i++)
            if (job->ranks[i].wait == WAIT_WINDOW_END)
                job_refuse(job, &job->ranks[i],
                           job_keep(job, cause_quota(&(struct evidence_quota){
                                             .at = job_at(job, &job->ranks[i]),
                                             .what = "write window",
                                             .unit = "bytes",
                                             .fix = "free memory, then end the window again"})),
                           false);
    }
}

void job_write_end(struct job *job, struct job_rank *rank, bool forget)
{
    if (job_is_stopped(job, rank))
        return;
    if (job->phase != JOB_WINDOW ||
        (rank->rank == 0 && job->window->stale)) { /* stale: its predecessor's, half written */
        job_refuse_early(job, rank, &not_open);
        return;
    }
    rank->forget = forget;
    job_wait(job, rank, WAIT_WINDOW_END);
    job_settle(job);
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

    for (unsigned r = 0; r < job->world_size; r++) {
        if (job->ranks[r].wait != wait && !job->ranks[r].left)
            return false;
        any |= job->ranks[r].wait == wait;
    }
    return any;
}

/* A successor of rank 0 must not see what its predecessor had begun to write. */
static void settle_open(struct job *job)
{
    if (job->window->stale && job->ranks[0].wait == WAIT_WINDOW_BEGIN && !job->window->busy) {
        if (fill(job) < 0)
            fill_done(job, -ENOMEM);
        return;
    }
    if (!job->window->ready)
        return;
    for (unsigned r = 0; r < job->world_size; r++)
        if (job->ranks[r].wait == WAIT_WINDOW_BEGIN && (r != 0 || !job->window->stale))
            answer_begin(job, &job->ranks[r]);
}

void window_settle(struct job *job)
{
    if (job->phase == JOB_TRAINING && !job->window && all_wait(job, WAIT_WINDOW_BEGIN)) {
        open_window(job);
        return;
    }
    if (job->phase != JOB_WINDOW || job->window->busy)
        return;
    settle_open(job);
    /* What loads while weights change would be a mixture. */
    if (job->phase != JOB_WINDOW || pool_is_busy(job->gathered) || !all_wait(job, WAIT_WINDOW_END))
        return;
    if (job->ranks[0].forget || job->ranks[0].left)
        finish_window(job);
    else
        commit_window(job);
}
