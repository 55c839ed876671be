/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The parts of the module `cluster`, from bottom to top; each calls only those above it in this list. No other file
 * includes this header.
 *
 *   cluster-waiting.c   connections that are no links, and the end of the cluster
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

/* Why a line about a connection is logged that may be anybody's: each has its own limit. */
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
    char *alike; /* what all nodes must have alike */

    struct cluster_peer *peers; /* one per node; nothing where we are ourselves */
    /* Connections that are not a link yet, or no more: unproved ones, the one that we make, those that finish. */
    struct connection *waiting;

    uv_tcp_t listener;
    uv_timer_t tick;
    uint64_t ticked_ms;
    unsigned n_open; /* handles, connections and a lookup; the last one's end frees all this */
    bool closing;

    /* The way to node 0. */
    uv_getaddrinfo_t lookup;
    struct addrinfo *addresses, *next_address;
    bool is_connecting;
    uint64_t retry_at_ms;

    struct log_limit limits[N_CLUSTER_REASONS];
};

/* ---- cluster-waiting.c --------------------------------------------------------------------------------- */

/* Frees a cluster whose handles have all been closed; cluster_close() is the way there. */
void cluster_free(struct cluster *cluster);

/* One of n_open has ended. The last one's end frees the cluster. */
void cluster_one_less(struct cluster *cluster);

/* Puts a connection among the waiting ones. */
void cluster_link(struct cluster *cluster, struct connection *connection);

/* Takes it out, if it is one of them. */
void cluster_unlink(struct connection *connection);

/* Ends a connection that waits. */
void cluster_let_go(struct connection *connection);

struct connection_options cluster_connection_options(struct cluster *cluster);

/* ---- cluster-dial.c ------------------------------------------------------------------------------------ */

/* Waits for the name server, if the address is a name: the loop does not run yet. Return: a socket, or -errno. */
int cluster_bind(struct cluster *cluster, char *why, size_t why_size);

/* Looks for node 0, and connects. */
void cluster_look_up(struct cluster *cluster);

/* Connects to the next of the addresses that were found; there is one. */
void cluster_try_next_address(struct cluster *cluster);

/* The way to node 0 has failed, at connection if there was one; its why has been set. */
void cluster_retry(struct cluster *cluster, struct connection *connection);

/* ---- cluster-broken.c ---------------------------------------------------------------------------------- */

/* The peer whose link uses this connection, or NULL. */
struct cluster_peer *cluster_find_peer(const struct connection *connection);

/* A connection failed: ends its link, tries node 0's next address, or drops a stranger, as the connection's state is.
 */
void cluster_connection_failed(struct connection *connection, enum connection_fault fault, const char *what);

/* Drops an incoming connection and logs "a connection from ADDRESS SENTENCE"; each reason has its own log limit. */
void cluster_refuse(struct connection *connection, enum cluster_reason reason, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The connection to node 0 failed: tries the next address, or again later. */
void cluster_outgoing_failed(struct connection *connection, enum connection_fault fault, const char *what);

/* Ends the connection after the peer has been sent the sentence; "" sends none. Until then it is a waiting connection.
 */
void cluster_say_farewell(struct connection *connection, const char *sentence);

/* Ends a connection whose two daemons cannot continue: one of them has forgotten the messages between them. */
void cluster_end_for_good(struct connection *connection);

/* Ends the link of a peer, and closes its connection. The caller has set peer->why. */
void cluster_lose(struct cluster_peer *peer);

/* Ends the link of a peer that was given up. */
void cluster_part_from(struct cluster_peer *peer);

/* ---- cluster-admit.c ----------------------------------------------------------------------------------- */

extern const struct connection_ops cluster_connection_ops;
