/* SPDX-License-Identifier: Apache-2.0 */

/* The daemon's side of the descriptor store, in systemd's protocol. */

#include "core/base/keep.h"

#include <assert.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>

#include "core/base/base.h"

enum {
    FIRST_FD = 3, /* the first passed descriptor */
    MAX_FDS = 65536,
};

static struct {
    struct keep_passed *passed; /* array of n_passed; owned, with the names */
    size_t n_passed;
    struct sockaddr_un manager; /* not changed while the store is on */
    socklen_t n_manager_bytes;
    atomic_bool is_on;
} store;

bool keep_is_name(const char *name)
{
    size_t n = 0;

    for (; name[n]; n++)
        if (name[n] < ' ' || name[n] > '~' || name[n] == ':')
            return false;
    return n > 0 && n <= KEEP_MAX_NAME_BYTES;
}

/* ---- what was passed ----------------------------------------------------------------------------------- */

/* Parses a whole number from 0 to max. Return: 0 or -EINVAL. */
static int parse_number(const char *text, long max, long *value)
{
    char *end;

    errno = 0;
    *value = strtol(text, &end, 10);
    return errno == 0 && text[0] >= '0' && text[0] <= '9' && !*end && *value <= max ? 0 : -EINVAL;
}

/* Return: the number of passed descriptors, or -EINVAL. */
static int count_passed(void)
{
    const char *pid = getenv("LISTEN_PID"), *fds = getenv("LISTEN_FDS");
    long value = 0;

    if (!pid || !fds)
        return 0;
    if (parse_number(pid, INT_MAX, &value) < 0)
        return -EINVAL;
    if (value != getpid()) /* a process between the manager and this one did not unset the variables */
        return 0;
    return parse_number(fds, MAX_FDS, &value) < 0 ? -EINVAL : (int)value;
}

/* Adds the descriptor. Its name is the next part of *names, which is NULL if the manager passed no names. */
static int add_passed(int fd, char **names)
{
    const char *name = *names ? strsep(names, ":") : "unknown"; /* as in sd_listen_fds_with_names() */
    int flags = fcntl(fd, F_GETFD);
    char *copy;

    if (flags < 0 || fcntl(fd, F_SETFD, flags | FD_CLOEXEC) < 0)
        return -errno;
    copy = strdup(name);
    if (!copy)
        return -ENOMEM;
    store.passed[store.n_passed++] = (struct keep_passed){.name = copy, .fd = fd};
    return 0;
}

static int read_passed(void)
{
    const char *list = getenv("LISTEN_FDNAMES");
    _cleanup_free_ char *copy = list ? strdup(list) : NULL;
    char *names = copy;
    int n = count_passed(), r = 0;

    if (n <= 0)
        return n;
    store.passed = calloc((size_t)n, sizeof(*store.passed));
    if (!store.passed || (list && !copy))
        return -ENOMEM;
    for (int i = 0; r == 0 && i < n; i++)
        r = list && !names ? -EINVAL : add_passed(FIRST_FD + i, &names);
    return r == 0 && names ? -EINVAL : r; /* more names than descriptors */
}

static void remove_passed(struct keep_passed *passed)
{
    assert(passed >= store.passed);
    assert(passed < store.passed + store.n_passed);
    free((char *)passed->name);
    memmove(passed, passed + 1, (size_t)(store.passed + store.n_passed - (passed + 1)) * sizeof(*passed));
    store.n_passed--;
}

int keep_take(const char *name)
{
    for (size_t i = 0; i < store.n_passed; i++) {
        int fd = store.passed[i].fd;

        if (strcmp(store.passed[i].name, name) != 0)
            continue;
        remove_passed(&store.passed[i]);
        return fd;
    }
    return -1;
}

const struct keep_passed *keep_passed(size_t i)
{
    return i < store.n_passed ? &store.passed[i] : NULL;
}

static bool is_socket(int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 && S_ISSOCK(st.st_mode);
}

bool keep_passed_state(void)
{
    for (size_t i = 0; i < store.n_passed; i++)
        if (strcmp(store.passed[i].name, KEEP_SOCKET_NAME) != 0 && !is_socket(store.passed[i].fd))
            return true;
    return false;
}

static int socket_option(int fd, int option)
{
    socklen_t size = sizeof(int);
    int value;

    return getsockopt(fd, SOL_SOCKET, option, &value, &size) < 0 ? -1 : value;
}

int keep_listen_fd(void)
{
    struct keep_passed *found = NULL;
    int fd;

    for (struct keep_passed *passed = store.passed; passed < store.passed + store.n_passed; passed++) {
        if (!is_socket(passed->fd))
            continue;
        if (found || socket_option(passed->fd, SO_DOMAIN) != AF_UNIX ||
            socket_option(passed->fd, SO_TYPE) != SOCK_SEQPACKET || socket_option(passed->fd, SO_ACCEPTCONN) != 1)
            return -EINVAL;
        found = passed;
    }
    if (!found)
        return -1;
    fd = found->fd;
    remove_passed(found);
    return fd;
}

