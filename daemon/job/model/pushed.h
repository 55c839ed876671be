/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;

/* Has the rank pushed all of a trainable parameter's gradient in this step / in the micro-batch of the entries? */
bool job_has_pushed(const struct job *job, unsigned rank, uint32_t param);

/* Is the parameter still to come in the open backward of a rank of this node? */
bool job_awaits(const struct job *job, const struct job_rank *rank, uint32_t param);

/* How many of them in that micro-batch. */
uint32_t job_n_pushed_open(const struct job *job, const struct job_rank *rank);

/*
 * A bit per parameter: has any rank of this node pushed it in this step, have all that have not left? Frozen ones: none
 * has, all have.
 */
void job_find_pushed(const struct job *job, uint8_t *any, uint8_t *all);

/* Trainable parameters of the model. */
uint32_t job_n_trainable(const struct job *job);
