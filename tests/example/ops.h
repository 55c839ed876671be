/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The arithmetic of the example model: one matrix product and the few row-wise
 * functions of a transformer, each with its backward.
 *
 * Every result is a sum in one fixed order, element by element, so that the
 * trainer and the single-process reference get the same bits from the same
 * batch. Nothing here allocates or fails. Counts are elements.
 */

#include <stddef.h>
#include <stdint.h>

/* A matrix in memory: element (i, j) is at[i * row + j * col]. */
struct mat {
    const float *at;
    size_t row;
    size_t col;
};

/* The product's rows must be a multiple of MATMUL_ROWS, its columns a multiple of MATMUL_COLS. */
#define MATMUL_ROWS 4
#define MATMUL_COLS 8

struct matmul {
    struct mat a;     /* rows x depth, any strides */
    struct mat b;     /* depth x cols, col must be 1 */
    struct mat start; /* rows x cols, initial sums, col must be 1; at is NULL: zeros; row is 0: the same row for all */
    unsigned rows, depth, cols;
};

/* out = start + a b. out has the row stride out_row and may be the memory of start. */
void matmul(float *out, size_t out_row, const struct matmul *mm);

/* out (cols x rows, dense) = transpose of in (rows x cols, col must be 1). */
void transpose(float *out, struct mat in, unsigned rows, unsigned cols);

/* out[j] = sum over rows of in[i][j]. */
void sum_rows(float *out, const float *in, unsigned rows, unsigned cols);

/* out[i] += in[i] */
void add_to(float *out, const float *in, size_t n_elems);

/* Normalises each row; mean and rstd (rows each) are kept for the backward. */
void layernorm_forward(float *out, float *mean, float *rstd, const float *in, const float *weight, const float *bias,
                       unsigned rows, unsigned cols);

/* The gradient of the bias is sum_rows() of d_out. */
void layernorm_backward_weight(float *d_weight, const float *d_out, const float *in, const float *mean,
                               const float *rstd, unsigned rows, unsigned cols);

/* d_in += gradient of the input. */
void layernorm_backward_input(float *d_in, const float *d_out, const float *in, const float *weight, const float *mean,
                              const float *rstd, unsigned rows, unsigned cols);

/* In place on n x n scores: row i becomes the softmax of its first i + 1 entries times scale, then zeros. */
void softmax_causal_forward(float *scores, float scale, unsigned n);

/* In place: gradients of probabilities become gradients of scores. */
void softmax_causal_backward(float *d_probs, const float *probs, float scale, unsigned n);

/* Squared ReLU: max(x, 0)^2. Needs no function of libm. */
void relu2_forward(float *out, const float *in, size_t n_elems);
/* In place: the gradient of the output becomes that of the input. */
void relu2_backward(float *d, const float *in, size_t n_elems);

/* In place: logits become probabilities. Return: the mean of -log(probability of the target). */
double cross_entropy_forward(float *logits, const uint8_t *targets, unsigned rows, unsigned cols);

/* d_logits = (probs - one-hot of targets) * scale / rows. */
void cross_entropy_backward(float *d_logits, const float *probs, const uint8_t *targets, double scale, unsigned rows,
                            unsigned cols);
