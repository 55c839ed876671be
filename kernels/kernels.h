/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The kernels of zerod on the CPU. Each *_kernel.c is plain C and is compiled once per instruction set; a table of
 * functions per instruction set is chosen when a process starts. All tables give the same bits.
 *
 * The tables are constant. Any number of threads may call every function at once. No function allocates or fails. They
 * rely on the default floating-point environment: see kernels_assert_float_env().
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
     * Muon's first pass; update[OPTIMIZER_MUON] is the second. Between them a matrix is orthogonalised (muon.h). In the
     * first pass p and acc are the summed gradient, which becomes the matrix to orthogonalise; m is the momentum
     * buffer. In the second pass acc is the orthogonalised matrix, and m is NULL.
     */
    void (*muon_momentum)(const struct update_args *args);

    /* Adds n_elems of dtype; the first is start_elem elements (a multiple of 64) after the parameter's start. See
     * position_sum.h. */
    void (*position_sum_update)(struct position_sum *sum, enum dtype dtype, const void *elems, size_t n_elems,
                                size_t start_elem);

    /* Convert n_elems of dtype to or from fp32; see convert.h. */
    void (*convert_to_f32)(float *dst, const void *src, enum dtype dtype, size_t n_elems);
    void (*convert_from_f32)(void *dst, const float *src, enum dtype dtype, size_t n_elems);
};

/*
 * Chooses the table named `isa`. If isa is NULL, chooses the table named by the environment variable ZEROD_ISA. If that
 * variable is unset or empty, chooses the widest table that this CPU runs.
 *
 * Return: 0; or, with a sentence in err, -EINVAL for an unknown name or -ENOTSUP for a table that this CPU does not
 * run.
 */
int kernels_select(const struct kernels **out, const char *isa, char *err, size_t err_size);

/* Return: the i-th table that this CPU runs, the narrowest first; or NULL after the last. At least one exists. */
const struct kernels *kernels_nth(unsigned i);

/*
 * Checks that the calling thread rounds to nearest even, and neither flushes subnormals nor reads them as zero. A
 * library linked with -ffast-math changes this for a whole process when it is loaded. Workers call this function when
 * they start.
 *
 * Return: 0, or -ENOTSUP with a sentence in err.
 */
int kernels_assert_float_env(char *err, size_t err_size);
