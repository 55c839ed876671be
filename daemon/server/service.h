/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The service is the data that all connections of this daemon share: the job, the configuration, the list of sessions,
 * and buffers for one packet at a time. The server owns the service and sets its borrowed fields. Sessions and request
 * handlers use it by session->service. Only the loop's thread uses it.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/log-limit.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"
#include "daemon/server/questions.h"

struct config;
struct job;
struct kernels;
struct listener;
struct membership;
struct request;
struct session;

struct service {
    /* Borrowed. */
    uv_loop_t *loop;
    const struct config *config;
    const struct kernels *kernels;
    const struct listener *listener;
    struct job *job;
    const struct membership *membership; /* NULL: one node */
    /* Serves a request that has been unpacked. */
    void (*handle)(struct session *session, const struct request *request);

    struct session *sessions; /* the first session of the list */
    bool some_doomed;         /* at least one session is doomed */
    struct log_limit closed;  /* log limit for connections that are closed without an answer */
    struct questions questions;
    struct wire_arena arena;
    struct frame_batch batch;
    const struct frame_packet *packet; /* the packet that is being served */
    uint8_t *buffer;                   /* FRAME_MAX_BYTES, for one packet at a time */
    uint64_t started_ns;
};

/*
 * Allocates the buffers. Set service->loop before. Return: 0 or -errno. The caller calls service_deinit() even after an
 * error.
 */
int service_init(struct service *service, const struct questions_ops *questions);
/* Frees the buffers. All sessions and the loop's handles must be closed before. */
void service_deinit(struct service *service);

uint64_t service_now_ns(void);
const char *service_version(void);
