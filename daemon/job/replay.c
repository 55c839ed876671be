/* SPDX-License-Identifier: Apache-2.0 */

/* Replay (replay.h): serves the records of the journal's log again. */

#include "daemon/job/replay.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/diagnosis.h"
#include "core/wire/wire-request.h"
#include "daemon/job/attendance.h"
#include "daemon/job/rank-lost.h"
#include "daemon/job/formed.h"
#include "daemon/job/job.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/request.h"
#include "daemon/job/state/window.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/memory/journal.h"
#include "daemon/memory/ring.h"
#include "daemon/step/executor.h"

struct replay {
    struct job_ops ops; /* the job's ops before and after the replay */
    uint64_t clock_ns;
};

/* ---- begin --------------------------------------------------------------------------------------------- */

static uint64_t time_of_record(void *userdata)
{
    const struct job *job = userdata;

    return job->run.survival.replay->clock_ns;
}

/* Does nothing, because the earlier daemon has logged the diagnostic. */
static void log_nothing(void *userdata, const struct diagnostic *diagnostic)
{
}

static void ask_for_tick(void *userdata, unsigned delay_ms)
{
    const struct job_ops *ops = &((struct job *)userdata)->run.survival.replay->ops;

    ops->soon(ops->userdata, delay_ms);
}

/* The job's ops lack answer() and drop() during replay, because all ranks are away. */
int replay_begin(struct job *job)
{
    struct job_survival *survival = &job->run.survival;
    struct replay *replay = malloc(sizeof(*replay));

    assert(!survival->replay);
    if (!replay)
        return -ENOMEM;
    *replay = (struct replay){.ops = job->ops, .clock_ns = survival->found_ns};
    survival->replay = replay;
    job->ops = (struct job_ops){
        .log = log_nothing, .now_ns = time_of_record, .soon = ask_for_tick, .loop = replay->ops.loop, .userdata = job};
    report_progress(job, (struct report){REPORT_REPLAYS, .replays = true});
    return 0;
}

/* ---- records ------------------------------------------------------------------------------------------- */

static int replay_attach(struct job *job, struct wire_arena *arena, const struct journal_record *record)
{
    const struct journal_attach *attach = record->data;
    struct diagnostic *refusal = NULL;
    struct job_rank *rank;
    struct request request;
    char why[WIRE_WHY_BYTES];

    if (record->n_bytes < sizeof(*attach) ||
        wire_unpack_request(arena, attach + 1, record->n_bytes - sizeof(*attach), &request, why, sizeof(why)) != 0 ||
        request.type != REQUEST_HELLO)
        return -EINVAL;
    if (job_attach(job,
                   &(struct job_attach){.peer = RANK_IS_AWAY,
                                        .hello = &request.hello,
                                        .pid = attach->pid,
                                        .uid = attach->uid,
                                        .gid = attach->gid,
                                        .is_admin = attach->is_admin,
                                        .all_had_left = attach->all_had_left},
                   &rank, &refusal) != 0)
        diagnostic_unref(refusal);
    return 0;
}

static int replay_request(struct job *job, struct wire_arena *arena, const struct journal_record *record)
{
    struct request request;
    char why[WIRE_WHY_BYTES];

    if (wire_unpack_request(arena, record->data, record->n_bytes, &request, why, sizeof(why)) != 0 ||
        !request_is_recorded(request.type))
        return -EINVAL;
    request_serve(job, &job->ranks[record->rank], &request);
    return 0;
}

static int replay_grant(struct job *job, const struct journal_record *record)
{
    const struct journal_grant *grant = record->data;
    struct ring *ring = job->ranks[record->rank].rings[0];

    if (record->n_bytes != sizeof(*grant) || !ring)
        return -EINVAL;
    return ring_find_grant(ring, grant->offset_bytes, grant->n_bytes);
}

