/* SPDX-License-Identifier: Apache-2.0 */

/* The clocks and counters that zerodctl shows. */

#include "daemon/job/model/stats.h"

#include "core/base/base.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/model.h"

void stats_note_step(struct job *job)
{
    struct job_times *times = &job->stats.times;
    uint64_t now = job_now(job);

    times->update_last_ns = now - times->decided_ns;
    times->step_last_ns = now - times->last_commit_ns;
    times->last_commit_ns = now;
    times->wait_total_ns += times->wait_last_ns;
    times->reduce_total_ns += times->reduce_last_ns;
    times->reduce_shown_ns = times->reduce_last_ns;
    times->reduce_last_ns = 0;
    times->update_total_ns += times->update_last_ns;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        job->ranks[r].behind_total_ns += job->ranks[r].behind_ns;
    times->recent_ns[times->n_recent++ % ARRAY_SIZE(times->recent_ns)] = times->step_last_ns;
    job->stats.counters.overlap_bytes = job->stats.counters.batch_bytes;
    job->stats.counters.overlap_reduced_bytes = job->stats.counters.batch_reduced_bytes;
    job->stats.counters.batch_bytes = job->stats.counters.batch_reduced_bytes = 0;
}
