/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The credit page: what the daemon tells a client without a message. One per
 * incarnation, written by the daemon alone, mapped read-only by the client.
 * Values are written with release and read with acquire order.
 */

#include <stdatomic.h>
#include <stdint.h>

struct credit_page {
    _Atomic uint64_t generation; /* odd while weights are being written, even otherwise */
    _Atomic uint32_t attempt;    /* of the job: aborts so far */
    uint32_t n_tickets;
    _Atomic uint32_t credits[]; /* per ticket: how often its slot has been given back, modulo 2^32 */
};

static inline uint64_t credit_page_bytes(uint32_t n_tickets)
{
    return sizeof(struct credit_page) + (uint64_t)n_tickets * sizeof(uint32_t);
}

/*
 * Held pushes: behind the ring, in its segment, written by the client alone. Parameters whose gradients lie in
 * the ring while their messages wait to be sent together: a rank that hangs just then is not said to owe them.
 * Nothing else may depend on what stands here.
 */
enum { HELD_PUSHES = 64 }; /* measured: with 8 a push costs its sender 2 us more; not more than WIRE_MAX_PUSHES */

struct held_pushes {
    _Atomic uint32_t n;
    _Atomic uint32_t params[HELD_PUSHES];
};

static inline uint64_t held_pushes_offset(uint64_t ring_bytes)
{
    return (ring_bytes + 63) / 64 * 64;
}
