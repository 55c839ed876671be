/* SPDX-License-Identifier: Apache-2.0 */

/* Assigns parameters to buckets, buckets to partitions, and both to parcels, parts and chunks. */

#include "core/layout/layout.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include <xxhash.h>

#include "core/base/base.h"

#define MAX_TOTAL_BYTES (UINT64_C(1) << 62)

enum {
    WEIGHT_BUCKET_ALIGN_BYTES = 4096,
    WEIGHT_FROZEN_ALIGN_BYTES = 64,
    MAX_PADDING_ELEMS = LAYOUT_ALIGN_ELEMS * (LAYOUT_ROOM_RANKS - 1),
    /*
     * Picked, not measured: limits the memory that a declaration alone can make the daemon allocate. 2^26 chunks are
     * 1.5 GiB of tables, and have 4 Ti elements if no chunk is shorter.
     */
    MAX_CHUNKS = 1 << 26,
    MAX_GROUPS = 1 << 16,
    N_KEYS = 2 * N_DTYPES * N_DTYPES, /* kinds of bucket in a group */
};

/* Working memory of layout_new(). */
struct builder {
    struct layout *layout;
    const struct layout_decl *decls;
    uint32_t *open;   /* for each group and key: the bucket that is being filled, or LAYOUT_NO_BUCKET */
    uint64_t n_bytes; /* upper bound of all bytes so far, see charge_param() */
    uint32_t *bad;
};

static uint64_t page_bytes(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint64_t align_up(uint64_t n, uint64_t align)
{
    return (n + align - 1) / align * align;
}

/* ---- copying the declarations -------------------------------------------------------------------------- */

/* Counts the elements. A shape with a dimension of 0 is empty. Return: false if the product overflows. */
static bool count_elems(const struct layout_decl *decl, uint64_t *n_elems)
{
    for (uint32_t i = 0; i < decl->n_dims; i++) {
        if (decl->shape[i] == 0) {
            *n_elems = 0;
            return true;
        }
    }
    *n_elems = 1;
    for (uint32_t i = 0; i < decl->n_dims; i++)
        if (__builtin_mul_overflow(*n_elems, decl->shape[i], n_elems))
            return false;
    return true;
}

/*
 * Adds the most bytes that a parameter can have in any of the segments: fp32, with the padding of a bucket and a page.
 * Return: false above the limit. Later sums of sizes cannot overflow below the limit, so they are not checked.
 */
static bool charge_param(struct builder *builder, uint64_t n_elems)
{
    uint64_t bucket_align =
        (uint64_t)LAYOUT_ALIGN_ELEMS * MAX(builder->layout->world_size, (unsigned)LAYOUT_ROOM_RANKS);
    uint64_t n;

    if (__builtin_add_overflow(n_elems, LAYOUT_ALIGN_ELEMS + bucket_align, &n) ||
        __builtin_mul_overflow(n, sizeof(float), &n) ||
        __builtin_add_overflow(n, page_bytes() + WEIGHT_BUCKET_ALIGN_BYTES, &n) ||
        __builtin_add_overflow(builder->n_bytes, n, &builder->n_bytes))
        return false;
    return builder->n_bytes <= MAX_TOTAL_BYTES;
}

static int copy_param(struct builder *builder, uint32_t id)
{
    struct layout *layout = builder->layout;
    const struct layout_decl *decl = &builder->decls[id];
    struct layout_param *param = &layout->params[id];

    assert(decl->dtype < N_DTYPES && decl->grad_dtype < N_DTYPES);

    *builder->bad = id;
    if (decl->n_dims > LAYOUT_MAX_DIMS || decl->group >= MAX_GROUPS || !count_elems(decl, &param->n_elems) ||
        !charge_param(builder, param->n_elems))
        return LAYOUT_E_TOO_LARGE;

    param->name = malloc(decl->name_len + 1);
    if (!param->name)
        return -ENOMEM;
    if (decl->name_len)
        memcpy(param->name, decl->name, decl->name_len);
    param->name[decl->name_len] = '\0';
    param->name_len = decl->name_len;
    if (decl->n_dims)
        memcpy(param->shape, decl->shape, decl->n_dims * sizeof(*decl->shape));
    param->n_dims = decl->n_dims;
    param->dtype = decl->dtype;
    param->grad_dtype = decl->grad_dtype;
    param->group = decl->group;
    param->trainable = decl->trainable;
    param->muon = decl->muon;
    param->bucket = LAYOUT_NO_BUCKET;

    layout->n_groups = MAX(layout->n_groups, decl->group + 1);
    if (decl->trainable)
        layout->trainable_elems += param->n_elems;
    else
        layout->frozen_elems += param->n_elems;
    return 0;
}

static bool same_name(const struct layout_param *a, const struct layout_param *b)
{
    return a->name_len == b->name_len && !memcmp(a->name, b->name, a->name_len);
}

/* Checks that each name occurs once. Uses an open-addressed set of parameter ids + 1, at most half full. */
static int check_param_names(struct builder *builder)
{
    const struct layout *layout = builder->layout;
    size_t n_slots = 2;
    _cleanup_free_ uint32_t *slots = NULL;

    while (n_slots < 2 * (size_t)layout->n_params)
        n_slots *= 2;
    slots = calloc(n_slots, sizeof(*slots));
    if (!slots)
        return -ENOMEM;

    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];
        size_t at = XXH3_64bits(param->name, param->name_len) & (n_slots - 1);

        for (; slots[at]; at = (at + 1) & (n_slots - 1)) {
            if (same_name(param, &layout->params[slots[at] - 1])) {
                *builder->bad = p;
                return LAYOUT_E_DUPLICATE_NAME;
            }
        }
        slots[at] = p + 1;
    }
    return 0;
}

