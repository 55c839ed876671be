/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The service is what all connections of this daemon share: the job, the configuration, the list of sessions, and
 * buffers for one packet at a time. The server owns it and fills in what it borrows; sessions and request handlers
 * reach all of it through session->service. One thread, the loop's.
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

    struct session *sessions; /* the first of the list */
    bool some_doomed;         /* at least one session */
    struct log_limit closed;  /* connections that are closed without an answer */
    struct questions questions;
    struct wire_arena arena;
    struct frame_batch batch;
    const struct frame_packet *packet; /* the packet that is being served */
    uint8_t *buffer;                   /* FRAME_MAX_BYTES, for one packet at a time */
    uint64_t started_ns;
};

/* The caller has set loop. Return: 0 or -errno; service_deinit() is needed in either case. */
int service_init(struct service *service, const struct questions_ops *questions);
/* The caller has closed all sessions and the loop's handles. */
void service_deinit(struct service *service);

uint64_t service_now_ns(void);
const char *service_version(void);
