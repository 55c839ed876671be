/* SPDX-License-Identifier: Apache-2.0 */

#include "daemon/memory/state-edits.h"

#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "daemon/memory/weights.h"

enum { REWRITE_COUNT = 1 << STATE_N_KINDS };

static uint64_t place_bytes(const struct layout_param *param)
{
    return round_up(param->n_elems * sizeof(float), page_size());
}

/* Return: bytes of the segment. */
static uint64_t lay_out(struct rewrite *rewrite)
{
    const struct layout *layout = rewrite->state->layout;
    uint64_t end = 0;

    for (uint32_t p = 0; p < layout->n_params; p++) {
        rewrite->offsets_bytes[p] = end;
        if (layout->params[p].trainable)
            end += STATE_N_KINDS * place_bytes(&layout->params[p]);
    }
    return end;
}

int rewrite_new(struct rewrite **out, const struct state *state, const struct kernels *kernels)
{
    struct rewrite *rewrite = calloc(1, sizeof(*rewrite));
    uint32_t n_params = state->layout->n_params;
    int r = -ENOMEM;

    if (!rewrite)
        return -ENOMEM;
    rewrite->state = state;
    rewrite->kernels = kernels;
    rewrite->segment = SEGMENT_NULL;
    rewrite->offsets_bytes = calloc(n_params, sizeof(*rewrite->offsets_bytes));
    rewrite->written = calloc(n_params, sizeof(*rewrite->written));
    rewrite->counts = calloc(n_params, sizeof(*rewrite->counts));
    if (rewrite->offsets_bytes && rewrite->written && rewrite->counts)
        r = segment_init(&rewrite->segment, "rewrite", lay_out(rewrite));
    if (r < 0) {
        rewrite_free(rewrite);
        return r;
    }
    *out = rewrite;
    return 0;
}

void rewrite_free(struct rewrite *rewrite)
{
    if (!rewrite)
        return;
    segment_deinit(&rewrite->segment);
    free(rewrite->offsets_bytes);
    free(rewrite->written);
    free(rewrite->counts);
    free(rewrite);
}

struct rewrite_place rewrite_place(const struct rewrite *rewrite, uint32_t param, enum state_kind kind)
{
    uint64_t n_bytes = place_bytes(&rewrite->state->layout->params[param]);

    return (struct rewrite_place){.offset_bytes = rewrite->offsets_bytes[param] + kind * n_bytes, .n_bytes = n_bytes};
}

int rewrite_reserve(const struct rewrite *rewrite, const struct rewrite_place *place)
{
    return segment_reserve(&rewrite->segment, place->offset_bytes, place->n_bytes);
}

void rewrite_mark(struct rewrite *rewrite, uint32_t param, enum state_kind kind)
{
    rewrite->written[param] |= (uint8_t)(1 << kind);
}

bool rewrite_is_marked(const struct rewrite *rewrite, uint32_t param, enum state_kind kind)
{
    return rewrite->written[param] >> kind & 1;
}

void rewrite_set_count(struct rewrite *rewrite, uint32_t param, uint64_t count)
{
    rewrite->written[param] |= REWRITE_COUNT;
    rewrite->counts[param] = count;
}

/* ---- storing ------------------------------------------------------------------------------------------- */

static const float *values_of(const struct rewrite *rewrite, uint32_t param, enum state_kind kind)
{
    return (const float *)(rewrite->segment.map + rewrite_place(rewrite, param, kind).offset_bytes);
}

static void store_moment(const struct rewrite *rewrite, const struct layout_chunk *chunk, enum state_kind kind)
{
    const struct layout_param *param = &rewrite->state->layout->params[chunk->param];
    uint64_t elem = param->offset_elems + chunk->start_elem;

    memcpy(state_values(rewrite->state, kind, param->bucket, elem),
           values_of(rewrite, chunk->param, kind) + chunk->start_elem, chunk->n_elems * sizeof(float));
}

static void rewrite_run(struct work *work, uint32_t item)
{
    struct rewrite *rewrite = container_of(work, struct rewrite, work);
    const struct layout_chunk *chunk = &rewrite->state->layout->chunks[item];

    if (!rewrite->written[chunk->param])
        return;
    (void)failpoint("rewrite");
    if (rewrite_is_marked(rewrite, chunk->param, STATE_MASTER))
        weights_store_masters(rewrite->state, rewrite->kernels, chunk,
                              values_of(rewrite, chunk->param, STATE_MASTER) + chunk->start_elem);
    if (!state_owns(rewrite->state, chunk->rank))
        return;
    for (enum state_kind kind = STATE_EXP_AVG; kind < STATE_N_KINDS; kind++)
        if (rewrite_is_marked(rewrite, chunk->param, kind))
            store_moment(rewrite, chunk, kind);
}

static void rewrite_done(struct work *work)
{
    struct rewrite *rewrite = container_of(work, struct rewrite, work);
    struct state_journal *journal = state_journal(rewrite->state);

    for (uint32_t p = 0; p < rewrite->state->layout->n_params; p++)
        if (rewrite->written[p] & REWRITE_COUNT)
            journal->counts[p] = rewrite->counts[p];
    rewrite->done(rewrite->userdata);
}

void rewrite_store(struct rewrite *rewrite, struct worker_pool *pool, void (*done)(void *userdata), void *userdata)
{
    rewrite->done = done;
    rewrite->userdata = userdata;
    rewrite->work =
        (struct work){.run = rewrite_run, .done = rewrite_done, .n_items = rewrite->state->layout->n_chunks};
    worker_post(pool, &rewrite->work);
}

size_t rewrite_list(const struct rewrite *rewrite, uint64_t *numbers)
{
    size_t n = 0;

    for (uint32_t p = 0; p < rewrite->state->layout->n_params; p++) {
        for (unsigned kind = 0; kind <= STATE_N_KINDS; kind++) {
            if (!(rewrite->written[p] & 1 << kind))
                continue;
            if (numbers)
                numbers[n] = (uint64_t)p << 8 | (kind == STATE_N_KINDS ? REWRITE_COUNT_FOLLOWS : kind);
            n++;
            if (kind == STATE_N_KINDS && numbers)
                numbers[n] = rewrite->counts[p];
            n += kind == STATE_N_KINDS;
        }
    }
    return n;
}
