/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The published page: which parameters already have the weights of a step that is decided and still being written. One
 * for all ranks of a job, written by the daemon alone, mapped read-only by the clients.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct published_page {
    uint64_t n_params;
    /*
     * Per parameter: its weights are at least those of after so many steps. Written with release order behind the
     * weights, and read with acquire order before them. Only an update in the daemon's own memory says so: what comes
     * with a write window, a checkpoint or the initial weights is there when its answer is.
     */
    _Atomic uint64_t steps[];
};

static inline uint64_t published_page_bytes(uint32_t n_params)
{
    return sizeof(struct published_page) + (uint64_t)n_params * sizeof(uint64_t);
}

/* Return: whether the parameter has the weights of after n_steps steps; if so, the caller reads those, or later ones.
 */
static inline bool published_is_there(const struct published_page *page, uint32_t param, uint64_t n_steps)
{
    return atomic_load_explicit(&page->steps[param], memory_order_acquire) >= n_steps;
}
