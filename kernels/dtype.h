/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Types of arrays. */

#include <stddef.h>

enum dtype {
    /* Types of gradients and weights, with the numbers of enum zerod_dtype in zerod/client.h. */
    DTYPE_F32 = 0,
    DTYPE_BF16 = 1,
    DTYPE_F16 = 2,
    N_DTYPES,
    /* Types of moments in memory only, in groups of GROUP8_ELEMS (kernels/group8.h). */
    DTYPE_SIGNED8 = 16,
    DTYPE_UNSIGNED8,
};

enum {
    GROUP8_ELEMS = 64,
    GROUP8_BYTES = GROUP8_ELEMS + 4,
};

static inline int dtype_is_grouped(enum dtype dtype)
{
    return dtype >= DTYPE_SIGNED8;
}

/* Bytes of an element. Not for grouped types. */
static inline size_t dtype_size(enum dtype dtype)
{
    return dtype == DTYPE_F32 ? 4 : 2;
}

/* Bytes of an array of any type. Also the offset of element n_elems, if that element begins a group. */
static inline size_t dtype_bytes(enum dtype dtype, size_t n_elems)
{
    return dtype_is_grouped(dtype) ? (n_elems + GROUP8_ELEMS - 1) / GROUP8_ELEMS * GROUP8_BYTES
                                   : n_elems * dtype_size(dtype);
}
