/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * reduce_run.h with intrinsics, for x86-64-v3 and above. The bits are equal. This file exists because of its speed: on
 * a two-core Zen 3 guest the plain loops, vectorised by gcc 12 for AVX2, and these functions reach the following
 * fractions of the speed of a bare read-and-sum (bench-kernels, medians of 15):
 *
 *                      fp32, 2 ranks   fp32, 4 ranks   bf16, 2 ranks   bf16, 4 ranks
 *     plain loops           0.93            0.89            0.81            0.70
 *     this                  1.00            0.96            0.91            0.82
 *
 * The gain has these causes:
 *
 *   - every byte of a leaf is loaded once, for its sum and its position sum. Leaves whose addresses differ
 *     by a multiple of 2^27 push each other out of the nearest cache, and reading them twice, a few hundred
 *     bytes later, took 1.6 times as long;
 *   - sums and squares stay in registers from leaf to lane;
 *   - a fused multiply-add per square. It does not change the bits: a product of two fp32 is exact in
 *     double, so mul + add and fma round once, at the same place;
 *   - bf16 is widened by interleaving with zeroes, sixteen elements in two instructions. That leaves them as
 *     elements 0-3, 8-11 and 4-7, 12-15, which is as good for sums and for lanes, and is undone when stored.
 *
 * Prefetching 256 bytes to 4 KiB ahead was tried, without a gain.
 */

#include "kernels/reduce_run.h"

#include <immintrin.h>

/* Sixteen elements in the types of memory: 64 bytes of fp32, or 32 bytes in `low`. */
struct sixteen_raw {
    __m256i low;
    __m256i high;
};

/* Sixteen elements, in the order 0-7, 8-15. Elements of bf16 leaves are in the order 0-3 8-11, 4-7 12-15. */
struct sixteen {
    __m256 a;
    __m256 b;
};

/* The y of position_sum.h for the present run, lanes 0-3 and 4-7. */
struct position_run {
    __m256i y[2];
};

static always_inline struct sixteen_raw sixteen_load(const void *leaf, size_t i, enum dtype dtype)
{
    const __m256i *at = (const __m256i *)(const void *)((const char *)leaf + i * dtype_size(dtype));

    if (dtype == DTYPE_F32)
        return (struct sixteen_raw){_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
    return (struct sixteen_raw){.low = _mm256_loadu_si256(at)};
}

static always_inline struct sixteen sixteen_widen(struct sixteen_raw raw, enum dtype dtype)
{
    const __m256i zero = _mm256_setzero_si256();

    switch (dtype) {
    case DTYPE_BF16:
        return (struct sixteen){_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, raw.low)),
                                _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, raw.low))};
    case DTYPE_F16:
        return (struct sixteen){_mm256_cvtph_ps(_mm256_castsi256_si128(raw.low)),
                                _mm256_cvtph_ps(_mm256_extracti128_si256(raw.low, 1))};
    default:
        return (struct sixteen){_mm256_castsi256_ps(raw.low), _mm256_castsi256_ps(raw.high)};
    }
}

