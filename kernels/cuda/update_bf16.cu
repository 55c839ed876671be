/* SPDX-License-Identifier: Apache-2.0 */

/* The optimizers with moments in bf16. */

#include "kernels/cuda/update_kernels.h"

#define BOTH(optimizer, masters)                                                                                       \
    {                                                                                                                  \
        update_kernel<optimizer, DTYPE_BF16, masters>, undo_kernel<optimizer, DTYPE_BF16, masters>                     \
    }

update_kernels update_kernels_bf16 = UPDATE_KERNELS(BOTH);