static int copy_params(struct builder *builder, uint32_t n_params)
{
    struct layout *layout = builder->layout;
    int r;

    layout->params = calloc(n_params, sizeof(*layout->params));
    if (!layout->params)
        return -ENOMEM;
    layout->n_params = n_params;

    for (uint32_t p = 0; p < n_params; p++) {
        r = copy_param(builder, p);
        if (r != 0)
            return r;
    }
    return check_param_names(builder);
}

/* ---- buckets ------------------------------------------------------------------------------------------- */

static uint32_t *open_bucket(const struct builder *builder, const struct layout_param *param)
{
    unsigned key = (param->muon * (unsigned)N_DTYPES + param->grad_dtype) * N_DTYPES + param->dtype;

    assert(param->group < builder->layout->n_groups);
    assert(key < N_KEYS);
    return &builder->open[param->group * N_KEYS + key];
}

/* Places a parameter in a bucket. Until close_buckets(), a bucket's n_elems is the end of its last parameter. */
static void place_param(struct builder *builder, uint32_t id)
{
    struct layout *layout = builder->layout;
    struct layout_param *param = &layout->params[id];
    uint32_t *open = open_bucket(builder, param);
    struct layout_bucket *bucket = NULL;
    uint64_t offset = 0;

    if (*open != LAYOUT_NO_BUCKET) {
        bucket = &layout->buckets[*open];
        assert(bucket->group == param->group);
        assert(bucket->dtype == param->dtype);
        assert(bucket->grad_dtype == param->grad_dtype);
        offset = align_up(bucket->n_elems, LAYOUT_ALIGN_ELEMS);
    }
    if (!bucket || offset + param->n_elems > layout->bucket_elems) {
        assert(layout->n_buckets < layout->n_params); /* the array has n_params buckets */
        *open = layout->n_buckets++;
        offset = 0;
        bucket = &layout->buckets[*open];
        *bucket = (struct layout_bucket){
            .group = param->group,
            .grad_dtype = param->grad_dtype,
            .dtype = param->dtype,
            .owner = param->muon ? 0 : LAYOUT_NO_OWNER, /* find_owners() sets the owner */
        };
    }

    param->bucket = *open;
    param->index_in_bucket = bucket->n_params++;
    param->offset_elems = offset;
    bucket->n_elems = offset + param->n_elems;
    bucket->used_elems += param->n_elems;
}

