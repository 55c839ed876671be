/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Element types of gradients and weights. The numbers are those of enum zerod_dtype in zerod/client.h. */

#include <stddef.h>

enum dtype {
    DTYPE_F32 = 0,
    DTYPE_BF16 = 1,
    DTYPE_F16 = 2,
    N_DTYPES,
};

static inline size_t dtype_size(enum dtype dtype)
{
    return dtype == DTYPE_F32 ? 4 : 2;
}
