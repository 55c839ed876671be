/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A rewrite: masters, moments and step counts that are to be, collected beside the state while a write window
 * is open, and stored into it at once when the window is committed. Freed instead, it has changed nothing.
 *
 * Its segment has a place for each array of each trainable parameter, whole pages in fp32, parameters in
 * declaration order. It is sparse: only places that were reserved have pages. Whoever is handed the segment fills them.
 *
 * All verbs on one thread, but rewrite_reserve().
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "core/base/worker.h"
#include "daemon/memory/state.h"
#include "kernels/kernels.h"

struct rewrite {
    const struct state *state;
    const struct kernels *kernels;
    struct segment segment;  /* to be handed out */
    uint64_t *offsets_bytes; /* per parameter: of its master's place */
    uint8_t *written;        /* per parameter: 1 << enum state_kind, REWRITE_COUNT */
    uint64_t *counts;        /* per parameter */
    struct work work;
    void (*done)(void *userdata);
    void *userdata;
};

struct rewrite_place {
    uint64_t offset_bytes, n_bytes; /* whole pages */
};

/* state and kernels are not consumed and must outlive it. Return: 0 or -errno. */
int rewrite_new(struct rewrite **out, const struct state *state, const struct kernels *kernels);
/* NULL is fine. Not while it is being stored. */
void rewrite_free(struct rewrite *rewrite);

/* Of a trainable parameter. */
struct rewrite_place rewrite_place(const struct rewrite *rewrite, uint32_t param, enum state_kind kind);

/* Pages for a place; any thread. Return: 0 or -errno. */
int rewrite_reserve(const struct rewrite *rewrite, const struct rewrite_place *place);

/* What is in the place, which has pages, is to be stored. */
void rewrite_mark(struct rewrite *rewrite, uint32_t param, enum state_kind kind);
bool rewrite_is_marked(const struct rewrite *rewrite, uint32_t param, enum state_kind kind);
void rewrite_set_count(struct rewrite *rewrite, uint32_t param, uint64_t count);

/*
 * What is marked and counted, as numbers that another rewrite of the same layout can be given: parameter << 8 | kind
 * for an array; parameter << 8 | REWRITE_COUNT_FOLLOWS, and then the count. Return: how many, at most 2 + STATE_N_KINDS
 * per parameter; numbers may be NULL, to count.
 */
enum { REWRITE_COUNT_FOLLOWS = 0xff };
size_t rewrite_list(const struct rewrite *rewrite, uint64_t *numbers);

/*
 * Stores what is marked on the workers, partition by partition of those that are owned, then the counts; what is
 * not marked stays. Needs no memory and cannot fail. done on the thread that reaps.
 */
void rewrite_store(struct rewrite *rewrite, struct worker_pool *pool, void (*done)(void *userdata), void *userdata);
