/* SPDX-License-Identifier: Apache-2.0 */

/* Streams, events, copies and kernel launches: the calls that put work on a device. */

#include <stdio.h>
#include <string.h>

#include "inside.h"

#define STREAM_MAGIC UINT64_C(0x73696d2d73747265)
#define EVENT_MAGIC UINT64_C(0x73696d2d6576656e)

/* ---- streams -------------------------------------------------------------------------------------------- */

struct CUstream_st *stream_check(const char *entry, struct CUstream_st *stream)
{
    if (!stream)
        sim_die(entry, "the default stream is not for an engine: it waits for all others");
    if (stream->magic != STREAM_MAGIC)
        sim_die(entry, "this is no stream");
    if (stream->dead)
        sim_die(entry, "the stream was destroyed");
    if (stream->n_unasked > 0)
        sim_die(entry, "the stream has a group of NCCL that may not be issued yet: ncclCommGetAsyncError() first");
    return stream;
}

bool stream_is_idle(const struct CUstream_st *stream)
{
    return !stream->head;
}

struct op *op_new(const char *entry, enum op_kind kind, const struct injected *injected)
{
    struct op *op = sim_calloc(1, sizeof(*op));

    op->entry = entry;
    op->kind = kind;
    op->injected = *injected;
    return op;
}

void stream_push(struct CUstream_st *stream, struct op *op)
{
    *stream->tail = op;
    stream->tail = &op->next;
    device_wake(stream->device);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *pStream, unsigned int flags)
{
    int r = sim_enter("cudaStreamCreateWithFlags", NULL);
    struct stream_list *list = &sim_streams;
    struct CUstream_st *stream;

    if (r == 0 && (!pStream || flags & ~(unsigned)cudaStreamNonBlocking))
        r = cudaErrorInvalidValue;
    if (r != 0)
        return sim_leave(r);
    device_need(device_current());
    if (list->n == list->n_alloc) {
        list->n_alloc = list->n_alloc * 2 + 8;
        list->streams = reallocarray(list->streams, list->n_alloc, sizeof(list->streams[0]));
        if (!list->streams)
            sim_die("cudaStreamCreateWithFlags", "the process has no memory left");
    }
    stream = sim_calloc(1, sizeof(*stream));
    *stream = (struct CUstream_st){.magic = STREAM_MAGIC, .device = device_current(), .tail = &stream->head};
    list->streams[list->n++] = *pStream = stream;
    return sim_leave(cudaSuccess);
}

/* Work that is already on the stream still runs. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    int r = sim_enter("cudaStreamDestroy", NULL);

    if (r == 0)
        stream_check("cudaStreamDestroy", stream)->dead = true;
    return sim_leave(r);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    int r = sim_enter("cudaStreamQuery", NULL);

    if (r == 0 && !stream_is_idle(stream_check("cudaStreamQuery", stream)))
        r = cudaErrorNotReady;
    return sim_leave(r);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    int r = sim_enter("cudaStreamSynchronize", NULL);

    if (r == 0)
        stream_check("cudaStreamSynchronize", stream);
    if (r == 0 && sim.never_blocks)
        sim_die("cudaStreamSynchronize", "it waits, and this process never blocks");
    while (r == 0 && !stream_is_idle(stream)) {
        sim_wait(SIM_NS_PER_MS);
        r = sim.sticky;
    }
    return sim_leave(r);
}

/* ---- events --------------------------------------------------------------------------------------------- */

static struct CUevent_st *event_check(const char *entry, struct CUevent_st *event)
{
    if (!event || event->magic != EVENT_MAGIC)
        sim_die(entry, "this is no event");
    if (event->dead)
        sim_die(entry, "the event was destroyed");
    return event;
}

