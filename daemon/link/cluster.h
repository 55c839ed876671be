/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The links between the daemons of a job that runs on several nodes. Node 0 listens at its address in world.nodes.
 * Every other node keeps one TCP connection (libuv) to node 0. The links carry only control messages, no tensors.
 *
 * Trust. All nodes hold one key (world.key_file). Both ends send a fresh nonce. Each direction's key is derived from
 * the shared key, nonces, job and node numbers; all later bytes are sealed (libsodium's secretstream). So the first
 * frame exposes a stranger, a wrong key, or a replayed or altered byte. Then the connection is dropped with one
 * rate-limited log line. A stranger gets no reason.
 *
 * Equal configuration. The first sealed frame of each daemon carries its version, its job, its incarnation, and a text
 * of the settings that must be equal on all nodes. Both daemons log a differing setting with both values.
 *
 * Messages between two incarnations are delivered once and in order, even if connections break. Each message has a
 * number. The sender keeps the message until it is acknowledged, and sends it again over each new connection. A broken
 * or silent connection (no frame for CLUSTER_SILENCE_MS) is replaced by a new one. If the peer's process is not the
 * previous one, appeared() reports that, and messages kept for the previous process are dropped. Messages sent before
 * the first process of a peer connects go to that first process. Messages sent in appeared() or later go to the new
 * process.
 *
 * Giving up a peer. When more than CLUSTER_MAX_KEPT_BYTES of messages are kept for a peer, they are dropped and the
 * peer is given up. A peer that is given up is down, and cluster_send() to it returns -ENOMEM, until another process of
 * its node connects (appeared()). A process that reconnects after a newer process of its node was admitted is refused,
 * and its log says that it must be restarted.
 *
 * Node 0 decides how the job continues after a broken link: daemon/leader/leader-recover.c.
 *
 * All functions run on the loop's thread. The operations below may call all of these functions, even cluster_close().
 * These functions call no operation themselves, and no operation is called after cluster_close().
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

struct config;
struct cluster;

enum {
    CLUSTER_KEY_MIN_BYTES = 32, /* size of the key file, without the newline at its end */
    CLUSTER_MAX_MESSAGE_BYTES = 1 << 20,
    CLUSTER_HEARTBEAT_MS = 500,
    CLUSTER_SILENCE_MS = 1500, /* three heartbeats; the kernel's resend may need this long */
    CLUSTER_RETRY_MS = 100,
    CLUSTER_MAX_KEPT_BYTES = 64 << 20, /* unacknowledged messages per peer; more give up the peer */
};

struct cluster_ops {
    /* Delivers a message from a peer, in the order of sending. data is valid during the call. */
    void (*message)(void *userdata, unsigned node, const uint8_t *data, size_t n_bytes);
    /* The link is up, for the first time with this incarnation of the peer, or after a reconnect. */
    void (*up)(void *userdata, unsigned node);
    /* The link is down, and messages to the peer are kept. why: a sentence. Called once per up(). */
    void (*down)(void *userdata, unsigned node, const char *why);
    /*
     * Return: whether this daemon holds the state of a run. Called when this daemon introduces itself. NULL: always
     * false.
     */
    bool (*has_run)(void *userdata);
    /*
     * A new process of the peer has connected. first: it is the first process of this peer. has_run: the process
     * reports that it holds the state of a run. Called before up().
     */
    void (*appeared)(void *userdata, unsigned node, bool first, bool has_run);
    /*
     * The peer is configured differently, so the link does not come up. Called at each attempt to connect. difference:
     * the differing keys with both values. May be NULL.
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
 * Reads the key, and starts to listen if this is node 0. If node 0's address is a name, node 0 blocks on the name
 * server, so call it before the loop runs. Makes the process and its children ignore SIGPIPE if no handler was set.
 * Return: 0, or -errno with a sentence in why (key file too short, unreadable or readable by others, address that
 * cannot be bound, ...).
 */
int cluster_new(struct cluster **out, const struct cluster_options *options, char *why, size_t why_size);

/*
 * Closes all links. Unacknowledged messages may be lost. The loop must keep running, because the last close callback of
 * the handles frees the cluster. NULL is fine.
 */
void cluster_close(struct cluster *cluster);

/*
 * Sends a message, or keeps it until the link is up. Node 0 may send to any other node, every other node only to node
 * 0. n_bytes: at most CLUSTER_MAX_MESSAGE_BYTES. Return: 0, or -ENOMEM if there is no memory for the message or the
 * peer is given up.
 */
int cluster_send(struct cluster *cluster, unsigned node, const void *data, size_t n_bytes);

/*
 * cluster_mark() marks the last message sent to the node. cluster_has_marked() returns whether the node has received
 * and handled the marked message. If the node's process ended before that, it returns false until the next
 * cluster_mark().
 */
void cluster_mark(struct cluster *cluster, unsigned node);
bool cluster_has_marked(const struct cluster *cluster, unsigned node);

/* Return: whether the link to the node is up. */
bool cluster_is_up(const struct cluster *cluster, unsigned node);

/*
 * Return: why the link is down, for status and texts: "nobody answers at 10.0.0.1:7700 (connection refused)", "not
 * heard of yet", "has not been heard for 3.1 s". Static or owned by the cluster, valid until the next call.
 */
const char *cluster_why_down(const struct cluster *cluster, unsigned node);

/* Return: milliseconds since the last frame from the peer, or UINT64_MAX if no frame was received. */
uint64_t cluster_silent_ms(const struct cluster *cluster, unsigned node);
