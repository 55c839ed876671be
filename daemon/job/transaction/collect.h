/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Collecting: gradients that all ranks of this node have pushed are summed, parcel by parcel, in the order of
 * docs/numerics.md; a slot that was summed goes back to its rank.
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

/* A push that a successor repeats: its 64-bit sum is compared with the predecessor's when both are known. */
struct verification {
    struct job *job;
    struct ring *ring;
    struct ring_slot *slot;
    uint32_t use; /* of the slot: another one if it was credited, and pushed to again */
    unsigned rank;
    uint32_t part;
    uint16_t pass;
    uint32_t attempt;
    uint64_t sum;
    bool summed;
    struct verification *next;
};

/* Return: how the job makes sums, by its places. Call it when the coordinator is formed. */
const struct summing *collect_summing(const struct job *job);

/* Begins what the parcel is ready for: its promised sum, or the report that it is complete at its position. */
void collect_parcel(struct job *job, uint32_t parcel);
void collect_all(struct job *job);

/* Handles the results of comparisons that are done. Frees the comparisons of an aborted attempt. */
void collect_settle(struct job *job);
/* Begins the comparison of a part that was pushed again, into a slot of its own. */
void collect_verify(struct job *job, struct job_rank *rank, struct ring_slot *slot, uint32_t part, uint16_t pass);

/* Are all gradients of the micro-batches that the rank has ended summed or compared? */
bool collect_is_done(const struct job *job, const struct job_rank *rank);

/* A micro-batch of the rank has ended: slots into which no push was admitted go back to the rank. */
void collect_close(struct job *job, struct job_rank *rank);

/* The rank's open micro-batch is dropped: its slots that are in no sum go back to the rank. */
void collect_drop_open(struct job *job, struct job_rank *rank);

/* Several nodes: has the rank gradients in a promised parcel, which is in no sum yet? */
bool collect_has_promised(const struct job *job, const struct job_rank *rank);

/* Takes all such parcels into the sum now, before the rank's slots are freed. */
void collect_keep_promises(struct job *job, const struct job_rank *rank);

/* Frees the rank's ring when nothing reads its slots any more. Called when the rank is gone, or the step is aborted. */
void collect_release_ring(struct job *job, struct job_rank *rank, bool abort);

/* Called when the elements of the parcel that this node owns hold the slots of all nodes. */
void collect_combined(struct job *job, uint32_t parcel);

/* Finds the slot with the rank's gradients of the parcel at that position, and its ring. Return: the slot, or NULL. */
struct ring_slot *collect_find_slot(const struct job_rank *rank, uint32_t parcel, uint32_t micro_batch, uint32_t pass,
                                    struct ring **ring);

/*
 * Allows the parcel's next sum, because all nodes have their elements of this one. Does nothing unless the parcel is
 * summed.
 */
void collect_settled(struct job *job, uint32_t parcel);

/*
 * Replay what an earlier daemon did: it posted or ended a parcel's reduction, combined the parcel's pieces, or compared
 * a push. Return: false if the record is impossible.
 */
bool collect_was_posted(struct job *job, const struct journal_posted *posted);
bool collect_was_summed(struct job *job, const struct journal_summed *summed);
bool collect_was_combined(struct job *job, const struct journal_summed *summed);
bool collect_was_compared(struct job *job, unsigned rank, const struct journal_compared *compared);

/* Starts the verifications that the earlier daemon did not end. */
void collect_verify_rest(struct job *job);

/* Takes a promised parcel, which node 0 awaits, into the sum. */
void collect_take(struct job *job, uint32_t parcel);
