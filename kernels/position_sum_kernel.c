/* SPDX-License-Identifier: Apache-2.0 */
/* The position sum of a gradient without a reduction; compiled once per instruction set. */

#include "kernels/position_sum_kernel.h"

#include <assert.h>

static always_inline void update(struct position_sum *sum, enum dtype dtype, const void *elems, size_t n_elems,
                                 size_t start_elem)
{
    size_t n_runs = n_elems / POSITION_RUN_ELEMS, n_left = n_elems % POSITION_RUN_ELEMS;
    struct position_piece piece = {0};

    position_piece_add(&piece, dtype, elems, n_runs);
    if (n_left > 0) {
        uint64_t padded[POSITION_RUN_ELEMS * 4 / 8] = {0};
        const char *left = (const char *)elems + n_runs * POSITION_RUN_ELEMS * dtype_size(dtype);

        memcpy(padded, left, n_left * dtype_size(dtype));
        position_piece_add(&piece, dtype, padded, 1);
        n_runs++;
    }
    position_piece_close(&piece, start_elem / POSITION_RUN_ELEMS, n_runs, sum);
}

void ISA_FN(position_sum_update)(struct position_sum *sum, enum dtype dtype, const void *elems, size_t n_elems,
                                 size_t start_elem)
{
    assert(start_elem % POSITION_RUN_ELEMS == 0);
    if (dtype == DTYPE_F32)
        update(sum, DTYPE_F32, elems, n_elems, start_elem);
    else
        update(sum, DTYPE_BF16, elems, n_elems, start_elem); /* any 16-bit type */
}
