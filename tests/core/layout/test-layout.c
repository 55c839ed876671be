/* SPDX-License-Identifier: Apache-2.0 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "core/layout/manifest.h"
#include "tests/group.h"

enum { MAX_RANDOM_PARAMS = 40 };

static uint64_t page_bytes(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

/* A declaration of one dimension. Its dtype is fp32 and its group is 0 unless the arguments say otherwise. */
#define ENTRY(text, n, ...)                                                                                            \
    {                                                                                                                  \
        .name = text, .name_len = sizeof(text) - 1, .shape = (const uint64_t[]){n}, .n_dims = 1, __VA_ARGS__           \
    }
#define DECL(text, n, ...) ENTRY(text, n, .trainable = true, ##__VA_ARGS__)
#define FROZEN(text, n, ...) ENTRY(text, n, .trainable = false, ##__VA_ARGS__)

static struct layout *make(const struct layout_decl *decls, uint32_t n, unsigned world_size, uint64_t bucket_elems)
{
    struct layout *layout = NULL;
    uint32_t bad;

    assert_int_equal(layout_new(&layout, decls, n, world_size, bucket_elems, &bad), 0);
    assert_non_null(layout);
    return layout;
}

static void check_refused(const struct layout_decl *decls, uint32_t n, int expected, uint32_t expected_bad)
{
    struct layout *layout = NULL;
    uint32_t bad = 12345;

    assert_int_equal(layout_new(&layout, decls, n, 2, 1000, &bad), expected);
    assert_null(layout);
    assert_int_equal(bad, expected_bad);
}

/* ---- invariants ---------------------------------------------------------------------------------------- */

struct interval {
    uint64_t start, end;
};

static int compare_intervals(const void *a, const void *b)
{
    const struct interval *x = a, *y = b;

    return x->start < y->start ? -1 : x->start > y->start;
}

static void check_disjoint(struct interval *intervals, size_t n, uint64_t end)
{
    uint64_t before = 0;

    qsort(intervals, n, sizeof(*intervals), compare_intervals);
    for (size_t i = 0; i < n; i++) {
        if (intervals[i].start == intervals[i].end)
            continue;
        assert_true(intervals[i].start >= before);
        before = intervals[i].end;
    }
    assert_true(before <= end);
}

/* Asserts that each element is in exactly one chunk, that the chunk lies in one partition, and names its owner. */
static void check_chunks(const struct layout *layout, uint32_t id)
{
    const struct layout_param *param = &layout->params[id];
    const struct layout_bucket *bucket;
    uint64_t at = 0;

    if (!param->trainable) {
        assert_int_equal(param->n_chunks, 0);
        return;
    }
    bucket = &layout->buckets[param->bucket];
    assert_true(param->first_chunk >= bucket->first_chunk);
    assert_true(param->first_chunk + param->n_chunks <= bucket->first_chunk + bucket->n_chunks);

    for (uint32_t c = param->first_chunk; c < param->first_chunk + param->n_chunks; c++) {
        const struct layout_chunk *chunk = &layout->chunks[c];
        uint64_t start = param->offset_elems + chunk->start_elem, owned, end;

        assert_int_equal(chunk->param, id);
        assert_int_equal(chunk->start_elem, at);
        assert_int_equal(chunk->start_elem % 64, 0);
        assert_in_range(chunk->n_elems, 1, CHUNK_ELEMS);
        assert_true(chunk->rank < layout->world_size);
        end = layout_owned_elems(layout, param->bucket, chunk->rank, 1, &owned) + owned;
        assert_true(start >= owned);
        assert_true(start + chunk->n_elems <= end);
        at += chunk->n_elems;
    }
    assert_int_equal(at, param->n_elems);
}

enum {
    MAX_FIRST_RANKS = 4096,
};

/*
 * Asserts that the partitions follow one another and fill the bucket. They are equal, except that one rank owns all of
 * a bucket of Muon. In a very large world only the first and the last ranks are checked.
 */
static void check_partitions(const struct layout *layout, uint32_t b)
{
    const struct layout_bucket *bucket = &layout->buckets[b];
    bool skips = !layout_is_muon(layout, b) && layout->world_size > 2 * MAX_FIRST_RANKS;
    uint64_t at = 0, start, end, n;

    for (uint32_t rank = 0; rank < layout->world_size; rank++) {
        if (skips && rank == MAX_FIRST_RANKS) {
            rank = layout->world_size - MAX_FIRST_RANKS;
            at = rank * (bucket->n_elems / layout->world_size);
        }
        n = layout_owned_elems(layout, b, rank, 1, &start);
        assert_int_equal(n, !layout_is_muon(layout, b) ? bucket->n_elems / layout->world_size
                            : rank == bucket->owner    ? bucket->n_elems
                                                       : 0);
        assert_int_equal(start, n > 0 ? at : 0);
        for (uint64_t elem = at; elem < at + n; elem += MAX(n / 3, UINT64_C(1))) {
            assert_int_equal(layout_owner(layout, b, elem, &end), rank);
            assert_int_equal(end, at + n);
        }
        at += n;
        assert_int_equal(layout_owned_elems(layout, b, 0, rank + 1, &start), at);
    }
    assert_int_equal(at, bucket->n_elems);
}

