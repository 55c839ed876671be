/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

struct job;
struct job_rank;

/* Checks time-outs and stalls. Called several times a second. */
void job_tick(struct job *job);
/*
 * Only for a job on one node. Return: the time until job_tick() has work, unless an event comes earlier; UINT64_MAX:
 * for ever.
 */
uint64_t job_rest_ns(const struct job *job);
const char *job_waits_for(const struct job *job, const struct job_rank *rank); /* static text */
