/* SPDX-License-Identifier: Apache-2.0 */

/* The addresses on a GPU where gathered weights are read, and the memory at these addresses (range.h). */

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "client/lib/memory/cuda.h"
#include "client/lib/memory/range.h"
#include "core/base/base.h"
#include "core/layout/layout.h"

struct range_memory {
    uint64_t memory;
    size_t n_bytes;
};

struct range_param {
    uint64_t offset_bytes;
    size_t n_bytes, n_mapped_bytes; /* sizes of weights and of memory; 0: no elements */
    bool mapped, hidden;            /* a hidden parameter is mapped too */
    uint64_t memory;
    void *event; /* recorded when the parameter is hidden; NULL: never hidden yet */
};

struct range {
    struct cuda *cuda;
    uint8_t *base;
    size_t n_bytes;
    void *stream; /* stream of the copies */
    uint64_t bound_bytes, held_bytes;
    uint32_t n_params, n_hidden, n_free;
    struct range_param *params;
    uint32_t *hidden;          /* longest hidden first */
    struct range_memory *free; /* at most n_params, because each was once mapped for a parameter */
};

/* ---- memory -------------------------------------------------------------------------------------------- */

static void destroy_free(struct range *range, uint32_t i)
{
    cuda_destroy(range->cuda, range->free[i].memory);
    range->held_bytes -= range->free[i].n_bytes;
    range->free[i] = range->free[--range->n_free];
}

static void destroy_all_free(struct range *range)
{
    while (range->n_free > 0)
        destroy_free(range, range->n_free - 1);
}

static bool reuse_free(struct range *range, size_t n_bytes, uint64_t *memory)
{
    for (uint32_t i = range->n_free; i-- > 0;) {
        if (range->free[i].n_bytes != n_bytes)
            continue;
        *memory = range->free[i].memory;
        range->free[i] = range->free[--range->n_free];
        return true;
    }
    return false;
}

static void add_free(struct range *range, uint64_t memory, size_t n_bytes)
{
    assert(range->n_free < range->n_params);
    range->free[range->n_free++] = (struct range_memory){memory, n_bytes};
}

static void remove_hidden(struct range *range, uint32_t i)
{
    range->params[range->hidden[i]].hidden = false;
    range->n_hidden--;
    memmove(&range->hidden[i], &range->hidden[i + 1], (range->n_hidden - i) * sizeof(range->hidden[0]));
}

/* Makes the memory of the longest hidden parameter free. Call it when no work reads the parameter. */
static int unmap_first(struct range *range)
{
    struct range_param *p = &range->params[range->hidden[0]];
    int r = cuda_take_away(range->cuda, range->base + p->offset_bytes, p->n_mapped_bytes);

    if (r != 0)
        return r;
    remove_hidden(range, 0);
    p->mapped = false;
    add_free(range, p->memory, p->n_mapped_bytes);
    return 0;
}

static int unmap_past(struct range *range)
{
    bool is_past = true;
    int r = 0;

    while (r == 0 && range->n_hidden > 0) {
        r = cuda_is_past(range->cuda, range->params[range->hidden[0]].event, &is_past);
        if (r != 0 || !is_past)
            break;
        r = unmap_first(range);
    }
    return r;
}

static int wait_for_first(struct range *range)
{
    int r = cuda_wait_until_past(range->cuda, range->params[range->hidden[0]].event);

    return r == 0 ? unmap_first(range) : r;
}

static int create(struct range *range, size_t n_bytes, uint64_t *memory)
{
    int r = cuda_create(range->cuda, n_bytes, memory);

    if (r == 0)
        range->held_bytes += n_bytes;
    return r;
}

/* Finds memory of exactly this size. Creates it if the bound allows it, or if no memory is free or hidden. */
static int find_memory(struct range *range, size_t n_bytes, uint64_t *memory)
{
    int r = unmap_past(range);

    for (;;) {
        if (r != 0 || reuse_free(range, n_bytes, memory))
            return r;
        if (range->held_bytes + n_bytes <= range->bound_bytes || range->n_free + range->n_hidden == 0)
            return create(range, n_bytes, memory);
        if (range->n_free > 0)
            destroy_free(range, 0);
        else
            r = wait_for_first(range);
    }
}

static int map(struct range *range, struct range_param *p)
{
    int r = find_memory(range, p->n_mapped_bytes, &p->memory);

    if (r != 0)
        return r;
    r = cuda_put(range->cuda, range->base + p->offset_bytes, p->memory, p->n_mapped_bytes);
    if (r == 0)
        p->mapped = true;
    else
        add_free(range, p->memory, p->n_mapped_bytes);
    return r;
}

