/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The sockets of the daemons on this machine, and whether a file there can be taken for one. Only root, the user zerod
 * and the exporter's own user may have put it there: what answers on any other could tell anything, or nothing for
 * long.
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

/* Finds what matches a pattern of glob(7). Return: 0, sockets_deinit(); -ENOMEM. */
int sockets_find(struct sockets *sockets, const char *pattern);
void sockets_deinit(struct sockets *sockets);

/*
 * Is this a socket in a place where only trusted users can put one? If not, why gets the reason. zerod: that user;
 * (uid_t)-1: there is none.
 */
bool sockets_trust(const char *path, uid_t zerod, char *why, size_t why_size);
