/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The sum over ranks (docs/numerics.md, sections 1 and 2): one pass over memory reads the ranks' gradients of a range
 * of one parameter and adds their sum to the parameter's fp32 accumulator. The same pass computes the squares for the
 * norm, searches for non-finite values, and computes each rank's position sum.
 *
 * A leaf is the gradient that one rank pushed, or the fp32 sum over a whole subtree of ranks from another node. Several
 * threads may reduce ranges of a parameter at once, because calls share no data.
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
    /* The unit of reduce() and of the norm. Ranges start at a multiple of it, counted from the parameter's start. */
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
    const void *const *leaves;       /* each at the range's first element, in rank order, without absent ranks */
    const struct reduce_join *joins; /* n_leaves - 1, see reduce_joins() */
    float *acc;                      /* at the range's first element; not read if first */
    bool first;                      /* first contribution of this step: acc = 0.0f + sum, else acc += sum */
    size_t n_elems;                  /* may be 0; a multiple of 64 unless the range ends the parameter */
    size_t start_elem;               /* number of the range's first element in the parameter; a multiple of 64 */
    struct undo_slot *undo;          /* NULL: no slot; not used if first, because such a call can be repeated */
    uint64_t undo_elem;              /* the range's first element, in the numbers that the slot counts */
    bool past_caches;                /* if first, stores bypass the caches if possible; acc is not read again soon */
};

struct reduce_result {
    struct exact_sum squares;  /* out: squares of the new acc; replaces the result of an earlier pass over this range */
    struct position_sum *sums; /* in: n_leaves sums, owned by the caller; overwritten with the sums of this range; NULL:
                                  not needed (partial sums from another node) */
    bool nonfinite;            /* out: acc has a NaN or an infinity; reduce_find_nonfinite() finds its leaf */
};

/* The non-finite values of one leaf. */
struct reduce_finding {
    uint64_t n_nan;
    uint64_t n_inf;
    size_t first_elem; /* from the parameter's start; valid when n_nan + n_inf > 0 */
    float first_value; /* NaN, +infinity or -infinity */
};

/*
 * Writes the joins of the tree over `world` ranks (split at the largest power of two below the length, left + right),
 * without the ranks whose present[] is false; present NULL: all are present. Leaves are numbered in rank order over
 * only the present ranks. At most REDUCE_MAX_LEAVES ranks may be present; joins has room for one less.
 *
 * Return: the number of joins: one less than the leaves, or 0 if no rank is present.
 */
unsigned reduce_joins(const bool *present, unsigned world, struct reduce_join *joins);

/*
 * Call it after the process was killed in a reduce of the range with an undo slot. Restores the saved elements and
 * shortens args to the rest of the range, which must still be reduced (n_elems may become 0). The slot's next element
 * must be in the range or at its end. The squares and position sums of the finished part are lost.
 *
 * leaves: room for n_leaves pointers, owned by the caller; args->leaves points to it afterwards.
 */
void reduce_put_back(struct reduce_args *args, const void **leaves);

/*
 * The slow path after a reduce that reported nonfinite. Call it before the leaves are freed. Fills findings[n_leaves].
 * *overflow gets the elements of acc that are not finite although all leaves are finite: their sum exceeded fp32's
 * range, in this pass or, unless args->first, in an earlier one.
 */
void reduce_find_nonfinite(const struct reduce_args *args, struct reduce_finding *findings,
                           struct reduce_finding *overflow);
