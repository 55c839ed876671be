/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The optimizers, the twin of update_kernel.c: the same functions of one element (update_element.h), four elements a
 * thread. AdamW reads 16 bytes an element and writes 12, or 14 with a 16-bit weight, and computes next to nothing. With
 * moments in bf16 it reads 12 and writes 8 or 10, with those of 8 bits 10.1 and 6.1 or 8.1.
 *
 * On an H200 AdamW reaches 0.92 of the speed of a copy of the same bytes, and with undo slots 0.59: 268 M elements take
 * 2.98 ms, without fences 2.41, without saving 2.40, with neither 1.95. Tried, and not worth their code: one
 * fence for each group instead of two, with four slots (3.12 ms instead of 2.98); groups of 1024 elements, read ahead in
 * registers (2.87) or in shared memory (2.82); slots that leave the L2 last (2.93); as many blocks as run at a time (2.90).
 */

#include "kernels/cuda/block.h"
#include "kernels/cuda/quad8.h"
#include "kernels/update_element.h"

/* Which moments an optimizer reads and writes. */
enum {
    M = 1,
    V = 2,
};

/* How a moment lies in memory: of one element (or group, of IN_ELEM elements), and of a thread's four. */
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

/* The flags are first because nvcc 13.0 spills registers of undo_kernel<adam> with other places of the scalars. */
struct update_job {
    bool quads;      /* all arrays are at multiples of four elements */
    bool stochastic; /* as moments_type has it */
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
    return job;
}

template <typename elem> DEVICE_FN void *advance(void *array, uint64_t n_elems)
{
    return array ? static_cast<elem *>(array) + n_elems : NULL;
}

/* Moves the job's pointers to the chunk's first element, so that the extent begins at 0 and fits into 32 bits. */
template <enum dtype moments> DEVICE_FN struct update_job job_from_chunk(struct update_job job)
{
    typedef typename moment<moments>::elem elem;
    const uint64_t begin = job.extent.begin;

    job.range.p += begin;
    job.range.m = advance<elem>(job.range.m, begin / moment<moments>::IN_ELEM);
    job.range.v = advance<elem>(job.range.v, begin / moment<moments>::IN_ELEM);
    job.range.acc += begin;
    job.range.w16 = advance<uint16_t>(job.range.w16, begin);
    job.range.start_elem += begin;
    job.extent = {0, job.extent.end - begin};
    return job;
}

DEVICE_FN uint16_t narrow(float x, uint32_t dtype)
{
    return dtype == DTYPE_BF16 ? bf16_from_f32(x) : f16_from_f32(x);
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

/* Elements are numbered from the parameter's start. Without stochastic rounding nothing is drawn. */
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

/* Both moments of an element as update_kernel.c stores them: exp_avg takes the lower half of the draw. */
template <typename elem>
DEVICE_FN void put_moments(const struct update_job &job, uint64_t i, const struct element &e, elem *m, elem *v)
{
    const uint32_t draw = draw_of(job, i);

    if (m)
        put(job, m, e.m, draw);
    if (v)
        put(job, v, e.v, draw >> 16);
}

/* ---- one element and four ------------------------------------------------------------------------------ */

template <step_fn *step, unsigned arrays, enum dtype moments>
DEVICE_FN void update_elem(const struct update_job &job, uint64_t i)
{
    typedef typename moment<moments>::elem elem;
    const struct device_update_range &range = job.range;
    elem *const m = static_cast<elem *>(range.m), *const v = static_cast<elem *>(range.v);
    struct element e = {range.p[i], arrays & M ? widen(m[i]) : 0, arrays & V ? widen(v[i]) : 0};

    e = step(e, range.acc[i], &job.k);
    range.p[i] = e.p;
    put_moments<elem>(job, i, e, arrays & M ? m + i : NULL, arrays & V ? v + i : NULL);
    if (range.w16_dtype != DTYPE_F32)
        static_cast<uint16_t *>(range.w16)[i] = narrow(e.p, range.w16_dtype);
}

DEVICE_FN void quad_narrow(void *w16, uint64_t i, const struct quad &p, uint32_t dtype)
{
    struct half_quad four;

#pragma unroll
    for (unsigned k = 0; k < 4; k++)
        four.x[k] = narrow(p.x[k], dtype);
    *reinterpret_cast<struct half_quad *>(static_cast<uint16_t *>(w16) + i) = four;
}

/* Four elements in a thread's registers. Moments keep their type in memory, because bf16 takes fewer registers. */
template <enum dtype moments> struct quads {
    struct quad p;
    typename moment<moments>::four m, v;
    struct quad acc;
};

template <unsigned arrays, enum dtype moments>
DEVICE_FN struct quads<moments> quads_load(const struct update_job &job, uint64_t i)
{
    typedef typename moment<moments>::elem elem;
    const struct device_update_range &range = job.range;
    const typename moment<moments>::four none = {};

    return {quad_load_once(range.p + i), arrays & M ? quad_load_once(static_cast<const elem *>(range.m) + i) : none,
            arrays & V ? quad_load_once(static_cast<const elem *>(range.v) + i) : none, quad_load_once(range.acc + i)};
}

/* i: the first of the four. */
template <step_fn *step, enum dtype moments>
DEVICE_FN void quads_step(const struct update_job &job, uint64_t i, struct quads<moments> *q)
{
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        struct element e = step({q->p.x[k], widen(q->m.x[k]), widen(q->v.x[k])}, q->acc.x[k], &job.k);

        q->p.x[k] = e.p;
        put_moments(job, i + k, e, &q->m.x[k], &q->v.x[k]);
    }
}

