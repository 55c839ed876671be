/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Collecting sums the gradients that all ranks of this node have pushed, parcel by parcel, in the order of
 * docs/numerics.md. A slot that was summed is credited to its rank.
 */

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;
struct journal_compared;
struct journal_posted;
struct journal_summed;
struct ring;
struct ring_slot;
struct summing;

/*
 * A push that a successor repeats. Its 64-bit sum is compared with the sum of the predecessor's push when both are
 * known.
 */
struct verification {
    struct job *job;
    struct ring *ring;
    struct ring_slot *slot;
    uint32_t use; /* the slot's number of uses; it grows when the slot is credited and used again */
    unsigned rank;
    uint32_t part;
    uint16_t pass;
    uint32_t attempt;
    uint64_t sum;
    bool summed;
    struct verification *next;
};

/* Return: the functions with which the job makes sums. Call it when the coordinator is formed. */
const struct summing *collect_summing(const struct job *job);

/*
 * Starts the parcel's sum, if it is taken and no other sum of the parcel runs. If the parcel is complete at its
 * position, reports that to the coordinator.
 */
void collect_parcel(struct job *job, uint32_t parcel);
void collect_all(struct job *job);

/* Handles the results of comparisons that are done. Frees the comparisons of an aborted attempt. */
void collect_settle(struct job *job);
/* Begins to compare a part that a successor has pushed again into a slot of its own. */
void collect_verify(struct job *job, struct job_rank *rank, struct ring_slot *slot, uint32_t part, uint16_t pass);

/* In all micro-batches that the rank has ended, are its gradients summed or compared? */
bool collect_is_done(const struct job *job, const struct job_rank *rank);

/* Called when a micro-batch of the rank has ended. Slots into which no push was admitted go back to the rank. */
void collect_close(struct job *job, struct job_rank *rank);

/*
 * Called when the rank's open micro-batch is dropped. Slots of the micro-batch that are in no sum go back to the rank.
 */
void collect_drop_open(struct job *job, struct job_rank *rank);

/* Several nodes: does a promised parcel, which is in no sum yet, have gradients of the rank? */
bool collect_has_promised(const struct job *job, const struct job_rank *rank);

/* Takes the promised parcels with gradients of the rank into the sum. Call it before the rank's slots are freed. */
void collect_keep_promises(struct job *job, const struct job_rank *rank);

/* Frees the rank's ring when nothing reads its slots any more. Called when the rank is gone, or the step is aborted. */
void collect_release_ring(struct job *job, struct job_rank *rank, bool abort);

/* Called when this node's own elements of the parcel hold the sum of all nodes. */
void collect_combined(struct job *job, uint32_t parcel);

/* Finds the slot with the rank's gradients of the parcel at that position, and its ring. Return: the slot, or NULL. */
struct ring_slot *collect_find_slot(const struct job_rank *rank, uint32_t parcel, uint32_t micro_batch, uint32_t pass,
                                    struct ring **ring);

/*
 * Called when all nodes have their elements of the parcel's sum. Allows the parcel's next sum. Does nothing unless the
 * parcel is summed.
 */
void collect_settled(struct job *job, uint32_t parcel);

/*
 * Each of these replays a record: an earlier daemon posted or ended a parcel's reduction, combined the parcel's pieces,
 * or compared a push. Return: false if the record is impossible.
 */
bool collect_was_posted(struct job *job, const struct journal_posted *posted);
bool collect_was_summed(struct job *job, const struct journal_summed *summed);
bool collect_was_combined(struct job *job, const struct journal_summed *summed);
bool collect_was_compared(struct job *job, unsigned rank, const struct journal_compared *compared);

/* Starts the verifications that the earlier daemon did not end. */
void collect_verify_rest(struct job *job);

/* Takes a promised parcel, which node 0 awaits, into the sum. */
void collect_take(struct job *job, uint32_t parcel);
