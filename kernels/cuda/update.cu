/* SPDX-License-Identifier: Apache-2.0 */

/* The optimizers with moments in fp32, and the launch of all optimizers. */

#include "kernels/cuda/update_kernels.h"

#define BOTH(optimizer, masters)                                                                                       \
    {                                                                                                                  \
        update_kernel<optimizer, DTYPE_F32, masters>, undo_kernel<optimizer, DTYPE_F32, masters>                       \
    }

update_kernels update_kernels_f32 = UPDATE_KERNELS(BOTH);

/* In the order of enum dtype; all grouped types are 8 bits. */
static update_kernels *const kernels_of_moments[] = {&update_kernels_f32, &update_kernels_bf16, &update_kernels_8bit};

int device_update(struct CUstream_st *stream, const struct device_update_list *list)
{
    const unsigned moments = dtype_is_grouped(list->moments.dtype) ? 2 : list->moments.dtype;
    const bool undo = list->undo.marks != NULL;

    return device_launch(stream, (*kernels_of_moments[moments])[list->master24][list->optimizer][undo],
                         undo ? device_update_blocks(list->n_chunks) : list->n_chunks, *list);
}

static int load_kernels_of(update_kernels &kernels)
{
    int r = 0;

    for (unsigned i = 0; r == 0 && i < 2 * DEVICE_N_UPDATES * 2; i++) {
        update_kernel_fn *kernel = kernels[i / 2 / DEVICE_N_UPDATES][i / 2 % DEVICE_N_UPDATES][i % 2];

        r = kernel ? load_kernel(kernel) : 0;
    }
    return r;
}

int load_update(void)
{
    int r = 0;

    for (unsigned i = 0; r == 0 && i < 3; i++)
        r = load_kernels_of(*kernels_of_moments[i]);
    return r;
}
