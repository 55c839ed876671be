/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What this daemon stores about another node's daemon: its incarnation, the messages to and from it, the connection of
 * the link, and why the link is down. cluster.c makes each connection and hands it to the peer after the introduction.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/log-limit.h"
#include "daemon/link/cluster.h"
#include "daemon/link/mailbox.h"

struct connection;
struct link_frame;

/* Why a line about a peer is logged. Each reason has its own log limit. */
enum peer_reason { PEER_UP, PEER_UNREACHABLE, PEER_LOST, PEER_SILENT, PEER_DIFFERENT, PEER_GIVEN_UP, N_PEER_REASONS };

struct cluster_peer {
    const struct cluster_ops *ops;
    uv_loop_t *loop;
    unsigned node;
    uint64_t incarnation; /* 0: no process has connected yet */
    struct mailbox mailbox;
    uint64_t marked;               /* number of the marked message */
    bool lost_mark;                /* the addressed process ended before it got the marked message */
    struct connection *connection; /* NULL: the link is down */
    bool owes_acknowledgement;
    bool given_up;     /* messages were dropped, so the process cannot continue */
    bool is_silent;    /* `why` says that the peer is silent */
    bool is_doubted;   /* the peer was silent at the last tick, but received frames may be unread */
    uint64_t heard_ms; /* last frame of earlier connections; UINT64_MAX: no frame yet */
    char why[640];
    struct log_limit limits[N_PEER_REASONS];
};

void peer_init(struct cluster_peer *peer, const struct cluster_ops *ops, uv_loop_t *loop, unsigned node);
/* Frees the kept messages. The peer's connection must be closed before. */
void peer_deinit(struct cluster_peer *peer);

/* Stores in peer->why the sentence that says why the link is down, and logs it. */
void peer_explain(struct cluster_peer *peer, enum peer_reason reason, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Return: milliseconds since the last frame from the peer, or UINT64_MAX if no frame was received. */
uint64_t peer_silent_ms(const struct cluster_peer *peer);

/* cluster_mark() and cluster_has_marked() for this peer. */
void peer_mark(struct cluster_peer *peer);
bool peer_has_marked(const struct cluster_peer *peer);
/* cluster_send() to this peer. Return: 0 or -ENOMEM. */
int peer_send(struct cluster_peer *peer, const void *data, size_t n_bytes);

/*
 * Return: whether the peer's introduction agrees with this side's message numbers. False if one of the two daemons has
 * forgotten the other.
 */
bool peer_fits(const struct cluster_peer *peer, const struct link_frame *introduction, uint64_t own_incarnation);

/*
 * Accepts an introduction for which peer_fits() returned true. If a new process replaces an earlier one, or the peer
 * was given up, drops the kept messages. Return: whether the introduction is from a new process, which may be the
 * peer's first.
 */
bool peer_adopt(struct cluster_peer *peer, const struct link_frame *introduction, uint64_t own_incarnation);

/* Brings the link up over this connection. Calls up(), and sends all kept messages. */
void peer_go_up(struct cluster_peer *peer, struct connection *connection);

/* Takes the link down, and calls down(). Return: the connection. The caller closes it. */
struct connection *peer_go_down(struct cluster_peer *peer);

/* Handles a frame of a link that is up. Return: 0, or LINK_FRAME_E_INVALID if the frame is not allowed now. */
int peer_take(struct cluster_peer *peer, const struct link_frame *frame);

/* Sends kept messages while the connection has room. */
void peer_pump(struct cluster_peer *peer);

/*
 * peer_acknowledge() acknowledges new messages from the peer. peer_beat() sends a heartbeat if CLUSTER_HEARTBEAT_MS
 * have passed since the last frame to the peer.
 */
void peer_acknowledge(struct cluster_peer *peer);
void peer_beat(struct cluster_peer *peer);
