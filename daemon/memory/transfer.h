/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A transfer copies whole parameters between the state and a segment, piece by piece on the workers. Transfers gather
 * parameters (state to pool), open a write window (state to window) and commit it (window to state).
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "core/base/worker.h"
#include "daemon/memory/state.h"
#include "kernels/kernels.h"

enum transfer_direction {
    TRANSFER_FETCH, /* from state to segment; first reserves the segment's pages */
    TRANSFER_STORE, /* from segment to state */
};

struct transfer_options {
    const struct state *state;
    const struct kernels *kernels;
    const struct segment *segment; /* must stay until done() */
    const uint32_t *params;        /* NULL: all parameters */
    uint32_t n_params;
    bool range; /* the segment is laid out as the range of stage 3 (layout.h), else as the weight segment */
    enum transfer_direction direction;
    /* Called on the thread that reaps. result: 0 or -errno (out of memory). */
    void (*done)(void *userdata, int result);
    void *userdata;
};

/* Return: 0 or -ENOMEM. After -ENOMEM, done() is not called. */
int transfer_start(struct worker_pool *pool, const struct transfer_options *options);
