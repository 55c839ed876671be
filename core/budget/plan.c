/* SPDX-License-Identifier: Apache-2.0 */

/* The memory plan computes the bytes of each class from the layout and the options; sums saturate. */

#include "core/budget/plan.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/budget/step-sizes.h"
#include "core/layout/layout.h"
#include "core/wire/device-plan.h"
#include "kernels/device.h"

enum {
    OPTIMIZER_BYTES = 12, /* K of the paper: fp32 master, exp_avg, exp_avg_sq */
    RING_MIN_BYTES = 1 << 20,
    RING_SPARE_PARCELS = 4,
    UNDO_LANES = 3,          /* equals DEVICE_LANES */
    ARRAY_ALIGN_BYTES = 256, /* equals DEVICE_ALIGN_BYTES */
    CACHE_LINE_BYTES = 64,
    FROZEN_ALIGN_BYTES = 64,
    POOL_ALIGN_BYTES = 256, /* equals DEVICE_POOL_ALIGN */
    POOL_SPARE_BYTES = 16 << 20,
};

_Static_assert((int)UNDO_LANES == (int)DEVICE_LANES, "the plan has the lanes of the engine");
_Static_assert((int)ARRAY_ALIGN_BYTES == (int)DEVICE_ALIGN_BYTES, "arrays are planned as the engine aligns them");
_Static_assert((int)POOL_ALIGN_BYTES == (int)DEVICE_POOL_ALIGN, "parameters are planned as the pool aligns them");
_Static_assert((int)LAYOUT_ALIGN_ELEMS % (int)GROUP8_ELEMS == 0, "partitions are whole groups");

double plan_model_states(double n_params, unsigned ranks, unsigned stage)
{
    const double whole = 4 + OPTIMIZER_BYTES;
    double n = ranks, bytes;

    assert(ranks > 0 && stage <= 3);

    switch (stage) {
    case 0:
        bytes = whole * n_params;
        break;
    case 1:
        bytes = 4 * n_params + OPTIMIZER_BYTES * n_params / n;
        break;
    case 2:
        bytes = 2 * n_params + (2 + OPTIMIZER_BYTES) * n_params / n;
        break;
    default:
        bytes = whole * n_params / n;
    }
    return bytes / 1e9;
}

/* ---- saturating arithmetic ----------------------------------------------------------------------------- */

static uint64_t add(uint64_t a, uint64_t b)
{
    uint64_t sum;

    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

static uint64_t mul(uint64_t a, uint64_t b)
{
    uint64_t product;

    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static uint64_t align(uint64_t n, uint64_t to)
{
    uint64_t rest = n % to;

    return rest ? add(n, to - rest) : n;
}

static uint64_t pages(uint64_t n_bytes)
{
    return align(n_bytes, (uint64_t)sysconf(_SC_PAGESIZE));
}

/* ---- classes ------------------------------------------------------------------------------------------- */

static uint64_t owned_elems(const struct layout *layout, const struct plan_options *options, uint32_t bucket)
{
    return layout_room_elems(layout, bucket, options->first_local_rank, options->n_local_ranks);
}

/* n_elems must be whole groups if the moments are grouped. */
static uint64_t moment_elems_bytes(const struct plan_options *options, uint64_t n_elems)
{
    enum dtype dtype = options->moments_dtype;

    assert(!dtype_is_grouped(dtype) || n_elems % GROUP8_ELEMS == 0);
    return dtype_is_grouped(dtype) ? mul(n_elems / GROUP8_ELEMS, GROUP8_BYTES) : mul(n_elems, dtype_size(dtype));
}

/* Return: the bytes of an optimizer array. partition, owned: the bytes of one partition, and of all owned partitions.
 * On GPUs each rank's array begins at a multiple of ARRAY_ALIGN_BYTES; otherwise all ranks share one array, on a cache
 * line. */
static uint64_t optimizer_array_bytes(const struct layout *layout, const struct plan_options *options, uint32_t bucket,
                                      uint64_t partition, uint64_t owned)
{
    uint64_t n_owners = layout_is_muon(layout, bucket) ? owned > 0 : options->n_local_ranks;

    if (options->on_devices && !options->offloaded)
        return add(owned, mul(align(partition, ARRAY_ALIGN_BYTES) - partition, n_owners));
    return align(owned, CACHE_LINE_BYTES);
}

static uint64_t moment_bytes(const struct layout *layout, const struct plan_options *options, uint32_t bucket)
{
    return optimizer_array_bytes(layout, options, bucket,
                                 moment_elems_bytes(options, layout_partition_elems(layout, bucket)),
                                 moment_elems_bytes(options, owned_elems(layout, options, bucket)));
}

/* Return: the bytes of 24-bit masters. Stages 1 and 2 keep only the lower bytes, because the weights are the upper
 * bytes. */
static uint64_t master24_bytes(const struct layout *layout, const struct plan_options *options, uint32_t bucket)
{
    uint64_t partition = layout_partition_elems(layout, bucket), owned = owned_elems(layout, options, bucket);
    uint64_t lower = optimizer_array_bytes(layout, options, bucket, partition, owned);

    return options->stage == 3
               ? add(lower, optimizer_array_bytes(layout, options, bucket, mul(partition, 2), mul(owned, 2)))
               : lower;
}

/* Return: the bytes of the masters. In stages 1 and 2, fp32 weights are their own masters, and need none. */
static uint64_t master_bytes(const struct layout *layout, const struct plan_options *options, uint32_t bucket)
{
    uint64_t n_elems = owned_elems(layout, options, bucket);
    enum dtype dtype = layout->buckets[bucket].dtype;

    if (options->master24 && dtype == DTYPE_BF16)
        return master24_bytes(layout, options, bucket);
    return options->stage == 3 || dtype != DTYPE_F32 ? mul(n_elems, sizeof(float)) : 0;
}

static uint64_t state_bytes(const struct layout *layout, const struct plan_options *options)
{
    uint64_t sum = 0;

    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        assert(options->n_moments >= (unsigned)layout_is_muon(layout, b)); /* Muon's matrices have one moment less */
        sum = add(sum, master_bytes(layout, options, b));
        sum = add(sum, mul(moment_bytes(layout, options, b), options->n_moments - layout_is_muon(layout, b)));
    }
    for (uint32_t p = 0; options->stage == 3 && p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];

        if (!param->trainable)
            sum = add(sum, align(param->n_elems * dtype_size(param->dtype), FROZEN_ALIGN_BYTES));
    }
    /* A node that owns no matrix also has a page (daemon/memory/state.c). */
    if (layout->n_buckets > 0 && (options->n_moments > 0 || options->master24))
        sum = MAX(sum, (uint64_t)CACHE_LINE_BYTES);
    return pages(sum);
}

