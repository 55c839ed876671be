/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The driver's calls for a trainer, which opens the driver as a library (libcuda-sim). Most calls forward to a call of
 * the runtime. Errors have the same numbers, and ordered faults and wrong uses are reported under the runtime's name.
 * Three things exist only here: contexts (no call creates one by itself), the default stream, and copies from or to
 * unregistered host memory, which block.
 */

#include <string.h>
#include <sys/mman.h>

#include "inside.h"

enum { MAX_PUSHED = 16, STAGING_BYTES = 1 << 20 };

/* A CUdevice is a handle. It differs from the device's ordinal here, because nothing says that they are equal. */
enum { FIRST_HANDLE = 100 };

/* The primary context of a device. The runtime shares it. */
struct CUctx_st {
    bool retained;
    struct CUstream_st *stream; /* the default stream; ordinary here, so a program must not rely on its order */
};

static struct CUctx_st contexts[SIM_MAX_DEVICES];
static bool is_initialised;
static _Thread_local int pushed[MAX_PUSHED]; /* pushed contexts by device; -1: no context */
static _Thread_local unsigned n_pushed;

CUresult cuInit(unsigned int Flags)
{
    int r = sim_enter("cuInit", NULL);

    if (r == 0 && Flags != 0)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0 && sim.n_devices == 0)
        r = CUDA_ERROR_NO_DEVICE;
    is_initialised |= r == 0;
    return sim_leave_driver(r);
}

CUresult cuDriverGetVersion(int *driverVersion)
{
    return (CUresult)cudaDriverGetVersion(driverVersion);
}

/* ---- devices and contexts ------------------------------------------------------------------------------- */

CUresult cuDeviceGetCount(int *count)
{
    return is_initialised || device_is_bound() ? (CUresult)cudaGetDeviceCount(count) : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    int n, r = cuDeviceGetCount(&n);

    if (r == 0 && (ordinal < 0 || ordinal >= n))
        r = CUDA_ERROR_INVALID_DEVICE;
    if (r == 0)
        *device = FIRST_HANDLE + ordinal;
    return r;
}

/* A device has the same UUID in all processes. The engine asks through the runtime, which initialises the driver. */
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
    int r = sim_enter("cuDeviceGetUuid", NULL);

    dev -= FIRST_HANDLE;
    if (r == 0 && (!uuid || dev < 0 || dev >= sim.n_devices))
        r = uuid ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        *uuid = (CUuuid){"sim-device-A"};
        uuid->bytes[strlen("sim-device-")] += dev;
    }
    return sim_leave_driver(r);
}

CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
    int r = sim_enter("cuDeviceGetAttribute", NULL);

    dev -= FIRST_HANDLE;
    if (r == 0 && !is_initialised)
        r = CUDA_ERROR_NOT_INITIALIZED;
    if (r == 0 && (dev < 0 || dev >= sim.n_devices))
        r = CUDA_ERROR_INVALID_DEVICE;
    if (r == 0 && attrib != CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        *pi = sim.values;
    return sim_leave_driver(r);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    int r = sim_enter("cuDevicePrimaryCtxRetain", NULL);

    dev -= FIRST_HANDLE;
    if (r == 0 && !is_initialised)
        r = CUDA_ERROR_NOT_INITIALIZED;
    if (r == 0 && (dev < 0 || dev >= sim.n_devices))
        r = CUDA_ERROR_INVALID_DEVICE;
    if (r == 0) {
        bool was_bound = device_is_bound();

        device_need(dev);
        if (!was_bound)
            device_unbind();
        contexts[dev].retained = true;
        *pctx = &contexts[dev];
    }
    return sim_leave_driver(r);
}

