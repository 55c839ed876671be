/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Master weights on a GPU. masters<false> are fp32, with a separate 16-bit weight or without one. masters<true> have 24
 * bits (kernels/master24.h), which include the weight. An object has the four masters of a thread, in the types of
 * memory. In all functions, i is the number of an element from the start of the job's range. If a function handles four
 * elements, i is the first one's number.
 */

#include "kernels/cuda/undo_slots.h"
#include "kernels/cuda/update_job.h"
#include "kernels/master24.h"

template <bool has_24_bits> struct masters;

/* ---- fp32 ---------------------------------------------------------------------------------------------- */

DEVICE_FN uint16_t narrow(float x, uint32_t dtype)
{
    return dtype == DTYPE_BF16 ? bf16_from_f32(x) : f16_from_f32(x);
}

/* Loads the first n of four elements and sets the others to 0. is_quad: all four elements exist and are aligned. */
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

template <> struct masters<false> {
    struct quad p;

    static DEVICE_MEMBER float load_one(const struct update_job &job, uint64_t i)
    {
        return job.range.p[i];
    }

    static DEVICE_MEMBER void store_one(const struct update_job &job, uint64_t i, float p)
    {
        const struct device_update_range &range = job.range;

        range.p[i] = p;
        if (range.w16_dtype != DTYPE_F32)
            static_cast<uint16_t *>(range.w16)[i] = narrow(p, range.w16_dtype);
    }

    static DEVICE_MEMBER struct masters load(const struct update_job &job, uint64_t i)
    {
        return {quad_load_once(job.range.p + i)};
    }

    /* Loads the first n masters. is_quad: all four masters exist and are aligned. */
    static DEVICE_MEMBER struct masters load_some(const struct update_job &job, uint32_t i, uint32_t n, bool is_quad)
    {
        return {quad_load_some(job.range.p + i, n, is_quad)};
    }

    DEVICE_MEMBER float value(unsigned k) const
    {
        return p.x[k];
    }

    DEVICE_MEMBER void set(const struct update_job &, uint64_t, unsigned k, float x)
    {
        p.x[k] = x;
    }

    DEVICE_MEMBER void store(const struct update_job &job, uint64_t i) const
    {
        quad_store_once(job.range.p + i, p);
    }

    /* Stores the weights. Kernels call it after they store the moments, because this order was measured on a GPU. */
    DEVICE_MEMBER void store_weights(const struct update_job &job, uint64_t i) const
    {
        const struct device_update_range &range = job.range;
        struct half_quad four;

        if (range.w16_dtype == DTYPE_F32)
            return;
#pragma unroll
        for (unsigned k = 0; k < 4; k++)
            four.x[k] = narrow(p.x[k], range.w16_dtype);
        *reinterpret_cast<struct half_quad *>(static_cast<uint16_t *>(range.w16) + i) = four;
    }

    /* Stores the first n masters and their weights, at any address. */
    DEVICE_MEMBER void store_some(const struct update_job &job, uint32_t i, uint32_t n) const
    {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            if (k < n)
                store_one(job, i + k, p.x[k]);
        }
    }

    /* Saves the masters. Weights are not saved, because they are computed from p. */
    DEVICE_MEMBER void save(const struct undo &undo, uint32_t group) const
    {
        *reinterpret_cast<struct quad *>(undo_at<float>(undo, group, 0)) = p;
    }

    /* Copies the thread's masters from memory to the slot. i: the number of its first master; end: the job's end. */
    static DEVICE_MEMBER void save_some(const struct undo &undo, uint32_t group, const struct update_job &job,
                                        uint32_t i, uint32_t end)
    {
        undo_copy<float>(undo_at<float>(undo, group, 0), job.range.p + i, i, end);
    }

    static DEVICE_MEMBER void put_back(const struct undo &undo, uint32_t group, const struct update_job &job,
                                       uint32_t i, uint32_t end)
    {
        undo_copy<float>(job.range.p + i, undo_at<float>(undo, group, 0), i, end);
    }
};

/* ---- 24 bits ------------------------------------------------------------------------------------------- */

DEVICE_FN uint16_t *weights24(const struct update_job &job, uint64_t i)
{
    return static_cast<uint16_t *>(job.range.w16) + i;
}

