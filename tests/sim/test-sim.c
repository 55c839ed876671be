/* SPDX-License-Identifier: Apache-2.0 */

/* The stand-ins for CUDA behave as tests/sim/sim.h promises: late results, wrong uses, ordered failures. */

#include <fcntl.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "sim-child.h"

enum { N = 1000, GRANULE = 2 << 20 };

static uint32_t *numbers(uint32_t first)
{
    uint32_t *n = malloc(N * sizeof(*n));

    CHECK(n);
    for (uint32_t i = 0; i < N; i++)
        n[i] = first + i;
    return n;
}

static bool are_numbers(const uint32_t *n, uint32_t first)
{
    for (uint32_t i = 0; i < N; i++)
        if (n[i] != first + i)
            return false;
    return true;
}

static bool is_poison(const uint32_t *n)
{
    for (uint32_t i = 0; i < N; i++)
        if (n[i] != poison_at(&n[i]))
            return false;
    return true;
}

static sem_t held;

static void wait_until_let_go(void *unused)
{
    (void)unused;
    CHECK(sem_wait(&held) == 0);
}

/* Puts a kernel on the stream that blocks the whole device until let_go(). Hold one stream at a time. */
static void hold(cudaStream_t stream)
{
    CHECK(sem_init(&held, 0, 0) == 0);
    CHECK(sim_launch(stream, wait_until_let_go, NULL, NULL) == 0);
}

static void let_go(void)
{
    CHECK(sem_post(&held) == 0);
}

static int64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- results -------------------------------------------------------------------------------------------- */

static void copy_there_and_back(void *arg)
{
    _cleanup_free_ uint32_t *in = numbers(7), *out = numbers(0);
    int far = *(int *)arg;
    cudaStream_t near_stream = new_stream(0), far_stream = new_stream(far);
    uint32_t *a = new_memory(0, N * 4), *b = new_memory(far, N * 4);

    put(a, in, N * 4, near_stream);
    CHECK(cudaMemcpyAsync(b, a, N * 4, cudaMemcpyDeviceToDevice, far_stream) == cudaSuccess);
    get(out, b, N * 4, far_stream);
    CHECK(are_numbers(out, 7));
    CHECK(cudaMemsetAsync(b, 0x5a, N * 4 - 1, far_stream) == cudaSuccess);
    get(out, b, N * 4, far_stream);
    for (int i = 0; i < N - 1; i++)
        CHECK(out[i] == 0x5a5a5a5a);
    CHECK(out[N - 1] == ((7u + N - 1) & 0xff000000u) + 0x5a5a5a);
    CHECK(cudaFree(a) == cudaSuccess && cudaFree(b) == cudaSuccess && cudaFree(NULL) == cudaSuccess);
}

static void test_copies(void **state)
{
    static const char *const environments[] = {"", "delay-us=0", "seed=2,delay-us=3000"};

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(environments); i++)
        for (int far = 0; far < 2; far++)
            child_passes(environments[i], copy_there_and_back, &far);
}

static void fresh_memory(void *arg)
{
    _cleanup_free_ uint32_t *out = numbers(0);
    cudaStream_t stream = new_stream(0);

    (void)arg;
    get(out, new_memory(0, N * 4), N * 4, stream);
    CHECK(is_poison(out));
}

static void test_fresh_memory(void **state)
{
    (void)state;
    child_passes("", fresh_memory, NULL);
}

