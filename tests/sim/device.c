/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Devices. Each has a thread that runs the first operation of each of its streams, in any order of streams, and then
 * sleeps.
 */

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

#include "inside.h"

/* How often a wait for another device's event checks that event, because the other device sends no notice. */
enum { SHARED_EVENT_NS = 200 * SIM_NS_PER_US };

struct stream_list sim_streams;

static _Thread_local int current_device;
static _Thread_local bool is_bound;

int device_current(void)
{
    return current_device;
}

void device_set_current(int device)
{
    current_device = device;
    is_bound = true;
}

bool device_is_bound(void)
{
    return is_bound && sim.devices[current_device].running;
}

void device_unbind(void)
{
    current_device = 0;
    is_bound = false;
}

int64_t device_delay_ns(struct device *device)
{
    return sim.max_delay_ns > 0 ? (int64_t)(sim_random(&device->random) % (uint64_t)sim.max_delay_ns) : 0;
}

void device_wake(int device)
{
    (void)eventfd_write(sim.devices[device].wake_fd, 1); /* fails if the counter is full; the thread wakes anyway */
}

/* ---- operations ----------------------------------------------------------------------------------------- */

static void op_free(struct op *op)
{
    for (unsigned i = 0; i < OP_MAX_READS; i++)
        span_drop(&op->reads[i]);
    if (op->free_args)
        op->free_args(op->args);
    free(op);
}

static void pop(struct CUstream_st *stream)
{
    struct op *op = stream->head;

    stream->head = op->next;
    if (!stream->head)
        stream->tail = &stream->head;
    pthread_cond_broadcast(&sim.changed);
    pthread_mutex_unlock(&sim.lock);
    op_free(op);
    pthread_mutex_lock(&sim.lock);
}

static void start(struct device *device, struct op *op, int64_t now)
{
    bool timed = op->kind == OP_COPY || op->kind == OP_SET || op->kind == OP_KERNEL || op->kind == OP_VALUE;

    op->started = true;
    op->end_ns = now + op->injected.delay_ns + (timed ? device_delay_ns(device) : 0);
    pthread_mutex_unlock(&sim.lock);
    spans_start(op->entry, op->reads, OP_MAX_READS, &op->write, 1);
    pthread_mutex_lock(&sim.lock);
}

static void record(struct event_page *page, uint64_t number)
{
    uint64_t done = atomic_load(&page->done);

    while (done < number && !atomic_compare_exchange_weak(&page->done, &done, number))
        continue;
}

static void finish(struct op *op)
{
    pthread_mutex_unlock(&sim.lock);
    spans_check(op->entry, op->reads, OP_MAX_READS, &op->write, 1);
    if (op->kind == OP_COPY && op->write.n_bytes > 0)
        memcpy(op->write.at, op->reads[0].data, op->write.n_bytes);
    else if (op->kind == OP_SET && op->write.n_bytes > 0)
        memset(op->write.at, op->value, op->write.n_bytes);
    else if (op->kind == OP_KERNEL) {
        sim_turns = op->injected.turns;
        op->run(op->args);
        sim_turns = 0;
    } else if (op->kind == OP_VALUE)
        __atomic_store_n(op->at, op->number, __ATOMIC_RELEASE);
    pthread_mutex_lock(&sim.lock);
    if (op->kind == OP_RECORD)
        record(op->page, op->number);
}

/* Advances the stream's first operation. Return: whether anything has changed. */
static bool advance(struct device *device, struct CUstream_st *stream, int64_t now, int64_t *wake_ns)
{
    struct op *op = stream->head;
    bool moved = false;

    if (op->kind == OP_LAUNCH) {
        if (launch_advance(op, now, wake_ns, &moved) == 0)
            return moved;
        pop(stream);
        return true;
    }
    if (sim.sticky != cudaSuccess) {
        pop(stream);
        return true;
    }
    if (!op->started)
        start(device, op, now);
    if (op->injected.hang)
        return false;
    if (now < op->end_ns) {
        *wake_ns = MIN(*wake_ns, op->end_ns);
        return false;
    }
    if (op->injected.async != 0) {
        device_lose(op->injected.async);
        return true;
    }
    if (op->kind == OP_WAIT && atomic_load(&op->page->done) < op->number) {
        if (op->shared)
            *wake_ns = MIN(*wake_ns, now + SHARED_EVENT_NS);
        return false;
    }
    finish(op);
    pop(stream);
    return true;
}

static bool advance_streams(struct device *device, int64_t now, int64_t *wake_ns)
{
    size_t n = sim_streams.n, first = n > 0 ? sim_random(&device->random) % n : 0;
    bool moved = false;

    for (size_t i = 0; i < n; i++) {
        struct CUstream_st *stream = sim_streams.streams[(first + i) % n];

        if (stream->device == device->index && stream->head)
            moved |= advance(device, stream, now, wake_ns);
    }
    return moved;
}

/* ---- the thread ----------------------------------------------------------------------------------------- */