static void check_bucket(const struct layout *layout, uint32_t b)
{
    const struct layout_bucket *bucket = &layout->buckets[b];
    uint64_t end = 0, used = 0;
    uint32_t previous = UINT32_MAX, n_chunks = 0;

    assert_int_equal(bucket->n_elems % (UINT64_C(64) * layout->world_size), 0);
    check_partitions(layout, b);
    assert_true(bucket->n_params > 0);

    for (uint32_t k = 0; k < bucket->n_params; k++) {
        uint32_t id = layout->bucket_params[bucket->first_param + k];
        const struct layout_param *param = &layout->params[id];

        assert_true(param->trainable);
        assert_int_equal(param->bucket, b);
        assert_int_equal(param->index_in_bucket, k);
        assert_int_equal(param->group, bucket->group);
        assert_int_equal(param->dtype, bucket->dtype);
        assert_int_equal(param->grad_dtype, bucket->grad_dtype);
        assert_int_equal(param->muon, layout_is_muon(layout, b));
        assert_true(id < previous); /* in reverse order of declaration */
        assert_int_equal(param->offset_elems % 64, 0);
        assert_int_equal(param->offset_elems, round_up(end, 64)); /* no larger gap than alignment needs */
        end = param->offset_elems + param->n_elems;
        used += param->n_elems;
        n_chunks += param->n_chunks;
        previous = id;
    }
    assert_true(end <= layout->bucket_elems || bucket->n_params == 1);
    assert_int_equal(bucket->n_elems, round_up(end, UINT64_C(64) * layout->world_size));
    assert_int_equal(bucket->used_elems, used);
    assert_int_equal(bucket->n_chunks, n_chunks);
}

/* Asserts that bucket b was opened because the bucket before it, of the same kind, had no room for the parameter. */
static void check_full(const struct layout *layout, uint32_t b)
{
    const struct layout_bucket *bucket = &layout->buckets[b], *before = NULL;
    const struct layout_param *first, *last;

    for (uint32_t i = 0; i < b; i++) {
        const struct layout_bucket *other = &layout->buckets[i];

        if (other->group == bucket->group && other->dtype == bucket->dtype && other->grad_dtype == bucket->grad_dtype &&
            layout_is_muon(layout, i) == layout_is_muon(layout, b))
            before = other;
    }
    if (!before)
        return;
    first = &layout->params[layout->bucket_params[bucket->first_param]];
    last = &layout->params[layout->bucket_params[before->first_param + before->n_params - 1]];
    assert_true(round_up(last->offset_elems + last->n_elems, 64) + first->n_elems > layout->bucket_elems);
}

static void check_bytes(const struct layout *layout)
{
    size_t n = 0, n_weights = layout->n_buckets, n_range = 0;
    _cleanup_free_ struct interval *arena = calloc(layout->n_buckets + 1, sizeof(*arena));
    _cleanup_free_ struct interval *weights = calloc(layout->n_buckets + layout->n_params, sizeof(*weights));
    _cleanup_free_ struct interval *range = calloc(layout->n_params, sizeof(*range));
    uint64_t total = 0;

    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        const struct layout_bucket *bucket = &layout->buckets[b];
        uint64_t n_bytes = bucket->n_elems * dtype_size(bucket->grad_dtype);
        uint64_t at = bucket->weight_offset_bytes;

        arena[n++] = (struct interval){bucket->arena_offset_bytes, bucket->arena_offset_bytes + n_bytes};
        weights[b] = (struct interval){at, at + bucket->room_elems * dtype_size(bucket->dtype)};
        assert_true(bucket->room_elems >= bucket->n_elems);
        assert_int_equal(at % 4096, 0);
        assert_int_equal(bucket->arena_offset_bytes, total); /* without gaps */
        total += n_bytes;
    }
    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];
        uint64_t n_bytes = param->n_elems * dtype_size(param->dtype);
        uint64_t at = param->weight_offset_bytes;

        range[n_range++] = (struct interval){param->range_offset_bytes, param->range_offset_bytes + n_bytes};
        assert_int_equal(param->range_offset_bytes % page_bytes(), 0);
        assert_int_equal(at % 64, 0);
        if (param->trainable) {
            const struct layout_bucket *bucket = &layout->buckets[param->bucket];

            assert_int_equal(at - bucket->weight_offset_bytes, param->offset_elems * dtype_size(param->dtype));
        } else {
            weights[n_weights++] = (struct interval){at, at + n_bytes};
        }
    }
    assert_int_equal(layout->arena_bytes, total);
    check_disjoint(arena, n, layout->arena_bytes);
    check_disjoint(weights, n_weights, layout->weight_bytes);
    check_disjoint(range, n_range, layout->range_bytes);
}

