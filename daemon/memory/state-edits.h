/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * State edits: new masters, moments and step counts, collected beside the state while a write window is open, and
 * stored into it all at once when the window is committed. Edits that are freed instead have changed nothing.
 *
 * The segment of the edits has a place for each array of each trainable parameter, whole pages in fp32, parameters in
 * declaration order. It is sparse: only places that were reserved have pages. Rank 0, or the engine between nodes,
 * fills them.
 *
 * All verbs on one thread, but state_edits_reserve() and state_edits_punch().
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
    struct segment segment;  /* to be handed out */
    uint64_t *offsets_bytes; /* per parameter: of its master's place */
    uint8_t *written;        /* per parameter: 1 << enum state_kind, STATE_EDITS_COUNT */
    uint64_t *counts;        /* per parameter */
    struct work work;
    void (*done)(void *userdata);
    void *userdata;
};

struct state_edits_place {
    uint64_t offset_bytes, n_bytes; /* whole pages */
};

/* state and kernels are not consumed and must outlive it. Return: 0 or -errno. */
int state_edits_new(struct state_edits **out, struct state *state, const struct kernels *kernels);
/* NULL is fine. Not while it is being stored. */
void state_edits_free(struct state_edits *edits);

/* Nothing is written any more. The segment stays, with its contents. */
void state_edits_clear(struct state_edits *edits);
/* Gives the pages of all places back; any thread. */
void state_edits_punch(const struct state_edits *edits);

/* The place of an array of a trainable parameter. */
struct state_edits_place state_edits_place(const struct state_edits *edits, uint32_t param, enum state_kind kind);

/* Pages for a place; any thread. Return: 0 or -errno. */
int state_edits_reserve(const struct state_edits *edits, const struct state_edits_place *place);

/* The contents of the place, which has pages, are to be stored. */
void state_edits_mark(struct state_edits *edits, uint32_t param, enum state_kind kind, bool marked);
bool state_edits_is_marked(const struct state_edits *edits, uint32_t param, enum state_kind kind);
void state_edits_set_count(struct state_edits *edits, uint32_t param, uint64_t count);

/*
 * Marks and counts, as numbers that other edits of the same layout can be given: parameter << 8 | kind
 * for an array; parameter << 8 | STATE_EDITS_COUNT_FOLLOWS, and then the count. Return: how many, at most 2 +
 * STATE_N_KINDS per parameter; numbers may be NULL, to count.
 */
enum { STATE_EDITS_COUNT_FOLLOWS = 0xff };
size_t state_edits_list(const struct state_edits *edits, uint64_t *numbers);

/*
 * Stores the marked arrays on the workers, one owned partition after the other, then the counts; arrays that are not
 * marked do not change. Needs no memory and cannot fail. done() is called on the thread that reaps.
 */
void state_edits_store(struct state_edits *edits, struct worker_pool *pool, void (*done)(void *userdata),
                       void *userdata);
/* Stores the counts alone: an earlier daemon has stored the arrays. */
void state_edits_store_counts(const struct state_edits *edits);
