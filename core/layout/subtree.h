/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The tree that sums gradients over ranks. It splits n ranks at the largest power of two below n into left + right,
 * down to single ranks. Pure.
 */

/* The most subtrees of one node, which has at most 64 ranks: six at either end of its largest subtree. */
enum { SUBTREE_MAX = 12 };

struct subtree {
    unsigned first, n; /* ranks first to first + n - 1 */
};

/* Finds the largest subtrees of the tree over world ranks that are inside [first, first + n), in rank order. Return:
 * their number, at most SUBTREE_MAX. */
unsigned subtree_find(unsigned world, unsigned first, unsigned n, struct subtree *subtrees);
