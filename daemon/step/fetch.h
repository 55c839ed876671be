/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A fetch: what this node's ranks want of partitions that other nodes own. */

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
    unsigned rank;                 /* FETCH_GATHERED: whose pool */
    const uint64_t *offsets_bytes; /* where to in a pool of a GPU's, or of its size here, for each; copied; else NULL */
    const struct segment *segment; /* where fp32 state goes, from the (one) parameter's start; not for weights */
    /* result: 0; -ECANCELED: the job is given up. Not from within exchange_fetch(). */
    void (*done)(void *userdata, int result);
    void *userdata;
};
