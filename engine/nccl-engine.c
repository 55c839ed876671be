/* SPDX-License-Identifier: Apache-2.0 */

/* Functions that all other files of the engine use. They send a report, end the process, convert errors of CUDA and
 * NCCL, count collectives, and order the two streams of a GPU. */

#include "engine/nccl.h"

#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { REPORT_WAIT_MS = 1000 /* the longest wait for a daemon that does not read */ };

uint64_t engine_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

void engine_leave(int status)
{
    _exit(status);
}

void engine_report(struct nccl_engine *engine, const struct device_report *report, const int *fds, size_t n_fds)
{
    struct pollfd room = {ENGINE_SOCKET_FD, POLLOUT, 0};
    int n = device_pack_report(&engine->arena, report, engine->packet, FRAME_MAX_BYTES), r;

    if (n <= 0)
        engine_leave(EXIT_FAILURE);
    /* The only wait of this process, and it is bounded. If the daemon does not read, it is stopped, and no order can
     * continue. */
    while ((r = frame_send(ENGINE_SOCKET_FD, engine->packet, (size_t)n, fds, n_fds)) == FRAME_AGAIN)
        if (poll(&room, 1, REPORT_WAIT_MS) == 0)
            engine_leave(EXIT_FAILURE);
    if (r != 0)
        engine_leave(r == FRAME_EOF ? EXIT_SUCCESS : EXIT_FAILURE);
}

void engine_fail(struct nccl_engine *engine, const char *format, ...)
{
    char what[DEVICE_MAX_WHAT_BYTES];
    struct device_report report = {.type = DEVICE_REPORT_FAILED};
    va_list args;

    va_start(args, format);
    vsnprintf(what, sizeof(what), format, args);
    va_end(args);
    for (char *c = what; *c; c++)
        if (*c < 0x20 || *c > 0x7e)
            *c = ' ';
    report.failed.what = what;
    report.failed.has_tag = engine->tag;
    report.failed.tag = engine->tag ? *engine->tag : 0;
    engine_report(engine, &report, NULL, 0);
    engine_leave(EXIT_FAILURE);
}

void engine_check_cuda(struct nccl_engine *engine, const struct nccl_gpu *gpu, cudaError_t r, const char *what)
{
    if (r == cudaSuccess)
        return;
    if (gpu)
        engine_fail(engine, "GPU %d: %s: %s (%s)", gpu->device, what, cudaGetErrorString(r), cudaGetErrorName(r));
    engine_fail(engine, "%s: %s (%s)", what, cudaGetErrorString(r), cudaGetErrorName(r));
}

void engine_check_gpus(struct nccl_engine *engine, const char *what)
{
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        const struct nccl_gpu *gpu = &engine->gpus[i];
        cudaError_t r = gpu->main ? cudaStreamQuery(gpu->main) : cudaSuccess;

        engine_check_cuda(engine, gpu, r == cudaErrorNotReady ? cudaSuccess : r, what);
    }
}

void engine_check_nccl(struct nccl_engine *engine, ncclResult_t r, const char *what)
{
    if (r == ncclSuccess || r == ncclInProgress)
        return;
    engine_check_gpus(engine, what);
    engine_fail(engine, "NCCL: %s (%s)", ncclGetErrorString(r), what);
}

void engine_use(struct nccl_engine *engine, const struct nccl_gpu *gpu)
{
    engine_check_cuda(engine, gpu, cudaSetDevice(gpu->device), "cudaSetDevice");
}

void engine_launch(struct nccl_engine *engine, const struct nccl_gpu *gpu, int r, const char *what)
{
    engine_check_cuda(engine, gpu, (cudaError_t)r, what);
}

void engine_count_collective(struct nccl_engine *engine, uint64_t collective)
{
    if (!engine->groups)
        return;
    /* Skipped numbers belong to fetches between other nodes. */
    if (collective < engine->n_collectives)
        engine_fail(engine, "collective %" PRIu64 " is ordered where %" PRIu64 " is due", collective,
                    engine->n_collectives);
    engine->n_collectives = collective + 1;
}

void engine_join(struct nccl_engine *engine, struct nccl_gpu *gpu, bool comm_later)
{
    cudaStream_t later = comm_later ? gpu->comm : gpu->main, earlier = comm_later ? gpu->main : gpu->comm;
    cudaEvent_t event = comm_later ? gpu->main_event : gpu->comm_event;

    engine_check_cuda(engine, gpu, cudaEventRecord(event, earlier), "cudaEventRecord");
    engine_check_cuda(engine, gpu, cudaStreamWaitEvent(later, event, 0), "cudaStreamWaitEvent");
}

void engine_join_all(struct nccl_engine *engine, bool comm_later)
{
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        engine_use(engine, &engine->gpus[i]);
        engine_join(engine, &engine->gpus[i], comm_later);
    }
}

void engine_join_aside(struct nccl_engine *engine, struct nccl_gpu *gpu, const void *bytes, uint64_t n_bytes)
{
    const struct device_order_copy *copy = engine->aside ? &engine->aside->command.copy : NULL;
    uintptr_t at = (uintptr_t)bytes;

    for (size_t i = 0; copy && i < copy->n_moves; i++) {
        const struct device_move *move = &copy->moves[i];
        uintptr_t from = (uintptr_t)(gpu->pieces[move->kind].at + move->offset_bytes);

        if (&engine->gpus[move->local_rank] != gpu || from >= at + n_bytes || at >= from + move->n_bytes)
            continue;
        engine_check_cuda(engine, gpu, cudaStreamWaitEvent(gpu->main, gpu->aside_event, 0), "cudaStreamWaitEvent");
        return;
    }
}

int engine_poll(struct nccl_engine *engine)
{
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        cudaError_t r = cudaEventQuery(engine->gpus[i].main_event);

        if (r == cudaErrorNotReady)
            return NCCL_AGAIN;
        engine_check_cuda(engine, &engine->gpus[i], r, "cudaEventQuery");
    }
    return 0;
}
