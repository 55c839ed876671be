/* SPDX-License-Identifier: Apache-2.0 */

/* The main loop: it receives commands, moves the engine through its phases, and watches deadlines. */

#include "engine/nccl.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include "core/base/base.h"
#include "core/wire/wire.h"

enum {
    IDLE_NS = 100 * 1000, /* picked: wait between two polls of busy devices; short compared to any order */
    CONNECTING_NS = 1000 * 1000,
};

/* ---- setup ----------------------------------------------------------------------------------------------- */

/* Call it before all other calls of CUDA. */
static void check_cuda_version(struct nccl_engine *engine)
{
    int driver = 0, runtime = 0;

    engine_check_cuda(engine, NULL, cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    engine_check_cuda(engine, NULL, cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    if (driver == 0)
        engine_fail(
            engine,
            "there is no GPU driver: libcuda.so.1 is not found (install NVIDIA's driver; a container needs --gpus)");
    if (driver / 1000 < CUDART_VERSION / 1000)
        engine_fail(engine, "the GPU driver knows CUDA %d.%d, and this program needs %d.%d", driver / 1000,
                    driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (runtime / 1000 != CUDART_VERSION / 1000)
        engine_fail(engine, "the CUDA runtime is %d.%d, and this program was built with %d.%d", runtime / 1000,
                    runtime % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    snprintf(engine->versions, sizeof(engine->versions), "%sCUDA %d.%d, driver %d.%d", ZEROD_ENGINE_PREFIX,
             runtime / 1000, runtime % 1000 / 10, driver / 1000, driver % 1000 / 10);
}

/*
 * Before version 2.23, NCCL lets a GPU write straight into the buffer of another GPU of the process
 * (NCCL_DIRECT_WRITE), but only pools are mapped for other GPUs (find_users()). Later versions do so only with
 * registered buffers, and zerod registers none.
 */
static void check_nccl_version(struct nccl_engine *engine)
{
    size_t n = strlen(engine->versions);
    int nccl = 0;

    engine_check_nccl(engine, ncclGetVersion(&nccl), "ncclGetVersion");
    if (nccl < NCCL_VERSION(2, 23, 0) && engine->plan.head->n_local > 1)
        engine_fail(engine, "NCCL is %d.%d.%d, and zerod needs 2.23 or later for more than one GPU on a node",
                    nccl / 10000, nccl / 100 % 100, nccl % 100);
    if (nccl / 10000 != NCCL_MAJOR || nccl < NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, 0))
        engine_fail(engine, "NCCL is %d.%d.%d, and this program was built with %d.%d.%d", nccl / 10000,
                    nccl / 100 % 100, nccl % 100, NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
    snprintf(engine->versions + n, sizeof(engine->versions) - n, ", NCCL %d.%d.%d", nccl / 10000, nccl / 100 % 100,
             nccl % 100);
}

/* Loads the kernels early. At the first launch, the load would wait for trainers, or take seconds to make code from
 * PTX. */
static void load_kernels(struct nccl_engine *engine, const struct nccl_gpu *gpu)
{
    int major = 0, minor = 0, r = device_load_kernels();

    if (r != cudaErrorNoKernelImageForDevice) {
        engine_check_cuda(engine, gpu, (cudaError_t)r, "device_load_kernels");
        return;
    }
    (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu->device);
    (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu->device);
    engine_fail(engine,
                "GPU %d has compute capability %d.%d, and zerod was built for %s and later: leave it out "
                "(CUDA_VISIBLE_DEVICES), or build zerod with a CUDA that knows it",
                gpu->device, major, minor, ZEROD_ENGINE_CODE);
}

/* Checks that processes may share the GPU, because a trainer and the engine use it at the same time. Under MPS the
 * driver counts them as one process. */
static void check_compute_mode(struct nccl_engine *engine, const struct nccl_gpu *gpu)
{
    int mode = cudaComputeModeDefault, mps = 0;

    engine_check_cuda(engine, gpu, cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, gpu->device),
                      "cudaDeviceGetAttribute");
    engine_check_cuda(engine, gpu, cudaDeviceGetAttribute(&mps, cudaDevAttrMpsEnabled, gpu->device),
                      "cudaDeviceGetAttribute");
    if (mode == cudaComputeModeProhibited)
        engine_fail(engine,
                    "GPU %d is in compute mode PROHIBITED, in which no process may use it: nvidia-smi -c DEFAULT",
                    gpu->device);
    if (mode != cudaComputeModeDefault && !mps)
        engine_fail(
            engine,
            "GPU %d is in compute mode EXCLUSIVE_PROCESS, in which its trainer and zerod's engine cannot both use "
            "it: nvidia-smi -c DEFAULT, or start MPS",
            gpu->device);
}

static void open_gpu(struct nccl_engine *engine, unsigned local)
{
    struct nccl_gpu *gpu = &engine->gpus[local];
    cudaStream_t *streams[] = {&gpu->main, &gpu->comm, &gpu->aside};
    cudaEvent_t *events[] = {&gpu->main_event, &gpu->comm_event, &gpu->aside_event};

    gpu->device = (int)local;
    gpu->rank = engine->plan.head->first_local + local;
    check_compute_mode(engine, gpu);
    engine_use(engine, gpu);
    load_kernels(engine, gpu);
    for (size_t i = 0; i < ARRAY_SIZE(streams); i++)
        engine_check_cuda(engine, gpu, cudaStreamCreateWithFlags(streams[i], cudaStreamNonBlocking),
                          "cudaStreamCreateWithFlags");
    for (size_t i = 0; i < ARRAY_SIZE(events); i++)
        engine_check_cuda(engine, gpu, cudaEventCreateWithFlags(events[i], cudaEventDisableTiming),
                          "cudaEventCreateWithFlags");
}

static void open_gpus(struct nccl_engine *engine)
{
    int n_devices = 0;

    engine_check_cuda(engine, NULL, cudaGetDeviceCount(&n_devices), "cudaGetDeviceCount");
    engine->n_gpus = engine->plan.head->n_local;
    if ((unsigned)n_devices < engine->n_gpus)
        engine_fail(engine, "this node has %u ranks, and %d of its GPUs can be seen", engine->n_gpus, n_devices);
    engine->gpus = calloc(engine->n_gpus, sizeof(*engine->gpus));
    if (!engine->gpus)
        engine_fail(engine, "no memory");
    for (unsigned i = 0; i < engine->n_gpus; i++)
        open_gpu(engine, i);
}

static void set_up(struct nccl_engine *engine, const struct device_setup *setup)
{
    const int *fds = engine->buffer.fds;
    uint8_t *plan, *inputs, *results;
    char why[128];

    if (engine->phase != NCCL_AWAITS_SETUP || engine->buffer.n_fds != DEVICE_SETUP_FDS)
        engine_fail(engine, "a setup out of place");
    engine->setup = *setup;
    engine->begun_ns = engine_now_ns();
    check_cuda_version(engine);
    plan = memory_map(engine, fds[0], setup->plan_bytes);
    if (device_plan_open(&engine->plan, plan, setup->plan_bytes, why, sizeof(why)) < 0)
        engine_fail(engine, "%s", why);
    check_nccl_version(engine);
    engine->groups = engine->plan.head->world_size > 1;
    for (uint32_t i = 0; i < engine->plan.head->n_parcels; i++)
        if (nccl_exchanges(&engine->plan, i) && engine->plan.head->world_size > REDUCE_MAX_LEAVES)
            engine_fail(engine,
                        "sums in the order of the ranks (deterministic: true, or a parameter larger than a "
                        "bucket, or Muon) are over %d ranks at most, and there are %" PRIu32,
                        REDUCE_MAX_LEAVES, engine->plan.head->world_size);
    if (device_inputs_bytes(&engine->plan) > setup->inputs_bytes ||
        device_results_bytes(&engine->plan, NULL) > setup->results_bytes)
        engine_fail(engine, "inputs of %" PRIu64 " bytes or results of %" PRIu64 " are too small for the plan",
                    setup->inputs_bytes, setup->results_bytes);
    open_gpus(engine);
    if (engine->plan.head->n_matrices > 0)
        muon_prepare(engine);
    inputs = memory_map(engine, fds[1], setup->inputs_bytes);
    results = memory_map(engine, fds[2], setup->results_bytes);
    device_inputs_open(&engine->plan, inputs, &engine->inputs);
    device_results_open(&engine->plan, results, &engine->results);
    memory_prepare(engine);
    update_prepare(engine);
    engine->phase = NCCL_AWAITS_MEMORY;
}

/* ---- commands -------------------------------------------------------------------------------------------- */

static void serve_command(struct nccl_engine *engine, const struct device_command *command)
{
    const struct frame_buffer *buffer = &engine->buffer;

    if (engine->phase == NCCL_AWAITS_SETUP && command->type != DEVICE_COMMAND_SETUP)
        engine_fail(engine, "a command before the setup");
    switch (command->type) {
    case DEVICE_COMMAND_SETUP:
        set_up(engine, &command->setup);
        return;
    case DEVICE_COMMAND_MEMORY:
        memory_take(engine, &command->memory, buffer->fds, buffer->n_fds);
        return;
    case DEVICE_COMMAND_VALUE:
        collect_value(engine, &command->value);
        return;
    case DEVICE_COMMAND_SHARE:
        if (buffer->n_fds != 1)
            engine_fail(engine, "a segment without a descriptor");
        memory_share(engine, &command->share, buffer->fds[0]);
        return;
    case DEVICE_COMMAND_RELEASE:
        memory_release(engine, &command->release);
        return;
    default:
        orders_add(engine, command);
    }
}

/* Return: false if there is no command. */
static bool take_command(struct nccl_engine *engine)
{
    struct device_command command;
    char why[WIRE_WHY_BYTES];
    int r = frame_receive_fds(ENGINE_SOCKET_FD, &engine->buffer);

    if (r == FRAME_AGAIN)
        return false;
    if (r == FRAME_EOF)
        engine_leave(EXIT_SUCCESS);
    if (r != 0)
        engine_fail(engine, "a command cannot be received");
    r = device_unpack_command(&engine->arena, engine->buffer.data, engine->buffer.n_bytes, &command, why, sizeof(why));
    if (r != 0)
        engine_fail(engine, "a command that is not understood: %s", r == WIRE_E_INVALID ? why : strerror(-r));
    serve_command(engine, &command);
    return true;
}

/* ---- the loop -------------------------------------------------------------------------------------------- */

static void get_ready(struct nccl_engine *engine)
{
    struct device_report report = {.type = DEVICE_REPORT_READY, .ready = {.versions = engine->versions}};

    engine->phase = NCCL_IS_READY;
    engine_report(engine, &report, NULL, 0);
}

/* Return: true if there was progress. */
static bool make_progress(struct nccl_engine *engine)
{
    enum nccl_phase before = engine->phase;

    switch (engine->phase) {
    case NCCL_AWAITS_SETUP:
    case NCCL_AWAITS_MEMORY:
        return false;
    case NCCL_RESTORES:
        if (memory_poll_restore(engine) == 0) {
            update_warm(engine);
            engine->phase = NCCL_WARMS;
        }
        break;
    case NCCL_WARMS:
        if (engine_poll(engine) == 0)
            collect_begin(engine);
        break;
    case NCCL_AWAITS_ID:
        if (engine->has_id || !engine->groups)
            collect_connect(engine);
        break;
    case NCCL_CONNECTS:
        if (collect_poll(engine) == 0)
            get_ready(engine);
        break;
    case NCCL_IS_READY:
        return orders_progress(engine);
    }
    return engine->phase != before;
}

static void check_deadlines(struct nccl_engine *engine)
{
    uint64_t timeout_ns = (uint64_t)engine->setup.connect_timeout_ms * 1000000;

    if (engine->phase == NCCL_IS_READY)
        orders_check_deadlines(engine);
    else if (engine->phase != NCCL_AWAITS_SETUP && engine_now_ns() > engine->begun_ns + timeout_ns)
        engine_fail(engine, "not connected to all nodes within %" PRIu32 " ms: %s", engine->setup.connect_timeout_ms,
                    engine->phase == NCCL_AWAITS_ID  ? "nothing has been heard of the engine of node 0"
                    : engine->phase == NCCL_CONNECTS ? "not all engines have connected"
                    : engine->phase == NCCL_WARMS    ? "cuBLAS has not loaded its code"
                                                     : "the memory is not there yet");
}

/* Blocks only in the wait for commands, which is short while a device is busy. */
static __attribute__((noreturn)) void run_engine(struct nccl_engine *engine)
{
    struct pollfd input = {ENGINE_SOCKET_FD, POLLIN, 0};

    for (;;) {
        bool moved = make_progress(engine), idle;
        struct timespec wait = {.tv_nsec = moved ? 0 : engine->phase == NCCL_IS_READY ? IDLE_NS : CONNECTING_NS};

        check_deadlines(engine);
        idle = engine->phase == NCCL_AWAITS_SETUP ||
               (engine->phase == NCCL_IS_READY && !engine->first && engine->n_in_flight == 0 && !engine->aside);
        (void)ppoll(&input, 1, idle ? NULL : &wait, NULL);
        while (take_command(engine))
            ;
    }
}

/* Makes the process end only with the daemon. If a user stops the daemon with a signal to all its processes, the daemon
 * must finish its step first. If a peer is gone, write() fails, without a signal. */
static void prepare_process(void)
{
    static const int ignored[] = {SIGPIPE, SIGINT, SIGTERM, SIGHUP};
    struct pollfd daemon = {.fd = ENGINE_SOCKET_FD};

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (poll(&daemon, 1, 0) > 0 && daemon.revents & (POLLHUP | POLLERR))
        engine_leave(EXIT_SUCCESS); /* the daemon died before prctl(), so no signal would come */
    for (size_t i = 0; i < ARRAY_SIZE(ignored); i++)
        signal(ignored[i], SIG_IGN);
}

/* Users set CUDA_LAUNCH_BLOCKING to debug a trainer. In the engine, each launch would wait for its own end, and so for
 * the trainers. */
static void prepare_cuda(void)
{
    unsetenv("CUDA_LAUNCH_BLOCKING");
}

static bool has_daemon(void)
{
    int type = 0;
    socklen_t size = sizeof(type);

    return getsockopt(ENGINE_SOCKET_FD, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET;
}

int main(void)
{
    static struct nccl_engine engine; /* threads that still run at the process's end use it */

    if (!has_daemon()) {
        fprintf(stderr, "zerod-engine-nccl is started by zerod, not by hand\n");
        return 2;
    }
    prepare_process();
    prepare_cuda();
    engine.packet = malloc(FRAME_MAX_BYTES);
    if (!engine.packet || frame_buffer_init(&engine.buffer) < 0 || wire_arena_init(&engine.arena) < 0)
        engine_leave(EXIT_FAILURE);
    run_engine(&engine);
}
