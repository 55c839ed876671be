/* SPDX-License-Identifier: Apache-2.0 */

/* The welcome makes a link of a connection whose introduction fits, and ends connections that fail. */

#include "daemon/link/cluster-internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/config/config.h"
#include "daemon/link/link-frame.h"

/* ---- what goes wrong ----------------------------------------------------------------------------------- */

/* The peer whose link is up over this connection, or NULL. */
static struct cluster_peer *peer_of(const struct connection *connection)
{
    struct cluster *cluster = connection->owner;
    unsigned node = connection->stream.peer_node;

    return node < cluster->n_nodes && cluster->peers[node].connection == connection ? &cluster->peers[node] : NULL;
}

void cluster_lose(struct cluster_peer *peer)
{
    connection_close(peer_go_down(peer));
}

void cluster_refuse(struct connection *connection, enum cluster_reason reason, const char *format, ...)
{
    struct cluster *cluster = connection->owner;
    char sentence[300];
    va_list args;

    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    log_limited(&cluster->limits[reason], uv_now(cluster->loop), LOG_WARNING, "a connection from %s %s",
                connection->peer, sentence);
    cluster_let_go(connection);
}

/*
 * A stranger claims to be a node, but lacks our key. The peer's `why` mentions that, because a user looks there for the
 * reason why the node does not come. A stranger without the key can change nothing but this text.
 */
static void suspect(struct cluster *cluster, const struct connection *connection)
{
    unsigned node = connection->stream.peer_node;
    struct cluster_peer *peer;

    if (node == cluster->node || node >= cluster->n_nodes)
        return;
    peer = &cluster->peers[node];
    if (!peer->connection && peer->incarnation == 0)
        snprintf(peer->why, sizeof(peer->why),
                 "not heard of yet; somebody at %s who says he is that node has another key (world.key_file)",
                 connection->peer);
}

static void incoming_failed(struct connection *connection, enum connection_fault fault, const char *what)
{
    struct cluster *cluster = connection->owner;

    switch (fault) {
    case CONNECTION_UNPROVED:
        suspect(cluster, connection);
        cluster_refuse(connection, CLUSTER_UNPROVED,
                       "was dropped: %s (another world.key_file, or somebody who has none)", what);
        return;
    case CONNECTION_BABBLE:
        cluster_refuse(connection, CLUSTER_BABBLE, "was dropped: %s", what);
        return;
    case CONNECTION_NO_MEMORY:
        cluster_refuse(connection, CLUSTER_NO_MEMORY, "was dropped: %s", what);
        return;
    case CONNECTION_STRANGER:
        if (connection->stream.failure == SECURE_STREAM_E_VERSION)
            connection_say_hello(connection); /* so that it can name the difference too */
        cluster_refuse(connection, CLUSTER_STRANGER, "was dropped: %s", what);
        return;
    case CONNECTION_LOST:
        cluster_refuse(connection, CLUSTER_STRANGER, "ended before it had proved to be a node: %s", what);
        return;
    }
}

void cluster_outgoing_failed(struct connection *connection, enum connection_fault fault, const char *what)
{
    struct cluster *cluster = connection->owner;
    struct cluster_peer *peer = &cluster->peers[0];
    const char *address = cluster->config->world.nodes.items[0].address;

    if (!connection->connected && cluster->next_address) {
        cluster_let_go(connection);
        cluster_try_next_address(cluster);
        return;
    }
    if (!connection->connected)
        peer_explain(peer, PEER_UNREACHABLE, "nobody answers at %s (%s)", address, what);
    else if (fault == CONNECTION_LOST && connection->stream.state == SECURE_STREAM_AWAITS_HELLO)
        peer_explain(peer, PEER_UNREACHABLE, "who answers at %s does not talk as a daemon (%s)", address, what);
    else if (fault == CONNECTION_LOST)
        peer_explain(peer, PEER_UNREACHABLE,
                     "who answers at %s did not let us in (%s): is world.key_file the same there?", address, what);
    else
        peer_explain(peer, PEER_UNREACHABLE, "who answers at %s is not the node we look for: %s", address, what);
    cluster_retry(cluster, connection);
}

