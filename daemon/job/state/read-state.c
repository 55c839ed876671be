/* SPDX-License-Identifier: Apache-2.0 */

/* Reads a parameter's state: its master weights, its moments, its update count, its gradient norm. */

#include "daemon/job/state/read-state.h"

#include <assert.h>
#include <unistd.h>

#include "core/base/base.h"
#include "core/base/process-limit.h"
#include "core/base/segment.h"
#include "core/base/worker.h"
#include "core/diagnosis/cause.h"
#include "core/layout/layout.h"
#include "core/wire/node-wire.h"
#include "core/wire/wire.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/memory/quota.h"
#include "daemon/memory/state.h"
#include "daemon/step/executor.h"
#include "daemon/step/fetch.h"
#include "daemon/step/step.h"

struct reading {
    struct work work;
    struct job *job;
    struct job_rank *rank;
    void *peer;
    uint64_t incarnation; /* checked too, because a new session may have the address (peer) of a closed one */
    struct segment segment;
    struct charge charge;
    struct segment last; /* segment of the previous answer, whose pages are freed first */
    uint32_t param;
    enum wire_state_kind kind;
    unsigned n_waiting; /* reads under way: of this node, and of other nodes */
    int result;
};

/* Kinds of state that are arrays have the same numbers in the wire, in a fetch and in the state. */
_Static_assert((int)FETCH_MASTER == (int)STATE_MASTER && (int)FETCH_EXP_AVG == (int)STATE_EXP_AVG &&
                   (int)FETCH_EXP_AVG_SQ == (int)STATE_EXP_AVG_SQ,
               "and of what is fetched");
_Static_assert((int)WIRE_STATE_MASTER == (int)STATE_MASTER && (int)WIRE_STATE_EXP_AVG == (int)STATE_EXP_AVG &&
                   (int)WIRE_STATE_EXP_AVG_SQ == (int)STATE_EXP_AVG_SQ,
               "kinds of state are numbered alike");

void reading_free(struct reading *reading)
{
    if (!reading)
        return;
    segment_deinit(&reading->segment);
    segment_deinit(&reading->last);
    charge_deinit(&reading->charge);
    free(reading);
}

/* Frees the segment's pages. A client that has kept a descriptor or a mapping reads zeroes then. */
static void give_pages_back(struct segment *segment)
{
    segment_punch(segment, 0, segment->n_bytes);
    segment_deinit(segment);
}

static void release_run(struct work *work, uint32_t item)
{
    struct reading *reading = container_of(work, struct reading, work);

    (void)item;
    give_pages_back(&reading->segment);
}

static void release_done(struct work *work)
{
    struct reading *reading = container_of(work, struct reading, work);
    struct job *job = reading->job;

    assert(job->work.n_io > 0);
    job->work.n_io--;
    reading_free(reading);
    job_todo(job);
}

void job_release_reading(struct job *job, struct job_rank *rank)
{
    struct reading *reading = steal_ptr(rank->given);

    if (!reading)
        return;
    reading->work = (struct work){.run = release_run, .done = release_done, .n_items = 1};
    job->work.n_io++;
    worker_post(job->pool, &reading->work);
}

static void reading_run(struct work *work, uint32_t item)
{
    struct reading *reading = container_of(work, struct reading, work);

    (void)item;
    give_pages_back(&reading->last);
    if (reading->result < 0)
        return;
    reading->result = segment_reserve(&reading->segment, 0, reading->segment.n_bytes);
}

/* r: why the state cannot be read: a negative errno, or QUOTA_E_OVER. */
static void refuse_reading(struct job *job, struct job_rank *rank, uint64_t n_bytes, int r)
{
    struct evidence_quota evidence = {.at = job_at(job, rank),
                                      .what = "state to be read",
                                      .unit = "bytes",
                                      .asked = n_bytes,
                                      .fix = "free memory on this machine",
                                      .limit = process_limit_met(r)};

    if (r == QUOTA_E_OVER) {
        evidence.what = "state to be read (limits.memory)";
        evidence.held = job->memory.quota.used;
        evidence.allowed = job->memory.quota.limit;
        evidence.of_job = true;
        evidence.fix = "raise limits.memory: beside the job, the largest parameter's state must fit once for each rank "
                       "that reads";
    }

    job_refuse(job, rank, job_keep(job, cause_quota(&evidence)), false);
}

