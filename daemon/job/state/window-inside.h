/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Internals of window.c (begin, end), window-write.c (moments and step counts) and window-commit.c. */

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

/* Work that reserves the pages of one array of the edits. Rank 0 waits for it, unless it has died meanwhile. */
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
    struct state_edits *edits; /* NULL: no state was written yet */
    struct charge edits_charge;
    struct charge copy_charge; /* charges the staging copy while it is filled; several nodes: until the window ends */
    struct writing writing;
    struct sequence commit;
    struct work retry;   /* retries a failed stage of the commit */
    struct work prepare; /* clears the edits for rank 0 */
    struct job *job;
    int prepare_result;
    bool ready;         /* the segment shows the weights */
    bool stores;        /* the coordinator has ordered the commit, which begins when the window has no other work */
    bool brings;        /* an earlier daemon loaded the staging copy, and may have stored some of it on GPUs */
    bool busy;          /* a transfer, the commit or reserving pages of the edits is under way */
    bool awaits_save;   /* the commit waits until a checkpoint is written */
    bool stale;         /* rank 0 died, so the window must be filled again for its successor */
    bool lacks_memory;  /* several nodes: the window is open without memory; it tries again when a rank asks again */
    bool forgotten;     /* the window was forgotten while busy, and is freed when its work ends */
    unsigned n_filling; /* running works that fill the window: from this node, from other nodes, and `prepare` */
    int fill_result;
};

/*
 * Discharges the staging copy, after its pages are freed. On several nodes the copy stays charged, because the memory
 * must be free when all nodes have agreed to commit the window.
 */
void window_discharge_copy(struct job *job);

/* Frees the window. Call it when no work of the window is under way. */
void window_end(struct job *job);

/* Change the edits of the window, and record the change for the next daemon. */
void window_mark(struct job *job, uint32_t param, enum state_kind kind, bool marked);
void window_set_count(struct job *job, uint32_t param, uint64_t count);

/* Stores the window. Then reports it to the coordinator, or refuses all ranks that end the window. */
void window_commit(struct job *job);

/* Ends the committed or forgotten window, and answers the ranks that wait for its end. */
void window_finish(struct job *job);
