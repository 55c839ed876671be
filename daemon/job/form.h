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
/*
 * Lays the job out as an earlier daemon has, in the memory that was kept (segments_must_be_found()).
 * Return: 0 or -errno.
 */
int form_again(struct job *job, const struct manifest *manifest);

/* Makes an empty ledger for the parts of the layout. Return: 0 or -ENOMEM. */
int form_ledger(struct ledger *ledger, const struct layout *layout, struct ledger_ranks ranks);

void form_settle(struct job *job);

/*
 * formed: the memory that the layout needs is reserved, and ranks can be formed. unformed: it is not, and the ranks
 * that wait are refused with the diagnostic, whose reference passes on.
 */
void job_formed(struct job *job);
void job_unformed(struct job *job, struct diagnostic *diagnostic);

/*
 * All ranks of all nodes have declared equal manifests, under that run id. "": no rank has a run id. room: for
 * gradients of GPUs, on all nodes.
 */
void job_form_now(struct job *job, const char *run_id, enum config_gpu_room room);
