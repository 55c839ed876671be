/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct diagnostic;
struct job;
struct job_rank;

void drop_now(struct job *job);

/* Another node cannot form the job, or has lost what it held of it: the ranks are told, the job is dropped. */
void drop_begin(struct job *job, unsigned code, const char *why); /* code: of another node's diagnostic, 0: of none */

void drop_settle(struct job *job);

/* The diagnostic for ranks of a job that is given up, also for those that attach before it is dropped. Return: a
 * reference, the caller's. */
struct diagnostic *drop_describe(const struct job *job);

/* Frees what the rank holds. */
void drop_rank(struct job_rank *rank);

/* Everything of the run is forgotten; nobody is attached, nothing under way. */
void drop_all(struct job *job);
