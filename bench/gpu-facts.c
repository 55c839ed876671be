/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tests zerod's assumptions about memory that several processes share, on the GPU of this machine: memory with a
 * descriptor outlives the process that allocated it; nothing writes into the memory after its writer's process has
 * ended; two ranks of NCCL can share one GPU. Also measures the time to map such memory, IPC handles (which zerod does
 * not use), and the cost of several processes on one GPU.
 */

#include "bench/gpu.h"
#include "core/base/base.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <nccl.h>

enum {
    N_TIMES = 21,
    /* The work that a process has queued when it is killed: up to half a second on an H200. */
    N_QUEUED = 512,
    N_BEGUN = 32,
    PRIVATE_TIMES = 64,            /* size of the writer's private memory, in sizes of the shared memory */
    LATER_MS = 1500,               /* the queued work would end within this time if the process had not ended */
    COPIES_MS = 500,               /* how long copies are made to measure the time of a copy */
    N_COPIES = 64,                 /* copies queued at a time */
    LEGACY_LAZY_PEER_ACCESS = 0x1, /* CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only existing flag */
};

static void sleep_ms(unsigned ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};

    nanosleep(&t, NULL);
}

static void say_us(const char *what, double *ns)
{
    printf("%s\t%.1f us\n", what, gpu_median(ns, N_TIMES) / 1e3);
}

static void start(struct gpu_child *child, const struct gpu_options *options, const char *command, const char *host)
{
    char number[32];
    const char *const argv[] = {command, "--bytes", number, NULL};

    snprintf(number, sizeof(number), "%zu", options->n_bytes);
    gpu_child_start(child, argv, host);
}

/* ---- IPC handles ---------------------------------------------------------------------------------------- */

/* CUipcMemHandle of the driver is the same type. */
struct legacy_handle {
    char bytes[64];
};

static struct {
    CUresult (*get)(struct legacy_handle *handle, CUdeviceptr at);
    CUresult (*open)(CUdeviceptr *at, struct legacy_handle handle, unsigned flags);
    CUresult (*close)(CUdeviceptr at);
} legacy;

static void find_legacy(void)
{
    legacy.get = (__typeof__(legacy.get))gpu_find("cuIpcGetMemHandle");
    legacy.open = (__typeof__(legacy.open))gpu_find("cuIpcOpenMemHandle");
    legacy.close = (__typeof__(legacy.close))gpu_find("cuIpcCloseMemHandle");
    if (!legacy.get || !legacy.open || !legacy.close)
        gpu_fail("the GPU driver has no cuIpcGetMemHandle");
}

static struct legacy_handle hear_handle(struct gpu_child *owner)
{
    const struct frame_buffer *heard = gpu_hear(owner->fd, &owner->heard);
    struct legacy_handle handle;

    if (heard->n_bytes != sizeof(handle))
        gpu_fail("no IPC handle");
    memcpy(&handle, heard->data, sizeof(handle));
    return handle;
}

/* ---- processes that own the memory ---------------------------------------------------------------------- */

/* Waits for a message of the parent. Then sets the shared memory to one value after another until the process is
 * killed. Between two values it fills a larger private memory, so that much work is queued at any time. */
static _Noreturn void write_for_ever(uint8_t *at, size_t n_bytes)
{
    cudaStream_t stream = gpu_stream();
    struct frame_buffer heard;
    uint8_t *own;

    if (frame_buffer_init(&heard) < 0)
        gpu_fail("no memory");
    gpu_hear(STDIN_FILENO, &heard); /* waits for ever if the parent needs only the memory */
    own = gpu_alloc(PRIVATE_TIMES * n_bytes);
    for (uint64_t pass = 1;; pass++) {
        gpu_check(cudaMemsetAsync(at, (int)(pass & 0xff), n_bytes, stream), "cudaMemsetAsync");
        gpu_check(cudaMemsetAsync(own, 0, PRIVATE_TIMES * n_bytes, stream), "cudaMemsetAsync");
        if (pass == N_BEGUN)
            gpu_say(STDIN_FILENO, "begun", 5, -1);
        if (pass % N_QUEUED == 0)
            gpu_finish(stream);
    }
}

void gpu_owner(const struct gpu_options *options)
{
    size_t n_bytes = gpu_round(options->n_bytes);
    int fd = gpu_piece_make(n_bytes);
    struct gpu_piece piece = gpu_piece_map(fd, n_bytes);

    gpu_say(STDIN_FILENO, "memory", 6, fd);
    close(fd);
    write_for_ever(piece.at, piece.n_bytes);
}

