/* SPDX-License-Identifier: Apache-2.0 */

#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "core/layout/manifest.h"
#include "core/wire/frame.h"
#include "core/wire/progress.h"
#include "core/wire/wire.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "cuda.h"
#include "cuda_runtime_api.h"
#include "proto/credit.h"
#include "tests/client/cuda-daemon.h"

enum { N_TICKETS = 16, GRANULE = 2 << 20, PAGE = 4096, INCARNATION = 3 + 2 * PROGRESS_WORDS };

#define NEED(what)                                                                                                     \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "cuda-daemon: %s:%d: %s\n", __FILE__, __LINE__, #what);                                    \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

struct cuda_daemon {
    const struct cuda_daemon_options *options;
    struct cuda_daemon_seen *seen;
    int fd;
    struct frame_buffer in;
    struct wire_arena arena;
    uint8_t *out;
    struct manifest manifest;
    struct layout *layout;
    struct wire_position at;
    unsigned rank;

    cudaStream_t stream;
    uint8_t *ring, *weights; /* on the device; in stage 3, weights is the pool */
    int ring_fd, weights_fd;
    size_t n_ring_bytes, n_weight_bytes; /* sizes as allocated */
    size_t n_window_bytes;
    uint8_t *ring_copy,
        *weights_copy;  /* both registered host memory; weights_copy has the weights' layout of stages 1 and 2 */
    uint32_t *gathered; /* [parameter]: how often it is gathered */
    float **sums;       /* [parameter]: its gradients in the open step */
    struct progress_page *progress;
    int progress_fd;
    uint64_t last_point;
    struct credit_page *credit;
    int credit_fd;
    struct held {
        uint32_t ticket;
        uint64_t point; /* point of the last push into the slot */
    } held[N_TICKETS];  /* slots with several parameters; read and returned at the end of the micro-batch */
    uint32_t n_held;
    struct request_push *pushes; /* the pushes into these slots */
    uint32_t n_pushes;
    void *window;
    bool has_gathered; /* the pool has gathered weights */
};

/* ---- memory -------------------------------------------------------------------------------------------- */

#define DRIVER(name) ((__typeof__(&(name)))find_driver(#name))

static void *find_driver(const char *name)
{
    enum cudaDriverEntryPointQueryResult status;
    void *function = NULL;

    NEED(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &status) == cudaSuccess);
    NEED(status == cudaDriverEntryPointSuccess);
    return function;
}

static uint8_t *make_device_memory(int device, size_t n_bytes, int *fd)
{
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = location};
    CUmemAccessDesc access = {location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;

    NEED(DRIVER(cuMemCreate)(&handle, n_bytes, &prop, 0) == CUDA_SUCCESS);
    NEED(DRIVER(cuMemExportToShareableHandle)(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS);
    NEED(DRIVER(cuMemAddressReserve)(&at, n_bytes, 0, 0, 0) == CUDA_SUCCESS);
    NEED(DRIVER(cuMemMap)(at, n_bytes, 0, handle, 0) == CUDA_SUCCESS);
    NEED(DRIVER(cuMemSetAccess)(at, n_bytes, &access, 1) == CUDA_SUCCESS);
    return (uint8_t *)(uintptr_t)at;
}

static uint8_t *make_host_memory(size_t n_bytes)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    NEED(memory != MAP_FAILED);
    NEED(cudaHostRegister(memory, n_bytes, cudaHostRegisterPortable) == cudaSuccess);
    return memory;
}

