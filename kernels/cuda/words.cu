/* SPDX-License-Identifier: Apache-2.0 */

/* Writes several words in one launch, which takes as long as a small copy of one word. The words are arguments of the
 * kernel, so they need no device memory. */

#include "kernels/cuda/block.h"

static __global__ void words_kernel(struct device_words list)
{
    for (phase threads; threads.next();) {
        if (threadIdx.x != 0)
            continue;
#pragma unroll 1
        for (unsigned i = 0; i < list.n; i++) {
            *static_cast<volatile uint64_t *>(in_global(list.words[i].at)) = list.words[i].value;
            system_fence();
        }
    }
}

int device_write_words(struct CUstream_st *stream, const struct device_words *words)
{
    return device_launch(stream, words_kernel, words->n > 0 ? 1 : 0, *words);
}

int load_words(void)
{
    return load_kernels(words_kernel);
}
