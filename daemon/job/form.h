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

/* The memory that the layout needs is reserved: ranks can be formed. Or it is not, and the ranks that wait are refused
 * with the diagnostic, which is taken. */
void job_formed(struct job *job);
void job_unformed(struct job *job, struct diagnostic *diagnostic);

/* All ranks of all nodes have declared the same, under that run id; empty: none has one. */
void job_form_now(struct job *job, const char *run_id);
