/* SPDX-License-Identifier: Apache-2.0 */

/* Exchanges messages with one other node while the link is up, and explains why the link is down. */

#include "daemon/link/cluster-peer.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "daemon/link/connection.h"
#include "daemon/link/link-frame.h"

void peer_init(struct cluster_peer *peer, const struct cluster_ops *ops, uv_loop_t *loop, unsigned node)
{
    *peer = (struct cluster_peer){
        .ops = ops, .loop = loop, .node = node, .heard_ms = UINT64_MAX, .why = "not heard of yet"};
    mailbox_init(&peer->mailbox, CLUSTER_MAX_KEPT_BYTES);
}

void peer_deinit(struct cluster_peer *peer)
{
    assert(!peer->connection);
    mailbox_reset(&peer->mailbox);
}

void peer_explain(struct cluster_peer *peer, enum peer_reason reason, const char *format, ...)
{
    /*
     * For a node that was reached before, a notice is enough, because the warning E1501 follows if the job needs the
     * node.
     */
    bool is_told = reason == PEER_LOST || (reason == PEER_UNREACHABLE && peer->heard_ms != UINT64_MAX);
    va_list args;

    va_start(args, format);
    vsnprintf(peer->why, sizeof(peer->why), format, args);
    va_end(args);
    peer->is_silent = reason == PEER_SILENT;
    log_limited(&peer->limits[reason], uv_now(peer->loop), is_told ? LOG_NOTICE : LOG_WARNING,
                reason == PEER_DIFFERENT ? "node %u %s" : "node %u: %s", peer->node, peer->why);
}

uint64_t peer_silent_ms(const struct cluster_peer *peer)
{
    uint64_t heard_ms = peer->connection ? peer->connection->heard_ms : peer->heard_ms;

    return heard_ms == UINT64_MAX ? UINT64_MAX : uv_now(peer->loop) - heard_ms;
}

/* ---- messages ------------------------------------------------------------------------------------------ */

/*
 * Gives up a peer that has not acknowledged CLUSTER_MAX_KEPT_BYTES of messages. Drops the messages, so the peer's
 * process cannot continue, and cluster.c closes the connection. Only another process of that node is admitted again.
 */
static void give_up_peer(struct cluster_peer *peer)
{
    mailbox_reset(&peer->mailbox);
    peer->given_up = true;
    peer_explain(peer, PEER_GIVEN_UP,
                 "is given up: it has not taken the %d MiB of messages that are kept at most; start it anew",
                 CLUSTER_MAX_KEPT_BYTES >> 20);
}

int peer_send(struct cluster_peer *peer, const void *data, size_t n_bytes)
{
    int r = peer->given_up ? -ENOMEM : mailbox_put(&peer->mailbox, data, n_bytes);

    if (r == MAILBOX_E_FULL) {
        give_up_peer(peer);
        r = -ENOMEM;
    }
    if (r == 0)
        peer_pump(peer);
    return r;
}

void peer_mark(struct cluster_peer *peer)
{
    peer->marked = peer->mailbox.n_put;
    peer->lost_mark = false;
}

bool peer_has_marked(const struct cluster_peer *peer)
{
    return peer->given_up || (!peer->lost_mark && peer->mailbox.n_acknowledged >= peer->marked);
}

void peer_pump(struct cluster_peer *peer)
{
    const struct mailbox_message *message;

    while (peer->connection && connection_has_room(peer->connection) && (message = mailbox_take(&peer->mailbox)))
        connection_send_packed(peer->connection, message->bytes, message->n_bytes);
}

static void say_how_far(struct cluster_peer *peer)
{
    struct link_frame frame = {.kind = LINK_FRAME_HEARTBEAT, .n_received = peer->mailbox.n_received};

    peer->owes_acknowledgement = false;
    connection_send(peer->connection, &frame);
}

void peer_acknowledge(struct cluster_peer *peer)
{
    if (peer->owes_acknowledgement)
        say_how_far(peer);
}

