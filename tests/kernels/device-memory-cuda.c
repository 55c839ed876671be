/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/device-memory.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

bool device_open(void)
{
    int n_devices = 0;
    cudaError_t r = cudaGetDeviceCount(&n_devices);

    if (r == cudaSuccess && n_devices > 0)
        return true;
    fprintf(stderr, "no GPU: %s\n", r == cudaSuccess ? "none is visible" : cudaGetErrorString(r));
    return false;
}

void *device_memory_new(size_t n_bytes)
{
    void *memory = NULL;

    /* Pinned memory instead of managed memory, which may thrash a GPU, and which sandboxes often lack. */
    if (cudaHostAlloc(&memory, n_bytes > 0 ? n_bytes : 1, cudaHostAllocMapped) != cudaSuccess)
        abort();
    return memory;
}

void device_memory_free(void *memory)
{
    if (cudaFreeHost(memory) != cudaSuccess)
        abort();
}

int device_finish(void)
{
    return (int)cudaDeviceSynchronize();
}

bool device_stop_after(uint64_t n_turns)
{
    return false;
}

bool device_was_stopped(void)
{
    return false;
}

void device_order(bool backwards)
{
}
