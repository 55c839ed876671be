/* SPDX-License-Identifier: Apache-2.0 */

/* Allocates the buffers that all connections share, and provides the time and the version. */

#include "daemon/server/service.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <time.h>

int service_init(struct service *service, const struct questions_ops *questions)
{
    int r;

    assert(service->loop);
    assert(!service->sessions);
    service->buffer = malloc(FRAME_MAX_BYTES);
    if (!service->buffer)
        return -ENOMEM;
    r = wire_arena_init(&service->arena);
    if (r == 0)
        r = frame_batch_init(&service->batch);
    return r < 0 ? r : questions_init(&service->questions, service->loop, questions);
}

void service_deinit(struct service *service)
{
    assert(!service->sessions);
    frame_batch_deinit(&service->batch);
    questions_deinit(&service->questions);
    wire_arena_deinit(&service->arena);
    free(service->buffer);
}

uint64_t service_now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

const char *service_version(void)
{
    return ZEROD_VERSION;
}
