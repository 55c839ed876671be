/* SPDX-License-Identifier: Apache-2.0 */

/* Places the masters, moments, gradients and weights of the owned partitions in memory segments. */

#include "daemon/memory/state.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"

struct placement {
    uint64_t master, weights, lower, exp_avg, exp_avg_sq; /* offsets in the state segment; UINT64_MAX: absent */
    uint64_t acc;                                         /* offset in the gradient segment */
};

enum { CACHE_LINE_BYTES = 64 };

_Static_assert((int)LAYOUT_ALIGN_ELEMS % (int)GROUP8_ELEMS == 0, "a group begins where a parameter or partition does");

/* Arrays of this size or more could be 2^27 bytes apart, which makes access slow (see segment_map()). */
#define LARGE_ARRAY_BYTES (UINT64_C(64) << 20)

static uint64_t reserve_bytes(uint64_t *end, uint64_t n_bytes)
{
    uint64_t offset = *end;

    assert(offset % CACHE_LINE_BYTES == 0);
    n_bytes = round_up(n_bytes, (uint64_t)CACHE_LINE_BYTES);
    *end += n_bytes;
    if (n_bytes >= LARGE_ARRAY_BYTES)
        *end += 64 * 1024;
    return offset;
}

static uint64_t reserve_array(uint64_t *end, uint64_t n_elems, enum dtype dtype, bool wanted)
{
    return wanted ? reserve_bytes(end, dtype_bytes(dtype, n_elems)) : UINT64_MAX;
}

static void find_owned(struct state *state)
{
    for (uint32_t b = 0; b < state->layout->n_buckets; b++) {
        struct state_bucket *bucket = &state->buckets[b];

        bucket->owned_elems =
            layout_owned_elems(state->layout, b, state->first_rank, state->n_ranks, &bucket->owned_start);
    }
}

/* Computes places[], state->frozen_offset_bytes, and the sizes of the state and gradient segments. */
static void plan_places(struct state *state, const struct state_options *options, struct placement *places,
                        uint64_t *state_bytes, uint64_t *gradient_bytes)
{
    const struct layout *layout = options->layout;

    *state_bytes = *gradient_bytes = 0;
    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        uint64_t n_elems = layout_room_elems(layout, b, options->first_rank, options->n_ranks);
        bool has_v = options->moments.v && !layout_is_muon(layout, b);
        bool master24 = options->moments.master24 && layout->buckets[b].dtype == DTYPE_BF16,
             stage3 = options->stage == 3;

        places[b].master = reserve_array(state_bytes, n_elems, DTYPE_F32,
                                         !master24 && (stage3 || layout->buckets[b].dtype != DTYPE_F32));
        places[b].weights = reserve_array(state_bytes, n_elems, DTYPE_BF16, master24 && stage3);
        places[b].lower = master24 ? reserve_bytes(state_bytes, n_elems) : UINT64_MAX;
        places[b].exp_avg = reserve_array(state_bytes, n_elems, options->moments.type.dtype, options->moments.m);
        places[b].exp_avg_sq =
            reserve_array(state_bytes, n_elems, moments_dtype_of_square(options->moments.type), has_v);
        places[b].acc = reserve_array(gradient_bytes, n_elems, DTYPE_F32, !options->no_gradient);
    }
    for (uint32_t p = 0; options->stage == 3 && p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];

        if (param->trainable)
            continue;
        state->frozen_offset_bytes[p] = *state_bytes;
        *state_bytes += round_up(param->n_elems * dtype_size(param->dtype), 64);
    }
    /* The arrays of a node without matrices have no elements, but need an address. An empty segment has no address. */
    if (layout->n_buckets > 0 && options->moments.m + options->moments.v + options->moments.master24 > 0)
        *state_bytes = MAX(*state_bytes, (uint64_t)CACHE_LINE_BYTES);
}

static void *at(const struct segment *segment, uint64_t offset)
{
    assert(offset == UINT64_MAX || offset <= segment->n_bytes);
    return offset == UINT64_MAX ? NULL : segment->map + offset;
}

static void set_pointers(struct state *state, const struct placement *places)
{
    const bool stage3 = state->stage == 3;

    for (uint32_t b = 0; b < state->layout->n_buckets; b++) {
        struct state_bucket *bucket = &state->buckets[b];
        uint8_t *published = stage3 ? NULL : state->weights.map + state->layout->buckets[b].weight_offset_bytes;

        bucket->exp_avg = at(&state->state, places[b].exp_avg);
        bucket->exp_avg_sq = at(&state->state, places[b].exp_avg_sq);
        bucket->acc = at(&state->gradient, places[b].acc);
        bucket->master = at(&state->state, places[b].master);
        bucket->weights = at(&state->state, places[b].weights);
        bucket->lower = at(&state->state, places[b].lower);
        /* The published weights of owned partitions are the masters or a part of the masters, not a copy. */
        if (bucket->lower && !stage3)
            bucket->weights = (uint16_t *)(void *)published + bucket->owned_start;
        else if (!bucket->lower && !bucket->master)
            bucket->master = (float *)(void *)published + bucket->owned_start;
    }
}

