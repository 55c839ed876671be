/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One parcel (layout.h) of the open step on this node: the position of its next sum, and the state of its gradients at
 * this position.
 *
 *     PARCEL_OPEN      ranks of this node still push the parcel
 *     PARCEL_PROMISED  all ranks of this node have pushed the parcel; promised to node 0, but can still be withdrawn
 *     PARCEL_TAKEN     the gradients belong to the step's sum, and can no longer be withdrawn
 *     PARCEL_SUMMING   workers add the gradients of this node's ranks
 *     PARCEL_SUMMED    this node's sum is done, and is kept until each node has the elements that it owns
 *     PARCEL_DROPPED   the step was aborted while workers were adding
 *
 * On one node a parcel goes from open to summed without waiting. On several nodes a second sum follows: combining adds
 * the pieces of all nodes. Combining reads memory that this node's next sum overwrites, so combining and a sum never
 * run at the same time. Combining is not a parcel_state, because a node also combines at positions where it has no
 * gradients itself.
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

/* pass: how often a rank has already pushed the same parameter in this micro-batch. */
struct parcel_position {
    uint32_t micro_batch, pass;
};

/* A zeroed struct is open, at the step's first position. */
struct parcel {
    struct parcel_position at;
    enum parcel_state state;
    bool awaited;   /* node 0 has announced the parcel, and waits for this node's gradients */
    bool combining; /* workers add the pieces of all nodes */
};

static inline bool parcel_is_at(const struct parcel *parcel, uint32_t micro_batch, uint32_t pass)
{
    return parcel->at.micro_batch == micro_batch && parcel->at.pass == pass;
}

/*
 * Return: whether the parcel has gradients, which is so from parcel_complete() to parcel_settle(). Then gradients of
 * the next position must wait.
 */
static inline bool parcel_is_kept(const struct parcel *parcel)
{
    return parcel->state != PARCEL_OPEN && parcel->state != PARCEL_DROPPED;
}

/* Return: whether the parcel has gradients of this position. */
static inline bool parcel_keeps(const struct parcel *parcel, uint32_t micro_batch, uint32_t pass)
{
    return parcel_is_kept(parcel) && parcel_is_at(parcel, micro_batch, pass);
}

/* In open: moves to the next micro-batch. Call it when no rank pushes the parcel in the present micro-batch. */
void parcel_pass(struct parcel *parcel);

/* In open: moves to promised. Call it when all ranks of this node have pushed the parcel. */
void parcel_complete(struct parcel *parcel);

/*
 * Records that node 0 announces the parcel. Return: whether the parcel is promised. Then the caller calls
 * parcel_take().
 */
bool parcel_await(struct parcel *parcel);

/* In promised: moves to taken. The gradients now belong to the step's sum. */
void parcel_take(struct parcel *parcel);

/* Begins the sum of a taken parcel, unless the parcel is being combined. Return: whether the sum begins. */
bool parcel_begin_sum(struct parcel *parcel);
void parcel_end_sum(struct parcel *parcel);

/* Begins combining, unless a sum or another combining of the parcel runs. Return: whether combining begins. */
bool parcel_begin_combining(struct parcel *parcel);
void parcel_end_combining(struct parcel *parcel);

/*
 * Withdraws promised gradients, unless the parcel is awaited. Call it when node 0 has forgotten all other parcels.
 * Return: whether an unawaited parcel still has gradients. Then the caller reports them to node 0 again.
 */
bool parcel_withdraw(struct parcel *parcel);

/*
 * Moves a summed parcel to open, at the next pass. Call it when all nodes have the elements that they own. Return:
 * whether the parcel was summed.
 */
bool parcel_settle(struct parcel *parcel);

/* Drops the gradients, because the step is aborted. */
void parcel_forget(struct parcel *parcel);
