/* SPDX-License-Identifier: Apache-2.0 */

/* The optimizers with moments in 8 bits. */

#include "kernels/cuda/update_kernels.h"

/* ---- groups --------------------------------------------------------------------------------------------- */

template <unsigned arrays>
DEVICE_FN struct quads<arrays, DTYPE_SIGNED8> group8_load(const struct update_job &job, uint32_t group)
{
    const struct device_update_range &range = job.range;
    const uint32_t i = group_begin(group), n = quad_elems(job, i);
    const bool is_quad = group_is_quad(job, i);
    const struct quad8 none = {};

    return {masters_of<arrays>::load_some(job, i, n, is_quad),
            arrays & M && n > 0 ? quad8_load(range.m, i) : none,
            arrays & V && n > 0 ? quad8_load(range.v, i) : none, quad_load_some(range.acc + i, n, is_quad)};
}

/* The moments of four elements. */
struct rounded_moments {
    struct rounded8 m, v;
};

/* Computes a step of four elements from i on. An element in the second half of a group uses the draw of the element at
 * the same place in the first half. */
template <step_fn *step, unsigned arrays>
DEVICE_FN struct rounded_moments group8_step(const struct update_job &job, uint32_t i,
                                             struct quads<arrays, DTYPE_SIGNED8> *q)
{
    const uint64_t first = job.range.start_elem + i / GROUP8_ELEMS * GROUP8_ELEMS + i % GROUP8_DRAWS;
    struct rounded_moments out;

#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        const uint32_t draw = rounding_draw(job.k.rounding_key, static_cast<uint32_t>(first + k));
        const float m = quad8_value<DTYPE_SIGNED8>(q->m, k), v = quad8_value<DTYPE_UNSIGNED8>(q->v, k);
        const struct element e = step({q->p.value(k), m, v}, q->acc.x[k], &job.k);

        q->p.set(job, i, k, e.p);
        round8<DTYPE_SIGNED8>(&out.m, k, e.m, draw, i);
        round8<DTYPE_UNSIGNED8>(&out.v, k, e.v, draw, i);
    }
    return out;
}

template <enum dtype dtype>
DEVICE_FN void group8_store(void *moment, uint32_t i, uint32_t n, const struct rounded8 &four, uint16_t largest)
{
    const struct quad8 none = {};

    if (n > 0)
        quad8_store(moment, i, encode8<dtype>(four, largest, n < 4 ? quad8_load(moment, i) : none, n));
}

/* The `saving` of update_groups8() without undo slots. It saves nothing. */
struct without_slots {
    DEVICE_MEMBER uint32_t begin() const
    {
        return 0;
    }

    template <unsigned arrays> DEVICE_MEMBER void put_back(const struct update_job &) const
    {
    }

    template <unsigned arrays> DEVICE_MEMBER void save(uint32_t, const struct quads<arrays, DTYPE_SIGNED8> &) const
    {
    }

    DEVICE_MEMBER void mark(uint32_t) const
    {
    }

    DEVICE_MEMBER void end() const
    {
    }
};

/* The `saving` of update_groups8() with undo slots. It saves like update_groups(). A slot has the masters, then the
 * optimizer's moments, in the types of memory. */
struct with_slots {
    const struct undo &undo;

    DEVICE_MEMBER uint32_t begin() const
    {
        return undo.first > undo.at ? undo.first - undo.at : 0;
    }

    template <unsigned arrays> DEVICE_MEMBER struct group8 *moments_of(float *slot, unsigned moment) const
    {
        const bool second = moment == V && arrays & M;

        return reinterpret_cast<struct group8 *>(slot + DEVICE_UNDO_GROUP_ELEMS) +
               second * (DEVICE_UNDO_GROUP_ELEMS / GROUP8_ELEMS);
    }

    template <unsigned arrays> DEVICE_MEMBER void put_back(const struct update_job &shared) const
    {
        float *const slot = undo_slot(undo, begin());

        if (!undo.goes_on || undo.at + begin() != undo.first)
            return;
        for (phase threads; threads.next();) {
            const struct update_job job = job_in_global(shared);
            const uint32_t i = group_begin(begin()), at = 4 * threadIdx.x;

            masters_of<arrays>::put_back(undo, begin(), job, i, elems_of(job));
            if (arrays & M && i < elems_of(job))
                quad8_store(job.range.m, i, quad8_load(moments_of<arrays>(slot, M), at));
            if (arrays & V && i < elems_of(job))
                quad8_store(job.range.v, i, quad8_load(moments_of<arrays>(slot, V), at));
        }
    }

