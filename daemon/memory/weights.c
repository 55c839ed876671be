/* SPDX-License-Identifier: Apache-2.0 */

/* Reads weights from the state and writes them, range by range, in any stage. */

#include "daemon/memory/weights.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "kernels/undo.h"

/* The part of a range of elements that is in one chunk. start is counted from the parameter's start. */
struct part {
    uint64_t start, n;
};

static struct part intersect(const struct layout_chunk *chunk, uint64_t start, uint64_t n)
{
    uint64_t from = MAX(chunk->start_elem, start);
    uint64_t to = MIN(chunk->start_elem + chunk->n_elems, start + n);

    return (struct part){.start = from, .n = to > from ? to - from : 0};
}

/*
 * Return: the part of the range whose frozen weights this state has. In stage 3 a staging copy (state.h) has only the
 * slices of this node's ranks. Other states have all elements.
 */
static struct part owned_frozen(const struct state *state, uint64_t start, uint64_t n, uint64_t n_elems)
{
    uint64_t slice = layout_frozen_slice_elems(n_elems, state->layout->world_size), from, to;

    if (!state->staging_copy || state->stage != 3)
        return (struct part){.start = start, .n = n};
    from = MAX(slice * state->first_rank, start);
    to = MIN(slice * (state->first_rank + state->n_ranks), start + n);
    return (struct part){.start = from, .n = to > from ? to - from : 0};
}

static struct master24 master24_of(const struct state_place *place, uint64_t first_elem)
{
    return (struct master24){.weights = (uint16_t *)place->weights + first_elem, .lower = place->lower + first_elem};
}

void weights_round(const struct state *state, const struct kernels *kernels, uint32_t id, uint64_t first_elem,
                   uint64_t n_elems, void *dst)
{
    const struct layout_chunk *chunk = &state->layout->chunks[id];
    struct state_place place = state_place(state, id);

    assert(first_elem + n_elems <= chunk->n_elems);
    if (place.lower)
        memcpy(dst, (const uint16_t *)place.weights + first_elem, n_elems * sizeof(uint16_t));
    else
        kernels->convert_from_f32(dst, place.master + first_elem, state->layout->params[chunk->param].dtype, n_elems);
}

void weights_widen(const struct state *state, const struct kernels *kernels, uint32_t id, enum state_kind kind,
                   float *dst)
{
    struct state_place place = state_place(state, id);
    uint64_t n_elems = state->layout->chunks[id].n_elems;

    if (kind == STATE_MASTER && place.lower)
        master24_to_f32(dst, master24_of(&place, 0), n_elems);
    else
        kernels->convert_to_f32(dst, state_place_values(&place, kind), state_dtype(state, kind), n_elems);
}

void weights_fetch(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, void *dst)
{
    const struct layout_param *p = &state->layout->params[param];
    size_t size = dtype_size(p->dtype);

    assert(start + n_elems <= p->n_elems);
    if (p->trainable && state->stage != 3) {
        memcpy(dst, (const uint8_t *)state_weights(state, param, 0) + start * size, n_elems * size);
        return;
    }
    if (!p->trainable) {
        struct part part = owned_frozen(state, start, n_elems, p->n_elems);

        memcpy((uint8_t *)dst + (part.start - start) * size, state_frozen(state, param) + part.start * size,
               part.n * size);
        return;
    }
    for (uint32_t c = p->first_chunk; c < p->first_chunk + p->n_chunks; c++) {
        struct part part = intersect(&state->layout->chunks[c], start, n_elems);

        if (part.n > 0 && state_owns(state, state->layout->chunks[c].rank))
            weights_round(state, kernels, c, part.start - state->layout->chunks[c].start_elem, part.n,
                          (uint8_t *)dst + (part.start - start) * size);
    }
}

enum { BLOCK_ELEMS = 1024 };

static void store_16(const struct kernels *kernels, enum dtype dtype, float *master, uint16_t *published,
                     const uint16_t *src, uint64_t n_elems)
{
    uint16_t now[BLOCK_ELEMS];
    float exact[BLOCK_ELEMS];

    assert(dtype != DTYPE_F32);
    for (uint64_t at = 0; at < n_elems; at += BLOCK_ELEMS) {
        uint64_t n = MIN(n_elems - at, (uint64_t)BLOCK_ELEMS);

        kernels->convert_from_f32(now, master + at, dtype, n);
        if (memcmp(now, src + at, n * sizeof(*src)) == 0 &&
            (!published || memcmp(published + at, src + at, n * sizeof(*src)) == 0))
            continue;
        kernels->convert_to_f32(exact, src + at, dtype, n);
        for (uint64_t i = 0; i < n; i++)
            if (now[i] != src[at + i])
                master[at + i] = exact[i];
        if (published)
            memcpy(published + at, src + at, n * sizeof(*src));
    }
}

