/* SPDX-License-Identifier: Apache-2.0 */

/* Admits connections: a connection whose introduction fits becomes the link to its node. */

#include "daemon/link/cluster-internal.h"

#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "daemon/link/link-frame.h"

/* Copies the text of a farewell, with ? for bytes that are not printable. */
static void print_words(char *out, size_t size, const struct link_frame *farewell)
{
    size_t n_bytes = MIN(farewell->n_bytes, size - 1);

    for (size_t i = 0; i < n_bytes; i++)
        out[i] = farewell->data[i] >= ' ' && farewell->data[i] < 0x7f ? (char)farewell->data[i] : '?';
    out[n_bytes] = '\0';
}

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

/* Return: whether the peer has the same configuration. On a difference, or without memory, ends the connection. */
static bool is_alike(struct connection *connection, const struct link_frame *frame)
{
    struct cluster *cluster = connection->owner;
    struct cluster_peer *peer = &cluster->peers[connection->stream.peer_node];
    _cleanup_free_ char *there = strndup((const char *)frame->data, frame->n_bytes);
    char difference[480];

    if (!there) {
        cluster_connection_failed(connection, CONNECTION_NO_MEMORY, strerror(ENOMEM));
        return false;
    }
    if (config_shared_difference(cluster->alike, there, difference, sizeof(difference)) == 0)
        return true;
    if (!peer->connection)
        peer_explain(peer, PEER_DIFFERENT, "is configured differently: %s", difference);
    if (connection->outgoing) {
        cluster_retry(cluster, connection);
    } else {
        introduce_ourselves(connection); /* so that the peer can name the difference too */
        cluster_say_farewell(connection, "");
    }
    if (cluster->ops.different && !peer->connection)
        cluster->ops.different(cluster->ops.userdata, peer->node, difference);
    return false;
}

/* Handles the first sealed frame of a node that holds the key, its introduction. */
static void welcome(struct connection *connection, const struct link_frame *frame)
{
    struct cluster *cluster = connection->owner;
    struct cluster_peer *peer = &cluster->peers[connection->stream.peer_node];
    bool first = peer->incarnation == 0 && !peer->given_up, is_another;

    if (!is_alike(connection, frame))
        return;
    if (!peer_fits(peer, frame, cluster->incarnation)) {
        cluster_end_for_good(connection);
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
        cluster_connection_failed(connection, CONNECTION_BABBLE, "it does not introduce itself");
    }
}

static void on_frame(struct connection *connection, const struct link_frame *frame)
{
    struct cluster_peer *peer = cluster_find_peer(connection);
    char words[LINK_FRAME_MAX_WHY + 1];

    if (!peer) {
        take_first_frame(connection, frame);
    } else if (frame->kind == LINK_FRAME_FAREWELL) {
        print_words(words, sizeof(words), frame);
        peer_explain(peer, PEER_LOST, "it has ended the connection: %s", words);
        cluster_lose(peer);
    } else if (peer_take(peer, frame) != 0) {
        cluster_connection_failed(connection, CONNECTION_BABBLE, "a frame came that cannot come now");
    }
}

/*
 * Handles the peer's hello. The connecting end answers with its introduction. The listening end answers only with its
 * own hello, because the peer's hello proves nothing.
 */
static void on_met(struct connection *connection)
{
    struct cluster *cluster = connection->owner;
    unsigned node = connection->stream.peer_node;
    char what[64];

    if (connection->outgoing ? node != 0 : node == 0 || node >= cluster->n_nodes) {
        snprintf(what, sizeof(what), "it says it is node %u", node);
        cluster_connection_failed(connection, CONNECTION_STRANGER, what);
    } else if (connection->outgoing) {
        introduce_ourselves(connection);
    } else {
        connection_say_hello(connection);
    }
}

static void on_drained(struct connection *connection)
{
    struct cluster_peer *peer = cluster_find_peer(connection);

    if (peer)
        peer_acknowledge(peer);
}

static void on_writable(struct connection *connection)
{
    struct cluster_peer *peer = cluster_find_peer(connection);

    if (peer)
        peer_pump(peer);
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
    .failed = cluster_connection_failed,
    .closed = on_connection_closed,
};
