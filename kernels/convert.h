/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Converts bf16 and fp16 from and to fp32. Widening is exact. Narrowing rounds to nearest even, overflows to infinity,
 * and keeps subnormals. A NaN stays a NaN of the same sign.
 *
 * The element functions are integer arithmetic with at most one fp32 addition, without branches. So compilers turn them
 * into vector code for every instruction set, and the bits are equal everywhere, including NaN payloads. Hardware
 * conversions do not promise equal bits.
 */

#include "kernels/dtype.h"
#include "kernels/element.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Converts n_elems of dtype to or from fp32; DTYPE_F32 copies. The arrays must not overlap. An array of a grouped type
 * (dtype.h) must begin at a group's start. */
void convert_to_f32(float *dst, const void *src, enum dtype dtype, size_t n_elems);
void convert_from_f32(void *dst, const float *src, enum dtype dtype, size_t n_elems);

ELEMENT_FN uint32_t f32_bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

ELEMENT_FN float f32_from_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

ELEMENT_FN float f32_from_bf16(uint16_t h)
{
    return f32_from_bits((uint32_t)h << 16);
}

ELEMENT_FN uint16_t bf16_from_f32(float x)
{
    uint32_t u = f32_bits(x);
    uint32_t rounded = u + 0x7fff + (u >> 16 & 1);

    return (uint16_t)((isnan(x) ? u | 0x400000 : rounded) >> 16);
}

/* Rounds up with a probability equal to the cut-off fraction, if the lower 16 bits of draw are uniform. */
ELEMENT_FN uint16_t bf16_at_random(float x, uint32_t draw)
{
    uint32_t u = f32_bits(x);

    return (uint16_t)((isnan(x) ? u | 0x400000 : u + (draw & 0xffff)) >> 16);
}

ELEMENT_FN float f32_from_f16(uint16_t h)
{
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13; /* exponent and mantissa at their fp32 places */
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t normal = magnitude + (112u << 23); /* bias 127 instead of 15 */
    uint32_t special = magnitude + (224u << 23);
    /* 2^-14 * 1.mantissa - 2^-14 */
    uint32_t subnormal = f32_bits(f32_from_bits(magnitude + (113u << 23)) - 0x1p-14f);
    uint32_t bits = normal;

    bits = (int32_t)magnitude < 1 << 23 ? subnormal : bits;
    bits = (int32_t)magnitude >= 31 << 23 ? special : bits;
    return f32_from_bits(sign | bits);
}

ELEMENT_FN uint16_t f16_from_f32(float x)
{
    uint32_t u = f32_bits(x);
    uint32_t magnitude = u & 0x7fffffff;
    uint32_t sign = u >> 16 & 0x8000;
    /* rounds at bit 13; a carry out of the mantissa raises the exponent; from 65520 on the result is infinity */
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    /* the addition rounds at 2^-24, the unit of fp16's subnormals, which is the last bit of 0.5 in fp32 */
    uint32_t subnormal = f32_bits(f32_from_bits(magnitude) + 0.5f) - f32_bits(0.5f);
    uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
    uint32_t half = normal;

    half = (int32_t)magnitude < 113 << 23 ? subnormal : half;
    half = (int32_t)magnitude >= 143 << 23 ? 0x7c00 : half;
    half = (int32_t)magnitude > 255 << 23 ? nan : half;
    return (uint16_t)(sign | half);
}