static void finish_reading(struct reading *reading)
{
    struct job *job = reading->job;
    struct job_rank *rank = reading->rank;
    struct wire_segment segment = {.kind = WIRE_SEGMENT_STATE, .n_bytes = reading->segment.n_bytes};
    bool has_bytes = reading->segment.n_bytes > 0;
    int fd = reading->result < 0 || !has_bytes ? -1 : segment_open_ro(&reading->segment);
    bool asks =
        rank->wait == WAIT_READ && rank->peer == reading->peer && rank->kept.incarnation == reading->incarnation;

    assert(job->work.n_io > 0);
    job->work.n_io--;
    if (has_bytes && fd < 0 && reading->result == 0)
        reading->result = fd;
    if (asks && reading->result == 0) {
        job_answer(job, rank,
                   &(struct reply){
                       .type = REPLY_STATE_IS,
                       .state_is = {.segments = &segment,
                                    .n_segments = has_bytes,
                                    .n_elems = job->layout->params[reading->param].n_elems,
                                    .count = job->state->progress.counts[reading->param]},
                   },
                   &fd, has_bytes);
    } else if (asks) {
        refuse_reading(job, rank, reading->segment.n_bytes, reading->result);
    } else if (fd >= 0) {
        close(fd);
    }
    if (asks && reading->result == 0 && has_bytes) {
        segment_close_descriptor(&reading->segment);
        rank->given = reading;
    } else {
        reading_free(reading);
    }
    job_todo(job);
}

static void reading_fetched(void *userdata, int result)
{
    struct reading *reading = userdata;

    assert(reading->n_waiting > 0);
    if (result == -ECANCELED && !reading->job->run.drop_why) { /* the job is freed, so no rank is answered */
        if (--reading->n_waiting == 0)
            reading_free(reading);
        return;
    }
    if (result < 0)
        reading->result = result;
    if (--reading->n_waiting == 0)
        finish_reading(reading);
}

/* Called when the pages are reserved. Starts to read the elements that this node owns. */
static void reading_reserved(struct work *work)
{
    struct reading *reading = container_of(work, struct reading, work);
    int r = reading->result;

    assert(reading->segment.n_bytes >= reading->job->layout->params[reading->param].n_elems * sizeof(float));
    if (r == 0)
        r = executor_read(reading->job->executor, &(struct executor_read){.param = reading->param,
                                                                          .kind = (enum state_kind)reading->kind,
                                                                          .dst = reading->segment.map,
                                                                          .done = reading_fetched,
                                                                          .userdata = reading});
    if (r < 0)
        reading_fetched(reading, r);
}

/* Fetches the elements of the parameter that other nodes own. */
static void read_remote(struct reading *reading)
{
    struct job *job = reading->job;
    int r = coordinator_fetch(job->coordinator, &(struct fetch){.kind = (enum fetch_kind)reading->kind,
                                                                .params = &reading->param,
                                                                .n_params = 1,
                                                                .segment = &reading->segment,
                                                                .done = reading_fetched,
                                                                .userdata = reading});

    if (r == 0)
        reading->n_waiting++;
    else if (r < 0)
        reading->result = r;
}

static bool has_array(enum wire_state_kind kind)
{
    return kind != WIRE_STATE_GRAD_NORM && kind != WIRE_STATE_STEP_COUNT;
}

