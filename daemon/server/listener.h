/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The listener makes the listening socket at a path or gets it from a service manager, and decides who may connect.
 * Names of users and groups are looked up once, in listener_init().
 *
 * If a service manager keeps descriptors (core/base/keep.h), it keeps the socket that a daemon made, and passes it to
 * the next daemon. listener_deinit() removes the path of a socket that a daemon made, unless listener_leave() was
 * called. It never removes the path of a systemd socket unit.
 */

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "daemon/server/accounts.h"

struct config_listen;

struct listener {
    int fd;
    char *path; /* removed by listener_deinit(); NULL if no daemon made the socket */
    struct accounts allow, admin;
};

struct listener_peer {
    pid_t pid; /* 0: the peer is in a PID namespace that this process does not see */
    uid_t uid;
    gid_t gid;
    gid_t *groups; /* supplementary; owned */
    size_t n_groups;
};

#define LISTENER_NULL ((struct listener){.fd = -1})

/*
 * Opens the listening socket. Removes a stale socket file. It is an error if another process listens on the socket.
 * Call keep_init() before, if a service manager may have passed the socket. Return: 0, or -errno with a message in why.
 */
int listener_init(struct listener *listener, const struct config_listen *config, char *why, size_t why_size);
void listener_deinit(struct listener *listener);
/* Makes listener_deinit() keep the path. Call it if the next daemon will get the socket from the service manager. */
void listener_leave(struct listener *listener);

/* Return: a connected, non-blocking socket; -EAGAIN if no client waits; or another -errno. */
int listener_accept(const struct listener *listener);

/* Reads pid, uid and groups of the process that made the connection fd. Return: 0 or -errno. */
int listener_peer_init(struct listener_peer *peer, int fd);
void listener_peer_deinit(struct listener_peer *peer);

/*
 * Return: whether the peer may connect, and whether the peer is an administrator. True for root and the daemon's own
 * user.
 */
bool listener_allows(const struct listener *listener, const struct listener_peer *peer);
bool listener_is_admin(const struct listener *listener, const struct listener_peer *peer);
