/* SPDX-License-Identifier: Apache-2.0 */

/* Which of its two places each chunk has its values in. */

#include "daemon/memory/spare.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "kernels/copy.h"
#include "kernels/undo.h"

/* A word of state->turns: 2 x the operation that turned the chunk last, + 1 if the second place is valid. */
static uint64_t load_word(const struct state *state, uint32_t chunk)
{
    assert(chunk < state->layout->n_chunks);
    return atomic_load_explicit(&state->turns[chunk], memory_order_relaxed);
}

static void store_word(const struct state *state, uint32_t chunk, uint64_t word)
{
    undo_order();
    atomic_store_explicit(&state->turns[chunk], word, memory_order_relaxed);
    undo_order();
}

void spare_use(struct state *state, _Atomic(uint64_t) *turns)
{
    assert(!turns || state->spares);
    state->turns = turns;
}

/* ---- places -------------------------------------------------------------------------------------------- */

static const struct layout_param *param_of(const struct state *state, uint32_t chunk)
{
    return &state->layout->params[state->layout->chunks[chunk].param];
}

bool spare_has(const struct state *state, uint32_t chunk)
{
    const struct layout_param *param = param_of(state, chunk);

    return state->turns && param->bucket < state->n_spares && !param->muon;
}

bool spare_is_turned(const struct state *state, uint32_t chunk)
{
    return load_word(state, chunk) % 2 == 1;
}

/* Is the chunk's fp32 master the published weight itself? */
static bool is_published(const struct state *state, uint32_t chunk)
{
    return param_of(state, chunk)->dtype == DTYPE_F32;
}

struct state_place spare_second(const struct state *state, uint32_t chunk)
{
    struct state_place first = state_first_place(state, chunk), second = state_spare_arrays(state, chunk);

    second.weights = first.weights;
    if (is_published(state, chunk))
        second.master = first.master;
    return second;
}

struct state_place spare_place(const struct state *state, uint32_t chunk)
{
    struct state_place spare = state_spare_arrays(state, chunk), place;

    if (!spare_is_turned(state, chunk))
        return spare;
    place = state_first_place(state, chunk);
    place.weights = spare.weights;
    if (is_published(state, chunk))
        place.master = spare.master;
    return place;
}

/* ---- turning ------------------------------------------------------------------------------------------- */

void spare_publish(const struct state *state, uint32_t chunk)
{
    struct state_place spare = state_spare_arrays(state, chunk), first = state_first_place(state, chunk);
    size_t n_elems = state->layout->chunks[chunk].n_elems;

    if (is_published(state, chunk))
        copy_past_caches(first.master, spare.master, n_elems * sizeof(float));
    else
        copy_past_caches(first.weights, spare.weights, n_elems * sizeof(uint16_t));
}

void spare_turn(const struct state *state, uint32_t chunk, uint64_t op)
{
    uint64_t word = load_word(state, chunk);

    assert(spare_has(state, chunk));
    assert(op > 0);
    if (word / 2 != op)
        store_word(state, chunk, 2 * op + (word % 2 == 0));
}

static void copy_array(void *dst, const void *src, size_t n_bytes)
{
    if (dst && dst != src)
        memcpy(dst, src, n_bytes);
}

void spare_bring_home(const struct state *state, uint32_t chunk)
{
    size_t n_elems = state->layout->chunks[chunk].n_elems;
    struct state_place first, second;

    if (!spare_has(state, chunk) || !spare_is_turned(state, chunk))
        return;
    first = state_first_place(state, chunk);
    second = spare_second(state, chunk);
    copy_array(first.master, second.master, n_elems * sizeof(float));
    copy_array(first.lower, second.lower, n_elems);
    copy_array(first.exp_avg, second.exp_avg, dtype_bytes(state_dtype(state, STATE_EXP_AVG), n_elems));
    copy_array(first.exp_avg_sq, second.exp_avg_sq, dtype_bytes(state_dtype(state, STATE_EXP_AVG_SQ), n_elems));
    store_word(state, chunk, load_word(state, chunk) - 1);
}