/*
 * Stores 16-bit weights into 24-bit masters. Stores each low byte before its weight. If the daemon is killed between
 * the two, the next daemon repeats the store, because the weight still differs.
 */
static void store_master24(struct master24 masters, const uint16_t *src, uint64_t n_elems)
{
    for (uint64_t i = 0; i < n_elems; i++) {
        if (masters.weights[i] == src[i])
            continue;
        masters.lower[i] = 0;
        undo_order();
        masters.weights[i] = src[i];
    }
}

/* Stores a range of a chunk. first_elem: from the chunk's start. */
static void store_in_chunk(const struct state *state, const struct kernels *kernels, uint32_t id, uint64_t first_elem,
                           uint64_t n_elems, const uint8_t *src)
{
    const struct layout_chunk *chunk = &state->layout->chunks[id];
    enum dtype dtype = state->layout->params[chunk->param].dtype;
    struct state_place place = state_place(state, id);

    if (dtype == DTYPE_F32)
        memcpy(place.master + first_elem, src, n_elems * sizeof(float));
    else if (place.lower)
        store_master24(master24_of(&place, first_elem), (const uint16_t *)src, n_elems);
    else
        store_16(kernels, dtype, place.master + first_elem,
                 place.weights ? (uint16_t *)place.weights + first_elem : NULL, (const uint16_t *)src, n_elems);
}

void weights_store(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, const void *src)
{
    const struct layout_param *p = &state->layout->params[param];
    size_t size = dtype_size(p->dtype);

    assert(start + n_elems <= p->n_elems);
    if (!p->trainable) {
        memcpy(state_frozen(state, param) + start * size, src, n_elems * size);
        return;
    }
    for (uint32_t c = p->first_chunk; c < p->first_chunk + p->n_chunks; c++) {
        const struct layout_chunk *chunk = &state->layout->chunks[c];
        struct part part = intersect(chunk, start, n_elems);
        const uint8_t *from = (const uint8_t *)src + (part.start - start) * size;

        if (part.n == 0)
            continue;
        if (state_owns(state, chunk->rank))
            store_in_chunk(state, kernels, c, part.start - chunk->start_elem, part.n, from);
        else if (state->stage != 3)
            memcpy(state_weights(state, param, part.start), from, part.n * size);
    }
}

void weights_store_masters(const struct state *state, const struct kernels *kernels, uint32_t id, const float *src)
{
    const struct layout_chunk *chunk = &state->layout->chunks[id];
    enum dtype dtype = state->layout->params[chunk->param].dtype;
    struct state_place place;

    if (!state_owns(state, chunk->rank)) {
        if (state->stage != 3)
            kernels->convert_from_f32(state_weights(state, chunk->param, chunk->start_elem), src, dtype,
                                      chunk->n_elems);
        return;
    }
    place = state_place(state, id);
    if (place.lower) {
        master24_from_f32(master24_of(&place, 0), src, chunk->n_elems);
        return;
    }
    memcpy(place.master, src, chunk->n_elems * sizeof(*src));
    if (place.weights)
        kernels->convert_from_f32(place.weights, src, dtype, chunk->n_elems);
}

static void adopt_master24(const struct state *state, struct master24 masters, const void *src, uint64_t n_elems)
{
    if (state->stage == 3) /* in stages 1 and 2 the published weights are already there */
        memcpy(masters.weights, src, n_elems * sizeof(uint16_t));
    memset(masters.lower, 0, n_elems);
}

void weights_adopt(const struct state *state, const struct kernels *kernels, uint32_t param, const void *src)
{
    const struct layout_param *p = &state->layout->params[param];
    size_t size = dtype_size(p->dtype);

    if (!p->trainable) {
        memcpy(state_frozen(state, param), src, p->n_elems * size);
        return;
    }
    for (uint32_t c = p->first_chunk; c < p->first_chunk + p->n_chunks; c++) {
        const struct layout_chunk *chunk = &state->layout->chunks[c];
        const uint8_t *from = (const uint8_t *)src + chunk->start_elem * size;
        struct state_place place;

        if (!state_owns(state, chunk->rank))
            continue;
        place = state_first_place(state, c); /* no chunk has turned before the first step */
        if (place.lower)
            adopt_master24(state, master24_of(&place, 0), from, chunk->n_elems);
        else
            kernels->convert_to_f32(place.master, from, p->dtype, chunk->n_elems);
    }
}
