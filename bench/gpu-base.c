/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/gpu.h"
#include "core/base/base.h"
#include "kernels/device.h"

#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

enum {
    DRIVER_VERSION = 12000, /* CUDA 12.0, as in the engine */
    MAX_ARGUMENTS = 8,
};

void gpu_fail(const char *format, ...)
{
    va_list args;

    fputs("bench-gpu: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

void gpu_check(cudaError_t r, const char *call)
{
    if (r != cudaSuccess)
        gpu_fail("%s: %s", call, cudaGetErrorString(r));
}

void gpu_check_driver(CUresult r, const char *call)
{
    if (r != CUDA_SUCCESS)
        gpu_fail("%s: driver error %d", call, (int)r);
}

uint64_t gpu_now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double gpu_median(double *values, size_t n)
{
    qsort(values, n, sizeof(*values), compare);
    return values[n / 2];
}

/* ---- the GPU -------------------------------------------------------------------------------------------- */

static struct {
    __typeof__(&cuMemGetAllocationGranularity) granularity;
    __typeof__(&cuMemCreate) create;
    __typeof__(&cuMemRelease) release;
    __typeof__(&cuMemExportToShareableHandle) export;
    __typeof__(&cuMemImportFromShareableHandle) import;
    __typeof__(&cuMemAddressReserve) reserve;
    __typeof__(&cuMemAddressFree) unreserve;
    __typeof__(&cuMemMap) map;
    __typeof__(&cuMemUnmap) unmap;
    __typeof__(&cuMemSetAccess) set_access;
} driver;

void *gpu_find(const char *name)
{
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *function = NULL;

    if (cudaGetDriverEntryPointByVersion(name, &function, DRIVER_VERSION, cudaEnableDefault, &found) != cudaSuccess)
        (void)cudaGetLastError();
    return found == cudaDriverEntryPointSuccess ? function : NULL;
}

static void *need(const char *name)
{
    void *function = gpu_find(name);

    if (!function)
        gpu_fail("the GPU driver has no %s", name);
    return function;
}

void gpu_open(void)
{
    gpu_check(cudaSetDevice(0), "cudaSetDevice");
    gpu_check(cudaFree(NULL), "cudaFree"); /* makes the context if cudaSetDevice() has not made it */
    gpu_check((cudaError_t)device_load_kernels(), "device_load_kernels");
    driver.granularity = (__typeof__(driver.granularity))need("cuMemGetAllocationGranularity");
    driver.create = (__typeof__(driver.create))need("cuMemCreate");
    driver.release = (__typeof__(driver.release))need("cuMemRelease");
    driver.export = (__typeof__(driver.export))need("cuMemExportToShareableHandle");
    driver.import = (__typeof__(driver.import))need("cuMemImportFromShareableHandle");
    driver.reserve = (__typeof__(driver.reserve))need("cuMemAddressReserve");
    driver.unreserve = (__typeof__(driver.unreserve))need("cuMemAddressFree");
    driver.map = (__typeof__(driver.map))need("cuMemMap");
    driver.unmap = (__typeof__(driver.unmap))need("cuMemUnmap");
    driver.set_access = (__typeof__(driver.set_access))need("cuMemSetAccess");
}

cudaStream_t gpu_stream(void)
{
    cudaStream_t stream;

    gpu_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return stream;
}

void gpu_finish(cudaStream_t stream)
{
    gpu_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void *gpu_alloc(size_t n_bytes)
{
    void *memory;

    gpu_check(cudaMalloc(&memory, n_bytes), "cudaMalloc");
    return memory;
}

void *gpu_alloc_host(size_t n_bytes)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED)
        gpu_fail("no memory for %zu bytes", n_bytes);
    gpu_check(cudaHostRegister(memory, n_bytes, cudaHostRegisterDefault), "cudaHostRegister");
    return memory;
}

void *gpu_upload(const void *host, size_t n_bytes, cudaStream_t stream)
{
    void *registered = gpu_alloc_host(n_bytes), *device = gpu_alloc(n_bytes);

    memcpy(registered, host, n_bytes);
    gpu_check(cudaMemcpyAsync(device, registered, n_bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
    gpu_finish(stream);
    gpu_check(cudaHostUnregister(registered), "cudaHostUnregister");
    munmap(registered, n_bytes);
    return device;
}

/* ---- pieces --------------------------------------------------------------------------------------------- */

static CUmemAllocationProp properties(void)
{
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
    };
}

size_t gpu_round(size_t n_bytes)
{
    CUmemAllocationProp prop = properties();
    size_t granularity;

    gpu_check_driver(driver.granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                     "cuMemGetAllocationGranularity");
    return round_up(n_bytes, granularity);
}

int gpu_piece_make(size_t n_bytes)
{
    CUmemAllocationProp prop = properties();
    CUmemGenericAllocationHandle handle;
    int fd;

    gpu_check_driver(driver.create(&handle, n_bytes, &prop, 0), "cuMemCreate");
    gpu_check_driver(driver.export(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                     "cuMemExportToShareableHandle");
    gpu_check_driver(driver.release(handle), "cuMemRelease");
    return fd;
}

struct gpu_piece gpu_piece_map(int fd, size_t n_bytes)
{
    CUmemAccessDesc access = {.location = properties().location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at = 0;

    gpu_check_driver(driver.import(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                     "cuMemImportFromShareableHandle");
    gpu_check_driver(driver.reserve(&at, n_bytes, 0, 0, 0), "cuMemAddressReserve");
    gpu_check_driver(driver.map(at, n_bytes, 0, handle, 0), "cuMemMap");
    gpu_check_driver(driver.set_access(at, n_bytes, &access, 1), "cuMemSetAccess");
    gpu_check_driver(driver.release(handle), "cuMemRelease"); /* the mapping keeps the memory allocated */
    return (struct gpu_piece){.at = (uint8_t *)(uintptr_t)at, .n_bytes = n_bytes};
}

void gpu_piece_unmap(struct gpu_piece *piece)
{
    CUdeviceptr at = (uintptr_t)piece->at;

    gpu_check_driver(driver.unmap(at, piece->n_bytes), "cuMemUnmap");
    gpu_check_driver(driver.unreserve(at, piece->n_bytes), "cuMemAddressFree");
    piece->at = NULL;
}

/* ---- other processes ------------------------------------------------------------------------------------ */

static _Noreturn void become(const char *const *argv, const char *host, int socket)
{
    char *arguments[MAX_ARGUMENTS + 2] = {(char *)(uintptr_t) "bench-gpu"};

    for (size_t i = 0; i < MAX_ARGUMENTS && argv[i]; i++)
        arguments[i + 1] = (char *)(uintptr_t)argv[i];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (host)
        setenv("NCCL_HOSTID", host, 1);
    if (dup2(socket, STDIN_FILENO) == STDIN_FILENO)
        execv("/proc/self/exe", arguments);
    _exit(127);
}

void gpu_child_start(struct gpu_child *child, const char *const *argv, const char *host)
{
    int fds[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) < 0 ||
        frame_buffer_init(&child->heard) < 0)
        gpu_fail("no socket, or no memory: %s", strerror(errno));
    fflush(stdout);
    child->pid = fork();
    if (child->pid < 0)
        gpu_fail("fork: %s", strerror(errno));
    if (child->pid == 0)
        become(argv, host, fds[1]);
    close(fds[1]);
    child->fd = fds[0];
}

int gpu_child_wait(struct gpu_child *child)
{
    int status;

    if (waitpid(child->pid, &status, 0) != child->pid)
        gpu_fail("waitpid: %s", strerror(errno));
    close(child->fd);
    frame_buffer_deinit(&child->heard);
    return status;
}

void gpu_child_kill(struct gpu_child *child)
{
    int status;

    kill(child->pid, SIGKILL);
    status = gpu_child_wait(child);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
        gpu_fail("another process had ended before it was killed");
}

void gpu_say(int socket, const void *bytes, size_t n_bytes, int fd)
{
    int r = frame_send(socket, bytes, n_bytes, &fd, fd >= 0);

    if (r != 0)
        gpu_fail("a message cannot be sent to another process: %d", r);
}

const struct frame_buffer *gpu_hear(int socket, struct frame_buffer *heard)
{
    struct pollfd pollfd = {.fd = socket, .events = POLLIN};
    int r;

    while ((r = frame_receive_fds(socket, heard)) == FRAME_AGAIN)
        (void)poll(&pollfd, 1, -1);
    if (r != 0)
        gpu_fail("another process has ended: %d", r);
    return heard;
}