/* Asserts that a part lies in its parcel, and has all elements of its parameter in that parcel's chunks. */
static void check_part(const struct layout *layout, uint32_t parcel, uint32_t id)
{
    const struct layout_parcel *in = &layout->parcels[parcel];
    const struct layout_part *part = &layout->parts[id];
    const struct layout_param *param = &layout->params[part->param];
    uint64_t n_elems = 0;

    assert_int_equal(part->parcel, parcel);
    assert_in_range(id, param->first_part, layout_last_part(layout, part->param));
    assert_int_equal(layout_is_last_part(layout, id), id + 1 == param->first_part + param->n_parts);
    assert_true(part->n_chunks == 0 || part->start_elem == layout->chunks[part->first_chunk].start_elem);
    assert_true(part->first_chunk >= in->first_chunk || part->n_chunks == 0);
    for (uint32_t c = part->first_chunk; c < part->first_chunk + part->n_chunks; c++) {
        assert_int_equal(layout->chunks[c].part, id);
        assert_int_equal(layout->chunks[c].param, part->param);
        n_elems += layout->chunks[c].n_elems;
    }
    assert_int_equal(part->n_elems, n_elems);
    assert_int_equal(layout_part_bytes(layout, id), n_elems * dtype_size(param->grad_dtype));
    assert_true(layout_part_offset_bytes(layout, id) + layout_part_bytes(layout, id) <=
                layout_parcel_bytes(layout, parcel));
    assert_int_equal(layout_part_offset_bytes(layout, id) % 64, 0);
}

/* Asserts that the parcels fill their bucket without gaps. Only a bucket of one large parameter has several parcels. */
static void check_parcels(const struct layout *layout, uint32_t b)
{
    const struct layout_bucket *bucket = &layout->buckets[b];
    uint64_t most = layout->bucket_elems, at = 0;
    uint32_t n_parts = 0, n_chunks = 0;

    for (uint32_t i = bucket->first_parcel; i < bucket->first_parcel + bucket->n_parcels; i++) {
        const struct layout_parcel *parcel = &layout->parcels[i];
        uint64_t n_elems = 0;

        assert_int_equal(parcel->bucket, b);
        assert_int_equal(parcel->offset_elems, at);
        assert_int_equal(parcel->first_chunk, bucket->first_chunk + n_chunks);
        for (uint32_t k = parcel->first_part; k < parcel->first_part + parcel->n_parts; k++) {
            check_part(layout, i, k);
            n_elems += layout->parts[k].n_elems;
        }
        assert_true(n_elems <= most || parcel->n_chunks == 1);
        assert_true(layout_parcel_bytes(layout, i) <= layout->largest_parcel_bytes);
        at += parcel->n_elems;
        n_parts += parcel->n_parts;
        n_chunks += parcel->n_chunks;
    }
    assert_int_equal(at, bucket->n_elems);
    assert_int_equal(n_chunks, bucket->n_chunks);
    assert_int_equal(n_parts, MAX(bucket->n_params, bucket->n_parcels));
    assert_true(bucket->n_parcels == 1 || (bucket->n_params == 1 && bucket->used_elems > most));
}

static void check_layout(const struct layout *layout)
{
    uint32_t n_parcels = 0, n_parts = 0;
    uint64_t trainable = 0, frozen = 0, padded = 0;
    uint32_t n_in_buckets = 0, n_chunks = 0, n_trainable = 0;

    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        assert_int_equal(layout->buckets[b].first_param, n_in_buckets);
        assert_int_equal(layout->buckets[b].first_chunk, n_chunks);
        check_bucket(layout, b);
        check_full(layout, b);
        assert_int_equal(layout->buckets[b].first_parcel, n_parcels);
        check_parcels(layout, b);
        n_parcels += layout->buckets[b].n_parcels;
        n_parts += MAX(layout->buckets[b].n_params, layout->buckets[b].n_parcels);
        n_in_buckets += layout->buckets[b].n_params;
        n_chunks += layout->buckets[b].n_chunks;
        padded += layout->buckets[b].n_elems;
    }
    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];

        check_chunks(layout, p);
        assert_true(param->group < layout->n_groups);
        if (param->trainable) {
            n_trainable++;
            trainable += param->n_elems;
        } else {
            assert_int_equal(param->bucket, LAYOUT_NO_BUCKET);
            frozen += param->n_elems;
        }
    }
    assert_int_equal(n_in_buckets, n_trainable);
    assert_int_equal(layout->n_chunks, n_chunks);
    assert_int_equal(layout->n_parcels, n_parcels);
    assert_int_equal(layout->n_parts, n_parts);
    assert_int_equal(layout->trainable_elems, trainable);
    assert_int_equal(layout->frozen_elems, frozen);
    assert_int_equal(layout->padded_elems, padded);
    check_bytes(layout);
}

