/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A snapshot shows the state at one commit while further steps run. snapshot_new() copies nothing. A thread reads the
 * state chunk by chunk, at the pace of the disk. Before an update changes an unread chunk, the worker copies the
 * chunk's values to a pool of bounded size ("puts them aside"). While the pool is full, the update waits for the
 * reader. While updates put values aside without waiting, the reader pauses.
 *
 * The *arrays* of each chunk are read one by one:
 *
 *     UNREAD --snapshot_read()--> READ          the usual case: read from the state
 *     UNREAD --snapshot_put_aside()--> ASIDE --snapshot_read()--> READ
 *
 * A thread that copies an array sets it to HELD. Another thread waits some microseconds for the end of the copy.
 *
 * Workers call snapshot_put_aside() before they write a chunk. Only one thread calls snapshot_read().
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/memory/state.h"

struct snapshot;

enum snapshot_array {
    SNAPSHOT_MASTER = STATE_MASTER, /* of state_dtype(); absent if masters have 24 bits */
    SNAPSHOT_EXP_AVG = STATE_EXP_AVG,
    SNAPSHOT_EXP_AVG_SQ = STATE_EXP_AVG_SQ,
    SNAPSHOT_WEIGHTS = STATE_N_KINDS, /* of 16 bits; in stage 3 only the upper part of 24-bit masters */
    SNAPSHOT_LOWER,                   /* the low byte of each master of 24 bits */
    SNAPSHOT_N_ARRAYS,
};

/*
 * The memory for values that are put aside. It is kept from one snapshot to the next, because new pages cost more than
 * the copies. Between snapshots the kernel may reclaim the pages.
 */
struct snapshot_pool;
/* Makes a pool. n_bytes: the size of the pool; 0: updates always wait for the reader. Return: 0 or -ENOMEM. */
int snapshot_pool_new(struct snapshot_pool **out, uint64_t n_bytes);
/* NULL is fine. */
void snapshot_pool_free(struct snapshot_pool *pool);
/* Allocates the pool's pages in advance, so that updates do not. Takes long; another thread may stop it. */
void snapshot_pool_warm(struct snapshot_pool *pool);
void snapshot_pool_stop_warming(struct snapshot_pool *pool);
/* Lets the kernel reclaim the pool's pages until the next snapshot. No snapshot may use the pool. */
void snapshot_pool_rest(struct snapshot_pool *pool);

/*
 * Starts a snapshot of the state as it is now. Must not be called during an update. One snapshot at a time may use the
 * pool. Return: 0 or -ENOMEM.
 */
int snapshot_new(struct snapshot **out, const struct state *state, struct snapshot_pool *pool);
/* No thread may still use the snapshot. NULL is fine. */
void snapshot_free(struct snapshot *snapshot);

/* Return: the size in bytes of n_elems elements of an array. */
static inline size_t snapshot_bytes(const struct state *state, enum snapshot_array array, size_t n_elems)
{
    if (array >= SNAPSHOT_WEIGHTS)
        return array == SNAPSHOT_WEIGHTS ? n_elems * sizeof(uint16_t) : n_elems;
    return dtype_bytes(state_dtype(state, (enum state_kind)array), n_elems);
}

/* Reads one array of a chunk into dst. last: the array of this chunk is not read again. */
void snapshot_read(struct snapshot *snapshot, uint32_t chunk, enum snapshot_array array, void *dst, bool last);
/* Puts the chunk's unread arrays aside, because an update will write them. */
void snapshot_put_aside(struct snapshot *snapshot, uint32_t chunk);
/* Ends reading: updates neither wait nor copy. */
void snapshot_give_up(struct snapshot *snapshot);

/* Return: the time that workers have waited for the reader, and the peak use of the pool. Any thread may call them. */
uint64_t snapshot_waited_ns(const struct snapshot *snapshot);
uint64_t snapshot_peak_bytes(const struct snapshot *snapshot);