static void *make_shared(const char *name, size_t n_bytes, int *fd)
{
    void *memory;

    *fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    NEED(*fd >= 0 && ftruncate(*fd, n_bytes) == 0 && fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    NEED(memory != MAP_FAILED);
    return memory;
}

static void copy(struct cuda_daemon *d, void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind)
{
    NEED(cudaMemcpyAsync(to, from, n_bytes, kind, d->stream) == cudaSuccess);
    NEED(cudaStreamSynchronize(d->stream) == cudaSuccess);
}

static bool is_stage3(const struct cuda_daemon *d)
{
    return d->options->pool_bytes > 0;
}

static void publish_weights(struct cuda_daemon *d)
{
    if (!is_stage3(d))
        copy(d, d->weights, d->weights_copy, d->n_weight_bytes, cudaMemcpyHostToDevice);
}

static void make_memory(struct cuda_daemon *d)
{
    const struct layout *layout = d->layout;
    uint64_t n_weight_bytes = MAX(layout->weight_bytes, UINT64_C(1));

    d->n_ring_bytes = round_up(d->options->ring_bytes, GRANULE);
    d->n_weight_bytes = round_up(is_stage3(d) ? d->options->pool_bytes : n_weight_bytes, GRANULE);
    d->n_window_bytes = round_up(is_stage3(d) ? layout->range_bytes : n_weight_bytes, PAGE);
    d->ring = make_device_memory(d->options->device, d->n_ring_bytes, &d->ring_fd);
    d->weights = make_device_memory(d->options->device, d->n_weight_bytes, &d->weights_fd);
    d->ring_copy = make_host_memory(d->n_ring_bytes);
    d->weights_copy = make_host_memory(round_up(n_weight_bytes, GRANULE));
    d->gathered = calloc(layout->n_params, sizeof(*d->gathered));
    d->credit = make_shared("credit", PAGE, &d->credit_fd);
    d->progress = make_shared("progress", PAGE, &d->progress_fd);
    d->last_point = progress_first(INCARNATION);
    d->sums = calloc(layout->n_params, sizeof(*d->sums));
    d->pushes = calloc(layout->n_params, sizeof(*d->pushes));
    for (uint32_t p = 0; p < layout->n_params; p++)
        d->sums[p] = calloc(layout->params[p].n_elems + 1, sizeof(float));
}

/* ---- messages ------------------------------------------------------------------------------------------ */

static void say(struct cuda_daemon *d, const struct reply *reply, const int *fds, size_t n_fds)
{
    int n = wire_pack_reply(&d->arena, reply, d->out, FRAME_MAX_BYTES);

    NEED(n > 0 && frame_send(d->fd, d->out, n, fds, n_fds) == 0);
}

static void say_done(struct cuda_daemon *d)
{
    say(d, &(struct reply){.type = REPLY_DONE, .done = {.position = d->at, .loss_scale = 1}}, NULL, 0);
}

static void welcome(struct cuda_daemon *d)
{
    say(d,
        &(struct reply){.type = REPLY_WELCOME,
                        .welcome = {.version = WIRE_VERSION,
                                    .world_size = 1,
                                    .stage = is_stage3(d) ? 3 : 2,
                                    .bucket_elems = d->options->bucket_elems,
                                    .on_duplicate = WIRE_ON_DUPLICATE_REJECT,
                                    .server = "test",
                                    .run_id = "",
                                    .optimizer = "SGD",
                                    .stage3_max_live_elems = MAX(d->options->max_live_elems, UINT64_C(1)),
                                    .cuda = true}},
        NULL, 0);
}

static void declare(struct cuda_daemon *d, const struct request_declare *request)
{
    for (size_t i = 0; i < request->n_params; i++)
        NEED(manifest_add(&d->manifest, &request->params[i]) == 0);
}

static void form(struct cuda_daemon *d)
{
    struct wire_segment segments[4];
    size_t n_segments = d->options->hides_pool ? 3 : 4;
    CUdevice device;
    CUuuid uuid;
    uint32_t bad;

    NEED(layout_new(&d->layout, d->manifest.decls, d->manifest.n, 1, d->options->bucket_elems, &bad) == 0);
    make_memory(d);
    NEED(cuDeviceGet(&device, d->options->gpu) == CUDA_SUCCESS && cuDeviceGetUuid(&uuid, device) == CUDA_SUCCESS);
    segments[0] = (struct wire_segment){WIRE_SEGMENT_RING, d->n_ring_bytes, true};
    segments[1] = (struct wire_segment){WIRE_SEGMENT_CREDIT, PAGE, false};
    segments[2] = (struct wire_segment){WIRE_SEGMENT_PROGRESS, PAGE, false};
    segments[3] =
        (struct wire_segment){is_stage3(d) ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS, d->n_weight_bytes, true};
    say(d,
        &(struct reply){.type = REPLY_FORMED,
                        .formed = {.init_wanted = true,
                                   .segments = segments,
                                   .n_segments = n_segments,
                                   .n_tickets = N_TICKETS,
                                   .ring_bytes = d->options->ring_bytes,
                                   .loss_scale = 1,
                                   .first_point = d->last_point,
                                   .gpu = (const uint8_t *)uuid.bytes,
                                   .n_gpu_bytes = sizeof(uuid.bytes)}},
        (int[]){d->ring_fd, d->credit_fd, d->progress_fd, d->weights_fd}, n_segments);
}

static void init(struct cuda_daemon *d, const struct request_init *request)
{
    const struct layout_param *p = &d->layout->params[request->param];
    size_t size = dtype_size(p->dtype), n_bytes = request->n_elems * size;

    copy(d, d->ring_copy, d->ring + request->offset_bytes, n_bytes, cudaMemcpyDeviceToHost);
    memcpy(d->weights_copy + p->weight_offset_bytes + request->start_elem * size, d->ring_copy, n_bytes);
    say_done(d);
}

static bool is_gone(const struct cuda_daemon *d)
{
    struct pollfd pollfd = {.fd = d->fd, .events = POLLRDHUP};

    return poll(&pollfd, 1, 0) == 1 && pollfd.revents & POLLRDHUP;
}

static void give_back(struct cuda_daemon *d, uint32_t ticket)
{
    atomic_fetch_add_explicit(&d->credit->credits[ticket], 1, memory_order_release);
}

/* Waits for the point. Exits if the client is gone, because the client's GPU then never reaches it. */
static void wait_for_point(struct cuda_daemon *d, uint64_t point)
{
    while (!progress_is_reached(d->progress, point)) {
        if (is_gone(d))
            _exit(0);
        usleep(100);
    }
}

/* Waits only for the point, then adds the part to the sums. */
static void read_part(struct cuda_daemon *d, const struct request_push *request, uint64_t point)
{
    const struct layout_param *p = &d->layout->params[request->param];
    const struct layout_part *part = &d->layout->parts[p->first_part + request->part];
    uint64_t offset = request->offset_bytes + (p->n_parts == 1 ? p->offset_elems * sizeof(float) : 0);
    const float *from = (const float *)d->ring_copy;

    NEED(!request->overflow && offset + part->n_elems * sizeof(float) <= d->options->ring_bytes);
    wait_for_point(d, point);
    if (part->n_elems > 0)
        copy(d, d->ring_copy, d->ring + offset, part->n_elems * sizeof(float), cudaMemcpyDeviceToHost);
    for (uint64_t i = 0; i < part->n_elems; i++)
        d->sums[request->param][part->start_elem + i] += from[i];
}

/* Keeps the push until the end of the micro-batch. Like the daemon, uses a slot's last point for all its parameters. */
static void hold(struct cuda_daemon *d, const struct request_push *request)
{
    uint32_t i = 0;

    while (i < d->n_held && d->held[i].ticket != request->ticket)
        i++;
    NEED(i < N_TICKETS && d->n_pushes < d->layout->n_params);
    d->n_held = MAX(d->n_held, i + 1);
    d->held[i] = (struct held){request->ticket, request->point};
    d->pushes[d->n_pushes++] = *request;
}

static void push(struct cuda_daemon *d, const struct request_push *request)
{
    const struct layout_param *p = &d->layout->params[request->param];

    if (request->record_only) {
        d->seen->n_duplicates++;
        d->seen->duplicate_sum = request->sum;
        return;
    }
    d->seen->n_pushes++;
    NEED(request->point == d->last_point + 1);
    d->last_point = request->point;
    if (p->n_parts == 1)
        return hold(d, request);
    read_part(d, request, request->point);
    give_back(d, request->ticket);
}

static void end_backward(struct cuda_daemon *d)
{
    for (uint32_t i = 0; i < d->n_held; i++) {
        for (uint32_t k = 0; k < d->n_pushes; k++)
            if (d->pushes[k].ticket == d->held[i].ticket)
                read_part(d, &d->pushes[k], d->held[i].point);
        give_back(d, d->held[i].ticket);
    }
    d->n_held = d->n_pushes = 0;
    d->at.micro_batch++;
    say_done(d);
}

static void step(struct cuda_daemon *d)
{
    for (uint32_t p = 0; p < d->layout->n_params; p++) {
        const struct layout_param *param = &d->layout->params[p];
        float *w = (float *)(d->weights_copy + param->weight_offset_bytes);

        for (uint64_t i = 0; i < param->n_elems; i++) {
            w[i] += d->sums[p][i];
            d->sums[p][i] = 0;
        }
    }
    publish_weights(d);
    d->at = (struct wire_position){.step = d->at.step + 1};
    say(d,
        &(struct reply){.type = REPLY_STEP_DONE,
                        .step_done = {.position = d->at, .applied = true, .loss_scale = 1, .lr = 1}},
        NULL, 0);
}

/* ---- stage 3 ------------------------------------------------------------------------------------------- */

static size_t param_bytes(const struct cuda_daemon *d, uint32_t param)
{
    return d->layout->params[param].n_elems * dtype_size(d->layout->params[param].dtype);
}

static void refuse(struct cuda_daemon *d, bool aborted)
{
    struct wire_diagnostic diagnostic = {
        .code = aborted ? 1302 : 1401, .cause_class = "", .title = "not now", .text = "not now"};

    d->at.attempt += aborted;
    say(d,
        &(struct reply){.type = REPLY_REFUSED,
                        .refused = {.diagnostic = diagnostic, .aborted = aborted, .position = d->at}},
        NULL, 0);
}

static void answer_gather(struct cuda_daemon *d, const uint64_t *offsets, size_t n)
{
    say(d,
        &(struct reply){.type = REPLY_DONE,
                        .done = {.position = d->at, .loss_scale = 1, .pool_offsets = offsets, .n_pool_offsets = n}},
        NULL, 0);
}

static void gather(struct cuda_daemon *d, const struct request_gather *request)
{
    enum cuda_daemon_fault fault = ++d->seen->n_gathers == d->options->fault_at ? d->options->fault : GATHERS_WELL;
    _cleanup_free_ uint64_t *offsets = calloc(request->n_params + 1, sizeof(*offsets));
    size_t end = 0;

    if (fault == GATHERS_REFUSED || fault == GATHERS_ABORTED)
        return refuse(d, fault == GATHERS_ABORTED);
    for (size_t i = 0; i < request->n_params; i++) {
        uint32_t param = request->params[i];
        size_t n_bytes = param_bytes(d, param);

        offsets[i] = n_bytes > 0 ? end : 0;
        end += round_up(n_bytes, 256);
        NEED(end <= d->n_weight_bytes);
        if (n_bytes > 0)
            copy(d, d->weights + offsets[i], d->weights_copy + d->layout->params[param].weight_offset_bytes, n_bytes,
                 cudaMemcpyHostToDevice);
        d->gathered[param]++;
        d->seen->n_held++;
    }
    d->has_gathered = true;
    if (fault == GATHERS_OUTSIDE)
        offsets[request->n_params - 1] = d->n_weight_bytes - 4;
    answer_gather(d, offsets, request->n_params - (fault == GATHERS_ONE_OFFSET_LESS));
}

static void release(struct cuda_daemon *d, const struct request_release *request)
{
    for (size_t i = 0; i < request->n_params; i++) {
        NEED(d->gathered[request->params[i]]-- > 0);
        d->seen->n_held--;
    }
}

/* Overwrites gathered weights, so that a client that still copies from them gets wrong values. */
static void forget_gathered(struct cuda_daemon *d)
{
    if (!d->has_gathered)
        return;
    d->has_gathered = false;
    NEED(cudaMemsetAsync(d->weights, 0xff, d->n_weight_bytes, d->stream) == cudaSuccess);
    NEED(cudaStreamSynchronize(d->stream) == cudaSuccess);
}

/* ---- windows ------------------------------------------------------------------------------------------- */

/* Copies between the window and the weights. Their layouts differ only in stage 3. */
static void copy_window(struct cuda_daemon *d, bool to_window)
{
    for (uint32_t p = 0; p < d->layout->n_params; p++) {
        const struct layout_param *param = &d->layout->params[p];
        uint8_t *in_window =
            (uint8_t *)d->window + (is_stage3(d) ? param->range_offset_bytes : param->weight_offset_bytes);
        uint8_t *weights = d->weights_copy + param->weight_offset_bytes;

        memcpy(to_window ? in_window : weights, to_window ? weights : in_window, param_bytes(d, p));
    }
}

static int read_only(int fd)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    return open(path, O_RDONLY | O_CLOEXEC);
}