static const char *check_read(const struct job *job, const struct request_read_state *request)
{
    const struct layout_param *p;

    if (request->param >= job->layout->n_params)
        return "ReadState.param: no such parameter";
    p = &job->layout->params[request->param];
    if (request->kind == WIRE_STATE_MASTER)
        return NULL;
    if (!p->trainable)
        return "ReadState.kind: a frozen parameter has no optimizer state";
    if (has_array(request->kind) && p->n_elems > 0 && !state_has(job->state, (enum state_kind)request->kind, p->bucket))
        return "ReadState.kind: this optimizer has no such moment of this parameter";
    return NULL;
}

/*
 * Charges the memory of an answer before it is allocated. Refuses more than limits.memory, or more than is free,
 * because the kernel would kill the daemon for it. The pages of the previous answer count as free, because they are
 * freed first. Return: 0, QUOTA_E_OVER or -ENOMEM.
 */
static int charge_reading(struct job *job, struct reading *reading, uint64_t n_bytes)
{
    struct memory_headroom headroom;
    uint64_t n_more = n_bytes - MIN(n_bytes, (uint64_t)reading->last.n_bytes);

    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    if (n_more > headroom.available_bytes || n_more > headroom.cgroup_bytes)
        return -ENOMEM;
    return quota_charge(&job->memory.quota, &reading->charge, n_bytes);
}

/*
 * Makes an answer. Frees the previous answer, because a rank has at most one. Return: the answer, or NULL if the rank
 * was refused.
 */
static struct reading *reading_new(struct job *job, struct job_rank *rank, uint64_t n_bytes)
{
    struct reading *reading = calloc(1, sizeof(*reading));
    int r = reading ? 0 : -ENOMEM;

    if (reading) {
        reading->segment = reading->last = SEGMENT_NULL;
        reading->job = job;
        reading->rank = rank;
    }
    if (reading && rank->given) {
        reading->last = rank->given->segment;
        rank->given->segment = SEGMENT_NULL;
        reading_free(steal_ptr(rank->given));
    }
    if (r == 0)
        r = charge_reading(job, reading, round_up(n_bytes, page_size()));
    if (r == 0)
        r = segment_init(&reading->segment, "read", n_bytes);
    if (r == 0)
        return reading;
    refuse_reading(job, rank, n_bytes, r);
    if (reading) {
        give_pages_back(&reading->last);
        reading_free(reading);
    }
    return NULL;
}

/* Answers with a norm or a count. Return: 0 or -ENOMEM. */
static int read_figure(struct job *job, struct job_rank *rank, const struct request_read_state *request)
{
    uint32_t param = request->param;
    int r = request->kind == WIRE_STATE_GRAD_NORM ? coordinator_ask_norm(job->coordinator, rank, param) : 1;

    if (r <= 0)
        return r;
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_STATE_IS,
                   .state_is = {.norm = step_param_norm(job->step, step_squares(job->step, param)),
                                .count = job->state->progress.counts[param]},
               },
               NULL, 0);
    return 0;
}

void job_read_state(struct job *job, struct job_rank *rank, const struct request_read_state *request)
{
    const char *wrong = check_read(job, request);
    struct evidence_at at = job_at(job, rank);
    struct reading *reading;

    if (job_is_held(job, rank))
        return;
    if (wrong) { /* refused without a sticky fault, because a read changes nothing */
        job_refuse(job, rank, job_keep(job, cause_bad_message(&at, wrong)), false);
        return;
    }
    if (!has_array(request->kind)) {
        if (read_figure(job, rank, request) < 0)
            refuse_reading(job, rank, 0, -ENOMEM);
        return;
    }
    reading = reading_new(job, rank, job->layout->params[request->param].n_elems * sizeof(float));
    if (!reading)
        return;
    reading->peer = rank->peer;
    reading->incarnation = rank->kept.incarnation;
    reading->param = request->param;
    reading->kind = request->kind;
    reading->work = (struct work){.run = reading_run, .done = reading_reserved, .n_items = 1};
    reading->n_waiting = 1;
    job->work.n_io++;
    job_wait(job, rank, WAIT_READ);
    read_remote(reading);
    worker_post(job->pool, &reading->work);
}
