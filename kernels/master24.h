/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Master weights in 24 bits (docs/numerics.md, section 8): a bf16 weight and one more byte. The byte is the distance of
 * the master from the weight, in 1/256 of the weight's last digit. The weight is always the master rounded to nearest,
 * so the byte is at most 127 in either direction. A master halfway between two weights cannot be stored. Integer
 * arithmetic gives equal bits everywhere.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/convert.h"
#include "kernels/element.h"

enum {
    MASTER24_GROUP_ELEMS = 64, /* elements that share their draws */
    MASTER24_DRAWS = MASTER24_GROUP_ELEMS / 4,
    MASTER24_HALF = 128,
    MASTER24_MOST = 127,
};

/* The byte of x, rounded to nearest. weight: bf16_from_f32(x). For a NaN it is 0. */
ELEMENT_FN int8_t master24_nearest_lower(float x, uint16_t weight)
{
    int32_t lower = (int32_t)(f32_bits(x) - ((uint32_t)weight << 16) + MASTER24_HALF) >> 8;

    lower = lower > MASTER24_MOST ? MASTER24_MOST : lower;
    lower = lower < -MASTER24_MOST ? -MASTER24_MOST : lower;
    return (int8_t)(isnan(x) ? 0 : lower);
}

/*
 * Nine random bits for the i-th element of a group. draw: the group has MASTER24_DRAWS of them; element i uses number
 * i % MASTER24_DRAWS. The last of an element's nine bits is the first bit of another element.
 */
ELEMENT_FN uint32_t master24_round(uint32_t draw, size_t i)
{
    const unsigned shift = 8 * (unsigned)(i / MASTER24_DRAWS);

    return (draw >> shift | draw << (32 - shift) % 32) & 0x1ff;
}

/*
 * Rounds x stochastically. round: from master24_round(). Eight of its bits round x. If the result cannot be stored, the
 * ninth bit chooses one of its two neighbours. Return: 24 bits; master24_weight() and master24_lower() extract the
 * parts.
 */
ELEMENT_FN uint32_t master24_at_random(float x, uint32_t round)
{
    uint32_t u = f32_bits(x), bits = (u + (round & 0xff)) >> 8;

    bits += (bits & 0xff) == MASTER24_HALF ? (round >> 8) * 2 - 1 : 0;
    return isnan(x) ? (u | 0x400000) >> 16 << 8 : bits;
}

ELEMENT_FN uint16_t master24_weight(uint32_t bits)
{
    return (uint16_t)((bits + MASTER24_HALF) >> 8);
}

ELEMENT_FN int8_t master24_lower(uint32_t bits)
{
    return (int8_t)(uint8_t)bits;
}

ELEMENT_FN float master24_value(uint16_t weight, int8_t lower)
{
    return f32_from_bits(((uint32_t)weight << 16) + ((uint32_t)lower << 8));
}

/* The addresses of masters. */
struct master24 {
    uint16_t *weights;
    int8_t *lower;
};

#ifndef __cplusplus

/* Converts n elements to and from fp32, rounded to nearest. The arrays do not overlap. */
static inline void master24_to_f32(float *restrict dst, struct master24 src, size_t n)
{
    const uint16_t *restrict weights = src.weights;
    const int8_t *restrict lower = src.lower;

    for (size_t i = 0; i < n; i++)
        dst[i] = master24_value(weights[i], lower[i]);
}

/* Converts only the bytes. The weights are bf16_from_f32() of the same elements. */
static inline void master24_lower_from_f32(int8_t *restrict lower, const float *restrict src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        lower[i] = master24_nearest_lower(src[i], bf16_from_f32(src[i]));
}

static inline void master24_from_f32(struct master24 dst, const float *restrict src, size_t n)
{
    uint16_t *restrict weights = dst.weights;

    for (size_t i = 0; i < n; i++)
        weights[i] = bf16_from_f32(src[i]);
    master24_lower_from_f32(dst.lower, src, n);
}

#endif
