/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct job;
struct job_rank;

/* Several times a second: time-outs, stalls. */
void job_tick(struct job *job);
const char *job_waits_for(const struct job *job, const struct job_rank *rank); /* static text */
