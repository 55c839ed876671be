/* SPDX-License-Identifier: Apache-2.0 */

/* Matrix products and row-wise functions of the example model, in one fixed order of sums. */

#include "tests/example/ops.h"

#include <math.h>
#include <string.h>

/*
 * Four floats, which fit into a vector register of every machine. Each lane is another element of the result, never a
 * part of one sum, so the width changes only the speed.
 */
typedef float vec __attribute__((vector_size(16), aligned(4), may_alias));

#define VEC_WIDTH 4
#define TILE_VECS (MATMUL_COLS / VEC_WIDTH)
#define LAYERNORM_EPS 1e-5f

/*
 * A 4 x 8 tile of the product stays in registers while depth runs. gcc does not generate this from plain loops over
 * floats (4 instead of 13 GFLOP/s, measured with gcc 12), hence the vector type and the unrolling.
 */
static void matmul_tile(float *out, size_t out_row, const struct matmul *mm, unsigned i0, unsigned j0)
{
    const float *a = mm->a.at + i0 * mm->a.row;
    const float *b = mm->b.at + j0;
    const float *start = mm->start.at ? mm->start.at + i0 * mm->start.row + j0 : NULL;
    size_t a_row = mm->a.row;
    vec acc[MATMUL_ROWS][TILE_VECS] = {};

    if (start) {
#pragma GCC unroll 4
        for (unsigned i = 0; i < MATMUL_ROWS; i++)
#pragma GCC unroll 2
            for (unsigned j = 0; j < TILE_VECS; j++)
                acc[i][j] = *(const vec *)(start + i * mm->start.row + j * VEC_WIDTH);
    }
    for (unsigned k = 0; k < mm->depth; k++) {
#pragma GCC unroll 4
        for (unsigned i = 0; i < MATMUL_ROWS; i++)
#pragma GCC unroll 2
            for (unsigned j = 0; j < TILE_VECS; j++)
                acc[i][j] += a[i * a_row] * *(const vec *)(b + j * VEC_WIDTH);
        a += mm->a.col;
        b += mm->b.row;
    }
    out += i0 * out_row + j0;
#pragma GCC unroll 4
    for (unsigned i = 0; i < MATMUL_ROWS; i++)
#pragma GCC unroll 2
        for (unsigned j = 0; j < TILE_VECS; j++)
            *(vec *)(out + i * out_row + j * VEC_WIDTH) = acc[i][j];
}

void matmul(float *out, size_t out_row, const struct matmul *mm)
{
    /*
     * The outer loop runs over columns, so that a panel of b (depth x 8) stays in the first-level cache for all rows.
     */
    for (unsigned j = 0; j < mm->cols; j += MATMUL_COLS)
        for (unsigned i = 0; i < mm->rows; i += MATMUL_ROWS)
            matmul_tile(out, out_row, mm, i, j);
}

void transpose(float *out, struct mat in, unsigned rows, unsigned cols)
{
    /* Works in squares, so that neither matrix needs a new cache line for each element. */
    for (unsigned i0 = 0; i0 < rows; i0 += 8)
        for (unsigned j0 = 0; j0 < cols; j0 += 8)
            for (unsigned i = i0; i < rows && i < i0 + 8; i++)
                for (unsigned j = j0; j < cols && j < j0 + 8; j++)
                    out[j * rows + i] = in.at[i * in.row + j];
}

void sum_rows(float *out, const float *in, unsigned rows, unsigned cols)
{
    memset(out, 0, cols * sizeof(*out));
    for (unsigned i = 0; i < rows; i++)
        add_to(out, in + (size_t)i * cols, cols);
}

void add_to(float *restrict out, const float *restrict in, size_t n_elems)
{
    for (size_t i = 0; i < n_elems; i++)
        out[i] += in[i];
}

void layernorm_forward(float *restrict out, float *mean, float *rstd, const float *restrict in,
                       const float *restrict weight, const float *restrict bias, unsigned rows, unsigned cols)
{
    for (unsigned i = 0; i < rows; i++, in += cols, out += cols) {
        float sum = 0, squares = 0, m, s;

        for (unsigned j = 0; j < cols; j++)
            sum += in[j];
        m = sum / (float)cols;
        for (unsigned j = 0; j < cols; j++)
            squares += (in[j] - m) * (in[j] - m);
        s = 1.0f / sqrtf(squares / (float)cols + LAYERNORM_EPS);
        for (unsigned j = 0; j < cols; j++)
            out[j] = (in[j] - m) * s * weight[j] + bias[j];
        mean[i] = m;
        rstd[i] = s;
    }
}

