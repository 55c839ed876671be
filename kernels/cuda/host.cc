/* SPDX-License-Identifier: Apache-2.0 */

/* The switch by which tests reverse the order of emulated blocks and threads. */

#include "kernels/cuda/block.h"

bool emulated_backwards;
