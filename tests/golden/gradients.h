/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The gradients that tests and benchmarks push: the same bits as golden.py makes for itself, so that a C
 * program and the golden numbers meet without a file between them.
 *
 * A gradient is a function of where it belongs: seed, step, micro-batch, pass, rank, parameter (all counted
 * from 0; a skipped step counts) and element. Its hash is splitmix64's. The upper 24 bits of the hash are
 * the mantissa, uniform in [-1, 1), the lower 4 bits move it down by up to 15 binades, so that sums round
 * in every way. A loss scale is not multiplied in.
 *
 * Only integer arithmetic and exact fp32 products: the values do not depend on compiler flags.
 */

#ifndef ZEROD_TESTS_GRADIENTS_H
#define ZEROD_TESTS_GRADIENTS_H

#include <stdint.h>
#include <string.h>

/* Initial values are the gradients of place 0, 0, 0, 0 and this seed: the ASCII of "WEIGHTS". */
#define GRADIENT_WEIGHTS UINT64_C(0x57454947485453)

static inline uint64_t gradient_mix(uint64_t h)
{
    h += UINT64_C(0x9E3779B97F4A7C15);
    h = (h ^ (h >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    h = (h ^ (h >> 27)) * UINT64_C(0x94D049BB133111EB);
    return h ^ (h >> 31);
}

/* Where a tensor of gradients belongs. */
struct gradient_place {
    uint64_t seed;
    uint64_t step;
    uint64_t micro;
    uint64_t pass;
    uint64_t rank;
    uint64_t param;
};

static inline uint64_t gradient_key(const struct gradient_place *place)
{
    uint64_t h = gradient_mix(place->seed);

    h = gradient_mix(h ^ place->step);
    h = gradient_mix(h ^ place->micro);
    h = gradient_mix(h ^ place->pass);
    h = gradient_mix(h ^ place->rank);
    return gradient_mix(h ^ place->param);
}

/* The key of a parameter's initial value in the run with this seed. */
static inline uint64_t gradient_weights_key(uint64_t seed, uint64_t param)
{
    struct gradient_place place = {.seed = seed ^ GRADIENT_WEIGHTS, .param = param};

    return gradient_key(&place);
}

/* Element i. */
static inline float gradient_value(uint64_t key, uint64_t i)
{
    uint64_t x = gradient_mix(key ^ i);
    float mantissa = (float)((int32_t)(x >> 40) - (1 << 23));

    return mantissa / (float)(UINT64_C(1) << (23 + (x & 15)));
}

static inline uint32_t gradient_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* Rounds to nearest even; a NaN stays one. */
static inline uint16_t gradient_to_bf16(float value)
{
    uint32_t bits = gradient_bits(value);

    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Rounds to nearest even, with subnormals; a NaN stays one. */
static inline uint16_t gradient_to_fp16(float value)
{
    uint32_t bits = gradient_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t mantissa, kept, rest, half, shift;

    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
    if (magnitude >= 0x47800000) /* 2^16: infinity, whatever the rounding */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x33000000) /* 2^-25, half of the smallest subnormal: zero */
        return (uint16_t)sign;

    if (magnitude >= 0x38800000) { /* 2^-14: normal. The exponent is rebiased, a carry moves into it */
        mantissa = magnitude - (UINT32_C(112) << 23);
        shift = 13;
    } else {
        mantissa = (magnitude & 0x7fffff) | 0x800000;
        shift = 126 - (magnitude >> 23);
    }
    kept = mantissa >> shift;
    rest = mantissa & ((UINT32_C(1) << shift) - 1);
    half = UINT32_C(1) << (shift - 1);
    if (rest > half || (rest == half && (kept & 1)))
        kept++;
    return (uint16_t)(sign | kept);
}

#endif