static int make_segments(struct state *state, const struct state_options *options, uint64_t state_bytes,
                         uint64_t gradient_bytes)
{
    uint64_t counts_bytes = 2 * options->layout->n_params * sizeof(uint64_t);
    uint64_t weight_bytes = options->stage == 3 ? 0 : options->layout->weight_bytes;
    int r;

    r = segment_init_kept(&state->state, "state", state_bytes);
    if (r == 0)
        r = segment_init_kept(&state->gradient, "gradient", gradient_bytes);
    if (r == 0 && options->alone)
        r = segment_init_published_kept(&state->weights, "weights", weight_bytes);
    else if (r == 0)
        r = segment_init_kept(&state->weights, "weights", weight_bytes);
    if (r == 0)
        r = segment_init_kept(&state->counts, "counts", counts_bytes);
    return r;
}

int state_new(struct state **out, const struct state_options *options)
{
    struct state *state = calloc(1, sizeof(*state));
    _cleanup_free_ struct placement *places = calloc(options->layout->n_buckets + 1, sizeof(*places));
    uint64_t state_bytes, gradient_bytes;
    int r = -ENOMEM;

    if (!state || !places)
        goto fail;
    state->state = state->gradient = state->weights = state->counts = SEGMENT_NULL;
    state->layout = options->layout;
    state->stage = options->stage;
    state->staging_copy = options->staging_copy;
    state->first_rank = options->first_rank;
    state->n_ranks = options->n_ranks;
    state->moments = options->moments.type;
    state->buckets = calloc(options->layout->n_buckets + 1, sizeof(*state->buckets));
    if (options->stage == 3)
        state->frozen_offset_bytes = calloc(options->layout->n_params, sizeof(uint64_t));
    if (!state->buckets || (options->stage == 3 && !state->frozen_offset_bytes))
        goto fail;

    find_owned(state);
    plan_places(state, options, places, &state_bytes, &gradient_bytes);
    r = make_segments(state, options, state_bytes, gradient_bytes);
    if (r < 0)
        goto fail;
    set_pointers(state, places);
    state_use_counts(state, 0);
    *out = state;
    return 0;

fail:
    state_free(state);
    return r;
}

void state_free(struct state *state)
{
    if (!state)
        return;
    segment_deinit(&state->state);
    segment_deinit(&state->gradient);
    segment_deinit(&state->weights);
    segment_deinit(&state->counts);
    free(state->buckets);
    free(state->frozen_offset_bytes);
    free(state);
}

void state_owned_elems(const struct state *state, uint32_t param, uint64_t *first, uint64_t *end)
{
    const struct layout_param *p = &state->layout->params[param];
    const struct state_bucket *bucket = &state->buckets[p->bucket];
    uint64_t from = MAX(p->offset_elems, bucket->owned_start);
    uint64_t to = MIN(p->offset_elems + p->n_elems, bucket->owned_start + bucket->owned_elems);

    assert(p->trainable); /* a frozen parameter is in no bucket */
    *first = from < to ? from - p->offset_elems : 0;
    *end = from < to ? to - p->offset_elems : 0;
}

void state_repartition(struct state *state, const struct layout *layout)
{
    assert(state->n_ranks == state->layout->world_size && layout->weight_bytes == state->layout->weight_bytes);
    assert(layout->n_params == state->layout->n_params);
    assert(layout->n_buckets == state->layout->n_buckets);
    assert(layout->world_size <= LAYOUT_ROOM_RANKS); /* the segments have no room for more */
    assert(!state->snapshot);                        /* a snapshot reads the chunks of the old layout */
    state->layout = layout;
    state->n_ranks = layout->world_size;
    find_owned(state);
}

bool state_was_found(const struct state *state)
{
    return state->counts.found;
}

static uint64_t *counts_of(const struct state *state, unsigned copy)
{
    return (uint64_t *)(void *)state->counts.map + copy * (size_t)state->layout->n_params;
}

uint64_t *state_begin_counts(struct state *state)
{
    uint64_t *counts = counts_of(state, state_other_copy(state));

    assert(state->progress.counts == counts_of(state, state->progress.copy));
    memcpy(counts, state->progress.counts, state->layout->n_params * sizeof(*counts));
    return counts;
}

void state_use_counts(struct state *state, unsigned copy)
{
    state->progress.copy = copy;
    state->progress.counts = counts_of(state, copy);
}

uint32_t state_n_reserve_pieces(const struct state *state)
{
    const struct segment *segments[] = {&state->counts, &state->state, &state->gradient, &state->weights};

    return segments_n_pieces(segments, state->staging_copy ? 1 : ARRAY_SIZE(segments));
}

int state_reserve(const struct state *state, uint32_t piece)
{
    const struct segment *segments[] = {&state->counts, &state->state, &state->gradient, &state->weights};

    return segments_reserve(segments, state->staging_copy ? 1 : ARRAY_SIZE(segments), piece);
}
