/* SPDX-License-Identifier: Apache-2.0 */

/* Loads all kernels early. By default a driver loads a kernel at its first launch, and may then wait until the device
 * is idle. */

#include "kernels/cuda/block.h"

int device_load_kernels(void)
{
    int (*const files[])(void) = {load_clear, load_convert, load_muon, load_reduce, load_update, load_words};
    int r = 0;

    for (unsigned i = 0; i < sizeof(files) / sizeof(files[0]) && r == 0; i++)
        r = files[i]();
    return r;
}