/* Sets the buckets' lengths, their places in the arena, and their lists of parameters. */
static void close_buckets(struct layout *layout)
{
    uint64_t align = (uint64_t)LAYOUT_ALIGN_ELEMS * layout->world_size;
    uint32_t first_param = 0;

    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        struct layout_bucket *bucket = &layout->buckets[b];

        bucket->room_elems = align_up(bucket->n_elems, LAYOUT_ALIGN_ELEMS) + MAX_PADDING_ELEMS;
        bucket->n_elems = align_up(bucket->n_elems, align);
        bucket->room_elems = MAX(bucket->room_elems, bucket->n_elems);
        assert(bucket->n_params > 0);
        assert(bucket->used_elems <= bucket->n_elems);
        bucket->arena_offset_bytes = layout->arena_bytes;
        bucket->first_param = first_param;

        layout->padded_elems += bucket->n_elems;
        layout->arena_bytes += bucket->n_elems * dtype_size(bucket->grad_dtype);
        first_param += bucket->n_params;
    }
    assert(first_param <= layout->n_params);
    assert(layout->padded_elems >= layout->trainable_elems);

    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];

        assert(param->trainable == (param->bucket != LAYOUT_NO_BUCKET));
        if (param->trainable)
            layout->bucket_params[layout->buckets[param->bucket].first_param + param->index_in_bucket] = p;
    }
}

static uint32_t reverse_bits(uint32_t x, unsigned n_bits)
{
    uint32_t reversed = 0;

    for (unsigned i = 0; i < n_bits; i++)
        reversed |= (x >> i & 1) << (n_bits - 1 - i);
    return reversed;
}

/* Return: the rank with the fewest operations. Equal ranks are tried in the order 0, 4, 2, 6, 1 and so on, because
 * neighbours are ranks of one node. */
static uint32_t find_least(const double *operations, unsigned n_ranks)
{
    unsigned n_bits = 0;
    uint32_t least = 0;

    while (1u << n_bits < n_ranks)
        n_bits++;
    for (uint32_t i = 0; i < 1u << n_bits; i++) {
        uint32_t rank = reverse_bits(i, n_bits);

        if (rank < n_ranks && operations[rank] < operations[least])
            least = rank;
    }
    return least;
}

/* Return: a number proportional to Muon's operations: each matrix's elements times its shorter side (muon_flops()). */
static double count_operations(const struct layout *layout, const struct layout_bucket *bucket)
{
    double n = 0;

    for (uint32_t i = 0; i < bucket->n_params; i++) {
        const struct layout_param *param = &layout->params[layout->bucket_params[bucket->first_param + i]];

        assert(param->n_dims == 2); /* a matrix */
        n += (double)param->n_elems * (double)MIN(param->shape[0], param->shape[1]);
    }
    return n;
}

static int find_owners(struct layout *layout)
{
    _cleanup_free_ double *operations = NULL; /* Muon operations of each rank */

    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        struct layout_bucket *bucket = &layout->buckets[b];

        if (!layout_is_muon(layout, b))
            continue;
        if (!operations)
            operations = calloc(layout->world_size, sizeof(*operations));
        if (!operations)
            return -ENOMEM;
        bucket->owner = find_least(operations, layout->world_size);
        assert(bucket->owner < layout->world_size);
        operations[bucket->owner] += count_operations(layout, bucket);
    }
    return 0;
}

static int make_buckets(struct builder *builder)
{
    struct layout *layout = builder->layout;
    size_t n_open = (size_t)layout->n_groups * N_KEYS;
    struct layout_bucket *shrunk;

    /* There are at most as many buckets as parameters. */
    layout->buckets = calloc(layout->n_params, sizeof(*layout->buckets));
    layout->bucket_params = calloc(layout->n_params, sizeof(*layout->bucket_params));
    builder->open = malloc(n_open * sizeof(*builder->open));
    if (!layout->buckets || !layout->bucket_params || !builder->open)
        return -ENOMEM;

    for (size_t i = 0; i < n_open; i++)
        builder->open[i] = LAYOUT_NO_BUCKET;
    for (uint32_t p = layout->n_params; p-- > 0;)
        if (layout->params[p].trainable)
            place_param(builder, p);
    shrunk = reallocarray(layout->buckets, MAX(layout->n_buckets, 1u), sizeof(*shrunk));
    if (!shrunk)
        return -ENOMEM;
    layout->buckets = shrunk;
    close_buckets(layout);
    return find_owners(layout);
}

