/* SPDX-License-Identifier: Apache-2.0 */

/* The clocks and counters that zerodctl shows. */

#include "daemon/job/model/stats.h"

#include "core/base/base.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/model.h"

/* Records the step's waits. The slowest rank is the rank that others have waited for longest. */
static void note_waits(struct job *job, uint64_t now)
{
    struct job_times *times = &job->stats.times;

    waits_look(job, now);
    times->wait_last_ns = job->waits.step_ns;
    times->slowest_rank = job->world.first;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].waits.behind_step_ns > job->ranks[times->slowest_rank].waits.behind_step_ns)
            times->slowest_rank = r;
    times->slowest_behind_ns = job->ranks[times->slowest_rank].waits.behind_step_ns;
    waits_begin_step(job);
}

void stats_note_step(struct job *job)
{
    struct job_times *times = &job->stats.times;
    uint64_t now = job_now(job);

    times->update_last_ns = now - times->decided_ns;
    times->step_last_ns = now - times->last_commit_ns;
    times->last_commit_ns = now;
    note_waits(job, now);
    times->reduce_total_ns += times->reduce_now_ns;
    times->reduce_last_ns = times->reduce_now_ns;
    times->reduce_now_ns = 0;
    times->update_total_ns += times->update_last_ns;
    times->recent_ns[times->n_recent++ % ARRAY_SIZE(times->recent_ns)] = times->step_last_ns;
    job->stats.counters.overlap_bytes = job->stats.counters.batch_bytes;
    job->stats.counters.overlap_reduced_bytes = job->stats.counters.batch_reduced_bytes;
    job->stats.counters.batch_bytes = job->stats.counters.batch_reduced_bytes = 0;
}