static void open_window(struct cuda_daemon *d)
{
    struct wire_segment segment = {WIRE_SEGMENT_WINDOW, d->n_window_bytes, false};
    int fd, other;

    d->window = make_shared("window", d->n_window_bytes, &fd);
    copy_window(d, true);
    if (d->rank > 0) { /* only stage 3 has a window for other ranks */
        other = is_stage3(d) ? read_only(fd) : -1;
        close(fd);
        fd = other;
    }
    say(d,
        &(struct reply){.type = REPLY_DONE,
                        .done = {.position = d->at, .loss_scale = 1, .segments = &segment, .n_segments = fd >= 0}},
        &fd, fd >= 0);
    if (fd >= 0)
        close(fd);
}

static void end_window(struct cuda_daemon *d, bool forget)
{
    NEED(d->window);
    if (!forget)
        copy_window(d, false);
    munmap(steal_ptr(d->window), d->n_window_bytes);
    publish_weights(d);
    d->at.n_windows++;
    say_done(d);
}

static void take(struct cuda_daemon *d, const struct request *request)
{
    switch (request->type) {
    case REQUEST_HELLO:
        d->rank = request->hello.rank;
        return welcome(d);
    case REQUEST_DECLARE:
        return declare(d, &request->declare);
    case REQUEST_FORM:
        return form(d);
    case REQUEST_INIT:
        return init(d, &request->init);
    case REQUEST_READY:
        publish_weights(d);
        return say_done(d);
    case REQUEST_BEGIN_BACKWARD:
        return;
    case REQUEST_PUSH:
        return push(d, &request->push);
    case REQUEST_SLOT_REQUEST:
        /* All slots were returned before the client asked, except those of open micro-batches. */
        return say(d, &(struct reply){.type = REPLY_SLOT_GRANT, .slot_grant = {.in_ring = true}}, NULL, 0);
    case REQUEST_END_BACKWARD:
        return end_backward(d);
    case REQUEST_STEP:
        return step(d);
    case REQUEST_GATHER:
        return gather(d, &request->gather);
    case REQUEST_RELEASE:
        return release(d, &request->release);
    case REQUEST_PREFETCH:
    case REQUEST_ABORT_SEEN:
        return;
    case REQUEST_CLEAR_FAULT:
        return say_done(d);
    case REQUEST_WRITE_BEGIN:
        return open_window(d);
    case REQUEST_WRITE_END:
        return end_window(d, request->write_end.forget);
    default:
        NEED(!"a request that is expected");
    }
}

