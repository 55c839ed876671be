/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * How much of a unit test is run: all of it by scripts/test --full (ZEROD_TESTS=full), else enough to notice that a
 * change broke something. tests/README.md has the tiers.
 */

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static inline bool tests_full(void)
{
    const char *tier = getenv("ZEROD_TESTS");

    return tier && strcmp(tier, "full") == 0;
}

/* How many of n rounds, seeds or settings to run: all, or the first half. */
static inline unsigned tests_some(unsigned n)
{
    return tests_full() ? n : (n + 1) / 2;
}

/* The number of seeds of a model: ZEROD_TEST_SEEDS, or usual, or in full all. */
static inline unsigned tests_seeds(unsigned usual, unsigned all)
{
    const char *asked = getenv("ZEROD_TEST_SEEDS");

    if (asked && atoi(asked) > 0)
        return (unsigned)atoi(asked);
    return tests_full() ? all : usual;
}
