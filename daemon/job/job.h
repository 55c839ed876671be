/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The job: who is attached, what each rank waits for, and what is decided. It does no socket I/O: requests come in as
 * verbs, answers go out through job_ops.answer(), and workers move the bytes.
 *
 *   model/        struct job and its parts: ranks, faults, answers, journal, statistics; they decide nothing
 *   transaction/  a step: a push is admitted, parcels are collected and reduced, the step is committed or aborted
 *   state/        weights and optimizer state between steps: gather, read, write windows; checkpoints: save, resume
 *   attendance.c  ranks attach, leave, die and come back
 *   form.c        manifests become a layout, memory is reserved; formed.c a rank's segments; init.c initial weights
 *   drop.c        the end of a formed job
 *   resize.c      another number of ranks
 *   stall.c       who waits for whom, and for how long
 *
 * A verb answers at once, or notes in rank->wait what the rank waits for. All of it runs on the loop's thread. A rank
 * has at most one request that is to be answered.
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

/* Before anybody attaches: the job is one of several nodes. Takes the coordinator. */
void job_join(struct job *job, struct coordinator *coordinator);

/* The pool must be idle. */
void job_free(struct job *job);

/* The end of an event: answers ranks that can be answered and posts work that can be posted, if job_todo() was called. */
void job_settle(struct job *job);

/* For zerodctl. Return: 0, or positive with *why a sentence to be freed by the caller. */
int job_drop(struct job *job, char **why);
bool job_is_idle(const struct job *job); /* nobody is attached */
/* The phase that users are told: a job that nobody is attached to waits. */
enum job_phase job_shown_phase(const struct job *job);
