/* SPDX-License-Identifier: Apache-2.0 */

/* Writes the device plan (the daemon), opens it (the NCCL engine), and computes places in memory from it (both). */

#include "core/wire/device-plan.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "kernels/muon.h"

enum { MAGIC = 0x64657670, PAGE_BYTES = 4096 };

/* A new daemon compares the plan byte by byte with its own, so no structure of a plan may have padding. */
static_assert(sizeof(struct device_plan_header) == 16 * 4 + 8 * 1 + 9 * 8, "no padding");
static_assert(sizeof(struct device_plan_param) == 10 * 4 + 3 * 8, "no padding");
static_assert(sizeof(struct layout_bucket) == 10 * 4 + 5 * 8, "no padding");
static_assert(sizeof(struct layout_chunk) == 4 * 4 + 1 * 8, "no padding");
static_assert(sizeof(struct layout_part) == 4 * 4 + 2 * 8, "no padding");
static_assert(sizeof(struct layout_parcel) == 6 * 4 + 2 * 8, "no padding");
static_assert(sizeof(struct device_result_finding) == 4 * 4 + 3 * 8, "daemon and engine share it");
static_assert(sizeof(struct device_mark) == 2 * 4 + 3 * 8, "a later engine reads it");

/* ---- the plan -------------------------------------------------------------------------------------------- */

static uint64_t place_array(uint64_t *end, uint64_t n_bytes, uint64_t align)
{
    uint64_t at = round_up(*end, align);

    *end = at + n_bytes;
    return at;
}

static struct device_plan_header make_header(const struct device_plan_options *options)
{
    const struct layout *layout = options->layout;
    struct device_plan_header head = {
        .magic = MAGIC,
        .version = DEVICE_PLAN_VERSION,
        .world_size = layout->world_size,
        .first_local = options->first_local,
        .n_local = options->n_local,
        .stage = options->stage,
        .optimizer = options->optimizer,
        .moments_dtype = options->moments.type.dtype,
        .stochastic = options->moments.type.stochastic,
        .exp_avg = options->moments.m,
        .exp_avg_sq = options->moments.v,
        .master24 = options->moments.master24,
        .deterministic = options->deterministic,
        .offload = options->offload,
        .n_params = layout->n_params,
        .n_buckets = layout->n_buckets,
        .n_chunks = layout->n_chunks,
        .n_parts = layout->n_parts,
        .n_parcels = layout->n_parcels,
        .n_groups = layout->n_groups,
        .n_matrices = layout_count_matrices(layout, 0, layout->world_size),
        .mask_words = div_round_up(layout->world_size, 64),
        .weight_bytes = layout->weight_bytes,
        .ring_bytes = options->ring_bytes,
        .pool_bytes = options->pool_bytes,
    };
    uint64_t end = sizeof(head);

    head.params_at = place_array(&end, head.n_params * sizeof(struct device_plan_param), 8);
    head.buckets_at = place_array(&end, head.n_buckets * sizeof(struct layout_bucket), 8);
    head.chunks_at = place_array(&end, head.n_chunks * sizeof(struct layout_chunk), 8);
    head.parts_at = place_array(&end, head.n_parts * sizeof(struct layout_part), 8);
    head.parcels_at = place_array(&end, head.n_parcels * sizeof(struct layout_parcel), 8);
    head.n_bytes = end;
    return head;
}

uint64_t device_plan_bytes(const struct device_plan_options *options)
{
    return make_header(options).n_bytes;
}

