/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct diagnostic;
struct job;
struct job_rank;
struct request_declare;
struct request_form;

void job_declare(struct job *job, struct job_rank *rank, const struct request_declare *request);
void job_form(struct job *job, struct job_rank *rank, const struct request_form *request);
void form_settle(struct job *job);

/* What the layout needs is there, and the ranks can be told; or it is not, and they are told that. Takes the
 * diagnostic. */
void job_formed(struct job *job);
void job_unformed(struct job *job, struct diagnostic *diagnostic);

/* All ranks of all nodes have declared the same, under that run id; empty: none has one. */
void job_form_now(struct job *job, const char *run_id);
