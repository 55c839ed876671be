/* SPDX-License-Identifier: Apache-2.0 */

/* Maintains the published page of a job. The parameter's word is set when its last chunk is updated. */

#include "daemon/step/published.h"

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/base/base.h"
#include "core/base/segment.h"
#include "core/layout/layout.h"
#include "proto/published.h"

struct published {
    const struct layout *layout;
    struct segment segment;
    uint64_t n_steps;          /* number of steps, including the running update */
    uint32_t *order;           /* chunks, in the order of the update */
    _Atomic(uint32_t) *n_left; /* per parameter: unfinished chunks */
};

static struct published_page *page_of(const struct published *published)
{
    return (struct published_page *)(void *)published->segment.map;
}

/* ---- the order of chunks --------------------------------------------------------------------------------- */

/*
 * Chunks that are neighbours in memory, and are updated in the order of their addresses. A run collects small chunks.
 * Without runs the update would use declaration order, which goes down in memory, and 10,000 parameters of 4 KiB would
 * take 1.8 times as long.
 */
struct run {
    uint32_t first_chunk, n_chunks;
    uint32_t first_param; /* the parameter that is declared first */
    uint32_t bucket;
    uint64_t n_elems;
};

static int compare_runs(const void *a, const void *b)
{
    const struct run *x = a, *y = b;

    if (x->first_param != y->first_param)
        return x->first_param < y->first_param ? -1 : 1;
    return x->first_chunk < y->first_chunk ? -1 : 1;
}

/* Divides all chunks into runs. runs: room for one run per chunk. Return: the number of runs. */
static uint32_t find_runs(const struct layout *layout, struct run *runs)
{
    uint32_t n = 0;

    for (uint32_t c = 0; c < layout->n_chunks; c++) {
        const struct layout_chunk *chunk = &layout->chunks[c];
        uint32_t bucket = layout->params[chunk->param].bucket;

        if (n == 0 || runs[n - 1].bucket != bucket || runs[n - 1].n_elems + chunk->n_elems > CHUNK_ELEMS)
            runs[n++] = (struct run){.first_chunk = c, .first_param = chunk->param, .bucket = bucket};
        runs[n - 1].n_chunks++;
        runs[n - 1].n_elems += chunk->n_elems;
        runs[n - 1].first_param = MIN(runs[n - 1].first_param, chunk->param);
    }
    return n;
}

/* Computes published->order. Return: 0 or -ENOMEM. */
static int find_order(struct published *published)
{
    uint32_t n_chunks = published->layout->n_chunks, n = 0, n_runs;
    _cleanup_free_ struct run *runs = calloc(n_chunks + 1, sizeof(*runs));

    if (!runs)
        return -ENOMEM;
    n_runs = find_runs(published->layout, runs);
    qsort(runs, n_runs, sizeof(*runs), compare_runs);
    for (uint32_t i = 0; i < n_runs; i++)
        for (uint32_t c = 0; c < runs[i].n_chunks; c++)
            published->order[n++] = runs[i].first_chunk + c;
    assert(n == n_chunks);
    return 0;
}

/* ---- life ------------------------------------------------------------------------------------------------ */

int published_new(struct published **out, const struct layout *layout)
{
    struct published *published = calloc(1, sizeof(*published));
    char name[SEGMENT_NAME_BYTES];
    int r = -ENOMEM;

    if (!published)
        return -ENOMEM;
    published->layout = layout;
    published->segment = SEGMENT_NULL;
    published->order = calloc(layout->n_chunks + 1, sizeof(*published->order));
    published->n_left = calloc(layout->n_params, sizeof(*published->n_left));
    /*
     * The name contains the world size, because while it changes, the page of the old world size still exists
     * (step-kept.c).
     */
    snprintf(name, sizeof(name), "published.%u", layout->world_size);
    if (published->order && published->n_left)
        r = find_order(published);
    if (r == 0)
        r = segment_init_published_later(&published->segment, name, published_page_bytes(layout->n_params));
    if (r < 0) {
        published_free(published);
        return r;
    }
    page_of(published)->n_params = layout->n_params;
    *out = published;
    return 0;
}

void published_free(struct published *published)
{
    if (!published)
        return;
    segment_deinit(&published->segment);
    free(published->order);
    free((void *)published->n_left);
    free(published);
}

/* ---- an update ------------------------------------------------------------------------------------------- */

const struct segment *published_segment(const struct published *published)
{
    return &published->segment;
}

static void raise_to_now(const struct published *published, uint32_t param)
{
    atomic_store_explicit(&page_of(published)->steps[param], published->n_steps, memory_order_release);
}

void published_begin(struct published *published, uint64_t n_steps)
{
    assert(n_steps > 0);
    published->n_steps = n_steps;
    for (uint32_t p = 0; p < published->layout->n_params; p++) {
        uint32_t n_chunks = published->layout->params[p].n_chunks;

        atomic_store_explicit(&published->n_left[p], n_chunks, memory_order_relaxed);
        if (n_chunks == 0) /* the parameter is frozen or empty */
            raise_to_now(published, p);
    }
}

uint32_t published_chunk(const struct published *published, uint32_t i)
{
    assert(i < published->layout->n_chunks);
    return published->order[i];
}

/*
 * Counts a finished chunk. Return: whether it was the parameter's last chunk. Then this worker sees the other workers'
 * writes, and publishes the parameter.
 */
static bool is_last(struct published *published, uint32_t param)
{
    /* A parameter with one chunk has no count, so that workers do not contend for the cache lines of n_left. */
    return published->layout->params[param].n_chunks == 1 ||
           atomic_fetch_sub_explicit(&published->n_left[param], 1, memory_order_acq_rel) == 1;
}

void published_add(struct published *published, uint32_t chunk)
{
    uint32_t param = published->layout->chunks[chunk].param;

    assert(published->n_steps > 0); /* published_begin() was called */
    if (is_last(published, param))
        raise_to_now(published, param);
}
