/* SPDX-License-Identifier: Apache-2.0 */

/* The CUDA driver, opened at run time, and the context of one handle (cuda.h). */

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/lib/memory/cuda.h"
#include "core/base/base.h"
#include "core/wire/progress.h"

/* Numbers and types from the driver's documentation, unchanged since CUDA 10.2. */
enum {
    SUCCESS = 0,
    OUT_OF_MEMORY = 2,
    NOT_READY = 600,
    LOCATION_DEVICE = 1,
    ALLOCATION_PINNED = 1,
    HANDLE_POSIX = 1,
    ACCESS_READ = 1,
    ACCESS_READ_WRITE = 3,
    EVENT_DISABLE_TIMING = 2,
    HOST_PORTABLE = 1,
    HOST_DEVICE_MAP = 2,
    CAN_WRITE_VALUE_64 = 122,
    STREAM_NON_BLOCKING = 1,
};

typedef unsigned long long address;

struct access {
    int location_type, ordinal, flags;
};

/* The driver's CUmemAllocationProp. The fields that own_memory() leaves at 0 mean: not exported, not compressed. */
struct allocation {
    int type, handle_types, location_type, ordinal;
    void *unused_handle;
    uint8_t flags[8];
};

struct uuid {
    uint8_t bytes[CUDA_GPU_BYTES];
};

/* Names of symbols, some of which differ from the documented names. A driver for CUDA 11.7 has all of them. */
#define DRIVER_CALLS(CALL)                                                                                             \
    CALL(get_error_name, "cuGetErrorName", (int error, const char **name))                                             \
    CALL(init, "cuInit", (unsigned flags))                                                                             \
    CALL(get_count, "cuDeviceGetCount", (int *n))                                                                      \
    CALL(get_device, "cuDeviceGet", (int *device, int ordinal))                                                        \
    CALL(get_uuid, "cuDeviceGetUuid_v2", (struct uuid * uuid, int device))                                             \
    CALL(get_context, "cuCtxGetCurrent", (void **context))                                                             \
    CALL(push_context, "cuCtxPushCurrent_v2", (void *context))                                                         \
    CALL(pop_context, "cuCtxPopCurrent_v2", (void **context))                                                          \
    CALL(get_context_device, "cuCtxGetDevice", (int *device))                                                          \
    CALL(get_granularity, "cuMemGetAllocationGranularity", (size_t * n, const struct allocation *what, int option))    \
    CALL(create, "cuMemCreate", (address * handle, size_t n, const struct allocation *what, address flags))            \
    CALL(import, "cuMemImportFromShareableHandle", (address * handle, void *fd, int type))                             \
    CALL(release_handle, "cuMemRelease", (address handle))                                                             \
    CALL(reserve, "cuMemAddressReserve", (address * at, size_t n, size_t align, address wish, address flags))          \
    CALL(unreserve, "cuMemAddressFree", (address at, size_t n))                                                        \
    CALL(map, "cuMemMap", (address at, size_t n, size_t offset, address handle, address flags))                        \
    CALL(unmap, "cuMemUnmap", (address at, size_t n))                                                                  \
    CALL(set_access, "cuMemSetAccess", (address at, size_t n, const struct access *access, size_t n_access))           \
    CALL(alloc, "cuMemAlloc_v2", (address * at, size_t n))                                                             \
    CALL(free, "cuMemFree_v2", (address at))                                                                           \
    CALL(copy, "cuMemcpyDtoDAsync_v2", (address to, address from, size_t n, void *stream))                             \
    CALL(copy_to_host, "cuMemcpyDtoH_v2", (void *to, address from, size_t n))                                          \
    CALL(create_stream, "cuStreamCreate", (void **stream, unsigned flags))                                             \
    CALL(destroy_stream, "cuStreamDestroy_v2", (void *stream))                                                         \
    CALL(wait_for_stream, "cuStreamSynchronize", (void *stream))                                                       \
    CALL(let_wait, "cuStreamWaitEvent", (void *stream, void *event, unsigned flags))                                   \
    CALL(create_event, "cuEventCreate", (void **event, unsigned flags))                                                \
    CALL(destroy_event, "cuEventDestroy_v2", (void *event))                                                            \
    CALL(query_event, "cuEventQuery", (void *event))                                                                   \
    CALL(wait_for_event, "cuEventSynchronize", (void *event))                                                          \
    CALL(record, "cuEventRecord", (void *event, void *stream))                                                         \
    CALL(get_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))                               \
    CALL(register_host, "cuMemHostRegister_v2", (void *memory, size_t n, unsigned flags))                              \
    CALL(unregister_host, "cuMemHostUnregister", (void *memory))                                                       \
    CALL(get_device_address, "cuMemHostGetDevicePointer_v2", (address * at, void *memory, unsigned flags))             \
    CALL(write_value, "cuStreamWriteValue64_v2", (void *stream, address at, uint64_t value, unsigned flags))

