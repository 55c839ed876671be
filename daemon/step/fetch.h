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
    bool window;            /* FETCH_PUBLISHED: to the window instead of the pool */
    const uint32_t *params; /* copied */
    size_t n_params;
    unsigned rank;                 /* FETCH_GATHERED: the rank whose pool gets the elements */
    const uint64_t *offsets_bytes; /* per parameter: its place in a GPU's pool or in `landing`; copied; or NULL */
    const struct segment *segment; /* destination of the fp32 state of one parameter; not for weights */
    /* result: 0, or -ECANCELED if the job is being dropped. Not called from within exchange_fetch(). */
    void (*done)(void *userdata, int result);
    void *userdata;
};
