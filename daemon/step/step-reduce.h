/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The work of one chunk of a reduction in host memory. On a worker, except where stated. */

#include <stdint.h>

struct reduction;
struct step_slot;

/* Sums the chunk, unless it is finished: into its accumulator, into pieces, or only its 64-bit sums (step.h). */
void step_reduce_item(struct reduction *reduction, uint32_t chunk);

/* Adds all sources of a chunk to its accumulator. slot: as step_begin_chunk() returns it. Any thread. */
void step_reduce_chunk(struct reduction *reduction, uint32_t chunk, struct step_slot *slot);
