/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The sockets of the daemons on this machine, and whether they are trusted. Only root, the user zerod and the
 * exporter's own user may have created them: any other process could send false answers, or delay them for long.
 */

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { SOCKETS_MAX = 64 }; /* picked: jobs on one machine */

struct sockets {
    char **paths; /* owned, sorted */
    size_t n;
    size_t n_left_out; /* beyond SOCKETS_MAX */
};

/* Finds sockets by a pattern of glob(7). Return: 0, and the caller calls sockets_deinit(); or -ENOMEM. */
int sockets_find(struct sockets *sockets, const char *pattern);
void sockets_deinit(struct sockets *sockets);

/*
 * Return: true if this is a socket in a place where only trusted users can create one. If not, why gets the reason.
 * zerod: the uid of the user zerod; (uid_t)-1 if that user does not exist.
 */
bool sockets_trust(const char *path, uid_t zerod, char *why, size_t why_size);
