/* SPDX-License-Identifier: Apache-2.0 */

/* Checks whether a daemon answers on a socket, and whether zerodrun may start one on that socket. */

#include "client/run/answers.h"

#include <libgen.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sysexits.h>

#include "core/base/base.h"
#include "core/base/who-may.h"

/* Return: 0, or the -errno of connect(). */
static int try_to_connect(const char *path)
{
    _cleanup_close_ int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    if (fd < 0)
        return -errno;
    if (strlen(path) >= sizeof(address.sun_path))
        return -ENAMETOOLONG;
    strcpy(address.sun_path, path);
    return connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ? -errno : 0;
}

bool answers_now(const char *path)
{
    int r = path ? try_to_connect(path) : -ENOENT;

    return r == 0 || r == -EAGAIN; /* -EAGAIN: a daemon listens, and its queue of connections is full */
}

static bool folder_belongs_to(const char *path, uid_t uid)
{
    _cleanup_free_ char *copy = strdup(path);
    struct stat st;

    return copy && stat(dirname(copy), &st) == 0 && st.st_uid == uid;
}

/* Return: true if the socket is in the folder of zerod's systemd units; false also if this machine has no systemd, or
 * this process runs as the units' user. */
static bool is_units_place(const char *path)
{
    const struct passwd *zerod = getpwnam("zerod");

    return zerod && zerod->pw_uid != geteuid() && access("/run/systemd/system", F_OK) == 0 &&
           folder_belongs_to(path, zerod->pw_uid);
}

/*
 * Prints the error for a socket in the units' folder. It names the unit if the socket has the usual name. Return:
 * -sysexits.h.
 */
static int refuse_units_place(const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t n = strlen(name);
    _cleanup_free_ char *job = strndup(name, n > 5 && strcmp(name + n - 5, ".sock") == 0 ? n - 5 : n), *file = NULL;

    if (!job || asprintf(&file, "/etc/zerod/%s.yaml", job) < 0)
        return -EX_OSERR;
    fprintf(stderr,
            "zerodrun: no daemon answers on %s. In that folder only systemd starts daemons, as user zerod: systemctl "
            "start zerod@%s.service, or give zerodrun a --socket elsewhere\n",
            path, access(file, F_OK) == 0 ? job : "JOB");
    return -EX_UNAVAILABLE;
}

/* Refuses a socket of another user. Return: 0; or -EX_UNAVAILABLE after an error message. */
static int refuse_others_socket(const char *path)
{
    const struct passwd *owner;
    struct stat st;

    if (lstat(path, &st) < 0 || !S_ISSOCK(st.st_mode) || st.st_uid == geteuid())
        return 0;
    owner = getpwuid(st.st_uid);
    fprintf(stderr,
            "zerodrun: no daemon answers on %s, a socket of user %s, so zerodrun starts none there: start that user's "
            "daemon again, remove the socket, or give zerodrun another --socket\n",
            path, owner ? owner->pw_name : "?");
    return -EX_UNAVAILABLE;
}

int answers_or_refuses(const char *path, bool may_start)
{
    int r = path ? try_to_connect(path) : -ENOENT;
    char who[WHO_MAY_BYTES];

    if (r == 0 || r == -EAGAIN)
        return 1;
    if (r == -EACCES || r == -EPERM) {
        who_may_open(path, who);
        fprintf(stderr, "zerodrun: not allowed to connect to %s: %s%s\n", path, strerror(-r), who);
        return -EX_NOPERM;
    }
    if (!path || !may_start || (r != -ENOENT && r != -ECONNREFUSED)) /* the daemon reports other errors */
        return 0;
    return is_units_place(path) ? refuse_units_place(path) : refuse_others_socket(path);
}
