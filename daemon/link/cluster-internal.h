/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The parts of the module `cluster`, from bottom to top. Each part calls only the parts above it in this list. Only
 * these parts include this header.
 *
 *   cluster-waiting.c   connections that carry no link, and the end of the cluster
 *   cluster-dial.c      addresses, and the connection to node 0
 *   cluster-broken.c    failed connections and links, and their end
 *   cluster-admit.c     a connection until its link is up
 *   cluster.c           creation, the listening socket, and the periodic checks
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

/* Why a line about a connection from a possible stranger is logged. Each reason has its own log limit. */
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
    char *alike; /* text of the version and settings that must be equal on all nodes */

    struct cluster_peer *peers; /* one per node; this node's own entry is not used */
    /* Connections that carry no link: incoming ones without a proof of the key, one to node 0, and finishing ones. */
    struct connection *waiting;

    uv_tcp_t listener;
    uv_timer_t tick;
    uint64_t ticked_ms;
    unsigned n_open; /* open handles, connections and lookups; at 0 the cluster is freed */
    bool closing;

    /* How another node finds node 0 and connects to it. */
    uv_getaddrinfo_t lookup;
    struct addrinfo *addresses, *next_address;
    bool is_connecting;
    uint64_t retry_at_ms;

    struct log_limit limits[N_CLUSTER_REASONS];
};

/* ---- cluster-waiting.c --------------------------------------------------------------------------------- */

/* Frees a cluster whose handles are all closed. Other code calls cluster_close() instead. */
void cluster_free(struct cluster *cluster);

/* Subtracts 1 from n_open, and frees the cluster at 0. */
void cluster_one_less(struct cluster *cluster);

/* Adds a connection to the waiting list. */
void cluster_link(struct cluster *cluster, struct connection *connection);

/* Removes the connection from the waiting list. Does nothing if it is not in the list. */
void cluster_unlink(struct connection *connection);

/* Closes a waiting connection. */
void cluster_let_go(struct connection *connection);

struct connection_options cluster_connection_options(struct cluster *cluster);

/* ---- cluster-dial.c ------------------------------------------------------------------------------------ */

/*
 * Makes a socket that is bound to node 0's address. Call it before the loop runs, because it blocks on the name server
 * if the address is a name. Return: the socket, or -errno.
 */
int cluster_bind(struct cluster *cluster, char *why, size_t why_size);

/* Looks up the address of node 0, and connects. */
void cluster_look_up(struct cluster *cluster);

/* Connects to the next address of the lookup. Call it only if an address is left. */
void cluster_try_next_address(struct cluster *cluster);

/* Tries node 0 again later, and closes the failed connection if it is not NULL. Set the peer's why before the call. */
void cluster_retry(struct cluster *cluster, struct connection *connection);

/* ---- cluster-broken.c ---------------------------------------------------------------------------------- */

/* Return: the peer whose link uses this connection, or NULL. */
struct cluster_peer *cluster_find_peer(const struct connection *connection);

/* Handles a failed connection. Ends its link, or tries node 0's next address, or drops a stranger. */
void cluster_connection_failed(struct connection *connection, enum connection_fault fault, const char *what);

/* Drops an incoming connection and logs "a connection from ADDRESS SENTENCE"; each reason has its own log limit. */
void cluster_refuse(struct connection *connection, enum cluster_reason reason, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Handles a failed connection to node 0. Tries node 0's next address, or retries later. */
void cluster_outgoing_failed(struct connection *connection, enum connection_fault fault, const char *what);

/*
 * Sends the sentence unless it is "", and then ends the connection. The connection is in the waiting list until it
 * ends.
 */
void cluster_say_farewell(struct connection *connection, const char *sentence);

/* Ends a connection because one of its two daemons has forgotten the messages between them, so they cannot continue. */
void cluster_end_for_good(struct connection *connection);

/* Ends the link of a peer, and closes the link's connection. Set peer->why before the call. */
void cluster_lose(struct cluster_peer *peer);

/* Ends the link of a peer that was given up (cluster.h), with a farewell. */
void cluster_part_from(struct cluster_peer *peer);

/* ---- cluster-admit.c ----------------------------------------------------------------------------------- */

extern const struct connection_ops cluster_connection_ops;