/* ---- bytes of the weight segment and the range --------------------------------------------------------- */

static void place_weights(struct layout *layout)
{
    uint64_t end = 0;

    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        struct layout_bucket *bucket = &layout->buckets[b];

        bucket->weight_offset_bytes = align_up(end, WEIGHT_BUCKET_ALIGN_BYTES);
        end = bucket->weight_offset_bytes + bucket->room_elems * dtype_size(bucket->dtype);
    }
    for (uint32_t p = 0; p < layout->n_params; p++) {
        struct layout_param *param = &layout->params[p];

        if (param->trainable) {
            assert(param->offset_elems + param->n_elems <= layout->buckets[param->bucket].room_elems);
            param->weight_offset_bytes =
                layout->buckets[param->bucket].weight_offset_bytes + param->offset_elems * dtype_size(param->dtype);
        } else {
            param->weight_offset_bytes = align_up(end, WEIGHT_FROZEN_ALIGN_BYTES);
            end = param->weight_offset_bytes + param->n_elems * dtype_size(param->dtype);
        }
    }
    layout->weight_bytes = end;
}

static void place_range(struct layout *layout)
{
    for (uint32_t p = 0; p < layout->n_params; p++) {
        struct layout_param *param = &layout->params[p];

        param->range_offset_bytes = layout->range_bytes;
        layout->range_bytes += align_up(param->n_elems * dtype_size(param->dtype), page_bytes());
    }
}

/* ---- chunks -------------------------------------------------------------------------------------------- */

/* Return: the chunk of the parameter that starts at start_elem < n_elems. */
static struct layout_chunk cut_chunk(const struct layout *layout, uint32_t id, uint64_t start_elem)
{
    const struct layout_param *param = &layout->params[id];
    uint64_t end;
    uint32_t rank = layout_owner(layout, param->bucket, param->offset_elems + start_elem, &end);

    assert(rank < layout->world_size);
    assert(start_elem % LAYOUT_ALIGN_ELEMS == 0);
    assert(end > param->offset_elems + start_elem);
    end = MIN(param->n_elems, end - param->offset_elems);
    return (struct layout_chunk){
        .param = id,
        .rank = rank,
        .start_elem = start_elem,
        .n_elems = (uint32_t)MIN(end - start_elem, (uint64_t)CHUNK_ELEMS),
    };
}

static int count_chunks(struct builder *builder)
{
    struct layout *layout = builder->layout;

    for (uint32_t i = 0; i < layout->n_buckets; i++) {
        struct layout_bucket *bucket = &layout->buckets[i];

        bucket->first_chunk = layout->n_chunks;
        for (uint32_t k = 0; k < bucket->n_params; k++) {
            uint32_t id = layout->bucket_params[bucket->first_param + k];
            struct layout_param *param = &layout->params[id];

            param->first_chunk = layout->n_chunks;
            for (uint64_t at = 0; at < param->n_elems; at += cut_chunk(layout, id, at).n_elems) {
                if (layout->n_chunks == MAX_CHUNKS) {
                    *builder->bad = id;
                    return LAYOUT_E_TOO_LARGE;
                }
                layout->n_chunks++;
            }
            param->n_chunks = layout->n_chunks - param->first_chunk;
        }
        bucket->n_chunks = layout->n_chunks - bucket->first_chunk;
    }
    return 0;
}

static int make_chunks(struct builder *builder)
{
    struct layout *layout = builder->layout;
    int r;

    r = count_chunks(builder);
    if (r != 0)
        return r;
    layout->chunks = calloc(MAX(layout->n_chunks, 1u), sizeof(*layout->chunks));
    if (!layout->chunks)
        return -ENOMEM;

    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];
        uint64_t at = 0;

        for (uint32_t c = param->first_chunk; c < param->first_chunk + param->n_chunks; c++) {
            layout->chunks[c] = cut_chunk(layout, p, at);
            at += layout->chunks[c].n_elems;
        }
        assert(at == (param->trainable ? param->n_elems : 0)); /* each element is in exactly one chunk */
    }
    return 0;
}