struct driver {
#define AS_POINTER(field, name, arguments) int(*field) arguments;
    DRIVER_CALLS(AS_POINTER)
#undef AS_POINTER
};

struct cuda {
    struct driver driver;
    bool is_torch;
    void *context;
    int device;                     /* the driver's handle */
    int ordinal;                    /* the device's number in locations of memory */
    struct progress_page *progress; /* NULL: no page is registered */
    address progress_at;
    void *last_event; /* recorded after the last point; NULL: no point yet */
    char why[400];
};

/* ---- errors -------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 3, 4))) static int fail(struct cuda *cuda, int r, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(cuda->why, sizeof(cuda->why), format, args);
    va_end(args);
    return r;
}

static const char *error_name(const struct cuda *cuda, int error)
{
    const char *name = NULL;

    return cuda->driver.get_error_name(error, &name) == SUCCESS && name ? name : "an unknown error";
}

/*
 * Translates the result of a driver's call, and keeps a sentence for cuda_why() if it is an error. Return: 0 or -EIO.
 */
static int check(struct cuda *cuda, const char *what, int error)
{
    return error == SUCCESS ? 0 : fail(cuda, -EIO, "%s: %s", what, error_name(cuda, error));
}

const char *cuda_why(const struct cuda *cuda)
{
    return cuda ? cuda->why : "out of memory";
}

/* ---- the driver ---------------------------------------------------------------------------------------- */

static int load_libcuda(struct cuda *cuda)
{
    const char *path = getenv("ZEROD_LIBCUDA");
    void *library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL); /* never unloaded */
    const struct {
        const char *name;
        void *field;
    } calls[] = {
#define AS_ROW(field, name, arguments) {name, &cuda->driver.field},
        DRIVER_CALLS(AS_ROW)
#undef AS_ROW
    };

    if (!library)
        return fail(cuda, -ENODEV, "the job's gradients lie on GPUs, and there is no driver for them here: %s",
                    dlerror());
    for (size_t i = 0; i < ARRAY_SIZE(calls); i++) {
        void *call = dlsym(library, calls[i].name);

        if (!call)
            return fail(cuda, -ENODEV, "the NVIDIA driver has no %s: it has to be one for CUDA 11.7 or newer",
                        calls[i].name);
        memcpy(calls[i].field, &call, sizeof(call));
    }
    return 0;
}

static int find_ordinal(struct cuda *cuda)
{
    int n = 0, device, r = check(cuda, "cuDeviceGetCount", cuda->driver.get_count(&n));

    for (int i = 0; r == 0 && i < n; i++) {
        r = check(cuda, "cuDeviceGet", cuda->driver.get_device(&device, i));
        cuda->ordinal = i;
        if (r == 0 && device == cuda->device)
            return 0;
    }
    return r != 0 ? r : fail(cuda, -ENODEV, "the GPU of this thread's context is none that the driver counts");
}