static always_inline struct sixteen sixteen_add(struct sixteen x, struct sixteen y)
{
    return (struct sixteen){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}

/* Converts from the order of a leaf of dtype to the order of memory, or back. The conversion is its own inverse. */
static always_inline struct sixteen sixteen_reorder(struct sixteen x, enum dtype dtype)
{
    if (dtype != DTYPE_BF16)
        return x;
    return (struct sixteen){_mm256_permute2f128_ps(x.a, x.b, 0x20), _mm256_permute2f128_ps(x.a, x.b, 0x31)};
}

static always_inline void position_run_step(__m256i *y, __m256i words, bool first_stripe)
{
    *y = first_stripe ? words : _mm256_add_epi64(_mm256_alignr_epi8(*y, *y, 5), words);
}

/* Elements i to i + 15 of a run: a stripe of fp32, half a stripe of 16 bits. */
static always_inline void position_run_add(struct position_run *run, struct sixteen_raw raw, size_t i, enum dtype dtype)
{
    if (dtype == DTYPE_F32) {
        position_run_step(&run->y[0], raw.low, i == 0);
        position_run_step(&run->y[1], raw.high, i == 0);
    } else {
        position_run_step(&run->y[i / 16 % 2], raw.low, i < 32);
    }
}

static always_inline void position_run_close(const struct position_run *run, struct position_piece *piece)
{
    __m256i *sum = (__m256i *)(void *)piece->sum, *sum_of_sums = (__m256i *)(void *)piece->sum_of_sums;

    for (unsigned k = 0; k < 2; k++) {
        __m256i z = _mm256_xor_si256(run->y[k], _mm256_srli_epi64(run->y[k], 29));

        sum[k] = _mm256_add_epi64(sum[k], z);
        sum_of_sums[k] = _mm256_add_epi64(sum_of_sums[k], sum[k]);
    }
}

/* Loads elements i to i + 15 of one leaf and adds them to its position sum. */
static always_inline struct sixteen sixteen_take(const void *leaf, struct position_run *run, size_t i, enum dtype dtype)
{
    struct sixteen_raw raw = sixteen_load(leaf, i, dtype);

    position_run_add(run, raw, i, dtype);
    return sixteen_widen(raw, dtype);
}

static always_inline struct sixteen sixteen_join(const void *const *leaves, const struct reduce_args *args,
                                                 struct position_run *runs, size_t i, enum dtype dtype)
{
    struct sixteen x[REDUCE_MAX_LEAVES];

    for (unsigned leaf = 0; leaf < args->n_leaves; leaf++)
        x[leaf] = sixteen_take(leaves[leaf], &runs[leaf], i, dtype);
    for (unsigned j = 0; j + 1 < args->n_leaves; j++)
        x[args->joins[j].dst] = sixteen_add(x[args->joins[j].dst], x[args->joins[j].src]);
    return x[0];
}

static always_inline struct sixteen sixteen_tree(const void *const *leaves, const struct reduce_args *args,
                                                 struct position_run *runs, size_t i, enum dtype dtype,
                                                 enum reduce_shape shape)
{
    struct sixteen sum, right;

    if (shape == REDUCE_ANY)
        return sixteen_join(leaves, args, runs, i, dtype);
    sum = sixteen_take(leaves[0], &runs[0], i, dtype);
    if (shape != REDUCE_ONE)
        sum = sixteen_add(sum, sixteen_take(leaves[1], &runs[1], i, dtype));
    if (shape == REDUCE_FOUR) {
        right = sixteen_take(leaves[2], &runs[2], i, dtype);
        right = sixteen_add(right, sixteen_take(leaves[3], &runs[3], i, dtype));
        sum = sixteen_add(sum, right);
    }
    return sum;
}

static always_inline __m256d add_squares(__m256d lanes, __m128 x)
{
    __m256d d = _mm256_cvtps_pd(x);

    return _mm256_fmadd_pd(d, d, lanes);
}

/* past_caches: the stores bypass the caches. The memory is not read before it is overwritten, and the caches keep their
 * contents. */
static always_inline void sixteen_store(float *at, struct sixteen x, bool past_caches)
{
    if (past_caches) {
        _mm256_stream_ps(at, x.a);
        _mm256_stream_ps(at + 8, x.b);
    } else {
        _mm256_storeu_ps(at, x.a);
        _mm256_storeu_ps(at + 8, x.b);
    }
}

/* Like reduce_run_plain(). */
static always_inline double reduce_run_avx2(const struct reduce_args *args, float *acc, const void *const *leaves,
                                            struct position_piece *pieces, enum dtype dtype, enum reduce_shape shape,
                                            enum reduce_mode mode)
{
    __m256d lanes_0_3 = _mm256_setzero_pd(), lanes_4_7 = _mm256_setzero_pd(), four;
    struct position_run runs[REDUCE_MAX_LEAVES];
    __m128d two;

#pragma GCC unroll 4
    for (size_t i = 0; i < REDUCE_RUN_ELEMS; i += 16) {
        struct sixteen sum = sixteen_tree(leaves, args, runs, i, dtype, shape), old = {0}, stored;
        __m128 a_low, a_high, b_low, b_high;

        if (!reduce_is_first(mode))
            old = sixteen_reorder(sixteen_widen(sixteen_load(acc, i, DTYPE_F32), DTYPE_F32), dtype);
        sum = sixteen_add(old, sum);
        stored = sixteen_reorder(sum, dtype);
        sixteen_store(acc + i, stored, mode == REDUCE_SET_PAST);

        a_low = _mm256_castps256_ps128(sum.a);
        a_high = _mm256_extractf128_ps(sum.a, 1);
        b_low = _mm256_castps256_ps128(sum.b);
        b_high = _mm256_extractf128_ps(sum.b, 1);
        lanes_0_3 = add_squares(lanes_0_3, a_low);                                /* elements 0-3 */
        lanes_4_7 = add_squares(lanes_4_7, dtype == DTYPE_BF16 ? b_low : a_high); /* 4-7 */
        lanes_0_3 = add_squares(lanes_0_3, dtype == DTYPE_BF16 ? a_high : b_low); /* 8-11 */
        lanes_4_7 = add_squares(lanes_4_7, b_high);                               /* 12-15 */
    }
    for (unsigned leaf = 0; leaf < reduce_shape_leaves(args, shape); leaf++)
        position_run_close(&runs[leaf], &pieces[leaf]);
    four = _mm256_add_pd(lanes_0_3, lanes_4_7);
    two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}
