/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Moments and step counts that rank 0 writes in a window. They go into state edits, because 16-bit weights do not show
 * them.
 */

#include "daemon/job/state/window.h"

#include <assert.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/keep.h"
#include "core/base/process-limit.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "core/wire/wire.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/state/window-inside.h"

static const struct misplaced written_outside = {
    "state to be written",
    "no write window is open",
    {"zerod_write_begin before zerod_write_state, on all ranks", "opt.load_state_dict() on all ranks"}};

/* ---- writing state ------------------------------------------------------------------------------------- */

/* Return: NULL if the state can be written; else what, which receives a sentence that says why not. */
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
        !state_has(job->state, (enum state_kind)request->kind, p->bucket)) {
        snprintf(
            what, size,
            "WriteState.kind: %s, which the optimizer of this daemon (optimizer.type) does not keep for this parameter",
            names[request->kind]);
        return what;
    }
    return NULL;
}

static void refuse_write(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic)
{
    job_fault(job, rank, diagnostic); /* sticky, because the window must not be committed without this state */
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

/* Charges n_bytes more. Return: true, or false if the rank was refused. */
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

/*
 * Answers the rank. place: NULL if there is nothing to fill. Return: false if no descriptor could be opened, and the
 * rank was refused.
 */
static bool answer_write(struct job *job, struct job_rank *rank, uint32_t param, const struct state_edits_place *place)
{
    const struct segment *segment = place ? &job->window->edits->segment : NULL;
    int fd = segment ? segment_open_rw(segment) : -1;

    if (segment && fd < 0) {
        refuse_pages(job, rank, &(struct evidence_quota){.limit = process_limit_met(fd)}, 0);
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
                                .count = job->state->progress.counts[param],
                                .offset_bytes = place ? place->offset_bytes : 0},
               },
               &fd, segment != NULL);
    return true;
}

void window_mark(struct job *job, uint32_t param, enum state_kind kind, bool marked)
{
    const struct journal_edit edit = {.param = param, .kind = kind, .is_marked = marked};

    assert(job->layout->params[param].trainable);
    job_record(job, NULL, JOURNAL_EDIT, &edit, sizeof(edit), NULL, 0);
    state_edits_mark(job->window->edits, param, kind, marked);
}

void window_set_count(struct job *job, uint32_t param, uint64_t count)
{
    const struct journal_edit edit = {.param = param, .kind = STATE_N_KINDS, .count = count};

    assert(job->layout->params[param].trainable);
    job_record(job, NULL, JOURNAL_EDIT, &edit, sizeof(edit), NULL, 0);
    state_edits_set_count(job->window->edits, param, count);
}

static void writing_run(struct work *work, uint32_t item)
{
    struct writing *writing = container_of(work, struct writing, work);

    (void)item;
    writing->result = failpoint("writing");
    if (writing->result == 0)
        writing->result = state_edits_reserve(writing->job->window->edits, &writing->place);
    if (writing->result == 0 && writing->job->run.survival.journal)
        writing->result = keep_confirm(KEEP_TIMEOUT_MS);
}

static void writing_done(struct work *work)
{
    struct writing *writing = container_of(work, struct writing, work);
    struct job *job = writing->job;
    struct window *window = job->window;
    struct job_rank *rank = &job->ranks[0];

    assert(window->busy);
    assert(job->work.n_io > 0);
    job->work.n_io--;
    window->busy = false;
    if (window->forgotten) { /* an abort has forgotten the window, and answers the rank */
        window_end(job);
    } else if (rank->wait == WAIT_WRITE && writing->result < 0) {
        refuse_pages(job, rank, &(struct evidence_quota){0}, writing->place.n_bytes);
    } else if (rank->wait == WAIT_WRITE) {
        window_mark(job, writing->param, writing->kind, true);
        if (!answer_write(job, rank, writing->param, &writing->place)) /* the rank was refused */
            window_mark(job, writing->param, writing->kind, false);
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
    assert(!window->busy);
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

/*
 * May the rank write state now? For rank 0, the window must be filled. A successor of rank 0 must begin the window
 * again first.
 */
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
        refuse_pages(job, rank, &(struct evidence_quota){.limit = process_limit_met(r)}, 0);
        return;
    }
    if (rank->rank == 0 && request->kind == WIRE_STATE_STEP_COUNT)
        window_set_count(job, request->param, request->count);
    if (rank->rank == 0 && request->kind != WIRE_STATE_STEP_COUNT && job->layout->params[request->param].n_elems > 0)
        give_place(job, rank, request);
    else
        answer_write(job, rank, request->param, NULL);
}
