/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;

/* Has the rank pushed all parts of a trainable parameter's gradient in this step? */
bool job_has_pushed(const struct job *job, unsigned rank, uint32_t param);

/* Has this rank of this node not yet pushed the parameter in its open backward? */
bool job_awaits(const struct job *job, const struct job_rank *rank, uint32_t param);

/* Return: the number of trainable parameters that the rank has pushed in the micro-batch of its ledger entries. */
uint32_t job_n_pushed_open(const struct job *job, const struct job_rank *rank);

/*
 * Fills two sets with a bit per parameter. any: a rank of this node has pushed the parameter in this step. all: every
 * rank of this node that has not left has pushed it. Frozen parameters are never in any, and always in all.
 */
void job_find_pushed(const struct job *job, uint8_t *any, uint8_t *all);

/* Return: the number of trainable parameters of the model. */
uint32_t job_n_trainable(const struct job *job);
