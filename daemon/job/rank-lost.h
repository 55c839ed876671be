/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A rank is lost when its process dies, when its connection closes, or, after a restart of the daemon, when its process
 * does not connect in time. E1501 reports it. The rank's pushes and its request for the step stay for its successor.
 */

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;

/* The rank's process has died, or its connection is closed. A rank that had left in order is not reported. */
void job_detach(struct job *job, struct job_rank *rank);

/* Is a rank of this node attached, or away with a process that may still connect? */
bool job_has_live_ranks(const struct job *job);

/* Detaches the ranks that are away and whose process is dead, or has not connected within reattach_timeout. */
void rank_lost_tick(struct job *job);

/* The time until rank_lost_tick() may have something to do; UINT64_MAX: no rank is away. Events may come before. */
uint64_t rank_lost_rest_ns(const struct job *job);
