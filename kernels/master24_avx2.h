/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A whole group of master24.h with intrinsics, for x86-64-v3 and above. The bits are those of the plain loops, but gcc
 * 12 compiles those to slower code.
 */

#include "kernels/isa.h"
#include "kernels/master24.h"

#include <immintrin.h>

static always_inline void widen_masters_avx2(float *restrict out, struct master24 in)
{
    for (unsigned i = 0; i < MASTER24_GROUP_ELEMS; i += 8) {
        __m256i weights = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(in.weights + i)));
        __m256i lower = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(in.lower + i)));
        __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(weights, 16), _mm256_slli_epi32(lower, 8));

        _mm256_storeu_ps(out + i, _mm256_castsi256_ps(bits));
    }
}

/* master24_round() for eight elements from the i-th on. */
static always_inline __m256i master_rounds(const uint32_t *draws, unsigned i)
{
    const __m256i draw = _mm256_loadu_si256((const __m256i *)(const void *)(draws + i % MASTER24_DRAWS));
    const int shift = (int)(8 * (i / MASTER24_DRAWS));

    return _mm256_or_si256(_mm256_srli_epi32(draw, shift), _mm256_slli_epi32(draw, 32 - shift));
}

/* master24_at_random() for eight elements. round: in the lower nine bits. */
static always_inline __m256i round_masters(__m256 in, __m256i round)
{
    const __m256i one = _mm256_set1_epi32(1), byte = _mm256_set1_epi32(0xff);
    const __m256i u = _mm256_castps_si256(in), is_nan = _mm256_castps_si256(_mm256_cmp_ps(in, in, _CMP_UNORD_Q));
    const __m256i bits = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_and_si256(round, byte)), 8);
    const __m256i is_half = _mm256_cmpeq_epi32(_mm256_and_si256(bits, byte), _mm256_set1_epi32(MASTER24_HALF));
    const __m256i coin = _mm256_and_si256(_mm256_srli_epi32(round, 7), _mm256_set1_epi32(2)); /* 0 or 2 */
    const __m256i stored = _mm256_add_epi32(bits, _mm256_and_si256(is_half, _mm256_sub_epi32(coin, one)));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));

    return _mm256_blendv_epi8(stored, _mm256_slli_epi32(_mm256_srli_epi32(quiet, 16), 8), is_nan);
}

static always_inline __m256i weights_of_8(__m256i bits)
{
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(MASTER24_HALF)), 8);
}

static always_inline __m256i bytes_of_16(__m256i first, __m256i second)
{
    const __m256i byte = _mm256_set1_epi32(0xff);

    return _mm256_packus_epi32(_mm256_and_si256(first, byte), _mm256_and_si256(second, byte));
}

/* The instructions that pack vectors interleave their halves. Each store puts its elements back in order. */
static always_inline void narrow_masters_avx2(struct master24 out, const float *restrict in,
                                              const uint32_t *restrict draws)
{
    const __m256i packed_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);

    for (unsigned i = 0; i < MASTER24_GROUP_ELEMS; i += 32) {
        __m256i lower[2], bytes;

        for (unsigned k = 0; k < 2; k++) {
            unsigned at = i + 16 * k;
            __m256i first = round_masters(_mm256_loadu_ps(in + at), master_rounds(draws, at));
            __m256i second = round_masters(_mm256_loadu_ps(in + at + 8), master_rounds(draws, at + 8));
            __m256i weights = _mm256_packus_epi32(weights_of_8(first), weights_of_8(second));

            _mm256_storeu_si256((__m256i *)(void *)(out.weights + at), _mm256_permute4x64_epi64(weights, 0xd8));
            lower[k] = bytes_of_16(first, second);
        }
        bytes = _mm256_packus_epi16(lower[0], lower[1]);
        _mm256_storeu_si256((__m256i *)(void *)(out.lower + i), _mm256_permutevar8x32_epi32(bytes, packed_order));
    }
}
