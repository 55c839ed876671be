/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/host.h"

bool emulated_backwards;
