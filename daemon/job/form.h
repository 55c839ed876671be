/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct diagnostic;
struct evidence_at;
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

/* Whoever waits to form is told why not, and may declare again; takes the diagnostic. */
void form_refuse_all(struct job *job, struct diagnostic *diagnostic);

/* Several nodes: another one's daemon is configured differently, so that the job cannot be formed. */
void job_node_differs(struct job *job, unsigned node, const char *difference);

/* All ranks of all nodes have declared the same, under that run id; empty: none has one. */
void job_form_now(struct job *job, const char *run_id);

/* Where something stands that happens before there is a step; rank: NULL when it is of none. */
struct evidence_at form_at(const struct job_rank *rank);
