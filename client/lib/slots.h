/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The client's slots. A slot holds a parcel's gradients (core/layout/layout.h) of one micro-batch and pass. The client
 * places the slot in the ring, first fit. A ticket identifies the slot until the credit page shows that the daemon has
 * reduced the slot. If the ring has no room, the client asks the daemon for a place in the overflow segment, and waits
 * for the answer.
 */

#include <stdbool.h>
#include <stdint.h>

struct call;
struct credit_page;
struct layout;

struct ticket {
    bool in_use;
    bool pushed; /* sent to the daemon, which will credit the ticket */
    bool overflow;
    uint32_t use;
    uint32_t parcel, pass;
    uint64_t offset_bytes, n_bytes; /* place in the ring or the overflow segment */
    uint32_t next;                  /* next ticket of the parcel in this micro-batch */
};

/* All zero is the empty value. */
struct slots {
    struct call *call; /* not owned, nor are layout and credits */
    const struct layout *layout;
    const struct credit_page *credits; /* in shared memory */
    uint64_t ring_bytes, overflow_bytes;
    uint32_t *first; /* per parcel: first ticket of the open micro-batch */
    struct ticket *tickets;
    uint32_t *used; /* tickets in use; those in the ring are sorted by offset */
    uint32_t n_used, n_tickets, next_ticket;
};

/* Allocates for n_tickets. The caller sets the fields up to overflow_bytes first. Return: 0 or -ENOMEM. */
int slots_init(struct slots *slots, uint32_t n_tickets);
void slots_deinit(struct slots *slots);

/*
 * Frees the slots of the open micro-batch that were not pushed. Call it when the micro-batch ends, or the step is
 * aborted.
 */
void slots_close(struct slots *slots);

/*
 * Sets *ticket to the slot for a parcel's pass, and makes the slot if needed. Return: 0, ZEROD_REFUSED, ZEROD_ABORTED
 * or fatal.
 */
int slots_get(struct slots *slots, uint32_t parcel, uint32_t pass, uint32_t *ticket);
