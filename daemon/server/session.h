/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A session is one connection, from accept to close. It owns the socket, the pidfd of the peer, and the output queue.
 * It turns packets into requests and replies into packets. The service's handler serves the requests.
 *
 * session_new() starts a session. session_doom() marks the session for closing, and may be called while one of the
 * session's packets is being served. sessions_reap() stops a doomed session and unlinks it from the job. The last libuv
 * close callback frees the session.
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
    SESSION_HELLO = 1 << 0,    /* only Hello is allowed */
    SESSION_ATTACHED = 1 << 1, /* a rank that declares its parameters */
    SESSION_FORMED = 1 << 2,   /* a rank that has the layout */
    SESSION_CONTROL = 1 << 3,  /* zerodctl */
    SESSION_LEFT = 1 << 4,     /* a rank that has left */
    SESSION_WATCH = 1 << 5,    /* the second connection of a rank's process, to ask for its stack */
    SESSION_CLOSED = 1 << 6,
};

struct session {
    struct service *service;
    struct session *next, **link;
    int fd, pidfd;
    uv_poll_t socket_poll, pid_poll;
    int events;                       /* the events for which the socket is watched */
    unsigned n_handles;               /* libuv handles that are not closed yet */
    bool watches_socket, watches_pid; /* socket_poll and pid_poll must be closed */
    bool is_short;                    /* the kernel had no memory at the last read */
    bool doomed;
    enum session_state state;
    struct listener_peer peer;
    struct frame_queue queue;
    struct question question; /* used by a control connection */
    struct job_rank *rank;    /* NULL until attached */
    uint8_t *hello;           /* the packed Hello of a process that waits to attach; owned; NULL: no wait */
    size_t n_hello_bytes;
    unsigned hello_rank;
    struct job_rank *watched; /* in SESSION_WATCH: the rank of the watch */
    uint64_t accepted_ns;
    uint64_t quiet_ns; /* of a control connection: time of Hello or of the last change of its question */
};

/* Starts a session. Takes ownership of fd, even on failure. Return: 0 or -errno. */
int session_new(struct session **out, struct service *service, int fd);

/*
 * Closes doomed sessions. Each callback of the loop calls it at its end. It must not be called while the job serves a
 * request.
 */
void sessions_reap(struct service *service);

int64_t session_rank_number(const struct session *session); /* -1: no rank */
/*
 * Keeps a diagnostic as long as the session exists. Takes ownership of the caller's reference. Return: the diagnostic,
 * borrowed.
 */
struct diagnostic *session_keep(struct session *session, struct diagnostic *diagnostic);

/* Changes the state, and asserts that the transition is allowed. No other code changes the state. */
void session_set_state(struct session *session, enum session_state state);

/*
 * Sends or queues a reply. Takes ownership of the descriptors. Dooms the session if its peer does not read the answers.
 */
void session_send(struct session *session, const struct reply *reply, int *fds, size_t n_fds);

/* session_send() for a reply that is packed already. */
void session_send_packed(struct session *session, const uint8_t *packed, size_t n_bytes);

/* Watches the socket for the events that the session's state, queue and question need. */
void session_want_events(struct session *session);

/* Sends the diagnostic to the peer, and then dooms the session. */
void session_refuse(struct session *session, const struct diagnostic *diagnostic);
void session_doom(struct session *session);