/* xorshift64. It draws the same manifests in every run. */
static uint64_t draw(uint64_t *state, uint64_t n)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state % n;
}

static uint64_t draw_size(uint64_t *state)
{
    switch (draw(state, 8)) {
    case 0:
        return draw(state, 2);
    case 1:
        return 64 * draw(state, 8);
    case 2:
        return 1 + draw(state, 300000);
    case 3:
        return CHUNK_ELEMS - 1 + draw(state, 3);
    default:
        return 1 + draw(state, 1000);
    }
}

/* A layout for another number of ranks has everything at the same offsets, as long as there is room for the ranks. */
static void check_other_ranks(const struct layout *layout, unsigned n_ranks)
{
    struct layout *other = NULL;

    assert_int_equal(layout_for_ranks(&other, layout, n_ranks), 0);
    check_layout(other);
    assert_int_equal(other->world_size, n_ranks);
    assert_int_equal(other->n_buckets, layout->n_buckets);
    assert_int_equal(other->weight_bytes, layout->weight_bytes);
    assert_int_equal(other->range_bytes, layout->range_bytes);
    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        assert_int_equal(other->buckets[b].weight_offset_bytes, layout->buckets[b].weight_offset_bytes);
        assert_int_equal(layout_room_elems(other, b, 0, n_ranks), layout_room_elems(layout, b, 0, layout->world_size));
    }
    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *a = &layout->params[p], *b = &other->params[p];

        assert_string_equal(a->name, b->name);
        assert_int_equal(a->bucket, b->bucket);
        assert_int_equal(a->offset_elems, b->offset_elems);
        assert_int_equal(a->weight_offset_bytes, b->weight_offset_bytes);
    }
    layout_free(other);
}

static void test_random(void **state)
{
    uint64_t seed = 0x9e3779b97f4a7c15;

    for (int round = 0; round < 2000; round++) {
        struct layout_decl decls[MAX_RANDOM_PARAMS] = {};
        uint64_t shapes[MAX_RANDOM_PARAMS][2];
        char names[MAX_RANDOM_PARAMS][16];
        uint32_t n = 1 + (uint32_t)draw(&seed, MAX_RANDOM_PARAMS);
        unsigned n_kinds = 1 + (unsigned)draw(&seed, 3);
        struct layout *layout;

        for (uint32_t i = 0; i < n; i++) {
            snprintf(names[i], sizeof(names[i]), "p%u", i);
            shapes[i][0] = draw_size(&seed);
            shapes[i][1] = 1;
            decls[i] = (struct layout_decl){
                .name = names[i],
                .name_len = strlen(names[i]),
                .dtype = (enum dtype)draw(&seed, n_kinds),
                .grad_dtype = (enum dtype)draw(&seed, n_kinds),
                .group = (uint32_t)draw(&seed, n_kinds),
                .trainable = draw(&seed, 5) > 0,
                .muon = draw(&seed, n_kinds) == 1,
                .n_dims = 2,
                .shape = shapes[i],
            };
        }
        layout = make(decls, n, 1 + (unsigned)draw(&seed, 9), 1 + draw_size(&seed) * (1 + draw(&seed, 4)));
        check_layout(layout);
        check_other_ranks(layout, 1 + (unsigned)draw(&seed, LAYOUT_ROOM_RANKS));
        layout_free(layout);
    }
}

/* ---- worked out by hand -------------------------------------------------------------------------------- */

static void check_chunk(const struct layout *layout, uint32_t c, struct layout_chunk expected)
{
    const struct layout_chunk *chunk = &layout->chunks[c];

    assert_int_equal(chunk->param, expected.param);
    assert_int_equal(chunk->rank, expected.rank);
    assert_int_equal(chunk->start_elem, expected.start_elem);
    assert_int_equal(chunk->n_elems, expected.n_elems);
}