template <unsigned arrays, enum dtype moments>
DEVICE_FN void quads_store(const struct update_job &job, uint64_t i, const struct quads<moments> &q)
{
    typedef typename moment<moments>::elem elem;
    const struct device_update_range &range = job.range;

    quad_store_once(range.p + i, q.p);
    if (arrays & M)
        quad_store_once(static_cast<elem *>(range.m) + i, q.m);
    if (arrays & V)
        quad_store_once(static_cast<elem *>(range.v) + i, q.v);
    if (range.w16_dtype != DTYPE_F32)
        quad_narrow(range.w16, i, q.p, range.w16_dtype);
}

/* ---- without undo slots -------------------------------------------------------------------------------- */

/* Two times four elements are read before the first of them are written: for all that nvcc knows, what is written may
 * be what is read next, so it would not read early by itself. */
template <step_fn *step, unsigned arrays, enum dtype moments> DEVICE_FN void update_chunk(const struct update_job &job)
{
    const struct extent extent = job.extent;
    const uint64_t quads_end = job.quads ? extent.begin + (extent.end - extent.begin) / 4 * 4 : extent.begin;
    const unsigned stride = 4 * BLOCK_THREADS;

    for (phase threads; threads.next();) {
        uint64_t i = extent.begin + 4 * threadIdx.x;

#pragma unroll 1
        for (; i + stride < quads_end; i += 2 * stride) {
            struct quads<moments> first = quads_load<arrays, moments>(job, i);
            struct quads<moments> second = quads_load<arrays, moments>(job, i + stride);

            quads_step<step>(job, i, &first);
            quads_store<arrays>(job, i, first);
            quads_step<step>(job, i + stride, &second);
            quads_store<arrays>(job, i + stride, second);
        }
        if (i < quads_end) {
            struct quads<moments> last = quads_load<arrays, moments>(job, i);

            quads_step<step>(job, i, &last);
            quads_store<arrays>(job, i, last);
        }
#pragma unroll 1
        for (i = quads_end + threadIdx.x; i < extent.end; i += BLOCK_THREADS)
            update_elem<step, arrays, moments>(job, i);
    }
}

/* ---- with undo slots ----------------------------------------------------------------------------------- */

/*
 * A block works on its chunks group by group, four elements a thread. It saves a group in one of its two slots, marks
 * it, and only then writes the new values. The slots take turns, so that the marked group stays whole while the next
 * one is saved. The next launch of the same list finds the mark, puts the marked group back and goes on from it; it may
 * be killed as well.
 *
 * Who reads the slots is a later kernel on the same device, after the driver has ended the work of the dead process.
 * Stores that a fence has waited for are then in the device's memory, or in its L2, which is the same to every
 * process; later ones may be there or not, in any order. So the order of this device's own stores is all that counts,
 * and __threadfence() is enough; no other device and no host has a part in it. One thread fences for its block: a fence
 * also orders what other threads have written before a barrier that this thread has passed, as grids that synchronize
 * rely on.
 */
