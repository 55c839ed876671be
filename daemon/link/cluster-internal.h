/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The parts of the module `cluster`, from bottom to top; each calls only those above it in this list. No other file
 * includes this header.
 *
 *   cluster-waiting.c   connections that carry no link, and the end of the cluster
 *   cluster-dial.c      addresses, and the connection to node 0
 *   cluster-broken.c    connections and links that fail or are ended
 *   cluster-admit.c     a connection until its link is up
 *   cluster.c           life, listening, time
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "core/base/log-limit.h"
#include "daemon/link/cluster-peer.h"
#include "daemon/link/cluster.h"
#include "daemon/link/connection.h"
#include "daemon/link/secure-stream.h"

/* Why a line about a connection of a possible stranger is logged. Each reason has its own limit. */
enum cluster_reason {
    CLUSTER_STRANGER,
    CLUSTER_UNPROVED,
    CLUSTER_SLOW,
    CLUSTER_CROWDED,
    CLUSTER_BABBLE,
    CLUSTER_NO_MEMORY,
    N_CLUSTER_REASONS
};

struct cluster {
    uv_loop_t *loop;
    const struct config *config;
    struct cluster_ops ops;
    const struct connection_ops *connection_ops;
    uint64_t incarnation;
    unsigned node, n_nodes;
    struct secure_stream_key key;
    char *alike; /* version and settings that must be equal on all nodes */

    struct cluster_peer *peers; /* one per node; that of this node is not used */
    /* Connections that carry no link: unproved ones, the outgoing one, and finishing ones. */
    struct connection *waiting;

    uv_tcp_t listener;
    uv_timer_t tick;
    uint64_t ticked_ms;
    unsigned n_open; /* handles, connections and a lookup; the end of the last one frees the cluster */
    bool closing;

    /* The way to node 0. */
    uv_getaddrinfo_t lookup;
    struct addrinfo *addresses, *next_address;
    bool is_connecting;
    uint64_t retry_at_ms;

    struct log_limit limits[N_CLUSTER_REASONS];
};

/* ---- cluster-waiting.c --------------------------------------------------------------------------------- */

/* Frees a cluster whose handles are all closed. Use cluster_close() to get there. */
void cluster_free(struct cluster *cluster);

/* Counts one of n_open as ended. The last one frees the cluster. */
void cluster_one_less(struct cluster *cluster);

/* Adds a connection to the waiting list. */
void cluster_link(struct cluster *cluster, struct connection *connection);

/* Removes the connection from the waiting list, if it is in it. */
void cluster_unlink(struct connection *connection);

/* Closes a waiting connection. */
void cluster_let_go(struct connection *connection);

struct connection_options cluster_connection_options(struct cluster *cluster);

/* ---- cluster-dial.c ------------------------------------------------------------------------------------ */

/*
 * Makes a socket that listens at node 0's address. Blocks on the name server if the address is a name: the loop does
 * not run yet. Return: the socket, or -errno.
 */
int cluster_bind(struct cluster *cluster, char *why, size_t why_size);

/* Looks up the address of node 0, and connects. */
void cluster_look_up(struct cluster *cluster);

/* Connects to the next address that was found. One must be left. */
void cluster_try_next_address(struct cluster *cluster);

/* Tries node 0 again later, and closes the failed connection, if it is not NULL. The caller has set the peer's why. */
void cluster_retry(struct cluster *cluster, struct connection *connection);

/* ---- cluster-broken.c ---------------------------------------------------------------------------------- */

/* Return: the peer whose link uses this connection, or NULL. */
struct cluster_peer *cluster_find_peer(const struct connection *connection);

/* Handles a failed connection: ends its link, tries node 0's next address, or drops a stranger. */
void cluster_connection_failed(struct connection *connection, enum connection_fault fault, const char *what);

/* Drops an incoming connection and logs "a connection from ADDRESS SENTENCE"; each reason has its own log limit. */
void cluster_refuse(struct connection *connection, enum cluster_reason reason, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Handles a failed connection to node 0: tries the next address, or tries again later. */
void cluster_outgoing_failed(struct connection *connection, enum connection_fault fault, const char *what);

/* Sends the peer the sentence (nothing if ""), and then ends the connection. Until then it is a waiting connection. */
void cluster_say_farewell(struct connection *connection, const char *sentence);

/* Ends a connection whose two daemons cannot continue: one of them has forgotten the messages between them. */
void cluster_end_for_good(struct connection *connection);

/* Ends the link of a peer, and closes its connection. The caller has set peer->why. */
void cluster_lose(struct cluster_peer *peer);

/* Ends the link of a peer that was given up. */
void cluster_part_from(struct cluster_peer *peer);

/* ---- cluster-admit.c ----------------------------------------------------------------------------------- */

extern const struct connection_ops cluster_connection_ops;
