/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A rank whose gradients are many times larger than those of every other rank of this node, step after step.
 *
 * In each step one parcel is looked at, the next one in each step, in its first micro-batch: of it a few blocks of
 * elements, the same ones of all ranks and other ones each time, 1/1024 of the parcel. Only parts that all ranks have
 * pushed are compared. The slots have to be in host memory.
 *
 * If the daemon has a loss scale, ranks whose gradients are smaller by about that factor are named at once (E1203).
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/job/model/finding.h"

struct job;
struct reduction;

struct job_rank_norm {
    unsigned rank; /* the largest one in the last steps that were compared */
    uint32_t n_in_a_row;
    double least_ratio; /* of its norm to the next largest one's, in these steps */
    uint64_t looked_at; /* step + 1 */
    bool is_unscaled_said;
};

/* A parcel was reduced, and its slots can still be read. */
void rank_norm_look_at(struct job *job, const struct reduction *reduction);

void rank_norm_find(const struct job *job, struct findings *findings);
