/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * With an undo slot, a kernel may be killed between any two instructions. Each worker has a slot, in memory that
 * outlives the process; the slot stays in the nearest cache. Before a kernel changes a group of elements, it saves the
 * group and marks it; afterwards it advances the mark. The next process restores a marked group and runs the kernel
 * again from that group. The bits are those of an undisturbed pass.
 *
 * The stores of a killed process are in program order. So only the compiler must keep the order.
 *
 * Groups are small, so that all memory streams stay in flight. With 1,024 elements per group, saving and updating would
 * alternate between the streams. scripts/bench kernels measures the cost of a slot.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    UNDO_GROUP_ELEMS = 64,
    UNDO_MAX_ARRAYS = 3,
};

struct undo_slot {
    /* The mark is 2 x the number of the next element to change, + 1 while `old` holds its group. The caller numbers the
     * elements. */
    _Alignas(64) _Atomic(uint64_t) mark;
    _Alignas(64) float old[UNDO_MAX_ARRAYS][UNDO_GROUP_ELEMS]; /* of an update: p, m, v; of a reduce: acc */
};

/* Orders this thread's earlier stores before its later ones. */
static inline void undo_order(void)
{
    atomic_signal_fence(memory_order_seq_cst);
}

static inline void undo_mark(struct undo_slot *slot, uint64_t elem, bool is_saved)
{
    undo_order();
    atomic_store_explicit(&slot->mark, 2 * elem + is_saved, memory_order_relaxed);
    undo_order();
}

static inline uint64_t undo_next_elem(const struct undo_slot *slot)
{
    return atomic_load_explicit(&slot->mark, memory_order_relaxed) / 2;
}

/* Saves n elements of one array, at most UNDO_GROUP_ELEMS. */
static inline void undo_save(struct undo_slot *slot, unsigned array, const float *elems, size_t n)
{
    memcpy(slot->old[array], elems, n * sizeof(float));
}

/* Restores n elements of one array, if the slot holds saved elements. elems: the array at undo_next_elem(). */
static inline void undo_put_back(const struct undo_slot *slot, unsigned array, float *elems, size_t n)
{
    if (atomic_load_explicit(&slot->mark, memory_order_relaxed) % 2 == 1)
        memcpy(elems, slot->old[array], n * sizeof(float));
}