void device_plan_write(const struct device_plan_options *options, void *memory)
{
    const struct layout *layout = options->layout;
    struct device_plan_header head = make_header(options);
    struct device_plan_param *params = (void *)((uint8_t *)memory + head.params_at);
    uint32_t n_matrices = 0;

    assert(options->stage >= 1 && options->stage <= 3 && (options->stage == 3 || options->pool_bytes == 0));
    assert((uintptr_t)memory % 8 == 0);
    assert(head.world_size >= 1 && head.world_size <= DEVICE_MAX_WORLD);
    assert(head.n_local >= 1 && head.n_local <= DEVICE_MAX_LOCAL);
    assert(head.first_local < head.world_size && head.n_local <= head.world_size - head.first_local);
    assert(head.n_matrices == 0 || head.optimizer == OPTIMIZER_MUON);
    memcpy(memory, &head, sizeof(head));
    for (uint32_t i = 0; i < layout->n_params; i++) {
        params[i] = (struct device_plan_param){
            .n_elems = layout->params[i].n_elems,
            .offset_elems = layout->params[i].offset_elems,
            .weight_offset_bytes = layout->params[i].weight_offset_bytes,
            .bucket = layout->params[i].bucket,
            .first_part = layout->params[i].first_part,
            .n_parts = layout->params[i].n_parts,
            .first_chunk = layout->params[i].first_chunk,
            .n_chunks = layout->params[i].n_chunks,
            .dtype = layout->params[i].dtype,
            .group = layout->params[i].group,
        };
        if (!layout_owns_matrix(layout, i, 0, layout->world_size))
            continue;
        assert(layout->params[i].n_dims == 2);
        params[i].rows = (uint32_t)layout->params[i].shape[0];
        params[i].cols = (uint32_t)layout->params[i].shape[1];
        params[i].matrix = n_matrices++;
    }
    assert(n_matrices == head.n_matrices);
    /* An array without elements may be NULL, which memcpy() must not get. */
    if (head.n_buckets > 0)
        memcpy((uint8_t *)memory + head.buckets_at, layout->buckets, head.n_buckets * sizeof(*layout->buckets));
    if (head.n_chunks > 0)
        memcpy((uint8_t *)memory + head.chunks_at, layout->chunks, head.n_chunks * sizeof(*layout->chunks));
    if (head.n_parts > 0)
        memcpy((uint8_t *)memory + head.parts_at, layout->parts, head.n_parts * sizeof(*layout->parts));
    if (head.n_parcels > 0)
        memcpy((uint8_t *)memory + head.parcels_at, layout->parcels, head.n_parcels * sizeof(*layout->parcels));
}

/* ---- checking a plan ------------------------------------------------------------------------------------- */

static bool array_fits(const struct device_plan_header *head, uint64_t at, uint64_t n, uint64_t size)
{
    return at % 8 == 0 && at <= head->n_bytes && n <= (head->n_bytes - at) / size;
}

static bool moments_are_sound(const struct device_plan_header *head)
{
    switch (head->moments_dtype) {
    case DTYPE_F32:
        return head->stochastic == 0;
    case DTYPE_BF16:
        return head->stochastic <= 1;
    case DTYPE_SIGNED8:
        return head->stochastic == 1;
    default:
        return false;
    }
}

static bool head_is_sound(const struct device_plan_header *head, uint64_t n_bytes)
{
    return head->magic == MAGIC && head->version == DEVICE_PLAN_VERSION && head->n_bytes <= n_bytes &&
           head->world_size >= 1 && head->world_size <= DEVICE_MAX_WORLD && head->n_local >= 1 &&
           head->n_local <= DEVICE_MAX_LOCAL && head->first_local < head->world_size &&
           head->n_local <= head->world_size - head->first_local && head->stage >= 1 && head->stage <= 3 &&
           head->optimizer < (uint32_t)N_OPTIMIZERS && moments_are_sound(head) && head->master24 <= 1 &&
           head->n_matrices <= (head->optimizer == OPTIMIZER_MUON ? head->n_params : 0) &&
           head->mask_words == div_round_up(head->world_size, 64) && head->weight_bytes <= DEVICE_MAX_BYTES &&
           head->ring_bytes <= DEVICE_MAX_BYTES && head->pool_bytes <= DEVICE_MAX_BYTES &&
           array_fits(head, head->params_at, head->n_params, sizeof(struct device_plan_param)) &&
           array_fits(head, head->buckets_at, head->n_buckets, sizeof(struct layout_bucket)) &&
           array_fits(head, head->chunks_at, head->n_chunks, sizeof(struct layout_chunk)) &&
           array_fits(head, head->parts_at, head->n_parts, sizeof(struct layout_part)) &&
           array_fits(head, head->parcels_at, head->n_parcels, sizeof(struct layout_parcel));
}

