/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What a job will take, before anything is allocated. Pure. Two answers:
 *
 *  - plan_model_states(): the formulas of the ZeRO paper, per device, for comparison
 *    with its Table 1 and Figure 1;
 *  - plan_bytes_by_class(): what zerod will hold on one node, class by class. It is what the job
 *    is admitted by, and what is held later agrees within 2 % or 16 MiB per class.
 *
 * All sizes are bytes unless the name says otherwise. Segments are counted in whole
 * pages of this machine. Sums that do not fit into 64 bits stay at UINT64_MAX, which no
 * limit allows: nothing wraps around.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct layout;

/*
 * Model states of n_params parameters on each of ranks devices, in GB (1e9 bytes): 16-bit weights and
 * gradients and K = 12 bytes of fp32 master, exp_avg and exp_avg_sq for each parameter, in all
 *
 *   stage 0   (4 + K) P                     nothing is partitioned
 *   stage 1   4 P + K P / ranks             optimizer state is
 *   stage 2   2 P + (2 + K) P / ranks       and gradients
 *   stage 3   (4 + K) P / ranks             and weights
 *
 * ranks > 0, stage at most 3.
 */
double plan_model_states(double n_params, unsigned ranks, unsigned stage);

struct plan_options {
    unsigned stage;       /* 1, 2, 3 */
    unsigned n_moments;   /* fp32 arrays of the optimizer beside the master: AdamW 2, plain SGD 0 */
    bool private_weights; /* weights: private, one copy for each local rank beside the node's */
    bool overlap_comm;
    unsigned first_local_rank; /* the ranks of this node, whose partitions it owns */
    unsigned n_local_ranks;
    uint64_t stage3_max_live_elems; /* per rank */
    uint64_t staging_bytes;         /* of the exchange between nodes; 0: one node, collective: local */

    /* For the class "fixed", what other modules keep; each may be 0. */
    size_t chunk_bytes;      /* per chunk */
    size_t chunk_rank_bytes; /* per chunk and local rank */
    size_t param_bytes;      /* per parameter */
    size_t param_rank_bytes; /* per parameter and local rank: ledger entry, flags */
    size_t bucket_bytes;     /* per bucket */
    size_t rank_bytes;       /* per local rank */
    size_t credit_bytes;     /* credit page of a local rank, rounded up to pages */
    uint64_t fixed_bytes;    /* in all: what depends on none of these, or is known otherwise */
};

/*
 * With R = world size, L = local ranks, E = padded elements, and O = E x L / R, the elements of
 * the owned partitions, exact in every bucket:
 *
 *   state      stages 1, 2: 4 O of the buckets with 16-bit weights, where fp32 weights are their own
 *              masters and lie under weights; stage 3: 4 O, and of each frozen parameter its bytes
 *              x L / R from a multiple of 64; n_moments x 4 O in any stage
 *   gradient   fp32 accumulators: stage 1: 4 E; stages 2, 3: 4 O
 *   ring       L x plan_ring_bytes()
 *   overflow   L x arena: a bound, of which only what is granted is ever held
 *   staging    as given
 *   weights    stages 1, 2: the weight segment, L + 1 times if private; stage 3: 0
 *   pool       stage 3: L x stage3_max_live_elems x 4, at most the range; else 0
 *   fixed      the layout's own tables and names, what the options say per chunk, parameter, bucket and
 *              local rank, L credit pages, fixed_bytes
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
    uint64_t needed; /* all of them but overflow: what forming takes */
    uint64_t total;  /* the most that is ever held */
};

void plan_bytes_by_class(const struct layout *layout, const struct plan_options *options, struct plan_bytes *out);

/*
 * The ring of one rank, before overflow: the largest bucket, and another four typical ones with overlap_comm,
 * one without, so that a backward writes while earlier buckets are reduced. A typical bucket has
 * bucket_elems elements, but is no larger than the largest. Never more than the
 * arena, never less than 1 MiB; whole pages.
 */
uint64_t plan_ring_bytes(const struct layout *layout, bool overlap_comm);
