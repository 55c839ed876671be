/* SPDX-License-Identifier: Apache-2.0 */

/* Finds the subtrees of the summation tree that cover a node's ranks. Splits like the sum over all ranks. */

#include "core/layout/subtree.h"

#include <assert.h>

static unsigned find_subtrees(unsigned lo, unsigned n, struct subtree within, struct subtree *subtrees,
                              unsigned n_found)
{
    unsigned end = within.first + within.n, left = 1;

    if (n == 0 || lo + n <= within.first || lo >= end)
        return n_found;
    if (lo >= within.first && lo + n <= end) {
        assert(n_found < SUBTREE_MAX);
        subtrees[n_found] = (struct subtree){.first = lo, .n = n};
        return n_found + 1;
    }
    while (left * 2 < n)
        left *= 2;
    assert(left < n); /* one rank is either inside or outside, so it is not split */
    n_found = find_subtrees(lo, left, within, subtrees, n_found);
    return find_subtrees(lo + left, n - left, within, subtrees, n_found);
}

unsigned subtree_find(unsigned world, unsigned first, unsigned n, struct subtree *subtrees)
{
    return find_subtrees(0, world, (struct subtree){first, n}, subtrees, 0);
}
