/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One parcel of the open step on this node: the position of its next sum, and how far the gradients there have come.
 *
 *     PARCEL_OPEN      ranks of this node still push the parcel
 *     PARCEL_PROMISED  all of them have pushed it; other nodes know, and the gradients can still be withdrawn
 *     PARCEL_TAKEN     the gradients belong to the step's sum, and cannot be withdrawn any more
 *     PARCEL_SUMMING   workers add up the gradients of this node's ranks
 *     PARCEL_SUMMED    this node's sum is made, and stays until all nodes have the elements that they own
 *     PARCEL_DROPPED   the step was aborted while workers were adding up
 *
 * A parcel of one node goes from open to summed without waiting. Among several nodes a second sum follows, over the
 * pieces of all nodes: combining. It reads what a later sum of this node would overwrite, so of the two only one is
 * under way at a time; and it may be of a position at which this node had nothing, so it is no state of this node's
 * gradients.
 *
 * Pure: no memory, no calls. An event that cannot come in a state is an error of the caller, and fails an assertion.
 */

#include <stdbool.h>
#include <stdint.h>

enum parcel_state {
    PARCEL_OPEN,
    PARCEL_PROMISED,
    PARCEL_TAKEN,
    PARCEL_SUMMING,
    PARCEL_SUMMED,
    PARCEL_DROPPED,
    PARCEL_N_STATES,
};

/* pass: how often a rank had pushed the parameter in that micro-batch before. */
struct parcel_position {
    uint32_t micro_batch, pass;
};

/* All 0: open, at the step's first position. */
struct parcel {
    struct parcel_position at;
    enum parcel_state state;
    bool awaited;   /* node 0 has said that the parcel moves: other nodes wait for this node's gradients */
    bool combining; /* workers add the pieces of all nodes */
};

static inline bool parcel_is_at(const struct parcel *parcel, uint32_t micro_batch, uint32_t pass)
{
    return parcel->at.micro_batch == micro_batch && parcel->at.pass == pass;
}

/* Are the parcel's gradients on their way, from promised to settled? The next gradients wait. */
static inline bool parcel_is_kept(const struct parcel *parcel)
{
    return parcel->state != PARCEL_OPEN && parcel->state != PARCEL_DROPPED;
}

static inline bool parcel_keeps(const struct parcel *parcel, uint32_t micro_batch, uint32_t pass)
{
    return parcel_is_kept(parcel) && parcel_is_at(parcel, micro_batch, pass);
}

/* Open: no rank pushes it in this micro-batch. */
void parcel_pass(struct parcel *parcel);

/* Open: all ranks of this node have pushed it. */
void parcel_complete(struct parcel *parcel);

/* Node 0 says that the parcel moves. Return: whether it is promised, and so is to be taken now. */
bool parcel_await(struct parcel *parcel);

/* Promised: the gradients are in the sum. */
void parcel_take(struct parcel *parcel);

/* Return: whether the sum of a parcel that was taken begins; not while the last one is combined. */
bool parcel_begin_sum(struct parcel *parcel);
void parcel_end_sum(struct parcel *parcel);

/* Return: whether the pieces of all nodes can be added now; then combining begins. */
bool parcel_begin_combining(struct parcel *parcel);
void parcel_end_combining(struct parcel *parcel);

/* Node 0 has forgotten all that it does not await. Return: whether the gradients are kept, and so announced again. */
bool parcel_withdraw(struct parcel *parcel);

/*
 * All nodes have the elements that they own. Return: whether the parcel was summed: it is open again, at the next pass.
 */
bool parcel_settle(struct parcel *parcel);

/* The step is aborted. */
void parcel_forget(struct parcel *parcel);
