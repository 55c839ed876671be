/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Random numbers without a generator or state: each number is a function of a key and an index, so that a restarted
 * rank draws the same numbers. Uses the mixing function of splitmix64.
 */

#include <stdint.h>

static inline uint64_t random_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Number i of the sequence key, in [0, 1). */
static inline double random_unit(uint64_t key, uint64_t i)
{
    return (double)(random_mix(key ^ random_mix(i)) >> 11) * 0x1p-53;
}
