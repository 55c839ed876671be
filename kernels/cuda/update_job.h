/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A chunk of an update on a GPU: its arrays, the elements of each thread, and the types of moments in memory. */

#include "kernels/cuda/block.h"
#include "kernels/cuda/quad8.h"
#include "kernels/update_element.h"

/* Flags for the arrays of an update in addition to the gradient: exp_avg, exp_avg_sq, and masters of 24 bits. */
enum {
    M = 1,
    V = 2,
    MASTER24 = 4,
};

/* The types of a moment in memory. elem: one element, or one group of IN_ELEM elements. four: a thread's four
 * elements. */
template <enum dtype dtype> struct moment;

template <> struct moment<DTYPE_F32> {
    typedef float elem;
    typedef struct quad four;
    enum { IN_ELEM = 1 };
};

template <> struct moment<DTYPE_BF16> {
    typedef uint16_t elem;
    typedef struct half_quad four;
    enum { IN_ELEM = 1 };
};

template <> struct moment<DTYPE_SIGNED8> {
    typedef struct group8 elem;
    typedef struct quad8 four;
    enum { IN_ELEM = GROUP8_ELEMS };
};

/* The flags are first because nvcc 13.0 spills registers of undo_kernel<adam> if the scalars are at other places. */
struct update_job {
    bool quads;      /* all arrays are at multiples of four elements */
    bool stochastic; /* as in moments_type */
    struct device_update_range range;
    struct update_scalars k;
    struct extent extent;
};

DEVICE_FN struct update_job job_in_global(struct update_job job)
{
    job.range.p = in_global(job.range.p);
    job.range.m = in_global(job.range.m);
    job.range.v = in_global(job.range.v);
    job.range.acc = in_global(job.range.acc);
    job.range.w16 = in_global(job.range.w16);
    job.range.lower = in_global(job.range.lower);
    return job;
}

template <typename elem> DEVICE_FN void *advance(void *array, uint64_t n_elems)
{
    return array ? static_cast<elem *>(array) + n_elems : NULL;
}

/* Moves the job's pointers to the chunk's first element, so that the extent begins at 0 and fits into 32 bits. */
template <unsigned masters, enum dtype moments> DEVICE_FN struct update_job job_from_chunk(struct update_job job)
{
    typedef typename moment<moments>::elem elem;
    const uint64_t begin = job.extent.begin;

    if constexpr (masters == MASTER24)
        job.range.lower += begin;
    else
        job.range.p += begin;
    job.range.m = advance<elem>(job.range.m, begin / moment<moments>::IN_ELEM);
    job.range.v = advance<elem>(job.range.v, begin / moment<moments>::IN_ELEM);
    job.range.acc += begin;
    job.range.w16 = advance<uint16_t>(job.range.w16, begin);
    job.range.start_elem += begin;
    job.extent = {0, job.extent.end - begin};
    return job;
}

/* ---- a thread's elements ------------------------------------------------------------------------------- */

/* The number of elements of a chunk. The job must be from job_from_chunk(), which makes it begin at the chunk's
 * start. */
DEVICE_FN uint32_t elems_of(const struct update_job &job)
{
    return static_cast<uint32_t>(job.extent.end);
}

DEVICE_FN uint32_t groups_of(const struct update_job &job)
{
    return (elems_of(job) + DEVICE_UNDO_GROUP_ELEMS - 1) / DEVICE_UNDO_GROUP_ELEMS;
}

/* The number of the thread's first element of a group. */
DEVICE_FN uint32_t group_begin(uint32_t group)
{
    return group * DEVICE_UNDO_GROUP_ELEMS + 4 * threadIdx.x;
}

/* Return: true if the thread has four elements and all arrays are aligned. Otherwise the thread reads each element when
 * it needs it. */
DEVICE_FN bool group_is_quad(const struct update_job &job, uint32_t i)
{
    return job.quads && i + 4 <= elems_of(job);
}

/* The number of existing elements among the four from i on. */
DEVICE_FN uint32_t quad_elems(const struct update_job &job, uint32_t i)
{
    const uint32_t end = elems_of(job);

    return i + 4 <= end ? 4 : i < end ? end - i : 0;
}

/* ---- moments ------------------------------------------------------------------------------------------- */

DEVICE_FN float widen(float x)
{
    return x;
}

DEVICE_FN float widen(uint16_t x)
{
    return f32_from_bf16(x);
}

/* The draw of an element, by its number from the parameter's start; 0 without stochastic rounding. */
DEVICE_FN uint32_t draw_of(const struct update_job &job, uint64_t i)
{
    return job.stochastic ? rounding_draw(job.k.rounding_key, static_cast<uint32_t>(job.range.start_elem + i)) : 0;
}

DEVICE_FN void put(const struct update_job &, float *at, float x, uint32_t)
{
    *at = x;
}

DEVICE_FN void put(const struct update_job &job, uint16_t *at, float x, uint32_t draw)
{
    *at = job.stochastic ? bf16_at_random(x, draw) : bf16_from_f32(x);
}

/* Stores both moments of an element like update_kernel.c: exp_avg uses the lower half of the draw. */
template <typename elem>
DEVICE_FN void put_moments(const struct update_job &job, uint64_t i, const struct element &e, elem *m, elem *v)
{
    const uint32_t draw = draw_of(job, i);

    if (m)
        put(job, m, e.m, draw);
    if (v)
        put(job, v, e.v, draw >> 16);
}