/* Keeps a pointer to each handle, because handles are never freed: a use of a destroyed one is then detected. */
static void keep(void *memory)
{
    static struct kept {
        struct kept *next;
        void *memory;
    } * all;
    struct kept *kept = sim_calloc(1, sizeof(*kept));

    *kept = (struct kept){all, memory};
    all = kept;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    int r = sim_enter("cudaEventCreateWithFlags", NULL);

    if (r == 0 && (!event || flags & ~(unsigned)(cudaEventBlockingSync | cudaEventDisableTiming)))
        r = cudaErrorInvalidValue;
    if (r != 0)
        return sim_leave(r);
    device_need(device_current());
    *event = sim_calloc(1, sizeof(**event));
    (*event)->magic = EVENT_MAGIC;
    (*event)->device = device_current();
    keep(*event);
    return sim_leave(cudaSuccess);
}

/* A pending recording still completes, and pending waits for the event still end. */
cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    int r = sim_enter("cudaEventDestroy", NULL);

    if (r == 0)
        event_check("cudaEventDestroy", event)->dead = true;
    return sim_leave(r);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    struct injected injected;
    int r = sim_enter("cudaEventRecord", &injected);
    struct op *op;

    if (r != 0)
        return sim_leave(r);
    stream_check("cudaEventRecord", stream);
    event_check("cudaEventRecord", event);
    if (event->device != stream->device)
        sim_die("cudaEventRecord", "the event is of device %d, the stream of device %d", event->device, stream->device);
    op = op_new("cudaEventRecord", OP_RECORD, &injected);
    op->page = &event->page;
    op->number = atomic_fetch_add(&event->page.recorded, 1) + 1;
    stream_push(stream, op);
    return sim_leave(cudaSuccess);
}

/* Waits for the recordings made until now. If the event was never recorded, there is nothing to wait for. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    struct injected injected;
    int r = sim_enter("cudaStreamWaitEvent", &injected);
    struct op *op;

    if (r == 0 && flags != cudaEventWaitDefault)
        r = cudaErrorInvalidValue;
    if (r != 0)
        return sim_leave(r);
    stream_check("cudaStreamWaitEvent", stream);
    event_check("cudaStreamWaitEvent", event);
    op = op_new("cudaStreamWaitEvent", OP_WAIT, &injected);
    op->page = &event->page;
    op->shared = event->device != stream->device;
    op->number = atomic_load(&event->page.recorded);
    stream_push(stream, op);
    return sim_leave(cudaSuccess);
}

static bool is_done(const struct CUevent_st *event, uint64_t number)
{
    return atomic_load(&event->page.done) >= number;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    int r = sim_enter("cudaEventQuery", NULL);

    if (r == 0) {
        event_check("cudaEventQuery", event);
        if (!is_done(event, atomic_load(&event->page.recorded)))
            r = cudaErrorNotReady;
    }
    return sim_leave(r);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    int r = sim_enter("cudaEventSynchronize", NULL);
    uint64_t number;

    if (r != 0)
        return sim_leave(r);
    number = atomic_load(&event_check("cudaEventSynchronize", event)->page.recorded);
    if (sim.never_blocks)
        sim_die("cudaEventSynchronize", "it waits, and this process never blocks");
    while (r == 0 && !is_done(event, number)) {
        sim_wait(SIM_NS_PER_MS);
        r = sim.sticky;
    }
    return sim_leave(r);
}

/* ---- copies and kernels --------------------------------------------------------------------------------- */

