/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

struct diagnostic;
struct job;
struct job_rank;
struct node_message;

/*
 * Aborts the step for all ranks. Takes the reference to the reason, which may be NULL. rank < 0: no rank in particular.
 */
void job_abort(struct job *job, int64_t rank, struct diagnostic *reason);

/* Called by the coordinator to make this node abort. Takes the reference to the reason, which may be NULL. */
void abort_start(struct job *job, int64_t rank, struct diagnostic *reason);
void abort_settle(struct job *job);
/* Answers the ranks that wait, after an abort. */
void abort_answer(struct job *job);
void job_abort_step(struct job *job, struct job_rank *rank, const char *why);
void job_abort_seen(struct job *job, struct job_rank *rank, uint32_t attempt);

/* Called when node 0 has aborted the step on all nodes. message: has the new attempt. */
void job_aborted(struct job *job, const struct node_message *message);