struct undo {
    uint64_t *mark;
    float *slots;
    uint64_t tag;        /* in its place in a mark */
    uint32_t slot_words; /* of 4 bytes: counted in bytes they take nvcc 13.0 more registers */
    uint32_t at;         /* groups in the chunks that this block is through with */
    uint32_t first;      /* the group with which it begins; those before it have their new values */
    bool goes_on;        /* that group is saved, and may be half written */
};

static_assert(DEVICE_UNDO_GROUP_ELEMS == 4 * BLOCK_THREADS, "four elements a thread");
static_assert(DEVICE_UNDO_MAX_TAG >> (64 - DEVICE_UNDO_TAG_SHIFT) == 0, "a tag fits");

DEVICE_FN struct undo undo_open(const struct device_update_undo &list)
{
    const uint32_t slot_words = list.slot_bytes / 4;
    uint64_t *at = in_global(list.marks) + blockIdx.x;
    const uint64_t mark = *static_cast<const volatile uint64_t *>(at);
    const bool is_ours = mark >> DEVICE_UNDO_TAG_SHIFT == list.tag;

    return {at,
            static_cast<float *>(in_global(list.slots)) + static_cast<uint64_t>(blockIdx.x) * 2 * slot_words,
            list.tag << DEVICE_UNDO_TAG_SHIFT,
            slot_words,
            0,
            is_ours ? static_cast<uint32_t>(mark) & DEVICE_UNDO_DONE : 0,
            is_ours};
}

/* All that this block has written is in its place before the mark is, and the mark before all that it writes next. */
DEVICE_FN void undo_mark(const struct undo &undo, uint32_t group)
{
    for (phase threads; threads.next();) {
        if (threadIdx.x != 0)
            continue;
        device_fence();
        *static_cast<volatile uint64_t *>(undo.mark) = undo.tag | group;
        device_fence();
    }
}

DEVICE_FN float *undo_slot(const struct undo &undo, uint32_t group)
{
    return undo.slots + (undo.at + group) % 2 * undo.slot_words;
}

/* Where the thread's four elements of an array lie in a group's slot. before: what one element takes of the arrays that
 * lie before this one; bytes. */
template <typename elem> DEVICE_FN elem *undo_at(const struct undo &undo, uint32_t group, uint32_t before)
{
    return reinterpret_cast<elem *>(undo_slot(undo, group) + before * (DEVICE_UNDO_GROUP_ELEMS / 4)) + 4 * threadIdx.x;
}

/* The thread's places in a group's slot: first p, then the moments that there are, as they lie in memory. */
template <enum dtype moments> struct undo_places {
    float *p;
    typename moment<moments>::elem *m, *v;
};

template <unsigned arrays, enum dtype moments>
DEVICE_FN struct undo_places<moments> undo_places_of(const struct undo &undo, uint32_t group)
{
    typedef typename moment<moments>::elem elem;

    return {undo_at<float>(undo, group, 0), undo_at<elem>(undo, group, sizeof(float)),
            undo_at<elem>(undo, group, sizeof(float) + (arrays & M ? sizeof(elem) : 0))};
}

DEVICE_FN uint32_t elems_of(const struct update_job &job)
{
    return static_cast<uint32_t>(job.extent.end);
}

DEVICE_FN uint32_t groups_of(const struct update_job &job)
{
    return (elems_of(job) + DEVICE_UNDO_GROUP_ELEMS - 1) / DEVICE_UNDO_GROUP_ELEMS;
}

/* The first of the thread's four elements of a group. */
DEVICE_FN uint32_t group_begin(uint32_t group)
{
    return group * DEVICE_UNDO_GROUP_ELEMS + 4 * threadIdx.x;
}

/* Else the thread has fewer than four elements, or an array is not aligned: it reads each element when it needs it. */
DEVICE_FN bool group_is_quad(const struct update_job &job, uint32_t i)
{
    return job.quads && i + 4 <= elems_of(job);
}

template <typename elem> DEVICE_FN void undo_copy(elem *to, const elem *from, uint32_t i, uint32_t n_elems)
{
#pragma unroll 1
    for (unsigned k = 0; k < 4 && i + k < n_elems; k++)
        to[k] = from[k];
}

