/* SPDX-License-Identifier: Apache-2.0 */

/* The state machine of a parcel. */

#include "daemon/step/parcel.h"

#include <assert.h>

enum event { COMPLETE, AWAIT, TAKE, BEGIN_SUM, END_SUM, WITHDRAW, SETTLE, FORGET, N_EVENTS };

enum {
    OPEN = PARCEL_OPEN,
    PROMISED = PARCEL_PROMISED,
    TAKEN = PARCEL_TAKEN,
    SUMMING = PARCEL_SUMMING,
    SUMMED = PARCEL_SUMMED,
    DROPPED = PARCEL_DROPPED,
    NEVER = PARCEL_N_STATES,
};

/* clang-format off */
static const uint8_t transitions[PARCEL_N_STATES][N_EVENTS] = {
    /*            COMPLETE  AWAIT     TAKE   BEGIN_SUM  END_SUM  WITHDRAW  SETTLE    FORGET */
    [OPEN]     = {PROMISED, OPEN,     NEVER, OPEN,      NEVER,   OPEN,     OPEN,     OPEN},
    [PROMISED] = {NEVER,    PROMISED, TAKEN, PROMISED,  NEVER,   OPEN,     PROMISED, OPEN},
    [TAKEN]    = {NEVER,    TAKEN,    NEVER, SUMMING,   NEVER,   TAKEN,    TAKEN,    OPEN},
    [SUMMING]  = {NEVER,    SUMMING,  NEVER, SUMMING,   SUMMED,  SUMMING,  SUMMING,  DROPPED},
    [SUMMED]   = {NEVER,    SUMMED,   NEVER, SUMMED,    NEVER,   SUMMED,   OPEN,     OPEN},
    [DROPPED]  = {NEVER,    DROPPED,  NEVER, DROPPED,   OPEN,    DROPPED,  DROPPED,  DROPPED},
};
/* clang-format on */

/* Applies the event. Return: whether the state changed. */
static bool happens(struct parcel *parcel, enum event event)
{
    enum parcel_state before = parcel->state;
    uint8_t after = transitions[before][event];

    assert(before < PARCEL_N_STATES);
    assert(after != NEVER);
    parcel->state = (enum parcel_state)after;
    if (!parcel_is_kept(parcel))
        parcel->awaited = false;
    return parcel->state != before;
}

void parcel_pass(struct parcel *parcel)
{
    assert(parcel->state == PARCEL_OPEN);
    parcel->at = (struct parcel_position){.micro_batch = parcel->at.micro_batch + 1};
}

void parcel_complete(struct parcel *parcel)
{
    happens(parcel, COMPLETE);
}

bool parcel_await(struct parcel *parcel)
{
    happens(parcel, AWAIT);
    parcel->awaited = parcel_is_kept(parcel);
    return parcel->state == PARCEL_PROMISED;
}

void parcel_take(struct parcel *parcel)
{
    happens(parcel, TAKE);
}

bool parcel_begin_sum(struct parcel *parcel)
{
    return !parcel->combining && happens(parcel, BEGIN_SUM);
}

void parcel_end_sum(struct parcel *parcel)
{
    assert(!parcel->combining); /* combining reads memory that a sum overwrites */
    happens(parcel, END_SUM);
}

bool parcel_begin_combining(struct parcel *parcel)
{
    if (parcel->combining || parcel->state == PARCEL_SUMMING || parcel->state == PARCEL_DROPPED)
        return false;
    parcel->combining = true;
    return true;
}

void parcel_end_combining(struct parcel *parcel)
{
    assert(parcel->combining);
    assert(parcel->state != PARCEL_SUMMING);
    parcel->combining = false;
}

bool parcel_withdraw(struct parcel *parcel)
{
    if (parcel->awaited)
        return false;
    happens(parcel, WITHDRAW);
    return parcel_is_kept(parcel);
}

bool parcel_settle(struct parcel *parcel)
{
    if (!happens(parcel, SETTLE))
        return false;
    parcel->at.pass++;
    return true;
}

void parcel_forget(struct parcel *parcel)
{
    happens(parcel, FORGET);
}
