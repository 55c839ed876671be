/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Parameters whose gradient, summed over all ranks, is exactly zero in many steps in a row. The exact sums of squares
 * that a step's norm is made of tell that, so no gradient is read. A bounded number of parameters is looked at in a
 * step, and only steps in which a parameter was looked at count for it.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/job/model/finding.h"

struct job;

struct job_zero_gradient {
    uint32_t next; /* the parameter at which the next step's look begins */
    /* One entry for each parameter; owned. */
    uint32_t *n_in_a_row;
    uint32_t *kin; /* of the experts of a mixture, the first one that differs by its number only; else NO_KIN */
    bool *is_used; /* of a parameter that is some experts' kin: one of them had another gradient than zero */
};

/* For the job's layout. zero_gradient_deinit() in any case. Return: 0 or -ENOMEM. */
int zero_gradient_init(struct job *job);
void zero_gradient_deinit(struct job_zero_gradient *zero);

/* Called when a step is decided, after step_decide(). all: a bit per parameter, have all ranks of the world pushed it?
 */
void zero_gradient_note_step(struct job *job, const uint8_t *all);

void zero_gradient_find(const struct job *job, struct findings *findings);
