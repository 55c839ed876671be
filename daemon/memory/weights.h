/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Reads weights from the state and writes them, in any stage: a range of one parameter, in its own dtype. Any thread.
 * Ranges that are used at the same time must not overlap.
 */

#include <stdint.h>

#include "daemon/memory/state.h"
#include "kernels/kernels.h"

/*
 * Reads n_elems published weights of the parameter, from start: masters rounded to nearest even. In stage 3 elements
 * that are not owned do not change in dst.
 */
void weights_fetch(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, void *dst);

/* Reads owned weights of a trainable parameter in one chunk: masters rounded to nearest even. */
void weights_round(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, void *dst);

/* Reads owned elements of an array in one chunk, as fp32. elem: from the bucket's start. */
void weights_widen(const struct state *state, const struct kernels *kernels, uint32_t bucket, uint64_t elem,
                   enum state_kind kind, uint64_t n_elems, float *dst);

/*
 * Stores masters of the chunk. In stages 1 and 2 also stores them rounded, as published weights. If the partition is
 * not owned, stores only the weights.
 */
void weights_store_masters(const struct state *state, const struct kernels *kernels, const struct layout_chunk *chunk,
                           const float *src);

/*
 * Stores initial weights. Owned masters get their exact values. A frozen parameter gets all weights. In stages 1 and 2
 * the weights are already published.
 */
void weights_adopt(const struct state *state, const struct kernels *kernels, uint32_t param, const void *src);

/*
 * Stores weights of the range. If the partition is not owned, stores only the published weights. A master changes only
 * if the bytes of its weight change, and then gets the weight's exact value. So if a 16-bit weight is written back
 * unchanged, its master keeps all its bits.
 */
void weights_store(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, const void *src);
