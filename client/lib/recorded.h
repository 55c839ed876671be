/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Recorded requests (proto/zerod.proto): how many this incarnation has sent, and the packets of those that the daemon
 * may not have received. All zero is the empty value.
 */

#include <stddef.h>
#include <stdint.h>

struct recorded {
    uint8_t *bytes; /* each packet behind its size */
    size_t n_bytes, capacity;
    uint64_t n_sent; /* the kept ones included, which are the last */
    uint64_t n_kept;
};

void recorded_deinit(struct recorded *recorded);

/* Counts a request that will be sent now, and keeps a copy of its packet. Return: 0 or -ENOMEM. */
int recorded_add(struct recorded *recorded, const uint8_t *packet, uint32_t n_bytes);

/* The daemon has received all requests: none is kept any longer. */
void recorded_drop(struct recorded *recorded);

/* Return: the kept packet at *at, which is 0 for the first one and becomes the next one's. NULL: there is none. */
const uint8_t *recorded_next(const struct recorded *recorded, size_t *at, uint32_t *n_bytes);
