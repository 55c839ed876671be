/* SPDX-License-Identifier: Apache-2.0 */
/* Position sums of one gradient: adds partial sums, and computes the final 64-bit value. */

#include "kernels/position_sum.h"

#include <xxhash.h>

void position_sum_add(struct position_sum *into, const struct position_sum *from)
{
    for (unsigned k = 0; k < 8; k++) {
        into->first[k] += from->first[k];
        into->second[k] += from->second[k];
    }
}

uint64_t position_sum_finish(const struct position_sum *sum, uint64_t n_bytes)
{
    uint64_t message[17];

    for (unsigned k = 0; k < 8; k++) {
        message[k] = sum->first[k];
        message[8 + k] = sum->second[k];
    }
    message[16] = n_bytes;
    return XXH3_64bits(message, sizeof(message));
}
