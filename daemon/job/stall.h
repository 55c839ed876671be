/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

struct job;
struct job_rank;

/* Several times a second: time-outs, stalls. */
void job_tick(struct job *job);
/* How long job_tick() has nothing to do, unless there is an event; UINT64_MAX: for ever. Of a job on one node. */
uint64_t job_rest_ns(const struct job *job);
const char *job_waits_for(const struct job *job, const struct job_rank *rank); /* static text */
