/* SPDX-License-Identifier: Apache-2.0 */

/* Initial weights: rank 0 sends them, and every rank waits until all nodes have them. */

#include "daemon/job/init.h"

#include <assert.h>
#include <errno.h>

#include "core/base/base.h"
#include "core/base/process-limit.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/wire/journal-wire.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/model/timeline.h"
#include "daemon/memory/ring.h"
#include "daemon/step/executor.h"
#include "daemon/step/step.h"
#include "kernels/dtype.h"

struct init {
    struct job *job;
    struct job_rank *rank;
    struct ring *ring;
    struct request_init request;
};

static int keep_for_others(void *userdata, const struct request_init *request, const void *bytes)
{
    const struct init *init = userdata;

    return coordinator_init(init->job->coordinator, request, bytes);
}

static void job_refuse_init(struct job *job, struct job_rank *rank, const struct request_init *request)
{
    job_fault(job, rank,
              cause_quota(&(struct evidence_quota){.at = job_at_forming(rank),
                                                   .what = "initial weights on their way to other nodes",
                                                   .unit = "bytes",
                                                   .asked = request->n_elems *
                                                            dtype_size(job->layout->params[request->param].dtype),
                                                   .fix = "free memory on this machine",
                                                   .limit = process_limit_met(-ENOMEM)}));
    job_is_held(job, rank);
}

static void init_done(void *userdata, int result)
{
    struct init *init = userdata;
    struct job *job = init->job;
    struct job_rank *rank = init->rank;
    bool goes = result == -ECANCELED && !job->run.drop_why; /* drop_now() cancelled the work */

    if (!goes) {
        assert(job->work.n_inits > 0 && job->work.n_inits <= job->work.n_io);
        job->work.n_io--;
        job->work.n_inits--;
        job_todo(job);
    }
    if (!goes && rank->wait == WAIT_INIT && rank->rings[0] == init->ring) {
        if (result < 0)
            job_refuse_init(job, rank, &init->request);
        else
            job_answer_done(job, rank);
    }
    ring_unhold(init->ring);
    free(init);
}

static const char *check_init(const struct job *job, const struct job_rank *rank, const struct request_init *request)
{
    const struct layout_param *param;
    uint64_t ring_bytes = rank->rings[0] ? rank->rings[0]->ring_bytes : 0, n_bytes;

    if (job->phase != JOB_INITIALISING || job->kept.given_weights || rank->rank != 0 || !rank->rings[0])
        return "Init: only rank 0 sends initial weights, once, when Formed asks for them";
    if (request->param >= job->layout->n_params)
        return "Init.param: no such parameter";
    param = &job->layout->params[request->param];
    if (request->start_elem > param->n_elems || request->n_elems > param->n_elems - request->start_elem)
        return "Init.n_elems: beyond the parameter's end";
    n_bytes = request->n_elems * dtype_size(param->dtype);
    if (n_bytes > ring_bytes || request->offset_bytes > ring_bytes - n_bytes)
        return "Init.offset_bytes: beyond the ring's end";
    return NULL;
}

void job_init(struct job *job, struct job_rank *rank, const struct request_init *request)
{
    const char *wrong = check_init(job, rank, request);
    struct evidence_at at = job_at_forming(rank);
    struct init *init;
    int r;

    if (job_is_held(job, rank))
        return;
    if (wrong) {
        job_drop_peer(job, rank, wrong);
        return;
    }
    init = calloc(1, sizeof(*init));
    if (!init) {
        job_fault(job, rank, cause_declare(&at, "out of memory", "free memory on this machine"));
        job_is_held(job, rank);
        return;
    }
    *init = (struct init){.job = job, .rank = rank, .ring = rank->rings[0], .request = *request};
    ring_hold(init->ring);
    job->work.n_io++;
    job->work.n_inits++;
    job_wait(job, rank, WAIT_INIT);
    r = executor_init(job->executor, &(struct executor_init){.ring = init->ring,
                                                             .local_rank = rank->rank - job->world.first,
                                                             .request = *request,
                                                             .keep = keep_for_others,
                                                             .done = init_done,
                                                             .userdata = init});
    if (r < 0)
        init_done(init, r);
}

/* Answers Ready with the current position, because the step was aborted after Formed was sent. */
static void answer_rewound(struct job *job, struct job_rank *rank)
{
    diagnostic_unref(steal_ptr(rank->process.abort_notice));
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_DONE,
                   .done = {.position = job_position(job, rank),
                            .loss_scale = job_loss_scale(job),
                            .rewound = true,
                            .has_blob = rank->blob.data != NULL,
                            .blob = rank->blob.data,
                            .n_blob_bytes = rank->blob.n_bytes},
               },
               NULL, 0);
}

void job_ready(struct job *job, struct job_rank *rank)
{
    if (rank->process.abort_notice && !rank->kept.ready) {
        rank->kept.ready = true;
        answer_rewound(job, rank);
        return;
    }
    if (job_is_held(job, rank))
        return;
    rank->kept.ready = true;
    if (!job->kept.has_weights)
        job_wait(job, rank, WAIT_READY);
    if (job->phase == JOB_INITIALISING && rank->rank == 0 && !job->kept.given_weights) {
        job->kept.given_weights = true;
        report_progress(job, (struct report){REPORT_HAVE_WEIGHTS});
    } else if (job->kept.has_weights)
        job_answer_done(job, rank);
    job_todo(job);
}

void job_train(struct job *job)
{
    assert(job->phase == JOB_INITIALISING);
    assert(!job->kept.has_weights);
    job->kept.has_weights = true;
    job->phase = JOB_TRAINING;
    job->stats.times.last_commit_ns = job_now(job);
    step_open(job->step);
    timeline_opened(job);
    job_turn(job, TURN_TRAINING);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait == WAIT_READY)
            job_answer_done(job, &job->ranks[r]);
}