/* Weights are not saved: they follow from p. */
template <unsigned arrays, enum dtype moments>
DEVICE_FN void undo_save(const struct undo &undo, const struct update_job &job, uint32_t group,
                         const struct quads<moments> &old)
{
    typedef typename moment<moments>::elem elem;
    typedef typename moment<moments>::four four;
    const struct device_update_range &range = job.range;
    const uint32_t i = group_begin(group), end = elems_of(job);
    const struct undo_places<moments> to = undo_places_of<arrays, moments>(undo, group);

    if (group_is_quad(job, i)) {
        *reinterpret_cast<struct quad *>(to.p) = old.p;
        if (arrays & M)
            *reinterpret_cast<four *>(to.m) = old.m;
        if (arrays & V)
            *reinterpret_cast<four *>(to.v) = old.v;
        return;
    }
    undo_copy<float>(to.p, range.p + i, i, end);
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

    undo_copy<float>(range.p + i, from.p, i, end);
    if (arrays & M)
        undo_copy<elem>(static_cast<elem *>(range.m) + i, from.m, i, end);
    if (arrays & V)
        undo_copy<elem>(static_cast<elem *>(range.v) + i, from.v, i, end);
}

template <unsigned arrays, enum dtype moments>
DEVICE_FN struct quads<moments> group_load(const struct update_job &job, uint32_t group)
{
    const uint32_t i = group_begin(group);

    if (group_is_quad(job, i))
        return quads_load<arrays, moments>(job, i);
    return {};
}

template <step_fn *step, unsigned arrays, enum dtype moments>
DEVICE_FN void group_step(const struct update_job &job, uint32_t group, struct quads<moments> q)
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
 * The next group is read before this one is marked, so that reads are under way while the block waits for its fences.
 * `shared` is the block's: in registers it would leave room for fewer blocks, and each phase uses a part of it.
 */
template <step_fn *step, unsigned arrays, enum dtype moments>
DEVICE_FN void update_groups(const struct update_job &shared, const struct undo &undo, uint32_t n_groups)
{
    const uint32_t begin = undo.first > undo.at ? undo.first - undo.at : 0;
    per_thread<struct quads<moments>> now, next;

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

/* ---- moments in 8 bits --------------------------------------------------------------------------------- */

/* How many of the four elements from i there are. */
DEVICE_FN uint32_t quad_elems(const struct update_job &job, uint32_t i)
{
    const uint32_t end = elems_of(job);

    return i + 4 <= end ? 4 : i < end ? end - i : 0;
}

/* The first n of four; the others are 0. is_quad: all are there, and aligned. */
DEVICE_FN struct quad quad_load_some(const float *at, uint32_t n, bool is_quad)
{
    struct quad quad = {};

    if (is_quad)
        return quad_load_once(at);
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        if (k < n)
            quad.x[k] = at[k];
    }
    return quad;
}

/* p and the 16-bit weights. i: the first of the four. */
DEVICE_FN void quad_store_weights(const struct update_job &job, uint32_t i, const struct quad &p)
{
    const struct device_update_range &range = job.range;
    const uint32_t n = quad_elems(job, i);

    if (group_is_quad(job, i)) {
        quad_store_once(range.p + i, p);
        if (range.w16_dtype != DTYPE_F32)
            quad_narrow(range.w16, i, p, range.w16_dtype);
        return;
    }
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        if (k < n)
            range.p[i + k] = p.x[k];
        if (k < n && range.w16_dtype != DTYPE_F32)
            static_cast<uint16_t *>(range.w16)[i + k] = narrow(p.x[k], range.w16_dtype);
    }
}

template <unsigned arrays>
DEVICE_FN struct quads<DTYPE_SIGNED8> group8_load(const struct update_job &job, uint32_t group)
{
    const struct device_update_range &range = job.range;
    const uint32_t i = group_begin(group), n = quad_elems(job, i);
    const bool is_quad = group_is_quad(job, i);
    const struct quad8 none = {};

    return {quad_load_some(range.p + i, n, is_quad), arrays & M && n > 0 ? quad8_load(range.m, i) : none,
            arrays & V && n > 0 ? quad8_load(range.v, i) : none, quad_load_some(range.acc + i, n, is_quad)};
}

/* The moments of four elements. */
struct rounded_moments {
    struct rounded8 m, v;
};

