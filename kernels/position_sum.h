/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The 64-bit sum by which zerod tells one pushed gradient from another: it is recorded for each (parameter,
 * rank, pass), and a push that is repeated after a restart must give the same one.
 *
 * The gradient is taken in runs of 64 elements, counted from 0 at the parameter's start, the last one padded
 * with zero bytes. The bytes of a run are little-endian 64-bit words, eight to a stripe: two stripes in
 * 16-bit types, four in fp32. With all arithmetic modulo 2^64, lane k = 0 .. 7 of run n gets
 *
 *     y = 0;  for each stripe:  y = rotate(y) + word k of the stripe
 *     z = y ^ y >> 29
 *     first[k]  += z
 *     second[k] += (n + 1) * z
 *
 * where rotate() turns lanes 2i and 2i + 1, taken as one 128-bit number, right by 40 bits.
 *
 * Both are sums over runs, so a gradient may be summed in pieces, by any threads in any order, as long as
 * each piece starts with a run; the pieces are added. The rotation, by a number of bytes prime to 16, tells
 * the stripes of a run apart. The shift folds differences in upper bits only, such as signs, down to where
 * the multiplication by an even run number cannot lose them; a plain first and second sum would not notice
 * that the upper words of runs 2 and 4 exchanged +1 and -1. One changed word is noticed with certainty;
 * exchanged elements, moved, doubled, torn or stale blocks but for chance.
 *
 * This is protection against mistakes, not against an adversary.
 */

#include "kernels/dtype.h"

#include <stddef.h>
#include <stdint.h>

enum {
    POSITION_RUN_ELEMS = 64,
};

/* A zeroed struct is the sum of nothing. */
struct position_sum {
    uint64_t first[8];
    uint64_t second[8];
};

/*
 * Adds n_elems of dtype, the first of them start_elem elements (a multiple of 64) after the parameter's
 * start. n_elems is a multiple of 64 too, unless the piece ends the parameter. `elems` may lie at any
 * address. The table in kernels.h has the same function in the instruction set of this machine.
 */
void position_sum_update(struct position_sum *sum, enum dtype dtype, const void *elems, size_t n_elems,
                         size_t start_elem);

void position_sum_add(struct position_sum *into, const struct position_sum *from);

/* Return: the sum of a whole gradient of n_bytes. */
uint64_t position_sum_finish(const struct position_sum *sum, uint64_t n_bytes);
