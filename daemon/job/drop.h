/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#define DROP_FOR_NEXT "its ranks have left it, and begin another run"

struct diagnostic;
struct job;
struct job_rank;

void drop_now(struct job *job);

/* Refuses the ranks and drops the job, because another node cannot form the job, or has lost its part. */
void drop_begin(struct job *job, unsigned code, const char *why); /* code: of another node's diagnostic, or 0 */

/*
 * Drops a job that is being formed, because another node has lost its part. The waiting ranks form the job again, and
 * get no message.
 */
void drop_forming(struct job *job, const char *why);

/* Drops the job, because all ranks have left and their processes begin another run. */
void drop_for_next(struct job *job, const char *why);

void drop_settle(struct job *job);

/*
 * Return: the diagnostic for ranks of a job that is being dropped, and for ranks that attach meanwhile. The caller owns
 * the reference.
 */
struct diagnostic *drop_describe(const struct job *job);

/* Frees all memory of the rank. */
void drop_rank(struct job_rank *rank);

/* One node: forgets all ranks. The job then has n_ranks ranks that have not attached. */
void drop_ranks(struct job *job, unsigned n_ranks);

/* Forgets the whole run. No rank may be attached, and no work may be running. */
void drop_all(struct job *job);
