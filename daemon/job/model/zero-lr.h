/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "daemon/job/model/finding.h"

struct job;

/* Steps in a row with a learning rate of 0 in all parameter groups. A warm-up that begins with 0 has few such steps. */
struct job_zero_lr {
    uint32_t n_in_a_row;
};

/* Called when a step is decided. */
void zero_lr_note_step(struct job *job);

void zero_lr_find(const struct job *job, struct findings *findings);
