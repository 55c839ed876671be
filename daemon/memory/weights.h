/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Reads and writes the state's weights in any stage. Each call is for a range of one parameter, in the parameter's
 * dtype. Any thread may call these functions. Ranges that are used at the same time must not overlap.
 */

#include <stdint.h>

#include "daemon/memory/state.h"
#include "kernels/kernels.h"

/*
 * Reads n_elems published weights of the parameter from element `start`. Published weights are masters rounded to
 * nearest even. In stage 3, elements of dst that are not owned do not change.
 */
void weights_fetch(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, void *dst);

/*
 * Reads masters of an owned chunk, rounded to nearest even in the parameter's dtype. first_elem: from the chunk's
 * start.
 */
void weights_round(const struct state *state, const struct kernels *kernels, uint32_t chunk, uint64_t first_elem,
                   uint64_t n_elems, void *dst);

/* Reads an array of an owned chunk as fp32. */
void weights_widen(const struct state *state, const struct kernels *kernels, uint32_t chunk, enum state_kind kind,
                   float *dst);

/*
 * Stores masters of the chunk. In stages 1 and 2 also rounds the masters and stores them as published weights. If the
 * partition is not owned, stores only the published weights.
 */
void weights_store_masters(const struct state *state, const struct kernels *kernels, uint32_t chunk, const float *src);

/*
 * Stores a parameter's initial weights. Sets owned masters to the exact values of the weights, and stores all weights
 * of a frozen parameter. In stages 1 and 2 the caller has already published the weights.
 */
void weights_adopt(const struct state *state, const struct kernels *kernels, uint32_t param, const void *src);

/*
 * Stores weights of the range. If the partition is not owned, stores only the published weights. A master changes only
 * if the bytes of its weight change, and then gets the weight's exact value. So if a 16-bit weight is written back
 * unchanged, its master keeps all its bits.
 */
void weights_store(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, const void *src);
