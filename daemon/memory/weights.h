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
 * Reads n_elems of the parameter from start on, as published: masters rounded to nearest even. In stage 3 elements that
 * are not owned are left unchanged in dst.
 */
void weights_fetch(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, void *dst);

/* Reads elements that are owned, in one chunk, of a trainable parameter: masters rounded to nearest even. */
void weights_round(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, void *dst);

/* Reads elements of an array, owned, in one chunk, in fp32. elem: from the bucket's start. */
void weights_widen(const struct state *state, const struct kernels *kernels, uint32_t bucket, uint64_t elem,
                   enum state_kind kind, uint64_t n_elems, float *dst);

/*
 * Stores masters of the chunk, and in stages 1 and 2 their roundings as published weights. In a partition that is not
 * owned, stores only the weights.
 */
void weights_store_masters(const struct state *state, const struct kernels *kernels, const struct layout_chunk *chunk,
                           const float *src);

/*
 * Stores initial weights: owned masters get their exact values, other masters do not change; frozen: all weights. In
 * stages 1 and 2 they are already published.
 */
void weights_adopt(const struct state *state, const struct kernels *kernels, uint32_t param, const void *src);

/*
 * Stores weights of the range; in a partition that is not owned, only the published weights. A master changes only if
 * the bytes of its weight change, and then gets the weight's exact value. So a master keeps the bits that a 16-bit
 * weight lacks when the weight is written back unchanged.
 */
void weights_store(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, const void *src);
