/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The optimizers, the twin of update_kernel.c: the same functions of one element (update_element.h), four elements a
 * thread. AdamW reads 16 bytes an element and writes 12, or 14 with a 16-bit weight, and computes next to nothing.
 *
 * No device was at hand. To be measured, beside a copy of as many streams: the share of the memory's speed, and what
 * division and square root, correctly rounded, take of it.
 */

#include "kernels/cuda/block.h"
#include "kernels/update_element.h"

/* Which arrays an optimizer reads and writes. */
enum {
    M_READ = 1,
    M_WRITE = 2,
    M = M_READ | M_WRITE,
    V = 4,
};

struct update_job {
    struct device_update_range range;
    struct update_scalars k;
    struct extent extent;
    bool quads; /* all arrays are at multiples of four elements */
};

DEVICE_FN uint16_t narrow(float x, uint32_t dtype)
{
    return dtype == DTYPE_BF16 ? bf16_from_f32(x) : f16_from_f32(x);
}

template <step_fn *step, unsigned arrays> DEVICE_FN void update_elem(const struct update_job &job, uint64_t i)
{
    const struct device_update_range &range = job.range;
    struct element e = {range.p[i], arrays & M_READ ? range.m[i] : 0, arrays & V ? range.v[i] : 0};

    e = step(e, range.acc[i], &job.k);
    range.p[i] = e.p;
    if (arrays & M_WRITE)
        range.m[i] = e.m;
    if (arrays & V)
        range.v[i] = e.v;
    if (range.w16_dtype != DTYPE_F32)
        static_cast<uint16_t *>(range.w16)[i] = narrow(e.p, range.w16_dtype);
}

DEVICE_FN struct quad quad_load(const float *at)
{
    return *reinterpret_cast<const struct quad *>(at);
}

DEVICE_FN void quad_store(float *at, const struct quad &quad)
{
    *reinterpret_cast<struct quad *>(at) = quad;
}

DEVICE_FN void quad_narrow(void *w16, uint64_t i, const struct quad &p, uint32_t dtype)
{
    struct alignas(8) four {
        uint16_t x[4];
    } four;

#pragma unroll
    for (unsigned k = 0; k < 4; k++)
        four.x[k] = narrow(p.x[k], dtype);
    *reinterpret_cast<struct four *>(static_cast<uint16_t *>(w16) + i) = four;
}

/* What a thread reads of four elements. */
struct quads {
    struct quad p, m, v, acc;
};

template <unsigned arrays> DEVICE_FN struct quads quads_load(const struct update_job &job, uint64_t i)
{
    const struct device_update_range &range = job.range;
    const struct quad none = {{0, 0, 0, 0}};

    return {quad_load(range.p + i), arrays & M_READ ? quad_load(range.m + i) : none,
            arrays & V ? quad_load(range.v + i) : none, quad_load(range.acc + i)};
}

template <step_fn *step, unsigned arrays>
DEVICE_FN void quads_step(const struct update_job &job, uint64_t i, struct quads q)
{
    const struct device_update_range &range = job.range;

#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        struct element e = step({q.p.x[k], q.m.x[k], q.v.x[k]}, q.acc.x[k], &job.k);

        q.p.x[k] = e.p;
        q.m.x[k] = e.m;
        q.v.x[k] = e.v;
    }
    quad_store(range.p + i, q.p);
    if (arrays & M_WRITE)
        quad_store(range.m + i, q.m);
    if (arrays & V)
        quad_store(range.v + i, q.v);
    if (range.w16_dtype != DTYPE_F32)
        quad_narrow(range.w16, i, q.p, range.w16_dtype);
}

/* Two times four elements are read before the first of them are written: for all that nvcc knows, what is written may
 * be what is read next, so it would not read early by itself. */