/* A step of four elements from i on. An element has the draw of the same place in the first half of its group. */
template <step_fn *step>
DEVICE_FN struct rounded_moments group8_step(const struct update_job &job, uint32_t i, struct quads<DTYPE_SIGNED8> *q)
{
    const uint64_t first = job.range.start_elem + i / GROUP8_ELEMS * GROUP8_ELEMS + i % GROUP8_DRAWS;
    struct rounded_moments out;

#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        const uint32_t draw = rounding_draw(job.k.rounding_key, static_cast<uint32_t>(first + k));
        const float m = quad8_value<DTYPE_SIGNED8>(q->m, k), v = quad8_value<DTYPE_UNSIGNED8>(q->v, k);
        const struct element e = step({q->p.x[k], m, v}, q->acc.x[k], &job.k);

        q->p.x[k] = e.p;
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

/* update_groups8() saves nothing. */
struct without_slots {
    DEVICE_MEMBER uint32_t begin() const
    {
        return 0;
    }

    template <unsigned arrays> DEVICE_MEMBER void put_back(const struct update_job &) const
    {
    }

    template <unsigned arrays> DEVICE_MEMBER void save(uint32_t, const struct quads<DTYPE_SIGNED8> &) const
    {
    }

    DEVICE_MEMBER void mark(uint32_t) const
    {
    }

    DEVICE_MEMBER void end() const
    {
    }
};

/* It saves as update_groups() does. A slot has p, then the moments that there are, as they lie in memory. */
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

            undo_copy<float>(job.range.p + i, slot + at, i, elems_of(job));
            if (arrays & M && i < elems_of(job))
                quad8_store(job.range.m, i, quad8_load(moments_of<arrays>(slot, M), at));
            if (arrays & V && i < elems_of(job))
                quad8_store(job.range.v, i, quad8_load(moments_of<arrays>(slot, V), at));
        }
    }

    template <unsigned arrays>
    DEVICE_MEMBER void save(uint32_t group, const struct quads<DTYPE_SIGNED8> &old) const
    {
        float *const slot = undo_slot(undo, group);
        const uint32_t at = 4 * threadIdx.x;

        *reinterpret_cast<struct quad *>(slot + at) = old.p;
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

    /* All threads are through with the job and its arrays. */
    DEVICE_MEMBER void end() const
    {
        wait_for_block();
    }
};

/*
 * As update_groups(), with a phase more: a moment is stored when its group's exponent is known. Warps wait for each
 * other only at marks. shared: as job_from_chunk() makes it.
 */
