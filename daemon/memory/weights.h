/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Weights in and out of the state, whatever the stage: a range of one
 * parameter in its own dtype. Any thread; ranges that are touched at the same time must not overlap.
 */

#include <stdint.h>

#include "daemon/memory/state.h"
#include "kernels/kernels.h"

/*
 * n_elems of the parameter from start on, as published: masters rounded to nearest even. In stage 3 what is not owned
 * is left as it is.
 */
void weights_fetch(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, void *dst);

/*
 * The chunk takes these masters, and in stages 1 and 2 their roundings as published weights. Of a partition that
 * is not owned only the weights.
 */
void weights_store_masters(const struct state *state, const struct kernels *kernels, const struct layout_chunk *chunk,
                           const float *src);

/* The parameter takes these weights for its first: masters are their exact values. Of a partition that is not owned
 * nothing. */
void weights_adopt(const struct state *state, const struct kernels *kernels, uint32_t param, const void *src);

/*
 * The range takes these weights; of a partition that is not owned only what is published. A master changes only where
 * its weight's bytes do, and is then the exact value of the weight: what a 16-bit weight cannot show of its master
 * survives when the weight is written back unchanged.
 */
void weights_store(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, const void *src);
