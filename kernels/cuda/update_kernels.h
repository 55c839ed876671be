/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The optimizers, with the bits of update_kernel.c: a thread calls the same functions of one element (update_element.h)
 * for four elements. AdamW reads 16 bytes per element and writes 12, or 14 with a 16-bit weight, and computes very
 * little. With moments in bf16 it reads 12 and writes 8 or 10; with moments in 8 bits it reads 10.1 and writes 6.1 or
 * 8.1. For a master of 24 bits and its weight it reads 3 bytes and writes 3, instead of 4 and 6.
 *
 * On an H200 AdamW reaches 0.92 of the speed of a copy of the same bytes, and with undo slots 0.59: 268 M elements take
 * 2.98 ms, without fences 2.41, without saving 2.40, without both 1.95. These variants were tried and are not worth
 * their code: one fence per group instead of two, with four slots (3.12 ms instead of 2.98); groups of 1024 elements,
 * read ahead in registers (2.87) or in shared memory (2.82); slots that leave the L2 last (2.93); only as many blocks
 * as run at a time (2.90).
 */

#include "kernels/cuda/masters.h"

/* ---- one element and four ------------------------------------------------------------------------------ */

template <unsigned arrays> using masters_of = struct masters<(arrays & MASTER24) != 0>;

template <step_fn *step, unsigned arrays, enum dtype moments>
DEVICE_FN void update_elem(const struct update_job &job, uint64_t i)
{
    typedef typename moment<moments>::elem elem;
    const struct device_update_range &range = job.range;
    elem *const m = static_cast<elem *>(range.m), *const v = static_cast<elem *>(range.v);
    struct element e = {masters_of<arrays>::load_one(job, i), arrays & M ? widen(m[i]) : 0,
                        arrays & V ? widen(v[i]) : 0};

    e = step(e, range.acc[i], &job.k);
    masters_of<arrays>::store_one(job, i, e.p);
    put_moments<elem>(job, i, e, arrays & M ? m + i : NULL, arrays & V ? v + i : NULL);
}

/* Four elements in a thread's registers. They have the types of the memory, not fp32:
 * narrow types take fewer registers. */
template <unsigned arrays, dtype moments> struct quads {
    masters_of<arrays> p;
    typename moment<moments>::four m, v;
    struct quad acc;
};

template <unsigned arrays, enum dtype moments>
DEVICE_FN struct quads<arrays, moments> quads_load(const struct update_job &job, uint64_t i)
{
    typedef typename moment<moments>::elem elem;
    const struct device_update_range &range = job.range;
    const typename moment<moments>::four none = {};

    return {masters_of<arrays>::load(job, i),
            arrays & M ? quad_load_once(static_cast<const elem *>(range.m) + i) : none,
            arrays & V ? quad_load_once(static_cast<const elem *>(range.v) + i) : none, quad_load_once(range.acc + i)};
}

/* Updates four elements in registers. i: the number of the first element. */
template <step_fn *step, unsigned arrays, enum dtype moments>
DEVICE_FN void quads_step(const struct update_job &job, uint64_t i, struct quads<arrays, moments> *q)
{
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        struct element e = step({q->p.value(k), widen(q->m.x[k]), widen(q->v.x[k])}, q->acc.x[k], &job.k);

        q->p.set(job, i, k, e.p);
        put_moments(job, i + k, e, &q->m.x[k], &q->v.x[k]);
    }
}

template <unsigned arrays, enum dtype moments>
DEVICE_FN void quads_store(const struct update_job &job, uint64_t i, const struct quads<arrays, moments> &q)
{
    typedef typename moment<moments>::elem elem;
    const struct device_update_range &range = job.range;

    q.p.store(job, i);
    if (arrays & M)
        quad_store_once(static_cast<elem *>(range.m) + i, q.m);
    if (arrays & V)
        quad_store_once(static_cast<elem *>(range.v) + i, q.v);
    q.p.store_weights(job, i);
}

/* ---- without undo slots -------------------------------------------------------------------------------- */

/* Reads two times four elements before it writes the first four. nvcc would not read early by itself, because the
 * written arrays might overlap those that are read next. */
