/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * When to update before the decision (daemon/step/speculation.h), or, where the optimizer of a job on GPUs is in host
 * memory, when to copy sums to the host (daemon/step/step-offload.h). A parcel is updated or copied when the gradients
 * of its last expected micro-batch are in the sums: the open step is expected to have as many micro-batches as the last
 * one. The expected learning rates are those that rank 0 has announced with the micro-batch, or else those of the last
 * step; the gradients are expected not to be clipped.
 *
 * After several steps in a row in which these expectations were wrong, some steps are left out, because a speculative
 * update that is dropped costs the memory's time.
 */

#include <stdint.h>

struct job;

/*
 * Chooses how many buckets have spare places, or places for copies of their sums. Call it when the layout is made and
 * before memory is planned.
 */
void speculate_choose(struct job *job);

/* Call it when a parcel was summed at its position. */
void speculate_parcel(struct job *job, uint32_t parcel);

/* Why updates before the decision, or a part of them, are not made, or are dropped. */
struct speculate_obstacle {
    const char *word; /* static, as in docs/schema/status.json; NULL: there is no obstacle */
    char text[192];   /* one line */
};
/* Finds the obstacle that concerns most of the update. The job must have a layout. */
void speculate_find_obstacle(const struct job *job, struct speculate_obstacle *found);

/* Learns from the step that is being committed, before its positions are reset. */
void speculate_note_commit(struct job *job);
/* Forgets what was expected of the step, because it begins again. */
void speculate_forget(struct job *job);