/* Does not destroy the context, because other parts of the process may use it. */
CUresult cuDevicePrimaryCtxRelease(CUdevice dev)
{
    dev -= FIRST_HANDLE;
    return dev >= 0 && dev < SIM_MAX_DEVICES && contexts[dev].retained ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static bool is_context(CUcontext ctx)
{
    return ctx >= contexts && ctx < contexts + SIM_MAX_DEVICES && sim.devices[ctx - contexts].running;
}

CUresult cuCtxSetCurrent(CUcontext ctx)
{
    if (ctx && !is_context(ctx))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (ctx)
        device_set_current(ctx - contexts);
    else
        device_unbind();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *pctx)
{
    int r = sim_enter("cuCtxGetCurrent", NULL);

    if (r == 0 && !is_initialised)
        r = CUDA_ERROR_NOT_INITIALIZED;
    if (r == 0)
        *pctx = device_is_bound() ? &contexts[device_current()] : NULL;
    return sim_leave_driver(r);
}

CUresult cuCtxPushCurrent(CUcontext ctx)
{
    if (!is_context(ctx))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (n_pushed == MAX_PUSHED)
        sim_die("cuCtxPushCurrent", "%d contexts are pushed and none is popped", MAX_PUSHED);
    pushed[n_pushed++] = device_is_bound() ? device_current() : -1;
    return cuCtxSetCurrent(ctx);
}

CUresult cuCtxPopCurrent(CUcontext *pctx)
{
    int former;

    if (!device_is_bound() || n_pushed == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (pctx)
        *pctx = &contexts[device_current()];
    former = pushed[--n_pushed];
    return cuCtxSetCurrent(former < 0 ? NULL : &contexts[former]);
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    if (!device_is_bound())
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = FIRST_HANDLE + device_current();
    return CUDA_SUCCESS;
}

/* ---- streams and events --------------------------------------------------------------------------------- */

/* Return: the stream that the handle means, or NULL if there is no context. */
static CUstream meant(CUstream stream)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static _Thread_local CUstream of_thread[SIM_MAX_DEVICES];
    CUstream *made = stream ? &of_thread[device_current()] : &contexts[device_current()].stream;

    if (!device_is_bound())
        return NULL;
    if (stream && stream != CU_STREAM_PER_THREAD)
        return stream;
    pthread_mutex_lock(&lock);
    if (!*made && cudaStreamCreateWithFlags(made, cudaStreamNonBlocking) != cudaSuccess)
        sim_die("cuStreamCreate", "there is no default stream");
    pthread_mutex_unlock(&lock);
    return *made;
}

CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
    return device_is_bound() ? (CUresult)cudaStreamCreateWithFlags(phStream, Flags) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuStreamDestroy(CUstream hStream)
{
    return hStream ? (CUresult)cudaStreamDestroy(hStream) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuStreamSynchronize(CUstream hStream)
{
    CUstream stream = meant(hStream);

    return stream ? (CUresult)cudaStreamSynchronize(stream) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    CUstream stream = meant(hStream);

    return stream ? (CUresult)cudaStreamWaitEvent(stream, hEvent, Flags) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
    return device_is_bound() ? (CUresult)cudaEventCreateWithFlags(phEvent, Flags) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuEventDestroy(CUevent hEvent)
{
    return (CUresult)cudaEventDestroy(hEvent);
}

CUresult cuEventQuery(CUevent hEvent)
{
    return (CUresult)cudaEventQuery(hEvent);
}

CUresult cuEventSynchronize(CUevent hEvent)
{
    return (CUresult)cudaEventSynchronize(hEvent);
}

CUresult cuEventRecord(CUevent hEvent, CUstream hStream)
{
    CUstream stream = meant(hStream);

    return stream ? (CUresult)cudaEventRecord(hEvent, stream) : CUDA_ERROR_INVALID_CONTEXT;
}

/* The write is atomic for host threads. When a thread sees the new value, all earlier work on the stream is done. */
CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
{
    static const char entry[] = "cuStreamWriteValue64";
    CUstream of = meant(stream);
    void *at = (void *)(uintptr_t)addr;
    struct injected injected;
    struct op *op;
    int r;

    if (!of)
        return CUDA_ERROR_INVALID_CONTEXT;
    r = sim_enter(entry, &injected);
    if (r == 0 && !sim.values)
        r = CUDA_ERROR_NOT_SUPPORTED;
    if (r == 0 && (addr == 0 || addr % sizeof(value) != 0 || flags != CU_STREAM_WRITE_VALUE_DEFAULT))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r != 0)
        return sim_leave_driver(r);
    stream_check(entry, of);
    memory_check(entry, "the address", at, sizeof(value), of->device, SPAN_WRITE);
    op = op_new(entry, OP_VALUE, &injected);
    op->at = at;
    op->number = value;
    stream_push(of, op);
    return sim_leave_driver(CUDA_SUCCESS);
}

/* ---- memory and copies ---------------------------------------------------------------------------------- */

CUresult cuMemGetInfo(size_t *free, size_t *total)
{
    return device_is_bound() ? (CUresult)cudaMemGetInfo(free, total) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuMemAlloc(CUdeviceptr *dptr, size_t bytesize)
{
    void *memory;
    int r = device_is_bound() ? (int)cudaMalloc(&memory, bytesize) : (int)CUDA_ERROR_INVALID_CONTEXT;

    if (r == 0 && bytesize == 0)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        *dptr = (uintptr_t)memory;
    return r;
}

CUresult cuMemFree(CUdeviceptr dptr)
{
    return dptr && device_is_bound() ? (CUresult)cudaFree((void *)(uintptr_t)dptr) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
{
    CUstream stream = meant(hStream);

    if (!stream)
        return CUDA_ERROR_INVALID_CONTEXT;
    return (CUresult)cudaMemcpyAsync((void *)(uintptr_t)dstDevice, (const void *)(uintptr_t)srcDevice, ByteCount,
                                     cudaMemcpyDeviceToDevice, stream);
}

/* Protects the staging memory, which is registered once. */
static pthread_mutex_t staging_lock = PTHREAD_MUTEX_INITIALIZER;

static uint8_t *staging(void)
{
    static uint8_t *memory;

    if (!memory) {
        memory = mmap(NULL, STAGING_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || cudaHostRegister(memory, STAGING_BYTES, cudaHostRegisterPortable) != cudaSuccess)
            sim_die("cuMemcpyHtoD", "no memory to stage in");
    }
    return memory;
}

/*
 * Copies one piece through the staging memory; to_host or from_host is NULL. As in CUDA, a copy from the host returns
 * before the device has the bytes: only streams that wait for the default stream see them.
 */
static int stage(uint8_t *to_host, CUdeviceptr device, const uint8_t *from_host, size_t n_bytes)
{
    void *memory = (void *)(uintptr_t)device;
    CUstream stream = meant(NULL);
    int r = cudaStreamSynchronize(stream); /* the staging memory may be in use */

    if (r != 0)
        return r;
    if (from_host) {
        memcpy(staging(), from_host, n_bytes);
        return cudaMemcpyAsync(memory, staging(), n_bytes, cudaMemcpyHostToDevice, stream);
    }
    r = cudaMemcpyAsync(staging(), memory, n_bytes, cudaMemcpyDeviceToHost, stream);
    if (r == 0)
        r = cudaStreamSynchronize(stream);
    if (r == 0)
        memcpy(to_host, staging(), n_bytes);
    return r;
}

static CUresult copy_staged(uint8_t *to_host, CUdeviceptr device, const uint8_t *from_host, size_t n_bytes)
{
    int r = device_is_bound() ? 0 : (int)CUDA_ERROR_INVALID_CONTEXT;

    pthread_mutex_lock(&staging_lock);
    for (size_t at = 0, n; r == 0 && at < n_bytes; at += n) {
        n = MIN(n_bytes - at, (size_t)STAGING_BYTES);
        r = stage(to_host ? to_host + at : NULL, device + at, from_host ? from_host + at : NULL, n);
    }
    pthread_mutex_unlock(&staging_lock);
    return r;
}

CUresult cuMemcpyHtoD(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount)
{
    return copy_staged(NULL, dstDevice, srcHost, ByteCount);
}

CUresult cuMemcpyDtoH(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount)
{
    return copy_staged(dstHost, srcDevice, NULL, ByteCount);
}
