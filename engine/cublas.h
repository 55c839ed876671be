/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Matrix products in fp32 by cuBLAS. The library is not part of zerod, and is loaded when a job needs it.
 *
 * By NVIDIA's documentation (cuBLAS, "Results Reproducibility") equal operands give equal bits with one version of the
 * library, on GPUs of one architecture with the same number of processors, if each stream has a workspace of its own.
 * CUBLAS_PEDANTIC_MATH is plain fp32, without tensor cores ("cublasMath_t", "Tensor Core Usage").
 */

#include <stddef.h>

struct CUstream_st;   /* what cudaStream_t points to */
struct cublasContext; /* what cublasHandle_t points to */

/* Values of the enums of cublas_api.h, which its functions take as int. */
enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_OP_N = 0,
    CUBLAS_OP_T = 1,
    CUBLAS_ATOMICS_NOT_ALLOWED = 0,
    CUBLAS_PEDANTIC_MATH = 2,
};

/* NVIDIA recommends this size for all architectures from sm_90 on, and 4 MiB for earlier architectures. */
#define CUBLAS_WORKSPACE_BYTES (32u << 20)

/* Functions of cublas_api.h. Each returns a status. Matrices are stored column after column; scalars are in host
 * memory. */
struct cublas {
    int (*create)(struct cublasContext **handle);
    int (*destroy)(struct cublasContext *handle);
    int (*get_version)(struct cublasContext *handle, int *version);
    /* Also resets the workspace. */
    int (*set_stream)(struct cublasContext *handle, struct CUstream_st *stream);
    int (*set_workspace)(struct cublasContext *handle, void *workspace, size_t n_bytes);
    int (*set_math_mode)(struct cublasContext *handle, int mode);
    int (*set_atomics_mode)(struct cublasContext *handle, int mode);
    /* c = alpha a b + beta c */
    int (*sgemm)(struct cublasContext *handle, int trans_a, int trans_b, int m, int n, int k, const float *alpha,
                 const float *a, int lda, const float *b, int ldb, const float *beta, float *c, int ldc);
    const char *(*get_status_string)(int status);
};

/* Loads the library at the first call. Only one thread may call it. Return: 0; or -ENOENT, with a sentence in err, if
 * no usable library is found. */
int cublas_load(const struct cublas **out, char *err, size_t err_size);
