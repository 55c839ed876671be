/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The undo slots of an update on a GPU (device.h, struct device_update_undo).
 *
 * A block works on its chunks group by group, four elements per thread. It saves a group in one of its two slots, marks
 * it, and only then writes the new values. The slots alternate, so the slot of the marked group does not change while
 * the next group is saved. If the process is killed, the next launch of the same list finds the mark, restores the
 * marked group and continues from it. That launch may be killed, too.
 *
 * If a process dies, the driver ends its kernels, and a later kernel on the same device reads the slots. That kernel
 * sees every store before a fence, in the device's memory or in its L2, which all processes share. It may see any of
 * the stores after the fence. Neither another device nor the host reads slots, so __threadfence() is enough. One thread
 * fences for its block: a fence also orders the stores of other threads before a barrier that this thread has passed,
 * and grids that synchronize rely on that.
 */

#include "kernels/cuda/block.h"

struct undo {
    uint64_t *mark;
    float *slots;
    uint64_t tag;        /* shifted to its place in a mark */
    uint32_t slot_words; /* of 4 bytes: with bytes, nvcc 13.0 uses more registers */
    uint32_t at;         /* number of groups in the chunks that this block has finished */
    uint32_t first;      /* the first group to update; earlier groups have their new values */
    bool goes_on;        /* group `first` is saved, and may be half written */
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

/* Marks the group. All earlier stores of this block come before the mark, and all later stores after it. */
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

/* The thread's four elements of an array in a group's slot. before: bytes per element of the slot's arrays before this
 * one. */
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