template <step_fn *step, unsigned arrays, enum dtype moments> DEVICE_FN void update_chunk(const struct update_job &job)
{
    const struct extent extent = job.extent;
    const uint64_t quads_end = job.quads ? extent.begin + (extent.end - extent.begin) / 4 * 4 : extent.begin;
    const unsigned stride = 4 * BLOCK_THREADS;

    for (phase threads; threads.next();) {
        uint64_t i = extent.begin + 4 * threadIdx.x;

#pragma unroll 1
        for (; i + stride < quads_end; i += 2 * stride) {
            struct quads<arrays, moments> first = quads_load<arrays, moments>(job, i);
            struct quads<arrays, moments> second = quads_load<arrays, moments>(job, i + stride);

            quads_step<step>(job, i, &first);
            quads_store<arrays>(job, i, first);
            quads_step<step>(job, i + stride, &second);
            quads_store<arrays>(job, i + stride, second);
        }
        if (i < quads_end) {
            struct quads<arrays, moments> last = quads_load<arrays, moments>(job, i);

            quads_step<step>(job, i, &last);
            quads_store<arrays>(job, i, last);
        }
#pragma unroll 1
        for (i = quads_end + threadIdx.x; i < extent.end; i += BLOCK_THREADS)
            update_elem<step, arrays, moments>(job, i);
    }
}

/* ---- with undo slots ----------------------------------------------------------------------------------- */

/* Addresses of the thread's moments in a group's slot, after the masters. They have the types of memory. */
template <enum dtype moments> struct undo_places {
    typename moment<moments>::elem *m, *v;
};

template <unsigned arrays, enum dtype moments>
DEVICE_FN struct undo_places<moments> undo_places_of(const struct undo &undo, uint32_t group)
{
    typedef typename moment<moments>::elem elem;

    return {undo_at<elem>(undo, group, sizeof(float)),
            undo_at<elem>(undo, group, sizeof(float) + (arrays & M ? sizeof(elem) : 0))};
}

template <unsigned arrays, enum dtype moments>
DEVICE_FN void undo_save(const struct undo &undo, const struct update_job &job, uint32_t group,
                         const struct quads<arrays, moments> &old)
{
    typedef typename moment<moments>::elem elem;
    typedef typename moment<moments>::four four;
    const struct device_update_range &range = job.range;
    const uint32_t i = group_begin(group), end = elems_of(job);
    const struct undo_places<moments> to = undo_places_of<arrays, moments>(undo, group);

    if (group_is_quad(job, i)) {
        old.p.save(undo, group);
        if (arrays & M)
            *reinterpret_cast<four *>(to.m) = old.m;
        if (arrays & V)
            *reinterpret_cast<four *>(to.v) = old.v;
        return;
    }
    masters_of<arrays>::save_some(undo, group, job, i, end);
    if (arrays & M)
        undo_copy<elem>(to.m, static_cast<const elem *>(range.m) + i, i, end);
    if (arrays & V)
        undo_copy<elem>(to.v, static_cast<const elem *>(range.v) + i, i, end);
}

template <unsigned arrays, enum dtype moments>
DEVICE_FN void undo_put_back(const struct undo &undo, const struct update_job &job, uint32_t group)
{
    typedef typename moment<moments>::elem elem;
    const struct device_update_range &range = job.range;
    const uint32_t i = group_begin(group), end = elems_of(job);
    const struct undo_places<moments> from = undo_places_of<arrays, moments>(undo, group);

    masters_of<arrays>::put_back(undo, group, job, i, end);
    if (arrays & M)
        undo_copy<elem>(static_cast<elem *>(range.m) + i, from.m, i, end);
    if (arrays & V)
        undo_copy<elem>(static_cast<elem *>(range.v) + i, from.v, i, end);
}

template <unsigned arrays, enum dtype moments>
DEVICE_FN struct quads<arrays, moments> group_load(const struct update_job &job, uint32_t group)
{
    const uint32_t i = group_begin(group);

    if (group_is_quad(job, i))
        return quads_load<arrays, moments>(job, i);
    return {};
}