/* ---- parcels ------------------------------------------------------------------------------------------- */

/* Return: the parcel of the bucket that begins with first_chunk, without its parts. */
static struct layout_parcel cut_parcel(const struct layout *layout, uint32_t b, uint32_t first_chunk)
{
    const struct layout_bucket *bucket = &layout->buckets[b];
    uint32_t end = bucket->first_chunk + bucket->n_chunks, c = first_chunk;
    struct layout_parcel parcel = {.bucket = b, .first_chunk = first_chunk};

    /* Only a bucket of one large parameter has more than one parcel, and that parameter begins with the bucket. */
    assert(first_chunk == bucket->first_chunk || bucket->n_params == 1);
    if (first_chunk > bucket->first_chunk)
        parcel.offset_elems = layout->chunks[first_chunk].start_elem;
    if (bucket->n_params > 1)
        c = end;
    while (c < end && (c == first_chunk || parcel.n_elems + layout->chunks[c].n_elems <= layout->bucket_elems))
        parcel.n_elems += layout->chunks[c++].n_elems;
    if (c == end)
        parcel.n_elems = bucket->n_elems - parcel.offset_elems;
    parcel.n_chunks = c - first_chunk;
    return parcel;
}

/* Adds the part of parameter id that is in the parcel. */
static void add_part(struct layout *layout, struct layout_parcel *parcel, uint32_t id)
{
    struct layout_param *param = &layout->params[id];
    uint32_t first = MAX(param->first_chunk, parcel->first_chunk);
    uint32_t end = MIN(param->first_chunk + param->n_chunks, parcel->first_chunk + parcel->n_chunks);
    struct layout_part part = {
        .param = id,
        .parcel = (uint32_t)(parcel - layout->parcels),
        .first_chunk = first,
        .n_chunks = end - first,
    };

    assert(first <= end);
    if (part.n_chunks > 0)
        part.start_elem = layout->chunks[first].start_elem;
    for (uint32_t c = first; c < end; c++) {
        layout->chunks[c].part = layout->n_parts;
        part.n_elems += layout->chunks[c].n_elems;
    }
    assert(part.n_elems <= parcel->n_elems);
    if (param->n_parts++ == 0) {
        param->first_part = layout->n_parts;
        param->first_parcel = part.parcel;
    }
    parcel->n_parts++;
    layout->parts[layout->n_parts++] = part;
}

static void make_parcel(struct layout *layout, const struct layout_parcel *cut)
{
    const struct layout_bucket *bucket = &layout->buckets[cut->bucket];
    struct layout_parcel *parcel = &layout->parcels[layout->n_parcels++];

    *parcel = *cut;
    parcel->first_part = layout->n_parts;
    for (uint32_t i = 0; i < bucket->n_params; i++)
        add_part(layout, parcel, layout->bucket_params[bucket->first_param + i]);
    layout->largest_parcel_bytes = MAX(layout->largest_parcel_bytes, parcel->n_elems * dtype_size(bucket->grad_dtype));
}

/* Makes all parcels of a bucket, or only counts them while layout->parcels is NULL. Return: their number. */
static uint32_t cut_bucket(struct layout *layout, uint32_t b)
{
    const struct layout_bucket *bucket = &layout->buckets[b];
    uint32_t end = bucket->first_chunk + bucket->n_chunks, at = bucket->first_chunk, n = 0;

    do {
        struct layout_parcel parcel = cut_parcel(layout, b, at);

        if (layout->parcels)
            make_parcel(layout, &parcel);
        at += parcel.n_chunks;
        n++;
    } while (at < end);
    assert(at == end);
    assert(!layout->parcels || n == bucket->n_parcels);
    return n;
}

