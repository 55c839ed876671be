/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One TCP connection to another node's daemon, or to a stranger that claims to be one: the socket (libuv), its stream,
 * and bytes on their way out. A connection turns bytes into frames and frames into bytes; the owner interprets them.
 *
 * Life: connection_accept() or connection_open() makes it; connection_close() ends it, and the last libuv callback
 * frees it after closed(). The owner may close it in any callback except closed().
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/link/link-frame.h"
#include "daemon/link/secure-stream.h"

struct connection;

enum connection_fault {
    CONNECTION_LOST,     /* the socket has ended */
    CONNECTION_STRANGER, /* the plain hello is not of our protocol (secure-stream.h), or names a wrong node */
    CONNECTION_UNPROVED, /* a frame that cannot be opened */
    CONNECTION_BABBLE,   /* sealed with our key, but not a valid frame */
    CONNECTION_NO_MEMORY,
};

struct connection_ops {
    /* The peer's hello has come: connection->stream.peer_node is the node that it claims to be. */
    void (*met)(struct connection *connection);
    /* A sealed frame has come. It is valid during the call. */
    void (*frame)(struct connection *connection, const struct link_frame *frame);
    /* All frames that came together have been delivered. */
    void (*drained)(struct connection *connection);
    /* There is room for more to send. */
    void (*writable)(struct connection *connection);
    /* The connection has failed, and the owner closes it now. what: the event, as "connection refused". */
    void (*failed)(struct connection *connection, enum connection_fault fault, const char *what);
    /* The last callback: the connection is freed when it returns. */
    void (*closed)(struct connection *connection);
};

struct connection_options {
    uv_loop_t *loop;
    const struct connection_ops *ops;
    void *owner;
    const struct secure_stream_key *key;
    const char *job;
    unsigned node; /* ours */
    size_t max_frame_bytes;
};

struct connection {
    const struct connection_ops *ops;
    void *owner;
    struct connection *next, **link; /* the owner's list */
    uv_tcp_t tcp;
    uv_connect_t connecting;
    uv_shutdown_t finishing;
    struct secure_stream stream;
    bool outgoing;
    bool connected;                       /* the TCP connection is established */
    bool closing;                         /* connection_close() was called */
    bool is_finishing;                    /* connection_finish() was called: only earlier writes still go out */
    int failure;                          /* of a write that could not begin; reported by the next connection_check() */
    uint64_t since_ms, heard_ms, said_ms; /* times: made; last frame in; last frame out */
    char peer[80];                        /* its address and port */
    uint8_t input[16 * 1024];
};

/*
 * Accepts the connection that waits at the listening socket. Return: 0, or -errno. On failure, *out is NULL, or closed,
 * and closed() follows.
 */
int connection_accept(struct connection **out, const struct connection_options *options, uv_stream_t *listener);

/* Begins to connect, and sends the hello when connected. Return: as connection_accept(). */
int connection_open(struct connection **out, const struct connection_options *options, const struct sockaddr *address);

/* Stops the connection; only closed() follows. Closing twice is fine. */
void connection_close(struct connection *connection);

/* Stops reading. When all sent bytes have left, failed() comes, and the owner closes the connection. */
void connection_finish(struct connection *connection);

/* Sends the plain hello of the listening end; the connecting end has sent its own already. */
void connection_say_hello(struct connection *connection);

/* Seals and sends a frame. On failure, failed() comes later, not during the call. */
void connection_send(struct connection *connection, const struct link_frame *frame);
void connection_send_packed(struct connection *connection, const uint8_t *bytes, size_t n_bytes);

/* Are so few bytes queued that more may be sent? */
bool connection_has_room(const struct connection *connection);

/* To be called regularly: reports a write that failed at once. */
void connection_check(struct connection *connection);