static void rest(struct device *device, int64_t wake_ns)
{
    static _Thread_local struct pollfd *fds;
    static _Thread_local size_t n_alloc;
    int64_t ns = wake_ns == INT64_MAX ? -1 : MAX(wake_ns - sim_now_ns(), INT64_C(0));
    struct timespec t = {ns / (1000 * SIM_NS_PER_MS), ns % (1000 * SIM_NS_PER_MS)};
    size_t n = 0;
    eventfd_t notices;

    comms_poll_fds(device->index, &fds, &n, &n_alloc);
    pthread_mutex_unlock(&sim.lock);
    (void)ppoll(fds, n, ns < 0 ? NULL : &t, NULL);
    (void)eventfd_read(device->wake_fd, &notices);
    pthread_mutex_lock(&sim.lock);
}

static void *run_device(void *arg)
{
    struct device *device = arg;

    memory_admit_thread();
    device_set_current(device->index);
    pthread_mutex_lock(&sim.lock);
    for (;;) {
        int64_t now = sim_now_ns(), wake_ns = INT64_MAX;
        bool moved = comms_advance(device, now, &wake_ns);

        moved |= advance_streams(device, now, &wake_ns);
        if (!moved)
            rest(device, wake_ns);
    }
    return NULL;
}

/* Wakes all threads and callers that may wait for a change. */
static void wake_all(void)
{
    for (int d = 0; d < sim.n_devices; d++)
        if (sim.devices[d].running)
            device_wake(d);
    pthread_cond_broadcast(&sim.changed);
}

void device_lose(cudaError_t error)
{
    if (sim.sticky == cudaSuccess)
        sim.sticky = error;
    wake_all();
}

void device_need(int index)
{
    struct device *device = &sim.devices[index];
    pthread_attr_t attr;

    is_bound |= index == current_device; /* the runtime binds the thread to the current device by itself */
    if (device->running)
        return;
    device->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (device->wake_fd < 0)
        sim_die("device", "eventfd: %m");
    device->running = true;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&device->thread, &attr, run_device, device) != 0)
        sim_die("device", "no thread");
    pthread_attr_destroy(&attr);
}

void device_check_idle(const char *entry)
{
    for (size_t i = 0; sim.never_blocks && i < sim_streams.n; i++)
        if (sim_streams.streams[i]->head)
            sim_die(entry, "it may wait for %s on a stream, and this process never blocks",
                    sim_streams.streams[i]->head->entry);
}

static bool op_uses(const struct op *op, const void *at, size_t n_bytes)
{
    for (unsigned i = 0; i < OP_MAX_READS; i++)
        if (memory_overlap(at, n_bytes, op->reads[i].at, op->reads[i].n_bytes))
            return true;
    return memory_overlap(at, n_bytes, op->write.at, op->write.n_bytes) ||
           memory_overlap(at, n_bytes, op->at, op->kind == OP_VALUE ? sizeof(*op->at) : 0);
}

void device_check_unused(const char *entry, const void *at, size_t n_bytes)
{
    for (size_t i = 0; i < sim_streams.n; i++)
        for (const struct op *op = sim_streams.streams[i]->head; op; op = op->next)
            if (op_uses(op, at, n_bytes))
                sim_die(entry, "%s on a stream still uses this memory", op->entry);
    launches_check_unused(entry, at, n_bytes);
}

void sim_wait(int64_t max_ns)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += max_ns;
    t.tv_sec += t.tv_nsec / (1000 * SIM_NS_PER_MS);
    t.tv_nsec %= 1000 * SIM_NS_PER_MS;
    (void)pthread_cond_timedwait(&sim.changed, &sim.lock, &t);
}

/* ---- what the program asks ------------------------------------------------------------------------------ */

cudaError_t cudaRuntimeGetVersion(int *runtimeVersion)
{
    int r = sim_enter("cudaRuntimeGetVersion", NULL);

    if (r == 0)
        *runtimeVersion = sim.runtime_version;
    return sim_leave(r);
}

cudaError_t cudaDriverGetVersion(int *driverVersion)
{
    int r = sim_enter("cudaDriverGetVersion", NULL);

    if (r == 0)
        *driverVersion = sim.driver_version;
    return sim_leave(r);
}

cudaError_t cudaGetDeviceCount(int *count)
{
    int r = sim_enter("cudaGetDeviceCount", NULL);

    *count = r == 0 ? sim.n_devices : 0;
    return sim_leave(r == 0 && sim.n_devices == 0 ? cudaErrorNoDevice : (cudaError_t)r);
}

cudaError_t cudaSetDevice(int device)
{
    int r = sim_enter("cudaSetDevice", NULL);

    if (r == 0 && (device < 0 || device >= sim.n_devices))
        r = cudaErrorInvalidDevice;
    if (r == 0 && sim.compute_mode == cudaComputeModeProhibited)
        r = cudaErrorDevicesUnavailable;
    if (r == 0) {
        device_need(device);
        device_set_current(device);
    }
    return sim_leave(r);
}

cudaError_t cudaGetDevice(int *device)
{
    int r = sim_enter("cudaGetDevice", NULL);

    if (r == 0)
        *device = current_device;
    return sim_leave(r);
}

