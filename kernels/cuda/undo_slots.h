/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The undo slots of an update on a GPU (device.h, struct device_update_undo).
 *
 * A block works on its chunks group by group, four elements a thread. It saves a group in one of its two slots, marks
 * it, and only then writes the new values. The slots take turns, so that the marked group stays whole while the next
 * one is saved. The next launch of the same list finds the mark, puts the marked group back and goes on from it; it may
 * be killed as well.
 *
 * If a process dies, the driver ends its kernels, and a later kernel on the same device reads the slots. It finds every
 * store that a fence has waited for, in the device's memory or in its L2, which all processes share. Stores after the
 * fence may be there or not, in any order. Neither another device nor the host reads slots, so __threadfence() is
 * enough. One thread fences for its block: a fence also orders the stores of other threads before a barrier that this
 * thread has passed, and grids that synchronize rely on that.
 */

#include "kernels/cuda/block.h"

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

template <typename elem> DEVICE_FN void undo_copy(elem *to, const elem *from, uint32_t i, uint32_t n_elems)
{
#pragma unroll 1
    for (unsigned k = 0; k < 4 && i + k < n_elems; k++)
        to[k] = from[k];
}
