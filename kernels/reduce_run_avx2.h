/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * reduce_run.h with intrinsics, for x86-64-v3 and above. The bits are the same. Why it is there: on a two-core
 * Zen 3 guest the plain loops, as gcc 12 vectorises them, reach 0.61 to 0.78 of the speed of a bare read-and-sum
 * (bf16 and fp32, 2 and 4 ranks), this 0.82 to 0.95. What it takes:
 *
 *   - sums and squares stay in registers from leaf to lane;
 *   - a fused multiply-add per square. It is no contraction in disguise: a product of two fp32 is exact in
 *     double, so mul + add and fma round once, at the same place;
 *   - bf16 is widened by interleaving with zeroes, sixteen elements in two instructions. That leaves them as
 *     elements 0-3, 8-11 and 4-7, 12-15, which is as good for sums and for lanes, and is undone when stored.
 *
 * Tried and dropped, no gain: prefetching 256 bytes to 4 KiB ahead; stores around the cache.
 */

#include "kernels/reduce_run.h"

#include <immintrin.h>

/* Sixteen elements, in the order 0-7, 8-15; of bf16 leaves 0-3 8-11, 4-7 12-15. */
struct sixteen {
    __m256 a;
    __m256 b;
};

static always_inline struct sixteen sixteen_load(const void *leaf, size_t i, enum dtype dtype)
{
    const __m256i *half = (const __m256i *)((const uint16_t *)leaf + i);
    const __m256i zero = _mm256_setzero_si256();
    const float *f32 = (const float *)leaf + i;
    __m256i h;

    switch (dtype) {
    case DTYPE_BF16:
        h = _mm256_loadu_si256(half);
        return (struct sixteen){_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, h)),
                                _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, h))};
    case DTYPE_F16:
        h = _mm256_loadu_si256(half);
        return (struct sixteen){_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
                                _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
    default:
        return (struct sixteen){_mm256_loadu_ps(f32), _mm256_loadu_ps(f32 + 8)};
    }
}

static always_inline struct sixteen sixteen_add(struct sixteen x, struct sixteen y)
{
    return (struct sixteen){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}

/* From the order of a leaf of dtype to that of memory, and back: it undoes itself. */
static always_inline struct sixteen sixteen_reorder(struct sixteen x, enum dtype dtype)
{
    if (dtype != DTYPE_BF16)
        return x;
    return (struct sixteen){_mm256_permute2f128_ps(x.a, x.b, 0x20), _mm256_permute2f128_ps(x.a, x.b, 0x31)};
}

static always_inline struct sixteen sixteen_join(const void *const *leaves, const struct reduce_args *args,
                                                 size_t i, enum dtype dtype)
{
    struct sixteen x[REDUCE_MAX_LEAVES];

    for (unsigned leaf = 0; leaf < args->n_leaves; leaf++)
        x[leaf] = sixteen_load(leaves[leaf], i, dtype);
    for (unsigned j = 0; j + 1 < args->n_leaves; j++)
        x[args->joins[j].dst] = sixteen_add(x[args->joins[j].dst], x[args->joins[j].src]);
    return x[0];
}

static always_inline struct sixteen sixteen_tree(const void *const *leaves, const struct reduce_args *args,
                                                 size_t i, enum dtype dtype, enum reduce_shape shape)
{
    struct sixteen sum;

    if (shape == REDUCE_ANY)
        return sixteen_join(leaves, args, i, dtype);
    sum = sixteen_load(leaves[0], i, dtype);
    if (shape != REDUCE_ONE)
        sum = sixteen_add(sum, sixteen_load(leaves[1], i, dtype));
    if (shape == REDUCE_FOUR)
        sum = sixteen_add(sum, sixteen_add(sixteen_load(leaves[2], i, dtype), sixteen_load(leaves[3], i, dtype)));
    return sum;
}

static always_inline __m256d add_squares(__m256d lanes, __m128 x)
{
    __m256d d = _mm256_cvtps_pd(x);

    return _mm256_fmadd_pd(d, d, lanes);
}

/* As reduce_run_plain(). */
static always_inline double reduce_run_avx2(float *acc, const void *const *leaves, const struct reduce_args *args,
                                            enum dtype dtype, enum reduce_shape shape, bool first)
{
    __m256d lanes_0_3 = _mm256_setzero_pd(), lanes_4_7 = _mm256_setzero_pd(), four;
    __m128d two;

#pragma GCC unroll 4
    for (size_t i = 0; i < REDUCE_RUN_ELEMS; i += 16) {
        struct sixteen sum = sixteen_tree(leaves, args, i, dtype, shape), old = {0}, stored;
        __m128 a_high, b_high;

        if (!first)
            old = sixteen_reorder(sixteen_load(acc, i, DTYPE_F32), dtype);
        sum = sixteen_add(old, sum);
        stored = sixteen_reorder(sum, dtype);
        _mm256_storeu_ps(acc + i, stored.a);
        _mm256_storeu_ps(acc + i + 8, stored.b);

        a_high = _mm256_extractf128_ps(sum.a, 1);
        b_high = _mm256_extractf128_ps(sum.b, 1);
        lanes_0_3 = add_squares(lanes_0_3, _mm256_castps256_ps128(sum.a)); /* elements 0-3 */
        lanes_4_7 = add_squares(lanes_4_7, dtype == DTYPE_BF16 ? _mm256_castps256_ps128(sum.b) : a_high);
        lanes_0_3 = add_squares(lanes_0_3, dtype == DTYPE_BF16 ? a_high : _mm256_castps256_ps128(sum.b));
        lanes_4_7 = add_squares(lanes_4_7, b_high); /* elements 12-15 */
    }
    four = _mm256_add_pd(lanes_0_3, lanes_4_7);
    two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}