static void on_connection_failed(struct connection *connection, enum connection_fault fault, const char *what)
{
    struct cluster_peer *peer = peer_of(connection);

    if (connection->is_finishing) {
        cluster_let_go(connection);
    } else if (peer) {
        peer_explain(peer, PEER_LOST, "the connection was lost: %s", what);
        cluster_lose(peer);
    } else if (connection->outgoing) {
        cluster_outgoing_failed(connection, fault, what);
    } else {
        incoming_failed(connection, fault, what);
    }
}

/* Its own words, but no more than printable ones. */
static void print_words(char *out, size_t size, const struct link_frame *farewell)
{
    size_t n_bytes = MIN(farewell->n_bytes, size - 1);

    for (size_t i = 0; i < n_bytes; i++)
        out[i] = farewell->data[i] >= ' ' && farewell->data[i] < 0x7f ? (char)farewell->data[i] : '?';
    out[n_bytes] = '\0';
}

/* ---- introductions ------------------------------------------------------------------------------------- */

static void introduce_ourselves(struct connection *connection)
{
    struct cluster *cluster = connection->owner;
    const struct cluster_peer *peer = &cluster->peers[connection->stream.peer_node];
    struct link_frame frame = {
        .kind = LINK_FRAME_INTRODUCTION,
        .introduction = {.incarnation = cluster->incarnation,
                         .peer_incarnation = peer->incarnation,
                         .n_received = peer->mailbox.n_received,
                         .n_acknowledged = peer->mailbox.n_acknowledged,
                         .has_run = cluster->ops.has_run && cluster->ops.has_run(cluster->ops.userdata)},
        .data = (const uint8_t *)cluster->alike,
        .n_bytes = strlen(cluster->alike),
    };

    connection_send(connection, &frame);
}

/* Sends the reason and ends the connection, which keeps its place among the waiting ones until the reason is sent. */
static void finish_connection(struct connection *connection, const char *sentence)
{
    struct cluster *cluster = connection->owner;
    struct link_frame frame = {.kind = LINK_FRAME_FAREWELL,
                               .data = (const uint8_t *)sentence,
                               .n_bytes = MIN(strlen(sentence), (size_t)LINK_FRAME_MAX_WHY)};

    if (*sentence)
        connection_send(connection, &frame);
    if (connection->outgoing)
        cluster->is_connecting = false;
    connection->since_ms = uv_now(cluster->loop);
    connection_finish(connection);
}

/* Return: false when the peer is configured differently, and the connection ends. */
static bool is_alike(struct connection *connection, const struct link_frame *frame)
{
    struct cluster *cluster = connection->owner;
    struct cluster_peer *peer = &cluster->peers[connection->stream.peer_node];
    _cleanup_free_ char *there = strndup((const char *)frame->data, frame->n_bytes);
    char difference[480];

    if (!there) {
        on_connection_failed(connection, CONNECTION_NO_MEMORY, strerror(ENOMEM));
        return false;
    }
    if (config_shared_difference(cluster->alike, there, difference, sizeof(difference)) == 0)
        return true;
    if (!peer->connection)
        peer_explain(peer, PEER_DIFFERENT, "is configured differently: %s", difference);
    if (connection->outgoing) {
        cluster_retry(cluster, connection);
    } else {
        introduce_ourselves(connection); /* so that it can name the difference too */
        finish_connection(connection, "");
    }
    if (cluster->ops.different && !peer->connection)
        cluster->ops.different(cluster->ops.userdata, peer->node, difference);
    return false;
}

/*
 * One of the two daemons has given the other up, or has seen another process in its place meanwhile. The messages
 * between them are forgotten, so they cannot continue.
 */
static void end_for_good(struct connection *connection)
{
    struct cluster *cluster = connection->owner;
    struct cluster_peer *peer = &cluster->peers[connection->stream.peer_node];
    char words[120];

    if (!peer->connection && !peer->given_up)
        peer_explain(peer, PEER_GIVEN_UP, "one of us has forgotten what was said before; it must be started anew");
    snprintf(words, sizeof(words), "node %u has forgotten what was said before; node %u must be started anew",
             cluster->node, connection->stream.peer_node);
    if (connection->outgoing)
        cluster->retry_at_ms = uv_now(cluster->loop) + CLUSTER_RETRY_MS;
    finish_connection(connection, words);
}

