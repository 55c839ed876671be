/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The tree along which gradients are summed over ranks: split at the largest power of two below the number of ranks,
 * left + right, down to single ranks. Pure.
 */

/* Subtrees of one node, which has at most 64 ranks: at most six at either end of the largest subtree that they hold. */
enum { SUBTREE_MAX = 12 };

struct subtree {
    unsigned first, n; /* ranks */
};

/* The largest subtrees of the tree over world ranks that lie inside [first, first + n). Return: how many, in rank
 * order; at most SUBTREE_MAX. */
unsigned subtree_find(unsigned world, unsigned first, unsigned n, struct subtree *subtrees);