template <step_fn *step, unsigned arrays, typename saving>
DEVICE_FN void update_groups8(const struct update_job &shared, const saving &how, uint32_t n_groups)
{
    per_thread<struct quads<DTYPE_SIGNED8>> now, next;
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
            quad_store_weights(job, i, now.mine().p);
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

/* ---- the optimizers ------------------------------------------------------------------------------------ */

/* Where scalars choose between functions, they do so element by element: one loop for each takes more registers. */
DEVICE_FN struct element adam_any(struct element e, float acc, const struct update_scalars *k)
{
    return k->l2 ? adam_l2(e, acc, k) : adamw(e, acc, k);
}

/* In its first step a parameter's m is read for nothing. */
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

/* way: update_plainly or update_with_undo. */
template <enum optimizer optimizer, typename way> DEVICE_FN void update_by(const struct update_job &job, const way &how)
{
    if constexpr (optimizer == OPTIMIZER_ADAMW)
        how.template run<adamw, M | V>(job);
    else if constexpr (optimizer == OPTIMIZER_ADAM)
        how.template run<adam_any, M | V>(job);
    else if constexpr (optimizer == OPTIMIZER_LION)
        how.template run<lion, M>(job);
    else if constexpr (optimizer == OPTIMIZER_ADAGRAD)
        how.template run<adagrad, V>(job);
    else if constexpr (optimizer == OPTIMIZER_MUON)
        how.template run<muon, 0>(job);
    else if constexpr (optimizer == MUON_MOMENTUM)
        how.template run<muon_any_momentum, M>(job);
    else if (job.k.momentum)
        how.template run<sgd_any_momentum, M>(job);
    else
        how.template run<sgd, 0>(job);
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

/* Arrays that an optimizer does not have are NULL, which is aligned. */
template <enum dtype moments> DEVICE_FN bool has_quads(const struct device_update_range &range)
{
    const size_t moment_bytes = alignof(typename moment<moments>::four);

    return is_aligned(range.p, UNIT_BYTES) && is_aligned(range.m, moment_bytes) && is_aligned(range.v, moment_bytes) &&
           is_aligned(range.acc, UNIT_BYTES) && is_aligned(range.w16, UNIT_BYTES / 2);
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

template <enum optimizer optimizer, enum dtype moments>
static __global__ void __launch_bounds__(BLOCK_THREADS) update_kernel(struct device_update_list list)
{
    update_by<optimizer>(update_job_of<moments>(list, blockIdx.x), update_plainly<moments>());
}

/* With moments in 8 bits. The job lies in shared memory, as that of undo_kernel. */
template <enum optimizer optimizer>
static __global__ void __launch_bounds__(BLOCK_THREADS, 7) update8_kernel(struct device_update_list list)
{
    __shared__ struct update_job job;

    for (phase threads; threads.next();) {
        if (threadIdx.x == 0)
            job = job_from_chunk<DTYPE_SIGNED8>(update_job_of<DTYPE_SIGNED8>(list, blockIdx.x));
    }
    update_by<optimizer>(job, update_plainly<DTYPE_SIGNED8>());
}

/*
 * Blocks are few, and each has several chunks: its slots stay in the L2 while it works. Slots for each chunk would be
 * written to memory once, which is 1.5 bytes more for each element of AdamW.
 */
template <enum optimizer optimizer, enum dtype moments>
static __global__ void __launch_bounds__(BLOCK_THREADS, 6) undo_kernel(struct device_update_list list)
{
    __shared__ struct update_job job;
    struct undo undo = undo_open(list.undo);

#pragma unroll 1
    for (uint32_t i = blockIdx.x; i < list.n_chunks; i += DEVICE_UPDATE_BLOCKS) {
        for (phase threads; threads.next();) {
            if (threadIdx.x == 0)
                job = job_from_chunk<moments>(update_job_of<moments>(list, i));
        }
        const uint32_t n_groups = groups_of(job);

        if (undo.first < undo.at + n_groups)
            update_by<optimizer>(job, update_with_undo<moments>{undo, n_groups});
        else
            wait_for_block(); /* all have read the job before the next one takes its place */
        undo.at += n_groups;
    }
    undo_mark(undo, DEVICE_UNDO_DONE);
}

typedef void update_kernel_fn(struct device_update_list list);

/* Of one optimizer: without undo slots, and with them; moments in fp32, in bf16 and in 8 bits. */
#define KERNELS_OF(optimizer)                                                                                          \
    {                                                                                                                  \
        {update_kernel<optimizer, DTYPE_F32>, undo_kernel<optimizer, DTYPE_F32>},                                      \
            {update_kernel<optimizer, DTYPE_BF16>, undo_kernel<optimizer, DTYPE_BF16>},                                \
            {update8_kernel<optimizer>, undo_kernel<optimizer, DTYPE_SIGNED8>},                                        \
    }

/* In the order of enum optimizer and enum dtype. */
static update_kernel_fn *const update_kernels[DEVICE_N_UPDATES][3][2] = {
    KERNELS_OF(OPTIMIZER_ADAMW), KERNELS_OF(OPTIMIZER_ADAM),    KERNELS_OF(OPTIMIZER_SGD),  KERNELS_OF(OPTIMIZER_LION),
    KERNELS_OF(OPTIMIZER_ADAGRAD), KERNELS_OF(OPTIMIZER_MUON), KERNELS_OF(MUON_MOMENTUM),
};

int device_update(struct CUstream_st *stream, const struct device_update_list *list)
{
    const unsigned moments = dtype_is_grouped(list->moments.dtype) ? 2 : list->moments.dtype;
    const bool undo = list->undo.marks != NULL;

    return device_launch(stream, update_kernels[list->optimizer][moments][undo],
                         undo ? device_update_blocks(list->n_chunks) : list->n_chunks, *list);
}

int load_update(void)
{
    int r = 0;

    for (unsigned i = 0; r == 0 && i < DEVICE_N_UPDATES * 6; i++)
        r = load_kernel(update_kernels[i / 6][i / 2 % 3][i % 2]);
    return r;
}
