/* SPDX-License-Identifier: Apache-2.0 */

/* The state that all files of emulated kernels share: the indices of the running block and thread, and the switch that
 * reverses the order of blocks and threads. */

#include "kernels/cuda/block.h"

bool emulated_backwards;

__thread struct emulated_index blockIdx, threadIdx;
