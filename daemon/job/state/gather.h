/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;
struct pool;
struct request_gather;
struct request_prefetch;
struct request_release;
struct segment;

void job_gather(struct job *job, struct job_rank *rank, const struct request_gather *request);
void job_release(struct job *job, struct job_rank *rank, const struct request_release *request);
void job_prefetch(struct job *job, struct job_rank *rank, const struct request_prefetch *request);
int pool_new(struct pool **out, struct job *job);
void pool_free(struct pool *pool);
const struct segment *pool_segment(const struct pool *pool);
uint64_t pool_held_bytes(const struct pool *pool);

/* Is anything being loaded into a pool? */
bool gather_is_busy(const struct job *job);

/* Parameters that are gathered are copied again; done(job) on the loop. Posts nothing and returns false when none is.
 */
bool gather_refresh(struct job *job, void (*done)(struct job *job));

/* Answers ranks that wait for what is there now. */
void gather_settle(struct job *job);
void gather_detach(struct job *job, struct job_rank *rank);
