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

void weights_round(const struct state *state, const struct kernels *kernels, uint32_t param, uint64_t start,
                   uint64_t n_elems, void *dst)
{
    const struct layout_param *p = &state->layout->params[param];
    uint64_t elem = p->offset_elems + start;

    assert(elem >= state->buckets[p->bucket].owned_start);
    assert(start + n_elems <= p->n_elems);
    if (state_is_master24(state, p->bucket))
        memcpy(dst, state_master24(state, p->bucket, elem).weights, n_elems * sizeof(uint16_t));
    else
        kernels->convert_from_f32(dst, state_master(state, p->bucket, elem), p->dtype, n_elems);
}

void weights_widen(const struct state *state, const struct kernels *kernels, uint32_t bucket, uint64_t elem,
                   enum state_kind kind, uint64_t n_elems, float *dst)
{
    assert(elem >= state->buckets[bucket].owned_start);
    assert(elem + n_elems <= state->buckets[bucket].owned_start + state->buckets[bucket].owned_elems);
    if (kind == STATE_MASTER && state_is_master24(state, bucket))
        master24_to_f32(dst, state_master24(state, bucket, elem), n_elems);
    else
        kernels->convert_to_f32(dst, state_values(state, kind, bucket, elem), state_dtype(state, kind), n_elems);
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
            weights_round(state, kernels, param, part.start, part.n, (uint8_t *)dst + (part.start - start) * size);
    }
}

enum { BLOCK_ELEMS = 1024 };

static void store_16(const struct state *state, const struct kernels *kernels, const struct layout_param *p,
                     struct part part, uint16_t *published, const uint16_t *src)
{
    float *master = state_master(state, p->bucket, p->offset_elems + part.start);
    uint16_t now[BLOCK_ELEMS];
    float exact[BLOCK_ELEMS];

    assert(p->dtype != DTYPE_F32);
    for (uint64_t at = 0; at < part.n; at += BLOCK_ELEMS) {
        uint64_t n = MIN(part.n - at, (uint64_t)BLOCK_ELEMS);

        kernels->convert_from_f32(now, master + at, p->dtype, n);
        if (memcmp(now, src + at, n * sizeof(*src)) == 0 &&
            (!published || memcmp(published + at, src + at, n * sizeof(*src)) == 0))
            continue;
        kernels->convert_to_f32(exact, src + at, p->dtype, n);
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
        struct part part = intersect(&state->layout->chunks[c], start, n_elems);
        const uint8_t *from = (const uint8_t *)src + (part.start - start) * size;

        if (part.n == 0)
            continue;
        if (!state_owns(state, state->layout->chunks[c].rank)) {
            if (state->stage != 3)
                memcpy(state_weights(state, param, part.start), from, part.n * size);
        } else if (p->dtype == DTYPE_F32)
            memcpy(state_master(state, p->bucket, p->offset_elems + part.start), from, part.n * size);
        else if (state_is_master24(state, p->bucket))
            store_master24(state_master24(state, p->bucket, p->offset_elems + part.start), (const uint16_t *)from,
                           part.n);
        else
            store_16(state, kernels, p, part,
                     state->stage == 3 ? NULL : (uint16_t *)state_weights(state, param, part.start),
                     (const uint16_t *)from);
    }
}

void weights_store_masters(const struct state *state, const struct kernels *kernels, const struct layout_chunk *chunk,
                           const float *src)
{
    const struct layout_param *p = &state->layout->params[chunk->param];
    bool owned = state_owns(state, chunk->rank);

    if (owned && state_is_master24(state, p->bucket)) {
        master24_from_f32(state_master24(state, p->bucket, p->offset_elems + chunk->start_elem), src, chunk->n_elems);
        return;
    }
    if (owned)
        memcpy(state_master(state, p->bucket, p->offset_elems + chunk->start_elem), src, chunk->n_elems * sizeof(*src));
    if (state->stage != 3 && (!owned || p->dtype != DTYPE_F32)) /* owned fp32 masters are the weights */
        kernels->convert_from_f32(state_weights(state, chunk->param, chunk->start_elem), src, p->dtype, chunk->n_elems);
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
        uint64_t elem = p->offset_elems + chunk->start_elem;
        const uint8_t *from = (const uint8_t *)src + chunk->start_elem * size;

        if (!state_owns(state, chunk->rank))
            continue;
        if (state_is_master24(state, p->bucket))
            adopt_master24(state, state_master24(state, p->bucket, elem), from, chunk->n_elems);
        else
            kernels->convert_to_f32(state_master(state, p->bucket, elem), from, p->dtype, chunk->n_elems);
    }
}
