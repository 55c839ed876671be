/* SPDX-License-Identifier: Apache-2.0 */

/* Sizes of a step's memory: its tables, the staging between nodes, the slots of an offloaded update. */

#include "core/budget/step-sizes.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/budget/exchange-plan.h"
#include "core/config/config.h"
#include "kernels/exact.h"
#include "kernels/muon.h"
#include "kernels/position_sum.h"
#include "kernels/reduce.h"
#include "kernels/update.h"

enum {
    OFFLOAD_PORTIONS = 8,         /* fewest portions of an update, as far as the parcels allow; picked */
    OFFLOAD_SLOT_ELEMS = 1 << 20, /* for several small parcels: 4 MiB, so that an order's cost does not show; picked */
};

bool step_sends_bucket(const struct layout *layout, unsigned n_local, enum dtype wire, uint32_t bucket)
{
    assert(bucket < layout->n_buckets);
    return n_local == 1 && layout->world_size > 1 && layout->buckets[bucket].grad_dtype == wire;
}

bool step_sends_any_slots(const struct layout *layout, unsigned n_local, enum dtype wire)
{
    for (uint32_t b = 0; b < layout->n_buckets; b++)
        if (step_sends_bucket(layout, n_local, wire, b))
            return true;
    return false;
}

uint64_t step_staging_bytes(const struct layout *layout, unsigned n_local, unsigned n_pieces, enum dtype wire)
{
    uint64_t n_elems = 0;

    for (uint32_t b = 0; b < layout->n_buckets; b++)
        n_elems += step_sends_bucket(layout, n_local, wire, b) ? 0 : layout->buckets[b].n_elems;
    return n_elems * n_pieces * dtype_size(wire);
}

uint64_t step_fixed_bytes(const struct layout *layout, unsigned n_local)
{
    uint64_t per_chunk = sizeof(struct reduce_result) + n_local * sizeof(struct position_sum) + sizeof(uint32_t);
    uint64_t published = sizeof(uint64_t) + sizeof(uint32_t);
    uint64_t per_param = 1 + 2 * sizeof(struct exact_sum) + sizeof(struct update_scalars) + published;
    uint64_t n_kinds = n_local < layout->world_size ? 2 : 1;
    uint64_t per_part = 1 + n_kinds * sizeof(uint64_t);
    uint64_t per_parcel = n_kinds * (STEP_REDUCTION_BYTES + CONFIG_MAX_LOCAL_RANKS * sizeof(void *));

    return layout->n_chunks * per_chunk + layout->n_params * per_param + layout->n_parts * per_part +
           layout->n_parcels * per_parcel;
}

uint64_t step_muon_scratch_elems(const struct layout *layout, unsigned first_rank, unsigned n_ranks)
{
    uint64_t largest = 0;

    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];

        if (layout_owns_matrix(layout, p, first_rank, n_ranks))
            largest = MAX(largest, muon_scratch_elems((struct muon_shape){param->shape[0], param->shape[1]}));
    }
    return largest;
}

unsigned step_muon_callers(const struct layout *layout, unsigned first_rank, unsigned n_ranks, unsigned n_threads)
{
    unsigned most = MIN(n_threads, (unsigned)GEMM_MAX_CALLERS);

    return MIN(layout_count_matrices(layout, first_rank, n_ranks), most);
}

uint64_t step_muon_bytes(const struct layout *layout, unsigned first_rank, unsigned n_ranks, unsigned n_threads)
{
    uint64_t scratch_bytes = step_muon_scratch_elems(layout, first_rank, n_ranks) * sizeof(float);

    return step_muon_callers(layout, first_rank, n_ranks, n_threads) * (scratch_bytes + GEMM_THREAD_BYTES);
}

uint64_t offload_parcel_elems(const struct layout *layout, uint32_t parcel, unsigned first_rank, unsigned n_ranks,
                              uint64_t *start)
{
    const struct layout_parcel *p = &layout->parcels[parcel];

    return exchange_plan_owned_part(layout, p, (struct span){.first = first_rank, .n = n_ranks}, start);
}

uint64_t offload_slot_elems(const struct layout *layout, unsigned first_rank, unsigned n_ranks)
{
    uint64_t largest = 0, all = 0, start;

    for (uint32_t i = 0; i < layout->n_parcels; i++) {
        uint64_t n_elems = offload_parcel_elems(layout, i, first_rank, n_ranks, &start);

        largest = MAX(largest, n_elems);
        all += n_elems;
    }
    return MAX(largest, MIN((uint64_t)OFFLOAD_SLOT_ELEMS, all / OFFLOAD_PORTIONS));
}

uint64_t offload_staging_bytes(const struct layout *layout, unsigned first_rank, unsigned n_ranks,
                               uint32_t early_buckets)
{
    uint64_t n_elems = 0, start;

    for (uint32_t b = 0; b < MIN(early_buckets, layout->n_buckets); b++)
        n_elems += layout_owned_elems(layout, b, first_rank, n_ranks, &start);
    if (early_buckets < layout->n_buckets)
        n_elems += OFFLOAD_SLOTS * offload_slot_elems(layout, first_rank, n_ranks);
    return n_elems * sizeof(float);
}

uint64_t devices_table_bytes(const struct device_plan_options *plan)
{
    const struct layout *layout = plan->layout;
    uint64_t per_chunk = sizeof(struct exact_sum) + plan->n_local * sizeof(struct position_sum);
    uint64_t per_part = 1 + div_round_up(layout->world_size, 64) * sizeof(uint64_t);
    uint64_t per_param = 1 + sizeof(struct update_scalars);

    return device_plan_bytes(plan) + layout->n_chunks * per_chunk + layout->n_parts * per_part +
           layout->n_params * per_param + layout->n_groups * sizeof(struct hyper) +
           layout->n_parcels * sizeof(struct device_result_finding) +
           plan->n_local * (DEVICE_LANES * sizeof(struct device_mark) + layout->n_buckets * sizeof(uint64_t));
}
