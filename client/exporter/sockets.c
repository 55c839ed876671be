/* SPDX-License-Identifier: Apache-2.0 */

/* Finds the sockets of daemons, and checks which of them are trusted. */

#include "client/exporter/sockets.h"

#include <errno.h>
#include <glob.h>
#include <libgen.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/base.h"

int sockets_find(struct sockets *sockets, const char *pattern)
{
    glob_t found;
    int r = glob(pattern, GLOB_NOSORT, NULL, &found);

    *sockets = (struct sockets){0};
    if (r == GLOB_NOMATCH)
        return 0;
    if (r != 0)
        return r == GLOB_NOSPACE ? -ENOMEM : 0; /* a folder that cannot be read counts as empty */
    sockets->paths = calloc(MAX(found.gl_pathc, (size_t)1), sizeof(*sockets->paths));
    for (size_t i = 0; sockets->paths && i < MIN(found.gl_pathc, (size_t)SOCKETS_MAX); i++) {
        sockets->paths[sockets->n] = strdup(found.gl_pathv[i]);
        sockets->n += sockets->paths[sockets->n] != NULL;
    }
    sockets->n_left_out = found.gl_pathc - sockets->n;
    globfree(&found);
    return sockets->paths ? 0 : -ENOMEM;
}

void sockets_deinit(struct sockets *sockets)
{
    for (size_t i = 0; i < sockets->n; i++)
        free(sockets->paths[i]);
    free(sockets->paths);
    *sockets = (struct sockets){0};
}

static bool is_trusted(uid_t uid, uid_t zerod)
{
    return uid == 0 || uid == geteuid() || uid == zerod;
}

/*
 * Return: true if only trusted users can replace files in the folder. Others may write to a folder with the sticky bit,
 * because they cannot replace trusted users' files in it.
 */
static bool trust_folder(const char *path, uid_t zerod, char *why, size_t why_size)
{
    _cleanup_free_ char *copy = strdup(path);
    const char *folder = copy ? dirname(copy) : "";
    struct stat st;

    if (stat(folder, &st) < 0)
        snprintf(why, why_size, "its folder: %s", strerror(errno));
    else if (!is_trusted(st.st_uid, zerod))
        snprintf(why, why_size, "its folder belongs to uid %u, and not to root, zerod or this user", st.st_uid);
    else if ((st.st_mode & (S_IWGRP | S_IWOTH)) && !(st.st_mode & S_ISVTX))
        snprintf(why, why_size, "others can write to its folder (mode %04o)", st.st_mode & 07777);
    else
        return true;
    return false;
}

bool sockets_trust(const char *path, uid_t zerod, char *why, size_t why_size)
{
    struct stat st;

    if (lstat(path, &st) < 0)
        snprintf(why, why_size, "%s", strerror(errno));
    else if (!S_ISSOCK(st.st_mode))
        snprintf(why, why_size, "it is no socket");
    else if (!is_trusted(st.st_uid, zerod))
        snprintf(why, why_size, "it belongs to uid %u, and not to root, zerod or this user", st.st_uid);
    else
        return trust_folder(path, zerod, why, why_size);
    return false;
}
