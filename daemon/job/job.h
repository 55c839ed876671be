/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The job records the attached ranks and their waits, and makes all decisions. It does no socket I/O: each request
 * calls a verb of the job, answers are sent through job_ops.answer(), and workers move the bytes.
 *
 *   model/        struct job and its parts: ranks, faults, answers, journal, statistics; they decide nothing
 *   transaction/  a step: a push is admitted, parcels are collected and reduced, the step is committed or aborted
 *   state/        weights and optimizer state between steps: gather, read, write windows; checkpoints: save, resume
 *   attendance.c  ranks attach, leave, die and come back
 *   form.c        manifests become a layout, and memory is reserved
 *   formed.c      a rank gets its segments
 *   init.c        initial weights arrive
 *   drop.c        a formed job ends
 *   resize.c      the number of ranks changes
 *   stall.c       ranks wait too long, or do not come back
 *
 * A verb answers at once, or records the rank's wait in rank->wait. All verbs run on the loop's thread. A rank has at
 * most one unanswered request.
 */

#include <stdbool.h>

struct config;
struct coordinator;
struct job;
struct job_ops;
struct kernels;
struct worker_pool;

int job_new(struct job **out, const struct config *config, const struct kernels *kernels, struct worker_pool *pool,
            const struct job_ops *ops);

/* Makes the job one of several nodes. The job then owns the coordinator. No rank may have attached yet. */
void job_join(struct job *job, struct coordinator *coordinator);

/* Frees the job. The pool must be idle. */
void job_free(struct job *job);

/* Ends an event. If job_todo() was called, answers all ranks and posts all work that is ready. */
void job_settle(struct job *job);

/* Drops the job, for zerodctl. Return: 0; or a positive number, and a sentence in *why, which the caller frees. */
int job_drop(struct job *job, char **why);
bool job_is_idle(const struct job *job); /* is no rank attached, and no work running? */
/* Return: the phase that users see. An idle job is shown as waiting. */
enum job_phase job_shown_phase(const struct job *job);
