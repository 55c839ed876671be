/* SPDX-License-Identifier: Apache-2.0 */

/* Makes the listening socket or gets it from a service manager, and decides which users may connect. */

#include "daemon/server/listener.h"

#include <assert.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "core/base/acl.h"
#include "core/base/base.h"
#include "core/base/keep.h"
#include "core/base/log.h"
#include "core/config/config.h"

/* Connections that wait to be accepted; picked so that a thousand may arrive in one burst. */
enum { BACKLOG = 1024 };

_Static_assert((int)CONFIG_MAX_SOCKET_BYTES < (int)sizeof(((struct sockaddr_un *)0)->sun_path), "no path is cut");

/* ---- who may ------------------------------------------------------------------------------------------- */

static bool contains_gid(const struct accounts *ids, gid_t gid)
{
    for (size_t i = 0; i < ids->n_gids; i++)
        if (ids->gids[i] == gid)
            return true;
    return false;
}

static bool matches(const struct accounts *ids, const struct listener_peer *peer)
{
    if (peer->uid == 0 || peer->uid == geteuid() || contains_gid(ids, peer->gid))
        return true;
    for (size_t i = 0; i < ids->n_uids; i++)
        if (ids->uids[i] == peer->uid)
            return true;
    for (size_t i = 0; i < peer->n_groups; i++)
        if (contains_gid(ids, peer->groups[i]))
            return true;
    return false;
}

bool listener_allows(const struct listener *listener, const struct listener_peer *peer)
{
    return matches(&listener->allow, peer) || matches(&listener->admin, peer);
}

bool listener_is_admin(const struct listener *listener, const struct listener_peer *peer)
{
    return matches(&listener->admin, peer);
}

int listener_peer_init(struct listener_peer *peer, int fd)
{
    struct ucred cred;
    socklen_t size = sizeof(cred);

    *peer = (struct listener_peer){0};
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) < 0)
        return -errno;
    peer->pid = cred.pid;
    peer->uid = cred.uid;
    peer->gid = cred.gid;
    size = 0;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, NULL, &size) < 0 && errno == ERANGE && size > 0) {
        peer->groups = malloc(size);
        if (peer->groups && getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, peer->groups, &size) == 0)
            peer->n_groups = size / sizeof(gid_t);
    }
    return 0;
}

void listener_peer_deinit(struct listener_peer *peer)
{
    free(peer->groups);
    *peer = (struct listener_peer){0};
}

/* ---- the socket ---------------------------------------------------------------------------------------- */

static struct sockaddr_un address(const char *path)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};

    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path); /* the configuration reader has checked the length */
    return sa;
}

static const char *user_name(uid_t uid)
{
    const struct passwd *user = getpwuid(uid);

    return user ? user->pw_name : "?";
}

/*
 * Writes to why the reason why the socket at path cannot be replaced. st: stat() of the socket. error: errno of the
 * attempt to connect.
 */
static int say_in_use(const char *path, const struct stat *st, int error, char *why, size_t why_size)
{
    if (error == EACCES || error == EPERM)
        snprintf(why, why_size,
                 "%s: there is a socket of user %s, to which this daemon's user may not connect: stop the daemon that "
                 "made the socket, or remove the socket if no daemon runs",
                 path, user_name(st->st_uid));
    else if (error == EPROTOTYPE)
        snprintf(why, why_size, "%s: a socket of another kind is in use there: %s", path, strerror(error));
    else
        snprintf(why, why_size, "%s: there is a socket, and connecting to it fails: %s", path, strerror(error));
    return -EADDRINUSE;
}

/* Removes a stale socket. Return: 0 if the path is free now, else -errno with a message in why. */
static int clear_path(const char *path, char *why, size_t why_size)
{
    struct sockaddr_un sa = address(path);
    _cleanup_close_ int fd = -1;
    struct stat st;

    if (lstat(path, &st) < 0)
        return 0; /* no file is there; bind() reports other errors */
    if (!S_ISSOCK(st.st_mode)) {
        snprintf(why, why_size, "%s: there is a file that is no socket; remove it or choose another listen.socket",
                 path);
        return -EEXIST;
    }
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    if (connect(fd, (struct sockaddr *)&sa, sizeof(sa)) == 0 || errno == EAGAIN) {
        snprintf(why, why_size,
                 "%s: another daemon already listens there; stop it, or give this job its own listen.socket", path);
        return -EADDRINUSE;
    }
    if (errno != ECONNREFUSED)
        return say_in_use(path, &st, errno, why, why_size);
    if (unlink(path) == 0 || errno == ENOENT) /* a killed daemon has left the socket behind */
        return 0;
    snprintf(why, why_size, "%s: no daemon listens on that socket of user %s, and it cannot be removed: %s", path,
             user_name(st.st_uid), strerror(errno));
    return -EADDRINUSE;
}

