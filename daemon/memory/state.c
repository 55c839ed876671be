/* SPDX-License-Identifier: Apache-2.0 */

/* Places the masters, moments, gradients and weights of the owned partitions in memory segments. */

#include "daemon/memory/state.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "daemon/memory/spare.h"

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
        if (b < state->n_spares) {
            state->spares[b].owned_start = bucket->owned_start;
            state->spares[b].owned_elems = bucket->owned_elems;
        }
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

/* Plans one bucket's arrays in the spare segment, and adds their bytes to *end. */
static void plan_spares(const struct state_options *options, const struct placement *first, uint32_t b,
                        struct placement *spare, uint64_t *end)
{
    uint64_t n_elems = layout_room_elems(options->layout, b, options->first_rank, options->n_ranks);
    bool wanted = !layout_is_muon(options->layout, b), master24 = first->lower != UINT64_MAX;

    spare->master = reserve_array(end, n_elems, DTYPE_F32, wanted && !master24);
    spare->lower = wanted && master24 ? reserve_bytes(end, n_elems) : UINT64_MAX;
    spare->exp_avg = reserve_array(end, n_elems, options->moments.type.dtype, wanted && first->exp_avg != UINT64_MAX);
    spare->exp_avg_sq = reserve_array(end, n_elems, moments_dtype_of_square(options->moments.type),
                                      wanted && first->exp_avg_sq != UINT64_MAX);
    spare->weights = reserve_array(end, n_elems, DTYPE_BF16, wanted && options->layout->buckets[b].dtype != DTYPE_F32);
    spare->acc = UINT64_MAX;
}

/* Makes the second places. places: of the first places; overwritten. Return: 0 or -errno. */
static int make_spares(struct state *state, const struct state_options *options, struct placement *places)
{
    uint64_t n_bytes = 0;
    int r;

    assert(state->stage != 3 && state->n_ranks == state->layout->world_size && !state->staging_copy);
    state->n_spares = MIN(options->n_spares, state->layout->n_buckets);
    for (uint32_t b = 0; b < state->n_spares; b++)
        plan_spares(options, &places[b], b, &places[b], &n_bytes);
    state->spares = calloc(state->n_spares + 1, sizeof(*state->spares));
    r = state->spares ? segment_init_kept(&state->spare, "spare", n_bytes) : -ENOMEM;
    for (uint32_t b = 0; r == 0 && b < state->n_spares; b++)
        state->spares[b] = (struct state_bucket){
            .master = at(&state->spare, places[b].master),
            .weights = at(&state->spare, places[b].weights),
            .lower = at(&state->spare, places[b].lower),
            .exp_avg = at(&state->spare, places[b].exp_avg),
            .exp_avg_sq = at(&state->spare, places[b].exp_avg_sq),
        };
    if (r == 0)
        find_owned(state);
    return r;
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
    state->state = state->gradient = state->weights = state->counts = state->spare = SEGMENT_NULL;
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
    if (options->n_spares > 0)
        r = make_spares(state, options, places);
    if (r < 0)
        goto fail;
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
    segment_deinit(&state->spare);
    segment_deinit(&state->state);
    segment_deinit(&state->gradient);
    segment_deinit(&state->weights);
    segment_deinit(&state->counts);
    free(state->buckets);
    free(state->spares);
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

/* Return: the arrays of an owned chunk in these buckets. */
static struct state_place place_in(const struct state *state, const struct state_bucket *buckets, uint32_t id)
{
    const struct layout_chunk *chunk = &state->layout->chunks[id];
    const struct layout_param *param = &state->layout->params[chunk->param];
    const struct state_bucket *bucket = &buckets[param->bucket];
    const uint64_t elem = param->offset_elems + chunk->start_elem - bucket->owned_start;

    assert(state_owns(state, chunk->rank));
    return (struct state_place){
        .master = bucket->master ? bucket->master + elem : NULL,
        .lower = bucket->lower ? bucket->lower + elem : NULL,
        .exp_avg = state_moment(bucket->exp_avg, state_dtype(state, STATE_EXP_AVG), elem),
        .exp_avg_sq = state_moment(bucket->exp_avg_sq, state_dtype(state, STATE_EXP_AVG_SQ), elem),
        .weights = bucket->weights ? bucket->weights + elem : NULL,
    };
}

struct state_place state_first_place(const struct state *state, uint32_t id)
{
    const struct layout_chunk *chunk = &state->layout->chunks[id];
    struct state_place place = place_in(state, state->buckets, id);

    if (!place.weights && state->stage != 3 && state->layout->params[chunk->param].dtype != DTYPE_F32)
        place.weights = state_weights(state, chunk->param, chunk->start_elem);
    return place;
}

struct state_place state_spare_arrays(const struct state *state, uint32_t chunk)
{
    return place_in(state, state->spares, chunk);
}

struct state_place state_place(const struct state *state, uint32_t chunk)
{
    return state->turns && spare_is_turned(state, chunk) ? spare_second(state, chunk) : state_first_place(state, chunk);
}

void state_repartition(struct state *state, const struct layout *layout)
{
    assert(state->n_ranks == state->layout->world_size && layout->weight_bytes == state->layout->weight_bytes);
    assert(layout->n_params == state->layout->n_params);
    assert(layout->n_buckets == state->layout->n_buckets);
    assert(layout->world_size <= LAYOUT_ROOM_RANKS); /* the segments have no room for more */
    assert(!state->snapshot);                        /* a snapshot reads the chunks of the old layout */
    assert(!state->turns);                           /* all chunks are at home */
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
    const struct segment *segments[] = {&state->counts, &state->state, &state->gradient, &state->weights,
                                        &state->spare};

    return segments_n_pieces(segments, state->staging_copy ? 1 : ARRAY_SIZE(segments));
}

int state_reserve(const struct state *state, uint32_t piece)
{
    const struct segment *segments[] = {&state->counts, &state->state, &state->gradient, &state->weights,
                                        &state->spare};

    return segments_reserve(segments, state->staging_copy ? 1 : ARRAY_SIZE(segments), piece);
}
