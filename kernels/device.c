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
 * reduce_joins() writes a sum's joins before the join that uses it, left before right. Taken leaf by leaf the
 * next join is therefore due as soon as its two sums are the last two of those that wait.
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
