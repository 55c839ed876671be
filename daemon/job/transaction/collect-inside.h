/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What collect.c, collect-sums.c and collect-verify.c share. */

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;
struct ring;
struct ring_slot;

/* Has the rank ended that micro-batch? A rank that has asked for the step, or left, counts as having ended all. */
bool collect_has_ended(const struct job *job, const struct job_rank *rank, uint32_t micro_batch);

/* Called when a sum or a verification begins or ends on workers or engines. The time between counts as busy. */
void collect_begin_work(struct job *job);
void collect_end_work(struct job *job);

/*
 * collect-verify.c. Credits a redo slot when no comparison of it runs, and all its parts were pushed or its micro-batch
 * has ended.
 */
void collect_credit_redo(struct job *job, struct job_rank *rank, struct ring *ring, struct ring_slot *slot);

/* The functions that bring the gradients of this node's ranks into the sum of all ranks. */
struct summing {
    /* Starts this node's sum of a taken parcel, unless it has begun, or must wait for another sum of the parcel. */
    void (*start)(struct job *job, uint32_t parcel);
    /* Called when this node's own elements of the parcel hold the sum of all nodes. */
    void (*combined)(struct job *job, uint32_t parcel);
    /* Called when the slot was read. NULL: slots are credited only when all nodes have the sum. */
    void (*give_back)(struct job *job, struct job_rank *rank, struct ring *ring, struct ring_slot *slot);
    /* Replays the end of the sum. sums: as for step_was_reduced(). Return: false if the parcel is not being summed. */
    bool (*was_summed)(struct job *job, uint32_t parcel, const uint64_t *sums);
};
