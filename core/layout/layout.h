/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The layout assigns parameters to buckets, partitions and bytes. Pure. It is computed once when the job is formed, is
 * equal on every node, and stays constant.
 *
 * Bucket: trainable parameters of one (group, gradient dtype, weight dtype, updated by Muon or not), in reverse
 * declaration order, at most bucket_elems elements; a larger parameter has a bucket of its own. Buckets are numbered in
 * the order in which the layout begins them. Each parameter starts at a multiple of 64 elements of its bucket; a
 * bucket's length is a multiple of 64 x world size, its tail is padding. Memory for a whole bucket has room for the
 * padding of any world size up to LAYOUT_ROOM_RANKS, so that the world size of a job on one node can change without a
 * copy.
 * Partition (b, r): elements [r, r+1) x length / world size of bucket b. Muon needs whole matrices, so one rank, the
 * bucket's owner, has all of a bucket that Muon updates, and the other ranks have empty partitions of it. Each such
 * bucket is assigned to a rank that has the fewest Muon operations so far.
 *
 * Chunk: the unit of work: a piece of one parameter inside one partition, at most CHUNK_ELEMS elements, starting at a
 * multiple of 64 elements from the parameter's start.
 *
 * Parcel: the unit that is sent and reduced: usually a bucket. A bucket larger than bucket_elems (one large parameter)
 * is cut into parcels of whole chunks. A parcel has at most bucket_elems elements, or one chunk. Parcels are numbered
 * along the buckets.
 * Part: the unit of a push: a parameter's gradient, or as much of a large one as is in one parcel. Parts are numbered
 * along the parcels, so the parts of a parameter are consecutive.
 *
 * Segments of bytes that the layout describes:
 *  - arena of a rank: all buckets one after another in gradient dtype (arena_offset_bytes);
 *  - weights, stages 1 and 2: buckets with their room in weight dtype, each from a multiple of 4096 bytes, then frozen
 *    parameters in declaration order, each from a multiple of 64 bytes;
 *  - range, stage 3: every parameter in declaration order, each from a multiple of the page size.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/dtype.h"

enum {
    LAYOUT_ALIGN_ELEMS = 64,
    CHUNK_ELEMS = 64 * 1024, /* 256 KiB of fp32: half of the L2 cache of a Zen 3 core; measured, see bench */
    LAYOUT_MAX_DIMS = 16,
    LAYOUT_ROOM_RANKS = 64,
    LAYOUT_NO_BUCKET = UINT32_MAX,
    LAYOUT_NO_OWNER = UINT32_MAX,
};

struct layout_param {
    /* As declared. The layout owns name and shape. */
    char *name; /* any name_len bytes, and a NUL for convenience */
    size_t name_len;
    enum dtype dtype; /* type of the weights */
    enum dtype grad_dtype;
    uint32_t group;
    bool trainable;
    bool muon; /* a matrix that Muon updates */
    uint32_t n_dims;
    uint64_t shape[LAYOUT_MAX_DIMS];
    /* Computed. */
    uint64_t n_elems;
    uint32_t bucket; /* LAYOUT_NO_BUCKET if frozen */
    uint32_t index_in_bucket;
    uint32_t first_part, n_parts; /* no parts if frozen */
    uint32_t first_parcel;        /* of its first part; the later parts are in the next parcels */
    uint64_t offset_elems;        /* from the bucket's start */
    uint64_t weight_offset_bytes; /* from the beginning of the weight segment */
    uint64_t range_offset_bytes;  /* from the beginning of the range of stage 3 */
    uint32_t first_chunk, n_chunks;
};

struct layout_bucket {
    uint32_t group;
    enum dtype grad_dtype;
    enum dtype dtype;
    uint32_t owner;      /* for Muon: the rank that has the whole bucket; LAYOUT_NO_OWNER: each rank has a part */
    uint64_t n_elems;    /* with the padding */
    uint64_t room_elems; /* with room for the padding of up to LAYOUT_ROOM_RANKS ranks */
    uint64_t used_elems; /* sum of its parameters' n_elems */
    uint64_t arena_offset_bytes;
    uint64_t weight_offset_bytes;
    uint32_t first_param, n_params; /* into layout.bucket_params */
    uint32_t first_parcel, n_parcels;
    uint32_t first_chunk, n_chunks; /* chunks of a bucket are contiguous */
};

struct layout_chunk {
    uint32_t param, part;
    uint32_t rank; /* owner */
    uint32_t n_elems;
    uint64_t start_elem; /* from the parameter's start, multiple of 64 */
};

struct layout_part {
    uint32_t param, parcel;
    uint64_t start_elem; /* from the parameter's start, multiple of 64 */
    uint64_t n_elems;
    uint32_t first_chunk, n_chunks;
};

