/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Matrix products in fp32 by OpenBLAS. The library is not part of zerod, and is loaded when a job needs it. Each call
 * computes only with the calling thread. Equal operands give equal bits on one kind of CPU. On another kind OpenBLAS
 * uses other code, which rounds at other places.
 *
 * Only OpenBLAS's build for POSIX threads computes in the calling thread alone and is safe for concurrent callers, so
 * zerod uses no other build. With the build for OpenMP each call starts threads. The build without threads may lack the
 * locks that concurrent callers need.
 */

#include <stddef.h>

/* Picked: bytes of the buffers into which OpenBLAS copies operands, for each calling thread. */
#define GEMM_THREAD_BYTES (32u << 20)

/* Functions of the C interface to BLAS, as netlib's cblas.h declares them; cblas.h has enums where these functions have
 * int. */
struct gemm {
    /* c = alpha a b + beta c */
    void (*sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                  const float *b, int ldb, float beta, float *c, int ldc);
    /* One triangle of c = alpha a a' + beta c; with trans, of c = alpha a' a + beta c. */
    void (*ssyrk)(int order, int uplo, int trans, int n, int k, float alpha, const float *a, int lda, float beta,
                  float *c, int ldc);
};

/* The most concurrent callers, because each build of OpenBLAS has buffers for this number of callers. */
enum { GEMM_MAX_CALLERS = 32 };

enum {
    GEMM_ROW_MAJOR = 101,
    GEMM_NO_TRANS = 111,
    GEMM_TRANS = 112,
    GEMM_UPPER = 121,
};

/* Call it while the process has one thread. It makes the library start no threads when it is loaded. */
void gemm_one_thread(void);

/* Loads the library at the first call. Any thread may call it, but only one at a time. Return: 0; or -ENOENT with a
 * sentence in err if there is no library or only another build. */
int gemm_load(const struct gemm **out, char *err, size_t err_size);
