/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Muon's orthogonalisation (docs/numerics.md, section 7): a few Newton-Schulz iterations bring all singular values of a
 * matrix near 1. Matrices are fp32, row after row. K. Jordan et al., "Muon: An optimizer for hidden layers in neural
 * networks" (2024); settings and defaults are those of torch.optim.Muon.
 */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/gemm.h"
#include "kernels/update.h"

struct muon_shape {
    uint64_t rows, cols; /* each at least 1 and at most MUON_MAX_SIDE */
};

#define MUON_MAX_SIDE INT32_MAX /* BLAS counts in int */

/*
 * Long products are computed in parts, so that a watchdog sees progress. The shape and `most` determine the parts, and
 * the parts determine the bits.
 */
struct muon_parts {
    double most;                /* approximate floating-point operations of a part */
    _Atomic(uint64_t) *n_ended; /* incremented after each part */
};

/* Return: the number of elements of a matrix's scratch memory: two arrays of its size, and two squares of its shorter
 * side. */
uint64_t muon_scratch_elems(struct muon_shape shape);

/* The arrays in a scratch memory, each at a multiple of 64 bytes. */
struct muon_scratch {
    float *x, *next;          /* of the matrix's size */
    float *gram, *polynomial; /* squares */
};

struct muon_scratch muon_divide_scratch(struct muon_shape shape, float *scratch);

/* Return: the floating-point operations of all products of one matrix in one step. */
double muon_flops(struct muon_shape shape, unsigned ns_steps);

/* The factor of the learning rate. */
double muon_lr_factor(struct muon_shape shape, enum muon_adjust_lr how);

/*
 * Orthogonalises a matrix. hyper: only ns_steps, ns_coefficients and eps are read. scratch: muon_scratch_elems()
 * elements, at a multiple of 64 bytes. If parts is NULL, products are not divided. Return: the result, rows x cols, in
 * the scratch memory.
 */
const float *muon_orthogonalize(const struct gemm *gemm, struct muon_shape shape, const float *matrix,
                                const struct hyper *hyper, float *scratch, const struct muon_parts *parts);