static bool is_within(uint64_t first, uint64_t n, uint64_t whole)
{
    return first <= whole && n <= whole - first;
}

static bool bucket_is_sound(const struct device_plan *plan, const struct layout_bucket *bucket)
{
    const struct device_plan_header *head = plan->head;

    return (bucket->owner == LAYOUT_NO_OWNER || bucket->owner < head->world_size) && bucket->dtype < N_DTYPES &&
           bucket->grad_dtype < N_DTYPES && bucket->n_elems <= DEVICE_MAX_BYTES / 8 &&
           bucket->n_elems % ((uint64_t)LAYOUT_ALIGN_ELEMS * head->world_size) == 0 &&
           is_within(bucket->weight_offset_bytes, bucket->n_elems * dtype_size(bucket->dtype), head->weight_bytes) &&
           is_within(bucket->first_parcel, bucket->n_parcels, head->n_parcels) &&
           is_within(bucket->first_chunk, bucket->n_chunks, head->n_chunks);
}

static bool parcel_is_sound(const struct device_plan *plan, const struct layout_parcel *parcel)
{
    return parcel->bucket < plan->head->n_buckets &&
           is_within(parcel->offset_elems, parcel->n_elems, plan->buckets[parcel->bucket].n_elems) &&
           parcel->offset_elems % LAYOUT_ALIGN_ELEMS == 0 &&
           is_within(parcel->first_part, parcel->n_parts, plan->head->n_parts) &&
           is_within(parcel->first_chunk, parcel->n_chunks, plan->head->n_chunks);
}

static bool matrix_is_sound(const struct device_plan *plan, const struct device_plan_param *param)
{
    return param->matrix < plan->head->n_matrices && param->rows >= 1 && param->rows <= MUON_MAX_SIDE &&
           param->cols >= 1 && param->cols <= MUON_MAX_SIDE && param->n_elems == (uint64_t)param->rows * param->cols &&
           param->bucket < plan->head->n_buckets && plan->buckets[param->bucket].owner != LAYOUT_NO_OWNER;
}

static bool param_is_sound(const struct device_plan *plan, const struct device_plan_param *param)
{
    if (param->dtype >= N_DTYPES || param->n_elems > DEVICE_MAX_BYTES / 8 || param->group >= plan->head->n_groups ||
        (param->rows + (uint64_t)param->cols > 0 && !matrix_is_sound(plan, param)))
        return false;
    if (param->bucket == LAYOUT_NO_BUCKET)
        return true;
    return param->bucket < plan->head->n_buckets && param->dtype == plan->buckets[param->bucket].dtype &&
           is_within(param->offset_elems, param->n_elems, plan->buckets[param->bucket].n_elems) &&
           is_within(param->first_part, param->n_parts, plan->head->n_parts) &&
           is_within(param->first_chunk, param->n_chunks, plan->head->n_chunks);
}

static bool part_is_sound(const struct device_plan *plan, const struct layout_part *part)
{
    const struct device_plan_param *param;
    const struct layout_parcel *parcel;
    uint64_t begin;

    if (part->param >= plan->head->n_params || part->parcel >= plan->head->n_parcels)
        return false;
    param = &plan->params[part->param];
    parcel = &plan->parcels[part->parcel];
    if (param->bucket != parcel->bucket || !is_within(part->start_elem, part->n_elems, param->n_elems))
        return false;
    begin = param->offset_elems + part->start_elem;
    return begin >= parcel->offset_elems && is_within(begin - parcel->offset_elems, part->n_elems, parcel->n_elems) &&
           is_within(part->first_chunk, part->n_chunks, plan->head->n_chunks);
}

/* Finds the rank's partition of a bucket: [*start, *start + n). Return: n. */
static uint64_t find_partition(const struct device_plan *plan, uint32_t bucket, unsigned rank, uint64_t *start)
{
    return layout_bucket_owned(&plan->buckets[bucket], plan->head->world_size, rank, 1, start);
}

/* Is the chunk inside its part and inside its owner's partition? Then its reads and writes stay in its slots and
 * slices. */
