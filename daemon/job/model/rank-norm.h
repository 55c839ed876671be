/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Finds a rank whose gradients are many times larger than those of every other rank of this node, step after step.
 *
 * Each step samples one parcel, in turn, in its first micro-batch. The sample is a few blocks of elements, 1/1024 of
 * the parcel: the same elements on all ranks, and other elements each time. Only parts that all ranks have pushed are
 * compared. The slots must be in host memory.
 *
 * If the daemon has a loss scale, ranks whose gradients are smaller by about that factor are reported at once (E1203).
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/job/model/finding.h"

struct job;
struct reduction;

struct job_rank_norm {
    unsigned rank; /* the rank with the largest norm in the last steps that were compared */
    uint32_t n_in_a_row;
    double least_ratio; /* smallest ratio of the rank's norm to the next largest norm in these steps */
    uint64_t looked_at; /* the last sampled step + 1; 0: none */
    bool is_unscaled_said;
};

/* Samples a parcel that was reduced, while its slots can still be read. */
void rank_norm_look_at(struct job *job, const struct reduction *reduction);

void rank_norm_find(const struct job *job, struct findings *findings);
