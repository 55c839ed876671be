/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Bare streams: they read and write the arrays of a kernel and compute next to nothing. Built for each instruction set,
 * like the kernels. Their arrays are segments like the daemon's.
 */

#include "core/base/base.h"
#include "kernels/kernels.h"

enum {
    STREAMS_MAX_LEAVES = 4,
};

/* The bare streams of one instruction set. n is the number of elements of each array. */
struct streams {
    const char *isa;
    void (*sum)(float *acc, const void *const *leaves, unsigned n_leaves, enum dtype dtype, size_t n);
    void (*adam)(uint32_t *p, uint32_t *m, uint32_t *v, const uint32_t *acc, uint16_t *w16, size_t n);
    void (*adam_bf16)(uint32_t *p, uint16_t *m, uint16_t *v, const uint32_t *acc, size_t n); /* moments in bf16 */
    void (*adam_8bit)(uint32_t *p, uint8_t *m, uint8_t *v, const uint32_t *acc, size_t n);   /* 8-bit moments */
    void (*adam_24bit)(uint16_t *w, uint8_t *lower, uint8_t *m, uint8_t *v, const uint32_t *acc,
                       size_t n); /* masters, too */
};

/* Return: the streams of an instruction set. isa: the kernels' name of the set. */
const struct streams *streams_of(const char *isa);

/* Return: n_bytes of touched memory for the index-th array of a program, or NULL without memory. It is never freed. */
void *streams_memory(size_t n_bytes, unsigned index);
