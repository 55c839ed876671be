/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Matrix products in fp32 by OpenBLAS. The library is no part of zerod, and is loaded when a job needs it. Each call
 * computes with the calling thread alone. For equal operands it gives equal bits on one kind of CPU; on another kind
 * OpenBLAS takes other code, and rounds elsewhere.
 *
 * That is so in OpenBLAS's build for POSIX threads. In the one for OpenMP each call has threads of its own; the one
 * without threads need not have locks for callers at the same time.
 */

#include <stddef.h>

/* What OpenBLAS holds for each thread that calls it, on top of the operands: packed pieces of them; picked. */
#define GEMM_THREAD_BYTES (32u << 20)

/* Functions of the C interface to BLAS, as netlib's cblas.h declares them; the enums are int there. */
struct gemm {
    /* c = alpha a b + beta c */
    void (*sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                  const float *b, int ldb, float beta, float *c, int ldc);
    /* c = alpha a a' + beta c, or alpha a' a + beta c if trans; one triangle of c */
    void (*ssyrk)(int order, int uplo, int trans, int n, int k, float alpha, const float *a, int lda, float beta,
                  float *c, int ldc);
};

/* Most threads that may call it at a time: any build has buffers for so many. */
enum { GEMM_MAX_CALLERS = 32 };

enum {
    GEMM_ROW_MAJOR = 101,
    GEMM_NO_TRANS = 111,
    GEMM_TRANS = 112,
    GEMM_UPPER = 121,
};

/* In a process that calls this while it has one thread, the library starts none. */
void gemm_one_thread(void);

/*
 * Loads the library, once in a process; by any thread, but by one at a time.
 * Return: 0; -ENOENT with a sentence in err: there is none, or only another build.
 */
int gemm_load(const struct gemm **out, char *err, size_t err_size);