static bool chunk_is_sound(const struct device_plan *plan, const struct layout_chunk *chunk)
{
    const struct layout_part *part;
    uint64_t slice, start, begin;

    if (chunk->part >= plan->head->n_parts || chunk->rank >= plan->head->world_size || chunk->n_elems > CHUNK_ELEMS ||
        chunk->start_elem % LAYOUT_ALIGN_ELEMS != 0)
        return false;
    part = &plan->parts[chunk->part];
    if (chunk->param != part->param || chunk->start_elem < part->start_elem ||
        !is_within(chunk->start_elem - part->start_elem, chunk->n_elems, part->n_elems))
        return false;
    slice = find_partition(plan, plan->params[chunk->param].bucket, chunk->rank, &start);
    begin = plan->params[chunk->param].offset_elems + chunk->start_elem;
    return begin >= start && is_within(begin - start, chunk->n_elems, slice);
}

/*
 * Do all chunks that a parameter lists name this parameter? chunk_is_sound() checks that the chunks of a matrix are in
 * its owner's partition.
 */
static bool chunks_are_its_own(const struct device_plan *plan, uint32_t param)
{
    const struct device_plan_param *p = &plan->params[param];
    bool is_in_owned = p->bucket != LAYOUT_NO_BUCKET && plan->buckets[p->bucket].owner != LAYOUT_NO_OWNER;

    for (uint32_t c = p->first_chunk; p->bucket != LAYOUT_NO_BUCKET && c < p->first_chunk + p->n_chunks; c++)
        if (plan->chunks[c].param != param || (is_in_owned && p->rows == 0))
            return false;
    return true;
}

/*
 * Do the chunks and parts that a parcel, bucket or parameter lists name that parcel, bucket or parameter? Orders find
 * chunks and parts through these lists.
 */
static bool ownership_is_sound(const struct device_plan *plan)
{
    for (uint32_t i = 0; i < plan->head->n_parcels; i++) {
        const struct layout_parcel *parcel = &plan->parcels[i];

        for (uint32_t k = parcel->first_part; k < parcel->first_part + parcel->n_parts; k++)
            if (plan->parts[k].parcel != i)
                return false;
        for (uint32_t c = parcel->first_chunk; c < parcel->first_chunk + parcel->n_chunks; c++)
            if (plan->parts[plan->chunks[c].part].parcel != i)
                return false;
    }
    for (uint32_t i = 0; i < plan->head->n_buckets; i++) {
        const struct layout_bucket *bucket = &plan->buckets[i];

        for (uint32_t c = bucket->first_chunk; c < bucket->first_chunk + bucket->n_chunks; c++)
            if (plan->params[plan->chunks[c].param].bucket != i)
                return false;
    }
    for (uint32_t i = 0; i < plan->head->n_params; i++)
        if (!chunks_are_its_own(plan, i))
            return false;
    return true;
}

static int refuse_entry(char *why, size_t why_size, const char *what, uint32_t index)
{
    snprintf(why, why_size, "invalid plan: %s %" PRIu32, what, index);
    return -EINVAL;
}

#define CHECK_ALL(n, items, is_sound, name)                                                                            \
    for (uint32_t i = 0; i < (n); i++)                                                                                 \
        if (!is_sound(out, &(items)[i]))                                                                               \
            return refuse_entry(why, why_size, name, i);

int device_plan_open(struct device_plan *out, const void *memory, uint64_t n_bytes, char *why, size_t why_size)
{
    const struct device_plan_header *head = memory;
    const uint8_t *base = memory;

    if (n_bytes < sizeof(*head) || !head_is_sound(head, n_bytes))
        return refuse_entry(why, why_size, "its header of version", n_bytes < sizeof(*head) ? 0 : head->version);
    *out = (struct device_plan){
        .head = head,
        .params = (const void *)(base + head->params_at),
        .buckets = (const void *)(base + head->buckets_at),
        .chunks = (const void *)(base + head->chunks_at),
        .parts = (const void *)(base + head->parts_at),
        .parcels = (const void *)(base + head->parcels_at),
    };
    CHECK_ALL(head->n_buckets, out->buckets, bucket_is_sound, "bucket");
    CHECK_ALL(head->n_parcels, out->parcels, parcel_is_sound, "parcel");
    CHECK_ALL(head->n_params, out->params, param_is_sound, "parameter");
    CHECK_ALL(head->n_parts, out->parts, part_is_sound, "part");
    CHECK_ALL(head->n_chunks, out->chunks, chunk_is_sound, "chunk");
    if (!ownership_is_sound(out))
        return refuse_entry(why, why_size, "what belongs to what, of version", head->version);
    return 0;
}

