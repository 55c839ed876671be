/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of device.h that run on the CPU: filling lists, reading findings. */

#include "kernels/device.h"

#include <assert.h>
#include <math.h>

uint32_t device_chunks_fill(struct device_chunk *chunks, uint32_t range, uint64_t n_elems)
{
    uint32_t n = device_chunks_count(n_elems);

    for (uint32_t i = 0; i < n; i++)
        chunks[i] = (struct device_chunk){.range = range, .index = i};
    return n;
}

/*
 * reduce_joins() writes a sum's joins before the join that uses it, left before right. So, leaf by leaf, the next join
 * is due as soon as its two operands are the last two unfinished sums.
 */
void device_leaves_fill(struct device_leaf *leaves, const void *const *data, unsigned n_leaves,
                        const struct reduce_join *joins)
{
    unsigned waiting[REDUCE_MAX_LEAVES], n_waiting = 0, next = 0;

    assert(n_leaves <= REDUCE_MAX_LEAVES);
    for (unsigned leaf = 0; leaf < n_leaves; leaf++) {
        waiting[n_waiting++] = leaf;
        assert(n_waiting <= DEVICE_TREE_DEPTH + 1);
        leaves[leaf] = (struct device_leaf){.data = data[leaf]};
        while (next + 1 < n_leaves && n_waiting > 1 && joins[next].dst == waiting[n_waiting - 2] &&
               joins[next].src == waiting[n_waiting - 1]) {
            next++;
            n_waiting--;
            leaves[leaf].n_joins++;
        }
    }
    assert(n_leaves == 0 || n_waiting == 1);
}

static bool is_aligned(const void *at)
{
    return (uintptr_t)at % 16 == 0;
}

/* Return: the number of additions that are due after a leaf of a complete tree. It is the number of carries when a
 * binary counter goes from leaf to leaf + 1. */
static unsigned joins_after(unsigned leaf)
{
    unsigned n = 0;

    for (; leaf % 2; leaf /= 2)
        n++;
    return n;
}

static enum device_tree tree_of(const struct device_reduce_range *range, const struct device_leaf *leaves)
{
    static const unsigned whole[DEVICE_TREE_OTHER] = {
        [DEVICE_TREE_1] = 1, [DEVICE_TREE_2] = 2, [DEVICE_TREE_4] = 4, [DEVICE_TREE_8] = 8};
    unsigned tree = 0;

    while (tree < DEVICE_TREE_OTHER && whole[tree] != range->n_leaves)
        tree++;
    if (!is_aligned(range->out))
        return DEVICE_TREE_OTHER;
    for (unsigned i = 0; tree < DEVICE_TREE_OTHER && i < range->n_leaves; i++)
        if (leaves[i].n_joins != joins_after(i) || !is_aligned(leaves[i].data))
            return DEVICE_TREE_OTHER;
    return tree;
}

void device_reduce_fill(struct device_reduce_list *list, const struct device_reduce_range *ranges,
                        const struct device_leaf *leaves, struct device_chunk *chunks)
{
    list->n_chunks = 0;
    for (unsigned kernel = 0; kernel < N_DTYPES * N_DEVICE_TREES; kernel++) {
        enum dtype dtype = kernel / N_DEVICE_TREES;
        enum device_tree tree = kernel % N_DEVICE_TREES;
        uint32_t before = list->n_chunks;

        for (uint32_t i = 0; i < list->n_ranges; i++)
            if (ranges[i].dtype == dtype && tree_of(&ranges[i], leaves + ranges[i].first_leaf) == tree)
                list->n_chunks += device_chunks_fill(&chunks[list->n_chunks], i, ranges[i].n_elems);
        list->n_chunks_of[dtype][tree] = list->n_chunks - before;
    }
}

void device_finding_read(const struct device_finding *finding, struct reduce_finding *out)
{
    static const float values[] = {[DEVICE_NAN] = NAN, [DEVICE_INF] = INFINITY, [DEVICE_MINUS_INF] = -INFINITY};
    uint64_t first = ~finding->first;

    *out = (struct reduce_finding){.n_nan = finding->n_nan, .n_inf = finding->n_inf};
    if (finding->first == 0)
        return;
    out->first_elem = first / 4;
    out->first_value = values[first % 4];
}
