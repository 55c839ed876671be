/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/device-machine.h"

#include <stdio.h>
#include <stdlib.h>

/* The stand-ins of this process read it at the first call: the trainer's copies are slow. */
bool machine_open(void)
{
    return setenv("ZEROD_SIM", "cudaMemcpyAsync:delay=1500", 1) == 0;
}

unsigned machine_n_gpus(void)
{
    return 4; /* unless told otherwise, see sim.h */
}

bool machine_is_sim(void)
{
    return true;
}

/* No two engines of a program have their devices do things in the same order. */
void machine_set(unsigned node, const char *fault)
{
    static unsigned seed;
    char items[256];

    (void)node;
    snprintf(items, sizeof(items), "seed=%u%s%s", ++seed, fault ? "," : "", fault ? fault : "");
    setenv("ZEROD_SIM", items, 1);
}

void machine_slow(struct CUstream_st *stream)
{
    (void)stream;
}