/* ---- device memory --------------------------------------------------------------------------------------- */

static uint64_t take_array(uint64_t *end, uint64_t n_elems, enum dtype dtype, bool wanted)
{
    return wanted ? place_array(end, dtype_bytes(dtype, n_elems), DEVICE_ALIGN_BYTES) : DEVICE_NONE;
}

struct device_undo_places device_undo_places(const struct device_plan *plan)
{
    const struct device_plan_header *head = plan->head;
    unsigned n_moments = !!head->exp_avg + !!head->exp_avg_sq;
    struct device_undo_places places = {.slot_bytes = device_undo_slot_bytes(n_moments, head->moments_dtype)};
    uint64_t largest = 0, n_chunks = 0;

    for (uint32_t b = 0; b < head->n_buckets; b++) {
        uint64_t slice = layout_bucket_partition(&plan->buckets[b], head->world_size);

        largest = MAX(largest, layout_undo_elems(&plan->buckets[b], plan->parcels, head->world_size));
        n_chunks += plan->buckets[b].n_chunks + slice / DEVICE_CHUNK_ELEMS;
    }
    if (!head->offload)
        places.n_blocks = device_update_blocks(n_chunks);
    places.lane_bytes = round_up(largest * sizeof(float), DEVICE_ALIGN_BYTES);
    places.n_bytes = DEVICE_LANES * places.lane_bytes;
    places.marks = place_array(&places.n_bytes,
                               sizeof(uint64_t) * device_mark_sets(head->master24, head->n_matrices) * places.n_blocks,
                               DEVICE_ALIGN_BYTES);
    places.slots =
        place_array(&places.n_bytes, device_undo_bytes(places.n_blocks, places.slot_bytes), DEVICE_ALIGN_BYTES);
    return places;
}

static void place_buckets(const struct device_plan *plan, unsigned rank, struct device_places *places,
                          uint64_t *piece_bytes)
{
    enum dtype moments = plan->head->moments_dtype;
    bool has_state = !plan->head->offload;

    for (uint32_t b = 0; b < plan->head->n_buckets; b++) {
        uint64_t start, slice = find_partition(plan, b, rank, &start);
        bool master24 = device_is_master24(plan, b);
        bool own_master = plan->head->stage == 3 || (!master24 && plan->buckets[b].dtype != DTYPE_F32);

        places[b] = (struct device_places){
            .start_elem = start,
            .slice_elems = slice,
            .master = take_array(&piece_bytes[DEVICE_STATE], slice, master24 ? DTYPE_BF16 : DTYPE_F32,
                                 has_state && own_master),
            .lower = has_state && master24 ? place_array(&piece_bytes[DEVICE_STATE], slice, DEVICE_ALIGN_BYTES)
                                           : DEVICE_NONE,
            .exp_avg = take_array(&piece_bytes[DEVICE_STATE], slice, moments, has_state && plan->head->exp_avg),
            .exp_avg_sq = take_array(&piece_bytes[DEVICE_STATE], slice, moments,
                                     has_state && plan->head->exp_avg_sq && plan->buckets[b].owner == LAYOUT_NO_OWNER),
            .acc = take_array(&piece_bytes[DEVICE_GRADIENT], slice, DTYPE_F32, true),
        };
    }
}

static uint64_t frozen_slice_elems(const struct device_plan *plan, uint32_t param)
{
    return layout_frozen_slice_elems(plan->params[param].n_elems, plan->head->world_size);
}

