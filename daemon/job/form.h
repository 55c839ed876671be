/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "core/config/config.h"

struct diagnostic;
struct job;
struct layout;
struct ledger;
struct ledger_ranks;
struct manifest;
struct job_rank;
struct request_declare;
struct request_form;

void job_declare(struct job *job, struct job_rank *rank, const struct request_declare *request);
void job_form(struct job *job, struct job_rank *rank, const struct request_form *request);
/* Lays out the job of an earlier daemon again, in its kept memory (segments_must_be_found()). Return: 0 or -errno. */
int form_again(struct job *job, const struct manifest *manifest, char *why, size_t why_size);

/* Makes an empty ledger for the parts of the layout. Return: 0 or -ENOMEM. */
int form_ledger(struct ledger *ledger, const struct layout *layout, struct ledger_ranks ranks);

void form_settle(struct job *job);

/*
 * job_formed() is called when the memory of the layout is reserved, so ranks can be formed. job_unformed() is called
 * when the memory cannot be reserved, and refuses the waiting ranks with the diagnostic. The job then owns the
 * reference.
 */
void job_formed(struct job *job);
void job_unformed(struct job *job, struct diagnostic *diagnostic);

/*
 * Forms the job. Called when all ranks of all nodes have declared their manifests. run_id: the same on all ranks; "":
 * none. room: for gradients of GPUs, the same on all nodes.
 */
void job_form_now(struct job *job, const char *run_id, enum config_gpu_room room);
