/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The memory that a job will need, computed before anything is allocated. Pure. Two functions:
 *
 *  - plan_model_states(): the formulas of the ZeRO paper, per device, for comparison
 *    with its Table 1 and Figure 1;
 *  - plan_bytes_by_class(): the memory of zerod on one node, class by class. The job is
 *    admitted by this plan. Its memory later agrees with the plan within 2 % or 16 MiB per class.
 *
 * All sizes are bytes unless the name says otherwise. Segments are counted in whole pages of this machine. Sums that do
 * not fit into 64 bits stay at UINT64_MAX, which exceeds every limit, and do not wrap around.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/dtype.h"

struct layout;

/*
 * Model states of n_params parameters on each of ranks devices, in GB (1e9 bytes): 16-bit weights and gradients and K =
 * 12 bytes of fp32 master, exp_avg and exp_avg_sq for each parameter, in all
 *
 *   stage 0   (4 + K) P                     nothing is partitioned
 *   stage 1   4 P + K P / ranks             the optimizer state is partitioned
 *   stage 2   2 P + (2 + K) P / ranks       the gradients, too
 *   stage 3   (4 + K) P / ranks             the weights, too
 *
 * ranks > 0, stage at most 3.
 */
double plan_model_states(double n_params, unsigned ranks, unsigned stage);

struct plan_options {
    unsigned stage;       /* 1, 2, 3 */
    enum dtype moments_dtype;
    bool master24; /* masters of bf16 weights have 24 bits: kernels/master24.h */
    /* Arrays of the optimizer besides the master: AdamW 2, plain SGD 0. A matrix of Muon has one array less. */
    unsigned n_moments;
    bool private_weights; /* weights: private: a copy for the node, and one for each local rank */
    bool overlap_comm;
    bool on_devices;           /* device: cuda: state, gradient, ring and weights are on the GPUs of the node */
    bool offloaded;            /* with on_devices: the state is in host memory */
    unsigned first_local_rank; /* the ranks of this node; it owns their partitions */
    unsigned n_local_ranks;
    uint64_t stage3_max_live_elems; /* elements, per rank */
    uint32_t spare_buckets;         /* so many first buckets have spare places; may be more than there are */
    bool ring_holds_all;            /* each ring has room for all parcels of a micro-batch */
    uint64_t staging_bytes;         /* bytes for the exchange between nodes; 0: one node, collective: local */

    /* Sizes of other modules' data, for the class "fixed"; each may be 0. */
    size_t chunk_bytes;      /* bytes per chunk */
    size_t chunk_rank_bytes; /* bytes per chunk and local rank */
    size_t param_bytes;      /* bytes per parameter */
    size_t part_rank_bytes;  /* bytes per part and local rank: a ledger entry */
    size_t parcel_bytes;     /* bytes per parcel */
    size_t rank_bytes;       /* bytes per local rank */
    size_t credit_bytes;     /* credit page of a local rank, rounded up to pages */
    uint64_t fixed_bytes;    /* all other bytes */
};

/*
 * With R = world size, L = local ranks, E = padded elements, and O = E x L / R, the elements of
 * the owned partitions, exact in every bucket:
 *
 *   state      masters: in stages 1, 2: 4 O of the buckets with 16-bit weights (fp32 weights are their own
 *              masters and count as weights); in stage 3: 4 O, and all frozen parameters, which every node has
 *              whole, each from a multiple of 64 bytes. A 24-bit master of a bf16 weight takes 1 instead of 4, or 3
 *              in stage 3. In every stage also n_moments moments: 4 O each; 2 O in bf16; 68/64 O, on a cache line,
 *              in 8 bits. Spare places have masters, of fp32 weights too, and moments as above, and 2 O for 16-bit
 *              weights; none for matrices of Muon
 *   gradient   fp32 accumulators of the owned partitions: 4 O
 *   ring       L x plan_ring_bytes()
 *   overflow   at most L x arena; only granted overflow is held; none on GPUs
 *   staging    as given
 *   weights    stages 1, 2: the weight segment, L + 1 times if private; stage 3: 0
 *   pool       stage 3: L x stage3_max_live_elems x 4, at most the range; else 0
 *   fixed      the layout's own tables and names, what the options say per chunk, parameter, part, parcel and local
 *              rank, L credit pages, fixed_bytes
 *
 * On GPUs the pool has L x plan_device_pool_bytes(), and weights have a copy for each local rank. The state also has
 * what the engine keeps to undo orders: for each local rank three slices of the largest bucket in fp32, and the undo
 * slots and marks of updates. If the state is offloaded, it is in host memory and has a copy of the weights as well;
 * then there are no slots and marks, and the three slices count as gradient.
 */
struct plan_bytes {
    uint64_t state;
    uint64_t gradient;
    uint64_t ring;
    uint64_t overflow;
    uint64_t staging;
    uint64_t weights;
    uint64_t pool;
    uint64_t fixed;
    uint64_t needed; /* host memory that forming the job needs: all classes except overflow */
    uint64_t total;  /* the most host memory that the job ever has */
    uint64_t device; /* the classes on GPUs, which are not part of needed and total */
    bool offloaded;  /* the state is in host memory, not on GPUs */
};

void plan_bytes_by_class(const struct layout *layout, const struct plan_options *options, struct plan_bytes *out);

/*
 * Return: the bytes of one rank's ring, before overflow: the largest parcel, and four typical ones with overlap_comm,
 * or one without it, so that a backward writes while earlier parcels are reduced. A typical parcel has bucket_elems
 * elements, but is no larger than the largest. The ring is at most the arena and at least 1 MiB, in whole pages.
 * holds_all: the ring is as large as the arena, so that a backward waits neither for the network nor, on a GPU, for the
 * workers.
 */
uint64_t plan_ring_bytes(const struct layout *layout, bool overlap_comm, bool holds_all);

/*
 * Return: the bytes of one rank's ring in device memory, where there is no overflow. It has room for a whole
 * micro-batch, so that pushes in any order never block, and for plan_ring_bytes() more, so that enough of the free
 * places are adjacent. A rank's micro-batch begins with an empty ring.
 */
uint64_t plan_device_ring_bytes(const struct layout *layout, bool overlap_comm);

/*
 * Return: the bytes of one rank's pool in device memory, in stage 3. The rank copies the parameters that it gathers
 * from the pool. The pool has room for two of the largest parameter, because one is fetched while another is copied,
 * and 16 MiB for others; at most for all parameters. Each parameter begins at a multiple of 256 bytes. The result is
 * whole pages.
 */
uint64_t plan_device_pool_bytes(const struct layout *layout);
