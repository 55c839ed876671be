/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#define DROP_FOR_NEXT "its ranks have left it, and begin another run"

struct diagnostic;
struct job;
struct job_rank;

void drop_now(struct job *job);

/* Another node cannot form the job, or has lost its part of it: refuses the ranks, and drops the job. */
void drop_begin(struct job *job, unsigned code, const char *why); /* code: of another node's diagnostic, 0: of none */

/*
 * The job is being formed, and another node has lost its part: forms again with the ranks that wait for it, who do not
 * notice.
 */
void drop_forming(struct job *job, const char *why);

/* All ranks have left, and their processes begin another run. */
void drop_for_next(struct job *job, const char *why);

void drop_settle(struct job *job);

/*
 * The diagnostic for ranks of a job that is being dropped, also for those that attach meanwhile. Return: a reference,
 * the caller's.
 */
struct diagnostic *drop_describe(const struct job *job);

/* Frees all memory of the rank. */
void drop_rank(struct job_rank *rank);

/* One node: forgets all ranks. From now on the job has n_ranks, none of which has attached. */
void drop_ranks(struct job *job, unsigned n_ranks);

/* Forgets the whole run. No rank may be attached, and no work under way. */
void drop_all(struct job *job);