static void place_frozen(const struct device_plan *plan, uint64_t *frozen, uint64_t *piece_bytes)
{
    bool has_slices = plan->head->stage == 3 && !plan->head->offload;

    for (uint32_t p = 0; p < plan->head->n_params; p++) {
        const struct device_plan_param *param = &plan->params[p];

        frozen[p] = DEVICE_NONE;
        if (has_slices && param->bucket == LAYOUT_NO_BUCKET)
            frozen[p] = place_array(&piece_bytes[DEVICE_STATE], frozen_slice_elems(plan, p) * dtype_size(param->dtype),
                                    DEVICE_ALIGN_BYTES);
    }
}

int device_rank_places_init(struct device_rank_places *places, const struct device_plan *plan, unsigned local_rank)
{
    uint64_t *piece_bytes = places->piece_bytes;

    assert(local_rank < plan->head->n_local);
    *places = (struct device_rank_places){
        .buckets = calloc(plan->head->n_buckets + 1, sizeof(*places->buckets)),
        .frozen = calloc(plan->head->n_params + 1, sizeof(*places->frozen)),
    };
    if (!places->buckets || !places->frozen) {
        device_rank_places_deinit(places);
        return -ENOMEM;
    }
    place_buckets(plan, plan->head->first_local + local_rank, places->buckets, piece_bytes);
    place_frozen(plan, places->frozen, piece_bytes);
    piece_bytes[DEVICE_WEIGHTS] = plan->head->stage == 3 ? 0 : plan->head->weight_bytes;
    piece_bytes[DEVICE_RING] = plan->head->ring_bytes;
    piece_bytes[DEVICE_UNDO] = device_undo_places(plan).n_bytes;
    piece_bytes[DEVICE_POOL] = plan->head->pool_bytes;
    /* Gives each piece a minimum size, because empty pieces would need exceptions in all code. */
    for (unsigned i = 0; i < DEVICE_N_PIECES; i++)
        piece_bytes[i] = MAX(piece_bytes[i], (uint64_t)DEVICE_ALIGN_BYTES);
    return 0;
}

void device_rank_places_deinit(struct device_rank_places *places)
{
    free(steal_ptr(places->buckets));
    free(steal_ptr(places->frozen));
}

uint64_t device_master(const struct device_plan *plan, const struct device_places *places, uint32_t bucket,
                       uint32_t *kind)
{
    assert(!plan->head->offload);
    assert(bucket < plan->head->n_buckets);
    *kind = places->master == DEVICE_NONE ? DEVICE_WEIGHTS : DEVICE_STATE;
    if (*kind == DEVICE_STATE)
        return places->master;
    return plan->buckets[bucket].weight_offset_bytes + places->start_elem * dtype_size(plan->buckets[bucket].dtype);
}

void device_parcel_slice(const struct device_plan *plan, uint32_t parcel, unsigned rank, uint64_t *begin, uint64_t *end)
{
    const struct layout_parcel *p = &plan->parcels[parcel];
    uint64_t start, slice = find_partition(plan, p->bucket, rank, &start);

    assert(parcel < plan->head->n_parcels);
    assert(rank < plan->head->world_size);
    *begin = MAX(start, p->offset_elems);
    *end = MAX(*begin, MIN(start + slice, p->offset_elems + p->n_elems));
}

void device_param_owners(const struct device_plan *plan, uint32_t param, unsigned *first, unsigned *end)
{
    const struct device_plan_param *p = &plan->params[param];
    const struct layout_bucket *bucket = p->bucket == LAYOUT_NO_BUCKET ? NULL : &plan->buckets[p->bucket];
    uint64_t offset = bucket ? p->offset_elems : 0, slice = frozen_slice_elems(plan, param);

    assert(param < plan->head->n_params);
    *first = *end = 0;
    if (p->n_elems == 0)
        return;
    if (bucket)
        slice = layout_bucket_partition(bucket, plan->head->world_size);
    *first = (unsigned)(offset / slice);
    *end = (unsigned)((offset + p->n_elems - 1) / slice) + 1;
    if (bucket && bucket->owner != LAYOUT_NO_OWNER) {
        *first = bucket->owner;
        *end = bucket->owner + 1;
    }
    assert(*first < *end);
    assert(*end <= plan->head->world_size);
}