template <step_fn *step, unsigned arrays, enum dtype moments>
DEVICE_FN void group_step(const struct update_job &job, uint32_t group, struct quads<arrays, moments> q)
{
    const uint32_t i = group_begin(group);

    if (group_is_quad(job, i)) {
        quads_step<step>(job, i, &q);
        quads_store<arrays>(job, i, q);
        return;
    }
#pragma unroll 1
    for (unsigned k = 0; k < 4 && i + k < elems_of(job); k++)
        update_elem<step, arrays, moments>(job, i + k);
}

/*
 * Reads the next group before it marks this one, so that loads are in flight while the block waits for its fences.
 * `shared` is in the block's shared memory, because in registers it would leave room for fewer blocks; each phase uses
 * a part of it.
 */
template <step_fn *step, unsigned arrays, enum dtype moments>
DEVICE_FN void update_groups(const struct update_job &shared, const struct undo &undo, uint32_t n_groups)
{
    const uint32_t begin = undo.first > undo.at ? undo.first - undo.at : 0;
    per_thread<struct quads<arrays, moments>> now, next;

    for (phase threads; threads.next();) {
        const struct update_job job = job_in_global(shared);

        if (undo.goes_on && undo.at + begin == undo.first)
            undo_put_back<arrays, moments>(undo, job, begin);
        next.mine() = group_load<arrays, moments>(job, begin);
    }
#pragma unroll 1
    for (uint32_t group = begin;; group++) {
        for (phase threads; threads.next();) {
            const struct update_job job = job_in_global(shared);

            if (group > begin)
                group_step<step, arrays>(job, group - 1, now.mine());
            now.mine() = next.mine();
            if (group < n_groups)
                undo_save<arrays>(undo, job, group, now.mine());
            if (group + 1 < n_groups)
                next.mine() = group_load<arrays, moments>(job, group + 1);
        }
        if (group == n_groups)
            return;
        undo_mark(undo, undo.at + group);
    }
}

/* ---- the optimizers ------------------------------------------------------------------------------------ */

/* Scalars choose between functions for each element, because a separate loop for each function takes more registers. */
DEVICE_FN struct element adam_any(struct element e, float acc, const struct update_scalars *k)
{
    return k->l2 ? adam_l2(e, acc, k) : adamw(e, acc, k);
}

/* In a parameter's first step, m is read but not used. */
DEVICE_FN struct element sgd_any_momentum(struct element e, float acc, const struct update_scalars *k)
{
    if (k->first_step)
        return k->nesterov ? sgd_nesterov_first(e, acc, k) : sgd_momentum_first(e, acc, k);
    return k->nesterov ? sgd_nesterov(e, acc, k) : sgd_momentum(e, acc, k);
}

DEVICE_FN struct element muon_any_momentum(struct element e, float acc, const struct update_scalars *k)
{
    return k->nesterov ? muon_nesterov(e, acc, k) : muon_momentum(e, acc, k);
}

constexpr enum optimizer MUON_MOMENTUM = static_cast<enum optimizer>(DEVICE_MUON_MOMENTUM);

/* masters: 0 or MASTER24. way: update_plainly or update_with_undo. */
template <enum optimizer optimizer, unsigned masters, typename way>
DEVICE_FN void update_by(const struct update_job &job, const way &how)
{
    if constexpr (optimizer == OPTIMIZER_ADAMW)
        how.template run<adamw, M | V | masters>(job);
    else if constexpr (optimizer == OPTIMIZER_ADAM)
        how.template run<adam_any, M | V | masters>(job);
    else if constexpr (optimizer == OPTIMIZER_LION)
        how.template run<lion, M | masters>(job);
    else if constexpr (optimizer == OPTIMIZER_ADAGRAD)
        how.template run<adagrad, V | masters>(job);
    else if constexpr (optimizer == OPTIMIZER_MUON)
        how.template run<muon, masters>(job);
    else if constexpr (optimizer == MUON_MOMENTUM)
        how.template run<muon_any_momentum, M>(job);
    else if (job.k.momentum)
        how.template run<sgd_any_momentum, M | masters>(job);
    else
        how.template run<sgd, masters>(job);
}

template <enum dtype moments> struct update_plainly {
    template <step_fn *step, unsigned arrays> DEVICE_MEMBER void run(const struct update_job &job) const
    {
        update_chunk<step, arrays, moments>(job);
    }
};