static bool kind_fits(enum cudaMemcpyKind kind, enum memory_kind from, enum memory_kind to)
{
    static const enum memory_kind sides[][2] = {
        [cudaMemcpyHostToHost] = {MEMORY_HOST, MEMORY_HOST},
        [cudaMemcpyHostToDevice] = {MEMORY_HOST, MEMORY_DEVICE},
        [cudaMemcpyDeviceToHost] = {MEMORY_DEVICE, MEMORY_HOST},
        [cudaMemcpyDeviceToDevice] = {MEMORY_DEVICE, MEMORY_DEVICE},
    };

    return kind == cudaMemcpyDefault || (sides[kind][0] == from && sides[kind][1] == to);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    static const char entry[] = "cudaMemcpyAsync";
    enum memory_kind from, to;
    struct injected injected;
    int r = sim_enter(entry, &injected);
    struct op *op;

    if (r == 0 && (unsigned)kind > cudaMemcpyDefault)
        r = cudaErrorInvalidMemcpyDirection;
    if (r != 0)
        return sim_leave(r);
    stream_check(entry, stream);
    if (count == 0)
        return sim_leave(cudaSuccess);
    from = memory_check(entry, "the source", src, count, stream->device, SPAN_READ);
    to = memory_check(entry, "the destination", dst, count, stream->device, SPAN_WRITE);
    if (!kind_fits(kind, from, to))
        sim_die(entry, "the kind says otherwise than where the memory is (from %s to %s)",
                from == MEMORY_HOST ? "host" : "device", to == MEMORY_HOST ? "host" : "device");
    if (memory_overlap(dst, count, src, count))
        sim_die(entry, "source and destination overlap");
    op = op_new(entry, OP_COPY, &injected);
    op->reads[0] = (struct span){.at = (uint8_t *)(uintptr_t)src, .n_bytes = count};
    op->write = (struct span){.at = dst, .n_bytes = count};
    stream_push(stream, op);
    return sim_leave(cudaSuccess);
}

cudaError_t cudaMemsetAsync(void *devPtr, int value, size_t count, cudaStream_t stream)
{
    static const char entry[] = "cudaMemsetAsync";
    struct injected injected;
    int r = sim_enter(entry, &injected);
    struct op *op;

    if (r != 0)
        return sim_leave(r);
    stream_check(entry, stream);
    if (count == 0)
        return sim_leave(cudaSuccess);
    memory_check(entry, "the destination", devPtr, count, stream->device, SPAN_WRITE);
    op = op_new(entry, OP_SET, &injected);
    op->write = (struct span){.at = devPtr, .n_bytes = count};
    op->value = value;
    stream_push(stream, op);
    return sim_leave(cudaSuccess);
}

__thread uint64_t sim_turns;

void sim_stop(void)
{
    (void)raise(SIGKILL);
}

static struct {
    const void *kernel;
    uint32_t devices; /* bits of the devices that have loaded the kernel */
} kernels[SIM_MAX_KERNELS];

int sim_load(const void *kernel)
{
    int r = sim_enter("sim_load", NULL);
    unsigned i = 0;

    if (r == 0) {
        while (i < SIM_MAX_KERNELS && kernels[i].kernel && kernels[i].kernel != kernel)
            i++;
        if (i == SIM_MAX_KERNELS)
            sim_die("sim_load", "more than %d kernels", SIM_MAX_KERNELS);
        kernels[i].kernel = kernel;
        kernels[i].devices |= UINT32_C(1) << device_current();
    }
    return sim_leave(r);
}

void sim_check_loaded(const void *kernel)
{
    bool loaded = false;

    pthread_mutex_lock(&sim.lock);
    for (unsigned i = 0; i < SIM_MAX_KERNELS; i++)
        loaded |= kernels[i].kernel == kernel && kernels[i].devices >> device_current() & 1;
    if (!loaded)
        sim_die("sim_launch", "the kernel is not loaded to device %d", device_current());
    pthread_mutex_unlock(&sim.lock);
}

int sim_launch(struct CUstream_st *stream, void (*run)(void *args), void (*free_args)(void *args), void *args)
{
    static const char entry[] = "sim_launch";
    struct injected injected;
    int r = sim_enter(entry, &injected);
    struct op *op;

    if (r == 0) {
        stream_check(entry, stream);
        if (stream->device != device_current())
            sim_die(entry, "the stream is of device %d, the current device is %d", stream->device, device_current());
        op = op_new(entry, OP_KERNEL, &injected);
        op->run = run;
        op->free_args = free_args;
        op->args = args;
        stream_push(stream, op);
    }
    r = sim_leave(r);
    if (r != 0 && free_args)
        free_args(args);
    return r;
}
