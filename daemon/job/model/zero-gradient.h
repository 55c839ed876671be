/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Finds parameters whose gradient, summed over all ranks, is exactly zero in many steps in a row. It reads the exact
 * sums of squares of the step's norm, and no gradient. Each step looks at a bounded number of parameters. A step counts
 * for a parameter only if it looks at that parameter.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/job/model/finding.h"

struct job;

struct job_zero_gradient {
    uint32_t next; /* the first parameter that the next step looks at */
    /* One entry for each parameter; owned. */
    uint32_t *n_in_a_row;
    uint32_t *kin; /* for an expert of a mixture: the first expert whose name differs only by its number; else NO_KIN */
    bool *is_used; /* for such a first expert: one of its kin had a gradient other than zero */
};

/* Sets up the arrays for the job's layout. Call zero_gradient_deinit() even after a failure. Return: 0 or -ENOMEM. */
int zero_gradient_init(struct job *job);
void zero_gradient_deinit(struct job_zero_gradient *zero);

/*
 * Called when a step is decided, after step_decide(). all: a bit per parameter, set if all ranks of the world have
 * pushed it.
 */
void zero_gradient_note_step(struct job *job, const uint8_t *all);

void zero_gradient_find(const struct job *job, struct findings *findings);
