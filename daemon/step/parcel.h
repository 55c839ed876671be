/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One parcel of the open step on this node: the position of its next sum, and the state of its gradients there.
 *
 *     PARCEL_OPEN      ranks of this node still push the parcel
 *     PARCEL_PROMISED  all ranks of this node have pushed it; announced to other nodes, but can still be withdrawn
 *     PARCEL_TAKEN     the gradients belong to the step's sum, and can no longer be withdrawn
 *     PARCEL_SUMMING   workers add the gradients of this node's ranks
 *     PARCEL_SUMMED    this node's sum is done, and is kept until all nodes have the elements that they own
 *     PARCEL_DROPPED   the step was aborted while workers were adding
 *
 * On one node a parcel goes from open to summed without waiting. On several nodes a second sum follows: combining adds
 * the pieces of all nodes. Combining reads memory that a later sum of this node overwrites, so only one of the two sums
 * runs at a time. Combining is not a parcel_state, because it may be for a position where this node has no gradients.
 *
 * These functions allocate no memory and call no other code. An event that is not valid in the state is an error of the
 * caller, and fails an assertion.
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

/* pass: how often a rank has already pushed the parameter in that micro-batch. */
struct parcel_position {
    uint32_t micro_batch, pass;
};

/* All zeroes: open, at the step's first position. */
struct parcel {
    struct parcel_position at;
    enum parcel_state state;
    bool awaited;   /* node 0 has announced the parcel: other nodes wait for this node's gradients */
    bool combining; /* workers add the pieces of all nodes */
};

static inline bool parcel_is_at(const struct parcel *parcel, uint32_t micro_batch, uint32_t pass)
{
    return parcel->at.micro_batch == micro_batch && parcel->at.pass == pass;
}

/* Return: whether the parcel has gradients, from promised to settled. Then the next gradients wait. */
static inline bool parcel_is_kept(const struct parcel *parcel)
{
    return parcel->state != PARCEL_OPEN && parcel->state != PARCEL_DROPPED;
}

/* Return: whether the parcel has gradients of this position. */
static inline bool parcel_keeps(const struct parcel *parcel, uint32_t micro_batch, uint32_t pass)
{
    return parcel_is_kept(parcel) && parcel_is_at(parcel, micro_batch, pass);
}

/* In open: moves to the next micro-batch, because no rank pushes the parcel in this one. */
void parcel_pass(struct parcel *parcel);

/* In open: all ranks of this node have pushed the parcel. */
void parcel_complete(struct parcel *parcel);

/* Node 0 announces the parcel. Return: whether it is promised. Then the caller calls parcel_take(). */
bool parcel_await(struct parcel *parcel);

/* In promised: the gradients now belong to the sum. */
void parcel_take(struct parcel *parcel);

/* Begins the sum of a taken parcel, unless the parcel is being combined. Return: whether it begins. */
bool parcel_begin_sum(struct parcel *parcel);
void parcel_end_sum(struct parcel *parcel);

/* Begins combining, unless a sum or another combining runs. Return: whether it begins. */
bool parcel_begin_combining(struct parcel *parcel);
void parcel_end_combining(struct parcel *parcel);

/*
 * Node 0 has forgotten the parcels that it does not await. Withdraws promised gradients. Return: whether the gradients
 * are still kept. Then they are reported to node 0 again.
 */
bool parcel_withdraw(struct parcel *parcel);

/*
 * All nodes have the elements that they own. Return: whether the parcel was summed. Then it is open again, at the next
 * pass.
 */
bool parcel_settle(struct parcel *parcel);

/* Drops the gradients, because the step is aborted. */
void parcel_forget(struct parcel *parcel);