template <enum dtype moments> struct update_with_undo {
    const struct undo &undo;
    uint32_t n_groups;

    template <step_fn *step, unsigned arrays> DEVICE_MEMBER void run(const struct update_job &job) const
    {
        update_groups<step, arrays, moments>(job, undo, n_groups);
    }
};

/* ---- the kernels --------------------------------------------------------------------------------------- */

/* Arrays that an optimizer does not have are NULL, and count as aligned. */
template <enum dtype moments> DEVICE_FN bool has_quads(const struct device_update_range &range)
{
    const size_t moment_bytes = alignof(typename moment<moments>::four);

    return is_aligned(range.p, UNIT_BYTES) && is_aligned(range.m, moment_bytes) && is_aligned(range.v, moment_bytes) &&
           is_aligned(range.acc, UNIT_BYTES) && is_aligned(range.w16, UNIT_BYTES / 2) && is_aligned(range.lower, 4);
}

template <enum dtype moments>
DEVICE_FN struct update_job update_job_of(const struct device_update_list &list, uint32_t index)
{
    const struct device_chunk chunk = in_global(list.chunks)[index];
    struct update_job job;

    job.range = in_global(list.ranges)[chunk.range];
    job.k = in_global(list.scalars)[job.range.scalars];
    job.extent = chunk_extent(chunk, job.range.n_elems);
    job.quads = has_quads<moments>(job.range);
    job.stochastic = moments != DTYPE_F32 && list.moments.stochastic;
    return job_in_global(job);
}

template <enum optimizer optimizer, enum dtype moments, unsigned masters>
static __global__ void __launch_bounds__(BLOCK_THREADS) update_kernel(struct device_update_list list)
{
    update_by<optimizer, masters>(update_job_of<moments>(list, blockIdx.x), update_plainly<moments>());
}

/*
 * Blocks are few, and each has several chunks, so its slots stay in the L2 while it works. Slots for each chunk would
 * be written to memory once: 1.5 bytes more per element of AdamW.
 */
template <enum optimizer optimizer, enum dtype moments, unsigned masters>
static __global__ void __launch_bounds__(BLOCK_THREADS, 6) undo_kernel(struct device_update_list list)
{
    __shared__ struct update_job job;
    struct undo undo = undo_open(list.undo);

#pragma unroll 1
    for (uint32_t i = blockIdx.x; i < list.n_chunks; i += DEVICE_UPDATE_BLOCKS) {
        for (phase threads; threads.next();) {
            if (threadIdx.x == 0)
                job = job_from_chunk<masters, moments>(update_job_of<moments>(list, i));
        }
        const uint32_t n_groups = groups_of(job);

        if (undo.first < undo.at + n_groups)
            update_by<optimizer, masters>(job, update_with_undo<moments>{undo, n_groups});
        else
            wait_for_block(); /* all threads have read the job before the next job replaces it */
        undo.at += n_groups;
    }
    undo_mark(undo, DEVICE_UNDO_DONE);
}

typedef void update_kernel_fn(struct device_update_list list);

/*
 * The kernels of one type of moments: [masters in fp32, or in 24 bits][by enum optimizer][without undo slots, or with
 * them]. The entry of Muon's first pass with 24 bits is NULL, because that pass has no masters. Each type of moments
 * has its own file, because nvcc compiles a file in one thread.
 */
typedef update_kernel_fn *const update_kernels[2][DEVICE_N_UPDATES][2];
extern update_kernels update_kernels_f32, update_kernels_bf16, update_kernels_8bit;

/* BOTH(optimizer, masters): the two kernels of an optimizer. */
#define UPDATE_KERNELS_WITH(BOTH, masters)                                                                             \
    BOTH(OPTIMIZER_ADAMW, masters), BOTH(OPTIMIZER_ADAM, masters), BOTH(OPTIMIZER_SGD, masters),                       \
        BOTH(OPTIMIZER_LION, masters), BOTH(OPTIMIZER_ADAGRAD, masters), BOTH(OPTIMIZER_MUON, masters)
#define UPDATE_KERNELS(BOTH)                                                                                           \
    {                                                                                                                  \
        {UPDATE_KERNELS_WITH(BOTH, 0), BOTH(MUON_MOMENTUM, 0)}, {UPDATE_KERNELS_WITH(BOTH, MASTER24)},                 \
    }