struct layout_parcel {
    uint32_t bucket;
    uint32_t zero;         /* always 0, instead of padding */
    uint64_t offset_elems; /* from the bucket's start, multiple of 64 */
    uint64_t n_elems;      /* all elements of a bucket, with its padding, are in its parcels */
    uint32_t first_part, n_parts;
    uint32_t first_chunk, n_chunks;
};

struct layout {
    unsigned world_size;
    uint64_t bucket_elems;
    uint32_t n_params, n_buckets, n_chunks, n_parts, n_parcels, n_groups;
    struct layout_param *params;
    struct layout_bucket *buckets;
    uint32_t *bucket_params; /* parameter ids, bucket after bucket */
    struct layout_chunk *chunks;
    struct layout_part *parts;
    struct layout_parcel *parcels;
    uint64_t trainable_elems, frozen_elems, padded_elems; /* padded: sum of all buckets' n_elems */
    uint64_t arena_bytes;                                 /* all buckets of one rank in gradient dtype */
    uint64_t largest_parcel_bytes;                        /* size of the largest parcel in gradient dtype */
    uint64_t weight_bytes;                                /* size of the weight segment */
    uint64_t range_bytes;                                 /* size of the range of stage 3 */
};

/* A parameter as declared. The struct owns nothing. */
struct layout_decl {
    const char *name;
    size_t name_len;
    enum dtype dtype, grad_dtype;
    uint32_t group;
    bool trainable;
    bool muon; /* Muon updates it: trainable, two dimensions */
    uint32_t n_dims;
    const uint64_t *shape;
};

/* Return: true if Muon can update the parameter: a trainable matrix whose sides BLAS can count in int. */
static inline bool layout_is_for_muon(const struct layout_decl *decl)
{
    return decl->trainable && decl->n_dims == 2 && decl->shape[0] <= INT32_MAX && decl->shape[1] <= INT32_MAX;
}

enum {
    LAYOUT_E_EMPTY = 1,      /* there is no parameter */
    LAYOUT_E_TOO_LARGE,      /* sizes exceed 2^62 bytes */
    LAYOUT_E_DUPLICATE_NAME, /* *bad has the same name as an earlier parameter */
};

/*
 * Makes a layout, and copies the declarations. bucket_elems > 0, world_size > 0. Return: 0, -ENOMEM, or LAYOUT_E_* with
 * the parameter's number in *bad.
 */
int layout_new(struct layout **out, const struct layout_decl *decls, uint32_t n_params, unsigned world_size,
               uint64_t bucket_elems, uint32_t *bad);
void layout_free(struct layout *layout);

/* Return: the parameter as it was declared. Name and shape belong to the layout. */
struct layout_decl layout_declared(const struct layout_param *param);

/* Makes the layout of the same parameters for another world size. Return: 0, -ENOMEM or LAYOUT_E_TOO_LARGE. */
int layout_for_ranks(struct layout **out, const struct layout *layout, unsigned world_size);

static inline bool layout_is_muon(const struct layout *layout, uint32_t bucket)
{
    return layout->buckets[bucket].owner != LAYOUT_NO_OWNER;
}

/* Return: the elements of each rank's partition of the bucket; if the bucket has an owner, of the owner's partition. */
static inline uint64_t layout_bucket_partition(const struct layout_bucket *bucket, unsigned world_size)
{
    return bucket->owner == LAYOUT_NO_OWNER ? bucket->n_elems / world_size : bucket->n_elems;
}

/*
 * Return: n, where [*start, *start + n) are the bucket's elements in the partitions of n_ranks ranks of world_size.
 * *start is 0 if the bucket has an owner.
 */
static inline uint64_t layout_bucket_owned(const struct layout_bucket *bucket, unsigned world_size, unsigned first_rank,
                                           unsigned n_ranks, uint64_t *start)
{
    uint64_t n_elems = layout_bucket_partition(bucket, world_size);
    bool owns = bucket->owner - first_rank < n_ranks;

    *start = bucket->owner == LAYOUT_NO_OWNER ? n_elems * first_rank : 0;
    return n_elems * (bucket->owner == LAYOUT_NO_OWNER ? n_ranks : owns);
}

/*
 * Return: the most elements of the bucket that an engine on GPUs copies at a time to undo an order: a partition, or, if
 * the bucket has an owner, a parcel. parcels: the layout's.
 */
static inline uint64_t layout_undo_elems(const struct layout_bucket *bucket, const struct layout_parcel *parcels,
                                         unsigned world_size)
{
    uint64_t most = 0;

    if (bucket->owner == LAYOUT_NO_OWNER)
        return layout_bucket_partition(bucket, world_size);
    for (uint32_t i = bucket->first_parcel; i < bucket->first_parcel + bucket->n_parcels; i++)
        most = parcels[i].n_elems > most ? parcels[i].n_elems : most;
    return most;
}

