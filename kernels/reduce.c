/* SPDX-License-Identifier: Apache-2.0 */
/* The tree of a reduction, and the search for non-finite values. */

#include "kernels/reduce.h"

#include "kernels/convert.h"
#include "kernels/undo.h"

#include <assert.h>
#include <math.h>

/* The tree while it is written: n_joins and n_leaves count the joins and leaves that exist so far. */
struct tree {
    const bool *present;
    struct reduce_join *joins;
    unsigned n_joins;
    unsigned n_leaves;
};

/* Return: the leaf that will hold the sum of ranks [begin, end), or -1 if no rank of them is present. */
static int tree_add_range(struct tree *tree, unsigned begin, unsigned end)
{
    unsigned half = 1;
    int left, right;

    if (end - begin == 1) {
        if (tree->present && !tree->present[begin])
            return -1;
        assert(tree->n_leaves < REDUCE_MAX_LEAVES);
        return (int)tree->n_leaves++;
    }
    while (half * 2 < end - begin)
        half *= 2;
    left = tree_add_range(tree, begin, begin + half);
    right = tree_add_range(tree, begin + half, end);
    if (left < 0 || right < 0)
        return left < 0 ? right : left;
    tree->joins[tree->n_joins++] = (struct reduce_join){.dst = (uint8_t)left, .src = (uint8_t)right};
    return left;
}

unsigned reduce_joins(const bool *present, unsigned world, struct reduce_join *joins)
{
    struct tree tree = {.present = present, .joins = joins};

    if (world > 0)
        tree_add_range(&tree, 0, world);
    return tree.n_joins;
}

static float leaf_elem(const struct reduce_args *args, unsigned leaf, size_t i)
{
    switch (args->dtype) {
    case DTYPE_F32:
        return ((const float *)args->leaves[leaf])[i];
    case DTYPE_BF16:
        return f32_from_bf16(((const uint16_t *)args->leaves[leaf])[i]);
    default:
        return f32_from_f16(((const uint16_t *)args->leaves[leaf])[i]);
    }
}

static void finding_count(struct reduce_finding *finding, float value, size_t elem)
{
    if (finding->n_nan + finding->n_inf == 0) {
        finding->first_elem = elem;
        finding->first_value = value;
    }
    if (isnan(value))
        finding->n_nan++;
    else
        finding->n_inf++;
}

void reduce_find_nonfinite(const struct reduce_args *args, struct reduce_finding *findings,
                           struct reduce_finding *overflow)
{
    *overflow = (struct reduce_finding){0};
    for (unsigned leaf = 0; leaf < args->n_leaves; leaf++)
        findings[leaf] = (struct reduce_finding){0};

    for (size_t i = 0; i < args->n_elems; i++) {
        bool from_leaf = false;

        /* an infinity or NaN of any leaf survives every addition, so a finite sum means that all leaves are finite */
        if (isfinite(args->acc[i]))
            continue;
        for (unsigned leaf = 0; leaf < args->n_leaves; leaf++) {
            float value = leaf_elem(args, leaf, i);

            if (isfinite(value))
                continue;
            finding_count(&findings[leaf], value, args->start_elem + i);
            from_leaf = true;
        }
        if (!from_leaf)
            finding_count(overflow, args->acc[i], args->start_elem + i);
    }
}

void reduce_put_back(struct reduce_args *args, const void **leaves)
{
    size_t done = undo_next_elem(args->undo) - args->undo_elem, n = args->n_elems - done;

    undo_put_back(args->undo, 0, args->acc + done, n < UNDO_GROUP_ELEMS ? n : UNDO_GROUP_ELEMS);
    for (unsigned leaf = 0; leaf < args->n_leaves; leaf++)
        leaves[leaf] = (const char *)args->leaves[leaf] + done * dtype_size(args->dtype);
    args->leaves = leaves;
    args->acc += done;
    args->start_elem += done;
    args->n_elems -= done;
    args->undo_elem += done;
}
