/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Recorded requests (proto/zerod.proto): their number in this incarnation, and the packets that the daemon may not have
 * received. All zero is the empty value.
 */

#include <stddef.h>
#include <stdint.h>

struct recorded {
    uint8_t *bytes; /* each size is followed by its packet */
    size_t n_bytes, capacity;
    uint64_t n_sent; /* includes the kept ones, which are the last */
    uint64_t n_kept;
};

void recorded_deinit(struct recorded *recorded);

/* Counts a request that is about to be sent, and keeps a copy of its packet. Return: 0 or -ENOMEM. */
int recorded_add(struct recorded *recorded, const uint8_t *packet, uint32_t n_bytes);

/* Drops all kept packets, because the daemon has received them. */
void recorded_drop(struct recorded *recorded);

/*
 * Iterates over the kept packets. *at: 0 for the first packet; moves to the next one. Return: the packet, or NULL after
 * the last one.
 */
const uint8_t *recorded_next(const struct recorded *recorded, size_t *at, uint32_t *n_bytes);
