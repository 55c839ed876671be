/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Finds the sockets of the daemons on this machine, and checks whether they are trusted. A socket is trusted if only
 * root, the user zerod or the exporter's own user can have created it. Other users' sockets could send false or slow
 * answers.
 */

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { SOCKETS_MAX = 64 }; /* picked: jobs on one machine */

struct sockets {
    char **paths; /* owned, sorted */
    size_t n;
    size_t n_left_out; /* sockets beyond SOCKETS_MAX */
};

/* Finds sockets by a pattern of glob(7). Return: 0, and the caller calls sockets_deinit(); or -ENOMEM. */
int sockets_find(struct sockets *sockets, const char *pattern);
void sockets_deinit(struct sockets *sockets);

/*
 * Return: true if path is a trusted socket; false, with the reason in why, if it is not. zerod: the uid of the user
 * zerod; (uid_t)-1 if that user does not exist.
 */
bool sockets_trust(const char *path, uid_t zerod, char *why, size_t why_size);
