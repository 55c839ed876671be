/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct job;

/* Detects that all ranks of this node push the same gradients, as they do when nothing splits the data between them. */
struct job_alike {
    unsigned n_in_a_row; /* steps in a row in which all ranks pushed the same gradients */
    bool is_said;
    /* Of the open step. */
    uint64_t n_compared; /* parts whose sums were compared over all ranks */
    bool differs;        /* the sums of a part differ, or a rank did not push the part */
};

/*
 * Called when a step is decided. norm: the norm of the step's gradients. A step of norm 0 does not count, because zeros
 * are equal for other reasons.
 */
void alike_note_step(struct job *job, double norm);
