/* SPDX-License-Identifier: Apache-2.0 */

/* The plan of the exchange: the elements that each node owns, and the memory that the exchange needs. */

#include "core/budget/exchange-plan.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/segment.h"
#include "core/budget/plan.h"
#include "core/budget/step-sizes.h"
#include "core/config/config.h"
#include "core/layout/layout.h"
#include "core/layout/subtree.h"
#include "core/wire/node-wire.h"

/* Return: true if GPUs exchange gradients, each rank's gradient separately. */
bool exchange_plan_on_devices(const struct config *config)
{
    return config->device == CONFIG_DEVICE_CUDA;
}

unsigned exchange_plan_n_pieces(const struct config *config, unsigned node)
{
    struct subtree pieces[SUBTREE_MAX];

    assert(node < config->world.nodes.n_items);
    if (exchange_plan_on_devices(config))
        return config->world.nodes.items[node].ranks;
    return subtree_find(config->world.size, config_first_rank_of(config, node), config->world.nodes.items[node].ranks,
                        pieces);
}

unsigned exchange_plan_n_sources(const struct config *config)
{
    unsigned n = 0;

    for (unsigned i = 0; i < config->world.nodes.n_items; i++)
        n += exchange_plan_n_pieces(config, i);
    return n;
}

/* Return: n, where [*start, *start + n) are the bucket's elements in [from, from + n_elems) that the span owns. */
uint64_t exchange_plan_owned(const struct layout *layout, struct span span, uint32_t bucket, uint64_t from,
                             uint64_t n_elems, uint64_t *start)
{
    uint64_t owned, n_owned = layout_owned_elems(layout, bucket, span.first, span.n, &owned);
    uint64_t first = MAX(owned, from);
    uint64_t end = MIN(owned + n_owned, from + n_elems);

    assert(from + n_elems <= layout->buckets[bucket].n_elems);
    *start = first;
    return end > first ? end - first : 0;
}

uint64_t exchange_plan_owned_part(const struct layout *layout, const struct layout_parcel *parcel, struct span span,
                                  uint64_t *start)
{
    return exchange_plan_owned(layout, span, parcel->bucket, parcel->offset_elems, parcel->n_elems, start);
}

static struct span own_span(const struct config *config)
{
    return (struct span){.first = config_first_rank(config), .n = config_local_ranks(config)};
}

/* Return: the most elements that this node receives of one parcel. */
uint64_t exchange_plan_incoming_elems(const struct config *config, const struct layout *layout)
{
    unsigned n_others = exchange_plan_n_sources(config) - exchange_plan_n_pieces(config, config->world.node);
    uint64_t most = 0, start;

    for (uint32_t p = 0; p < layout->n_parcels; p++)
        most = MAX(most, exchange_plan_owned_part(layout, &layout->parcels[p], own_span(config), &start));
    return most * n_others;
}

uint64_t exchange_plan_incoming_bytes(const struct config *config, const struct layout *layout)
{
    return exchange_plan_incoming_elems(config, layout) * MIN(layout->n_parcels, (uint32_t)NODE_MAX_MOVING) *
           dtype_size(config->communication_data_type);
}

/* Return: the bytes of one element's master that are not in the weight segment. */
static uint64_t master_bytes(const struct config *config, enum dtype dtype)
{
    bool stage3 = config_stage(config) == 3;

    if (dtype == DTYPE_BF16 && config_moments(config).master24)
        return stage3 ? 3 : 1;
    return stage3 || dtype != DTYPE_F32 ? sizeof(float) : 0;
}

/* Return: the bytes of the staging copy for initial weights, without moments. In stage 3, weights do not arrive in
 * it. */
static uint64_t initial_bytes(const struct config *config, const struct layout *layout)
{
    uint64_t n_bytes = round_up(layout->weight_bytes, page_size()), start;

    for (uint32_t b = 0; b < layout->n_buckets; b++)
        n_bytes += layout_owned_elems(layout, b, config_first_rank(config), config_local_ranks(config), &start) *
                   master_bytes(config, layout->buckets[b].dtype);
    return n_bytes;
}

uint64_t exchange_plan_pool_bytes(const struct config *config, const struct layout *layout)
{
    return config_offloads(config) && config_stage(config) == 3 ? plan_device_pool_bytes(layout) : 0;
}

/* Return: the bytes of the largest owned part of a parameter whose weights are rounded. */
static uint64_t largest_slot_bytes(const struct layout *layout, unsigned first_rank, unsigned n_ranks)
{
    uint64_t most = 0;

    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];
        uint64_t n_elems = 0;

        for (uint32_t c = param->first_chunk; param->trainable && c < param->first_chunk + param->n_chunks; c++)
            if (layout->chunks[c].rank - first_rank < n_ranks)
                n_elems += layout->chunks[c].n_elems;
        if (param->trainable && param->dtype != DTYPE_F32)
            most = MAX(most, n_elems * dtype_size(param->dtype));
    }
    return round_up(most, page_size());
}

/* Return: the bytes of the largest parameter's fp32 values on this node. */
static uint64_t largest_values_bytes(const struct config *config, const struct layout *layout)
{
    unsigned first_rank = config_first_rank(config), n_ranks = config_local_ranks(config);
    uint64_t most = 0;

    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];
        uint64_t n_elems = 0;

        for (uint32_t c = param->first_chunk; param->trainable && c < param->first_chunk + param->n_chunks; c++)
            if (layout->chunks[c].rank - first_rank < n_ranks)
                n_elems += layout->chunks[c].n_elems;
        if (!param->trainable && config_partitions_all(config))
            n_elems = MIN(param->n_elems, layout_frozen_slice_elems(param->n_elems, layout->world_size) * n_ranks);
        most = MAX(most, n_elems * sizeof(float));
    }
    return round_up(most, page_size());
}

uint64_t exchange_plan_serving_bytes(const struct config *config, const struct layout *layout)
{
    struct optimizer_moments moments = config_moments(config);
    bool widens = moments.type.dtype != DTYPE_F32 || moments.master24;

    if (widens || (config->device == CONFIG_DEVICE_CUDA && !config_offloads(config)))
        return SERVING_SLOTS * largest_values_bytes(config, layout);
    if (config_stage(config) != 3)
        return 0;
    return SERVING_SLOTS * largest_slot_bytes(layout, config_first_rank(config), config_local_ranks(config));
}

uint64_t exchange_plan_bytes(const struct config *config, const struct layout *layout)
{
    if (config->world.nodes.n_items < 2)
        return 0;
    if (exchange_plan_on_devices(config))
        return (config_offloads(config) ? exchange_plan_pool_bytes(config, layout) : initial_bytes(config, layout)) +
               exchange_plan_serving_bytes(config, layout);
    return round_up(step_staging_bytes(layout, config_local_ranks(config),
                                       exchange_plan_n_pieces(config, config->world.node), config->communication_data_type),
                    page_size()) +
           round_up(exchange_plan_incoming_bytes(config, layout), page_size()) + exchange_plan_serving_bytes(config, layout);
}
