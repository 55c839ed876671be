/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The work of one chunk of a reduction in host memory. On a worker, except where stated. */

#include <stdint.h>

struct reduction;
struct step_slot;

/*
 * Sums the chunk into its accumulator or into pieces, or only computes its 64-bit sums (step.h). Skips a finished
 * chunk.
 */
void step_reduce_item(struct reduction *reduction, uint32_t chunk);

/*
 * Adds all sources of a chunk to its accumulator. slot: from step_begin_chunk() or step_find_torn(). Any thread may
 * call this.
 */
void step_reduce_chunk(struct reduction *reduction, uint32_t chunk, struct step_slot *slot);
