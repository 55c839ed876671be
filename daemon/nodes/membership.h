/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The connection of a job to the other nodes: the links between the daemons (cluster.h) and the engine that moves the
 * bytes (engine.h), behind struct nodes_ops. While engines keep failing, the pause before the next engine grows, up to
 * MEMBERSHIP_MAX_PAUSE_MS, so that noise on the engines' ports cannot overload the machine. When the link to a node is
 * up again, the pause ends.
 *
 * All functions run on the loop's thread.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

struct job;
struct membership;
struct traffic;

enum { MEMBERSHIP_MAX_PAUSE_MS = 2000 }; /* less than other nodes' engines wait for this node's engine */

struct membership_options {
    uv_loop_t *loop;
    struct job *job; /* must be freed before membership_close(), while the loop does not run */
    /* Called after every callback, so that the server can close sessions that the job wants closed. */
    void (*after)(void *userdata);
    void *userdata;
};

/* Return: 0, or -errno with a sentence in why. */
int membership_new(struct membership **out, const struct membership_options *options, char *why, size_t why_size);
/* Ends all calls to the job. The loop frees *membership when its handles are closed. membership: may be NULL. */
void membership_close(struct membership *membership);

/*
 * Closes the links to the other nodes, or makes them again if apart is false. A daemon stays apart while it holds a run
 * that it cannot adopt. membership: may be NULL.
 */
void membership_stay_apart(struct membership *membership, bool apart);

/* Notes that this daemon is to stop. The caller then calls membership_stop() repeatedly. membership: may be NULL. */
void membership_tell_to_stop(struct membership *membership);

enum membership_stop {
    MEMBERSHIP_MAY_STOP,      /* all nodes have ended the decided step and window, and no rank of another node needs
                                 this node; or there is no run; or membership is NULL */
    MEMBERSHIP_WAITS,         /* this node is still needed */
    MEMBERSHIP_WAITS_IN_VAIN, /* needed, but another node's link is down longer than replacing a daemon takes */
};

enum membership_stop membership_stop(const struct membership *membership);

struct membership_node {
    const char *address;
    bool up;
    const char *why;    /* if not up: the reason; valid until the next call */
    uint64_t silent_ms; /* since its last message; UINT64_MAX: it has sent none */
};

/* Node 0 knows of all nodes; every other node knows only of itself and node 0. */
struct membership_node membership_node(const struct membership *membership, unsigned node);

/* Return: N_TRAFFIC counters, of all engines that the job has had. */
const struct traffic *membership_traffic(const struct membership *membership);