void gpu_owner_legacy(const struct gpu_options *options)
{
    uint8_t *at = gpu_alloc(options->n_bytes);
    struct legacy_handle handle;

    find_legacy();
    gpu_check_driver(legacy.get(&handle, (uintptr_t)at), "cuIpcGetMemHandle");
    gpu_say(STDIN_FILENO, &handle, sizeof(handle), -1);
    write_for_ever(at, options->n_bytes);
}

/* ---- handles -------------------------------------------------------------------------------------------- */

void gpu_handles_legacy(const struct gpu_options *options)
{
    double ns[3][N_TIMES];
    uint8_t *at = gpu_alloc(options->n_bytes);
    struct legacy_handle handle;
    struct gpu_child owner;
    CUdeviceptr there;

    find_legacy();
    start(&owner, options, "owner-legacy", NULL);
    for (unsigned i = 0; i < N_TIMES; i++) {
        uint64_t begin = gpu_now_ns();

        gpu_check_driver(legacy.get(&handle, (uintptr_t)at), "cuIpcGetMemHandle");
        ns[0][i] = (double)(gpu_now_ns() - begin);
    }
    handle = hear_handle(&owner);
    for (unsigned i = 0; i < N_TIMES; i++) {
        uint64_t begin = gpu_now_ns(), opened;

        gpu_check_driver(legacy.open(&there, handle, LEGACY_LAZY_PEER_ACCESS), "cuIpcOpenMemHandle");
        opened = gpu_now_ns();
        gpu_check_driver(legacy.close(there), "cuIpcCloseMemHandle");
        ns[1][i] = (double)(opened - begin);
        ns[2][i] = (double)(gpu_now_ns() - opened);
    }
    gpu_child_kill(&owner);
    say_us("get the handle", ns[0]);
    say_us("open it", ns[1]);
    say_us("close it", ns[2]);
}

void gpu_handles(const struct gpu_options *options)
{
    size_t n_bytes = gpu_round(options->n_bytes);
    double ns[3][N_TIMES];
    struct gpu_child owner;
    int fd;

    for (unsigned i = 0; i < N_TIMES; i++) {
        uint64_t begin = gpu_now_ns();

        fd = gpu_piece_make(n_bytes);
        ns[0][i] = (double)(gpu_now_ns() - begin);
        close(fd);
    }
    start(&owner, options, "owner", NULL);
    fd = gpu_hear(owner.fd, &owner.heard)->fds[0];
    for (unsigned i = 0; i < N_TIMES; i++) {
        uint64_t begin = gpu_now_ns(), mapped;
        struct gpu_piece piece = gpu_piece_map(fd, n_bytes);

        mapped = gpu_now_ns();
        gpu_piece_unmap(&piece);
        ns[1][i] = (double)(mapped - begin);
        ns[2][i] = (double)(gpu_now_ns() - mapped);
    }
    gpu_child_kill(&owner);
    say_us("allocate and export", ns[0]);
    say_us("import and map", ns[1]);
    say_us("unmap", ns[2]);
}

/* ---- memory after its owner was killed ------------------------------------------------------------------ */

static unsigned count_values(const uint8_t *bytes, size_t n_bytes)
{
    bool seen[256] = {false};
    unsigned n = 0;

    for (size_t i = 0; i < n_bytes; i++) {
        n += !seen[bytes[i]];
        seen[bytes[i]] = true;
    }
    return n;
}

