/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Shared by tests of kernels: sizes to test, random bits, and simple reference implementations. */

#include "core/base/base.h"
#include "kernels/convert.h"
#include "kernels/position_sum.h"

#include <math.h>
#include <string.h>

static const size_t sizes[] = {0, 1, 7, 8, 9, 22, 63, 64, 65, 127, 128, 129, 1000, 1024, 100003};

/* Random bits: splitmix64, one state per test so that a failure repeats. */
static inline uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static inline bool same(float a, float b)
{
    return (isnan(a) && isnan(b)) || f32_bits(a) == f32_bits(b);
}

/* Return: the value of a 16-bit number, computed from its fields. */
static inline double widen_reference(uint16_t h, enum dtype dtype)
{
    int digits = dtype == DTYPE_BF16 ? 7 : 10, bias = dtype == DTYPE_BF16 ? 127 : 15;
    int exponent = (h & 0x7fff) >> digits, mantissa = h & ((1 << digits) - 1);
    double magnitude = ldexp(mantissa + (exponent > 0 ? 1 << digits : 0), MAX(exponent, 1) - bias - digits);

    if (exponent == 2 * bias + 1)
        magnitude = mantissa ? (double)NAN : INFINITY;
    return h & 0x8000 ? -magnitude : magnitude;
}

/*
 * Rounds an array to 8 bits and back, as in section 6 of docs/numerics.md. draws has 20 bits for each element; NULL
 * rounds to nearest.
 */
static inline void in_groups_reference(float *values, size_t n, enum dtype dtype, const uint32_t *draws)
{
    const double most = ldexp(1.875, 127);

    for (size_t at = 0; at < n; at += 64) {
        size_t end = MIN(n, at + 64);
        double rounded[64], largest = 0, least;
        int field, exponent;

        for (size_t i = at; i < end; i++) {
            double x = isfinite(values[i]) ? fabs((double)values[i]) : most;
            double digits = x < 0x1p-126 ? 0x1p-129 : ldexp(1, ilogb(x) - 3);

            rounded[i - at] = MIN(digits * floor(x / digits + (draws ? draws[i] * 0x1p-20 : 0.5)), most);
            largest = MAX(largest, rounded[i - at]);
        }
        field = largest < 0x1p-126 ? 0 : ilogb(largest) + 127;
        exponent = MAX(field - (dtype == DTYPE_SIGNED8 ? 15 : 31), 0);
        least = exponent == 0 ? 0x1p-129 : ldexp(1.125, exponent - 127);
        for (size_t i = at; i < end; i++) {
            double kept = rounded[i - at] < least ? 0 : rounded[i - at];

            if (dtype == DTYPE_UNSIGNED8 && values[i] != 0)
                kept = MAX(kept, least);
            values[i] = dtype == DTYPE_SIGNED8 ? copysignf((float)kept, values[i]) : (float)kept;
        }
    }
}

/* Return: the position sum as position_sum.h defines it. */
static inline struct position_sum position_reference(enum dtype dtype, const void *elems, size_t n_elems)
{
    const size_t run_bytes = 64 * dtype_size(dtype), n_bytes = n_elems * dtype_size(dtype);
    struct position_sum sum = {0};

    for (size_t at = 0; at < n_bytes; at += run_bytes) {
        uint64_t words[32] = {0}, y[8] = {0};

        memcpy(words, (const char *)elems + at, MIN(run_bytes, n_bytes - at));
        for (size_t stripe = 0; stripe < run_bytes / 64; stripe++) {
            for (int i = 0; i < 8; i += 2) {
                unsigned __int128 pair = (unsigned __int128)y[i + 1] << 64 | y[i];

                pair = pair >> 40 | pair << 88;
                y[i] = (uint64_t)pair + words[8 * stripe + (size_t)i];
                y[i + 1] = (uint64_t)(pair >> 64) + words[8 * stripe + (size_t)i + 1];
            }
        }
        for (int i = 0; i < 8; i++) {
            sum.first[i] += y[i] ^ y[i] >> 29;
            sum.second[i] += (at / run_bytes + 1) * (y[i] ^ y[i] >> 29);
        }
    }
    return sum;
}