/* Return: the bytes of the spare places of all chunks (daemon/memory/state.c). */
static uint64_t spare_bytes(const struct layout *layout, const struct plan_options *options)
{
    uint64_t sum = 0;

    for (uint32_t b = 0; b < MIN(options->spare_buckets, layout->n_buckets); b++) {
        uint64_t n_elems = owned_elems(layout, options, b);
        bool is_fp32 = layout->buckets[b].dtype == DTYPE_F32;

        if (layout_is_muon(layout, b))
            continue;
        sum = add(sum, is_fp32 ? mul(n_elems, sizeof(float)) : add(master_bytes(layout, options, b), mul(n_elems, 2)));
        sum = add(sum, mul(moment_bytes(layout, options, b), options->n_moments));
    }
    return pages(sum);
}

/* Return: the bytes that engines keep to undo orders, as in device_undo_places() of core/wire. */
static uint64_t undo_bytes(const struct layout *layout, const struct plan_options *options)
{
    uint64_t largest = 0, n_chunks = 0, n_bytes;

    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        uint64_t slice = layout_partition_elems(layout, b);

        largest = MAX(largest, layout_undo_elems(layout->buckets + b, layout->parcels, layout->world_size));
        n_chunks = add(n_chunks, layout->buckets[b].n_chunks + slice / DEVICE_CHUNK_ELEMS);
    }
    n_bytes = mul(mul(largest, sizeof(float)), UNDO_LANES);
    if (!options->offloaded) {
        uint32_t n_blocks = device_update_blocks(n_chunks);
        uint64_t n_sets = device_mark_sets(options->master24, layout_count_matrices(layout, 0, layout->world_size));
        uint32_t slot_bytes = device_undo_slot_bytes(options->n_moments, options->moments_dtype);

        n_bytes = add(n_bytes, align(n_sets * n_blocks * sizeof(uint64_t), ARRAY_ALIGN_BYTES));
        n_bytes = add(n_bytes, device_undo_bytes(n_blocks, slot_bytes));
    }
    return mul(n_bytes, options->n_local_ranks);
}

/* Return: the bytes of Muon's scratch memory on the GPUs of ranks that own matrices. */
static uint64_t scratch_bytes(const struct layout *layout, const struct plan_options *options)
{
    uint64_t sum = 0;

    for (unsigned i = 0; i < options->n_local_ranks; i++)
        sum = add(sum, mul(step_muon_scratch_elems(layout, options->first_local_rank + i, 1), sizeof(float)));
    return sum;
}

static uint64_t gradient_bytes(const struct layout *layout, const struct plan_options *options)
{
    uint64_t n_elems = 0;

    for (uint32_t b = 0; b < layout->n_buckets; b++)
        n_elems = add(n_elems, owned_elems(layout, options, b));
    return pages(mul(n_elems, sizeof(float)));
}

uint64_t plan_ring_bytes(const struct layout *layout, bool overlap_comm, bool holds_all)
{
    uint64_t largest = layout->largest_parcel_bytes;
    uint64_t elem_bytes = 0, typical, n_bytes;

    for (uint32_t b = 0; b < layout->n_buckets; b++)
        elem_bytes = MAX(elem_bytes, (uint64_t)dtype_size(layout->buckets[b].grad_dtype));

    typical = MIN(largest, mul(layout->bucket_elems, elem_bytes));
    n_bytes = add(largest, mul(typical, overlap_comm ? RING_SPARE_PARCELS : 1));
    n_bytes = holds_all ? layout->arena_bytes : MIN(n_bytes, layout->arena_bytes);
    return pages(MAX(n_bytes, (uint64_t)RING_MIN_BYTES));
}

