/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A sum of non-negative doubles without any rounding: a fixed-point number wide enough for every value of the norm.
 * Without rounding, any number of threads and nodes may add values and merge sums in any order: exact_sum_round()
 * returns equal bits.
 *
 * The number is kept as base-2^32 digits in 64-bit limbs, limb[0] counting units of 2^-352. The upper half of a limb
 * collects carries, so an addition changes only three limbs. Carries are moved to the next limbs every 2^31 additions
 * and before the number is read.
 *
 * Values must be 0 or in [2^-300, 2^311). Sums of squares of fp32 are in this range: the smallest is 2^-298, and the
 * largest sum over 64 elements is below 2^262. There is headroom for 2^48 values of 2^311. An infinity or NaN sets
 * `nonfinite`, a NaN also `nan`. Both flags stay set, and a merge passes them on. A zeroed struct is an empty sum. The
 * struct may be copied and sent as bytes. After exact_sum_carry(), equal sums have equal bytes.
 *
 * There are no locks, so only one thread at a time may use a sum.
 */

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum {
    EXACT_N_LIMBS = 23,
    EXACT_MIN_EXPONENT = 723,  /* biased exponent of 2^-300, whose mantissa ends at 2^-352 */
    EXACT_MAX_EXPONENT = 1333, /* biased exponent of 2^310 */
};

/* The mantissa of a normal double's bits as an integer. */
#define EXACT_MANTISSA(bits) (((bits) & ((UINT64_C(1) << 52) - 1)) | UINT64_C(1) << 52)

struct exact_sum {
    uint64_t limb[EXACT_N_LIMBS];
    uint32_t n_deferred; /* every limb is below (n_deferred + 1) * 2^32 */
    bool nonfinite, nan;
    uint8_t zero[2]; /* no padding, so that memcmp() works */
};

void exact_sum_carry(struct exact_sum *sum);
void exact_sum_merge(struct exact_sum *into, const struct exact_sum *from);
bool exact_sum_is_zero(const struct exact_sum *sum); /* false if nonfinite is set */

/* Return: true if the sum is at least 2^exponent (-352 to 383); for a sum at most 31 powers of two below, true or
 * false. */
bool exact_sum_may_reach(const struct exact_sum *sum, int exponent);

/* Return: the sum rounded once to the nearest double, ties to even; infinity if a value was infinite, NaN if a value
 * was NaN. */
double exact_sum_round(const struct exact_sum *sum);

/* Adds the rare values: 0, infinities, NaN. Any other value out of range is a caller's mistake and asserts. */
void exact_sum_add_special(struct exact_sum *sum, double value);

static inline void exact_sum_reset(struct exact_sum *sum)
{
    memset(sum, 0, sizeof(*sum));
}

/* Adds integer * 2^(position - 352). position at most EXACT_MAX_EXPONENT - EXACT_MIN_EXPONENT. */
static inline void exact_sum_add_integer(struct exact_sum *sum, uint64_t integer, unsigned position)
{
    uint64_t *limb = sum->limb + position / 32, low, high;

    position %= 32;
    low = integer << position;
    high = integer >> 1 >> (63 - position);
    limb[0] += (uint32_t)low;
    limb[1] += low >> 32;
    limb[2] += high;
    if (++sum->n_deferred == UINT32_C(1) << 31)
        exact_sum_carry(sum);
}

static inline void exact_sum_add(struct exact_sum *sum, double value)
{
    uint64_t bits, exponent;

    memcpy(&bits, &value, sizeof(bits));
    exponent = bits >> 52; /* includes the sign, so a negative value is out of range, too */
    if (exponent - EXACT_MIN_EXPONENT > EXACT_MAX_EXPONENT - EXACT_MIN_EXPONENT) {
        exact_sum_add_special(sum, value);
        return;
    }
    exact_sum_add_integer(sum, EXACT_MANTISSA(bits), (unsigned)(exponent - EXACT_MIN_EXPONENT));
}

/*
 * For inner loops: adds mantissas by exponent, with one integer addition per value and no branch, and adds them to a
 * sum later. The values must be sums of squares of fp32, which may be infinite or NaN; this is not checked. The caller
 * flushes the bins after at most EXACT_BINS_MAX_ADDS values. The struct has about 16 KiB, but only a few words are
 * used.
 */
enum {
    EXACT_BINS_MAX_ADDS = 2048,
};

struct exact_bins {
    uint64_t bin[2048]; /* by biased exponent */
};

static inline void exact_bins_add(struct exact_bins *bins, double value)
{
    uint64_t bits;

    memcpy(&bits, &value, sizeof(bits));
    bins->bin[bits >> 52 & 0x7ff] += EXACT_MANTISSA(bits);
}

void exact_bins_init(struct exact_bins *bins);

/* Adds the bins to sum and empties them. For infinities and NaNs it sets only `nonfinite`, because a bin does not
 * distinguish them; the caller sets `nan`. */
void exact_bins_flush(struct exact_bins *bins, struct exact_sum *sum);
