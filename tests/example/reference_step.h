/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One optimizer step in one process, in the plainest possible code: the sums, the norm, the scale and AdamW of
 * docs/numerics.md. It is written from that page alone and shares no code with the daemon. From the same gradients its
 * results must be bit-equal to the daemon's.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One parameter; the arrays have n_elems floats and belong to the caller. */
struct reference_param {
    size_t n_elems;
    float *weight;
    float *acc; /* gradient sum of the step; the caller clears it */
    float *exp_avg;
    float *exp_avg_sq;
};

struct reference_adamw {
    double lr, beta1, beta2, eps, weight_decay;
    double max_norm;
    uint64_t t; /* number of applied steps, including this one */
    unsigned n_ranks;
};

/* A sum of doubles without rounding. It is kept as partial sums that do not overlap, the smallest first. */
#define EXACT_SUM_PARTIALS 48 /* largest to smallest double: 2,100 bits, 53 in each */

struct exact_sum {
    double partials[EXACT_SUM_PARTIALS];
    unsigned n_partials;
};

void exact_sum_add(struct exact_sum *s, double x);

/* Return: the sum, rounded once to nearest even. */
double exact_sum_round(const struct exact_sum *s);

/* acc += the sum over all ranks, added in the order of the fixed tree. grads[r] has n_elems floats. */
void reference_accumulate(float *acc, const float *const *grads, unsigned n_ranks, size_t n_elems);

/* One complete AdamW step. Return: false if the norm is not finite; the step is then skipped. */
bool reference_step(const struct reference_param *params, unsigned n_params, const struct reference_adamw *a,
                    double *norm);
