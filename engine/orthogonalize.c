/* SPDX-License-Identifier: Apache-2.0 */

/* Newton-Schulz iterations on one matrix, on a GPU. */

#include "engine/orthogonalize.h"

#include <stdio.h>

/* The arguments that all steps of one matrix share. */
struct work {
    const struct orthogonalizer *o;
    int rows, cols, side; /* side: the shorter one */
    struct muon_scratch scratch;
    char *err;
    size_t err_size;
};

/* ---- errors ------------------------------------------------------------------------------------------------ */

/* Return: true if r is a success. */
static bool check_cuda(cudaError_t r, const char *what, char *err, size_t err_size)
{
    if (r != cudaSuccess)
        snprintf(err, err_size, "%s: %s (%s)", what, cudaGetErrorString(r), cudaGetErrorName(r));
    return r == cudaSuccess;
}

static bool check_cublas(const struct cublas *cublas, int status, const char *what, char *err, size_t err_size)
{
    if (status != CUBLAS_STATUS_SUCCESS)
        snprintf(err, err_size, "cuBLAS: %s: %s (status %d)", what, cublas->get_status_string(status), status);
    return status == CUBLAS_STATUS_SUCCESS;
}

/* ---- setup ------------------------------------------------------------------------------------------------- */

static bool set_modes(const struct orthogonalizer *o, char *err, size_t err_size)
{
    const struct cublas *cublas = o->cublas;

    return check_cublas(cublas, cublas->set_stream(o->handle, o->stream), "cublasSetStream", err, err_size) &&
           check_cublas(cublas, cublas->set_workspace(o->handle, o->workspace, CUBLAS_WORKSPACE_BYTES),
                        "cublasSetWorkspace", err, err_size) &&
           check_cublas(cublas, cublas->set_math_mode(o->handle, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode", err,
                        err_size) &&
           check_cublas(cublas, cublas->set_atomics_mode(o->handle, CUBLAS_ATOMICS_NOT_ALLOWED), "cublasSetAtomicsMode",
                        err, err_size);
}

bool orthogonalizer_open(struct orthogonalizer *o, const struct cublas *cublas, cudaStream_t stream, char *err,
                         size_t err_size)
{
    void *sums = NULL;

    *o = (struct orthogonalizer){.cublas = cublas, .stream = stream};
    if (!check_cublas(cublas, cublas->create(&o->handle), "cublasCreate", err, err_size) ||
        !check_cuda(cudaMalloc(&o->workspace, CUBLAS_WORKSPACE_BYTES), "cudaMalloc", err, err_size) ||
        !check_cuda(cudaMalloc(&sums, DEVICE_NORM_SUMS * sizeof(double)), "cudaMalloc", err, err_size))
        return false;
    o->sums = sums;
    return set_modes(o, err, err_size);
}

bool orthogonalizer_warm(const struct orthogonalizer *o, struct muon_shape shape, float *scratch, char *err,
                         size_t err_size)
{
    const struct hyper hyper = {.eps = 1, .ns_coefficients = {1, 1, 1}, .ns_steps = 1};
    const size_t n_bytes = muon_scratch_elems(shape) * sizeof(float);

    return check_cuda(cudaMemsetAsync(scratch, 0, n_bytes, o->stream), "cudaMemsetAsync", err, err_size) &&
           orthogonalize(o, shape, muon_divide_scratch(shape, scratch).next, &hyper, scratch, err, err_size);
}

/* ---- steps ------------------------------------------------------------------------------------------------- */

static bool normalize(const struct work *w, const float *matrix, double eps)
{
    const struct device_normalize list = {.x = w->scratch.x,
                                          .matrix = matrix,
                                          .sums = w->o->sums,
                                          .n_elems = (uint64_t)w->rows * (uint64_t)w->cols,
                                          .eps = eps};

    return check_cuda((cudaError_t)device_normalize(w->o->stream, &list), "device_normalize", w->err, w->err_size);
}

static bool copy_matrix(const struct work *w, float *to, const float *from, int rows, int cols)
{
    const size_t n_bytes = (size_t)rows * (size_t)cols * sizeof(float);

    return check_cuda(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDeviceToDevice, w->o->stream), "cudaMemcpyAsync",
                      w->err, w->err_size);
}

/* c (m x n) = alpha a b + beta c, stored column after column without gaps. */
static bool multiply(const struct work *w, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a,
                     const float *b, float beta, float *c)
{
    const struct orthogonalizer *o = w->o;
    const int lda = trans_a == CUBLAS_OP_T ? k : m, ldb = trans_b == CUBLAS_OP_T ? n : k;

    return check_cublas(o->cublas,
                        o->cublas->sgemm(o->handle, trans_a, trans_b, m, n, k, &alpha, a, lda, b, ldb, &beta, c, m),
                        "cublasSgemm", w->err, w->err_size);
}

/*
 * An iteration of muon_orthogonalize(). A matrix that is stored row after row is its own transpose for cuBLAS. So for
 * cuBLAS x has `cols` rows and `rows` columns, and the operands of products are swapped. gram and polynomial are
 * symmetric.
 */
static bool iterate(const struct work *w, const double *ns)
{
    const struct muon_scratch *s = &w->scratch;
    const int rows = w->rows, cols = w->cols, side = w->side;
    const float a = (float)ns[0], b = (float)ns[1], c = (float)ns[2];
    const bool is_wide = rows <= cols;

    return (is_wide ? multiply(w, CUBLAS_OP_T, CUBLAS_OP_N, side, side, cols, 1, s->x, s->x, 0, s->gram)
                    : multiply(w, CUBLAS_OP_N, CUBLAS_OP_T, side, side, rows, 1, s->x, s->x, 0, s->gram)) &&
           copy_matrix(w, s->polynomial, s->gram, side, side) &&
           multiply(w, CUBLAS_OP_N, CUBLAS_OP_N, side, side, side, c, s->gram, s->gram, b, s->polynomial) &&
           copy_matrix(w, s->next, s->x, rows, cols) &&
           (is_wide ? multiply(w, CUBLAS_OP_N, CUBLAS_OP_N, cols, rows, side, 1, s->x, s->polynomial, a, s->next)
                    : multiply(w, CUBLAS_OP_N, CUBLAS_OP_N, cols, rows, side, 1, s->polynomial, s->x, a, s->next));
}

const float *orthogonalize(const struct orthogonalizer *o, struct muon_shape shape, const float *matrix,
                           const struct hyper *hyper, float *scratch, char *err, size_t err_size)
{
    const uint64_t side = shape.rows < shape.cols ? shape.rows : shape.cols;
    struct work w = {o,   (int)shape.rows, (int)shape.cols, (int)side, muon_divide_scratch(shape, scratch),
                     err, err_size};
    float *last;

    if (!normalize(&w, matrix, hyper->eps))
        return NULL;
    for (unsigned i = 0; i < hyper->ns_steps; i++) {
        if (!iterate(&w, hyper->ns_coefficients))
            return NULL;
        last = w.scratch.x;
        w.scratch.x = w.scratch.next;
        w.scratch.next = last;
    }
    return w.scratch.x;
}
