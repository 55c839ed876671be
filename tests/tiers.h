/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * How much of a unit test is run. scripts/test --full (ZEROD_TESTS=full) runs all of it; other runs do enough to notice
 * that a change broke something. tests/README.md describes these tiers.
 */

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static inline bool tests_full(void)
{
    const char *tier = getenv("ZEROD_TESTS");

    return tier && strcmp(tier, "full") == 0;
}

/* Return: how many of n rounds, seeds or settings to run. With --full all n, else the first half. */
static inline unsigned tests_some(unsigned n)
{
    return tests_full() ? n : (n + 1) / 2;
}

/* Return: how many seeds of a model to run. ZEROD_TEST_SEEDS if set; else `all` with --full, or `usual` without. */
static inline unsigned tests_seeds(unsigned usual, unsigned all)
{
    const char *asked = getenv("ZEROD_TEST_SEEDS");

    if (asked && atoi(asked) > 0)
        return (unsigned)atoi(asked);
    return tests_full() ? all : usual;
}
