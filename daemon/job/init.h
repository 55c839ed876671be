/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct job;
struct job_rank;
struct request_init;

void job_init(struct job *job, struct job_rank *rank, const struct request_init *request);
void job_ready(struct job *job, struct job_rank *rank);

/* Begins the training. Call it when all nodes have the initial weights. */
void job_train(struct job *job);