/* Maps memory. If the GPU has none left, first frees all memory of hidden parameters and all free memory. */
static int map_or_make_room(struct range *range, struct range_param *p)
{
    int r = map(range, p);

    if (r != -ENOMEM)
        return r;
    for (r = 0; r == 0 && range->n_hidden > 0;)
        r = wait_for_first(range);
    if (r != 0)
        return r;
    destroy_all_free(range);
    return map(range, p);
}

/* ---- parameters ---------------------------------------------------------------------------------------- */

uint8_t *range_place(const struct range *range, uint32_t param)
{
    return range->base + range->params[param].offset_bytes;
}

uint64_t range_held_bytes(const struct range *range)
{
    return range->held_bytes;
}

/* Waits for work that may still read the hidden parameter, because range_show() then overwrites it. */
static int show_hidden(struct range *range, uint32_t param)
{
    uint32_t i = 0;
    int r = cuda_wait_until_past(range->cuda, range->params[param].event);

    if (r != 0)
        return r;
    while (range->hidden[i] != param)
        i++;
    remove_hidden(range, i);
    return 0;
}

int range_show(struct range *range, uint32_t param, const uint8_t *from)
{
    struct range_param *p = &range->params[param];
    int r = 0;

    if (p->n_bytes == 0)
        return 0;
    if (p->hidden)
        r = show_hidden(range, param);
    else if (!p->mapped)
        r = map_or_make_room(range, p);
    return r == 0 ? cuda_copy(range->cuda, range_place(range, param), from, p->n_bytes, range->stream) : r;
}

int range_finish(struct range *range)
{
    return cuda_wait(range->cuda, range->stream);
}

int range_hide(struct range *range, uint32_t param, void *stream)
{
    struct range_param *p = &range->params[param];
    int r;

    if (!p->mapped || p->hidden)
        return 0;
    r = cuda_mark(range->cuda, &p->event, stream);
    if (r != 0)
        return r;
    p->hidden = true;
    range->hidden[range->n_hidden++] = param;
    return 0;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static void place_params(struct range *range, const struct layout *layout, size_t granularity)
{
    for (uint32_t i = 0; i < layout->n_params; i++) {
        struct range_param *p = &range->params[i];

        p->offset_bytes = range->n_bytes;
        p->n_bytes = layout->params[i].n_elems * dtype_size(layout->params[i].dtype);
        p->n_mapped_bytes = round_up(p->n_bytes, granularity);
        range->n_bytes += p->n_mapped_bytes;
    }
    range->n_bytes = MAX(range->n_bytes, granularity); /* if no parameter has elements */
}

int range_new(struct range **out, struct cuda *cuda, const struct layout *layout, uint64_t bound_bytes)
{
    struct range *range = calloc(1, sizeof(*range));
    size_t granularity;
    int r;

    *out = range;
    if (!range)
        return -ENOMEM;
    range->cuda = cuda;
    range->bound_bytes = bound_bytes;
    range->n_params = layout->n_params;
    range->params = calloc(layout->n_params, sizeof(*range->params));
    range->hidden = calloc(layout->n_params, sizeof(*range->hidden));
    range->free = calloc(layout->n_params, sizeof(*range->free));
    if (!range->params || !range->hidden || !range->free)
        return -ENOMEM;
    r = cuda_granularity(cuda, &granularity);
    if (r != 0)
        return r;
    place_params(range, layout, granularity);
    r = cuda_reserve(cuda, range->n_bytes, &range->base);
    return r == 0 ? cuda_stream_new(cuda, &range->stream) : r;
}

void range_forget(struct range *range)
{
    if (!range)
        return;
    free(range->params);
    free(range->hidden);
    free(range->free);
    free(range);
}

void range_free(struct range *range)
{
    if (!range)
        return;
    if (range->stream)
        (void)range_finish(range);
    for (uint32_t i = 0; range->params && i < range->n_params; i++) {
        struct range_param *p = &range->params[i];

        if (p->hidden)
            (void)cuda_wait_until_past(range->cuda, p->event);
        if (p->mapped && cuda_take_away(range->cuda, range->base + p->offset_bytes, p->n_mapped_bytes) == 0)
            cuda_destroy(range->cuda, p->memory);
        cuda_event_free(range->cuda, p->event);
    }
    destroy_all_free(range);
    cuda_stream_free(range->cuda, range->stream);
    cuda_unreserve(range->cuda, range->base, range->n_bytes);
    range_forget(range);
}
