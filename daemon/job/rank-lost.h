/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A rank is lost when its process dies, when its connection closes, or, after a restart of the daemon, when its process
 * does not connect in time. E1302 reports it. The rank's pushes and its request for the step stay for its successor.
 */

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;

/*
 * Detaches the rank, because its process has died or its connection is closed. A rank that left in order is not
 * reported.
 */
void job_detach(struct job *job, struct job_rank *rank);

/* Is a rank of this node attached, or away with a process that may still connect? */
bool job_has_live_ranks(const struct job *job);

/* Detaches each rank that is away, if its process is dead or has not connected within reattach_timeout. */
void rank_lost_tick(struct job *job);

/* Return: the time until rank_lost_tick() may have work; UINT64_MAX if it has none. An event may come earlier. */
uint64_t rank_lost_rest_ns(const struct job *job);
