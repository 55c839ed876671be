/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One TCP connection to another node's daemon, or to a stranger that claims to be a daemon. It consists of the socket
 * (libuv), the secure stream, and the queued outgoing bytes. A connection turns bytes into frames and frames into
 * bytes. The owner interprets the frames.
 *
 * connection_accept() or connection_open() makes a connection. connection_close() ends the connection, and the last
 * libuv callback frees it after closed(). The owner may call connection_close() in any callback except closed().
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
    CONNECTION_STRANGER, /* the hello (secure-stream.h) is not of our protocol, or its node is wrong */
    CONNECTION_UNPROVED, /* a frame that cannot be opened */
    CONNECTION_BABBLE,   /* sealed with our key, but not a valid frame */
    CONNECTION_NO_MEMORY,
};

struct connection_ops {
    /* The peer's hello was received. connection->stream.peer_node is the node that the peer claims to be. */
    void (*met)(struct connection *connection);
    /* A sealed frame was received. frame is valid during the call. */
    void (*frame)(struct connection *connection, const struct link_frame *frame);
    /* All frames of the last read have been delivered. */
    void (*drained)(struct connection *connection);
    /* The queue of outgoing bytes has room again. */
    void (*writable)(struct connection *connection);
    /* The connection has failed. The owner must close it now. what: the event, for example "connection refused". */
    void (*failed)(struct connection *connection, enum connection_fault fault, const char *what);
    /* The last callback. The connection is freed when closed() returns. */
    void (*closed)(struct connection *connection);
};

struct connection_options {
    uv_loop_t *loop;
    const struct connection_ops *ops;
    void *owner;
    const struct secure_stream_key *key;
    const char *job;
    unsigned node; /* the number of this node */
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
    bool is_finishing;                    /* connection_finish() was called: only queued bytes are still sent */
    int failure;                          /* error of a write that could not begin; connection_check() reports it */
    uint64_t since_ms, heard_ms, said_ms; /* times of creation, last frame received, last bytes sent */
    char peer[80];                        /* the peer's address and port */
    uint8_t input[16 * 1024];
};

/*
 * Accepts the connection that waits at the listening socket. Return: 0 or -errno. On failure, *out is NULL, or a closed
 * connection for which closed() follows.
 */
int connection_accept(struct connection **out, const struct connection_options *options, uv_stream_t *listener);

/* Begins to connect, and sends the hello when connected. Return and *out: as for connection_accept(). */
int connection_open(struct connection **out, const struct connection_options *options, const struct sockaddr *address);

/* Stops the connection. Afterwards only closed() is called. Closing twice is fine. */
void connection_close(struct connection *connection);

/* Stops reading. When all queued bytes are sent, calls failed(), in which the owner closes the connection. */
void connection_finish(struct connection *connection);

/*
 * Sends the plain hello. Only the listening end calls this, because the connecting end sends its hello when connected.
 */
void connection_say_hello(struct connection *connection);

/*
 * Seals and sends a frame. On failure, failed() is called later, not during the call. connection_send_packed() sends
 * the bytes of link_frame_pack().
 */
void connection_send(struct connection *connection, const struct link_frame *frame);
void connection_send_packed(struct connection *connection, const uint8_t *bytes, size_t n_bytes);

/* Return: whether the queue of outgoing bytes has room for more. */
bool connection_has_room(const struct connection *connection);

/* Reports a write that could not begin, by failed(). The owner calls this regularly. */
void connection_check(struct connection *connection);
