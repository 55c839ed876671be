/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/daemon/engines/device-machine.h"

#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_runtime_api.h"
#include "tests/sim/sim.h"

static sem_t held;

/* This process reads ZEROD_SIM now. Later values, from machine_set(), are for engines. */
bool machine_open(void)
{
    int n = 0;

    return cudaGetDeviceCount(&n) == cudaSuccess;
}

/* Return: whether ZEROD_TEST_GPU=one asks for tests as on a machine with one GPU. */
static bool is_like_one_gpu(void)
{
    const char *kind = getenv("ZEROD_TEST_GPU");

    return kind && strcmp(kind, "one") == 0;
}

unsigned machine_n_gpus(void)
{
    return is_like_one_gpu() ? 1 : 4;
}

const char *machine_prefix(void)
{
    return "sim, CUDA ";
}

bool machine_has_faults(void)
{
    return !is_like_one_gpu();
}

/* Gives each engine another seed, so that the simulated GPUs of any two engines work in different orders. */
void machine_set(unsigned node, const char *fault)
{
    static unsigned seed;
    char items[256];

    (void)node;
    snprintf(items, sizeof(items), "never-blocks,devices=%u,seed=%u%s%s", machine_n_gpus(), ++seed, fault ? "," : "",
             fault ? fault : "");
    setenv("ZEROD_SIM", items, 1);
}

static void wait_until_let_go(void *unused)
{
    (void)unused;
    while (sem_wait(&held) < 0)
        continue;
}

void machine_hold(struct CUstream_st *stream)
{
    if (sem_init(&held, 0, 0) < 0 || sim_launch(stream, wait_until_let_go, NULL, NULL) != 0)
        abort();
}

void machine_let_go(void)
{
    (void)sem_post(&held);
}
