/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A session: one connection, from accept to close. It owns the socket, the
 * pidfd of its peer and its output queue; it turns packets into requests and
 * replies into packets. The service's handler does what a request asks for.
 *
 * Life: session_new() starts it; session_doom() marks it, also while one of its own packets is being served;
 * sessions_reap() stops it and unlinks it from the job; the last libuv close callback frees it.
 */

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "core/wire/frame.h"
#include "daemon/server/listener.h"
#include "daemon/server/questions.h"

struct diagnostic;
struct job_rank;
struct reply;
struct service;

enum session_state {
    SESSION_HELLO = 1 << 0,    /* nothing but Hello is expected */
    SESSION_ATTACHED = 1 << 1, /* a rank, declaring */
    SESSION_FORMED = 1 << 2,   /* a rank that was told the layout */
    SESSION_CONTROL = 1 << 3,  /* zerodctl */
    SESSION_LEFT = 1 << 4,     /* a rank that has left */
    SESSION_WATCH = 1 << 5,    /* of a rank's process: says where it is */
    SESSION_CLOSED = 1 << 6,
};

struct session {
    struct service *service;
    struct session *next, **link;
    int fd, pidfd;
    uv_poll_t socket_poll, pid_poll;
    int events;                       /* that the socket is watched for */
    unsigned n_handles;               /* libuv handles that are not closed yet */
    bool watches_socket, watches_pid; /* the handles below are to be closed */
    bool is_short;                    /* the last time that it was read from, the kernel had no memory */
    bool doomed;
    enum session_state state;
    struct listener_peer peer;
    struct frame_queue queue;
    struct question question; /* of a control connection: the one at work */
    struct job_rank *rank;    /* once attached */
    uint8_t *hello;           /* the packed Hello of a process that waits to attach again; owned; NULL: none */
    size_t n_hello_bytes;
    unsigned hello_rank;
    struct job_rank *watched; /* of a watch */
    uint64_t accepted_ns;
    uint64_t quiet_ns; /* of a control connection: Hello, or the last answer */
};

/* Takes the fd, also on failure. Return: 0 or -errno. */
int session_new(struct session **out, struct service *service, int fd);

/* Closes sessions that were doomed. At the end of each callback, never in the middle of a verb. */
void sessions_reap(struct service *service);

int64_t session_rank_number(const struct session *session); /* -1: none */
/* Keeps what the session is told. Takes the reference. Return: the diagnostic, borrowed. */
struct diagnostic *session_keep(struct session *session, struct diagnostic *diagnostic);

/* The only place that changes the state; asserts the transition. */
void session_set_state(struct session *session, enum session_state state);

/* Queues a reply; descriptors are taken. A peer that does not read its answers is doomed. */
void session_send(struct session *session, const struct reply *reply, int *fds, size_t n_fds);

/* Queues a reply that is packed. */
void session_send_packed(struct session *session, const uint8_t *packed, size_t n_bytes);

/* Waits for what its state and its question need. */
void session_want_events(struct session *session);

/* Tells the peer why, then closes when the packet under way has been served. */
void session_refuse(struct session *session, const struct diagnostic *diagnostic);
void session_doom(struct session *session);
