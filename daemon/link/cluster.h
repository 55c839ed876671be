/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The links between the daemons of a job that runs on several nodes. Node 0 listens at its address of world.nodes,
 * every other node connects to it: a star, one TCP connection (libuv) per other node. Only control travels here.
 *
 * Trust. All nodes hold one key (world.key_file). Both ends send a fresh nonce. Each direction's key is derived from
 * the shared key, nonces, job and node numbers; all later bytes are sealed (libsodium's secretstream). So a stranger, a
 * wrong key, a replayed or altered byte is noticed at the first frame. Its connection is dropped with one rate-limited
 * line; a stranger gets no reason.
 *
 * Equal configuration. The first sealed frame carries version, job, the daemon's incarnation, and a text of the
 * settings that must be equal on all nodes. Both ends report a difference with its key and both values.
 *
 * Messages between two incarnations are delivered once and in order, even if connections break: each message has a
 * number, is kept until it is acknowledged, and is sent again over the next connection. A broken or silent connection
 * (no heartbeat for CLUSTER_SILENCE_MS) is replaced by a new one. If the peer is another process than before,
 * appeared() reports that, and messages that were kept for the old process are dropped. Messages that are sent before
 * any process has come go to the first one; messages that are sent in appeared() or later go to the new one.
 *
 * Giving up a peer. When more than CLUSTER_MAX_KEPT_BYTES are kept for a peer, they are dropped and the peer is given
 * up: it is down, and cluster_send() returns -ENOMEM, until another process comes in its place (appeared()). A peer
 * that comes back after another process had its place is given up, too: its log says that it must be restarted.
 *
 * Node 0 decides how the job continues after a broken link: daemon/leader/leader-recover.c.
 *
 * All functions run on the loop's thread. All of them, even cluster_close(), may be called from the operations below.
 * They call no operation themselves, and no operation comes after cluster_close().
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
    CLUSTER_MAX_KEPT_BYTES = 64 << 20, /* not acknowledged, per peer; with more, the peer is given up (down), see .c */
};

struct cluster_ops {
    /* A message of a peer; messages come in order. data is valid during the call. */
    void (*message)(void *userdata, unsigned node, const uint8_t *data, size_t n_bytes);
    /* The link is up, for the first time with this incarnation of the peer, or again. */
    void (*up)(void *userdata, unsigned node);
    /* The link is down. why: a sentence. Messages are kept. Called once per up(). */
    void (*down)(void *userdata, unsigned node, const char *why);
    /* Does this daemon hold the state of a run? Called when it introduces itself. NULL: it never does. */
    bool (*has_run)(void *userdata);
    /*
     * The peer is another process than before. first: no process was before. has_run: the peer reports that it holds
     * the state of a run. Called before up().
     */
    void (*appeared)(void *userdata, unsigned node, bool first, bool has_run);
    /*
     * The peer is configured differently, so the link does not come up. Called at each attempt. difference: names keys,
     * with both values. May be NULL.
     */
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
 * Reads the key; node 0 also listens. If node 0's address is a name, node 0 blocks on the name server, so the loop
 * should not run yet. Makes the process ignore SIGPIPE if no handler was set; children inherit that. Return: 0, or
 * -errno with a sentence in why (key file too short or unreadable or readable by others, address that cannot be bound,
 * ...).
 */
int cluster_new(struct cluster **out, const struct cluster_options *options, char *why, size_t why_size);

/*
 * Closes all links; messages that are not acknowledged may be lost. The handles' last close callbacks free the cluster,
 * so the loop must keep running. NULL is fine.
 */
void cluster_close(struct cluster *cluster);

/*
 * Sends a message, or keeps it until the link is up. Node 0 may send to any other node, others to node 0 only. n_bytes
 * at most CLUSTER_MAX_MESSAGE_BYTES. Return: 0, or -ENOMEM if the message is not kept (no memory, or the peer is given
 * up).
 */
int cluster_send(struct cluster *cluster, unsigned node, const void *data, size_t n_bytes);

/*
 * cluster_mark() marks the last message to that node. cluster_has_marked(): has the node received and served the marked
 * message? If its process ended before that: false, until a message to its successor is marked.
 */
void cluster_mark(struct cluster *cluster, unsigned node);
bool cluster_has_marked(const struct cluster *cluster, unsigned node);

/* Is the link to that node up? */
bool cluster_is_up(const struct cluster *cluster, unsigned node);

/*
 * Return: why the link is down, for status and texts: "nobody answers at 10.0.0.1:7700 (connection refused)", "not
 * heard of yet", "has not been heard for 3.1 s". Static or owned by the cluster, valid until the next call.
 */
const char *cluster_why_down(const struct cluster *cluster, unsigned node);

/* Return: milliseconds since the last frame of the peer, or UINT64_MAX if none has come. */
uint64_t cluster_silent_ms(const struct cluster *cluster, unsigned node);