/* c begins at element 0, b at 128, a at 192; a ends at 202. That is one bucket of 256 elements, 128 for each rank. */
static void test_one_bucket(void **state)
{
    static const uint64_t matrix[] = {3, 5};
    const struct layout_decl decls[] = {
        DECL("a", 10),
        {.name = "b", .name_len = 1, .trainable = true, .n_dims = 2, .shape = matrix},
        FROZEN("f", 7, .dtype = DTYPE_BF16, .group = 2),
        DECL("c", 100),
    };
    struct layout *layout = make(decls, 4, 2, 256);
    const struct layout_bucket *bucket = &layout->buckets[0];

    assert_int_equal(layout->n_buckets, 1);
    assert_int_equal(layout->n_groups, 3);
    assert_int_equal(layout->n_chunks, 3);
    assert_int_equal(layout->trainable_elems, 125);
    assert_int_equal(layout->frozen_elems, 7);
    assert_int_equal(layout->padded_elems, 256);
    assert_int_equal(layout->arena_bytes, 1024);
    assert_int_equal(layout->largest_parcel_bytes, 1024);
    assert_int_equal(layout->weight_bytes, 4 * (256 + 63 * 64) + 14); /* room for the padding of 64 ranks */
    assert_int_equal(layout->range_bytes, 4 * page_bytes());

    assert_int_equal(bucket->n_elems, 256);
    assert_int_equal(bucket->used_elems, 125);
    assert_int_equal(layout_partition_elems(layout, 0), 128);
    assert_int_equal(layout->bucket_params[0], 3);
    assert_int_equal(layout->bucket_params[1], 1);
    assert_int_equal(layout->bucket_params[2], 0);
    check_chunk(layout, 0, (struct layout_chunk){.param = 3, .rank = 0, .start_elem = 0, .n_elems = 100});
    check_chunk(layout, 1, (struct layout_chunk){.param = 1, .rank = 1, .start_elem = 0, .n_elems = 15});
    check_chunk(layout, 2, (struct layout_chunk){.param = 0, .rank = 1, .start_elem = 0, .n_elems = 10});

    assert_int_equal(layout->params[1].n_elems, 15);
    assert_int_equal(layout->params[1].shape[1], 5);
    assert_int_equal(layout->params[1].offset_elems, 128);
    assert_int_equal(layout->params[1].weight_offset_bytes, 512);
    assert_int_equal(layout->params[1].range_offset_bytes, page_bytes());
    assert_int_equal(layout->params[2].weight_offset_bytes, 4 * bucket->room_elems);
    assert_int_equal(layout->params[3].range_offset_bytes, 3 * page_bytes());
    check_layout(layout);
    layout_free(layout);
}

/* 300 elements in a bucket of 384: 192 for each rank. */
static void test_straddle(void **state)
{
    const struct layout_decl decls[] = {DECL("w", 300)};
    struct layout *layout = make(decls, 1, 2, 100);

    assert_int_equal(layout->n_chunks, 2);
    assert_int_equal(layout->padded_elems, 384);
    check_chunk(layout, 0, (struct layout_chunk){.rank = 0, .start_elem = 0, .n_elems = 192});
    check_chunk(layout, 1, (struct layout_chunk){.rank = 1, .start_elem = 192, .n_elems = 108});
    check_layout(layout);
    layout_free(layout);
}

/* Chunks are counted from the parameter's start, not from the bucket's. 200,000 = 3 x 65,536 + 3,392. */
static void test_chunk_size(void **state)
{
    const struct layout_decl decls[] = {DECL("w", 200000), DECL("v", 10)};
    struct layout *layout = make(decls, 2, 1, 1000000);

    assert_int_equal(layout->params[0].offset_elems, 64);
    assert_int_equal(layout->n_chunks, 5);
    check_chunk(layout, 0, (struct layout_chunk){.param = 1, .n_elems = 10});
    check_chunk(layout, 1, (struct layout_chunk){.start_elem = 0, .n_elems = 65536});
    check_chunk(layout, 2, (struct layout_chunk){.start_elem = 65536, .n_elems = 65536});
    check_chunk(layout, 3, (struct layout_chunk){.start_elem = 131072, .n_elems = 65536});
    check_chunk(layout, 4, (struct layout_chunk){.start_elem = 196608, .n_elems = 3392});
    check_layout(layout);
    layout_free(layout);
}

/*
 * Each bucket of Muon is one matrix and has one owner: ranks 0, 2, 1, 3 in turn. Rank 0 owns the large matrix and no
 * other.
 */
static void test_owners(void **state)
{
    static const uint32_t owners[] = {0, 2, 1, LAYOUT_NO_OWNER, 3, 2, 1, 3};
    static const uint64_t small[] = {10, 20}, large[] = {40, 20};
    const char *names = "hgfedcba";
    struct layout_decl decls[8];
    struct layout *layout;

    for (uint32_t b = 0; b < 8; b++) /* buckets are numbered from the last parameter on */
        decls[7 - b] = (struct layout_decl){
            .name = names + b,
            .name_len = 1,
            .trainable = true,
            .muon = owners[b] != LAYOUT_NO_OWNER,
            .n_dims = 2,
            .shape = b == 0 ? large : small,
        };
    layout = make(decls, 8, 4, 200);
    assert_int_equal(layout->n_buckets, 8);
    for (uint32_t b = 0; b < 8; b++)
        assert_int_equal(layout->buckets[b].owner, owners[b]);
    check_layout(layout);
    layout_free(layout);
}