void layernorm_backward_weight(float *restrict d_weight, const float *restrict d_out, const float *restrict in,
                               const float *mean, const float *rstd, unsigned rows, unsigned cols)
{
    memset(d_weight, 0, cols * sizeof(*d_weight));
    for (unsigned i = 0; i < rows; i++, in += cols, d_out += cols)
        for (unsigned j = 0; j < cols; j++)
            d_weight[j] += d_out[j] * ((in[j] - mean[i]) * rstd[i]);
}

void layernorm_backward_input(float *restrict d_in, const float *restrict d_out, const float *restrict in,
                              const float *restrict weight, const float *mean, const float *rstd, unsigned rows,
                              unsigned cols)
{
    for (unsigned i = 0; i < rows; i++, in += cols, d_out += cols, d_in += cols) {
        float sum = 0, dot = 0;

        for (unsigned j = 0; j < cols; j++) {
            float d_norm = d_out[j] * weight[j];

            sum += d_norm;
            dot += d_norm * ((in[j] - mean[i]) * rstd[i]);
        }
        sum /= (float)cols;
        dot /= (float)cols;
        for (unsigned j = 0; j < cols; j++) {
            float norm = (in[j] - mean[i]) * rstd[i];

            d_in[j] += (d_out[j] * weight[j] - sum - norm * dot) * rstd[i];
        }
    }
}

/* In place: softmax of n values times scale. */
static void softmax_row(float *row, float scale, unsigned n)
{
    float max = row[0], sum = 0;

    for (unsigned j = 1; j < n; j++)
        max = row[j] > max ? row[j] : max;
    for (unsigned j = 0; j < n; j++) {
        row[j] = expf((row[j] - max) * scale);
        sum += row[j];
    }
    for (unsigned j = 0; j < n; j++)
        row[j] /= sum;
}

void softmax_causal_forward(float *scores, float scale, unsigned n)
{
    for (unsigned i = 0; i < n; i++, scores += n) {
        softmax_row(scores, scale, i + 1);
        memset(scores + i + 1, 0, (n - i - 1) * sizeof(*scores));
    }
}

void softmax_causal_backward(float *restrict d_probs, const float *restrict probs, float scale, unsigned n)
{
    for (unsigned i = 0; i < n; i++, d_probs += n, probs += n) {
        float dot = 0;

        for (unsigned j = 0; j <= i; j++)
            dot += probs[j] * d_probs[j];
        for (unsigned j = 0; j <= i; j++)
            d_probs[j] = probs[j] * (d_probs[j] - dot) * scale;
        memset(d_probs + i + 1, 0, (n - i - 1) * sizeof(*d_probs));
    }
}

void relu2_forward(float *restrict out, const float *restrict in, size_t n_elems)
{
    for (size_t i = 0; i < n_elems; i++) {
        float x = in[i] > 0 ? in[i] : 0;

        out[i] = x * x;
    }
}

void relu2_backward(float *restrict d, const float *restrict in, size_t n_elems)
{
    for (size_t i = 0; i < n_elems; i++) {
        float x = in[i] > 0 ? in[i] : 0;

        d[i] *= x + x;
    }
}

double cross_entropy_forward(float *logits, const uint8_t *targets, unsigned rows, unsigned cols)
{
    double loss = 0;

    for (unsigned i = 0; i < rows; i++, logits += cols) {
        softmax_row(logits, 1.0f, cols);
        loss -= log((double)logits[targets[i]]);
    }
    return loss / rows;
}

void cross_entropy_backward(float *restrict d_logits, const float *restrict probs, const uint8_t *targets, double scale,
                            unsigned rows, unsigned cols)
{
    float s = (float)(scale / rows);

    for (unsigned i = 0; i < rows; i++, d_logits += cols, probs += cols)
        for (unsigned j = 0; j < cols; j++)
            d_logits[j] = (probs[j] - (j == targets[i] ? 1.0f : 0.0f)) * s;
}
