/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * How a job of several nodes reaches the others: the links between the daemons (cluster.h) and the engine that moves
 * the bytes (engine.h), put behind nodes_ops. An engine that fails again and again is started ever later, up to every
 * MEMBERSHIP_MAX_PAUSE_MS: noise on its ports may cost engines, but not the machine. A node that is back ends the
 * pause.
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

enum { MEMBERSHIP_MAX_PAUSE_MS = 2000 }; /* the other nodes' engines, once they have failed, wait longer for this one */

struct membership_options {
    uv_loop_t *loop;
    struct job *job; /* joined here; freed before membership_close(), and the loop does not run in between */
    /* After every callback: sessions that the job wants closed can be closed now. */
    void (*after)(void *userdata);
    void *userdata;
};

/* Return: 0, or -errno with a sentence in why. */
int membership_new(struct membership **out, const struct membership_options *options, char *why, size_t why_size);
/* The job hears nothing any more; the loop frees it when its handles are closed. NULL is fine. */
void membership_close(struct membership *membership);

/* Has this daemon links to the others? It has none while it holds a run that it cannot take over. NULL is fine. */
void membership_stay_apart(struct membership *membership, bool apart);

/* Notes that this daemon is to stop. The caller then asks membership_stop() until it may. NULL is fine. */
void membership_tell_to_stop(struct membership *membership);

enum membership_stop {
    MEMBERSHIP_MAY_STOP,      /* all nodes have ended what was decided, and all ranks have left unless some of this node
                                 stay;      or there is no run, or but one node (NULL) */
    MEMBERSHIP_WAITS,         /* some have not, and cannot without this node */
    MEMBERSHIP_WAITS_IN_VAIN, /* one of those nodes is away for longer than it takes to replace a daemon that died */
};

enum membership_stop membership_stop(const struct membership *membership);

struct membership_node {
    const char *address;
    bool up;
    const char *why;    /* not up; valid until the next call */
    uint64_t silent_ms; /* UINT64_MAX: never heard */
};

/* Node 0's view has all nodes; another node's only itself and node 0: of the others it knows nothing. */
struct membership_node membership_node(const struct membership *membership, unsigned node);

/* N_TRAFFIC, of all engines that the job has had. */
const struct traffic *membership_traffic(const struct membership *membership);
