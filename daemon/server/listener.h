/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The listening socket: made at a path or taken from a service manager, and who may
 * connect to it. Names of users and groups are looked up once, at start.
 *
 * If a service manager keeps descriptors (core/base/keep.h), it keeps a socket that a daemon made, and passes it to the
 * next daemon. listener_deinit() removes the path of such a socket, unless listener_leave() was called, but never a
 * path of systemd.
 */

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "daemon/server/accounts.h"

struct config_listen;

struct listener {
    int fd;
    char *path; /* to be removed at the end; NULL: not made by a daemon */
    struct accounts allow, admin;
};

struct listener_peer {
    pid_t pid; /* 0: in a PID namespace that we do not see */
    uid_t uid;
    gid_t gid;
    gid_t *groups; /* supplementary; owned */
    size_t n_groups;
};

#define LISTENER_NULL ((struct listener){.fd = -1})

/*
 * A stale socket file is removed; one that somebody answers on is an error. keep_init() must have been called if a
 * service manager may have passed the socket.
 * Return: 0, or -errno with a sentence in why.
 */
int listener_init(struct listener *listener, const struct config_listen *config, char *why, size_t why_size);
void listener_deinit(struct listener *listener);
/* The next daemon gets the socket from the service manager: listener_deinit() leaves its path. */
void listener_leave(struct listener *listener);

/* Return: a connected, non-blocking socket; -EAGAIN when nobody waits; other -errno. */
int listener_accept(const struct listener *listener);

/* Return: 0 or -errno. */
int listener_peer_init(struct listener_peer *peer, int fd);
void listener_peer_deinit(struct listener_peer *peer);

/* root and our own user always may. */
bool listener_allows(const struct listener *listener, const struct listener_peer *peer);
bool listener_is_admin(const struct listener *listener, const struct listener_peer *peer);
