/* SPDX-License-Identifier: Apache-2.0 */

/* Turns a configuration into the options of the memory plan. */

#include "core/budget/budget.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/budget/exchange-plan.h"
#include "core/budget/step-sizes.h"
#include "core/config/config.h"
#include "proto/credit.h"

enum { MAX_TICKETS = 65536 };

/* Return: two slots for each parcel, one for this micro-batch and one for a later pass, and some more; picked, not
 * measured. */
uint32_t budget_n_tickets(uint64_t n_parcels)
{
    n_parcels = MIN(n_parcels, (uint64_t)MAX_TICKETS); /* so that the doubling below does not overflow */
    return (uint32_t)MIN(2 * n_parcels + 64, (uint64_t)MAX_TICKETS);
}

bool budget_ring_holds_all(const struct config *config, const struct layout *layout, unsigned n_local)
{
    return step_sends_any_slots(layout, n_local, config->communication_data_type) ||
           (config->zero.overlap_comm && config->zero.gpu_room == CONFIG_GPU_ROOM_MICRO_BATCH);
}

struct plan_options budget_options(const struct config *config, const struct layout *layout, struct budget_ranks ranks,
                                   uint64_t n_parcels)
{
    uint32_t n_tickets = budget_n_tickets(n_parcels);
    bool on_devices = config->device == CONFIG_DEVICE_CUDA, offloaded = config_offloads(config);
    uint64_t device_staging = DEVICES_BOUNCE_BYTES;
    struct device_plan_options device = {.layout = layout, .first_local = ranks.first_local, .n_local = ranks.n_local};

    assert(ranks.n_local > 0);
    assert(ranks.first_local + ranks.n_local <= layout->world_size);
    if (offloaded)
        device_staging += offload_staging_bytes(layout, ranks.first_local, ranks.n_local, config->zero.early_buckets);
    return (struct plan_options){
        .stage = config_stage(config),
        .moments_dtype = config_moments(config).type.dtype,
        .master24 = config_moments(config).master24,
        .n_moments = optimizer_n_moments(config->optimizer.type, &config->optimizer.hyper),
        .private_weights = config->weights == CONFIG_WEIGHTS_PRIVATE,
        .overlap_comm = config->zero.overlap_comm,
        .first_local_rank = ranks.first_local,
        .n_local_ranks = ranks.n_local,
        .on_devices = on_devices,
        .offloaded = offloaded,
        .spare_buckets = config->zero.spare_buckets,
        .chunk_bytes = config->zero.spare_buckets > 0 ? SPECULATION_CHUNK_BYTES : 0,
        .ring_holds_all = budget_ring_holds_all(config, layout, ranks.n_local),
        .staging_bytes = exchange_plan_bytes(config, layout) + (on_devices ? device_staging : 0),
        .stage3_max_live_elems = config->zero.stage3_max_live_parameters,
        .part_rank_bytes = LEDGER_ENTRY_BYTES,
        .parcel_bytes = sizeof(uint32_t) * ranks.n_local,
        .rank_bytes = n_tickets * (RING_SLOT_BYTES + RING_EXTENT_BYTES),
        .credit_bytes = credit_page_bytes(n_tickets),
        .fixed_bytes =
            step_fixed_bytes(layout, ranks.n_local) +
            (on_devices ? devices_table_bytes(&device)
                        : step_muon_bytes(layout, ranks.first_local, ranks.n_local, config_n_threads(config))),
    };
}