static int make_parcels(struct layout *layout)
{
    uint32_t n_parcels = 0, n_parts = 0;

    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        struct layout_bucket *bucket = &layout->buckets[b];

        bucket->first_parcel = n_parcels;
        bucket->n_parcels = cut_bucket(layout, b);
        n_parcels += bucket->n_parcels;
        assert(bucket->n_parcels == 1 || bucket->n_params == 1);
        n_parts += MAX(bucket->n_parcels, bucket->n_params); /* n_parcels or n_params is 1 */
    }
    layout->parcels = calloc(MAX(n_parcels, 1u), sizeof(*layout->parcels));
    layout->parts = calloc(MAX(n_parts, 1u), sizeof(*layout->parts));
    if (!layout->parcels || !layout->parts)
        return -ENOMEM;
    for (uint32_t b = 0; b < layout->n_buckets; b++)
        cut_bucket(layout, b);
    assert(layout->n_parcels == n_parcels); /* the arrays have exactly this room */
    assert(layout->n_parts == n_parts);
    assert(layout->largest_parcel_bytes <= layout->arena_bytes);
    return 0;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

DEFINE_CLEANUP(struct layout *, layout_free);

int layout_new(struct layout **out, const struct layout_decl *decls, uint32_t n_params, unsigned world_size,
               uint64_t bucket_elems, uint32_t *bad)
{
    _cleanup_(layout_freep) struct layout *layout = NULL;
    struct builder builder = {.decls = decls, .bad = bad};
    int r;

    assert(world_size > 0 && bucket_elems > 0);

    *bad = 0;
    if (n_params == 0)
        return LAYOUT_E_EMPTY;
    layout = calloc(1, sizeof(*layout));
    if (!layout)
        return -ENOMEM;
    layout->world_size = world_size;
    layout->bucket_elems = bucket_elems;
    builder.layout = layout;

    r = copy_params(&builder, n_params);
    if (r == 0)
        r = make_buckets(&builder);
    free(builder.open);
    if (r == 0) {
        place_weights(layout);
        place_range(layout);
        r = make_chunks(&builder);
    }
    if (r == 0)
        r = make_parcels(layout);
    if (r == 0)
        *out = steal_ptr(layout);
    return r;
}

struct layout_decl layout_declared(const struct layout_param *param)
{
    return (struct layout_decl){.name = param->name,
                                .name_len = param->name_len,
                                .dtype = param->dtype,
                                .grad_dtype = param->grad_dtype,
                                .group = param->group,
                                .trainable = param->trainable,
                                .muon = param->muon,
                                .n_dims = param->n_dims,
                                .shape = param->shape};
}

int layout_for_ranks(struct layout **out, const struct layout *layout, unsigned world_size)
{
    _cleanup_free_ struct layout_decl *decls = calloc(layout->n_params, sizeof(*decls));
    uint32_t bad;

    if (!decls)
        return -ENOMEM;
    for (uint32_t p = 0; p < layout->n_params; p++)
        decls[p] = layout_declared(&layout->params[p]);
    return layout_new(out, decls, layout->n_params, world_size, layout->bucket_elems, &bad);
}

void layout_free(struct layout *layout)
{
    if (!layout)
        return;
    for (uint32_t p = 0; p < layout->n_params; p++)
        free(layout->params[p].name);
    free(layout->params);
    free(layout->buckets);
    free(layout->bucket_params);
    free(layout->chunks);
    free(layout->parts);
    free(layout->parcels);
    free(layout);
}

/* ---- names --------------------------------------------------------------------------------------------- */

/* Prints a byte. Return: the printed length: 1, or 4 for an escape. */
static size_t print_byte(char dst[5], unsigned char byte)
{
    return (size_t)snprintf(dst, 5, byte >= 0x20 && byte < 0x7f ? "%c" : "\\x%02x", byte);
}

void layout_print_name(char *dst, size_t size, const char *name, size_t name_len)
{
    char piece[5];
    size_t n_needed = 0, n = 0, room;

    if (size == 0)
        return;
    for (size_t i = 0; i < name_len; i++)
        n_needed += print_byte(piece, (unsigned char)name[i]);

    /* A name that does not fit is cut after the last complete byte or escape that leaves room for the dots. */
    room = size - 1;
    if (n_needed > room)
        room -= MIN(room, (size_t)3);
    for (size_t i = 0; i < name_len; i++) {
        size_t len = print_byte(piece, (unsigned char)name[i]);

        if (n + len > room)
            break;
        memcpy(dst + n, piece, len);
        n += len;
    }
    dst[n] = '\0';
    if (n_needed > size - 1)
        strncat(dst, "...", size - 1 - n);
}
