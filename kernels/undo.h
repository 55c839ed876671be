/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * An undo slot lets a kernel be killed between any two instructions. It lies in memory that outlives the process, one
 * for each worker, and stays in the nearest cache. Before a kernel changes a group of elements, it saves the group and
 * marks it; afterwards it moves the mark on. Whoever finds the slot puts a marked group back and runs the kernel again
 * from there: the bits are those of an undisturbed pass.
 *
 * A killed process has made its stores in the order of the program. So it is enough that the compiler keeps the order.
 *
 * Groups are small, so that all memory streams stay in flight: saving and updating 1,024 elements at a time would take
 * turns between them. scripts/bench kernels says what a slot costs.
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
    /* 2 x the next element that is changed, + 1 while `old` holds its group. The caller counts the elements. */
    _Alignas(64) _Atomic(uint64_t) mark;
    _Alignas(64) float old[UNDO_MAX_ARRAYS][UNDO_GROUP_ELEMS]; /* of an update: p, m, v; of a reduce: acc */
};

/* Stores of this thread before it stay before it, those after it stay after it. */
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

/* Saves n elements, at most UNDO_GROUP_ELEMS, of one array. */
static inline void undo_save(struct undo_slot *slot, unsigned array, const float *elems, size_t n)
{
    memcpy(slot->old[array], elems, n * sizeof(float));
}

/* Puts back n elements of one array, if the slot has them. elems: the array at undo_next_elem(). */
static inline void undo_put_back(const struct undo_slot *slot, unsigned array, float *elems, size_t n)
{
    if (atomic_load_explicit(&slot->mark, memory_order_relaxed) % 2 == 1)
        memcpy(elems, slot->old[array], n * sizeof(float));
}
