/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * State edits are new masters, moments and step counts. They are collected outside the state while a write window is
 * open, and stored into the state together when the window is committed. Edits that are freed before that change
 * nothing.
 *
 * The segment of the edits has a place for each array of each trainable parameter, in declaration order. A place
 * consists of whole pages and holds fp32 values. Only reserved places have pages. Rank 0 fills the reserved places, or
 * the engine with values from another node.
 *
 * All functions are for one thread, except state_edits_reserve() and state_edits_punch().
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "core/base/worker.h"
#include "daemon/memory/state.h"
#include "kernels/kernels.h"

struct state_edits {
    struct state *state;
    const struct kernels *kernels;
    struct segment segment;  /* rank 0 and the engine map it */
    uint64_t *offsets_bytes; /* per parameter: where the place of its master begins */
    uint8_t *written;        /* per parameter: a set of 1 << enum state_kind and STATE_EDITS_COUNT */
    uint64_t *counts;        /* per parameter: the new step count */
    struct work work;
    void (*done)(void *userdata);
    void *userdata;
};

struct state_edits_place {
    uint64_t offset_bytes, n_bytes; /* whole pages */
};

/* Makes empty edits. state and kernels must outlive the edits. Return: 0 or -errno. */
int state_edits_new(struct state_edits **out, struct state *state, const struct kernels *kernels);
/* Must not be called while the edits are being stored. NULL is fine. */
void state_edits_free(struct state_edits *edits);

/* Removes all marks and counts. The segment keeps its contents. */
void state_edits_clear(struct state_edits *edits);
/* Frees the pages of all places. Any thread may call this. */
void state_edits_punch(const struct state_edits *edits);

/* Return: the place of an array of a trainable parameter. */
struct state_edits_place state_edits_place(const struct state_edits *edits, uint32_t param, enum state_kind kind);

/* Reserves the pages of a place. Any thread may call this. Return: 0 or -errno. */
int state_edits_reserve(const struct state_edits *edits, const struct state_edits_place *place);

/* Sets whether state_edits_store() will store the array. Reserve the array's place before marking it. */
void state_edits_mark(struct state_edits *edits, uint32_t param, enum state_kind kind, bool marked);
bool state_edits_is_marked(const struct state_edits *edits, uint32_t param, enum state_kind kind);
void state_edits_set_count(struct state_edits *edits, uint32_t param, uint64_t count);

/*
 * Lists marks and counts as numbers, to copy them to edits of the same layout on another node. A marked array is
 * parameter << 8 | kind. A count is parameter << 8 | STATE_EDITS_COUNT_FOLLOWS, followed by the count. numbers: NULL to
 * get only their number. Return: how many numbers, at most 2 + STATE_N_KINDS per parameter.
 */
enum { STATE_EDITS_COUNT_FOLLOWS = 0xff };
size_t state_edits_list(const struct state_edits *edits, uint64_t *numbers);

/*
 * Stores the marked arrays on the workers, chunk by chunk, and then the counts. Arrays that are not marked do not
 * change. Needs no memory and cannot fail. done() is called on the thread that reaps.
 */
void state_edits_store(struct state_edits *edits, struct worker_pool *pool, void (*done)(void *userdata),
                       void *userdata);
/* Stores only the counts, because an earlier daemon has stored the arrays. */
void state_edits_store_counts(const struct state_edits *edits);
