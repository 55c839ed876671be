/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct job;

/* Whether all ranks of this node push the same gradients, as they do when nothing splits the data between them. */
struct job_alike {
    unsigned n_in_a_row; /* steps */
    bool is_said;
    /* Of the step under way. */
    uint64_t n_compared; /* pushes of all ranks, by their sums */
    bool differs;        /* one of them was another than the first rank's, or missing */
};

/* Called when a step is decided. norm: of the step's gradients; zeros are the same on all ranks for other reasons. */
void alike_note_step(struct job *job, double norm);
