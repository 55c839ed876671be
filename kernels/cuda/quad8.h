/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Moments in 8 bits (kernels/group8.h) on a GPU. A thread has four elements of a group, and sixteen neighbouring
 * threads have the whole group. They find the group's exponent with sixteen_threads (block.h). */

#include "kernels/cuda/block.h"
#include "kernels/group8.h"
#include "kernels/update_element.h"

static_assert(GROUP8_ELEMS == 4 * 16, "four elements a thread");

/* Four elements of a group in the types of memory. The first code is in the lowest byte. */
struct quad8 {
    uint32_t exponent;
    uint32_t codes;
};

/* i: the number of the first of the four elements, from the array's start. */
DEVICE_FN uint32_t *quad8_codes(struct group8 *group, uint32_t i)
{
    return reinterpret_cast<uint32_t *>(group->codes + i % GROUP8_ELEMS);
}

DEVICE_FN struct quad8 quad8_load(void *groups, uint32_t i)
{
    struct group8 *const group = static_cast<struct group8 *>(groups) + i / GROUP8_ELEMS;

    return {group->exponent, *quad8_codes(group, i)};
}

/* Stores the codes; the group's first thread stores the exponent. */
DEVICE_FN void quad8_store(void *groups, uint32_t i, const struct quad8 &four)
{
    struct group8 *const group = static_cast<struct group8 *>(groups) + i / GROUP8_ELEMS;

    if (i % GROUP8_ELEMS == 0)
        group->exponent = four.exponent;
    *quad8_codes(group, i) = four.codes;
}

DEVICE_FN uint8_t quad8_code(const struct quad8 &four, unsigned k)
{
    return static_cast<uint8_t>(four.codes >> 8 * k);
}

template <enum dtype dtype> DEVICE_FN float quad8_value(const struct quad8 &four, unsigned k)
{
    return dtype == DTYPE_SIGNED8 ? group8_signed_value(quad8_code(four, k), four.exponent)
                                  : group8_unsigned_value(quad8_code(four, k), four.exponent);
}

/* Four rounded elements before the exponent is known: an element's upper bits, and a flag above them. For exp_avg the
 * flag means that the element is negative; for exp_avg_sq, that it is zero. */
struct rounded8 {
    uint16_t x[4];
};

enum {
    ROUNDED8_FLAG = 15,
    ROUNDED8_UPPER = (1 << ROUNDED8_FLAG) - 1,
};

static_assert(static_cast<int>(GROUP8_MOST) <= ROUNDED8_UPPER, "the flag is above the upper bits");

/* Rounds the k-th of the four elements from i on. draw: as for group8_round(). */
template <enum dtype dtype> DEVICE_FN void round8(struct rounded8 *four, unsigned k, float x, uint32_t draw, uint32_t i)
{
    const unsigned flag = dtype == DTYPE_SIGNED8 ? f32_bits(x) >> 31 : x == 0;
    const unsigned upper = group8_upper(x, group8_round(draw, i % GROUP8_ELEMS + k, dtype));

    four->x[k] = static_cast<uint16_t>(flag << ROUNDED8_FLAG | upper);
}

/* The largest upper bits of the first n elements. */
DEVICE_FN uint16_t largest8(const struct rounded8 &four, uint32_t n)
{
    uint16_t largest = 0;

#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        const uint16_t upper = four.x[k] & ROUNDED8_UPPER;

        largest = k < n && upper > largest ? upper : largest;
    }
    return largest;
}

/* Encodes the first n elements and copies the other codes from `old`. largest: the largest upper bits of the whole
 * group. */
template <enum dtype dtype>
DEVICE_FN struct quad8 encode8(const struct rounded8 &four, uint16_t largest, const struct quad8 &old, uint32_t n)
{
    const uint16_t exponent = group8_exponent(
        largest, dtype == DTYPE_SIGNED8 ? static_cast<int>(GROUP8_SIGNED_EXPONENTS) : GROUP8_UNSIGNED_EXPONENTS);
    struct quad8 out = {exponent, 0};

#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        const uint16_t upper = four.x[k] & ROUNDED8_UPPER;
        const bool flag = four.x[k] >> ROUNDED8_FLAG;
        const uint32_t code = dtype == DTYPE_SIGNED8 ? group8_signed_code(upper, exponent, flag)
                                                     : group8_unsigned_code(upper, exponent, flag);

        out.codes |= (k < n ? code : quad8_code(old, k)) << 8 * k;
    }
    return out;
}
