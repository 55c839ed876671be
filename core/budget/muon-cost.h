/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How long Muon's products take: operations are counted, and the speed of this machine is measured. */

#include <stdint.h>

struct gemm;
struct layout;

struct muon_cost {
    uint64_t n_matrices, n_elems;
    double flops;         /* of one step, all matrices */
    double largest_flops; /* of the matrix that takes longest */
};

/* Counts the matrices that these ranks own. */
void muon_cost_count(const struct layout *layout, unsigned first_rank, unsigned n_ranks, unsigned ns_steps,
                     struct muon_cost *out);

/* Measures for some tens of milliseconds. Return: floating-point operations per second and thread; 0 without memory. */
double muon_cost_measure(const struct gemm *gemm);

/* Return: the seconds of one step on n_threads threads. One thread computes a whole matrix. */
double muon_cost_seconds(const struct muon_cost *cost, double flops_per_second, unsigned n_threads);