/* ---- the service manager ------------------------------------------------------------------------------- */

/* Reads the service manager's address from $NOTIFY_SOCKET. Return: false if the variable has no address, one of another
 * kind, or one that is too long. */
static bool find_manager(void)
{
    const char *path = getenv("NOTIFY_SOCKET");
    size_t n = path ? strlen(path) : 0;

    if (n < 2 || (path[0] != '/' && path[0] != '@') || n >= sizeof(store.manager.sun_path))
        return false;
    store.manager = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(store.manager.sun_path, path, n);
    if (path[0] == '@')
        store.manager.sun_path[0] = '\0';
    store.n_manager_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n + (path[0] == '/'));
    return true;
}

bool keep_is_on(void)
{
    return store.is_on;
}

void keep_switch_off(void)
{
    store.is_on = false;
}

/* Sends a text to the service manager. fd: sent with the text; -1: none. timeout_ms: the longest wait for room in a
 * full queue; 0: no limit. */
static int send_message(const char *text, int fd, unsigned timeout_ms)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {};
    struct iovec iov = {.iov_base = (char *)text, .iov_len = strlen(text)};
    struct msghdr message = {
        .msg_name = &store.manager, .msg_namelen = store.n_manager_bytes, .msg_iov = &iov, .msg_iovlen = 1};
    struct timeval timeout = {.tv_sec = timeout_ms / 1000, .tv_usec = timeout_ms % 1000 * 1000};
    _cleanup_close_ int s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ssize_t n;

    if (s < 0 || setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) < 0)
        return -errno;
    if (fd >= 0) {
        control.header =
            (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
        memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
        message.msg_control = &control;
        message.msg_controllen = sizeof(control);
    }
    do
        n = sendmsg(s, &message, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EAGAIN ? -ETIMEDOUT : -errno;
    return 0;
}

int keep_put(const char *name, int fd)
{
    char text[KEEP_MAX_NAME_BYTES + 64];

    if (!keep_is_on())
        return -ENOTCONN;
    if (!keep_is_name(name))
        return -EINVAL;
    if (fd < 0)
        return -EBADF;
    /* FDPOLL=0, because systemd otherwise polls the descriptor and drops it on an error, which a descriptor of GPU
     * memory may report. */
    snprintf(text, sizeof(text), "FDSTORE=1\nFDPOLL=0\nFDNAME=%s", name);
    return send_message(text, fd, 0);
}

void keep_forget(const char *name)
{
    char text[KEEP_MAX_NAME_BYTES + 64];

    if (!keep_is_on() || !keep_is_name(name))
        return;
    snprintf(text, sizeof(text), "FDSTOREREMOVE=1\nFDNAME=%s", name);
    (void)send_message(text, -1, 0); /* when the manager is gone, its store is gone as well */
}

void keep_tell(const char *text)
{
    if (store.n_manager_bytes > 0)
        (void)send_message(text, -1, 0);
}

static uint64_t now_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

/* Waits until no process holds the other end of the pipe. */
static int wait_for_end(int fd, uint64_t deadline_ms)
{
    struct pollfd end = {.fd = fd};
    uint64_t now;
    int n;

    do {
        now = now_ms();
        n = poll(&end, 1, now < deadline_ms ? (int)MIN(deadline_ms - now, (uint64_t)INT_MAX) : 0);
    } while ((n < 0 && errno == EINTR) || (n == 0 && now_ms() < deadline_ms));
    return n < 0 ? -errno : n == 0 ? -ETIMEDOUT : 0;
}

/* Sends BARRIER=1 with one end of a pipe. The manager reads messages in order, and closes that end when it has read
 * BARRIER=1. */
int keep_confirm(unsigned timeout_ms)
{
    uint64_t deadline_ms = now_ms() + timeout_ms;
    int ends[2], r;

    if (!keep_is_on())
        return -ENOTCONN;
    if (pipe2(ends, O_CLOEXEC) < 0)
        return -errno;
    r = send_message("BARRIER=1", ends[1], MAX(timeout_ms, 1u));
    close(ends[1]);
    if (r == 0)
        r = wait_for_end(ends[0], deadline_ms);
    close(ends[0]);
    return r;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

int keep_init(void)
{
    static const char *const variables[] = {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"};
    int r = read_passed();

    for (size_t i = 0; i < ARRAY_SIZE(variables); i++)
        unsetenv(variables[i]);
    if (r < 0) {
        keep_deinit();
        return r;
    }
    store.is_on = find_manager();
    return 0;
}

void keep_deinit(void)
{
    store.is_on = false;
    for (size_t i = 0; i < store.n_passed; i++) {
        close(store.passed[i].fd);
        free((char *)store.passed[i].name);
    }
    store.n_passed = 0;
    free(steal_ptr(store.passed));
}
