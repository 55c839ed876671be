/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Moments in 8 bits (docs/numerics.md, section 6): groups of 64 elements that share an exponent, as in the OCP's
 * microscaling formats. An element is a small floating-point number relative to that exponent:
 *
 *     DTYPE_SIGNED8    exp_avg      sign, 4 bits of exponent, 3 of mantissa
 *     DTYPE_UNSIGNED8  exp_avg_sq         5 bits of exponent, 3 of mantissa
 *
 * A code is the upper bits of an fp32 number minus the shared exponent. Widening and narrowing are integer arithmetic
 * with equal bits everywhere. Widening is exact: narrowing a widened group gives the same group.
 *
 * Groups are counted from the parameter's start. Parameters and partitions begin at multiples of LAYOUT_ALIGN_ELEMS in
 * their bucket, so each group is in a single partition, and the bits do not depend on the number of ranks, the stage or
 * the bucket.
 */

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/convert.h"
#include "kernels/dtype.h"
#include "kernels/element.h"

/* In memory: 68 bytes, at a multiple of 4. A group of zeroes has only zero bytes. */
struct group8 {
    uint32_t exponent; /* the exponent, as in fp32, of the elements with code 1 to 7 */
    uint8_t codes[GROUP8_ELEMS];
};

static_assert(sizeof(struct group8) == GROUP8_BYTES, "groups follow each other without a gap");

enum {
    GROUP8_SHIFT = 20,                     /* bits of an fp32 number that a code lacks */
    GROUP8_HALF = 1 << (GROUP8_SHIFT - 1), /* added before the bits are cut off, to round to nearest */
    GROUP8_MANTISSA_BITS = 23 - GROUP8_SHIFT,
    GROUP8_MOST = 0x7f7fffff >> GROUP8_SHIFT, /* the largest upper bits, so that no element becomes infinite */
    GROUP8_DRAWS = GROUP8_ELEMS / 2,
    GROUP8_SIGNED_EXPONENTS = 15, /* number of exponents above the shared one */
    GROUP8_UNSIGNED_EXPONENTS = 31,
};

/*
 * Return: the random number that stochastic rounding adds to the bits of a group's i-th element before it cuts off the
 * lower bits. draw: draw number i % GROUP8_DRAWS of the group. The second half of the group uses the complements of the
 * draws. exp_avg uses the lower bits of a draw, exp_avg_sq the upper bits.
 */
ELEMENT_FN uint32_t group8_round(uint32_t draw, size_t i, enum dtype dtype)
{
    draw = i < GROUP8_DRAWS ? draw : ~draw;
    return dtype == DTYPE_SIGNED8 ? draw & (2 * GROUP8_HALF - 1) : draw >> (32 - GROUP8_SHIFT);
}

/* The upper bits of |x|, rounded. round: GROUP8_HALF (ties away from zero), or group8_round(). */
ELEMENT_FN uint16_t group8_upper(float x, uint32_t round)
{
    uint32_t upper = ((f32_bits(x) & 0x7fffffff) + round) >> GROUP8_SHIFT;

    return (uint16_t)(upper > GROUP8_MOST ? (uint32_t)GROUP8_MOST : upper);
}

/* The shared exponent of a group. largest: the largest upper bits of its elements. */
ELEMENT_FN uint16_t group8_exponent(uint16_t largest, int n_exponents)
{
    int exponent = (largest >> GROUP8_MANTISSA_BITS) - n_exponents;

    return (uint16_t)(exponent > 0 ? exponent : 0);
}

/* An element that is too small for the group's exponent gets code 0, which is zero. */
ELEMENT_FN uint8_t group8_signed_code(uint16_t upper, uint16_t exponent, bool negative)
{
    int code = upper - (exponent << GROUP8_MANTISSA_BITS);

    return (uint8_t)((code > 0 ? code : 0) | (int)negative << 7);
}

/*
 * An element that is too small for the group's exponent gets code 1, the smallest number. Only zero gets code 0,
 * because updates divide by the element's root.
 */
ELEMENT_FN uint8_t group8_unsigned_code(uint16_t upper, uint16_t exponent, bool is_zero)
{
    int code = upper - (exponent << GROUP8_MANTISSA_BITS), least = !is_zero;

    return (uint8_t)(code > least ? code : least);
}

ELEMENT_FN float group8_signed_value(uint8_t code, uint32_t exponent)
{
    uint32_t magnitude = code & 0x7f, bits = (exponent << 23) + (magnitude << GROUP8_SHIFT);

    return f32_from_bits((magnitude ? bits : 0) | (uint32_t)(code & 0x80) << 24);
}

ELEMENT_FN float group8_unsigned_value(uint8_t code, uint32_t exponent)
{
    uint32_t bits = (exponent << 23) + ((uint32_t)code << GROUP8_SHIFT);

    return f32_from_bits(code ? bits : 0);
}
