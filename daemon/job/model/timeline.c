/* SPDX-License-Identifier: Apache-2.0 */

/* The job's events for the recorder. */

#include "daemon/job/model/timeline.h"

#include "core/base/base.h"
#include "core/base/recorder.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"

_Static_assert((int)CONFIG_MAX_RANKS <= (int)RECORD_NO_RANK, "a record has any rank");

static void note_record(const struct job *job, struct record record)
{
    if (job->run.survival.replay)
        return;
    if (record.end_ns == 0)
        record.end_ns = recorder_now();
    if (record.begin_ns == 0) /* the record is a moment */
        record.begin_ns = record.end_ns;
    recorder_note(&record);
}

static struct record of_rank(const struct job *job, const struct job_rank *rank, enum record_kind kind)
{
    return (struct record){.kind = kind,
                           .rank = (uint16_t)rank->rank,
                           .micro_batch = (uint16_t)(job->layout ? job->ledger.ranks[rank->rank].n_ended : 0)};
}

void timeline_backward(struct job *job, struct job_rank *rank)
{
    struct record record = of_rank(job, rank, RECORD_FORWARD);

    if (rank->process.timeline.backward_ns) /* another backward of the same micro-batch */
        return;
    rank->process.timeline.backward_ns = recorder_now();
    record.begin_ns = rank->process.timeline.answered_ns;
    record.end_ns = rank->process.timeline.backward_ns;
    if (record.begin_ns)
        note_record(job, record);
}

void timeline_ended(struct job *job, struct job_rank *rank)
{
    struct record record = of_rank(job, rank, RECORD_BACKWARD);

    record.begin_ns = rank->process.timeline.backward_ns;
    record.micro_batch -= record.micro_batch > 0; /* the micro-batch counts as ended already */
    rank->process.timeline.backward_ns = 0;
    if (record.begin_ns)
        note_record(job, record);
}

void timeline_pushed(const struct job *job, const struct job_rank *rank, uint32_t parcel)
{
    struct record record = of_rank(job, rank, RECORD_PUSHED);

    record.item = parcel;
    note_record(job, record);
}

/* Does another phase of the program begin with the answer? */
static bool ends_a_phase(enum job_wait wait)
{
    return wait != WAIT_NONE && wait != WAIT_SLOT && wait != WAIT_GATHER;
}

void timeline_answers(struct job *job, struct job_rank *rank)
{
    struct record record = of_rank(job, rank, RECORD_WAIT);

    if (rank->wait == WAIT_NONE)
        return;
    record.item = rank->wait;
    record.begin_ns = rank->wait_ns;
    record.end_ns = recorder_now();
    note_record(job, record);
    if (ends_a_phase(rank->wait))
        rank->process.timeline = (struct rank_timeline){.answered_ns = record.end_ns};
}

void timeline_aborted(struct job *job)
{
    note_record(job, (struct record){.kind = RECORD_ABORTED, .rank = RECORD_NO_RANK});
    for (unsigned r = job->world.first; r < job->world.end; r++)
        job->ranks[r].process.timeline.backward_ns = 0;
}

void timeline_diagnostic(const struct job *job, int64_t rank, unsigned code)
{
    note_record(job, (struct record){
                         .kind = RECORD_DIAGNOSTIC, .rank = rank < 0 ? RECORD_NO_RANK : (uint16_t)rank, .item = code});
}

void timeline_saved(const struct job *job, uint64_t began_ns)
{
    note_record(job, (struct record){.kind = RECORD_SAVE, .rank = RECORD_NO_RANK, .begin_ns = began_ns});
}

void timeline_committed(const struct job *job)
{
    const struct job_times *times = &job->stats.times;

    note_record(job, (struct record){.kind = RECORD_ASKED,
                                     .rank = RECORD_NO_RANK,
                                     .begin_ns = times->first_asked_ns,
                                     .end_ns = times->decided_ns});
    note_record(job, (struct record){.kind = RECORD_UPDATE, .rank = RECORD_NO_RANK, .begin_ns = times->decided_ns});
}

void timeline_opened(const struct job *job)
{
    recorder_set_step(job->ledger.step);
}
