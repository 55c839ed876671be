/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * An optimizer step in one process, in the plainest possible code: the sums, the
 * norm, the scale and AdamW of docs/numerics.md, written from that page alone
 * and sharing nothing with the daemon. What it computes must be bit-equal to what the
 * daemon computes from the same gradients.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One parameter; the arrays have n_elems floats and belong to the caller. */
struct reference_param {
    size_t n_elems;
    float *weight;
    float *acc; /* of the step; to be cleared by the caller */
    float *exp_avg;
    float *exp_avg_sq;
};

struct reference_adamw {
    double lr, beta1, beta2, eps, weight_decay;
    double max_norm;
    uint64_t t; /* applied steps, this one included */
    unsigned n_ranks;
};

/* A sum of doubles without rounding: partial sums that do not overlap, smallest first. */
#define EXACT_SUM_PARTIALS 48 /* 2,100 bits from largest to smallest double, 53 in each */

struct exact_sum {
    double partials[EXACT_SUM_PARTIALS];
    unsigned n_partials;
};

void exact_sum_add(struct exact_sum *s, double x);

/* Rounded to nearest even, once. */
double exact_sum_round(const struct exact_sum *s);

/* acc += the sum over ranks along the fixed tree; grads[r] has n_elems floats. */
void reference_accumulate(float *acc, const float *const *grads, unsigned n_ranks, size_t n_elems);

/* One AdamW step with everything. Return: false when the norm is not finite and the step was skipped. */
bool reference_step(const struct reference_param *params, unsigned n_params, const struct reference_adamw *a,
                    double *norm);
