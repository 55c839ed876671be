/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A transfer: whole parameters between the state and a segment, piece by piece
 * on the workers. Gathering (state to pool), opening a write window (state to
 * window) and committing one (window to state) are transfers.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "core/base/worker.h"
#include "daemon/memory/state.h"
#include "kernels/kernels.h"

enum transfer_direction {
    TRANSFER_FETCH, /* state to segment, pages reserved first */
    TRANSFER_STORE, /* segment to state */
};

struct transfer_options {
    const struct state *state;
    const struct kernels *kernels;
    const struct segment *segment; /* must stay until done */
    const uint32_t *params;        /* NULL: all */
    uint32_t n_params;
    bool range; /* places are those of the range (stage 3), else of the weight segment */
    enum transfer_direction direction;
    /* On the thread that reaps. result: 0 or -errno (no memory). */
    void (*done)(void *userdata, int result);
    void *userdata;
};

/* Return: 0, or -ENOMEM: done() will not be called. */
int transfer_start(struct worker_pool *pool, const struct transfer_options *options);