static void read_all(uint8_t *to, const uint8_t *at, size_t n_bytes, cudaStream_t stream)
{
    gpu_check(cudaMemcpyAsync(to, at, n_bytes, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    gpu_finish(stream);
}

/* Made before the kill, so that only little time passes between the owner's end and the first look at its memory. */
struct look {
    uint8_t *first, *later;
    size_t n_bytes;
    cudaStream_t stream;
};

static struct look prepare_look(size_t n_bytes)
{
    return (struct look){
        .first = gpu_alloc_host(n_bytes), .later = gpu_alloc_host(n_bytes), .n_bytes = n_bytes, .stream = gpu_stream()};
}

/* Call it after the owner has ended. Prints what the memory contains, whether that still changes, and whether the
 * memory can be written. */
static void look_at(const struct look *look, uint8_t *at)
{
    unsigned n_values;

    read_all(look->first, at, look->n_bytes, look->stream);
    sleep_ms(LATER_MS);
    read_all(look->later, at, look->n_bytes, look->stream);
    n_values = count_values(look->first, look->n_bytes);
    printf("what is there\t%s (%u values)\n", n_values == 1 ? "one pass, whole" : "passes, torn", n_values);
    printf("it changes after that\t%s\n", memcmp(look->first, look->later, look->n_bytes) == 0 ? "no" : "YES");
    gpu_check(cudaMemsetAsync(at, 0x11, look->n_bytes, look->stream), "cudaMemsetAsync");
    read_all(look->later, at, look->n_bytes, look->stream);
    printf("it can be written\t%s\n",
           look->later[0] == 0x11 && count_values(look->later, look->n_bytes) == 1 ? "yes" : "NO");
}

static void kill_at_work(struct gpu_child *owner)
{
    uint64_t begin;

    gpu_say(owner->fd, "begin", 5, -1);
    gpu_hear(owner->fd, &owner->heard);
    sleep_ms(20);
    begin = gpu_now_ns();
    gpu_child_kill(owner);
    printf("until a killed process has ended\t%.1f ms\n", (double)(gpu_now_ns() - begin) / 1e6);
}

/* Holds descriptors and maps nothing, as the daemon does. Then it imports the memory, as the next engine does. */
void gpu_killed(const struct gpu_options *options)
{
    size_t n_bytes = gpu_round(options->n_bytes);
    struct look look = prepare_look(n_bytes);
    struct gpu_child owner;
    struct gpu_piece piece;
    int fd;

    start(&owner, options, "owner", NULL);
    gpu_hear(owner.fd, &owner.heard);
    fd = steal_fd(&owner.heard.fds[0]);
    kill_at_work(&owner);
    piece = gpu_piece_map(fd, n_bytes);
    close(fd);
    look_at(&look, piece.at);
}

void gpu_killed_legacy(const struct gpu_options *options)
{
    struct look look = prepare_look(options->n_bytes);
    struct legacy_handle handle;
    struct gpu_child owner;
    CUdeviceptr at, again;

    find_legacy();
    start(&owner, options, "owner-legacy", NULL);
    handle = hear_handle(&owner);
    gpu_check_driver(legacy.open(&at, handle, LEGACY_LAZY_PEER_ACCESS), "cuIpcOpenMemHandle");
    kill_at_work(&owner);
    look_at(&look, (uint8_t *)(uintptr_t)at);
    gpu_check_driver(legacy.close(at), "cuIpcCloseMemHandle");
    printf("it can be opened again\t%s\n",
           legacy.open(&again, handle, LEGACY_LAZY_PEER_ACCESS) == CUDA_SUCCESS ? "yes" : "no");
}

/* ---- copies while another process copies ---------------------------------------------------------------- */

/* Copies `from` to `to` for `ms` milliseconds, with copies always queued; 0: for ever. Return: the milliseconds of a
 * copy. */
static double copy_for(const struct gpu_options *options, unsigned ms)
{
    uint8_t *from = gpu_alloc(options->n_bytes), *to = gpu_alloc(options->n_bytes);
    cudaStream_t stream = gpu_stream();
    uint64_t begin = gpu_now_ns(), n = 0, ns;

    do {
        for (unsigned i = 0; i < N_COPIES; i++, n++)
            gpu_check(cudaMemcpyAsync(to, from, options->n_bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
        gpu_finish(stream);
        ns = gpu_now_ns() - begin;
    } while (ms == 0 || ns < ms * UINT64_C(1000000));
    gpu_check(cudaFree(from), "cudaFree");
    gpu_check(cudaFree(to), "cudaFree");
    return (double)ns / 1e6 / (double)n;
}

void gpu_copier(const struct gpu_options *options)
{
    gpu_say(STDIN_FILENO, "copies", 6, -1);
    (void)copy_for(options, 0);
}

void gpu_slices(const struct gpu_options *options)
{
    struct gpu_child copier;
    double alone = copy_for(options, COPIES_MS), beside;

    start(&copier, options, "copier", NULL);
    gpu_hear(copier.fd, &copier.heard);
    sleep_ms(200);
    beside = copy_for(options, COPIES_MS);
    gpu_child_kill(&copier);
    printf("a copy, alone\t%.4f ms\n", alone);
    printf("beside another process's copies\t%.4f ms\n", beside);
}

/* ---- two ranks on one GPU ------------------------------------------------------------------------------- */

static void check_nccl(ncclResult_t r, const char *call)
{
    if (r != ncclSuccess)
        gpu_fail("%s: %s", call, ncclGetErrorString(r));
}

/* Gathers bytes of both ranks. Each byte of a rank is the rank's number + 1. Return: the milliseconds of a gather. */
static double gather(ncclComm_t communicator, uint8_t rank, size_t n_bytes)
{
    uint8_t *own = gpu_alloc(n_bytes), *all = gpu_alloc(2 * n_bytes), *host = gpu_alloc_host(2 * n_bytes);
    cudaStream_t stream = gpu_stream();
    double ms[N_TIMES];

    gpu_check(cudaMemsetAsync(own, rank + 1, n_bytes, stream), "cudaMemsetAsync");
    gpu_finish(stream);
    for (unsigned i = 0; i < N_TIMES; i++) {
        uint64_t begin = gpu_now_ns();

        check_nccl(ncclAllGather(own, all, n_bytes, ncclUint8, communicator, stream), "ncclAllGather");
        gpu_finish(stream);
        ms[i] = (double)(gpu_now_ns() - begin) / 1e6;
    }
    read_all(host, all, 2 * n_bytes, stream);
    for (size_t i = 0; i < 2 * n_bytes; i++)
        if (host[i] != i / n_bytes + 1)
            gpu_fail("rank %u: byte %zu of what was gathered is %u", rank, i, host[i]);
    return gpu_median(ms, N_TIMES);
}

void gpu_rank(const struct gpu_options *options)
{
    const size_t sizes[] = {8, 1 << 20, options->n_bytes};
    struct frame_buffer heard;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t communicator;
    ncclUniqueId id;
    uint64_t begin;
    double ms[ARRAY_SIZE(sizes) + 1];
    uint8_t rank;

    if (frame_buffer_init(&heard) < 0)
        gpu_fail("no memory");
    rank = gpu_hear(STDIN_FILENO, &heard)->data[0];
    if (rank == 0) {
        check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
        gpu_say(STDIN_FILENO, &id, sizeof(id), -1);
    } else {
        memcpy(&id, gpu_hear(STDIN_FILENO, &heard)->data, sizeof(id));
    }
    begin = gpu_now_ns();
    check_nccl(ncclCommInitRankConfig(&communicator, 2, id, rank, &config), "ncclCommInitRankConfig");
    ms[0] = (double)(gpu_now_ns() - begin) / 1e6;
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
        ms[i + 1] = gather(communicator, rank, sizes[i]);
    gpu_say(STDIN_FILENO, ms, sizeof(ms), -1);
    gpu_hear(STDIN_FILENO, &heard); /* waits for the other rank, which would fail if this rank ended earlier */
    frame_buffer_deinit(&heard);
}

/* Waits for one message of each rank, in any order, because a rank waits for ever if the other rank has failed. */
static void hear_both(struct gpu_child ranks[2])
{
    struct pollfd waited[2] = {{.fd = ranks[0].fd, .events = POLLIN}, {.fd = ranks[1].fd, .events = POLLIN}};

    for (unsigned n = 0; n < 2;) {
        (void)poll(waited, 2, -1);
        for (unsigned i = 0; i < 2; i++) {
            if (!waited[i].revents)
                continue;
            gpu_hear(ranks[i].fd, &ranks[i].heard);
            waited[i].fd = -1;
            waited[i].revents = 0;
            n++;
        }
    }
}

/* Lets two processes of one host share a GPU. Each process claims to be on another host, so NCCL uses only sockets. */
static void set_environment(void)
{
    static const char *const variables[][2] = {
        {"NCCL_NET", "Socket"},
        {"NCCL_SOCKET_IFNAME", "lo"},
        {"NCCL_MNNVL_ENABLE", "0"},
        {"NCCL_NVLS_ENABLE", "0"},
        {"NCCL_RAS_ENABLE", "0"},
        {"NCCL_MAX_CTAS", "4"},
        {"NCCL_DEBUG_FILE", "/dev/stderr"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(variables); i++)
        setenv(variables[i][0], variables[i][1], 0);
}

void gpu_ranks(const struct gpu_options *options)
{
    static const char *const hosts[] = {"bench-gpu-0", "bench-gpu-1"};
    struct gpu_child ranks[2];
    ncclUniqueId id;
    double ms[4];

    set_environment();
    for (uint8_t i = 0; i < 2; i++) {
        start(&ranks[i], options, "rank", hosts[i]);
        gpu_say(ranks[i].fd, &i, 1, -1);
    }
    memcpy(&id, gpu_hear(ranks[0].fd, &ranks[0].heard)->data, sizeof(id));
    gpu_say(ranks[1].fd, &id, sizeof(id), -1);
    hear_both(ranks);
    memcpy(ms, ranks[0].heard.data, sizeof(ms));
    for (unsigned i = 0; i < 2; i++)
        gpu_say(ranks[i].fd, "end", 3, -1);
    for (unsigned i = 0; i < 2; i++)
        if (gpu_child_wait(&ranks[i]) != 0)
            gpu_fail("rank %u did not end well", i);
    printf("a communicator\t%.1f ms\n", ms[0]);
    printf("all-gather of 8 bytes\t%.3f ms\n", ms[1]);
    printf("all-gather of 1 MiB\t%.3f ms\n", ms[2]);
    printf("all-gather of all\t%.3f ms\n", ms[3]);
}
