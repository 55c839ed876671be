/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The 64-bit sum that identifies a pushed gradient. It is recorded for each (parameter, rank, pass), and a push that is
 * repeated after a restart must have the same sum.
 *
 * The gradient is divided into runs of 64 elements, numbered from 0 at the parameter's start; the last run is padded
 * with zero bytes. The bytes of a run are little-endian 64-bit words, eight to a stripe: two stripes in 16-bit types,
 * four in fp32. With all arithmetic modulo 2^64, lane k = 0 .. 7 of run n gets
 *
 *     y = 0;  for each stripe:  y = rotate(y) + word k of the stripe
 *     z = y ^ y >> 29
 *     first[k]  += z
 *     second[k] += (n + 1) * z
 *
 * where rotate() rotates lanes 2i and 2i + 1, as one 128-bit number, right by 40 bits.
 *
 * first[] and second[] are sums over runs, so a gradient may be summed in pieces, by any threads in any order, if each
 * piece starts with a run; the pieces' sums are added. The rotation, by a number of bytes prime to 16, distinguishes
 * the stripes of a run. The shift copies differences that are only in upper bits, such as signs, to lower bits, where
 * the multiplication by an even run number cannot lose them. Without the shift, the sums would not change if the upper
 * words of runs 2 and 4 exchanged +1 and -1. One changed word always changes the sum. Exchanged elements, and blocks
 * that are moved, doubled, stale or partly written, change it except by chance.
 *
 * This is protection against mistakes, not against an adversary.
 */

#include "kernels/dtype.h"

#include <stddef.h>
#include <stdint.h>

enum {
    POSITION_RUN_ELEMS = 64,
};

/* A zeroed struct is an empty sum. */
struct position_sum {
    uint64_t first[8];
    uint64_t second[8];
};

/*
 * Adds n_elems of dtype; the first is start_elem elements (a multiple of 64) after the parameter's start. n_elems is
 * also a multiple of 64, unless the piece ends the parameter. `elems` may have any address. The table in kernels.h has
 * the same function for this machine's instruction set.
 */
void position_sum_update(struct position_sum *sum, enum dtype dtype, const void *elems, size_t n_elems,
                         size_t start_elem);

void position_sum_add(struct position_sum *into, const struct position_sum *from);

/* Return: the sum of a whole gradient of n_bytes. */
uint64_t position_sum_finish(const struct position_sum *sum, uint64_t n_bytes);
