/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The bytes that the modules of a step need for a layout. Pure, so that programs without these modules can make a plan.
 * The modules allocate what these functions return, or assert that their own sizes are equal.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/layout/layout.h"
#include "core/wire/device-plan.h"

enum {
    /* sizeof of structs of the daemon; asserted where the structs are defined. */
    LEDGER_ENTRY_BYTES = 104,
    RING_SLOT_BYTES = 64,
    RING_EXTENT_BYTES = 24,
    STEP_REDUCTION_BYTES = 904,
    SPECULATION_CHUNK_BYTES = 88, /* what speculation keeps of each chunk */

    OFFLOAD_SLOTS = 3,               /* one slot receives, one is updated, one receives next */
    DEVICES_BOUNCE_BYTES = 16 << 20, /* picked: small for any GPU, large for a system call */
};

/*
 * Return: true if a node of n_local ranks sends the slots of the bucket (or of any bucket) unchanged: it has one rank,
 * and the rank's gradients have the type that is sent (wire).
 */
bool step_sends_bucket(const struct layout *layout, unsigned n_local, enum dtype wire, uint32_t bucket);
bool step_sends_any_slots(const struct layout *layout, unsigned n_local, enum dtype wire);

/* Return: the bytes for staging between nodes: each piece's partial sums of all buckets that are not sent from
 * slots. */
uint64_t step_staging_bytes(const struct layout *layout, unsigned n_local, unsigned n_pieces, enum dtype wire);

/* Return: the bytes of a step's tables, for the class "fixed". */
uint64_t step_fixed_bytes(const struct layout *layout, unsigned n_local);

/* Return: the fp32 elements of Muon's scratch memory for one matrix of the given ranks; 0 if they own no matrix. */
uint64_t step_muon_scratch_elems(const struct layout *layout, unsigned first_rank, unsigned n_ranks);
/* Return: the number of matrices that are computed at a time, at most GEMM_MAX_CALLERS. */
unsigned step_muon_callers(const struct layout *layout, unsigned first_rank, unsigned n_ranks, unsigned n_threads);
/* Return: the bytes of the scratch memory for the matrices of the given ranks, and of OpenBLAS's buffers. */
uint64_t step_muon_bytes(const struct layout *layout, unsigned first_rank, unsigned n_ranks, unsigned n_threads);

/*
 * For offloaded state: the memory for the accumulators of these ranks. Those of the first early_buckets buckets have
 * places of their own; the others go through OFFLOAD_SLOTS slots.
 */
/* Return: the elements of the parcel that the ranks own, from *start on, counted from the bucket's start. */
uint64_t offload_parcel_elems(const struct layout *layout, uint32_t parcel, unsigned first_rank, unsigned n_ranks,
                              uint64_t *start);
/* Return: the elements of a slot. */
uint64_t offload_slot_elems(const struct layout *layout, unsigned first_rank, unsigned n_ranks);
/* early_buckets: may be more than there are. Return: the bytes of all places and slots. */
uint64_t offload_staging_bytes(const struct layout *layout, unsigned first_rank, unsigned n_ranks,
                               uint32_t early_buckets);

/* Return: the bytes of host memory for the tables of the orders to the engine, for jobs on GPUs. */
uint64_t devices_table_bytes(const struct device_plan_options *plan);
