/* SPDX-License-Identifier: Apache-2.0 */

/* The sizes of a lane follow from the plan: the maximum over all orders of the needed lists, results and staging. */

#include "engine/nccl.h"

#include "core/base/base.h"

/* Adds the most that n chunks need in lists and results. leaves: the leaves per range. */
static void add_chunks(struct nccl_sizes *sizes, uint64_t n, uint64_t leaves)
{
    uint64_t n_blocks = device_chunks_count(CHUNK_ELEMS);

    sizes->lists += n * (sizeof(struct device_reduce_range) + leaves * sizeof(struct device_leaf) +
                         n_blocks * sizeof(struct device_chunk));
    sizes->results += n * (sizeof(struct exact_sum) + sizeof(struct device_finding) +
                           leaves * (sizeof(struct position_sum) + sizeof(struct device_finding)));
    sizes->n_notes += n;
    sizes->n_leaves += n * leaves;
}

/* Sizes a reduction: ranges of the owned chunks, and also of the rank's own slot if the ranks are on several nodes. */
static void size_reduction(const struct nccl_engine *engine, uint32_t parcel, struct nccl_sizes *sizes)
{
    const struct device_plan_header *head = engine->plan.head;
    const struct layout_parcel *p = &engine->plan.parcels[parcel];
    struct nccl_sizes need = {.lists = 0};
    uint64_t begin, end, staging;

    add_chunks(&need, p->n_chunks, nccl_exchanges(&engine->plan, parcel) ? head->world_size : 1);
    add_chunks(&need, p->n_chunks, 1);
    for (unsigned i = 0; i < head->n_local; i++) {
        device_parcel_slice(&engine->plan, parcel, head->first_local + i, &begin, &end);
        need.stride = MAX(need.stride, (end - begin) * sizeof(float));
    }
    sizes->lists = MAX(sizes->lists, need.lists);
    sizes->results = MAX(sizes->results, need.results);
    sizes->n_notes = MAX(sizes->n_notes, need.n_notes);
    sizes->n_leaves = MAX(sizes->n_leaves, need.n_leaves);
    /* Staging holds the slices of all other ranks; or a whole parcel in fp32, and after it the sum of a slice. */
    need.stride = round_up(need.stride, DEVICE_ALIGN_BYTES);
    staging = nccl_exchanges(&engine->plan, parcel) ? need.stride * (head->world_size - 1)
                                                    : p->n_elems * sizeof(float) + need.stride;
    sizes->staging = MAX(sizes->staging, staging);
    sizes->stride = MAX(sizes->stride, need.stride);
}

static uint64_t size_update(const struct nccl_engine *engine)
{
    const struct device_plan_header *head = engine->plan.head;
    uint64_t per_chunk =
        sizeof(struct device_update_range) + device_chunks_count(CHUNK_ELEMS) * sizeof(struct device_chunk);
    uint64_t n_launches = 2, n_chunks = head->n_chunks;

    /* A matrix of Muon is in the momentum's launch and in a launch of its own. */
    if (head->n_matrices > 0) {
        n_launches += 1 + (uint64_t)head->n_matrices;
        n_chunks += head->n_chunks;
    }
    return n_chunks * per_chunk + head->n_params * sizeof(struct update_scalars) +
           2 * (1 + n_launches) * NCCL_LIST_ALIGN;
}

uint64_t sizes_staged_bytes(const struct nccl_engine *engine, uint32_t param)
{
    const struct device_plan_param *p = &engine->plan.params[param];
    uint64_t slice;

    if (p->bucket == LAYOUT_NO_BUCKET || p->dtype == DTYPE_F32 || device_is_master24(&engine->plan, p->bucket))
        return 0;
    slice = layout_bucket_partition(&engine->plan.buckets[p->bucket], engine->plan.head->world_size);
    return round_up(MIN(p->n_elems, slice) * dtype_size(p->dtype), DEVICE_ALIGN_BYTES);
}

static void size_fetch(const struct nccl_engine *engine, struct nccl_sizes *sizes)
{
    const struct device_plan_header *head = engine->plan.head;
    uint64_t per_chunk =
        sizeof(struct device_convert_range) + device_chunks_count(CHUNK_ELEMS) * sizeof(struct device_chunk);

    if (head->stage != 3 || head->offload)
        return;
    for (uint32_t i = 0; i < head->n_params; i++)
        sizes->fetch = MAX(sizes->fetch, sizes_staged_bytes(engine, i));
    sizes->staging = MAX(sizes->staging, sizes->fetch);
    /* A fetch lists each parameter once, and has two lists per round. */
    sizes->lists = MAX(sizes->lists, head->n_chunks * per_chunk + head->n_params * UINT64_C(64));
}

void sizes_find(struct nccl_engine *engine)
{
    const struct device_plan_header *head = engine->plan.head;
    struct nccl_sizes *sizes = &engine->sizes;

    for (uint32_t i = 0; i < head->n_parcels; i++)
        size_reduction(engine, i, sizes);
    size_fetch(engine, sizes);
    sizes->lists = round_up(MAX(sizes->lists, size_update(engine)) + NCCL_HOST_PAGE, NCCL_HOST_PAGE);
    sizes->results = round_up(sizes->results + NCCL_HOST_PAGE, NCCL_HOST_PAGE);
    /* The distance of slices is one stride, for all parcels. */
    sizes->staging = MAX(sizes->staging, sizes->stride * (head->world_size - 1));
    sizes->staging = MAX(sizes->staging, (uint64_t)DEVICE_ALIGN_BYTES);
}
