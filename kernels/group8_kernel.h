/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Converts a group of group8.h to and from fp32, with loops over its element functions. */

#include "kernels/group8.h"
#include "kernels/isa.h"

#ifdef __AVX2__
#include "kernels/group8_avx2.h"
#endif

/* Widens the first n elements of a group. */
static always_inline void widen_group8(float *restrict out, const struct group8 *restrict in, enum dtype dtype,
                                       size_t n)
{
    const uint32_t exponent = in->exponent;

#ifdef __AVX2__
    if (n == GROUP8_ELEMS) {
        widen_group8_avx2(out, in, dtype);
        return;
    }
#endif
    if (dtype == DTYPE_SIGNED8) {
        for (size_t i = 0; i < n; i++)
            out[i] = group8_signed_value(in->codes[i], exponent);
    } else {
        for (size_t i = 0; i < n; i++)
            out[i] = group8_unsigned_value(in->codes[i], exponent);
    }
}

/* upper: the rounded upper bits of the n elements. */
static always_inline void store_group8(struct group8 *restrict out, const float *restrict in,
                                       const uint16_t *restrict upper, enum dtype dtype, size_t n)
{
    uint16_t largest = 0, exponent;

    for (size_t i = 0; i < n; i++)
        largest = upper[i] > largest ? upper[i] : largest;
    exponent = group8_exponent(largest, dtype == DTYPE_SIGNED8 ? GROUP8_SIGNED_EXPONENTS : GROUP8_UNSIGNED_EXPONENTS);
    out->exponent = exponent;
    if (dtype == DTYPE_SIGNED8) {
        for (size_t i = 0; i < n; i++)
            out->codes[i] = group8_signed_code(upper[i], exponent, f32_bits(in[i]) >> 31);
    } else {
        for (size_t i = 0; i < n; i++)
            out->codes[i] = group8_unsigned_code(upper[i], exponent, in[i] == 0);
    }
}

/* Stores the first n elements of a group; its other codes do not change. draws: for stochastic rounding; NULL: round to
 * nearest. */
static always_inline void narrow_group8(struct group8 *restrict out, const float *restrict in, enum dtype dtype,
                                        const uint32_t *restrict draws, size_t n)
{
    uint16_t upper[GROUP8_ELEMS];
    uint32_t round[GROUP8_ELEMS];

#ifdef __AVX2__
    if (n == GROUP8_ELEMS) {
        narrow_group8_avx2(out, in, dtype, draws);
        return;
    }
#endif
    for (size_t i = 0; i < GROUP8_DRAWS; i++) {
        round[i] = draws ? group8_round(draws[i], i, dtype) : GROUP8_HALF;
        round[i + GROUP8_DRAWS] = draws ? group8_round(draws[i], i + GROUP8_DRAWS, dtype) : GROUP8_HALF;
    }
    for (size_t i = 0; i < n; i++)
        upper[i] = group8_upper(in[i], round[i]);
    store_group8(out, in, upper, dtype, n);
}
