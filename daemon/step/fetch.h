/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A fetch of elements that this node's ranks need and other nodes own. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/wire/node-wire.h"

struct segment;

struct fetch {
    enum fetch_kind kind;
    bool window;            /* FETCH_PUBLISHED: fetch to the write window, not to the pool */
    const uint32_t *params; /* copied */
    size_t n_params;
    unsigned rank;                 /* FETCH_GATHERED: the rank whose pool gets the elements */
    const uint64_t *offsets_bytes; /* per parameter: offset in a GPU's pool or in `landing`; copied; may be NULL */
    const struct segment *segment; /* destination of one parameter's fp32 state; not for weights */
    /*
     * Called at the end of the fetch, never inside exchange_fetch(). result: 0, or -ECANCELED if the job is being
     * dropped.
     */
    void (*done)(void *userdata, int result);
    void *userdata;
};