static int replay_record(struct job *job, struct wire_arena *arena, const struct journal_record *record)
{
    struct job_rank *rank = &job->ranks[record->rank];

    switch (record->type) {
    case JOURNAL_REQUEST:
        return rank->peer ? replay_request(job, arena, record) : -EINVAL;
    case JOURNAL_ATTACH:
        return replay_attach(job, arena, record);
    case JOURNAL_DETACH:
        if (rank->peer)
            job_detach(job, rank);
        return 0;
    case JOURNAL_FORMED:
        return formed_again(job, rank);
    case JOURNAL_GRANT:
        return replay_grant(job, record);
    case JOURNAL_POSTED:
        return record->n_bytes == sizeof(struct journal_posted) && collect_was_posted(job, record->data) ? 0 : -EINVAL;
    case JOURNAL_SUMMED:
        return record->n_bytes >= sizeof(struct journal_summed) && collect_was_summed(job, record->data) ? 0 : -EINVAL;
    case JOURNAL_COMBINED:
        return record->n_bytes >= sizeof(struct journal_summed) && collect_was_combined(job, record->data) ? 0
                                                                                                           : -EINVAL;
    case JOURNAL_COMPARED:
        return record->n_bytes == sizeof(struct journal_compared) &&
                       collect_was_compared(job, record->rank, record->data)
                   ? 0
                   : -EINVAL;
    case JOURNAL_WINDOW:
        return window_again(job);
    case JOURNAL_EDIT:
        return record->n_bytes == sizeof(struct journal_edit) ? window_edit_again(job, record->data) : -EINVAL;
    case JOURNAL_STORING:
        return window_store_again(job);
    case JOURNAL_BRINGING:
        return window_bring_again(job);
    case JOURNAL_STORED:
        return window_stored_again(job);
    case JOURNAL_SPREAD:
        job->run.was_spread = true;
        return 0;
    case JOURNAL_NODE:
        return coordinator_repeat(job->coordinator, record->data, record->n_bytes);
    default:
        return -EINVAL;
    }
}

int replay_log(struct job *job, char *why, size_t why_size)
{
    struct wire_arena arena = WIRE_ARENA_NULL;
    struct journal_record record;
    uint64_t at = 0, n = 0;
    int r = wire_arena_init(&arena);

    assert(job->layout);
    while (r == 0 && journal_read(job->run.survival.journal, &at, &record)) {
        job->run.survival.replay->clock_ns = MIN(record.time_ns, job->run.survival.found_ns);
        r = job_is_own(job, record.rank) ? replay_record(job, &arena, &record) : -EINVAL;
        if (r < 0)
            snprintf(why, why_size, "record %" PRIu64 " of its journal (type %d, rank %u) cannot be replayed: %s", n,
                     (int)record.type, record.rank, strerror(-r));
        else
            job_settle(job);
        n++;
    }
    wire_arena_deinit(&arena);
    return r;
}

/* ---- end ----------------------------------------------------------------------------------------------- */

void replay_cancel(struct job *job)
{
    struct replay *replay = steal_ptr(job->run.survival.replay);

    if (!replay)
        return;
    job->ops = replay->ops;
    free(replay);
    report_progress(job, (struct report){REPORT_REPLAYS, .replays = false});
}

static void end_of_rank(struct job *job, struct job_rank *rank)
{
    for (size_t i = 0; i < ARRAY_SIZE(rank->rings); i++)
        if (rank->rings[i])
            ring_end_replay(rank->rings[i]);
    phases_forget(rank);
    if (rank->peer && !rank->kept.formed) { /* the rank's process, or another one, declares again */
        job_record(job, rank, JOURNAL_DETACH, NULL, 0, NULL, 0);
        job_detach(job, rank);
    }
}

void replay_end(struct job *job)
{
    assert(job->layout);
    replay_cancel(job);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        end_of_rank(job, &job->ranks[r]);
    executor_end_replay(job->executor);
    collect_verify_rest(job);
    window_end_replay(job);
    if (job->phase == JOB_TRAINING && !job->window)
        executor_empty(job->executor); /* frees the staging copy of an interrupted checkpoint */
    report_progress(job, (struct report){REPORT_ADOPTED});
    job_set_writing(job, job->phase == JOB_UPDATING || job->phase == JOB_COMMITTING_WINDOW);
    if (job->phase == JOB_TRAINING)
        collect_all(job);
    job_todo(job);
    job_settle(job);
}