static inline uint64_t layout_partition_elems(const struct layout *layout, uint32_t bucket)
{
    return layout_bucket_partition(&layout->buckets[bucket], layout->world_size);
}

static inline uint64_t layout_owned_elems(const struct layout *layout, uint32_t bucket, unsigned first_rank,
                                          unsigned n_ranks, uint64_t *start)
{
    return layout_bucket_owned(&layout->buckets[bucket], layout->world_size, first_rank, n_ranks, start);
}

/* Return: true if one of the n_ranks ranks owns the parameter, and Muon updates it as a matrix. */
static inline bool layout_owns_matrix(const struct layout *layout, uint32_t param, unsigned first_rank,
                                      unsigned n_ranks)
{
    const struct layout_param *p = &layout->params[param];

    return p->muon && p->n_elems > 0 && layout->buckets[p->bucket].owner - first_rank < n_ranks;
}

static inline uint32_t layout_count_matrices(const struct layout *layout, unsigned first_rank, unsigned n_ranks)
{
    uint32_t n = 0;

    for (uint32_t p = 0; p < layout->n_params; p++)
        n += layout_owns_matrix(layout, p, first_rank, n_ranks);
    return n;
}

/* Return: the rank that owns an element of the bucket. *end: the end of that rank's partition in the bucket. */
static inline uint32_t layout_owner(const struct layout *layout, uint32_t bucket, uint64_t elem, uint64_t *end)
{
    uint64_t n_elems = layout_partition_elems(layout, bucket);

    *end = (elem / n_elems + 1) * n_elems;
    return layout_is_muon(layout, bucket) ? layout->buckets[bucket].owner : (uint32_t)(elem / n_elems);
}

/* Return: the elements of the bucket for which a node with the partitions of n_ranks ranks has memory. */
static inline uint64_t layout_room_elems(const struct layout *layout, uint32_t bucket, unsigned first_rank,
                                         unsigned n_ranks)
{
    uint64_t start;

    return n_ranks == layout->world_size ? layout->buckets[bucket].room_elems
                                         : layout_owned_elems(layout, bucket, first_rank, n_ranks, &start);
}

/*
 * Return: the elements of each rank's slice of a frozen parameter that is partitioned. The last slices may be shorter,
 * or empty.
 */
static inline uint64_t layout_frozen_slice_elems(uint64_t n_elems, uint32_t world_size)
{
    uint64_t slice = (n_elems + world_size - 1) / world_size;

    return (slice + LAYOUT_ALIGN_ELEMS - 1) / LAYOUT_ALIGN_ELEMS * LAYOUT_ALIGN_ELEMS;
}

/* Return: the bytes of a slot for the parcel, in gradient dtype. */
static inline uint64_t layout_parcel_bytes(const struct layout *layout, uint32_t parcel)
{
    const struct layout_parcel *p = &layout->parcels[parcel];

    return p->n_elems * dtype_size(layout->buckets[p->bucket].grad_dtype);
}

/* Return: the offset of a part in its parcel's slot. */
static inline uint64_t layout_part_offset_bytes(const struct layout *layout, uint32_t part)
{
    const struct layout_part *p = &layout->parts[part];
    const struct layout_param *param = &layout->params[p->param];
    uint64_t elem = param->offset_elems + p->start_elem - layout->parcels[p->parcel].offset_elems;

    return elem * dtype_size(param->grad_dtype);
}

static inline uint64_t layout_part_bytes(const struct layout *layout, uint32_t part)
{
    const struct layout_part *p = &layout->parts[part];

    return p->n_elems * dtype_size(layout->params[p->param].grad_dtype);
}

/* Return: the offset in the weight segment at which the buckets end and the frozen parameters begin. */
static inline uint64_t layout_frozen_offset_bytes(const struct layout *layout)
{
    const struct layout_bucket *last = &layout->buckets[layout->n_buckets - 1];

    return layout->n_buckets == 0 ? 0 : last->weight_offset_bytes + last->room_elems * dtype_size(last->dtype);
}

/* Return: the last part of a trainable parameter. A push of the last part completes the parameter, because parts are
 * pushed in order. */
static inline uint32_t layout_last_part(const struct layout *layout, uint32_t param)
{
    return layout->params[param].first_part + layout->params[param].n_parts - 1;
}

static inline bool layout_is_last_part(const struct layout *layout, uint32_t part)
{
    return part == layout_last_part(layout, layout->parts[part].param);
}

/* Prints a name, such as "layers.3.mlp.w1". Bytes that are not printable ASCII become \xNN. A name that does not fit is
 * cut, with "...". */
void layout_print_name(char *dst, size_t size, const char *name, size_t name_len);