/* The copy's target is complete only when the operation ends, after its delay. */
static void late(void *arg)
{
    uint32_t *host = new_host(N * 4), *out = new_host(N * 4);
    cudaStream_t stream = new_stream(0);
    void *memory = new_memory(0, N * 4);
    int64_t let_go_ms;

    (void)arg;
    for (uint32_t i = 0; i < N; i++)
        host[i] = 3 + i;
    CHECK(cudaMemcpyAsync(memory, host, N * 4, cudaMemcpyDefault, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    hold(stream);
    CHECK(cudaMemcpyAsync(out, memory, N * 4, cudaMemcpyDefault, stream) == cudaSuccess);
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    CHECK(cudaGetLastError() == cudaErrorNotReady && cudaGetLastError() == cudaSuccess);
    let_go_ms = now_ms();
    let_go();
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(now_ms() - let_go_ms >= 99); /* the ordered delay */
    CHECK(cudaStreamQuery(stream) == cudaSuccess);
    CHECK(are_numbers(out, 3));
}

/* Maps host memory twice. Writes to the second mapping are no race for a sanitizer. */
static void *new_host_twice(void **again)
{
    int fd = memfd_create("twice", MFD_CLOEXEC);
    void *host;

    CHECK(fd >= 0 && ftruncate(fd, N * 4) == 0);
    host = mmap(NULL, N * 4, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    *again = mmap(NULL, N * 4, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(host != MAP_FAILED && *again != MAP_FAILED);
    close(fd);
    CHECK(cudaHostRegister(host, N * 4, cudaHostRegisterDefault) == cudaSuccess);
    return host;
}

/* Waits until the operation runs: its target is then poison. */
static void wait_for_poison(const void *again)
{
    while (!is_poison(again))
        sleep_ms(1);
}

static void poisoned(void *arg)
{
    void *again, *out = new_host_twice(&again);
    cudaStream_t stream = new_stream(0);
    void *memory = new_memory(0, N * 4);

    (void)arg;
    CHECK(cudaMemsetAsync(memory, 0, N * 4, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(cudaMemcpyAsync(out, memory, N * 4, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    wait_for_poison(again);
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
}

static void test_late(void **state)
{
    (void)state;
    child_passes("cudaMemcpyAsync:delay=100@2", late, NULL);
    child_passes("cudaMemcpyAsync:hang", poisoned, NULL);
}

/* ---- kernels -------------------------------------------------------------------------------------------- */

struct kernel {
    uint32_t *memory;
    uint32_t add;
    atomic_int *n_freed;
};

static void run_add(void *args)
{
    const struct kernel *k = args;

    for (int i = 0; i < N; i++)
        k->memory[i] += k->add;
}

static void free_kernel(void *args)
{
    struct kernel *k = args;

    atomic_fetch_add(k->n_freed, 1);
    free(k);
}

static int launch_add(cudaStream_t stream, uint32_t *memory, uint32_t n, atomic_int *n_freed)
{
    struct kernel *k = malloc(sizeof(*k));

    CHECK(k);
    *k = (struct kernel){memory, n, n_freed};
    return sim_launch(stream, run_add, free_kernel, k);
}

static void kernels(void *arg)
{
    _cleanup_free_ uint32_t *in = numbers(7), *out = numbers(0);
    cudaStream_t stream = new_stream(1);
    uint32_t *memory = new_memory(1, N * 4);
    atomic_int n_freed = 0;

    (void)arg;
    put(memory, in, N * 4, stream);
    for (int i = 0; i < 10; i++)
        CHECK(launch_add(stream, memory, 1, &n_freed) == 0);
    get(out, memory, N * 4, stream);
    CHECK(are_numbers(out, 17));
    while (n_freed < 10) /* run after the kernel */
        sleep_ms(1);
}

static void test_kernels(void **state)
{
    (void)state;
    child_passes("", kernels, NULL);
}

/* ---- events --------------------------------------------------------------------------------------------- */

/* A chain of operations over streams of two devices. Each link is correct only because of its event. */
static void chain(void *arg)
{
    cudaStream_t streams[] = {new_stream(0), new_stream(1), new_stream(1), new_stream(0)};
    uint32_t *memory = new_memory(0, N * 4);
    _cleanup_free_ uint32_t *out = numbers(0);
    atomic_int n_freed = 0;
    cudaEvent_t last = NULL;

    (void)arg;
    CHECK(cudaMemsetAsync(memory, 0, N * 4, streams[0]) == cudaSuccess);
    for (int i = 0; i < 100; i++) {
        int at = i % 4, device = at == 1 || at == 2;

        if (last)
            CHECK(cudaStreamWaitEvent(streams[at], last, 0) == cudaSuccess);
        CHECK(cudaSetDevice(device) == cudaSuccess);
        CHECK(launch_add(streams[at], memory, 1, &n_freed) == 0);
        last = new_event(device, cudaEventDisableTiming);
        CHECK(cudaEventRecord(last, streams[at]) == cudaSuccess);
    }
    CHECK(cudaEventSynchronize(last) == cudaSuccess);
    CHECK(cudaEventQuery(last) == cudaSuccess);
    get(out, memory, N * 4, streams[0]);
    for (int i = 0; i < N; i++)
        CHECK(out[i] == 100);
}

/* A wait for an event means its last recording before the call. */
static void recordings(void *arg)
{
    cudaStream_t first = new_stream(0), second = new_stream(0);
    cudaEvent_t event = new_event(0, cudaEventDisableTiming), other = new_event(0, cudaEventDisableTiming);
    void *memory = new_memory(0, 4);

    (void)arg;
    CHECK(cudaEventQuery(event) == cudaSuccess); /* never recorded */
    CHECK(cudaStreamWaitEvent(second, event, 0) == cudaSuccess);
    CHECK(cudaMemsetAsync(memory, 0, 4, first) == cudaSuccess); /* hangs */
    CHECK(cudaEventRecord(event, first) == cudaSuccess);
    CHECK(cudaEventRecord(other, second) == cudaSuccess);
    CHECK(cudaEventSynchronize(other) == cudaSuccess); /* does not wait for the later recording */
    CHECK(cudaStreamWaitEvent(second, event, 0) == cudaSuccess);
    CHECK(cudaEventRecord(other, second) == cudaSuccess);
    sleep_ms(50);
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    CHECK(cudaEventQuery(other) == cudaErrorNotReady);
    CHECK(cudaStreamQuery(first) == cudaErrorNotReady && cudaStreamQuery(second) == cudaErrorNotReady);
}

static void test_events(void **state)
{
    static const char *const environments[] = {"", "delay-us=0", "seed=3,delay-us=1000"};

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(environments); i++)
        child_passes(environments[i], chain, NULL);
    child_passes("cudaMemsetAsync:hang", recordings, NULL);
}

/* ---- several processes ---------------------------------------------------------------------------------- */

/* Forks, with a socket pair between the processes. Return: 0 in the new process. */
static pid_t part(int *fd)
{
    int fds[2];
    pid_t pid;

    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds) == 0);
    pid = fork();
    CHECK(pid >= 0);
    *fd = fds[pid == 0];
    close(fds[pid != 0]);
    return pid;
}

static void send_with_fd(int socket, const void *bytes, size_t n, int fd)
{
    char control[CMSG_SPACE(sizeof(fd))] = {0};
    struct iovec iov = {(void *)(uintptr_t)bytes, n};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(fd));
    memcpy(CMSG_DATA(c), &fd, sizeof(fd));
    CHECK(sendmsg(socket, &msg, 0) == (ssize_t)n);
}

static int receive_with_fd(int socket, void *bytes, size_t n)
{
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = {bytes, n};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    int fd;

    CHECK(recvmsg(socket, &msg, MSG_CMSG_CLOEXEC) == (ssize_t)n);
    CHECK(CMSG_FIRSTHDR(&msg) != NULL);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(fd));
    return fd;
}

/* The driver's entry points, looked up as an engine does. */
static struct driver {
    __typeof__(&cuMemGetAllocationGranularity) granularity;
    __typeof__(&cuMemCreate) create;
    __typeof__(&cuMemRelease) release;
    __typeof__(&cuMemExportToShareableHandle) export;
    __typeof__(&cuMemImportFromShareableHandle) import;
    __typeof__(&cuMemAddressReserve) reserve;
    __typeof__(&cuMemAddressFree) free;
    __typeof__(&cuMemMap) map;
    __typeof__(&cuMemUnmap) unmap;
    __typeof__(&cuMemSetAccess) set_access;
} driver;

static void load(const char *name, void *function)
{
    enum cudaDriverEntryPointQueryResult result;
    void *pointer;

    CHECK(cudaGetDriverEntryPointByVersion(name, &pointer, 12000, cudaEnableDefault, &result) == cudaSuccess);
    CHECK(result == cudaDriverEntryPointSuccess);
    memcpy(function, &pointer, sizeof(pointer));
}

static void load_driver(void)
{
    load("cuMemGetAllocationGranularity", &driver.granularity);
    load("cuMemCreate", &driver.create);
    load("cuMemRelease", &driver.release);
    load("cuMemExportToShareableHandle", &driver.export);
    load("cuMemImportFromShareableHandle", &driver.import);
    load("cuMemAddressReserve", &driver.reserve);
    load("cuMemAddressFree", &driver.free);
    load("cuMemMap", &driver.map);
    load("cuMemUnmap", &driver.unmap);
    load("cuMemSetAccess", &driver.set_access);
    CHECK(cudaSetDevice(0) == cudaSuccess);
}

static CUmemAllocationProp prop_of(int device)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                 .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
}

static CUmemAccessDesc access_of(int device, CUmemAccess_flags flags)
{
    return (CUmemAccessDesc){{CU_MEM_LOCATION_TYPE_DEVICE, device}, flags};
}

static CUmemGenericAllocationHandle create(int device)
{
    CUmemAllocationProp prop = prop_of(device);
    CUmemGenericAllocationHandle handle;

    CHECK(driver.create(&handle, GRANULE, &prop, 0) == CUDA_SUCCESS);
    return handle;
}

static void *map(CUmemGenericAllocationHandle handle, int device)
{
    CUmemAccessDesc access = access_of(device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUdeviceptr at;

    CHECK(driver.reserve(&at, GRANULE, 0, 0, 0) == CUDA_SUCCESS && at % GRANULE == 0);
    CHECK(driver.map(at, GRANULE, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(driver.set_access(at, GRANULE, &access, 1) == CUDA_SUCCESS);
    return (void *)(uintptr_t)at;
}

static _Noreturn void make_memory(int socket)
{
    _cleanup_free_ uint32_t *in = numbers(42);
    CUmemGenericAllocationHandle handle;
    char done;
    int fd;

    load_driver();
    handle = create(1);
    put((uint8_t *)map(handle, 1) + 4096, in, N * 4, new_stream(1));
    CHECK(driver.export(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS);
    send_with_fd(socket, "", 1, fd);
    (void)!read(socket, &done, 1); /* this process is killed here */
    _exit(0);
}

/* A process opens memory after the death of the process that made it. */
static void memory_outlives(void *arg)
{
    _cleanup_free_ uint32_t *out = numbers(0);
    CUmemGenericAllocationHandle handle;
    int socket, fd;
    pid_t pid = part(&socket);
    void *memory;
    char byte;

    (void)arg;
    if (pid == 0)
        make_memory(socket);
    fd = receive_with_fd(socket, &byte, 1);
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, NULL, 0) == pid);
    load_driver();
    CHECK(driver.import(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_SUCCESS);
    close(fd);
    memory = map(handle, 1);
    CHECK(driver.release(handle) == CUDA_SUCCESS);
    get(out, (uint8_t *)memory + 4096, N * 4, new_stream(1));
    CHECK(are_numbers(out, 42));
    CHECK(driver.unmap((uintptr_t)memory, GRANULE) == CUDA_SUCCESS);
    CHECK(driver.free((uintptr_t)memory, GRANULE) == CUDA_SUCCESS);
}

/*
 * On one machine, memory of another process counts as used. After that process's death it does as long as another
 * process has a descriptor of it.
 */
static void one_machine(void *arg)
{
    CUmemAllocationProp prop = prop_of(1);
    CUmemGenericAllocationHandle handle;
    size_t n_free, total;
    int socket, fd;
    pid_t pid = part(&socket);
    void *p;
    char byte;

    if (pid == 0) {
        load_driver();
        CHECK(cudaSetDevice(1) == cudaSuccess && cudaMalloc(&p, GRANULE) == cudaSuccess);
        make_memory(socket);
    }
    fd = receive_with_fd(socket, &byte, 1);
    load_driver();
    CHECK(cudaSetDevice(1) == cudaSuccess);
    CHECK(cudaMemGetInfo(&n_free, &total) == cudaSuccess && total == 3 * GRANULE);
    CHECK(n_free == (arg ? 1 : 3) * (size_t)GRANULE);
    CHECK(driver.create(&handle, 2 * GRANULE, &prop, 0) == (arg ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS));
    CHECK(cudaMalloc(&p, 2 * GRANULE) == cudaErrorMemoryAllocation);
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, NULL, 0) == pid);
    if (!arg)
        return;
    CHECK(cudaMemGetInfo(&n_free, &total) == cudaSuccess && n_free == 2 * (size_t)GRANULE);
    close(fd);
    CHECK(cudaMemGetInfo(&n_free, &total) == cudaSuccess && n_free == total);
    CHECK(cudaMalloc(&p, 3 * GRANULE) == cudaSuccess && cudaFree(p) == cudaSuccess);
    CHECK(cudaMemGetInfo(&n_free, &total) == cudaSuccess && n_free == total);
}

static void test_one_machine(void **state)
{
    char env[64];

    child_passes("memory=6", one_machine, NULL);
    snprintf(env, sizeof(env), "memory=6,machine=test%d", getpid());
    child_passes(env, one_machine, state);
}

static unsigned n_open_fds(void)
{
    unsigned n = 0;

    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* Memory exists as long as its handle or a mapping exists. Then no descriptor is left, and its bytes are free again. */
static void memory_goes(void *arg)
{
    CUmemGenericAllocationHandle handle;
    size_t n_free, total;
    unsigned n_fds;
    void *memory;

    (void)arg;
    load_driver();
    n_fds = n_open_fds();
    handle = create(0);
    memory = map(handle, 0);
    CHECK(driver.release(handle) == CUDA_SUCCESS);
    CHECK(cudaMemGetInfo(&n_free, &total) == cudaSuccess && total - n_free == GRANULE);
    CHECK(driver.unmap((uintptr_t)memory, GRANULE) == CUDA_SUCCESS);
    CHECK(cudaMemGetInfo(&n_free, &total) == cudaSuccess && total == n_free);
    CHECK(n_open_fds() == n_fds);
}

static void test_memory_outlives(void **state)
{
    (void)state;
    child_passes("", memory_goes, NULL);
    child_passes("", memory_outlives, NULL);
}

/* ---- values that streams write -------------------------------------------------------------------------- */

static uint64_t *shared_word(void)
{
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    CHECK(page != MAP_FAILED);
    return page;
}

static CUdeviceptr register_word(uint64_t *word)
{
    CUdeviceptr at;

    CHECK(cudaSetDevice(0) == cudaSuccess);
    CHECK(cuMemHostGetDevicePointer(&at, word, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cuMemHostRegister(word, 4096, CU_MEMHOSTREGISTER_DEVICEMAP) == CUDA_SUCCESS);
    CHECK(cuMemHostGetDevicePointer(&at, word, 0) == CUDA_SUCCESS);
    return at;
}

static uint64_t word_now(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* Another process reads the old value until all earlier work on the stream is done. */
static void value_between(void *arg)
{
    uint64_t *word = shared_word();
    int socket;
    pid_t pid = part(&socket);
    char said;

    (void)arg;
    if (pid == 0) {
        CUdeviceptr at = register_word(word);
        cudaStream_t stream = new_stream(0);

        hold(stream);
        CHECK(cuStreamWriteValue64(stream, at, 7, 0) == CUDA_SUCCESS);
        CHECK(cuStreamWriteValue64(stream, at, 8, 0) == CUDA_SUCCESS);
        CHECK(send(socket, "", 1, 0) == 1 && recv(socket, &said, 1, 0) == 1);
        let_go();
        CHECK(recv(socket, &said, 1, 0) == 0);
        _exit(0);
    }
    CHECK(recv(socket, &said, 1, 0) == 1);
    sleep_ms(50);
    CHECK(word_now(word) == 0);
    CHECK(send(socket, "", 1, 0) == 1);
    for (unsigned i = 0; word_now(word) != 8; i++) {
        CHECK(i < 10000);
        sleep_ms(1);
    }
    close(socket);
    CHECK(waitpid(pid, NULL, 0) == pid);
}

/* A stream's unfinished writes are never done after its process has died. */
static void value_of_dead(void *arg)
{
    uint64_t *word = shared_word();
    int socket;
    pid_t pid = part(&socket);
    char said;

    (void)arg;
    if (pid == 0) {
        CUdeviceptr at = register_word(word);
        cudaStream_t stream = new_stream(0);

        hold(stream);
        CHECK(cuStreamWriteValue64(stream, at, 7, 0) == CUDA_SUCCESS);
        CHECK(send(socket, "", 1, 0) == 1);
        pause();
    }
    CHECK(recv(socket, &said, 1, 0) == 1);
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, NULL, 0) == pid);
    sleep_ms(50);
    CHECK(word_now(word) == 0);
}

static void value_refused(void *arg)
{
    uint64_t *word = shared_word();
    CUdeviceptr at = register_word(word);
    CUdevice device;
    int can;

    (void)arg;
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(cuDeviceGet(&device, 0) == CUDA_SUCCESS);
    CHECK(cuDeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device) == CUDA_SUCCESS && can);
    CHECK(cuDeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0) ==
          CUDA_ERROR_INVALID_DEVICE);
    CHECK(cuStreamWriteValue64(new_stream(0), at + 4, 7, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cuStreamWriteValue64(new_stream(0), at, 7, 1) == CUDA_ERROR_INVALID_VALUE);
}

static void value_unsupported(void *arg)
{
    CUdeviceptr at = register_word(shared_word());
    CUdevice device;
    int can;

    (void)arg;
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(cuDeviceGet(&device, 0) == CUDA_SUCCESS);
    CHECK(cuDeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device) == CUDA_SUCCESS &&
          !can);
    CHECK(cuStreamWriteValue64(new_stream(0), at, 7, 0) == CUDA_ERROR_NOT_SUPPORTED);
}

static void test_values(void **state)
{
    (void)state;
    child_passes("", value_between, NULL);
    child_passes("", value_of_dead, NULL);
    child_passes("", value_refused, NULL);
    child_passes("values=0", value_unsupported, NULL);
}

static void forked(void *arg)
{
    int count, status;
    pid_t pid;

    (void)arg;
    CHECK(cudaSetDevice(0) == cudaSuccess);
    pid = fork();
    if (pid == 0)
        _exit(cudaGetDeviceCount(&count));
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == cudaErrorInitializationError);
}

static void test_forked(void **state)
{
    (void)state;
    child_passes("", forked, NULL);
}

/* ---- what CUDA refuses ---------------------------------------------------------------------------------- */

static void refusals(void *arg)
{
    size_t n_free, total;
    char id[16];
    void *p = &p;
    int n;

    (void)arg;
    CHECK(cudaGetDeviceCount(&n) == cudaSuccess && n == 2);
    CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice && cudaSetDevice(-1) == cudaErrorInvalidDevice);
    CHECK(cudaGetLastError() == cudaErrorInvalidDevice && cudaPeekAtLastError() == cudaSuccess);
    CHECK(cudaDeviceGetAttribute(&n, cudaDevAttrComputeCapabilityMajor, 1) == cudaSuccess && n == 9);
    CHECK(cudaDeviceGetAttribute(&n, cudaDevAttrComputeCapabilityMajor, 2) == cudaErrorInvalidDevice);
    CHECK(cudaDeviceGetPCIBusId(id, sizeof(id), 1) == cudaSuccess && strcmp(id, "0000:11:00.0") == 0);
    CHECK(cudaDeviceGetPCIBusId(id, 12, 1) == cudaErrorInvalidValue);
    CHECK(cudaFree(&n) == cudaErrorInvalidValue);
    CHECK(cudaMemGetInfo(&n_free, &total) == cudaSuccess && total == 3 << 20 && n_free == total);
    CHECK(cudaMalloc(&p, (3 << 20) + 1) == cudaErrorMemoryAllocation && p == NULL);
    CHECK(cudaMalloc(&p, 0) == cudaSuccess && p == NULL);
    CHECK(cudaMalloc(&p, 3 << 20) == cudaSuccess);
    CHECK(cudaMemGetInfo(&n_free, &total) == cudaSuccess && n_free == 0);
    CHECK(cudaFree(p) == cudaSuccess && cudaMalloc(&p, 3 << 20) == cudaSuccess);
    CHECK(cudaRuntimeGetVersion(&n) == cudaSuccess && n == 12040);
    CHECK(cudaDriverGetVersion(&n) == cudaSuccess && n == 12020);
    CHECK(strcmp(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady") == 0);
    CHECK(strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory") == 0);
}

static void host_refusals(void *arg)
{
    uint8_t *host = new_host(8192);
    uint8_t *constant = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    (void)arg;
    CHECK(cudaHostRegister(host + 4096, 4096, 0) == cudaErrorHostMemoryAlreadyRegistered);
    CHECK(cudaGetLastError() == cudaErrorHostMemoryAlreadyRegistered);
    CHECK(cuMemHostRegister(host + 4096, 4096, 0) == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaHostUnregister(host + 4096) == cudaErrorHostMemoryNotRegistered);
    CHECK(cudaHostRegister(host, 0, 0) == cudaErrorInvalidValue);
    CHECK(cudaHostUnregister(host) == cudaSuccess);
    CHECK(cudaHostUnregister(host) == cudaErrorHostMemoryNotRegistered);
    CHECK(cudaHostRegister(constant, 4096, cudaHostRegisterDefault) == cudaErrorInvalidValue);
    CHECK(cudaHostRegister(constant, 4096, cudaHostRegisterReadOnly) == cudaSuccess);
}

static void driver_refusals(void *arg)
{
    CUmemAllocationProp prop = prop_of(0), far = prop_of(4), secret = prop_of(0);
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    enum cudaDriverEntryPointQueryResult result;
    CUmemGenericAllocationHandle handle, other;
    CUdeviceptr at;
    void *p;
    int fd;

    (void)arg;
    CHECK(cuMemCreate(&handle, GRANULE, &prop, 0) == CUDA_ERROR_INVALID_CONTEXT);
    load_driver();
    CHECK(cudaGetDriverEntryPointByVersion("cuMemPaint", &p, 12000, 0, &result) == cudaSuccess);
    CHECK(result == cudaDriverEntryPointSymbolNotFound && p == NULL);
    CHECK(cudaGetDriverEntryPointByVersion("cuMemMap", &p, 14000, 0, &result) == cudaSuccess);
    CHECK(result == cudaDriverEntryPointVersionNotSufficent && p == NULL);
    CHECK(cudaGetDriverEntryPointByVersion("cuMemPaint", &p, 12000, 0, NULL) == cudaErrorSymbolNotFound);

    secret.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    CHECK(driver.create(&handle, GRANULE - 1, &prop, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(driver.create(&handle, GRANULE, &far, 0) == CUDA_ERROR_INVALID_DEVICE);
    CHECK(driver.create(&handle, (size_t)1024 * GRANULE, &prop, 0) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(driver.create(&other, GRANULE, &secret, 0) == CUDA_SUCCESS);
    CHECK(driver.export(&fd, other, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(driver.import(&handle, (void *)(intptr_t)STDERR_FILENO, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) ==
          CUDA_ERROR_INVALID_VALUE);

    handle = create(0);
    CHECK(driver.reserve(&at, 2 * GRANULE, 0, 0, 0) == CUDA_SUCCESS);
    CHECK(driver.map(at + 4096, GRANULE, 0, handle, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(driver.map(at, 2 * GRANULE, 0, handle, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(driver.map(at, GRANULE, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(driver.map(at, GRANULE, 0, other, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(driver.set_access(at, 2 * GRANULE, &access, 1) == CUDA_ERROR_INVALID_VALUE);
    CHECK(driver.free(at, 2 * GRANULE) == CUDA_ERROR_INVALID_VALUE);
    CHECK(driver.unmap(at + GRANULE, GRANULE) == CUDA_ERROR_INVALID_VALUE);
    CHECK(driver.map(at + GRANULE, GRANULE, 0, other, 0) == CUDA_SUCCESS);
    CHECK(driver.set_access(at, 2 * GRANULE, &access, 1) == CUDA_SUCCESS);
    CHECK(driver.release(handle) == CUDA_SUCCESS && driver.release(handle) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cudaMemsetAsync((void *)(uintptr_t)(at + GRANULE - 8), 0, 16, new_stream(0)) == cudaSuccess);
}

/* Access between devices is possible, or not if arg is NULL. */
static void peers(void *arg)
{
    const CUmemAccessDesc both[] = {access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
                                    access_of(1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    int can = -1;

    load_driver();
    CHECK(cudaDeviceCanAccessPeer(&can, 0, 9) == cudaErrorInvalidDevice && can == -1);
    CHECK(cudaDeviceCanAccessPeer(&can, 1, 1) == cudaSuccess && can == 0);
    CHECK(cudaDeviceCanAccessPeer(&can, 0, 1) == cudaSuccess && can == !!arg);
    handle = create(0);
    CHECK(driver.reserve(&at, GRANULE, 0, 0, 0) == CUDA_SUCCESS);
    CHECK(driver.map(at, GRANULE, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(driver.set_access(at, GRANULE, both, 2) == (arg ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE));
    if (arg)
        CHECK(cudaMemsetAsync((void *)(uintptr_t)at, 0, 16, new_stream(1)) == cudaSuccess);
}

static void test_refusals(void **state)
{
    bool reach = true;

    (void)state;
    child_passes("", peers, &reach);
    child_passes("peers=0", peers, NULL);
    child_passes("devices=2,memory=3,runtime=12040,driver=12020", refusals, NULL);
    child_passes("", host_refusals, NULL);
    child_passes("", driver_refusals, NULL);
}

/* ---- wrong uses ----------------------------------------------------------------------------------------- */

static void copy(void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind)
{
    (void)cudaMemcpyAsync(to, from, n_bytes, kind, new_stream(0));
    sleep_ms(10000); /* longer than any operation; an error that is detected at its end comes before */
}

static void wrong_pageable(void *arg)
{
    uint32_t host[4];

    (void)arg;
    copy(new_memory(0, 16), host, sizeof(host), cudaMemcpyHostToDevice);
}

static void wrong_size(void *arg)
{
    (void)arg;
    copy(new_memory(0, 100), new_host(4096), 104, cudaMemcpyHostToDevice);
}

static void wrong_kind(void *arg)
{
    (void)arg;
    copy(new_memory(0, 100), new_host(4096), 100, cudaMemcpyDeviceToHost);
}

static void wrong_overlap(void *arg)
{
    uint8_t *memory = new_memory(0, 100);

    (void)arg;
    copy(memory, memory + 49, 50, cudaMemcpyDeviceToDevice);
}

static void wrong_read_only(void *arg)
{
    void *host = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    (void)arg;
    CHECK(cudaHostRegister(host, 4096, cudaHostRegisterReadOnly) == cudaSuccess);
    copy(host, new_memory(0, 100), 100, cudaMemcpyDeviceToHost);
}

static void wrong_access(void *arg)
{
    (void)arg;
    load_driver();
    copy(map(create(1), 1), new_memory(0, 100), 100, cudaMemcpyDeviceToDevice);
}

static void wrong_write(void *arg)
{
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READ);
    void *memory;

    (void)arg;
    load_driver();
    memory = map(create(0), 0);
    CHECK(driver.set_access((uintptr_t)memory, GRANULE, &access, 1) == CUDA_SUCCESS);
    copy(memory, new_memory(0, 100), 100, cudaMemcpyDeviceToDevice);
}

static void wrong_read(void *arg)
{
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_NONE);
    void *memory;

    (void)arg;
    load_driver();
    memory = map(create(0), 0);
    CHECK(driver.set_access((uintptr_t)memory, GRANULE, &access, 1) == CUDA_SUCCESS);
    copy(new_memory(0, 100), memory, 100, cudaMemcpyDeviceToDevice);
}

static void wrong_default_stream(void *arg)
{
    (void)arg;
    (void)cudaMemsetAsync(new_memory(0, 4), 0, 4, NULL);
}

static void wrong_dead_stream(void *arg)
{
    cudaStream_t stream = new_stream(0);

    (void)arg;
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    (void)cudaStreamQuery(stream);
}

static void wrong_dead_event(void *arg)
{
    cudaEvent_t event = new_event(0, cudaEventDisableTiming);

    (void)arg;
    CHECK(cudaEventDestroy(event) == cudaSuccess);
    (void)cudaStreamWaitEvent(new_stream(0), event, 0);
}

static void wrong_event(void *arg)
{
    cudaEvent_t event = new_event(1, cudaEventDisableTiming);

    (void)arg;
    (void)cudaEventRecord(event, new_stream(0));
}

static void wrong_launch(void *arg)
{
    cudaStream_t stream = new_stream(0);
    atomic_int n_freed = 0;

    (void)arg;
    CHECK(cudaSetDevice(1) == cudaSuccess);
    (void)launch_add(stream, NULL, 0, &n_freed);
}

/* Frees memory while an operation that never ends uses it. */
static void wrong_free(void *arg)
{
    void *memory = new_memory(0, 4);

    (void)arg;
    CHECK(cudaMemsetAsync(memory, 0, 4, new_stream(0)) == cudaSuccess);
    (void)cudaFree(memory);
}

static void wrong_unregister(void *arg)
{
    void *host = new_host(4096);

    (void)arg;
    CHECK(cudaMemsetAsync(host, 0, 4, new_stream(0)) == cudaSuccess);
    (void)cudaHostUnregister(host);
}

static void wrong_unmap(void *arg)
{
    void *memory;

    (void)arg;
    load_driver();
    memory = map(create(0), 0);
    CHECK(cudaMemsetAsync(memory, 0, 4, new_stream(0)) == cudaSuccess);
    (void)driver.unmap((uintptr_t)memory, GRANULE);
}

static void wrong_late_use(void *arg)
{
    void *memory = new_memory(0, 4);

    (void)arg;
    CHECK(cudaFree(memory) == cudaSuccess);
    (void)cudaMemsetAsync(memory, 0, 4, new_stream(0));
}

/* The host changes memory that a copy reads: the copy has begun, and ends half a second later. */
static void wrong_change(void *arg)
{
    void *from_again, *from = new_host_twice(&from_again), *to_again, *to = new_host_twice(&to_again);

    (void)arg;
    CHECK(cudaMemcpyAsync(to, from, N * 4, cudaMemcpyHostToHost, new_stream(0)) == cudaSuccess);
    wait_for_poison(to_again);
    memset((uint8_t *)from_again + N * 4 - 1, 1, 1);
    sleep_ms(10000); /* the child dies earlier */
}

/* A kernel on another stream writes memory while an operation writes it. */
static void wrong_second_writer(void *arg)
{
    cudaStream_t stream = new_stream(0);
    void *again, *memory = new_host_twice(&again);
    atomic_int n_freed = 0;

    (void)arg;
    CHECK(cudaMemsetAsync(memory, 0, N * 4, new_stream(0)) == cudaSuccess);
    wait_for_poison(again);
    CHECK(launch_add(stream, memory, 1, &n_freed) == 0);
    sleep_ms(10000); /* the child dies earlier */
}

static void wrong_value_place(void *arg)
{
    (void)arg;
    (void)cuStreamWriteValue64(new_stream(0), (uintptr_t)shared_word(), 7, 0);
}

static void wrong_value_unregister(void *arg)
{
    uint64_t *word = shared_word();
    CUdeviceptr at = register_word(word);

    (void)arg;
    CHECK(cuStreamWriteValue64(new_stream(0), at, 7, 0) == CUDA_SUCCESS);
    (void)cudaHostUnregister(word);
}

static void blocks_in_malloc(void *arg)
{
    void *p, *memory = new_memory(0, 16);

    (void)arg;
    CHECK(cudaMemsetAsync(memory, 0, 16, new_stream(0)) == cudaSuccess);
    (void)cudaMalloc(&p, 16);
}

static void blocks_in_register(void *arg)
{
    void *memory = new_memory(0, 16);

    CHECK(cudaMemsetAsync(memory, 0, 16, new_stream(0)) == cudaSuccess);
    if (arg)
        (void)cuMemHostRegister(shared_word(), 4096, 0);
    (void)cudaHostRegister(shared_word(), 4096, 0);
}

static void blocks_in_synchronize(void *arg)
{
    (void)arg;
    (void)cudaStreamSynchronize(new_stream(0));
}

/* These calls are allowed, except to a process that never blocks. */
static void test_blocking(void **state)
{
    (void)state;
    child_passes("", blocks_in_malloc, NULL);
    child_passes("", blocks_in_register, NULL);
    child_passes("", blocks_in_synchronize, NULL);
    child_dies("never-blocks,cudaMemsetAsync:hang", blocks_in_malloc, NULL,
               "cudaMalloc: it may wait for cudaMemsetAsync on a stream, and this process never blocks");
    child_dies("never-blocks,cudaMemsetAsync:hang", blocks_in_register, NULL,
               "cudaHostRegister: it may wait for cudaMemsetAsync on a stream, and this process never blocks");
    child_dies("never-blocks,cudaMemsetAsync:hang", blocks_in_register, state,
               "cuMemHostRegister: it may wait for cudaMemsetAsync on a stream, and this process never blocks");
    child_dies("never-blocks", blocks_in_synchronize, NULL,
               "cudaStreamSynchronize: it waits, and this process never blocks");
}

static void test_wrong_uses(void **state)
{
    static const struct {
        void (*body)(void *arg);
        const char *env, *sentence;
    } uses[] = {
        {wrong_pageable, "",
         "cudaMemcpyAsync: the source (16 bytes) is neither device memory nor registered host memory"},
        {wrong_size, "", "cudaMemcpyAsync: the destination (104 bytes) goes 4 bytes beyond the end of its memory"},
        {wrong_kind, "", "cudaMemcpyAsync: the kind says otherwise than where the memory is (from host to device)"},
        {wrong_overlap, "", "cudaMemcpyAsync: source and destination overlap"},
        {wrong_read_only, "", "cudaMemcpyAsync: the destination is host memory that was registered for reading only"},
        {wrong_access, "", "cudaMemcpyAsync: the destination is memory of device 1, which device 0 may not write"},
        {wrong_write, "", "cudaMemcpyAsync: the destination is memory of device 0, which device 0 may not write"},
        {wrong_read, "", "cudaMemcpyAsync: the source is memory of device 0, which device 0 may not read"},
        {wrong_default_stream, "", "cudaMemsetAsync: the default stream is not for an engine: it waits for all others"},
        {wrong_dead_stream, "", "cudaStreamQuery: the stream was destroyed"},
        {wrong_dead_event, "", "cudaStreamWaitEvent: the event was destroyed"},
        {wrong_event, "", "cudaEventRecord: the event is of device 1, the stream of device 0"},
        {wrong_launch, "", "sim_launch: the stream is of device 0, the current device is 1"},
        {wrong_free, "cudaMemsetAsync:hang", "cudaFree: cudaMemsetAsync on a stream still uses this memory"},
        {wrong_unregister, "cudaMemsetAsync:hang",
         "cudaHostUnregister: cudaMemsetAsync on a stream still uses this memory"},
        {wrong_unmap, "cudaMemsetAsync:hang", "cuMemUnmap: cudaMemsetAsync on a stream still uses this memory"},
        {wrong_late_use, "",
         "cudaMemsetAsync: the destination (4 bytes) is neither device memory nor registered host memory"},
        {wrong_change, "cudaMemcpyAsync:delay=3000", "cudaMemcpyAsync: what it reads was changed before it had ended"},
        {wrong_second_writer, "cudaMemsetAsync:delay=3000",
         "cudaMemsetAsync: what it writes was written by another before it had ended"},
        {wrong_value_place, "",
         "cuStreamWriteValue64: the address (8 bytes) is neither device memory nor registered host memory"},
        {wrong_value_unregister, "cuStreamWriteValue64:hang",
         "cudaHostUnregister: cuStreamWriteValue64 on a stream still uses this memory"},
    };

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(uses); i++)
        child_dies(uses[i].env, uses[i].body, NULL, uses[i].sentence);
}

/* The host cannot access device memory if the processor has protection keys. */
static void touch(void *arg)
{
    volatile uint32_t *memory = new_memory(0, 4);

    (void)arg;
    *memory = 1;
}

static void test_host_touches_device_memory(void **state)
{
    int key = pkey_alloc(0, 0);

    (void)state;
    if (key < 0)
        skip(); /* the processor has no protection keys */
    pkey_free(key);
    child_dies("", touch, NULL, "host code touches device memory");
}

/* ---- on order ------------------------------------------------------------------------------------------- */

static void count_devices(void *arg)
{
    int n;

    (void)arg;
    (void)cudaGetDeviceCount(&n);
}

static void test_environment(void **state)
{
    static const char *const wrong[] = {
        "devices=17",
        "devices",
        "speed=3",
        "delay-us=x",
        "cudaPaint:hang",
        "cudaMalloc:",
        "cudaMalloc:paint",
        "cudaMalloc:error=cudaErrorPaint",
        "cudaMalloc:error",
        "cudaMalloc:hang@",
        "cudaMalloc:kill=1",
        "cudaMalloc:error=ncclInternalError",
        "cudaMalloc:error=cudaSuccess",
        "cudaMalloc:async=cudaErrorLaunchFailure",
        "cudaMalloc:hang@0",
        "memory=0",
        "sim_launch:die",
        "sim_launch:die=0",
        "cudaMemsetAsync:die=1",
    };
    char sentence[128];

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(wrong); i++) {
        snprintf(sentence, sizeof(sentence), "ZEROD_SIM: \"%s\" is not understood", wrong[i]);
        child_dies(wrong[i], count_devices, NULL, sentence);
    }
    child_is_killed("cudaGetDeviceCount:kill", count_devices, NULL, SIGKILL);
}

/* Acts as a kernel does at each turn of a thread. */
static void take_five_turns(void *args)
{
    for (unsigned i = 0; i < 5; i++)
        if (sim_turns > 0 && --sim_turns == 0)
            sim_stop();
}

static void launch_two(void *arg)
{
    cudaStream_t stream;

    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    for (unsigned i = 0; i < 2; i++)
        CHECK(sim_launch(stream, take_five_turns, NULL, NULL) == 0);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
}

static void test_death_in_a_kernel(void **state)
{
    (void)state;
    child_is_killed("sim_launch:die=5@2", launch_two, NULL, SIGKILL);
    child_passes("sim_launch:die=6@2", launch_two, NULL);
}

static void slow_and_endless(void *arg)
{
    int64_t before_ms = now_ms();
    int n;

    (void)arg;
    CHECK(cudaGetDeviceCount(&n) == cudaSuccess && n == 4);
    CHECK(now_ms() - before_ms >= 149);
    alarm(1);
    (void)cudaGetDeviceCount(&n);
}

static void errors_on_order(void *arg)
{
    void *p;

    (void)arg;
    CHECK(cudaMalloc(&p, 4) == cudaSuccess);
    CHECK(cudaMalloc(&p, 4) == cudaErrorMemoryAllocation && cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaMalloc(&p, 4) == cudaSuccess);
    CHECK(cudaHostUnregister(p) == cudaErrorUnknown && cudaHostUnregister(p) == cudaErrorUnknown);
    CHECK(cuMemRelease(1) == CUDA_ERROR_OPERATING_SYSTEM);
}

/* After an asynchronous error every call returns that error, and pending operations are freed. */
static void sticky(void *arg)
{
    cudaStream_t stream = new_stream(0), other = new_stream(1);
    uint32_t *memory = new_memory(0, N * 4), *elsewhere = new_memory(1, 4);
    atomic_int n_freed = 0;
    int n;

    (void)arg;
    CHECK(cudaSetDevice(0) == cudaSuccess);
    CHECK(cudaMemsetAsync(elsewhere, 0, 4, other) == cudaSuccess); /* hangs */
    for (int i = 0; i < 5; i++)
        (void)launch_add(stream, memory, 1, &n_freed);
    CHECK(cudaStreamSynchronize(other) == cudaErrorIllegalAddress);
    CHECK(cudaStreamQuery(stream) == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress && cudaGetLastError() == cudaErrorIllegalAddress);
    CHECK(cudaSetDevice(0) == cudaErrorIllegalAddress && cudaGetDeviceCount(&n) == cudaErrorIllegalAddress);
    CHECK(launch_add(stream, memory, 1, &n_freed) == cudaErrorIllegalAddress);
    while (n_freed < 6)
        sleep_ms(1);
}

static void test_on_order(void **state)
{
    (void)state;
    child_passes("cudaMalloc:error=cudaErrorMemoryAllocation@2,cudaHostUnregister:error=cudaErrorUnknown@*,"
                 "cuMemRelease:error=CUDA_ERROR_OPERATING_SYSTEM",
                 errors_on_order, NULL);
    child_is_killed("cudaGetDeviceCount:delay=150,cudaGetDeviceCount:hang@2", slow_and_endless, NULL, SIGALRM);
    child_passes("sim_launch:async=cudaErrorIllegalAddress@3,cudaMemsetAsync:hang", sticky, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_fresh_memory),
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_memory_outlives),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_blocking),
        cmocka_unit_test(test_one_machine),
        cmocka_unit_test(test_forked),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_wrong_uses),
        cmocka_unit_test(test_host_touches_device_memory),
        cmocka_unit_test(test_environment),
        cmocka_unit_test(test_death_in_a_kernel),
        cmocka_unit_test(test_on_order),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
