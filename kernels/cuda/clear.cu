/* SPDX-License-Identifier: Apache-2.0 */

/* Sets results to zero before blocks add to them. One launch of a kernel clears all arrays, but cudaMemsetAsync() would
 * need one call per array. */

#include "kernels/cuda/block.h"

enum {
    CLEAR_BLOCK_WORDS = 4096,
};

static __global__ void clear_kernel(struct clear_list list)
{
    for (phase threads; threads.next();) {
        const uint64_t begin = static_cast<uint64_t>(blockIdx.x) * CLEAR_BLOCK_WORDS;

        for (unsigned i = 0; i < CLEAR_ARRAYS; i++) {
            for (uint64_t at = begin + threadIdx.x; at < begin + CLEAR_BLOCK_WORDS; at += BLOCK_THREADS) {
                if (list.words[i] && at < list.n_words[i])
                    in_global(list.words[i])[at] = 0;
            }
        }
    }
}

int device_clear(struct CUstream_st *stream, const struct clear_list *list)
{
    uint64_t most = 0;

    for (unsigned i = 0; i < CLEAR_ARRAYS; i++) {
        if (list->words[i] && list->n_words[i] > most)
            most = list->n_words[i];
    }
    return device_launch(stream, clear_kernel,
                         static_cast<uint32_t>((most + CLEAR_BLOCK_WORDS - 1) / CLEAR_BLOCK_WORDS), *list);
}

int load_clear(void)
{
    return load_kernels(clear_kernel);
}
