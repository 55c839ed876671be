/* SPDX-License-Identifier: Apache-2.0 */

/* Newton-Schulz iterations on one matrix, on one thread. */

#include "kernels/muon.h"

#include <math.h>
#include <stdbool.h>

enum { ALIGN_ELEMS = 16 }; /* 64 bytes */

static uint64_t shorter(struct muon_shape shape)
{
    return shape.rows < shape.cols ? shape.rows : shape.cols;
}

static uint64_t align(uint64_t n_elems)
{
    return (n_elems + ALIGN_ELEMS - 1) / ALIGN_ELEMS * ALIGN_ELEMS;
}

uint64_t muon_scratch_elems(struct muon_shape shape)
{
    uint64_t side = shorter(shape);

    return 2 * (align(shape.rows * shape.cols) + align(side * side));
}

struct muon_scratch muon_divide_scratch(struct muon_shape shape, float *scratch)
{
    const uint64_t n = align(shape.rows * shape.cols), n_square = align(shorter(shape) * shorter(shape));
    float *gram = scratch + 2 * n;

    return (struct muon_scratch){.x = scratch, .next = scratch + n, .gram = gram, .polynomial = gram + n_square};
}

/* An iteration has two products of a matrix with its transpose, computed only half, and one whole product. */
double muon_flops(struct muon_shape shape, unsigned ns_steps)
{
    double side = (double)shorter(shape), other = (double)shape.rows * (double)shape.cols / side;

    return ns_steps * (side * side * other + side * side * side + 2 * side * side * other);
}

double muon_lr_factor(struct muon_shape shape, enum muon_adjust_lr how)
{
    double rows = (double)shape.rows, cols = (double)shape.cols;

    return how == MUON_MATCH_RMS_ADAMW ? 0.2 * sqrt(fmax(rows, cols)) : sqrt(fmax(1, rows / cols));
}

/* The Frobenius norm, from eight sums of every eighth square, so that an addition does not wait for the previous
 * one. */
static double norm(const float *elems, uint64_t n)
{
    enum { LANES = 8 };

    double sums[LANES] = {0}, sum = 0;

    for (uint64_t i = 0; i < n; i++)
        sums[i % LANES] += (double)elems[i] * (double)elems[i];
    for (unsigned i = 0; i < LANES; i++)
        sum += sums[i];
    return sqrt(sum);
}

/* Copies the elements above the diagonal to below it, in blocks that fit into the nearest cache. */
static void mirror(float *square, uint64_t side)
{
    enum { BLOCK = 64 };

    for (uint64_t top = 0; top < side; top += BLOCK)
        for (uint64_t left = 0; left <= top; left += BLOCK)
            for (uint64_t row = top; row < side && row < top + BLOCK; row++)
                for (uint64_t col = left; col < row && col < left + BLOCK; col++)
                    square[row * side + col] = square[col * side + row];
}

/* ---- products ---------------------------------------------------------------------------------------------- */

/* The arguments that all products of one matrix share. */
struct products {
    const struct gemm *gemm;
    int rows, cols, side; /* side: the shorter one */
    const struct muon_parts *parts;
};

static void end_part(const struct products *p)
{
    if (p->parts)
        atomic_fetch_add_explicit(p->parts->n_ended, 1, memory_order_relaxed);
}

/* A product has n slices of slice_flops operations each. Return: the number of slices in a part of the product. */
static int part_of(const struct products *p, int n, double slice_flops)
{
    enum { LEAST = 256 }; /* picked: products of fewer slices are slow */

    double most = p->parts ? fmax(p->parts->most / slice_flops, LEAST) : n;

    return most < n ? (int)most : n;
}

/* Computes the upper triangle of square = alpha a a' + beta square, where a is side x n. With trans, adds alpha a' a
 * instead, where a is n x side. */
static void multiply_by_transpose(const struct products *p, bool trans, int n, float alpha, const float *a, int lda,
                                  float beta, float *square)
{
    const int part = part_of(p, n, (double)p->side * p->side);

    for (int at = 0, taken; at < n; at += taken) {
        taken = n - at < part ? n - at : part;
        p->gemm->ssyrk(GEMM_ROW_MAJOR, GEMM_UPPER, trans ? GEMM_TRANS : GEMM_NO_TRANS, p->side, taken, alpha,
                       trans ? a + (size_t)at * (size_t)lda : a + at, lda, at == 0 ? beta : 1, square, p->side);
        end_part(p);
    }
}

/* next = polynomial x, or x polynomial if x has more rows than columns. */
static void apply(const struct products *p, const float *polynomial, const float *x, float *next)
{
    const bool is_wide = p->rows <= p->cols;
    const int n = is_wide ? p->cols : p->rows, part = part_of(p, n, 2.0 * p->side * p->side);

    for (int at = 0, taken; at < n; at += taken) {
        const size_t first = is_wide ? (size_t)at : (size_t)at * (size_t)p->cols;

        taken = n - at < part ? n - at : part;
        if (is_wide)
            p->gemm->sgemm(GEMM_ROW_MAJOR, GEMM_NO_TRANS, GEMM_NO_TRANS, p->rows, taken, p->side, 1, polynomial,
                           p->side, x + first, p->cols, 0, next + first, p->cols);
        else
            p->gemm->sgemm(GEMM_ROW_MAJOR, GEMM_NO_TRANS, GEMM_NO_TRANS, taken, p->side, p->side, 1, x + first, p->cols,
                           polynomial, p->side, 0, next + first, p->cols);
        end_part(p);
    }
}

/* polynomial = a I + b gram + c gram^2. gram is symmetric: the caller gives its upper triangle, and the lower triangle
 * is filled in. */
static void make_polynomial(const struct products *p, float *polynomial, float *gram, const double *ns)
{
    const uint64_t n = (uint64_t)p->side;

    mirror(gram, n);
    for (uint64_t i = 0; i < n * n; i++)
        polynomial[i] = gram[i];
    multiply_by_transpose(p, false, p->side, (float)ns[2], gram, p->side, (float)ns[1], polynomial);
    for (uint64_t i = 0; i < n; i++)
        polynomial[i * n + i] += (float)ns[0];
    mirror(polynomial, n);
}

const float *muon_orthogonalize(const struct gemm *gemm, struct muon_shape shape, const float *matrix,
                                const struct hyper *hyper, float *scratch, const struct muon_parts *parts)
{
    const struct products p = {gemm, (int)shape.rows, (int)shape.cols, (int)shorter(shape), parts};
    const struct muon_scratch s = muon_divide_scratch(shape, scratch);
    const uint64_t n = shape.rows * shape.cols;
    float *x = s.x, *next = s.next, *last;
    const float divisor = (float)fmax(norm(matrix, n), hyper->eps);

    for (uint64_t i = 0; i < n; i++)
        x[i] = matrix[i] / divisor;
    for (unsigned i = 0; i < hyper->ns_steps; i++) {
        if (p.rows <= p.cols)
            multiply_by_transpose(&p, false, p.cols, 1, x, p.cols, 0, s.gram);
        else
            multiply_by_transpose(&p, true, p.rows, 1, x, p.cols, 0, s.gram);
        make_polynomial(&p, s.polynomial, s.gram, hyper->ns_coefficients);
        apply(&p, s.polynomial, x, next);
        last = x;
        x = next;
        next = last;
    }
    return x;
}
