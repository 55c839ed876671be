/* SPDX-License-Identifier: Apache-2.0 */

/* The coordinator of a job of one node answers each report with the job's verb at once. */

#include "daemon/job/alone.h"

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "daemon/job/attendance.h"
#include "daemon/job/drop.h"
#include "daemon/job/form.h"
#include "daemon/job/gpu-room.h"
#include "daemon/job/init.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/parcels.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/state/window.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/job/transaction/commit.h"
#include "daemon/memory/state-edits.h"
#include "daemon/step/step.h"

struct alone {
    struct coordinator coordinator;
    struct job *job;
};

static struct alone *alone_of(const struct coordinator *c)
{
    return container_of(c, struct alone, coordinator);
}

/* ---- formation ----------------------------------------------------------------------------------------- */

static void declared(struct coordinator *c, bool all)
{
    if (all)
        job_form_now(alone_of(c)->job, "", gpu_room_wanted(alone_of(c)->job));
}

static void have_weights(struct coordinator *c)
{
    job_train(alone_of(c)->job);
}

static void back(struct coordinator *c, struct job_rank *rank, bool all, bool late)
{
    (void)all;
    if (late)
        job_is_back_late(alone_of(c)->job, rank);
}

static void end_run(struct coordinator *c)
{
    drop_for_next(alone_of(c)->job, DROP_FOR_NEXT);
}

/* ---- parcels ------------------------------------------------------------------------------------------- */

static void complete(struct coordinator *c, const struct reduction *reduction)
{
    collect_take(alone_of(c)->job, reduction->parcel);
}

static void summed(struct coordinator *c, uint32_t parcel)
{
    collect_settled(alone_of(c)->job, parcel);
}

/* ---- the step ------------------------------------------------------------------------------------------ */

static void want_norm(struct coordinator *c)
{
    job_norm_is(alone_of(c)->job, job_measure_norm(alone_of(c)->job));
}

static void asked(struct coordinator *c)
{
    job_decide(alone_of(c)->job);
}

static void updated(struct coordinator *c)
{
    job_commit(alone_of(c)->job);
}

/* A write window ends without a trace, because nothing of the state has changed yet. */
static void abort_now(struct coordinator *c, int64_t rank, const char *why, struct diagnostic *reason)
{
    struct job *job = alone_of(c)->job;

    (void)why;
    if (job->phase == JOB_WINDOW)
        window_forget(job);
    abort_start(job, rank, reason);
}

/* ---- state between steps ------------------------------------------------------------------------------- */

static void want_window(struct coordinator *c)
{
    job_window_open(alone_of(c)->job);
}

static void lacks_memory(struct coordinator *c)
{
    window_forget(alone_of(c)->job);
}

static void end_window(struct coordinator *c, const struct state_edits *edits, bool forget)
{
    (void)edits;
    if (forget)
        job_window_closed(alone_of(c)->job);
    else
        job_window_store(alone_of(c)->job);
}

static void stored(struct coordinator *c)
{
    job_window_closed(alone_of(c)->job);
}

/* ---- GPUs ---------------------------------------------------------------------------------------------- */

static void device_failed(struct coordinator *c, uint32_t generation, const char *why)
{
    struct job *job = alone_of(c)->job;
    struct evidence_at at = {
        .rank = -1, .step = job->kept.has_weights ? (int64_t)job->ledger.step : -1, .micro_batch = -1};

    job_keep(job, cause_device(&(struct evidence_node){.at = at, .generation = generation, .why = why}));
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static void free_alone(struct coordinator *c)
{
    free(alone_of(c));
}

int alone_new(struct coordinator **out, struct job *job)
{
    static const struct coordinator_ops ops = {
        .free = free_alone,
        .declared = declared,
        .have_weights = have_weights,
        .back = back,
        .end_run = end_run,
        .want_norm = want_norm,
        .asked = asked,
        .updated = updated,
        .abort = abort_now,
        .want_window = want_window,
        .lacks_memory = lacks_memory,
        .end_window = end_window,
        .stored = stored,
        .device_failed = device_failed,
    };
    static const struct parcels_ops parcels = {
        .complete = complete,
        .summed = summed,
    };
    struct alone *alone = calloc(1, sizeof(*alone));

    if (!alone)
        return -ENOMEM;
    alone->coordinator = (struct coordinator){.ops = &ops, .parcels = &parcels, .alone = true};
    alone->job = job;
    *out = &alone->coordinator;
    return 0;
}