/* The first sealed frame: a node of this job that holds the key introduces its incarnation. */
static void welcome(struct connection *connection, const struct link_frame *frame)
{
    struct cluster *cluster = connection->owner;
    struct cluster_peer *peer = &cluster->peers[connection->stream.peer_node];
    bool first = peer->incarnation == 0 && !peer->given_up, is_another;

    if (!is_alike(connection, frame))
        return;
    if (!peer_fits(peer, frame, cluster->incarnation)) {
        end_for_good(connection);
        return;
    }
    cluster_unlink(connection);
    cluster->is_connecting = cluster->is_connecting && !connection->outgoing;
    if (peer->connection) {
        peer_explain(peer, PEER_LOST, "it has made a new connection");
        cluster_lose(peer);
    }
    is_another = peer_adopt(peer, frame, cluster->incarnation);
    if (is_another && !cluster->closing)
        cluster->ops.appeared(cluster->ops.userdata, peer->node, first, frame->introduction.has_run);
    if (cluster->closing) {
        connection_close(connection);
        return;
    }
    if (!connection->outgoing)
        introduce_ourselves(connection);
    peer_go_up(peer, connection);
}

static void take_first_frame(struct connection *connection, const struct link_frame *frame)
{
    struct cluster *cluster = connection->owner;
    char words[LINK_FRAME_MAX_WHY + 1];

    if (frame->kind == LINK_FRAME_INTRODUCTION) {
        welcome(connection, frame);
    } else if (frame->kind == LINK_FRAME_FAREWELL && connection->outgoing) {
        print_words(words, sizeof(words), frame);
        peer_explain(&cluster->peers[0], PEER_GIVEN_UP, "it does not let us in: %s", words);
        cluster_retry(cluster, connection);
    } else {
        on_connection_failed(connection, CONNECTION_BABBLE, "it does not introduce itself");
    }
}

static void on_frame(struct connection *connection, const struct link_frame *frame)
{
    struct cluster_peer *peer = peer_of(connection);
    char words[LINK_FRAME_MAX_WHY + 1];

    if (!peer) {
        take_first_frame(connection, frame);
    } else if (frame->kind == LINK_FRAME_FAREWELL) {
        print_words(words, sizeof(words), frame);
        peer_explain(peer, PEER_LOST, "it has ended the connection: %s", words);
        cluster_lose(peer);
    } else if (peer_take(peer, frame) != 0) {
        on_connection_failed(connection, CONNECTION_BABBLE, "a frame came that cannot come now");
    }
}

/* A hello proves nothing: the connecting end introduces itself, the listening end only sends its own hello. */
static void on_met(struct connection *connection)
{
    struct cluster *cluster = connection->owner;
    unsigned node = connection->stream.peer_node;
    char what[64];

    if (connection->outgoing ? node != 0 : node == 0 || node >= cluster->n_nodes) {
        snprintf(what, sizeof(what), "it says it is node %u", node);
        on_connection_failed(connection, CONNECTION_STRANGER, what);
    } else if (connection->outgoing) {
        introduce_ourselves(connection);
    } else {
        connection_say_hello(connection);
    }
}

static void on_drained(struct connection *connection)
{
    struct cluster_peer *peer = peer_of(connection);

    if (peer)
        peer_acknowledge(peer);
}

static void on_writable(struct connection *connection)
{
    struct cluster_peer *peer = peer_of(connection);

    if (peer)
        peer_pump(peer);
}

void cluster_part_from(struct cluster_peer *peer)
{
    struct connection *connection = peer_go_down(peer);
    struct cluster *cluster = connection->owner;

    if (cluster->closing) {
        connection_close(connection);
        return;
    }
    cluster_link(cluster, connection);
    finish_connection(connection, "more messages are kept for this node than may be; it must be started anew");
}

static void on_connection_closed(struct connection *connection)
{
    cluster_one_less(connection->owner);
}

const struct connection_ops cluster_connection_ops = {
    .met = on_met,
    .frame = on_frame,
    .drained = on_drained,
    .writable = on_writable,
    .failed = on_connection_failed,
    .closed = on_connection_closed,
};