/* Returns the attributes of an H200, as far as the programs under test read them. */
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    const struct {
        enum cudaDeviceAttr attr;
        int value;
    } attributes[] = {
        {cudaDevAttrComputeMode, sim.compute_mode},
        {cudaDevAttrMpsEnabled, sim.mps},
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMultiProcessorCount, 132},
        {cudaDevAttrPciDeviceId, 0},
        {cudaDevAttrL2CacheSize, 60 << 20},
        {cudaDevAttrAsyncEngineCount, 3},
        {cudaDevAttrUnifiedAddressing, 1},
        {cudaDevAttrPciDomainId, 0},
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
        {cudaDevAttrHostRegisterSupported, 1},
        {cudaDevAttrHostRegisterReadOnlySupported, 1},
    };
    int r = sim_enter("cudaDeviceGetAttribute", NULL);
    bool found = attr == cudaDevAttrPciBusId;

    if (r == 0 && (device < 0 || device >= sim.n_devices))
        return sim_leave(cudaErrorInvalidDevice);
    if (r == 0 && found)
        *value = 0x10 + device;
    for (size_t i = 0; r == 0 && i < ARRAY_SIZE(attributes); i++)
        if (attributes[i].attr == attr) {
            *value = attributes[i].value;
            found = true;
        }
    return sim_leave(r == 0 && !found ? cudaErrorInvalidValue : (cudaError_t)r);
}

cudaError_t cudaDeviceGetPCIBusId(char *pciBusId, int len, int device)
{
    int r = sim_enter("cudaDeviceGetPCIBusId", NULL);

    if (r == 0 && (device < 0 || device >= sim.n_devices))
        r = cudaErrorInvalidDevice;
    if (r == 0 && (!pciBusId || snprintf(pciBusId, len, "0000:%02x:00.0", 0x10 + device) >= len))
        r = cudaErrorInvalidValue;
    return sim_leave(r);
}

/* Sets *canAccessPeer: whether a device can be given access to another device's memory. */
cudaError_t cudaDeviceCanAccessPeer(int *canAccessPeer, int device, int peerDevice)
{
    int r = sim_enter("cudaDeviceCanAccessPeer", NULL);

    if (r == 0 && (device < 0 || device >= sim.n_devices || peerDevice < 0 || peerDevice >= sim.n_devices))
        r = cudaErrorInvalidDevice;
    if (r == 0)
        *canAccessPeer = device != peerDevice && sim.peers;
    return sim_leave(r);
}

/* ---- the driver's entry points -------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void *function;
} driver[] = {
    {"cuMemGetAllocationGranularity", (void *)cuMemGetAllocationGranularity},
    {"cuMemCreate", (void *)cuMemCreate},
    {"cuMemRelease", (void *)cuMemRelease},
    {"cuMemExportToShareableHandle", (void *)cuMemExportToShareableHandle},
    {"cuMemImportFromShareableHandle", (void *)cuMemImportFromShareableHandle},
    {"cuMemAddressReserve", (void *)cuMemAddressReserve},
    {"cuMemAddressFree", (void *)cuMemAddressFree},
    {"cuMemMap", (void *)cuMemMap},
    {"cuMemUnmap", (void *)cuMemUnmap},
    {"cuMemSetAccess", (void *)cuMemSetAccess},
    {"cuDeviceGet", (void *)cuDeviceGet},
    {"cuDeviceGetUuid", (void *)cuDeviceGetUuid},
    {"cuMemHostGetDevicePointer", (void *)cuMemHostGetDevicePointer},
    {"cuStreamWriteValue64", (void *)cuStreamWriteValue64},
};

/* The caller holds the lock. The result goes to *status. If status is NULL, an unknown symbol is an error instead. */
static cudaError_t find_function(const char *symbol, void **function, int version,
                                 enum cudaDriverEntryPointQueryResult *status)
{
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;

    *function = NULL;
    for (size_t i = 0; i < ARRAY_SIZE(driver); i++)
        if (strcmp(driver[i].name, symbol) == 0) {
            result = cudaDriverEntryPointSuccess;
            if (version > sim.driver_version)
                result = cudaDriverEntryPointVersionNotSufficent;
            else
                *function = driver[i].function;
        }
    if (status)
        *status = result;
    return status || result == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound;
}

cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **funcPtr, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *driverStatus)
{
    int r = sim_enter("cudaGetDriverEntryPoint", NULL);

    if (r == 0)
        r = flags == cudaEnableDefault ? find_function(symbol, funcPtr, sim.runtime_version, driverStatus)
                                       : cudaErrorInvalidValue;
    return sim_leave(r);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **funcPtr, unsigned int cudaVersion,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *driverStatus)
{
    int r = sim_enter("cudaGetDriverEntryPointByVersion", NULL);

    if (r == 0)
        r = flags == cudaEnableDefault ? find_function(symbol, funcPtr, (int)cudaVersion, driverStatus)
                                       : cudaErrorInvalidValue;
    return sim_leave(r);
}
