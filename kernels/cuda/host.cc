/* SPDX-License-Identifier: Apache-2.0 */

/* The switches by which tests reverse the order of emulated blocks and threads, and end a kernel in its midst. */

#include "kernels/cuda/block.h"

#include <signal.h>

static void end_process(void)
{
    (void)raise(SIGKILL);
}

bool emulated_backwards;
uint64_t emulated_turns;
void (*emulated_stop)(void) = end_process;
