/* SPDX-License-Identifier: Apache-2.0 */
/* Exact sums: carrying, merging and rounding of the fixed-point number. */

#include "kernels/exact.h"

#include <assert.h>
#include <math.h>

_Static_assert(sizeof(struct exact_sum) == 8 * EXACT_N_LIMBS + 8, "struct exact_sum has no padding");

enum {
    EXACT_UNIT_EXPONENT = -352, /* limb[0] counts units of 2^-352 */
};

void exact_sum_carry(struct exact_sum *sum)
{
    uint64_t carry = 0;

    for (unsigned i = 0; i < EXACT_N_LIMBS; i++) {
        carry += sum->limb[i];
        sum->limb[i] = (uint32_t)carry;
        carry >>= 32;
    }
    assert(carry == 0);
    sum->n_deferred = 0;
}

void exact_sum_merge(struct exact_sum *into, const struct exact_sum *from)
{
    if ((uint64_t)into->n_deferred + from->n_deferred + 1 >= UINT32_C(1) << 31) {
        struct exact_sum carried = *from;

        exact_sum_carry(&carried);
        exact_sum_carry(into);
        for (unsigned i = 0; i < EXACT_N_LIMBS; i++)
            into->limb[i] += carried.limb[i];
        into->n_deferred = 1;
    } else {
        for (unsigned i = 0; i < EXACT_N_LIMBS; i++)
            into->limb[i] += from->limb[i];
        into->n_deferred += from->n_deferred + 1;
    }
    into->nonfinite |= from->nonfinite;
    into->nan |= from->nan;
}

bool exact_sum_is_zero(const struct exact_sum *sum)
{
    uint64_t any = sum->nonfinite;

    for (unsigned i = 0; i < EXACT_N_LIMBS; i++)
        any |= sum->limb[i];
    return any == 0;
}

bool exact_sum_may_reach(const struct exact_sum *sum, int exponent)
{
    struct exact_sum carried = *sum;
    uint64_t found = sum->nonfinite;

    exact_sum_carry(&carried);
    for (unsigned i = (unsigned)(exponent + 352) / 32; i < EXACT_N_LIMBS; i++)
        found |= carried.limb[i];
    return found;
}

double exact_sum_round(const struct exact_sum *sum)
{
    struct exact_sum carried = *sum;
    const uint64_t *limb = carried.limb;
    uint64_t window, rest;
    unsigned top = EXACT_N_LIMBS, shift;
    bool sticky = false;

    if (sum->nonfinite)
        return sum->nan ? NAN : INFINITY;

    exact_sum_carry(&carried);
    do {
        if (top-- == 0)
            return 0;
    } while (limb[top] == 0);

    /* window holds the 64 highest bits of the number, the highest of them set; sticky has the bits below */
    shift = (unsigned)__builtin_clzll(limb[top]) - 32;
    window = limb[top] << 32 | (top >= 1 ? limb[top - 1] : 0);
    rest = top >= 2 ? limb[top - 2] : 0;
    window = window << shift | rest >> (32 - shift);
    sticky = (uint32_t)(rest << shift) != 0;
    for (unsigned i = 0; i + 2 < top; i++)
        sticky |= limb[i] != 0;

    /* 53 of the 64 bits remain: above half rounds up, exactly half rounds to even */
    rest = window & 0x7ff;
    window >>= 11;
    window += rest > 0x400 || (rest == 0x400 && (sticky || (window & 1)));
    return ldexp((double)window, EXACT_UNIT_EXPONENT + 32 * ((int)top - 1) + 11 - (int)shift);
}

void exact_sum_add_special(struct exact_sum *sum, double value)
{
    if (value == 0)
        return;
    assert(!isfinite(value));
    sum->nonfinite = true;
    sum->nan |= isnan(value);
}

enum {
    EXACT_NONFINITE_EXPONENT = 2047,
};

void exact_bins_init(struct exact_bins *bins)
{
    memset(bins->bin + EXACT_MIN_EXPONENT, 0, (EXACT_MAX_EXPONENT - EXACT_MIN_EXPONENT + 1) * sizeof(bins->bin[0]));
    bins->bin[EXACT_NONFINITE_EXPONENT] = 0;
    bins->bin[0] = 0; /* counts zeroes; not used */
}

void exact_bins_flush(struct exact_bins *bins, struct exact_sum *sum)
{
    for (unsigned e = EXACT_MIN_EXPONENT; e <= EXACT_MAX_EXPONENT; e++) {
        if (bins->bin[e] == 0)
            continue;
        exact_sum_add_integer(sum, bins->bin[e], e - EXACT_MIN_EXPONENT);
        bins->bin[e] = 0;
    }
    if (bins->bin[EXACT_NONFINITE_EXPONENT] != 0)
        sum->nonfinite = true;
    bins->bin[EXACT_NONFINITE_EXPONENT] = 0;
}
