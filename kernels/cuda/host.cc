/* SPDX-License-Identifier: Apache-2.0 */

/* What all files of emulated kernels share: which block and thread runs, and the switch that reverses their order. */

#include "kernels/cuda/block.h"

bool emulated_backwards;

__thread struct emulated_index blockIdx, threadIdx;