/* ---- the process --------------------------------------------------------------------------------------- */

static void serve(int listener, const struct cuda_daemon_options *options, struct cuda_daemon_seen *seen)
{
    struct cuda_daemon d = {.options = options, .seen = seen, .in = FRAME_BUFFER_NULL, .out = malloc(FRAME_MAX_BYTES)};
    char why[WIRE_WHY_BYTES];
    struct request request;

    NEED(cudaSetDevice(options->device) == cudaSuccess);
    NEED(cudaStreamCreateWithFlags(&d.stream, cudaStreamNonBlocking) == cudaSuccess);
    NEED(d.out && frame_buffer_init(&d.in) == 0 && wire_arena_init(&d.arena) == 0);
    d.fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    NEED(d.fd >= 0);
    for (;;) {
        struct pollfd pollfd = {.fd = d.fd, .events = POLLIN};
        int r = frame_receive_fds(d.fd, &d.in);

        if (r == FRAME_AGAIN)
            poll(&pollfd, 1, -1);
        if (r == FRAME_AGAIN)
            continue;
        if (r == FRAME_EOF)
            return;
        NEED(r == 0);
        wire_arena_reset(&d.arena);
        NEED(wire_unpack_request(&d.arena, d.in.data, d.in.n_bytes, &request, why, sizeof(why)) == 0);
        forget_gathered(&d);
        take(&d, &request);
    }
}

pid_t cuda_daemon_start(const char *path, const struct cuda_daemon_options *options, struct cuda_daemon_seen *seen)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    pid_t pid;

    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
    NEED(listener >= 0 && bind(listener, (struct sockaddr *)&sa, sizeof(sa)) == 0 && listen(listener, 1) == 0);
    pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        setenv("ZEROD_SIM", options->sim ? options->sim : "", 1);
        serve(listener, options, seen);
        _exit(0);
    }
    close(listener);
    return pid;
}

void cuda_daemon_wait(pid_t pid)
{
    int status;

    NEED(waitpid(pid, &status, 0) == pid);
    NEED(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