static int find_context(struct cuda *cuda)
{
    int r = check(cuda, "cuInit", cuda->driver.init(0));

    if (r == 0)
        r = check(cuda, "cuCtxGetCurrent", cuda->driver.get_context(&cuda->context));
    if (r == 0 && !cuda->context)
        r = fail(cuda, -ENODEV, "this thread uses no GPU yet, and the job's gradients lie on GPUs: %s first",
                 cuda->is_torch ? "torch.cuda.set_device(LOCAL_RANK)" : "cudaSetDevice(local rank)");
    if (r == 0)
        r = check(cuda, "cuCtxGetDevice", cuda->driver.get_context_device(&cuda->device));
    if (r == 0)
        r = find_ordinal(cuda);
    return r == -EIO ? -ENODEV : r;
}

int cuda_open(struct cuda **out, bool is_torch)
{
    struct cuda *cuda = calloc(1, sizeof(*cuda));
    int r;

    *out = cuda;
    if (!cuda)
        return -ENOMEM;
    cuda->is_torch = is_torch;
    r = load_libcuda(cuda);
    return r == 0 ? find_context(cuda) : r;
}

/* Makes the handle's context current. Return: 0, and the caller calls leave(); or -EIO. */
static int enter(struct cuda *cuda, bool *pushed)
{
    void *current = NULL;
    int r = check(cuda, "cuCtxGetCurrent", cuda->driver.get_context(&current));

    *pushed = false;
    if (r != 0 || current == cuda->context)
        return r;
    r = check(cuda, "cuCtxPushCurrent", cuda->driver.push_context(cuda->context));
    *pushed = r == 0;
    return r;
}

static void leave(struct cuda *cuda, bool pushed)
{
    void *context;

    if (pushed)
        (void)cuda->driver.pop_context(&context);
}

void cuda_free(struct cuda *cuda)
{
    bool pushed;

    if (cuda && cuda->progress && enter(cuda, &pushed) == 0) {
        if (cuda->last_event)
            (void)cuda->driver.destroy_event(cuda->last_event);
        (void)cuda->driver.unregister_host(cuda->progress);
        leave(cuda, pushed);
    }
    free(cuda);
}

/* ---- which GPU ----------------------------------------------------------------------------------------- */

struct gpu_name {
    char text[48];
};