    template <unsigned arrays>
    DEVICE_MEMBER void save(uint32_t group, const struct quads<arrays, DTYPE_SIGNED8> &old) const
    {
        float *const slot = undo_slot(undo, group);
        const uint32_t at = 4 * threadIdx.x;

        old.p.save(undo, group);
        if (arrays & M)
            quad8_store(moments_of<arrays>(slot, M), at, old.m);
        if (arrays & V)
            quad8_store(moments_of<arrays>(slot, V), at, old.v);
    }

    DEVICE_MEMBER void mark(uint32_t group) const
    {
        wait_for_block();
        undo_mark(undo, undo.at + group);
    }

    /* Waits until all threads have finished with the job and its arrays. */
    DEVICE_MEMBER void end() const
    {
        wait_for_block();
    }
};

/*
 * update_groups() with one more phase, because a moment can be stored only when its group's exponent is known. Warps
 * wait for each other only at marks. shared: made by job_from_chunk().
 */
template <step_fn *step, unsigned arrays, typename saving>
DEVICE_FN void update_groups8(const struct update_job &shared, const saving &how, uint32_t n_groups)
{
    per_thread<struct quads<arrays, DTYPE_SIGNED8>> now, next;
    per_thread<struct rounded_moments> rounded;
    sixteen_threads m, v;
    const uint32_t begin = how.begin();

    how.template put_back<arrays>(shared);
    for (warp_phase threads; threads.next();)
        next.mine() = group8_load<arrays>(job_in_global(shared), begin);
#pragma unroll 1
    for (uint32_t group = begin; group < n_groups; group++) {
        for (warp_phase threads; threads.next();) {
            now.mine() = next.mine();
            how.template save<arrays>(group, now.mine());
            if (group + 1 < n_groups)
                next.mine() = group8_load<arrays>(job_in_global(shared), group + 1);
        }
        how.mark(group);
        for (warp_phase threads; threads.next();) {
            const struct update_job job = job_in_global(shared);
            const uint32_t i = group_begin(group), n = quad_elems(job, i);

            rounded.mine() = group8_step<step>(job, i, &now.mine());
            if (group_is_quad(job, i)) {
                now.mine().p.store(job, i);
                now.mine().p.store_weights(job, i);
            } else {
                now.mine().p.store_some(job, i, n);
            }
            m.set(largest8(rounded.mine().m, n));
            v.set(largest8(rounded.mine().v, n));
        }
        for (warp_phase threads; threads.next();) {
            const struct update_job job = job_in_global(shared);
            const uint32_t i = group_begin(group), n = quad_elems(job, i);

            if (arrays & M)
                group8_store<DTYPE_SIGNED8>(job.range.m, i, n, rounded.mine().m, m.largest());
            if (arrays & V)
                group8_store<DTYPE_UNSIGNED8>(job.range.v, i, n, rounded.mine().v, v.largest());
        }
    }
    how.end();
}

template <> struct update_plainly<DTYPE_SIGNED8> {
    template <step_fn *step, unsigned arrays> DEVICE_MEMBER void run(const struct update_job &job) const
    {
        update_groups8<step, arrays>(job, without_slots(), groups_of(job));
    }
};

template <> struct update_with_undo<DTYPE_SIGNED8> {
    const struct undo &undo;
    uint32_t n_groups;

    template <step_fn *step, unsigned arrays> DEVICE_MEMBER void run(const struct update_job &job) const
    {
        update_groups8<step, arrays>(job, with_slots{undo}, n_groups);
    }
};

/* ---- the kernels --------------------------------------------------------------------------------------- */

/* The kernel for moments in 8 bits. The job is in shared memory, as in undo_kernel. */
template <enum optimizer optimizer, unsigned masters>
static __global__ void __launch_bounds__(BLOCK_THREADS, 7) update8_kernel(struct device_update_list list)
{
    __shared__ struct update_job job;

    for (phase threads; threads.next();) {
        if (threadIdx.x == 0)
            job = job_from_chunk<masters, DTYPE_SIGNED8>(update_job_of<DTYPE_SIGNED8>(list, blockIdx.x));
    }
    update_by<optimizer, masters>(job, update_plainly<DTYPE_SIGNED8>());
}

#define BOTH(optimizer, masters)                                                                                       \
    {                                                                                                                  \
        update8_kernel<optimizer, masters>, undo_kernel<optimizer, DTYPE_SIGNED8, masters>                             \
    }

update_kernels update_kernels_8bit = UPDATE_KERNELS(BOTH);
