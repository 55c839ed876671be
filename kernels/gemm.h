/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Matrix products in fp32 by OpenBLAS. The library is no part of zerod, and is loaded when a job needs it. Each call
 * computes with the calling thread alone. For equal operands it gives equal bits on one kind of CPU; on another kind
 * OpenBLAS takes other code, and rounds elsewhere.
 *
 * That holds for OpenBLAS's build for POSIX threads, and no other is taken. With the build for OpenMP each call starts
 * threads. The build without threads may lack the locks that several callers at a time need.
 */

#include <stddef.h>

/* OpenBLAS copies pieces of the operands into buffers: so many bytes for each thread that calls it. Picked. */
#define GEMM_THREAD_BYTES (32u << 20)

/* Functions of the C interface to BLAS, as netlib's cblas.h declares them; the enums are int there. */
struct gemm {
    /* c = alpha a b + beta c */
    void (*sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                  const float *b, int ldb, float beta, float *c, int ldc);
    /* One triangle of c = alpha a a' + beta c; with trans of c = alpha a' a + beta c. */
    void (*ssyrk)(int order, int uplo, int trans, int n, int k, float alpha, const float *a, int lda, float beta,
                  float *c, int ldc);
};

/* How many threads may call it at a time. Each build of OpenBLAS has buffers for so many. */
enum { GEMM_MAX_CALLERS = 32 };

enum {
    GEMM_ROW_MAJOR = 101,
    GEMM_NO_TRANS = 111,
    GEMM_TRANS = 112,
    GEMM_UPPER = 121,
};

/* To be called while the process has one thread. Then the library starts no threads when it is loaded. */
void gemm_one_thread(void);

/*
 * Loads the library, if that was not done yet. Any thread, but one at a time.
 * Return: 0; -ENOENT with a sentence in err: there is none, or only another build.
 */
int gemm_load(const struct gemm **out, char *err, size_t err_size);