/* Formats the name as nvidia-smi -L does. */
static const char *name_gpu(struct gpu_name *name, const uint8_t gpu[CUDA_GPU_BYTES])
{
    size_t n = (size_t)snprintf(name->text, sizeof(name->text), "GPU-");

    for (unsigned i = 0; i < CUDA_GPU_BYTES; i++)
        n += (size_t)snprintf(name->text + n, sizeof(name->text) - n, "%s%02x",
                              i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", gpu[i]);
    return name->text;
}

/* Return: the ordinal of this GPU in this process, or -1. */
static int find_gpu(const struct cuda *cuda, const uint8_t gpu[CUDA_GPU_BYTES])
{
    const struct driver *driver = &cuda->driver;
    struct uuid uuid;
    int n = 0, device;

    if (driver->get_count(&n) != SUCCESS)
        return -1;
    for (int i = 0; i < n; i++)
        if (driver->get_device(&device, i) == SUCCESS && driver->get_uuid(&uuid, device) == SUCCESS &&
            memcmp(uuid.bytes, gpu, CUDA_GPU_BYTES) == 0)
            return i;
    return -1;
}

int cuda_check_gpu(struct cuda *cuda, const uint8_t gpu[CUDA_GPU_BYTES])
{
    struct gpu_name wanted, mine;
    struct uuid uuid;
    int r = check(cuda, "cuDeviceGetUuid", cuda->driver.get_uuid(&uuid, cuda->device));
    int ordinal;

    if (r != 0 || memcmp(uuid.bytes, gpu, CUDA_GPU_BYTES) == 0)
        return r;
    ordinal = find_gpu(cuda, gpu);
    name_gpu(&wanted, gpu);
    name_gpu(&mine, uuid.bytes);
    if (ordinal < 0)
        return fail(cuda, -ENODEV,
                    "this rank's memory lies on %s, and this process uses %s and does not see the other one: "
                    "CUDA_VISIBLE_DEVICES has to name it",
                    wanted.text, mine.text);
    return fail(cuda, -ENODEV,
                "this rank's memory lies on %s, and this process uses %s: %s(%d) first, or let CUDA_VISIBLE_DEVICES "
                "name the GPUs in the order of the ranks",
                wanted.text, mine.text, cuda->is_torch ? "torch.cuda.set_device" : "cudaSetDevice", ordinal);
}

/* ---- memory -------------------------------------------------------------------------------------------- */

static address address_of(const void *memory)
{
    return (address)(uintptr_t)memory;
}

/*
 * Makes the memory accessible to the device. Some drivers have no read-only memory for a device; there the device could
 * write even with read_only.
 */
static int give_access(struct cuda *cuda, address at, size_t n_bytes, bool read_only)
{
    struct access access = {LOCATION_DEVICE, cuda->ordinal, read_only ? ACCESS_READ : ACCESS_READ_WRITE};
    int error = cuda->driver.set_access(at, n_bytes, &access, 1);

    if (error != SUCCESS && read_only) {
        access.flags = ACCESS_READ_WRITE;
        error = cuda->driver.set_access(at, n_bytes, &access, 1);
    }
    return check(cuda, "cuMemSetAccess", error);
}

static int map_handle(struct cuda *cuda, address handle, size_t n_bytes, bool read_only, address *at)
{
    const struct driver *driver = &cuda->driver;
    int r = check(cuda, "cuMemAddressReserve", driver->reserve(at, n_bytes, 0, 0, 0));

    if (r != 0)
        return r;
    r = check(cuda, "cuMemMap", driver->map(*at, n_bytes, 0, handle, 0));
    if (r == 0) {
        r = give_access(cuda, *at, n_bytes, read_only);
        if (r != 0)
            (void)driver->unmap(*at, n_bytes);
    }
    if (r != 0)
        (void)driver->unreserve(*at, n_bytes);
    return r;
}

int cuda_map(struct cuda *cuda, int fd, size_t n_bytes, bool read_only, uint8_t **out)
{
    address handle = 0, at = 0;
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r == 0) {
        r = check(cuda, "cuMemImportFromShareableHandle",
                  cuda->driver.import(&handle, (void *)(intptr_t)fd, HANDLE_POSIX));
        if (r == 0) {
            r = map_handle(cuda, handle, n_bytes, read_only, &at);
            (void)cuda->driver.release_handle(handle); /* the mapping keeps the memory allocated */
        }
        leave(cuda, pushed);
    }
    close(fd);
    *out = (uint8_t *)(uintptr_t)at;
    return r;
}

void cuda_unmap(struct cuda *cuda, uint8_t *base, size_t n_bytes)
{
    bool pushed;

    if (enter(cuda, &pushed) != 0)
        return;
    if (cuda->driver.unmap(address_of(base), n_bytes) == SUCCESS)
        (void)cuda->driver.unreserve(address_of(base), n_bytes);
    leave(cuda, pushed);
}

int cuda_alloc(struct cuda *cuda, size_t n_bytes, uint8_t **out)
{
    address at = 0;
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r == 0) {
        r = check(cuda, "cuMemAlloc", cuda->driver.alloc(&at, n_bytes));
        leave(cuda, pushed);
    }
    *out = (uint8_t *)(uintptr_t)at;
    return r;
}

void cuda_release(struct cuda *cuda, uint8_t *memory)
{
    bool pushed;

    if (!memory || enter(cuda, &pushed) != 0)
        return;
    (void)cuda->driver.free(address_of(memory));
    leave(cuda, pushed);
}

/* ---- addresses and memory of the client's own ---------------------------------------------------------- */

static struct allocation own_memory(const struct cuda *cuda)
{
    return (struct allocation){.type = ALLOCATION_PINNED, .location_type = LOCATION_DEVICE, .ordinal = cuda->ordinal};
}

int cuda_granularity(struct cuda *cuda, size_t *n_bytes)
{
    struct allocation what = own_memory(cuda);
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r == 0) {
        r = check(cuda, "cuMemGetAllocationGranularity", cuda->driver.get_granularity(n_bytes, &what, 0));
        leave(cuda, pushed);
    }
    return r;
}

