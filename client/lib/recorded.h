/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Recorded requests (proto/zerod.proto): how many this incarnation has sent, and the packets that the daemon may not
 * have received. All zero means empty.
 */

#include <stddef.h>
#include <stdint.h>

struct recorded {
    uint8_t *bytes; /* each size is followed by its packet */
    size_t n_bytes, capacity;
    uint64_t n_sent; /* number of requests; the last n_kept of them are in bytes */
    uint64_t n_kept;
};

void recorded_deinit(struct recorded *recorded);

/* Counts a request that is about to be sent, and keeps a copy of its packet. Return: 0 or -ENOMEM. */
int recorded_add(struct recorded *recorded, const uint8_t *packet, uint32_t n_bytes);

/* Drops all kept packets, because the daemon has received them. */
void recorded_drop(struct recorded *recorded);

/*
 * Returns the kept packet at *at, or NULL after the last one, and moves *at to the next packet. *at: 0 for the first
 * packet.
 */
const uint8_t *recorded_next(const struct recorded *recorded, size_t *at, uint32_t *n_bytes);