void peer_beat(struct cluster_peer *peer)
{
    if (uv_now(peer->loop) - peer->connection->said_ms >= CLUSTER_HEARTBEAT_MS)
        say_how_far(peer);
}

static int take_message(struct cluster_peer *peer, const struct link_frame *frame)
{
    int r = mailbox_receive(&peer->mailbox, frame->number);

    if (r == MAILBOX_E_GAP)
        return LINK_FRAME_E_INVALID;
    peer->owes_acknowledgement = true;
    if (r == 0)
        peer->ops->message(peer->ops->userdata, peer->node, frame->data, frame->n_bytes);
    return 0;
}

int peer_take(struct cluster_peer *peer, const struct link_frame *frame)
{
    switch (frame->kind) {
    case LINK_FRAME_MESSAGE:
        return peer->given_up ? 0 : take_message(peer, frame);
    case LINK_FRAME_HEARTBEAT:
        if (peer->given_up)
            return 0;
        return mailbox_acknowledge(&peer->mailbox, frame->n_received) == 0 ? 0 : LINK_FRAME_E_INVALID;
    case LINK_FRAME_INTRODUCTION:
    case LINK_FRAME_FAREWELL:
        break;
    }
    return LINK_FRAME_E_INVALID;
}

/* ---- up and down --------------------------------------------------------------------------------------- */

bool peer_fits(const struct cluster_peer *peer, const struct link_frame *introduction, uint64_t own_incarnation)
{
    bool we_know_it = peer->incarnation == introduction->introduction.incarnation;
    bool it_knows_us = own_incarnation == introduction->introduction.peer_incarnation;

    if (peer->given_up && we_know_it)
        return false;
    if (it_knows_us)
        return introduction->introduction.n_received <= (we_know_it ? peer->mailbox.n_sent : 0) &&
               introduction->introduction.n_acknowledged <= (we_know_it ? peer->mailbox.n_received : 0);
    /* The peer may have missed our introduction, but then it has neither received nor sent messages. */
    return !we_know_it || (peer->mailbox.n_acknowledged == 0 && peer->mailbox.n_received == 0);
}

bool peer_adopt(struct cluster_peer *peer, const struct link_frame *introduction, uint64_t own_incarnation)
{
    bool is_another = peer->incarnation != introduction->introduction.incarnation;
    int r = 0;

    /* The first process of a peer gets the messages that were queued before it, unless the peer was given up. */
    if (is_another && (peer->incarnation != 0 || peer->given_up)) {
        peer->lost_mark = !peer_has_marked(peer);
        peer->marked = 0;
        mailbox_reset(&peer->mailbox);
    }
    peer->incarnation = introduction->introduction.incarnation;
    peer->given_up = false;
    if (introduction->introduction.peer_incarnation == own_incarnation)
        r = mailbox_acknowledge(&peer->mailbox, introduction->introduction.n_received);
    assert(r == 0); /* peer_fits() was true */
    (void)r;
    return is_another;
}

void peer_go_up(struct cluster_peer *peer, struct connection *connection)
{
    assert(!peer->connection);
    peer->connection = connection;
    peer->is_silent = peer->is_doubted = false;
    peer->owes_acknowledgement = false;
    snprintf(peer->why, sizeof(peer->why), "the link stands");
    log_limited(&peer->limits[PEER_UP], uv_now(peer->loop), LOG_NOTICE, "node %u: the link stands (%s)", peer->node,
                connection->peer);
    mailbox_rewind(&peer->mailbox);
    peer->ops->up(peer->ops->userdata, peer->node);
    peer_pump(peer);
}

struct connection *peer_go_down(struct cluster_peer *peer)
{
    struct connection *connection = steal_ptr(peer->connection);

    peer->heard_ms = connection->heard_ms;
    peer->ops->down(peer->ops->userdata, peer->node, peer->why);
    return connection;
}