uint64_t plan_device_ring_bytes(const struct layout *layout, bool overlap_comm)
{
    return pages(add(layout->arena_bytes, plan_ring_bytes(layout, overlap_comm, false)));
}

static uint64_t weight_bytes(const struct layout *layout, const struct plan_options *options)
{
    uint64_t n_copies = 1 + (options->private_weights ? (uint64_t)options->n_local_ranks : 0);

    if (options->on_devices)
        n_copies = options->n_local_ranks;
    return options->stage == 3 ? 0 : mul(pages(layout->weight_bytes), n_copies);
}

uint64_t plan_device_pool_bytes(const struct layout *layout)
{
    uint64_t largest = 0, all = 0;

    for (uint32_t p = 0; p < layout->n_params; p++) {
        uint64_t n_bytes = align(layout->params[p].n_elems * dtype_size(layout->params[p].dtype), POOL_ALIGN_BYTES);

        largest = MAX(largest, n_bytes);
        all = add(all, n_bytes);
    }
    return pages(MIN(all, add(mul(largest, 2), POOL_SPARE_BYTES)));
}

static uint64_t pool_bytes(const struct layout *layout, const struct plan_options *options)
{
    uint64_t live = mul(mul(options->stage3_max_live_elems, sizeof(float)), options->n_local_ranks);

    if (options->stage != 3)
        return 0;
    return options->on_devices ? mul(plan_device_pool_bytes(layout), options->n_local_ranks)
                               : MIN(layout->range_bytes, pages(live));
}

static uint64_t layout_bytes(const struct layout *layout)
{
    uint64_t n_bytes = sizeof(*layout);

    n_bytes += layout->n_params * (sizeof(*layout->params) + sizeof(*layout->bucket_params));
    n_bytes += layout->n_buckets * sizeof(*layout->buckets);
    n_bytes += layout->n_chunks * sizeof(*layout->chunks);
    n_bytes += layout->n_parts * sizeof(*layout->parts);
    n_bytes += layout->n_parcels * sizeof(*layout->parcels);
    for (uint32_t p = 0; p < layout->n_params; p++)
        n_bytes += layout->params[p].name_len + 1;
    return n_bytes;
}

static uint64_t fixed_bytes(const struct layout *layout, const struct plan_options *options)
{
    uint64_t n_local = options->n_local_ranks;
    uint64_t per_chunk = add(options->chunk_bytes, mul(options->chunk_rank_bytes, n_local));
    uint64_t per_rank = add(options->rank_bytes, pages(options->credit_bytes));
    uint64_t sum = add(layout_bytes(layout), options->fixed_bytes);

    sum = add(sum, mul(layout->n_chunks, per_chunk));
    sum = add(sum, mul(layout->n_params, options->param_bytes));
    sum = add(sum, mul(layout->n_parts, mul(options->part_rank_bytes, n_local)));
    sum = add(sum, mul(layout->n_parcels, options->parcel_bytes));
    return add(sum, mul(n_local, per_rank));
}

void plan_bytes_by_class(const struct layout *layout, const struct plan_options *options, struct plan_bytes *out)
{
    uint64_t n_local = options->n_local_ranks;

    assert(options->stage >= 1 && options->stage <= 3);
    assert(options->first_local_rank + n_local <= layout->world_size);

    *out = (struct plan_bytes){
        .state = add(state_bytes(layout, options), spare_bytes(layout, options)),
        .gradient = gradient_bytes(layout, options),
        .ring =
            mul(n_local, options->on_devices ? plan_device_ring_bytes(layout, options->overlap_comm)
                                             : plan_ring_bytes(layout, options->overlap_comm, options->ring_holds_all)),
        .overflow = options->on_devices ? 0 : mul(n_local, pages(layout->arena_bytes)),
        .staging = options->staging_bytes,
        .weights = weight_bytes(layout, options),
        .pool = pool_bytes(layout, options),
        .fixed = fixed_bytes(layout, options),
    };
    out->offloaded = options->on_devices && options->offloaded;
    out->needed = add(out->staging, out->fixed);
    if (out->offloaded) {
        out->state = add(out->state, options->stage == 3 ? 0 : pages(layout->weight_bytes));
        out->gradient = add(out->gradient, undo_bytes(layout, options));
        out->needed = add(out->needed, out->state);
    } else if (options->on_devices) {
        out->state = add(out->state, add(undo_bytes(layout, options), scratch_bytes(layout, options)));
        out->device = out->state;
    }
    if (options->on_devices)
        out->device = add(out->device, add(add(out->gradient, out->ring), add(out->weights, out->pool)));
    else
        out->needed =
            add(out->needed, add(add(out->state, out->gradient), add(add(out->ring, out->weights), out->pool)));
    out->total = add(out->needed, out->overflow);
}