/* One bucket for each (group, gradient dtype, weight dtype). They are numbered in reverse order of declaration. */
static void test_kinds(void **state)
{
    const struct layout_decl decls[] = {
        DECL("p0", 8),
        DECL("p1", 8, .group = 1),
        DECL("p2", 8, .grad_dtype = DTYPE_BF16),
        DECL("p3", 8, .dtype = DTYPE_F16),
        DECL("p4", 8),
        DECL("p5", 8, .dtype = DTYPE_BF16, .grad_dtype = DTYPE_BF16),
        DECL("p6", 8, .grad_dtype = DTYPE_BF16),
    };
    struct layout *layout = make(decls, 7, 4, 1000);

    /* p6 opens 0, p5 opens 1, p4 opens 2, p3 opens 3, p2 joins p6, p1 opens 4, p0 joins p4. */
    assert_int_equal(layout->n_buckets, 5);
    assert_int_equal(layout->params[6].bucket, 0);
    assert_int_equal(layout->params[5].bucket, 1);
    assert_int_equal(layout->params[4].bucket, 2);
    assert_int_equal(layout->params[3].bucket, 3);
    assert_int_equal(layout->params[2].bucket, 0);
    assert_int_equal(layout->params[1].bucket, 4);
    assert_int_equal(layout->params[0].bucket, 2);

    /*
     * Each bucket has 256 elements. Gradients have 2, 2, 4, 4, 4 bytes; weights have 4, 2, 4, 2, 4 bytes and begin at
     * multiples of 4096. Each bucket uses 128, 64, 128, 64, 64 elements, and has room for 63 x 64 more.
     */
    assert_int_equal(layout->buckets[1].arena_offset_bytes, 512);
    assert_int_equal(layout->buckets[2].arena_offset_bytes, 1024);
    assert_int_equal(layout->buckets[4].arena_offset_bytes, 3072);
    assert_int_equal(layout->arena_bytes, 4096);
    assert_int_equal(layout->buckets[4].weight_offset_bytes, (5 + 2 + 5 + 2) * 4096);
    assert_int_equal(layout->weight_bytes, (14 + 4) * 4096);
    check_layout(layout);
    layout_free(layout);
}

/*
 * A bucket is filled exactly up to the limit. A parameter that is larger has its own bucket, also between small ones.
 */
static void test_bucket_limit(void **state)
{
    const struct layout_decl exact[] = {DECL("a", 1), DECL("b", 64), DECL("c", 64)};
    const struct layout_decl large[] = {DECL("a", 10), DECL("b", 129), DECL("c", 10)};
    const struct layout_decl gap[] = {DECL("a", 65), DECL("b", 63)};
    struct layout *layout;

    layout = make(exact, 3, 1, 128);
    assert_int_equal(layout->n_buckets, 2);
    assert_int_equal(layout->params[1].bucket, 0);
    assert_int_equal(layout->params[1].offset_elems, 64);
    assert_int_equal(layout->params[0].bucket, 1);
    layout_free(layout);

    layout = make(large, 3, 1, 128);
    assert_int_equal(layout->n_buckets, 3);
    assert_int_equal(layout->params[2].bucket, 0);
    assert_int_equal(layout->params[1].bucket, 1);
    assert_int_equal(layout->params[0].bucket, 2);
    assert_int_equal(layout->buckets[1].n_elems, 192);
    layout_free(layout);

    /* 63 + 65 elements are 128, but the second parameter must start at a multiple of 64. */
    layout = make(gap, 2, 1, 128);
    assert_int_equal(layout->n_buckets, 2);
    layout_free(layout);
    layout = make(gap, 2, 1, 129);
    assert_int_equal(layout->n_buckets, 1);
    layout_free(layout);
}

static void test_tiny(void **state)
{
    const struct layout_decl decls[] = {
        DECL("empty", 0),
        {.name = "scalar", .name_len = 6, .trainable = true, .n_dims = 0},
        FROZEN("frozen empty", 0),
    };
    struct layout *layout = make(decls, 3, 8, 1);

    assert_int_equal(layout->n_buckets, 2); /* one element fills a bucket */
    assert_int_equal(layout->params[1].n_elems, 1);
    assert_int_equal(layout->n_chunks, 1);
    check_layout(layout);
    layout_free(layout);

    layout = make(decls, 1, 8, 1000);
    assert_int_equal(layout->n_buckets, 1);
    assert_int_equal(layout->params[0].bucket, 0);
    assert_int_equal(layout->params[0].n_chunks, 0);
    assert_int_equal(layout->buckets[0].n_elems, 0);
    assert_int_equal(layout->arena_bytes, 0);
    layout_free(layout);

    layout = make(&decls[2], 1, 8, 1000);
    assert_int_equal(layout->n_buckets, 0);
    assert_int_equal(layout->weight_bytes, 0);
    check_layout(layout);
    layout_free(layout);
}

/* ---- limits and refusals ------------------------------------------------------------------------------- */

