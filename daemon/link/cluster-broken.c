/* SPDX-License-Identifier: Apache-2.0 */

/* Handles failed connections and links, and ends them. */

#include "daemon/link/cluster-internal.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/config/config.h"
#include "daemon/link/link-frame.h"

struct cluster_peer *cluster_find_peer(const struct connection *connection)
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

    assert(!cluster_find_peer(connection));
    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    log_limited(&cluster->limits[reason], uv_now(cluster->loop), LOG_WARNING, "a connection from %s %s",
                connection->peer, sentence);
    cluster_let_go(connection);
}

/*
 * Notes in the peer's `why` that a stranger without our key claims to be that node, because a user reads `why` to learn
 * why the node is missing. A stranger without the key can change only this text.
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
            connection_say_hello(connection); /* so that the peer can name the difference too */
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
        peer_explain(peer, PEER_UNREACHABLE, "the process at %s is not a zerod daemon (%s)", address, what);
    else if (fault == CONNECTION_LOST)
        peer_explain(peer, PEER_UNREACHABLE,
                     "the daemon at %s refused the connection (%s): is world.key_file the same there?", address, what);
    else
        peer_explain(peer, PEER_UNREACHABLE, "the daemon at %s is not node 0: %s", address, what);
    cluster_retry(cluster, connection);
}

void cluster_connection_failed(struct connection *connection, enum connection_fault fault, const char *what)
{
    struct cluster_peer *peer = cluster_find_peer(connection);

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

void cluster_say_farewell(struct connection *connection, const char *sentence)
{
    struct cluster *cluster = connection->owner;
    struct link_frame frame = {.kind = LINK_FRAME_FAREWELL,
                               .data = (const uint8_t *)sentence,
                               .n_bytes = MIN(strlen(sentence), (size_t)LINK_FRAME_MAX_WHY)};

    assert(connection->link); /* check_waiting() ends the connection if the peer does not */
    assert(!connection->is_finishing);
    if (*sentence)
        connection_send(connection, &frame);
    if (connection->outgoing)
        cluster->is_connecting = false;
    connection->since_ms = uv_now(cluster->loop);
    connection_finish(connection);
}

/*
 * One of the two daemons has given up the other (cluster.h), or has admitted a newer process of its node. The messages
 * between the two daemons are forgotten, so they cannot continue.
 */
void cluster_end_for_good(struct connection *connection)
{
    struct cluster *cluster = connection->owner;
    struct cluster_peer *peer = &cluster->peers[connection->stream.peer_node];
    char words[120];

    if (!peer->connection && !peer->given_up)
        peer_explain(peer, PEER_GIVEN_UP, "one of the two daemons has lost the earlier messages; it must be restarted");
    snprintf(words, sizeof(words), "node %u has forgotten what was said before; node %u must be started anew",
             cluster->node, connection->stream.peer_node);
    if (connection->outgoing)
        cluster->retry_at_ms = uv_now(cluster->loop) + CLUSTER_RETRY_MS;
    cluster_say_farewell(connection, words);
}

void cluster_part_from(struct cluster_peer *peer)
{
    struct connection *connection = peer_go_down(peer);
    struct cluster *cluster = connection->owner;

    assert(peer->given_up);
    if (cluster->closing) {
        connection_close(connection);
        return;
    }
    cluster_link(cluster, connection);
    cluster_say_farewell(connection, "too many messages wait for this node; its daemon must be restarted");
}