/* A frozen parameter is partitioned by itself, any other parameter with its bucket. */
void device_param_slice(const struct device_plan *plan, uint32_t param, unsigned rank, uint64_t *begin, uint64_t *end)
{
    const struct device_plan_param *p = &plan->params[param];
    bool is_frozen = p->bucket == LAYOUT_NO_BUCKET;
    uint64_t offset = is_frozen ? 0 : p->offset_elems, slice = frozen_slice_elems(plan, param), start = slice * rank;

    assert(param < plan->head->n_params);
    assert(rank < plan->head->world_size);
    if (!is_frozen)
        slice = find_partition(plan, p->bucket, rank, &start);
    *begin = MAX(start, offset);
    *end = MAX(*begin, MIN(start + slice, offset + p->n_elems));
    *begin = MIN(*begin - offset, p->n_elems);
    *end = MIN(*end - offset, p->n_elems);
}

/* ---- inputs and results ---------------------------------------------------------------------------------- */

struct inputs_at {
    uint64_t masks, scalars, begun, contributed, groups, end;
};

static struct inputs_at place_inputs(const struct device_plan *plan)
{
    const struct device_plan_header *head = plan->head;
    struct inputs_at at = {.end = 0};

    at.masks = place_array(&at.end, (uint64_t)head->n_parts * head->mask_words * sizeof(uint64_t), 8);
    at.scalars = place_array(&at.end, (uint64_t)head->n_params * sizeof(struct update_scalars), 8);
    at.begun = place_array(&at.end, head->n_parts, 8);
    at.contributed = place_array(&at.end, head->n_params, 8);
    at.groups = place_array(&at.end, (uint64_t)head->n_groups * sizeof(struct hyper), 8);
    return at;
}

uint64_t device_inputs_bytes(const struct device_plan *plan)
{
    return round_up(place_inputs(plan).end, PAGE_BYTES);
}

void device_inputs_open(const struct device_plan *plan, void *map, struct device_inputs *out)
{
    struct inputs_at at = place_inputs(plan);
    uint8_t *base = map;

    assert((uintptr_t)map % 8 == 0);
    *out = (struct device_inputs){
        .masks = (void *)(base + at.masks),
        .scalars = (void *)(base + at.scalars),
        .begun = base + at.begun,
        .contributed = base + at.contributed,
        .groups = (void *)(base + at.groups),
    };
}

struct results_at {
    uint64_t squares, sums, findings, reduced, cleared, marks, end;
};

static struct results_at place_results(const struct device_plan *plan)
{
    const struct device_plan_header *head = plan->head;
    struct results_at at = {.end = 0};

    at.squares = place_array(&at.end, (uint64_t)head->n_chunks * sizeof(struct exact_sum), 8);
    at.sums = place_array(&at.end, (uint64_t)head->n_chunks * head->n_local * sizeof(struct position_sum), 8);
    at.findings = place_array(&at.end, (uint64_t)head->n_parcels * sizeof(struct device_result_finding), 8);
    at.reduced = place_array(&at.end, (uint64_t)head->n_parcels * sizeof(uint64_t), 8);
    at.cleared = place_array(&at.end, (uint64_t)head->n_local * sizeof(uint64_t), 8);
    at.marks = place_array(&at.end, (uint64_t)head->n_local * DEVICE_LANES * sizeof(struct device_mark), PAGE_BYTES);
    at.end = round_up(at.end, PAGE_BYTES);
    return at;
}

uint64_t device_results_bytes(const struct device_plan *plan, uint64_t *marks_at)
{
    struct results_at at = place_results(plan);

    if (marks_at)
        *marks_at = at.marks;
    return at.end;
}

void device_results_open(const struct device_plan *plan, void *map, struct device_results *out)
{
    struct results_at at = place_results(plan);
    uint8_t *base = map;

    assert((uintptr_t)map % PAGE_BYTES == 0);
    *out = (struct device_results){
        .squares = (void *)(base + at.squares),
        .sums = (void *)(base + at.sums),
        .findings = (void *)(base + at.findings),
        .reduced = (void *)(base + at.reduced),
        .marks = (void *)(base + at.marks),
        .cleared = (void *)(base + at.cleared),
    };
}
