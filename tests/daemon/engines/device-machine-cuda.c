/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/daemon/engines/device-machine.h"

#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>

#include <cuda_runtime_api.h>

static int n_gpus;
static sem_t held;

bool machine_open(void)
{
    cudaError_t r = cudaGetDeviceCount(&n_gpus);

    if (r == cudaSuccess && n_gpus > 0)
        return true;
    fprintf(stderr, "no GPU: %s\n", r == cudaSuccess ? "none is visible" : cudaGetErrorString(r));
    return false;
}

unsigned machine_n_gpus(void)
{
    return (unsigned)n_gpus;
}

const char *machine_prefix(void)
{
    return "CUDA ";
}

bool machine_has_faults(void)
{
    return false;
}

/*
 * The engines of all nodes share this machine's GPUs. NCCL refuses that within one host, so each node gets a host id.
 */
void machine_set(unsigned node, const char *fault)
{
    char host[32];

    (void)fault;
    snprintf(host, sizeof(host), "zerod-test-%u", node);
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
}

static void wait_until_let_go(void *unused)
{
    (void)unused;
    while (sem_wait(&held) < 0)
        continue;
}

void machine_hold(struct CUstream_st *stream)
{
    if (sem_init(&held, 0, 0) < 0 || cudaLaunchHostFunc(stream, wait_until_let_go, NULL) != cudaSuccess)
        abort();
}

void machine_let_go(void)
{
    (void)sem_post(&held);
}