int cuda_reserve(struct cuda *cuda, size_t n_bytes, uint8_t **out)
{
    address at = 0;
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r == 0) {
        r = check(cuda, "cuMemAddressReserve", cuda->driver.reserve(&at, n_bytes, 0, 0, 0));
        leave(cuda, pushed);
    }
    *out = (uint8_t *)(uintptr_t)at;
    return r;
}

void cuda_unreserve(struct cuda *cuda, uint8_t *base, size_t n_bytes)
{
    bool pushed;

    if (!base || enter(cuda, &pushed) != 0)
        return;
    (void)cuda->driver.unreserve(address_of(base), n_bytes);
    leave(cuda, pushed);
}

/* As check(), but returns -ENOMEM if the GPU has no memory left, because the caller may then make room. */
static int check_room(struct cuda *cuda, const char *what, int error)
{
    int r = check(cuda, what, error);

    return error == OUT_OF_MEMORY ? -ENOMEM : r;
}

int cuda_create(struct cuda *cuda, size_t n_bytes, uint64_t *memory)
{
    struct allocation what = own_memory(cuda);
    address handle = 0;
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r == 0) {
        r = check_room(cuda, "cuMemCreate", cuda->driver.create(&handle, n_bytes, &what, 0));
        leave(cuda, pushed);
    }
    *memory = handle;
    return r;
}

void cuda_destroy(struct cuda *cuda, uint64_t memory)
{
    bool pushed;

    if (enter(cuda, &pushed) != 0)
        return;
    (void)cuda->driver.release_handle(memory);
    leave(cuda, pushed);
}

int cuda_put(struct cuda *cuda, uint8_t *at, uint64_t memory, size_t n_bytes)
{
    struct access access = {LOCATION_DEVICE, cuda->ordinal, ACCESS_READ_WRITE};
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r != 0)
        return r;
    r = check_room(cuda, "cuMemMap", cuda->driver.map(address_of(at), n_bytes, 0, memory, 0));
    if (r == 0) {
        r = check_room(cuda, "cuMemSetAccess", cuda->driver.set_access(address_of(at), n_bytes, &access, 1));
        if (r != 0)
            (void)cuda->driver.unmap(address_of(at), n_bytes);
    }
    leave(cuda, pushed);
    return r;
}

int cuda_take_away(struct cuda *cuda, uint8_t *at, size_t n_bytes)
{
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r == 0) {
        r = check(cuda, "cuMemUnmap", cuda->driver.unmap(address_of(at), n_bytes));
        leave(cuda, pushed);
    }
    return r;
}

/* ---- work on streams ----------------------------------------------------------------------------------- */

int cuda_wait(struct cuda *cuda, void *stream)
{
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r == 0) {
        r = check(cuda, "cuStreamSynchronize", cuda->driver.wait_for_stream(stream));
        leave(cuda, pushed);
    }
    return r;
}

int cuda_copy(struct cuda *cuda, uint8_t *to, const void *from, size_t n_bytes, void *stream)
{
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r == 0) {
        r = check(cuda, "cuMemcpyDtoDAsync", cuda->driver.copy(address_of(to), address_of(from), n_bytes, stream));
        leave(cuda, pushed);
    }
    return r;
}

int cuda_copy_to_host(struct cuda *cuda, void *to, const void *from, size_t n_bytes, void *stream)
{
    bool pushed;
    int r = cuda_wait(cuda, stream);

    if (r == 0)
        r = enter(cuda, &pushed);
    if (r == 0) {
        r = check(cuda, "cuMemcpyDtoH", cuda->driver.copy_to_host(to, address_of(from), n_bytes));
        leave(cuda, pushed);
    }
    return r;
}

