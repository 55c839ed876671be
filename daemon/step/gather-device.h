/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3 of a job on GPUs: what gather.c has put into the pools of ranks. A rank has a pool of its own, on its GPU,
 * and copies what it gathers from there before it sends anything else; so of a pool nothing has to stay while a rank
 * asks for something, but what it asks for. Loop thread.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct device_gather;
struct job;
struct job_rank;

/* job: has its layout, and the memory of its GPUs is there. Return: 0 or -ENOMEM. */
int device_gather_new(struct device_gather **out, const struct job *job);
void device_gather_free(struct device_gather *gather); /* NULL is fine; nothing is loaded any more */

/* Is anything being loaded? NULL is idle. */
bool device_gather_is_busy(const struct device_gather *gather);

/* Can a rank have them in its pool at the same time? */
bool device_gather_fits(const struct job *job, const struct job_rank *rank, const uint32_t *params, size_t n_params);

enum gathered {
    GATHER_LOADS, /* gather_settle() follows */
    GATHER_THERE,
    GATHER_LOST, /* there is no memory for the order */
};

/* What the rank waits for, rank->gathering: begins to load it, if nothing else is being loaded that is in its way. */
enum gathered device_gather_look(struct job *job, struct job_rank *rank);

/* They are there: the answer. Return: 0 or -ENOMEM. */
int device_gather_answer(struct job *job, struct job_rank *rank);

/* A hint: loads what fits and is not there. */
void device_gather_hint(struct job *job, struct job_rank *rank, const uint32_t *params, size_t n_params);

/* The weights are others now. What is being loaded is loaded again. */
void device_gather_forget(struct job *job);
