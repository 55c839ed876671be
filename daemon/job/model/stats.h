/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

struct job;

struct job_times {
    uint64_t first_asked_ns, last_commit_ns, decided_ns;
    uint64_t reduce_busy_since_ns;
    uint64_t wait_last_ns;
    uint64_t reduce_total_ns, reduce_now_ns, reduce_last_ns; /* now: of the open step; last: of the step before it */
    uint64_t update_total_ns, update_last_ns;
    uint64_t step_last_ns;
    uint64_t recent_ns[32]; /* durations of the last steps, for the rate and the median */
    unsigned n_recent, slowest_rank;
    uint64_t slowest_behind_ns;
};

struct job_counters {
    uint64_t retried, dropped, accumulated, redone, warnings;
    uint64_t overlap_bytes, overlap_reduced_bytes; /* of the last complete micro-batch */
    uint64_t batch_bytes, batch_reduced_bytes;     /* of the micro-batch under way */
    uint32_t batch;
};

struct job_stats {
    struct job_times times;
    struct job_counters counters;
};

/* Called when the step is committed. */
void stats_note_step(struct job *job);
