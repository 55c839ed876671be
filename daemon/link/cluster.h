/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The links between the daemons of a job that runs on several nodes. Node 0 listens at its address of world.nodes,
 * every other node connects to it: a star, one TCP connection (libuv) per other node. Only control travels here.
 *
 * Trust. All nodes hold one key (world.key_file). Both ends send a fresh nonce; from key, nonces, job and node numbers
 * each direction's key is derived, and everything after that travels sealed (libsodium's secretstream). So a stranger,
 * a wrong key, a replayed or altered byte is noticed at the first frame, and its connection dropped with one
 * rate-limited line. Nothing is said to a stranger.
 *
 * Equal configuration. The first sealed frame carries version, job, the daemon's incarnation, and a text of the
 * settings that must be equal on all nodes. Both ends report a difference with its key and both values.
 *
 * Messages are delivered once and in order between two incarnations, whatever happens to connections: each has a
 * number, is kept until it is acknowledged, and is sent again over the next connection. A broken or silent connection
 * (no heartbeat for CLUSTER_SILENCE_MS) is made again. If the peer is another process than before, what was said to the
 * old one is forgotten: appeared() reports that, and messages that were kept for the old process are dropped. Messages
 * that are sent before any process has come are for the first one; messages that are sent in appeared() or later are
 * for the new one.
 *
 * Giving up a peer. When more than CLUSTER_MAX_KEPT_BYTES are kept for a peer, they are dropped and the peer is given
 * up: it is down, and cluster_send() returns -ENOMEM, until another process comes in its place (appeared()). A peer
 * that comes back after another process had its place is given up, too: its log says that it must be started anew.
 *
 * Node 0 decides how the job continues after a broken link: daemon/leader/leader-recover.c.
 *
 * All functions are for the loop's thread. Any may be called from within the operations below, cluster_close() too. No
 * operation is called from within these functions, and none after cluster_close().
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

struct config;
struct cluster;

enum {
    CLUSTER_KEY_MIN_BYTES = 32, /* of the key file, without the newline at its end */
    CLUSTER_MAX_MESSAGE_BYTES = 1 << 20,
    CLUSTER_HEARTBEAT_MS = 500,
    CLUSTER_SILENCE_MS = 1500, /* three heartbeats; the kernel may wait for as long again before it resends */
    CLUSTER_RETRY_MS = 100,
    CLUSTER_MAX_KEPT_BYTES =
        64 << 20, /* sent and not acknowledged, per peer; more: the peer is given up (down), see .c */
};

struct cluster_ops {
    /* From a peer, in order. data is valid during the call. */
    void (*message)(void *userdata, unsigned node, const uint8_t *data, size_t n_bytes);
    /* The link stands: for the first time with this incarnation of the peer, or again. */
    void (*up)(void *userdata, unsigned node);
    /* The link does not stand any more; why: a sentence. Messages are kept. Called once per up(). */
    void (*down)(void *userdata, unsigned node, const char *why);
    /* Does this daemon hold the state of a run? Asked when it introduces itself. NULL: it never does. */
    bool (*has_run)(void *userdata);
    /* The peer is another process than before. first: none was before. has_run: it says so of itself. Before up(). */
    void (*appeared)(void *userdata, unsigned node, bool first, bool has_run);
    /* The peer has configured something differently, so that the link does not come; again at each attempt. May be
     * NULL. difference: names keys, with both values. */
    void (*different)(void *userdata, unsigned node, const char *difference);
    void *userdata;
};

struct cluster_options {
    uv_loop_t *loop;
    const struct config *config; /* world.nodes with at least two, world.node, world.key_file, job; must outlive it */
    uint64_t incarnation;        /* random, not 0 */
    struct cluster_ops ops;
};

/*
 * Reads the key, and on node 0 listens: that waits for the name server where the address is a name, so the loop should
 * not run yet. Lets the process ignore SIGPIPE if nothing was set for it; children inherit that. Return: 0, or -errno
 * with a sentence in why (key file too short or unreadable or readable by others, address that cannot be bound, ...).
 */
int cluster_new(struct cluster **out, const struct cluster_options *options, char *why, size_t why_size);

/*
 * Closes all links; messages that are not acknowledged may be lost. The handles' last close callbacks free the cluster,
 * so the loop must keep running. NULL is fine.
 */
void cluster_close(struct cluster *cluster);

/*
 * Sends a message, or keeps it until the link is up. Node 0 may send to any other node, others to node 0 only.
 * n_bytes at most CLUSTER_MAX_MESSAGE_BYTES. Return: 0, or -ENOMEM: the message is not kept (no memory, or the peer
 * is given up).
 */
int cluster_send(struct cluster *cluster, unsigned node, const void *data, size_t n_bytes);

/*
 * Marks the message that was sent last to that node, and says whether the node has received the marked one, and served
 * it. If its process ended before that, the node has not, until a message to its successor is marked.
 */
void cluster_mark(struct cluster *cluster, unsigned node);
bool cluster_has_marked(const struct cluster *cluster, unsigned node);

/* Does the link to that node stand? */
bool cluster_is_up(const struct cluster *cluster, unsigned node);

/* Why it does not, for status and texts: "nobody answers at 10.0.0.1:7700 (connection refused)", "not heard of
 * yet", "has not been heard for 3.1 s". Static or owned by the cluster, valid until the next call. */
const char *cluster_why_down(const struct cluster *cluster, unsigned node);

/* Time since the peer was last heard, in ms; UINT64_MAX: never. */
uint64_t cluster_silent_ms(const struct cluster *cluster, unsigned node);
