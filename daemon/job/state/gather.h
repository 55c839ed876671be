/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

struct job;
struct job_rank;
struct request_gather;
struct request_held;
struct request_prefetch;
struct request_release;

void job_gather(struct job *job, struct job_rank *rank, const struct request_gather *request);
void job_release(struct job *job, struct job_rank *rank, const struct request_release *request);
void job_held(struct job *job, struct job_rank *rank, const struct request_held *request);
void job_prefetch(struct job *job, struct job_rank *rank, const struct request_prefetch *request);

/* Is anything being loaded into a pool? */
bool gather_is_busy(const struct job *job);

/* Answers waiting ranks whose parameters are loaded now. */
void gather_settle(struct job *job);
void gather_detach(struct job *job, struct job_rank *rank);
