/* SPDX-License-Identifier: Apache-2.0 */

/* The coordinator of a job of one node answers each report with the job's verb at once. */

#include "daemon/job/alone.h"

#include <assert.h>

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

/* ---- parcels ------------------------------------------------------------------------------------------- */

static void complete(struct coordinator *c, const struct reduction *reduction)
{
    collect_take(alone_of(c)->job, reduction->parcel);
}

static void summed(struct coordinator *c, uint32_t parcel)
{
    collect_settled(alone_of(c)->job, parcel);
}

static const struct parcels_ops parcels = {.complete = complete, .summed = summed};

/* During replay, a complete parcel is taken only when the log has a record of it. */
static const struct parcels_ops held_parcels = {.summed = summed};

/* ---- reports ------------------------------------------------------------------------------------------- */

/* Aborts the step. An open write window is forgotten first, because it has not changed the state yet. */
static void abort_now(struct job *job, int64_t rank, struct diagnostic *reason)
{
    assert(job_is_undecided(job));
    if (job->phase == JOB_WINDOW)
        window_forget(job);
    abort_start(job, rank, reason);
}

static void note_device_failed(struct job *job, uint32_t generation, const char *why)
{
    struct evidence_at at = {
        .rank = -1, .step = job->kept.has_weights ? (int64_t)job->ledger.step : -1, .micro_batch = -1};

    job_keep(job, cause_device(&(struct evidence_node){.at = at, .generation = generation, .why = why}));
}

static void take_complete_parcels(struct job *job)
{
    for (uint32_t p = 0; p < job->layout->n_parcels; p++)
        if (job->work.parcels[p].state == PARCEL_PROMISED)
            collect_take(job, p);
}

/* Reports that only matter to other nodes have no effect. */
static bool answer_at_once(struct coordinator *c, const struct report *report)
{
    struct job *job = alone_of(c)->job;

    assert(job->coordinator == c);
    switch (report->kind) {
    case REPORT_DECLARED:
        if (report->all_declared)
            job_form_now(job, "", gpu_room_wanted(job));
        break;
    case REPORT_HAVE_WEIGHTS:
        job_train(job);
        break;
    case REPORT_REPLAYS:
        c->parcels = report->replays ? &held_parcels : &parcels;
        break;
    case REPORT_ADOPTED:
        take_complete_parcels(job);
        break;
    case REPORT_BACK:
        if (report->back.late)
            job_is_back_late(job, report->back.rank);
        break;
    case REPORT_GIVE_UP:
        drop_all(job);
        break;
    case REPORT_END_RUN:
        drop_for_next(job, DROP_FOR_NEXT);
        break;
    case REPORT_WANT_NORM:
        job_norm_is(job, job_measure_norm(job));
        break;
    case REPORT_ASKED:
        job_decide(job);
        break;
    case REPORT_UPDATED:
        assert(job->phase == JOB_UPDATING);
        job_commit(job);
        break;
    case REPORT_ABORT:
        abort_now(job, report->abort.rank, report->abort.reason);
        break;
    case REPORT_WANT_WINDOW:
        job_window_open(job);
        break;
    case REPORT_LACKS_MEMORY:
        window_forget(job);
        break;
    case REPORT_WINDOW_END:
        if (report->window_end.forget)
            job_window_closed(job);
        else
            job_window_store(job);
        break;
    case REPORT_STORED:
        job_window_closed(job);
        break;
    case REPORT_DEVICE_FAILED:
        note_device_failed(job, report->failed.generation, report->failed.why);
        break;
    default:
        break;
    }
    return false;
}

/* ---- verbs that concern only other nodes --------------------------------------------------------------- */

static void tell_nobody(struct coordinator *c, bool tick)
{
}

static int form_nothing(struct coordinator *c)
{
    return 0;
}

static uint32_t no_pieces(const struct coordinator *c)
{
    return 0;
}

static int reserve_nothing(struct coordinator *c, uint32_t piece)
{
    return 0;
}

static int keep_weights_here(struct coordinator *c, const struct request_init *request, const void *weights)
{
    return 0;
}

static struct diagnostic *no_other_manifests(struct coordinator *c)
{
    return NULL;
}

static int no_such_record(struct coordinator *c, const void *packed, size_t n_bytes)
{
    return -EINVAL;
}

static bool never(const struct coordinator *c)
{
    return false;
}

static bool no_rank_elsewhere(const struct coordinator *c, unsigned rank, uint32_t param)
{
    return false;
}

static bool waits_for_no_node(const struct coordinator *c, char *dst, size_t size)
{
    return false;
}

static int nothing_to_fetch(struct coordinator *c, const struct fetch *fetch)
{
    return 1;
}

static int norm_is_here(struct coordinator *c, struct job_rank *rank, uint32_t param)
{
    return 1;
}

/* ---- making and freeing the coordinator ---------------------------------------------------------------- */

static void free_alone(struct coordinator *c)
{
    free(alone_of(c));
}

int alone_new(struct coordinator **out, struct job *job)
{
    static const struct coordinator_ops ops = {
        .free = free_alone,
        .report = answer_at_once,
        .tell = tell_nobody,
        .form = form_nothing,
        .n_reserve_pieces = no_pieces,
        .reserve = reserve_nothing,
        .init = keep_weights_here,
        .compare_manifests = no_other_manifests,
        .repeat = no_such_record,
        .holds_back = never,
        .awaits = no_rank_elsewhere,
        .waits_elsewhere = waits_for_no_node,
        .is_cut_off = never,
        .fetch = nothing_to_fetch,
        .ask_norm = norm_is_here,
    };
    struct alone *alone = calloc(1, sizeof(*alone));

    if (!alone)
        return -ENOMEM;
    alone->coordinator = (struct coordinator){.ops = &ops, .parcels = &parcels, .alone = true};
    alone->job = job;
    *out = &alone->coordinator;
    return 0;
}