static void test_duplicate_names(void **state)
{
    const struct layout_decl decls[] = {
        DECL("w", 3), DECL("w2", 3), DECL("", 3), DECL("w\0a", 3), DECL("w\0b", 3), DECL("w2", 9), DECL("", 1),
    };

    check_refused(decls, 6, LAYOUT_E_DUPLICATE_NAME, 5);
    check_refused(&decls[2], 5, LAYOUT_E_DUPLICATE_NAME, 4);
    layout_free(make(decls, 5, 2, 1000));
}

static void test_too_large(void **state)
{
    static const uint64_t product[] = {UINT64_C(1) << 32, UINT64_C(1) << 32};
    static const uint64_t nothing[] = {UINT64_C(1) << 40, UINT64_C(1) << 40, 0};
    static const uint64_t nothing_first[] = {0, UINT64_C(1) << 40, UINT64_C(1) << 40};
    static const uint64_t many[LAYOUT_MAX_DIMS + 1] = {1};
    struct layout_decl decls[] = {DECL("a", 3), DECL("b", UINT64_C(1) << 62)};

    check_refused(decls, 0, LAYOUT_E_EMPTY, 0);
    check_refused(decls, 2, LAYOUT_E_TOO_LARGE, 1);
    decls[1].trainable = false;
    check_refused(decls, 2, LAYOUT_E_TOO_LARGE, 1);
    decls[1].shape = product;
    decls[1].n_dims = 2;
    check_refused(decls, 2, LAYOUT_E_TOO_LARGE, 1);
    decls[1].shape = many;
    decls[1].n_dims = LAYOUT_MAX_DIMS + 1;
    check_refused(decls, 2, LAYOUT_E_TOO_LARGE, 1);
    decls[1].n_dims = 1;
    decls[1].group = 1 << 16;
    check_refused(decls, 2, LAYOUT_E_TOO_LARGE, 1);
    decls[1].group = (1 << 16) - 1;
    decls[1].shape = nothing;
    decls[1].n_dims = 3;
    layout_free(make(decls, 2, 2, 1000));
    decls[1].shape = nothing_first;
    layout_free(make(decls, 2, 2, 1000));
    decls[1].shape = many;
    decls[1].n_dims = LAYOUT_MAX_DIMS;
    layout_free(make(decls, 2, 2, 1000));
}

/* Three fit, the fourth is too much. Frozen parameters have no chunks, so only the limit of bytes counts. */
static void test_total_too_large(void **state)
{
    const struct layout_decl decls[] = {
        FROZEN("a", UINT64_C(1) << 58),
        FROZEN("b", UINT64_C(1) << 58),
        FROZEN("c", UINT64_C(1) << 58),
        FROZEN("d", UINT64_C(1) << 58),
    };
    struct layout *layout = make(decls, 3, 2, 1000);

    assert_true(layout->weight_bytes == (UINT64_C(3) << 60));
    layout_free(layout);
    check_refused(decls, 4, LAYOUT_E_TOO_LARGE, 3);
}

/* A declaration must not make the daemon allocate a table of gigabytes. */
static void test_too_many_chunks(void **state)
{
    const struct layout_decl decls[] = {DECL("a", 3), DECL("b", UINT64_C(1) << 50), DECL("c", 3)};

    check_refused(decls, 3, LAYOUT_E_TOO_LARGE, 1);
}

static void test_huge_world(void **state)
{
    const struct layout_decl decls[] = {DECL("a", 1000), DECL("b", 3)};
    struct layout *layout = make(decls, 2, UINT32_MAX, UINT64_MAX);

    assert_int_equal(layout->padded_elems, UINT64_C(64) * UINT32_MAX);
    assert_int_equal(layout->n_chunks, 17); /* at most 64 elements each, on different ranks */
    assert_int_equal(layout->chunks[16].rank, 16);
    check_layout(layout);
    layout_free(layout);
}

/* With this many names, quadratic work would take hours. */
static void test_many(void **state)
{
    enum { N = 300000 };
    struct layout_decl *decls = calloc(N, sizeof(*decls));
    char(*names)[24] = calloc(N, sizeof(*names));
    static const uint64_t shape[] = {100};
    struct layout *layout;

    assert_non_null(decls);
    assert_non_null(names);
    for (uint32_t i = 0; i < N; i++) {
        snprintf(names[i], sizeof(names[i]), "layers.%u.weight", i);
        decls[i] = (struct layout_decl){
            .name = names[i],
            .name_len = strlen(names[i]),
            .trainable = true,
            .n_dims = 1,
            .shape = shape,
            .group = i % 1000,
        };
    }
    layout = make(decls, N, 4, 1280);
    assert_int_equal(layout->n_buckets, N / 10); /* ten parameters of 128 fill 1280, all of one group */
    /* Partitions have 320 elements. The borders 320 and 960 divide a parameter; 640 lies between two parameters. */
    assert_int_equal(layout->n_chunks, N + N / 10 * 2);
    layout_free(layout);
    free(names);
    free(decls);
}

