/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The kernels of zerod on the CPU. Each *_kernel.c is plain C and is compiled once per instruction set; a
 * table of functions per instruction set is chosen when a process starts. All tables give the same bits.
 *
 * The tables are constant, every function may be called by any number of threads at once, none allocates, and
 * none fails. They rely on the default floating-point environment: see kernels_assert_float_env().
 */

#include "kernels/dtype.h"
#include "kernels/position_sum.h"
#include "kernels/reduce.h"
#include "kernels/update.h"

#include <stddef.h>

struct kernels {
    const char *isa; /* "baseline", "avx2" or "avx512" */

    /* One pass over a range of one parameter; see reduce.h. */
    void (*reduce)(const struct reduce_args *args, struct reduce_result *result);

    /* Indexed by enum optimizer. One pass over a range of one parameter; see update.h. */
    void (*update[N_OPTIMIZERS])(const struct update_args *args);

    /*
     * The first of Muon's two passes, of which update[] is the second; between them a matrix is orthogonalised
     * (muon.h). Here p and acc are the summed gradient, which is overwritten with what is to be orthogonalised; m is
     * the momentum buffer. There, acc is the orthogonalised matrix, and m is NULL.
     */
    void (*muon_momentum)(const struct update_args *args);

    /* See position_sum.h: n_elems of dtype, start_elem (a multiple of 64) from the parameter's start. */
    void (*position_sum_update)(struct position_sum *sum, enum dtype dtype, const void *elems, size_t n_elems,
                                size_t start_elem);

    /* As convert_to_f32() and convert_from_f32(): n_elems of dtype to or from fp32. */
    void (*convert_to_f32)(float *dst, const void *src, enum dtype dtype, size_t n_elems);
    void (*convert_from_f32)(void *dst, const float *src, enum dtype dtype, size_t n_elems);
};

/*
 * Chooses the table called `isa`; with NULL the one that the environment variable ZEROD_ISA names, and
 * without that variable (or with an empty one) the widest that this CPU runs.
 *
 * Return: 0; -EINVAL for an unknown name, -ENOTSUP for one that this CPU does not run, with a sentence in
 * err.
 */
int kernels_select(const struct kernels **out, const char *isa, char *err, size_t err_size);

/*
 * The i-th table that this CPU runs, the narrowest first; NULL past the last. There always is a first.
 */
const struct kernels *kernels_nth(unsigned i);

/*
 * Checks the calling thread: round to nearest even, subnormals neither flushed nor read as zero. A library
 * linked with -ffast-math changes this for a whole process when it is loaded. Workers call it when they
 * start.
 *
 * Return: 0, or -ENOTSUP with a sentence in err.
 */
int kernels_assert_float_env(char *err, size_t err_size);
