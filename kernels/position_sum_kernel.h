/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The inner loop of position_sum.h, shared by the kernels that read a gradient anyway. Over a piece it keeps two
 * running sums per lane and no run numbers. The sum of the running sums counts the n-th run from the end n times;
 * position_piece_close() converts that to the count from the parameter's start.
 *
 * It uses vector types (which every target of the compiler has) because of a measurement: from the same loop over
 * uint64_t, gcc 12 made a mixture of vector and scalar lanes that took 47 cycles for 256 bytes, against 12 to 18 for
 * this loop.
 */

#include "kernels/isa.h"
#include "kernels/position_sum.h"

#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie in memory");

#if defined(__AVX512BW__)
#define POSITION_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define POSITION_VECTOR_BYTES 32
#else
#define POSITION_VECTOR_BYTES 16
#endif

enum {
    POSITION_STRIPE_BYTES = 64,
    POSITION_VECTORS = POSITION_STRIPE_BYTES / POSITION_VECTOR_BYTES,
};

typedef uint64_t position_vector __attribute__((vector_size(POSITION_VECTOR_BYTES)));
typedef uint8_t position_bytes __attribute__((vector_size(POSITION_VECTOR_BYTES)));
typedef uint64_t position_unaligned __attribute__((vector_size(POSITION_VECTOR_BYTES), aligned(1), may_alias));

/* A zeroed struct is an empty piece. */
struct position_piece {
    position_vector sum[POSITION_VECTORS];
    position_vector sum_of_sums[POSITION_VECTORS];
};

/* Rotates each 16 bytes of a vector, as one number, right by five bytes. */
static always_inline position_vector position_rotate(position_vector y)
{
#define ROTATED_(i)                                                                                                    \
    i + 5, i + 6, i + 7, i + 8, i + 9, i + 10, i + 11, i + 12, i + 13, i + 14, i + 15, i, i + 1, i + 2, i + 3, i + 4
#if defined(__AVX512BW__)
    position_bytes b = (position_bytes)y;

    return (position_vector)__builtin_shufflevector(b, b, ROTATED_(0), ROTATED_(16), ROTATED_(32), ROTATED_(48));
#elif defined(__AVX2__)
    position_bytes b = (position_bytes)y;

    return (position_vector)__builtin_shufflevector(b, b, ROTATED_(0), ROTATED_(16));
#else
    /* SSE2 cannot shuffle bytes */
    return y >> 40 | __builtin_shufflevector(y, y, 1, 0) << 24;
#endif
#undef ROTATED_
}

/* Adds n_runs complete runs. dtype is a constant after inlining. */
static always_inline void position_piece_add(struct position_piece *piece, enum dtype dtype, const void *elems,
                                             size_t n_runs)
{
    const unsigned n_vectors = (unsigned)(POSITION_RUN_ELEMS * dtype_size(dtype)) / POSITION_VECTOR_BYTES;
    const position_unaligned *word = elems;
    struct position_piece s = *piece;

    for (; n_runs > 0; n_runs--, word += n_vectors) {
#pragma GCC unroll 4
        for (unsigned k = 0; k < POSITION_VECTORS; k++) {
            position_vector y = word[k];

#pragma GCC unroll 4
            for (unsigned i = POSITION_VECTORS + k; i < n_vectors; i += POSITION_VECTORS)
                y = position_rotate(y) + word[i];
            s.sum[k] += y ^ y >> 29;
            s.sum_of_sums[k] += s.sum[k];
        }
    }
    *piece = s;
}

/* Adds the piece to *sum. n_runs: the number of runs that were added to the piece. first_run: the number of the first
 * of these runs. */
static always_inline void position_piece_close(const struct position_piece *piece, uint64_t first_run, uint64_t n_runs,
                                               struct position_sum *sum)
{
    uint64_t sums[8], sums_of_sums[8];

    memcpy(sums, piece->sum, sizeof(sums));
    memcpy(sums_of_sums, piece->sum_of_sums, sizeof(sums_of_sums));
    for (unsigned k = 0; k < 8; k++) {
        sum->first[k] += sums[k];
        sum->second[k] += (first_run + n_runs + 1) * sums[k] - sums_of_sums[k];
    }
}
