/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Inside of window.c (begin, end), window-write.c (moments and step counts) and window-commit.c. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "core/base/sequence.h"
#include "core/base/worker.h"
#include "daemon/memory/quota.h"
#include "daemon/memory/state-edits.h"
#include "daemon/memory/state.h"

struct job;

/* Reserves the pages of an array of the edits. Rank 0 waits for it, or is gone. */
struct writing {
    struct work work;
    struct job *job;
    uint32_t param;
    enum state_kind kind;
    struct state_edits_place place;
    int result;
};

struct window {
    struct segment segment;
    struct charge charge;
    struct state_edits *edits; /* NULL: nothing of the state was written yet */
    struct charge edits_charge;
    struct charge copy_charge; /* of the staging copy, while it is filled; several nodes: until the window is over */
    struct writing writing;
    struct sequence commit;
    struct work retry;   /* of a stage of the commit */
    struct work prepare; /* its memory for rank 0 */
    struct job *job;
    int prepare_result;
    bool ready;         /* shows the weights */
    bool stores;        /* node 0 has said so: the commit begins when nothing else is under way in the window */
    bool brings;        /* the daemon before has loaded the staging copy, and may have stored some of it on GPUs */
    bool busy;          /* a transfer, the commit or reserving pages of the edits is under way */
    bool awaits_save;   /* the commit waits until a checkpoint is written */
    bool stale;         /* its writer died: to be filled again for the successor */
    bool lacks_memory;  /* several nodes, on which it is open: to be tried again when a rank asks again */
    bool forgotten;     /* while it was busy: it is freed when that ends */
    unsigned n_filling; /* transfers: of what is here, and of what other nodes have */
    int fill_result;
};

/* The pages of the staging copy are given back. Several nodes: they stay charged, because they have to be there when
 * all nodes have said that the window is to be committed. */
void window_discharge_copy(struct job *job);

/* Frees the window: nothing is under way in it. */
void window_end(struct job *job);

/* Edits of the window, recorded for the next daemon. */
void window_mark(struct job *job, uint32_t param, enum state_kind kind, bool marked);
void window_set_count(struct job *job, uint32_t param, uint64_t count);

/* Stores the window. Reports it to the coordinator, or refuses all ranks that end the window. */
void window_commit(struct job *job);

/* The window is over, committed or forgotten: ranks that end it are answered. */
void window_finish(struct job *job);
