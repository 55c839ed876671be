/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Whose value is not finite: the twin of reduce_find_nonfinite(). It is launched behind every reduction, so what
 * has to be quick is the block whose range is finite: it reads one flag and ends. The others may take their time, but
 * a gradient that is NaN throughout must not make every element an atomic: threads count, the block adds up, one
 * thread adds to the result.
 */

#include "kernels/cuda/block.h"

/* What one thread, and then the block, has found. */
struct find_count {
    uint64_t n_nan;
    uint64_t n_inf;
    uint64_t first; /* as in struct device_finding */
};

struct find_job {
    struct device_reduce_range range;
    const struct device_leaf *leaves;
    struct extent extent;
};

DEVICE_FN bool value_is_finite(float x)
{
    return (f32_bits(x) >> 23 & 0xff) != 0xff;
}

DEVICE_FN float leaf_elem(const struct find_job &job, unsigned leaf, uint64_t i)
{
    const void *data = job.leaves[leaf].data;

    switch (job.range.dtype) {
    case DTYPE_F32:
        return static_cast<const float *>(data)[i];
    case DTYPE_BF16:
        return f32_from_bf16(static_cast<const uint16_t *>(data)[i]);
    default:
        return f32_from_f16(static_cast<const uint16_t *>(data)[i]);
    }
}

DEVICE_FN void find_count_value(struct find_count *count, float value, uint64_t elem)
{
    const uint32_t bits = f32_bits(value);
    const bool is_nan = (bits & 0x7fffff) != 0;
    const unsigned kind = is_nan ? DEVICE_NAN : bits >> 31 ? DEVICE_MINUS_INF : DEVICE_INF;

    if (count->n_nan + count->n_inf == 0)
        count->first = ~(elem * 4 + kind);
    if (is_nan)
        count->n_nan++;
    else
        count->n_inf++;
}

/* Element i, whose sum is not finite, as far as it is this leaf's; leaf n_leaves is the sum itself. */
DEVICE_FN void find_elem(const struct find_job &job, unsigned leaf, uint64_t i, struct find_count *count)
{
    if (leaf < job.range.n_leaves) {
        float value = leaf_elem(job, leaf, i);

        if (!value_is_finite(value))
            find_count_value(count, value, job.range.start_elem + i);
        return;
    }
    for (unsigned other = 0; other < job.range.n_leaves; other++) {
        if (!value_is_finite(leaf_elem(job, other, i)))
            return;
    }
    find_count_value(count, job.range.out[i], job.range.start_elem + i);
}

DEVICE_FN void find_flush(const struct find_count *counts, struct device_finding *finding)
{
    struct find_count total = {0, 0, 0};

    for (unsigned i = 0; i < BLOCK_THREADS; i++) {
        total.n_nan += counts[i].n_nan;
        total.n_inf += counts[i].n_inf;
        total.first = counts[i].first > total.first ? counts[i].first : total.first;
    }
    if (total.n_nan > 0)
        atomic_add(&finding->n_nan, total.n_nan);
    if (total.n_inf > 0)
        atomic_add(&finding->n_inf, total.n_inf);
    if (total.first > 0)
        atomic_max(&finding->first, total.first);
}

/* device_reduce_list and where the findings go. */
struct find_list {
    struct device_reduce_list reduce;
    struct device_finding *findings;
    struct device_finding *overflows;
};

static __global__ void __launch_bounds__(BLOCK_THREADS) find_kernel(struct find_list list)
{
    __shared__ struct find_count counts[BLOCK_THREADS];
    const struct device_chunk chunk = list.reduce.chunks[blockIdx.x];
    struct find_job job;

    if (!list.reduce.squares[chunk.range].nonfinite)
        return;
    job.range = list.reduce.ranges[chunk.range];
    job.leaves = list.reduce.leaves + job.range.first_leaf;
    job.extent = chunk_extent(chunk, job.range.n_elems);
    for (unsigned leaf = 0; leaf <= job.range.n_leaves; leaf++) {
        for (phase threads; threads.next();) {
            struct find_count count = {0, 0, 0};

            for (uint64_t i = job.extent.begin + threadIdx.x; i < job.extent.end; i += BLOCK_THREADS) {
                if (!value_is_finite(job.range.out[i]))
                    find_elem(job, leaf, i, &count);
            }
            counts[threadIdx.x] = count;
        }
        for (phase threads; threads.next();) {
            if (threadIdx.x == 0)
                find_flush(counts, leaf < job.range.n_leaves ? &list.findings[job.range.first_leaf + leaf]
                                                             : &list.overflows[chunk.range]);
        }
    }
}

int device_find_nonfinite(struct CUstream_st *stream, const struct device_reduce_list *list,
                          struct device_finding *findings, struct device_finding *overflows)
{
    const struct find_list find = {*list, findings, overflows};
    const struct clear_list results = {
        {reinterpret_cast<uint64_t *>(findings), reinterpret_cast<uint64_t *>(overflows)},
        {list->n_leaves * (sizeof(struct device_finding) / 8), list->n_ranges * (sizeof(struct device_finding) / 8)},
    };
    int r = device_clear(stream, &results);

    return r != 0 ? r : device_launch(stream, find_kernel, list->n_chunks, find);
}

int load_find(void)
{
    return load_kernels(find_kernel);
}
