/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The data of one other node: its incarnation, the messages to and from it, the connection of its link, and why the
 * link is down. cluster.c makes and introduces connections; then the peer has them.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/log-limit.h"
#include "daemon/link/cluster.h"
#include "daemon/link/mailbox.h"

struct connection;
struct link_frame;

/* Why a line about a peer is logged. Each reason has its own limit. */
enum peer_reason { PEER_UP, PEER_UNREACHABLE, PEER_LOST, PEER_SILENT, PEER_DIFFERENT, PEER_GIVEN_UP, N_PEER_REASONS };

struct cluster_peer {
    const struct cluster_ops *ops;
    uv_loop_t *loop;
    unsigned node;
    uint64_t incarnation; /* 0: never heard of */
    struct mailbox mailbox;
    uint64_t marked;               /* number of the marked message */
    bool lost_mark;                /* the process that the marked message was for has ended without it */
    struct connection *connection; /* while the link is up; else NULL */
    bool owes_acknowledgement;
    bool given_up;     /* messages to this incarnation were dropped: it cannot continue */
    bool is_silent;    /* `why` says that the peer is silent */
    bool is_doubted;   /* the peer was silent at the last tick, but received frames may be unread */
    uint64_t heard_ms; /* last frame before the present connection; UINT64_MAX: never */
    char why[640];
    struct log_limit limits[N_PEER_REASONS];
};

void peer_init(struct cluster_peer *peer, const struct cluster_ops *ops, uv_loop_t *loop, unsigned node);
/* The connection must be closed before. */
void peer_deinit(struct cluster_peer *peer);

/* Keeps and logs the reason why the link is down, a sentence. */
void peer_explain(struct cluster_peer *peer, enum peer_reason reason, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Milliseconds since the last frame from the peer; UINT64_MAX: never. */
uint64_t peer_silent_ms(const struct cluster_peer *peer);

/* As cluster_mark(), cluster_has_marked(). */
void peer_mark(struct cluster_peer *peer);
bool peer_has_marked(const struct cluster_peer *peer);
/* Return: 0 or -ENOMEM. */
int peer_send(struct cluster_peer *peer, const void *data, size_t n_bytes);

/*
 * Does the peer's introduction agree with this side's message numbers? Return: false if one of the two daemons has
 * forgotten the other.
 */
bool peer_fits(const struct cluster_peer *peer, const struct link_frame *introduction, uint64_t own_incarnation);

/*
 * Accepts an introduction that fits. Return: true if the peer is another process than before, or the first one. Drops
 * the kept messages if another process was before, or the peer was given up.
 */
bool peer_adopt(struct cluster_peer *peer, const struct link_frame *introduction, uint64_t own_incarnation);

/* Brings the link up over this connection: calls up(), and sends all kept messages. */
void peer_go_up(struct cluster_peer *peer, struct connection *connection);

/* Takes the link down, and calls down(). Return: the connection, which the caller closes. */
struct connection *peer_go_down(struct cluster_peer *peer);

/* Handles a frame of a link that is up. Return: 0, or LINK_FRAME_E_INVALID if the frame cannot come now. */
int peer_take(struct cluster_peer *peer, const struct link_frame *frame);

/* Sends kept messages while the connection has room. */
void peer_pump(struct cluster_peer *peer);

/*
 * peer_acknowledge: reports the messages received, if there are new ones. peer_beat: sends a heartbeat if it is time.
 */
void peer_acknowledge(struct cluster_peer *peer);
void peer_beat(struct cluster_peer *peer);
