/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A whole group of group8.h with intrinsics, for x86-64-v3 and above. The bits are those of the plain loops. With the
 * plain loops, as gcc 12 compiles them, a whole update takes nearly twice as long, because they use 32 bits where 16
 * are enough.
 *
 * Packing two vectors interleaves their halves. Four packed vectors become bytes in the order of packed_order. That
 * order is undone once, when codes are stored.
 */

#include "kernels/group8.h"
#include "kernels/isa.h"

#include <immintrin.h>

enum {
    GROUP8_WORD_VECTORS = GROUP8_ELEMS / 16, /* vectors of 16 elements */
};

/* Stores sixteen elements of 16 bits as the upper halves of fp32 numbers. */
static always_inline void store_upper_halves(float *out, __m256i halves)
{
    const __m256i zero = _mm256_setzero_si256();
    __m256i spread = _mm256_permute4x64_epi64(halves, 0xd8);

    _mm256_storeu_ps(out, _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, spread)));
    _mm256_storeu_ps(out + 8, _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, spread)));
}

static always_inline void widen_group8_avx2(float *restrict out, const struct group8 *restrict in, enum dtype dtype)
{
    const __m256i exponent = _mm256_set1_epi16((short)(in->exponent << 7)), zero = _mm256_setzero_si256();

    for (unsigned i = 0; i < GROUP8_WORD_VECTORS; i++) {
        const __m128i *at = (const __m128i *)(const void *)(in->codes + 16 * i);
        __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(at)), magnitude = codes, halves;

        if (dtype == DTYPE_SIGNED8)
            magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
        halves = _mm256_add_epi16(_mm256_slli_epi16(magnitude, GROUP8_SHIFT - 16), exponent);
        halves = _mm256_andnot_si256(_mm256_cmpeq_epi16(magnitude, zero), halves);
        if (dtype == DTYPE_SIGNED8)
            halves = _mm256_or_si256(halves, _mm256_slli_epi16(_mm256_srli_epi16(codes, 7), 15));
        store_upper_halves(out + 16 * i, halves);
    }
}

static always_inline __m256i bits_of_8(const float *in)
{
    return _mm256_castps_si256(_mm256_loadu_ps(in));
}

/* group8_round() for eight elements from the i-th on. If draws is NULL, it rounds to nearest. */
static always_inline __m256i rounds_of_8(const uint32_t *draws, unsigned i, enum dtype dtype)
{
    __m256i draw;

    if (!draws)
        return _mm256_set1_epi32(GROUP8_HALF);
    draw = _mm256_loadu_si256((const __m256i *)(const void *)(draws + i % GROUP8_DRAWS));
    if (i >= GROUP8_DRAWS)
        draw = _mm256_xor_si256(draw, _mm256_set1_epi32(-1));
    return dtype == DTYPE_SIGNED8 ? _mm256_and_si256(draw, _mm256_set1_epi32(2 * GROUP8_HALF - 1))
                                  : _mm256_srli_epi32(draw, 32 - GROUP8_SHIFT);
}

/* group8_upper() for eight elements. magnitude: bits without signs. */
static always_inline __m256i upper_of_8(__m256i magnitude, __m256i rounds)
{
    return _mm256_srli_epi32(_mm256_add_epi32(magnitude, rounds), GROUP8_SHIFT);
}

/* group8_exponent() for the largest of 16 numbers. The result is the lowest word of the returned vector. It is not
 * moved to a scalar register, because vectors are faster. */
static always_inline __m128i exponent_of(__m256i uppers, int n_exponents)
{
    __m128i both = _mm_max_epu16(_mm256_castsi256_si128(uppers), _mm256_extracti128_si256(uppers, 1));
    __m128i least = _mm_minpos_epu16(_mm_xor_si128(both, _mm_set1_epi16(-1)));
    __m128i largest = _mm_andnot_si128(least, _mm_cvtsi32_si128(0xffff));

    return _mm_subs_epu16(_mm_srli_epi16(largest, GROUP8_MANTISSA_BITS), _mm_set1_epi16((short)n_exponents));
}

static always_inline void narrow_group8_avx2(struct group8 *restrict out, const float *restrict in, enum dtype dtype,
                                             const uint32_t *restrict draws)
{
    const __m256i no_sign = _mm256_set1_epi32(0x7fffffff), packed_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const int n_exponents = dtype == DTYPE_SIGNED8 ? GROUP8_SIGNED_EXPONENTS : GROUP8_UNSIGNED_EXPONENTS;
    __m256i uppers[GROUP8_WORD_VECTORS], marks[GROUP8_WORD_VECTORS], largest = _mm256_setzero_si256(), less;
    __m128i exponent;

    for (unsigned i = 0; i < GROUP8_WORD_VECTORS; i++) {
        __m256i first = bits_of_8(in + 16 * i), second = bits_of_8(in + 16 * i + 8);
        __m256i first_magnitude = _mm256_and_si256(first, no_sign),
                second_magnitude = _mm256_and_si256(second, no_sign);

        uppers[i] = _mm256_packus_epi32(upper_of_8(first_magnitude, rounds_of_8(draws, 16 * i, dtype)),
                                        upper_of_8(second_magnitude, rounds_of_8(draws, 16 * i + 8, dtype)));
        uppers[i] = _mm256_min_epu16(uppers[i], _mm256_set1_epi16(GROUP8_MOST));
        largest = _mm256_max_epu16(largest, uppers[i]);
        /* signed: negative if the element is negative; unsigned: 0 if the element is 0 */
        marks[i] = dtype == DTYPE_SIGNED8 ? _mm256_packs_epi32(first, second)
                                          : _mm256_packus_epi32(first_magnitude, second_magnitude);
    }
    exponent = exponent_of(largest, n_exponents);
    out->exponent = (uint32_t)_mm_cvtsi128_si32(exponent);
    less = _mm256_broadcastw_epi16(_mm_slli_epi16(exponent, GROUP8_MANTISSA_BITS));
    for (unsigned i = 0; i < GROUP8_WORD_VECTORS; i++) {
        uppers[i] = _mm256_subs_epu16(uppers[i], less);
        if (dtype != DTYPE_SIGNED8)
            uppers[i] = _mm256_max_epu16(uppers[i], _mm256_min_epu16(marks[i], _mm256_set1_epi16(1)));
    }
    for (unsigned i = 0; i < GROUP8_WORD_VECTORS; i += 2) {
        __m256i codes = _mm256_packus_epi16(uppers[i], uppers[i + 1]);

        if (dtype == DTYPE_SIGNED8)
            codes = _mm256_or_si256(codes, _mm256_and_si256(_mm256_packs_epi16(marks[i], marks[i + 1]),
                                                            _mm256_set1_epi8((char)0x80)));
        _mm256_storeu_si256((__m256i *)(void *)(out->codes + 16 * i),
                            _mm256_permutevar8x32_epi32(codes, packed_order));
    }
}