/* ---- digest, names ------------------------------------------------------------------------------------- */

static uint64_t digest_of(const struct layout_decl *decls, uint32_t n)
{
    return manifest_digest(&(struct manifest){.decls = (struct layout_decl *)decls, .n = n});
}

static void test_digest(void **state)
{
    static const uint64_t three_four[] = {3, 4, 1}, four_three[] = {4, 3}, twelve_one[] = {12, 1};
    static const uint64_t three_five[] = {3, 5}, two_four[] = {2, 4};
    const struct layout_decl base[] = {
        {.name = "ab", .name_len = 2, .trainable = true, .n_dims = 2, .shape = three_four},
        DECL("c", 5),
    };
    struct layout_decl other[2];
    uint64_t digests[13];
    size_t n = 0;

#define VARIANT(change)                                                                                                \
    do {                                                                                                               \
        memcpy(other, base, sizeof(base));                                                                             \
        change;                                                                                                        \
        digests[n++] = digest_of(other, 2);                                                                            \
    } while (0)

    VARIANT((void)0);
    assert_int_equal(digests[0], digest_of(base, 2));
    VARIANT((other[0].name_len = 1, other[1].name = "bc", other[1].name_len = 2));
    VARIANT(other[0].name = "aB");
    VARIANT(other[0].shape = four_three);
    VARIANT(other[0].shape = twelve_one);
    VARIANT(other[0].shape = three_five);
    VARIANT(other[0].shape = two_four);
    VARIANT(other[0].n_dims = 3);
    VARIANT(other[0].dtype = DTYPE_BF16);
    VARIANT(other[0].grad_dtype = DTYPE_BF16);
    VARIANT(other[1].group = 1);
    VARIANT(other[1].trainable = false);
    VARIANT((other[0] = base[1], other[1] = base[0]));
#undef VARIANT

    assert_int_equal(n, ARRAY_SIZE(digests));
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < i; k++)
            assert_true(digests[i] != digests[k]);
    assert_true(digest_of(base, 1) != digests[0]);
}

static void check_print(size_t size, const char *name, size_t len, const char *expected)
{
    char text[64];

    memset(text, '#', sizeof(text));
    layout_print_name(text, size, name, len);
    assert_string_equal(text, expected);
    for (size_t i = size; i < sizeof(text); i++)
        assert_int_equal(text[i], '#');
}

static void test_print_name(void **state)
{
    char nothing = '#';

    check_print(64, "layers.3.mlp.w1", 15, "layers.3.mlp.w1");
    check_print(64, "a b~\x7f\n\0\xc3\xa9", 9, "a b~\\x7f\\x0a\\x00\\xc3\\xa9");
    check_print(64, "", 0, "");
    check_print(7, "abcdef", 6, "abcdef");
    check_print(6, "abcdef", 6, "ab...");
    check_print(4, "abcdef", 6, "...");
    check_print(3, "abcdef", 6, "..");
    check_print(2, "abcdef", 6, ".");
    check_print(1, "abcdef", 6, "");
    check_print(1, "", 0, "");
    check_print(9, "\n\n", 2, "\\x0a\\x0a");
    check_print(8, "\n\n", 2, "\\x0a...");
    check_print(7, "\n\n", 2, "..."); /* no half escape */
    layout_print_name(&nothing, 0, "abc", 3);
    assert_int_equal(nothing, '#');
}

static void test_names_are_copied(void **state)
{
    char name[] = "w\0\xff";
    uint64_t shape[] = {4};
    struct layout_decl decl = {
        .name = name,
        .name_len = 3,
        .trainable = true,
        .n_dims = 1,
        .shape = shape,
        .grad_dtype = DTYPE_F16,
    };
    struct layout *layout = make(&decl, 1, 1, 10);

    memset(name, 'x', sizeof(name));
    shape[0] = 9;
    assert_int_equal(layout->params[0].name_len, 3);
    assert_memory_equal(layout->params[0].name, "w\0\xff", 4);
    assert_int_equal(layout->params[0].shape[0], 4);
    assert_int_equal(layout->params[0].grad_dtype, DTYPE_F16);
    layout_free(layout);
    layout_free(NULL);
}

TEST_GROUP(layout)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_bucket),
        cmocka_unit_test(test_straddle),
        cmocka_unit_test(test_chunk_size),
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_owners),
        cmocka_unit_test(test_bucket_limit),
        cmocka_unit_test(test_tiny),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_duplicate_names),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_total_too_large),
        cmocka_unit_test(test_too_many_chunks),
        cmocka_unit_test(test_huge_world),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_digest),
        cmocka_unit_test(test_print_name),
        cmocka_unit_test(test_names_are_copied),
    };

    return cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
