/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The list of connections that carry no link, and the count of the cluster's open handles. The cluster is freed when
 * the last open handle ends.
 */

#include "daemon/link/cluster-internal.h"

#include <assert.h>
#include <stdlib.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "daemon/link/link-frame.h"

enum { MAX_FRAME_BYTES = CLUSTER_MAX_MESSAGE_BYTES + LINK_FRAME_INTRODUCTION_BYTES };

_Static_assert((int)LINK_FRAME_MESSAGE_BYTES <= (int)LINK_FRAME_INTRODUCTION_BYTES, "a frame has room for any message");

/* ---- connections --------------------------------------------------------------------------------------- */

void cluster_unlink(struct connection *connection)
{
    if (!connection->link)
        return;
    assert(*connection->link == connection);
    *connection->link = connection->next;
    if (connection->next)
        connection->next->link = connection->link;
    connection->next = NULL;
    connection->link = NULL;
}

void cluster_link(struct cluster *cluster, struct connection *connection)
{
    assert(connection->owner == cluster);
    assert(!connection->link);
    connection->next = cluster->waiting;
    connection->link = &cluster->waiting;
    if (connection->next)
        connection->next->link = &connection->next;
    cluster->waiting = connection;
}

void cluster_let_go(struct connection *connection)
{
    struct cluster *cluster = connection->owner;

    assert(connection->link); /* for a link's connection use cluster_lose() */
    if (connection->outgoing && !connection->is_finishing)
        cluster->is_connecting = false;
    cluster_unlink(connection);
    connection_close(connection);
}

struct connection_options cluster_connection_options(struct cluster *cluster)
{
    return (struct connection_options){
        .loop = cluster->loop,
        .ops = cluster->connection_ops,
        .owner = cluster,
        .key = &cluster->key,
        .job = cluster->config->job,
        .node = cluster->node,
        .max_frame_bytes = MAX_FRAME_BYTES,
    };
}

/* ---- the end ------------------------------------------------------------------------------------------- */

void cluster_free(struct cluster *cluster)
{
    assert(cluster->n_open == 0);
    assert(!cluster->waiting);
    for (unsigned i = 0; cluster->peers && i < cluster->n_nodes; i++)
        peer_deinit(&cluster->peers[i]);
    free(cluster->peers);
    free(cluster->alike);
    uv_freeaddrinfo(cluster->addresses);
    secure_stream_key_deinit(&cluster->key);
    free(cluster);
}

void cluster_one_less(struct cluster *cluster)
{
    assert(cluster->n_open > 0);
    assert(cluster->n_open > 1 || cluster->closing); /* the timer stays open until cluster_close() */
    if (--cluster->n_open == 0)
        cluster_free(cluster);
}
