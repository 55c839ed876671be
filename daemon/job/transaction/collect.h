/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;
struct ring;
struct ring_slot;

/* A redone push: compared with its predecessor's sum once both are known. */
struct verification {
    struct job *job;
    struct ring *ring;
    struct ring_slot *slot;
    unsigned rank;
    uint32_t part;
    uint16_t pass;
    uint32_t attempt;
    uint64_t sum;
    bool summed;
    struct verification *next;
};

void collect_parcel(struct job *job, uint32_t parcel);
void collect_all(struct job *job);

/* Draws conclusions from comparisons that are done; those of an aborted attempt are forgotten. */
void collect_settle(struct job *job);
void collect_verify(struct job *job, struct job_rank *rank, struct ring_slot *slot, uint32_t part, uint16_t pass);

/* Everything that the rank pushed in micro-batches it has ended is reduced or compared. */
bool collect_is_done(const struct job *job, const struct job_rank *rank);

/* Slots of a micro-batch that has ended: what nothing was admitted into is given back. */
void collect_close(struct job *job, struct job_rank *rank);

/* Slots of the open micro-batch that are not posted are given back. */
void collect_drop_open(struct job *job, struct job_rank *rank);

/* Several nodes: is anything that the rank has pushed announced to the others, and in no sum yet? */
bool collect_has_promised(const struct job *job, const struct job_rank *rank);

/* Sums it now, as the rank's slots will go. */
void collect_keep_promises(struct job *job, const struct job_rank *rank);
void collect_release_ring(struct job *job, struct job_rank *rank, bool abort);

/* This node has added the slots of all nodes to the elements of the parcel that it owns. */
void collect_combined(struct job *job, uint32_t parcel);

/* Where the rank's gradients of the parcel lie, and in which ring; NULL: it has pushed nothing of it there. */
struct ring_slot *collect_find_slot(const struct job_rank *rank, uint32_t parcel, uint32_t micro_batch, uint32_t pass,
                                    struct ring **ring);

/* All nodes have what they own of the parcel: its next sum may be made. Nothing happens unless the parcel is summed. */
void collect_settled(struct job *job, uint32_t parcel);

/* A promised parcel of this node is awaited: it is summed now. */
void collect_take(struct job *job, uint32_t parcel);
