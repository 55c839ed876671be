/* SPDX-License-Identifier: Apache-2.0 */

/* Collects state edits in a sparse segment, and stores them into the state on the workers. */

#include "daemon/memory/state-edits.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "daemon/memory/weights.h"

enum { STATE_EDITS_COUNT = 1 << STATE_N_KINDS };

_Static_assert(2 * STATE_EDITS_COUNT - 1 <= UINT8_MAX, "state_edits.written has all marks");
_Static_assert((int)STATE_N_KINDS <= (int)STATE_EDITS_COUNT_FOLLOWS,
               "a listed number is a kind, or says that a count follows");

static uint64_t place_bytes(const struct layout_param *param)
{
    return round_up(param->n_elems * sizeof(float), page_size());
}

/* Places the arrays of all parameters. Return: the size of the segment. */
static uint64_t lay_out(struct state_edits *edits)
{
    const struct layout *layout = edits->state->layout;
    uint64_t end = 0;

    for (uint32_t p = 0; p < layout->n_params; p++) {
        edits->offsets_bytes[p] = end;
        if (layout->params[p].trainable)
            end += STATE_N_KINDS * place_bytes(&layout->params[p]);
    }
    return end;
}

int state_edits_new(struct state_edits **out, struct state *state, const struct kernels *kernels)
{
    struct state_edits *edits = calloc(1, sizeof(*edits));
    uint32_t n_params = state->layout->n_params;
    int r = -ENOMEM;

    if (!edits)
        return -ENOMEM;
    edits->state = state;
    edits->kernels = kernels;
    edits->segment = SEGMENT_NULL;
    edits->offsets_bytes = calloc(n_params, sizeof(*edits->offsets_bytes));
    edits->written = calloc(n_params, sizeof(*edits->written));
    edits->counts = calloc(n_params, sizeof(*edits->counts));
    if (edits->offsets_bytes && edits->written && edits->counts)
        r = segment_init_written_kept(&edits->segment, "rewrite", lay_out(edits));
    if (r < 0) {
        state_edits_free(edits);
        return r;
    }
    *out = edits;
    return 0;
}

void state_edits_free(struct state_edits *edits)
{
    if (!edits)
        return;
    segment_deinit(&edits->segment);
    free(edits->offsets_bytes);
    free(edits->written);
    free(edits->counts);
    free(edits);
}

void state_edits_clear(struct state_edits *edits)
{
    memset(edits->written, 0, edits->state->layout->n_params * sizeof(*edits->written));
}

void state_edits_punch(const struct state_edits *edits)
{
    segment_punch(&edits->segment, 0, edits->segment.n_bytes);
}

struct state_edits_place state_edits_place(const struct state_edits *edits, uint32_t param, enum state_kind kind)
{
    uint64_t n_bytes = place_bytes(&edits->state->layout->params[param]);

    assert(param < edits->state->layout->n_params && edits->state->layout->params[param].trainable);
    assert(kind < STATE_N_KINDS);
    return (struct state_edits_place){.offset_bytes = edits->offsets_bytes[param] + kind * n_bytes, .n_bytes = n_bytes};
}

int state_edits_reserve(const struct state_edits *edits, const struct state_edits_place *place)
{
    assert(place->offset_bytes + place->n_bytes <= edits->segment.n_bytes);
    return segment_reserve(&edits->segment, place->offset_bytes, place->n_bytes);
}

void state_edits_mark(struct state_edits *edits, uint32_t param, enum state_kind kind, bool marked)
{
    assert(param < edits->state->layout->n_params);
    assert(kind < STATE_N_KINDS); /* the bit of STATE_N_KINDS marks a count */
    edits->written[param] = (uint8_t)((edits->written[param] & ~(1 << kind)) | marked << kind);
}

bool state_edits_is_marked(const struct state_edits *edits, uint32_t param, enum state_kind kind)
{
    return edits->written[param] >> kind & 1;
}

void state_edits_set_count(struct state_edits *edits, uint32_t param, uint64_t count)
{
    assert(param < edits->state->layout->n_params);
    edits->written[param] |= STATE_EDITS_COUNT;
    edits->counts[param] = count;
}

/* ---- storing ------------------------------------------------------------------------------------------- */

static const float *values_of(const struct state_edits *edits, uint32_t param, enum state_kind kind)
{
    return (const float *)(edits->segment.map + state_edits_place(edits, param, kind).offset_bytes);
}

static void store_moment(const struct state_edits *edits, uint32_t id, enum state_kind kind)
{
    const struct layout_chunk *chunk = &edits->state->layout->chunks[id];
    struct state_place place = state_place(edits->state, id);

    edits->kernels->convert_from_f32(state_place_values(&place, kind),
                                     values_of(edits, chunk->param, kind) + chunk->start_elem,
                                     state_dtype(edits->state, kind), chunk->n_elems);
}

static void store_chunk(struct work *work, uint32_t item)
{
    struct state_edits *edits = container_of(work, struct state_edits, work);
    const struct layout_chunk *chunk = &edits->state->layout->chunks[item];

    if (!edits->written[chunk->param])
        return;
    (void)failpoint("rewrite");
    if (state_edits_is_marked(edits, chunk->param, STATE_MASTER))
        weights_store_masters(edits->state, edits->kernels, item,
                              values_of(edits, chunk->param, STATE_MASTER) + chunk->start_elem);
    if (!state_owns(edits->state, chunk->rank))
        return;
    for (enum state_kind kind = STATE_EXP_AVG; kind < STATE_N_KINDS; kind++)
        if (state_edits_is_marked(edits, chunk->param, kind))
            store_moment(edits, item, kind);
}

void state_edits_store_counts(const struct state_edits *edits)
{
    uint64_t *counts = state_begin_counts(edits->state);

    for (uint32_t p = 0; p < edits->state->layout->n_params; p++)
        if (edits->written[p] & STATE_EDITS_COUNT)
            counts[p] = edits->counts[p];
    state_use_counts(edits->state, state_other_copy(edits->state));
}

static void on_stored(struct work *work)
{
    struct state_edits *edits = container_of(work, struct state_edits, work);

    state_edits_store_counts(edits);
    edits->done(edits->userdata);
}

void state_edits_store(struct state_edits *edits, struct worker_pool *pool, void (*done)(void *userdata),
                       void *userdata)
{
    edits->done = done;
    edits->userdata = userdata;
    edits->work = (struct work){.run = store_chunk, .done = on_stored, .n_items = edits->state->layout->n_chunks};
    worker_post(pool, &edits->work);
}

size_t state_edits_list(const struct state_edits *edits, uint64_t *numbers)
{
    size_t n = 0;

    for (uint32_t p = 0; p < edits->state->layout->n_params; p++) {
        for (unsigned kind = 0; kind <= STATE_N_KINDS; kind++) {
            if (!(edits->written[p] & 1 << kind))
                continue;
            if (numbers)
                numbers[n] = (uint64_t)p << 8 | (kind == STATE_N_KINDS ? STATE_EDITS_COUNT_FOLLOWS : kind);
            n++;
            if (kind == STATE_N_KINDS && numbers)
                numbers[n] = edits->counts[p];
            n += kind == STATE_N_KINDS;
        }
    }
    return n;
}
