/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Estimates how long Muon's products take: counts the operations, and measures the speed of this machine. */

#include <stdint.h>

struct gemm;
struct layout;

struct muon_cost {
    uint64_t n_matrices, n_elems;
    double flops;         /* floating-point operations of one step, for all matrices */
    double largest_flops; /* floating-point operations of the matrix that needs most */
};

/* Counts the matrices that the given ranks own. */
void muon_cost_count(const struct layout *layout, unsigned first_rank, unsigned n_ranks, unsigned ns_steps,
                     struct muon_cost *out);

/* Measures this machine's speed for some tens of milliseconds. Return: floating-point operations per second and thread;
 * 0 without memory. */
double muon_cost_measure(const struct gemm *gemm);

/* Return: the seconds of one step on n_threads threads. One thread computes a whole matrix. */
double muon_cost_seconds(const struct muon_cost *cost, double flops_per_second, unsigned n_threads);
