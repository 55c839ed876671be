/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The connection of a job to the other nodes: the links between the daemons (cluster.h) and the engine that moves the
 * bytes (engine.h), behind struct nodes_ops. While engines keep failing, the pause before the next one grows, up to
 * MEMBERSHIP_MAX_PAUSE_MS, so that noise on their ports cannot overload the machine. When a node is back, the pause
 * ends.
 *
 * Loop thread.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

struct job;
struct membership;
struct traffic;

enum { MEMBERSHIP_MAX_PAUSE_MS = 2000 }; /* less than the other nodes' engines wait for this one after a failure */

struct membership_options {
    uv_loop_t *loop;
    struct job *job; /* joined here; freed before membership_close(), while the loop does not run */
    /* Called after every callback: the server may then close sessions that the job wants closed. */
    void (*after)(void *userdata);
    void *userdata;
};

/* Return: 0, or -errno with a sentence in why. */
int membership_new(struct membership **out, const struct membership_options *options, char *why, size_t why_size);
/* Ends all calls to the job. The loop frees *membership when its handles are closed. NULL is fine. */
void membership_close(struct membership *membership);

/*
 * Closes the links to the other nodes, or makes them (apart is false). A daemon stays apart while it holds a run that
 * it cannot adopt. NULL is fine.
 */
void membership_stay_apart(struct membership *membership, bool apart);

/* Notes that this daemon is to stop. The caller then calls membership_stop() until it may. NULL is fine. */
void membership_tell_to_stop(struct membership *membership);

enum membership_stop {
    MEMBERSHIP_MAY_STOP,      /* all nodes have ended the decided step and window, and no rank of another node needs
                                 this node; or there is no run, or only one node (NULL) */
    MEMBERSHIP_WAITS,         /* this node is still needed */
    MEMBERSHIP_WAITS_IN_VAIN, /* likewise, but a node that is waited for is away longer than a replacement takes */
};

enum membership_stop membership_stop(const struct membership *membership);

struct membership_node {
    const char *address;
    bool up;
    const char *why;    /* not up; valid until the next call */
    uint64_t silent_ms; /* UINT64_MAX: never heard */
};

/* Node 0 knows of all nodes; every other node knows only of itself and node 0. */
struct membership_node membership_node(const struct membership *membership, unsigned node);

/* Return: N_TRAFFIC counters, of all engines that the job has had. */
const struct traffic *membership_traffic(const struct membership *membership);
