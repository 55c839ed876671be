/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3 in host memory: the pool of whole parameters that ranks gather. The pool segment has the layout of the range.
 * The offset of a parameter in the segment never changes, but the parameter's pages are reserved and freed. Ranks that
 * gather the same parameter share its pages. Pages of released parameters stay until other parameters need the room, so
 * gathering again within a step costs nothing. A hint loads parameters without holding them for a rank, so a hint need
 * not be undone.
 */

#include "daemon/step/pools.h"

struct segment;

/* executor: must already have its state. Sets executor->pools. Return: 0 or -errno. */
int host_pool_new(struct executor *executor);
const struct segment *host_pool_segment(const struct pools *pools);
/* Changes the bound for the pages of gathered parameters. */
void host_pool_bound(struct pools *pools, uint64_t n_bytes);