static int listen_at(const char *path, mode_t mode, char *why, size_t why_size)
{
    struct sockaddr_un sa = address(path);
    _cleanup_close_ int fd = -1;
    mode_t old;
    int r;

    r = clear_path(path, why, why_size);
    if (r < 0)
        return r;
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    old = umask(0777); /* nobody may connect before the mode is set */
    r = bind(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0 ? -errno : 0;
    umask(old);
    if (r == 0 && chmod(path, mode) < 0)
        r = -errno;
    if (r == 0 && listen(fd, BACKLOG) < 0)
        r = -errno;
    if (r < 0) {
        snprintf(why, why_size, "listen.socket %s: %s; the directory must exist and be writable by user %u", path,
                 strerror(-r), geteuid());
        return r;
    }
    return steal_fd(&fd);
}

/* ---- who may open it ----------------------------------------------------------------------------------- */

/*
 * Gives the socket an access control list of all configured users and groups. Return: 0, or -errno (-ENOTSUP if the
 * file system has no access control lists).
 */
static int write_acl(const struct listener *listener, const char *path, mode_t mode)
{
    struct acl acl = {.mode = mode, .named = mode >> 3 & (S_IROTH | S_IWOTH)};

    acl_add_users(&acl, listener->allow.uids, listener->allow.n_uids);
    acl_add_users(&acl, listener->admin.uids, listener->admin.n_uids);
    acl_add_groups(&acl, listener->allow.gids, listener->allow.n_gids);
    acl_add_groups(&acl, listener->admin.gids, listener->admin.n_gids);
    return acl_write(&acl, path, false);
}

/*
 * Lets every user and group that the configuration names open the socket, with the rights that the mode gives a group.
 * This needs an access control list, because the socket's owner can add any group to such a list, but can chown the
 * socket only to the owner's own groups. On a file system without access control lists the socket gets the first group
 * of allow_groups.
 */
static int let_in(const struct listener *listener, const struct config_listen *config, const char *path, mode_t mode,
                  char *why, size_t why_size)
{
    int r = write_acl(listener, path, mode);

    assert(listener->allow.n_gids == config->allow_groups.n_items); /* the message below prints the first name */
    if (r == 0 || listener->allow.n_gids == 0 || chown(path, (uid_t)-1, listener->allow.gids[0]) == 0)
        return 0;
    snprintf(why, why_size,
             "listen.allow_groups: members of \"%s\" could not open %s: its file system has no access control lists "
             "(%s), and user %u is not in that group. Put listen.socket below /run, or add the user to the group",
             config->allow_groups.items[0], path, strerror(-r), geteuid());
    return -EINVAL;
}

/*
 * Checks that members of allow_groups can open the socket of a socket unit even while no daemon runs, because their
 * first connection starts the daemon.
 */
static int check_socket_unit(const struct listener *listener, const struct config_listen *config, const struct stat *st,
                             char *why, size_t why_size)
{
    const struct group *group = getgrgid(st->st_gid);

    assert(listener->allow.n_gids == config->allow_groups.n_items); /* the message below prints the first name */
    if (listener->allow.n_gids == 0 || (st->st_mode & S_IWOTH) || contains_gid(&listener->allow, st->st_gid))
        return 0;
    snprintf(why, why_size,
             "listen.allow_groups: the socket unit gives %s to the group \"%s\", so members of \"%s\" cannot start the "
             "daemon by connecting: add SocketGroup=%s to the section [Socket] of the socket unit "
             "(systemctl edit), and restart that unit",
             config->socket, group ? group->gr_name : "?", config->allow_groups.items[0],
             config->allow_groups.items[0]);
    return -EINVAL;
}

static int look_up_all(struct listener *listener, const struct config_listen *config, char *why, size_t why_size)
{
    int r = accounts_users(&listener->allow, &config->allow_users, "listen", why, why_size);

    if (r == 0)
        r = accounts_groups(&listener->allow, &config->allow_groups, "listen", why, why_size);
    if (r == 0)
        r = accounts_users(&listener->admin, &config->admin_users, "listen", why, why_size);
    if (r == 0)
        r = accounts_groups(&listener->admin, &config->admin_groups, "listen", why, why_size);
    return r;
}

/* Return: whether an earlier daemon made the passed socket. Otherwise it is of a socket unit. */
static bool predecessor_made_it(void)
{
    const struct keep_passed *passed;

    for (size_t i = 0; (passed = keep_passed(i)); i++)
        if (strcmp(passed->name, KEEP_SOCKET_NAME) == 0)
            return true;
    return false;
}

/* Return: whether the socket is bound to path, and a socket file exists at path. */
static bool is_reachable(int fd, const char *path)
{
    struct sockaddr_un sa = {};
    socklen_t size = sizeof(sa) - 1;
    struct stat st;

    return getsockname(fd, (struct sockaddr *)&sa, &size) == 0 && strcmp(sa.sun_path, path) == 0 &&
           lstat(path, &st) == 0 && S_ISSOCK(st.st_mode);
}

static int take_predecessors(struct listener *listener, const struct config_listen *config, char *why, size_t why_size)
{
    int r;

    listener->path = strdup(config->socket);
    if (!listener->path || chmod(config->socket, config->mode) < 0) /* the configuration may have changed */
        return -errno;
    r = let_in(listener, config, config->socket, config->mode, why, why_size);
    if (r == 0 && listen(listener->fd, BACKLOG) < 0) /* listens again, so that clients see this process as their peer */
        r = -errno;
    return r;
}

static int take_socket_units(struct listener *listener, const struct config_listen *config, char *why, size_t why_size)
{
    struct stat st;
    int r;

    if (!is_reachable(listener->fd, config->socket) || lstat(config->socket, &st) < 0)
        return 0; /* clients use the socket unit's path, not listen.socket */
    r = check_socket_unit(listener, config, &st, why, why_size);
    if (r == 0 && write_acl(listener, config->socket, st.st_mode & 0777) < 0)
        log_notice("only the group of %s can open it: SocketUser= of its unit is not this daemon's user",
                   config->socket);
    return r;
}

/*
 * Takes over the socket that a service manager passed. A socket of an earlier daemon is used only if clients can reach
 * it at the configured path. Return: 0 or -errno. After 0, listener->fd is -1 if no usable socket was passed.
 */
static int take_passed(struct listener *listener, const struct config_listen *config, char *why, size_t why_size)
{
    bool is_ours = predecessor_made_it();
    int r;

    listener->fd = keep_listen_fd();
    if (listener->fd < -1) {
        snprintf(why, why_size,
                 "the socket that was passed is not one listening SOCK_SEQPACKET socket: "
                 "use ListenSequentialPacket= in the socket unit");
        return listener->fd;
    }
    if (listener->fd < 0)
        return 0;
    if (is_ours && !is_reachable(listener->fd, config->socket)) {
        close(steal_fd(&listener->fd));
        keep_forget(KEEP_SOCKET_NAME);
        return 0;
    }
    r = is_ours ? take_predecessors(listener, config, why, why_size)
                : take_socket_units(listener, config, why, why_size);
    if (r < 0)
        return r;
    return fcntl(listener->fd, F_SETFL, fcntl(listener->fd, F_GETFL) | O_NONBLOCK) < 0 ? -errno : 0;
}

/*
 * Makes the socket. If the service manager keeps descriptors, it passes the socket to the next daemon, so clients that
 * connect while no daemon runs only wait.
 */
static int make_socket(struct listener *listener, const struct config_listen *config, char *why, size_t why_size)
{
    int r = listen_at(config->socket, config->mode, why, why_size);

    if (r < 0)
        return r;
    listener->fd = r;
    listener->path = strdup(config->socket);
    r = let_in(listener, config, config->socket, config->mode, why, why_size);
    if (r < 0)
        return r;
    if (keep_is_on())
        (void)keep_put(KEEP_SOCKET_NAME, listener->fd); /* on failure the next daemon makes its own socket */
    return 0;
}

int listener_init(struct listener *listener, const struct config_listen *config, char *why, size_t why_size)
{
    int r;

    *listener = LISTENER_NULL;
    *why = '\0';
    r = look_up_all(listener, config, why, why_size);
    if (r == 0)
        r = take_passed(listener, config, why, why_size);
    if (r == 0 && listener->fd < 0)
        r = make_socket(listener, config, why, why_size);
    if (r < 0) {
        if (!*why)
            snprintf(why, why_size, "listen: %s", strerror(-r));
        listener_deinit(listener);
    }
    assert(r < 0 || listener->fd >= 0);
    return r;
}

void listener_deinit(struct listener *listener)
{
    if (listener->path) {
        (void)unlink(listener->path);
        keep_forget(KEEP_SOCKET_NAME); /* without its path no client can reach the socket */
    }
    free(listener->path);
    if (listener->fd >= 0)
        close(listener->fd);
    accounts_deinit(&listener->allow);
    accounts_deinit(&listener->admin);
    *listener = LISTENER_NULL;
}

void listener_leave(struct listener *listener)
{
    free(steal_ptr(listener->path));
}

int listener_accept(const struct listener *listener)
{
    int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    return fd < 0 ? -errno : fd;
}