static int register_page(struct cuda *cuda, struct progress_page *page)
{
    const struct driver *driver = &cuda->driver;
    int can = 0, r = check(cuda, "cuDeviceGetAttribute", driver->get_attribute(&can, CAN_WRITE_VALUE_64, cuda->device));

    if (r == 0 && !can)
        r = fail(cuda, -EIO,
                 "this GPU, or its driver, cannot write 64-bit values from a stream (cuStreamWriteValue64)");
    if (r == 0)
        r = check(cuda, "cuMemHostRegister",
                  driver->register_host(page, sizeof(*page), HOST_PORTABLE | HOST_DEVICE_MAP));
    if (r != 0)
        return r;
    r = check(cuda, "cuMemHostGetDevicePointer", driver->get_device_address(&cuda->progress_at, page, 0));
    if (r == 0)
        cuda->progress = page;
    else
        (void)driver->unregister_host(page);
    return r;
}

int cuda_open_progress(struct cuda *cuda, struct progress_page *page)
{
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r == 0) {
        r = register_page(cuda, page);
        leave(cuda, pushed);
    }
    return r;
}

/*
 * Makes the stream wait for the last point, because points in the page must be written in order. The wait costs nothing
 * on the stream of the last point. It is not skipped if the handles are equal, because all threads' default streams
 * have one handle, and a new stream may get the handle of a destroyed one.
 */
static int follow(struct cuda *cuda, void *stream)
{
    if (!cuda->last_event)
        return 0;
    return check(cuda, "cuStreamWaitEvent", cuda->driver.let_wait(stream, cuda->last_event, 0));
}

int cuda_wait_for_points(struct cuda *cuda)
{
    return cuda->last_event ? cuda_wait_until_past(cuda, cuda->last_event) : 0;
}

int cuda_say_point(struct cuda *cuda, void *stream, uint64_t point)
{
    address at = cuda->progress_at + progress_word(point) * sizeof(uint64_t);
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r != 0)
        return r;
    r = follow(cuda, stream);
    if (r == 0)
        r = check(cuda, "cuStreamWriteValue64", cuda->driver.write_value(stream, at, point, 0));
    leave(cuda, pushed);
    return r == 0 ? cuda_mark(cuda, &cuda->last_event, stream) : r;
}

/* ---- a stream and events of the client's own ------------------------------------------------------------ */

int cuda_stream_new(struct cuda *cuda, void **stream)
{
    bool pushed;
    int r = enter(cuda, &pushed);

    *stream = NULL;
    if (r == 0) {
        r = check(cuda, "cuStreamCreate", cuda->driver.create_stream(stream, STREAM_NON_BLOCKING));
        leave(cuda, pushed);
    }
    return r;
}

void cuda_stream_free(struct cuda *cuda, void *stream)
{
    bool pushed;

    if (!stream || enter(cuda, &pushed) != 0)
        return;
    (void)cuda->driver.destroy_stream(stream);
    leave(cuda, pushed);
}

int cuda_mark(struct cuda *cuda, void **event, void *stream)
{
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r != 0)
        return r;
    if (!*event)
        r = check(cuda, "cuEventCreate", cuda->driver.create_event(event, EVENT_DISABLE_TIMING));
    if (r == 0)
        r = check(cuda, "cuEventRecord", cuda->driver.record(*event, stream));
    leave(cuda, pushed);
    return r;
}

int cuda_is_past(struct cuda *cuda, void *event, bool *is_past)
{
    int error, r;
    bool pushed;

    *is_past = false;
    r = enter(cuda, &pushed);
    if (r != 0)
        return r;
    error = cuda->driver.query_event(event);
    *is_past = error == SUCCESS;
    leave(cuda, pushed);
    return error == NOT_READY ? 0 : check(cuda, "cuEventQuery", error);
}

int cuda_wait_until_past(struct cuda *cuda, void *event)
{
    bool pushed;
    int r = enter(cuda, &pushed);

    if (r == 0) {
        r = check(cuda, "cuEventSynchronize", cuda->driver.wait_for_event(event));
        leave(cuda, pushed);
    }
    return r;
}

void cuda_event_free(struct cuda *cuda, void *event)
{
    bool pushed;

    if (!event || enter(cuda, &pushed) != 0)
        return;
    (void)cuda->driver.destroy_event(event);
    leave(cuda, pushed);
}