/* Rounds an element's new value to 24 bits, with the draws that update_kernel.c uses. The range must begin at a group's
 * start. */
DEVICE_FN uint32_t round24(const struct update_job &job, uint64_t i, float p)
{
    const uint64_t elem = job.range.start_elem + i;
    const uint64_t number = elem / MASTER24_GROUP_ELEMS * MASTER24_DRAWS + elem % MASTER24_DRAWS;
    const uint32_t draw = rounding_draw(~job.k.rounding_key, static_cast<uint32_t>(number));

    return master24_at_random(p, master24_round(draw, elem % MASTER24_GROUP_ELEMS));
}

template <> struct masters<true> {
    struct half_quad weights;
    uint32_t lower; /* the first element's byte is the lowest one */

    static DEVICE_MEMBER float load_one(const struct update_job &job, uint64_t i)
    {
        return master24_value(*weights24(job, i), job.range.lower[i]);
    }

    static DEVICE_MEMBER void store_one(const struct update_job &job, uint64_t i, float p)
    {
        const uint32_t bits = round24(job, i, p);

        *weights24(job, i) = master24_weight(bits);
        job.range.lower[i] = master24_lower(bits);
    }

    static DEVICE_MEMBER struct masters load(const struct update_job &job, uint64_t i)
    {
        return {quad_load_once(weights24(job, i)), word_load_once(job.range.lower + i)};
    }

    static DEVICE_MEMBER struct masters load_some(const struct update_job &job, uint32_t i, uint32_t n, bool is_quad)
    {
        struct masters four = {};

        if (is_quad)
            return load(job, i);
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            if (k < n)
                four.put(k, *weights24(job, i + k), job.range.lower[i + k]);
        }
        return four;
    }

    DEVICE_MEMBER float value(unsigned k) const
    {
        return master24_value(weights.x[k], static_cast<int8_t>(lower >> 8 * k));
    }

    DEVICE_MEMBER void put(unsigned k, uint16_t weight, int8_t byte)
    {
        weights.x[k] = weight;
        lower = (lower & ~(0xffu << 8 * k)) | static_cast<uint32_t>(static_cast<uint8_t>(byte)) << 8 * k;
    }

    DEVICE_MEMBER void set(const struct update_job &job, uint64_t i, unsigned k, float x)
    {
        const uint32_t bits = round24(job, i + k, x);

        put(k, master24_weight(bits), master24_lower(bits));
    }

    DEVICE_MEMBER void store(const struct update_job &job, uint64_t i) const
    {
        *reinterpret_cast<struct half_quad *>(weights24(job, i)) = weights;
        word_store_once(job.range.lower + i, lower);
    }

    DEVICE_MEMBER void store_weights(const struct update_job &, uint64_t) const
    {
    }

    DEVICE_MEMBER void store_some(const struct update_job &job, uint32_t i, uint32_t n) const
    {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            if (k < n) {
                *weights24(job, i + k) = weights.x[k];
                job.range.lower[i + k] = static_cast<int8_t>(lower >> 8 * k);
            }
        }
    }

    DEVICE_MEMBER void save(const struct undo &undo, uint32_t group) const
    {
        *reinterpret_cast<struct half_quad *>(undo_at<uint16_t>(undo, group, 0)) = weights;
        *reinterpret_cast<uint32_t *>(undo_at<int8_t>(undo, group, sizeof(uint16_t))) = lower;
    }

    static DEVICE_MEMBER void save_some(const struct undo &undo, uint32_t group, const struct update_job &job,
                                        uint32_t i, uint32_t end)
    {
        undo_copy<uint16_t>(undo_at<uint16_t>(undo, group, 0), weights24(job, i), i, end);
        undo_copy<int8_t>(undo_at<int8_t>(undo, group, sizeof(uint16_t)), job.range.lower + i, i, end);
    }

    static DEVICE_MEMBER void put_back(const struct undo &undo, uint32_t group, const struct update_job &job,
                                       uint32_t i, uint32_t end)
    {
        undo_copy<uint16_t>(weights24(job, i), undo_at<uint16_t>(undo, group, 0), i, end);
        undo_copy<int8_t>(job.range.lower + i, undo_at<int8_t>(undo, group, sizeof(uint16_t)), i, end);
    }
};
