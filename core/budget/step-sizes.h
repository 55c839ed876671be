/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * How many bytes the modules of a step need for a layout. Pure, so that a plan can be made where none of these modules
 * is; the modules allocate by the same functions, or assert that their own sizes are these.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/layout/layout.h"
#include "core/wire/device-plan.h"

enum {
    /* sizeof of structs of the daemon, asserted where they are defined. */
    LEDGER_ENTRY_BYTES = 104,
    RING_SLOT_BYTES = 64,
    RING_EXTENT_BYTES = 24,
    STEP_REDUCTION_BYTES = 904,

    OFFLOAD_SLOTS = 3,               /* one comes, one is updated, one is about to come */
    DEVICES_BOUNCE_BYTES = 16 << 20, /* picked: little beside any GPU, much beside a system call */
};

/*
 * Does a node of n_local ranks send the slots of that bucket as they are? One rank is a sum already, if its gradients
 * are of the type that travels (wire). And those of any bucket?
 */
bool step_sends_bucket(const struct layout *layout, unsigned n_local, enum dtype wire, uint32_t bucket);
bool step_sends_any_slots(const struct layout *layout, unsigned n_local, enum dtype wire);

/* The staging of several nodes: each piece's partial sums of all buckets that are not sent from slots. */
uint64_t step_staging_bytes(const struct layout *layout, unsigned n_local, unsigned n_pieces, enum dtype wire);

/* The tables of a step, for the class "fixed". */
uint64_t step_fixed_bytes(const struct layout *layout, unsigned n_local);

/* Muon, of the matrices that these ranks own: fp32 elements of the scratch memory of one matrix. 0: there are none. */
uint64_t step_muon_scratch_elems(const struct layout *layout, unsigned first_rank, unsigned n_ranks);
/* How many matrices are under way at a time, at most GEMM_MAX_CALLERS. */
unsigned step_muon_callers(const struct layout *layout, unsigned first_rank, unsigned n_ranks, unsigned n_threads);
/* Bytes of the scratch memories of these matrices, and of OpenBLAS's buffers. */
uint64_t step_muon_bytes(const struct layout *layout, unsigned first_rank, unsigned n_ranks, unsigned n_threads);

/* Offloaded state: elements of each of the OFFLOAD_SLOTS slots through which accumulators come, and all slots. */
uint64_t offload_slot_elems(const struct layout *layout);
uint64_t offload_staging_bytes(const struct layout *layout);

/* Jobs on GPUs: host memory for the tables with which orders go to the engine. */
uint64_t devices_table_bytes(const struct device_plan_options *plan);
