/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A snapshot shows the state as it was at one commit, while steps go on. Nothing is copied when it begins. A thread
 * reads the state chunk by chunk, at the pace of the disk. An update that reaches a chunk which has not been read puts
 * that chunk's values aside first, in a pool of bounded size; while the pool is full, it waits until something has been
 * read. While updates put values aside without waiting, the reader pauses.
 *
 * Of each chunk the *arrays* are read one by one:
 *
 *     UNREAD --snapshot_read()--> READ          the usual way: it is read where it always lies
 *     UNREAD --snapshot_put_aside()--> ASIDE --snapshot_read()--> READ
 *
 * Whoever copies an array holds it meanwhile; the other one waits for that copy, some microseconds.
 *
 * snapshot_put_aside() is for workers, before they write a chunk. snapshot_read() is for one thread.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/memory/state.h"

struct snapshot;

enum snapshot_array {
    SNAPSHOT_MASTER = STATE_MASTER, /* of state_dtype(), as the moments; none if masters have 24 bits */
    SNAPSHOT_EXP_AVG = STATE_EXP_AVG,
    SNAPSHOT_EXP_AVG_SQ = STATE_EXP_AVG_SQ,
    SNAPSHOT_WEIGHTS = STATE_N_KINDS, /* of 16 bits; in stage 3 only as a part of masters with 24 bits */
    SNAPSHOT_LOWER,                   /* the low byte of each master of 24 bits */
    SNAPSHOT_N_ARRAYS,
};

/*
 * The memory of what lies aside. It stays from one snapshot to the next, because new pages cost more than the copies
 * that go there; in between the kernel may take them when it needs them.
 */
struct snapshot_pool;
/* n_bytes: the most that may lie aside; 0: updates wait. Return: 0 or -ENOMEM. */
int snapshot_pool_new(struct snapshot_pool **out, uint64_t n_bytes);
/* NULL is fine. */
void snapshot_pool_free(struct snapshot_pool *pool);
/* Gives the pool its pages, so that no update need do that. Takes a while; another thread may end it. */
void snapshot_pool_warm(struct snapshot_pool *pool);
void snapshot_pool_stop_warming(struct snapshot_pool *pool);
/* Nothing lies in it until the next snapshot. */
void snapshot_pool_rest(struct snapshot_pool *pool);

/* No update is under way. The pool is borrowed, by one snapshot at a time. Return: 0 or -ENOMEM. */
int snapshot_new(struct snapshot **out, const struct state *state, struct snapshot_pool *pool);
/* Nobody uses it any more. NULL is fine. */
void snapshot_free(struct snapshot *snapshot);

/* Of n_elems of an array, as they lie in memory. */
static inline size_t snapshot_bytes(const struct state *state, enum snapshot_array array, size_t n_elems)
{
    if (array >= SNAPSHOT_WEIGHTS)
        return array == SNAPSHOT_WEIGHTS ? n_elems * sizeof(uint16_t) : n_elems;
    return dtype_bytes(state_dtype(state, (enum state_kind)array), n_elems);
}

/* dst: the chunk's elements. last: it is not read again. */
void snapshot_read(struct snapshot *snapshot, uint32_t chunk, enum snapshot_array array, void *dst, bool last);
/* The chunk will be written. */
void snapshot_put_aside(struct snapshot *snapshot, uint32_t chunk);
/* Nothing will be read any more: nobody waits, and nothing is put aside. */
void snapshot_give_up(struct snapshot *snapshot);

/* How long workers have waited for the reader, and what lay aside at most. Any thread. */
uint64_t snapshot_waited_ns(const struct snapshot *snapshot);
uint64_t snapshot_peak_bytes(const struct snapshot *snapshot);
