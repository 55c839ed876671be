/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One run of 64 elements of a reduce, in plain C: the tree over the leaves, the accumulator, the squares, the position
 * sums. reduce_run_avx2.h has the same function for x86-64-v3 and above, and explains why it exists. dtype, shape and
 * mode are constants after inlining. This function always writes through the caches.
 */

#include "kernels/convert.h"
#include "kernels/isa.h"
#include "kernels/position_sum_kernel.h"

/* Trees with code of their own. */
enum reduce_shape {
    REDUCE_ONE,  /* g0 */
    REDUCE_TWO,  /* g0 + g1 */
    REDUCE_FOUR, /* (g0 + g1) + (g2 + g3) */
    REDUCE_ANY,  /* along the joins */
    N_REDUCE_SHAPES,
};

/* The destination of a sum. */
enum reduce_mode {
    REDUCE_ADD,       /* acc += sum */
    REDUCE_SET,       /* acc = sum: the first contribution */
    REDUCE_SET_PAST,  /* REDUCE_SET past the caches; acc is aligned to CACHE_LINE_BYTES */
    REDUCE_ADD_SAVED, /* acc += sum, with an undo slot */
    N_REDUCE_MODES,
};

enum {
    CACHE_LINE_BYTES = 64,
};

static always_inline bool reduce_is_first(enum reduce_mode mode)
{
    return mode == REDUCE_SET || mode == REDUCE_SET_PAST;
}

/* Return: the number of leaves, a constant if the shape is a constant other than REDUCE_ANY. */
static always_inline unsigned reduce_shape_leaves(const struct reduce_args *args, enum reduce_shape shape)
{
    static const unsigned n_leaves[N_REDUCE_SHAPES] = {[REDUCE_ONE] = 1, [REDUCE_TWO] = 2, [REDUCE_FOUR] = 4};

    return shape == REDUCE_ANY ? args->n_leaves : n_leaves[shape];
}

static always_inline float reduce_leaf_elem(const void *leaf, size_t i, enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_BF16:
        return f32_from_bf16(((const uint16_t *)leaf)[i]);
    case DTYPE_F16:
        return f32_from_f16(((const uint16_t *)leaf)[i]);
    default:
        return ((const float *)leaf)[i];
    }
}

static always_inline void reduce_run_known(float *restrict acc, const void *const *leaves, enum dtype dtype,
                                           enum reduce_shape shape, bool first)
{
    const void *g0 = leaves[0], *g1 = shape != REDUCE_ONE ? leaves[1] : NULL;
    const void *g2 = shape == REDUCE_FOUR ? leaves[2] : NULL, *g3 = shape == REDUCE_FOUR ? leaves[3] : NULL;

    for (unsigned i = 0; i < REDUCE_RUN_ELEMS; i++) {
        float sum = reduce_leaf_elem(g0, i, dtype);

        if (shape != REDUCE_ONE)
            sum = sum + reduce_leaf_elem(g1, i, dtype);
        if (shape == REDUCE_FOUR)
            sum = sum + (reduce_leaf_elem(g2, i, dtype) + reduce_leaf_elem(g3, i, dtype));
        acc[i] = (first ? 0.0f : acc[i]) + sum;
    }
}

static always_inline void reduce_run_any(float *restrict acc, const void *const *leaves,
                                         const struct reduce_join *joins, unsigned n_leaves, enum dtype dtype,
                                         bool first)
{
    float x[REDUCE_MAX_LEAVES][REDUCE_RUN_ELEMS];

    for (unsigned leaf = 0; leaf < n_leaves; leaf++) {
        for (unsigned i = 0; i < REDUCE_RUN_ELEMS; i++)
            x[leaf][i] = reduce_leaf_elem(leaves[leaf], i, dtype);
    }
    for (unsigned j = 0; j + 1 < n_leaves; j++) {
        float *restrict dst = x[joins[j].dst];
        const float *restrict src = x[joins[j].src];

        for (unsigned i = 0; i < REDUCE_RUN_ELEMS; i++)
            dst[i] = dst[i] + src[i];
    }
    for (unsigned i = 0; i < REDUCE_RUN_ELEMS; i++)
        acc[i] = (first ? 0.0f : acc[i]) + x[0][i];
}

/* Return: the sum of a run's squares, in the order of docs/numerics.md, section 2. */
static always_inline double reduce_run_squares(const float *run)
{
    double lane[8] = {0}, four[4], two[2];

    for (unsigned i = 0; i < REDUCE_RUN_ELEMS; i += 8) {
        for (unsigned k = 0; k < 8; k++)
            lane[k] += (double)run[i + k] * (double)run[i + k];
    }
    for (unsigned k = 0; k < 4; k++)
        four[k] = lane[k] + lane[k + 4];
    for (unsigned k = 0; k < 2; k++)
        two[k] = four[k] + four[k + 2];
    return two[0] + two[1];
}

/*
 * Reduces one run. acc and leaves point to the run's first element; pieces are the leaves' position sums.
 *
 * Return: the sum of squares of the new acc.
 */
static always_inline double reduce_run_plain(const struct reduce_args *args, float *acc, const void *const *leaves,
                                             struct position_piece *pieces, enum dtype dtype, enum reduce_shape shape,
                                             enum reduce_mode mode)
{
    if (shape == REDUCE_ANY)
        reduce_run_any(acc, leaves, args->joins, args->n_leaves, dtype, reduce_is_first(mode));
    else
        reduce_run_known(acc, leaves, dtype, shape, reduce_is_first(mode));
    for (unsigned leaf = 0; leaf < reduce_shape_leaves(args, shape); leaf++)
        position_piece_add(&pieces[leaf], dtype, leaves[leaf], 1);
    return reduce_run_squares(acc);
}
