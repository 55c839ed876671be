/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A fetch: elements that this node's ranks want and other nodes own. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/wire/node-wire.h"

struct segment;

struct fetch {
    enum fetch_kind kind;
    bool window;            /* FETCH_PUBLISHED: into the window instead of the pool */
    const uint32_t *params; /* copied */
    size_t n_params;
    unsigned rank;                 /* FETCH_GATHERED: the rank whose pool gets the elements */
    const uint64_t *offsets_bytes; /* per parameter, its place in a GPU's pool or in `landing`; copied; else NULL */
    const struct segment *segment; /* destination of fp32 state, from the (one) parameter's start; not for weights */
    /* result: 0; -ECANCELED: the job is being dropped. Not called from within exchange_fetch(). */
    void (*done)(void *userdata, int result);
    void *userdata;
};
