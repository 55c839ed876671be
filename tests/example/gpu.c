/* SPDX-License-Identifier: Apache-2.0 */

/* A GPU for the example, used only through the CUDA driver. */

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/example/gpu.h"

enum { MAX_ALLOCATIONS = 16, STREAM_NON_BLOCKING = 1 };

typedef unsigned long long address;

struct gpu {
    void *context, *stream;
    address memory[MAX_ALLOCATIONS];
    unsigned n_memory;
    int device;

    int (*init)(unsigned flags);
    int (*get_device)(int *device, int ordinal);
    int (*retain)(void **context, int device);
    int (*release)(int device);
    int (*set_current)(void *context);
    int (*create_stream)(void **stream, unsigned flags);
    int (*destroy_stream)(void *stream);
    int (*wait)(void *stream);
    int (*alloc)(address *memory, size_t n_bytes);
    int (*free)(address memory);
    int (*put)(address to, const void *from, size_t n_bytes);
    int (*get)(void *to, address from, size_t n_bytes);
};

static int tell(const char *call, int error)
{
    if (error == 0)
        return 0;
    fprintf(stderr, "%s: error %d of the CUDA driver\n", call, error);
    return -EIO;
}

static int load(struct gpu *gpu)
{
    const char *path = getenv("ZEROD_LIBCUDA");
    void *library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const struct {
        const char *name;
        void *field;
    } calls[] = {
        {"cuInit", &gpu->init},
        {"cuDeviceGet", &gpu->get_device},
        {"cuDevicePrimaryCtxRetain", &gpu->retain},
        {"cuDevicePrimaryCtxRelease_v2", &gpu->release},
        {"cuCtxSetCurrent", &gpu->set_current},
        {"cuStreamCreate", &gpu->create_stream},
        {"cuStreamDestroy_v2", &gpu->destroy_stream},
        {"cuStreamSynchronize", &gpu->wait},
        {"cuMemAlloc_v2", &gpu->alloc},
        {"cuMemFree_v2", &gpu->free},
        {"cuMemcpyHtoD_v2", &gpu->put},
        {"cuMemcpyDtoH_v2", &gpu->get},
    };

    for (size_t i = 0; library && i < sizeof(calls) / sizeof(calls[0]); i++)
        if (!(*(void **)calls[i].field = dlsym(library, calls[i].name)))
            library = NULL;
    if (library)
        return 0;
    fprintf(stderr, "no CUDA driver: %s\n", dlerror());
    return -ENODEV;
}

int gpu_open(struct gpu **out, int device)
{
    struct gpu *gpu = *out = calloc(1, sizeof(*gpu));
    int r = gpu ? load(gpu) : -ENOMEM;

    if (r == 0)
        r = tell("cuInit", gpu->init(0));
    if (r == 0)
        r = tell("cuDeviceGet", gpu->get_device(&gpu->device, device));
    if (r == 0)
        r = tell("cuDevicePrimaryCtxRetain", gpu->retain(&gpu->context, gpu->device));
    if (r == 0)
        r = tell("cuCtxSetCurrent", gpu->set_current(gpu->context));
    if (r == 0)
        r = tell("cuStreamCreate", gpu->create_stream(&gpu->stream, STREAM_NON_BLOCKING));
    return r;
}

void gpu_close(struct gpu *gpu)
{
    if (gpu && gpu->stream) {
        (void)gpu->wait(gpu->stream);
        (void)gpu->destroy_stream(gpu->stream);
    }
    for (unsigned i = 0; gpu && i < gpu->n_memory; i++)
        (void)gpu->free(gpu->memory[i]);
    if (gpu && gpu->context)
        (void)gpu->release(gpu->device);
    free(gpu);
}

void *gpu_alloc(struct gpu *gpu, size_t n_bytes)
{
    address memory = 0;

    if (gpu->n_memory == MAX_ALLOCATIONS || tell("cuMemAlloc", gpu->alloc(&memory, n_bytes)) != 0)
        return NULL;
    gpu->memory[gpu->n_memory++] = memory;
    return (void *)(uintptr_t)memory;
}

int gpu_put(struct gpu *gpu, void *to, const void *from, size_t n_bytes)
{
    int r = tell("cuStreamSynchronize", gpu->wait(gpu->stream));

    if (r == 0)
        r = tell("cuMemcpyHtoD", gpu->put((address)(uintptr_t)to, from, n_bytes));
    /*
     * cuMemcpyHtoD() from unregistered memory returns before the GPU has the bytes. The default stream holds that copy,
     * and our stream does not wait for the default stream.
     */
    return r == 0 ? tell("cuStreamSynchronize", gpu->wait(NULL)) : r;
}

int gpu_get(struct gpu *gpu, void *to, const void *from, size_t n_bytes)
{
    int r = tell("cuStreamSynchronize", gpu->wait(gpu->stream));

    return r == 0 ? tell("cuMemcpyDtoH", gpu->get(to, (address)(uintptr_t)from, n_bytes)) : r;
}

void *gpu_stream(const struct gpu *gpu)
{
    return gpu->stream;
}
