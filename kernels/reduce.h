/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The sum over ranks (docs/numerics.md, sections 1 and 2): one pass over memory reads what the ranks pushed
 * for a range of one parameter, adds the sum to the parameter's fp32 accumulator, and in passing takes the
 * squares for the norm, looks for values that are not finite and computes each rank's position sum.
 *
 * A leaf is what one rank pushed, or the fp32 sum over a whole subtree of ranks that came from another node.
 * Ranges of a parameter may be reduced by several threads at once; a call shares nothing with another.
 */

#include "kernels/dtype.h"
#include "kernels/exact.h"
#include "kernels/position_sum.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct undo_slot; /* undo.h */

enum {
    REDUCE_MAX_LEAVES = 64,
    /* The unit of reduce() and of the norm. Ranges start at multiples of it, counted from the parameter's start. */
    REDUCE_RUN_ELEMS = POSITION_RUN_ELEMS,
};

/* One addition of the tree: leaf[dst] += leaf[src]. In the end leaf[0] holds the sum. */
struct reduce_join {
    uint8_t dst;
    uint8_t src;
};

struct reduce_args {
    enum dtype dtype;                /* of all leaves */
    unsigned n_leaves;               /* 1 .. REDUCE_MAX_LEAVES */
    const void *const *leaves;       /* each at the range's first element, in rank order, absent ranks left out */
    const struct reduce_join *joins; /* n_leaves - 1, see reduce_joins() */
    float *acc;                      /* at the range's first element; only written when first */
    bool first;                      /* first contribution of this step: acc = 0.0f + sum, else acc += sum */
    size_t n_elems;                  /* may be 0; a multiple of 64 unless the range ends the parameter */
    size_t start_elem;               /* of the range, from the parameter's start; a multiple of 64 */
    struct undo_slot *undo;          /* NULL: none; not used when first, since that can simply be done again */
    uint64_t undo_elem;              /* the slot's number of the first element */
    bool past_caches;                /* acc is not read again soon: when first, written past the caches if it can be */
};

struct reduce_result {
    struct exact_sum squares;  /* out: of the new acc; replaces what an earlier pass gave for this range */
    struct position_sum *sums; /* in: n_leaves of the caller's, overwritten with this range's; NULL: not
                                  wanted (partial sums from another node) */
    bool nonfinite;            /* out: acc holds a NaN or an infinity; reduce_find_nonfinite() says whose */
};

/* The values of one leaf that are not finite. */
struct reduce_finding {
    uint64_t n_nan;
    uint64_t n_inf;
    size_t first_elem; /* from the parameter's start; valid when n_nan + n_inf > 0 */
    float first_value; /* NaN, +infinity or -infinity */
};

/*
 * The tree over `world` ranks (split at the largest power of two below the length, left + right), without the
 * ranks whose present[] is false; present NULL means all are there. Leaves are numbered in rank order over
 * the present ranks only. At most REDUCE_MAX_LEAVES may be present; joins has room for one less than that.
 *
 * Return: the number of joins; leaves are one more, unless no rank is present.
 */
unsigned reduce_joins(const bool *present, unsigned world, struct reduce_join *joins);

/*
 * After a kill in a reduce of the range with an undo slot: puts back what it has saved, and makes args the rest of the
 * range, which is still to be reduced (n_elems may become 0). The slot's next element must be in the range, or be its
 * end. The squares and position sums of what is done are lost.
 *
 * leaves: n_leaves of the caller's; args points to them afterwards.
 */
void reduce_put_back(struct reduce_args *args, const void **leaves);

/*
 * The slow path after a reduce that reported nonfinite, to be called before the leaves are given back. Fills
 * findings[n_leaves]. Elements of acc that are not finite although all leaves are go to *overflow: their sum
 * left fp32's range, here or, unless args->first, in an earlier pass.
 */
void reduce_find_nonfinite(const struct reduce_args *args, struct reduce_finding *findings,
                           struct reduce_finding *overflow);