template <step_fn *step, unsigned arrays> DEVICE_FN void update_chunk(const struct update_job &job)
{
    const struct extent extent = job.extent;
    const uint64_t quads_end = job.quads ? extent.begin + (extent.end - extent.begin) / 4 * 4 : extent.begin;
    const unsigned stride = 4 * BLOCK_THREADS;

    for (phase threads; threads.next();) {
        uint64_t i = extent.begin + 4 * threadIdx.x;

#pragma unroll 1
        for (; i + stride < quads_end; i += 2 * stride) {
            const struct quads first = quads_load<arrays>(job, i), second = quads_load<arrays>(job, i + stride);

            quads_step<step, arrays>(job, i, first);
            quads_step<step, arrays>(job, i + stride, second);
        }
        if (i < quads_end)
            quads_step<step, arrays>(job, i, quads_load<arrays>(job, i));
#pragma unroll 1
        for (i = quads_end + threadIdx.x; i < extent.end; i += BLOCK_THREADS)
            update_elem<step, arrays>(job, i);
    }
}

/* Arrays that an optimizer does not have are NULL, which is aligned. */
DEVICE_FN bool has_quads(const struct device_update_range &range)
{
    return is_aligned(range.p, UNIT_BYTES) && is_aligned(range.m, UNIT_BYTES) && is_aligned(range.v, UNIT_BYTES) &&
           is_aligned(range.acc, UNIT_BYTES) && is_aligned(range.w16, UNIT_BYTES / 2);
}

DEVICE_FN struct update_job update_job_of(const struct device_update_list &list)
{
    const struct device_chunk chunk = in_global(list.chunks)[blockIdx.x];
    struct update_job job;

    job.range = in_global(list.ranges)[chunk.range];
    job.range.p = in_global(job.range.p);
    job.range.m = in_global(job.range.m);
    job.range.v = in_global(job.range.v);
    job.range.acc = in_global(job.range.acc);
    job.range.w16 = in_global(job.range.w16);
    job.k = in_global(list.scalars)[job.range.scalars];
    job.extent = chunk_extent(chunk, job.range.n_elems);
    job.quads = has_quads(job.range);
    return job;
}

static __global__ void __launch_bounds__(BLOCK_THREADS) adamw_kernel(struct device_update_list list)
{
    update_chunk<adamw, M | V>(update_job_of(list));
}

static __global__ void __launch_bounds__(BLOCK_THREADS) adam_kernel(struct device_update_list list)
{
    const struct update_job job = update_job_of(list);

    if (job.k.l2)
        update_chunk<adam_l2, M | V>(job);
    else
        update_chunk<adamw, M | V>(job);
}

static __global__ void __launch_bounds__(BLOCK_THREADS) sgd_kernel(struct device_update_list list)
{
    const struct update_job job = update_job_of(list);

    if (!job.k.momentum)
        update_chunk<sgd, 0>(job);
    else if (job.k.first_step && job.k.nesterov)
        update_chunk<sgd_nesterov_first, M_WRITE>(job);
    else if (job.k.first_step)
        update_chunk<sgd_momentum_first, M_WRITE>(job);
    else if (job.k.nesterov)
        update_chunk<sgd_nesterov, M>(job);
    else
        update_chunk<sgd_momentum, M>(job);
}

static __global__ void __launch_bounds__(BLOCK_THREADS) lion_kernel(struct device_update_list list)
{
    update_chunk<lion, M>(update_job_of(list));
}

static __global__ void __launch_bounds__(BLOCK_THREADS) adagrad_kernel(struct device_update_list list)
{
    update_chunk<adagrad, V>(update_job_of(list));
}

int device_update(struct CUstream_st *stream, const struct device_update_list *list)
{
    switch (list->optimizer) {
    case OPTIMIZER_ADAM:
        return device_launch(stream, adam_kernel, list->n_chunks, *list);
    case OPTIMIZER_SGD:
        return device_launch(stream, sgd_kernel, list->n_chunks, *list);
    case OPTIMIZER_LION:
        return device_launch(stream, lion_kernel, list->n_chunks, *list);
    case OPTIMIZER_ADAGRAD:
        return device_launch(stream, adagrad_kernel, list->n_chunks, *list);
    default:
        return device_launch(stream, adamw_kernel, list->n_chunks, *list);
    }
}

int load_update(void)
{
    return load_kernels(adamw_kernel, adam_kernel, sgd_kernel, lion_kernel, adagrad_kernel);
}
