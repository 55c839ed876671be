/* SPDX-License-Identifier: Apache-2.0 */

/* Receives a daemon's descriptors, keeps them, and describes them in the environment of the next daemon. */

#include "client/run/keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "client/run/environment.h"
#include "client/run/run-place.h"

enum {
    MAX_PER_MESSAGE = 253, /* SCM_MAX_FD of the kernel */
};

/* A received message. */
struct packet {
    char text[KEEPER_MAX_MESSAGE_BYTES];
    size_t n_bytes;
    struct ucred sender; /* pid 0: unknown */
    int fds[MAX_PER_MESSAGE];
    size_t n_fds;
    bool is_cut;
};

/* ---- the text of a message ----------------------------------------------------------------------------- */

static bool is_line(const char *line, size_t n_bytes, const char *expected)
{
    return n_bytes == strlen(expected) && memcmp(line, expected, n_bytes) == 0;
}

/* Return: the time in an EXTEND_TIMEOUT_USEC line; 0 for another line or an invalid time. */
static uint64_t parse_extension(const char *line, size_t n_bytes)
{
    static const char key[] = "EXTEND_TIMEOUT_USEC=";
    size_t n_key = sizeof(key) - 1;
    uint64_t us = 0;

    if (n_bytes <= n_key || n_bytes - n_key > 15 || memcmp(line, key, n_key) != 0)
        return 0;
    for (size_t i = n_key; i < n_bytes; i++) {
        if (line[i] < '0' || line[i] > '9')
            return 0;
        us = 10 * us + (uint64_t)(line[i] - '0');
    }
    return us;
}

/* Parses one line. The last of several names is used. Return: 0; or -EINVAL if a name is not allowed. */
static int parse_line(struct keeper_message *message, const char *line, size_t n_bytes)
{
    static const char key[] = "FDNAME=";
    size_t n_key = sizeof(key) - 1;

    message->store |= is_line(line, n_bytes, "FDSTORE=1");
    message->remove |= is_line(line, n_bytes, "FDSTOREREMOVE=1");
    message->barrier |= is_line(line, n_bytes, "BARRIER=1");
    message->ready |= is_line(line, n_bytes, "READY=1");
    message->extend_us = MAX(message->extend_us, parse_extension(line, n_bytes));
    if (n_bytes < n_key || memcmp(line, key, n_key) != 0)
        return 0;
    if (n_bytes - n_key > KEEP_MAX_NAME_BYTES || memchr(line, '\0', n_bytes))
        return -EINVAL;
    memcpy(message->name, line + n_key, n_bytes - n_key);
    message->name[n_bytes - n_key] = '\0';
    return keep_is_name(message->name) ? 0 : -EINVAL;
}

int keeper_parse(struct keeper_message *message, const char *text, size_t n_bytes)
{
    const char *end = text + n_bytes, *line_end;
    int r = 0;

    *message = (struct keeper_message){.name = "stored"};
    for (; r == 0 && text < end; text = line_end + 1) {
        line_end = memchr(text, '\n', (size_t)(end - text));
        if (!line_end)
            line_end = end;
        r = parse_line(message, text, (size_t)(line_end - text));
    }
    return r;
}

/* ---- kept descriptors ---------------------------------------------------------------------------------- */

static void keeper_note(struct keeper *keeper, const char *text)
{
    if (!keeper->has_noted)
        keeper->ops->note(keeper->userdata, text);
    keeper->has_noted = true;
}

static void keeper_drop(struct keeper *keeper, size_t i)
{
    size_t n_behind = --keeper->n - i;

    close(keeper->fds[i]);
    keeper->n_names_bytes -= strlen(keeper->entries[i].name) + 1;
    free(keeper->entries[i].name);
    memmove(&keeper->fds[i], &keeper->fds[i + 1], n_behind * sizeof(keeper->fds[0]));
    memmove(&keeper->entries[i], &keeper->entries[i + 1], n_behind * sizeof(keeper->entries[0]));
}

static void keeper_forget(struct keeper *keeper, const char *name)
{
    for (size_t i = keeper->n; i-- > 0;)
        if (strcmp(keeper->entries[i].name, name) == 0)
            keeper_drop(keeper, i);
}

static bool keeper_has(const struct keeper *keeper, const struct keeper_entry *entry)
{
    for (size_t i = 0; i < keeper->n; i++) {
        const struct keeper_entry *other = &keeper->entries[i];

        if (other->inode == entry->inode && other->device == entry->device && other->access == entry->access &&
            strcmp(other->name, entry->name) == 0)
            return true;
    }
    return false;
}

/* Keeps the descriptor, unless it is already kept under this name. Closes it if it is not kept. */
static void keeper_store(struct keeper *keeper, const char *name, int taken)
{
    _cleanup_close_ int fd = taken;
    _cleanup_free_ char *copy = strdup(name);
    struct keeper_entry entry = {.name = copy, .access = fcntl(fd, F_GETFL) & O_ACCMODE};
    size_t n_bytes = strlen(name) + 1;
    struct stat st;

    if (!copy || fstat(fd, &st) < 0)
        return;
    entry.device = st.st_dev;
    entry.inode = st.st_ino;
    if (keeper_has(keeper, &entry))
        return;
    if (keeper->n == KEEPER_MAX_FDS || keeper->n_names_bytes + n_bytes > KEEPER_MAX_NAMES_BYTES) {
        keeper_note(keeper, keeper->n == KEEPER_MAX_FDS
                                ? "keeps 4096 descriptors of zerod already: no more of them outlive it"
                                : "the names of zerod's descriptors are too long: no more of them outlive it");
        return;
    }
    steal_ptr(copy);
    keeper->fds[keeper->n] = steal_fd(&fd);
    keeper->entries[keeper->n++] = entry;
    keeper->n_names_bytes += n_bytes;
}

bool keeper_holds_state(const struct keeper *keeper)
{
    for (size_t i = 0; i < keeper->n; i++)
        if (strcmp(keeper->entries[i].name, KEEP_SOCKET_NAME) != 0)
            return true;
    return false;
}

/* ---- messages ------------------------------------------------------------------------------------------ */

static void packet_close(struct packet *packet)
{
    for (size_t i = 0; i < packet->n_fds; i++)
        closep(&packet->fds[i]);
}

static void packet_read_control(struct packet *packet, struct msghdr *header)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
        size_t n_bytes = c->cmsg_len - CMSG_LEN(0);

        if (c->cmsg_level != SOL_SOCKET)
            continue;
        if (c->cmsg_type == SCM_CREDENTIALS && n_bytes == sizeof(packet->sender))
            memcpy(&packet->sender, CMSG_DATA(c), n_bytes);
        if (c->cmsg_type == SCM_RIGHTS && n_bytes <= sizeof(packet->fds)) {
            memcpy(packet->fds, CMSG_DATA(c), n_bytes);
            packet->n_fds = n_bytes / sizeof(int);
        }
    }
}

/* Return: false if no message waits. */
static bool packet_receive(struct packet *packet, int socket)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(MAX_PER_MESSAGE * sizeof(int))];
    } control;
    struct iovec iov = {.iov_base = packet->text, .iov_len = sizeof(packet->text)};
    struct msghdr header = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    ssize_t n;

    do
        n = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return false;
    packet->n_bytes = (size_t)n;
    packet->sender.pid = 0;
    packet->n_fds = 0;
    packet->is_cut = header.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
    packet_read_control(packet, &header);
    return true;
}

/* Processes a message. A barrier needs no work, because its descriptor is closed after all earlier messages, as every
 * descriptor that is not kept. */
static void keeper_process(struct keeper *keeper, struct packet *packet)
{
    struct keeper_message message;

    if (packet->sender.pid != keeper->pid || keeper->pid == 0 || packet->sender.uid != getuid())
        return;
    if (packet->is_cut) {
        keeper_note(keeper, "the limit of open files cut off a message of zerod: not all descriptors outlive it");
        return;
    }
    if (keeper_parse(&message, packet->text, packet->n_bytes) < 0) {
        keeper_note(keeper, "zerod named a descriptor in a way that is not allowed: it does not outlive zerod");
        return;
    }
    if (message.barrier)
        return;
    if (message.remove)
        keeper_forget(keeper, message.name);
    for (size_t i = 0; message.store && i < packet->n_fds; i++)
        keeper_store(keeper, message.name, steal_fd(&packet->fds[i]));
    if (message.ready)
        keeper->ops->ready(keeper->userdata);
    if (message.extend_us > 0)
        keeper->ops->extend(keeper->userdata, message.extend_us / 1000);
}

void keeper_drain(struct keeper *keeper)
{
    struct packet packet;

    while (packet_receive(&packet, keeper->socket)) {
        keeper_process(keeper, &packet);
        packet_close(&packet);
    }
}

static void keeper_readable(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    keeper_drain(container_of(poll, struct keeper, poll));
}

/* ---- the next daemon ----------------------------------------------------------------------------------- */

static int keeper_set_names(const struct keeper *keeper, struct environment *env)
{
    _cleanup_free_ char *names = malloc(keeper->n_names_bytes + 1);
    char *at = names;

    if (!names)
        return -ENOMEM;
    for (size_t i = 0; i < keeper->n; i++)
        at += sprintf(at, "%s%s", i ? ":" : "", keeper->entries[i].name);
    return environment_set(env, "LISTEN_FDNAMES", "%s", names);
}

int keeper_describe(const struct keeper *keeper, struct environment *env)
{
    int r = environment_set(env, "NOTIFY_SOCKET", "%s", keeper->path);

    if (r == 0)
        r = environment_set(env, "FDSTORE", "%d", KEEPER_MAX_FDS);
    if (r == 0 && keeper->n > 0)
        r = environment_set(env, "LISTEN_FDS", "%zu", keeper->n);
    if (r == 0 && keeper->n > 0)
        r = keeper_set_names(keeper, env);
    return r;
}

void keeper_expect(struct keeper *keeper, pid_t pid)
{
    keeper->pid = pid;
    keeper->has_noted = false;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static int keeper_bind(struct keeper *keeper)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int on = 1;

    keeper->directory = place_make_directory();
    if (!keeper->directory || asprintf(&keeper->path, "%s/notify", keeper->directory) < 0) {
        keeper->path = NULL;
        return keeper->directory ? -ENOMEM : -ENOENT;
    }
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", keeper->path);
    keeper->socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (keeper->socket < 0 || setsockopt(keeper->socket, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) < 0 ||
        bind(keeper->socket, (struct sockaddr *)&address, sizeof(address)) < 0)
        return -errno;
    return 0;
}

int keeper_init(struct keeper *keeper, uv_loop_t *loop, const struct keeper_ops *ops, void *userdata)
{
    int r;

    *keeper = (struct keeper){.socket = -1, .ops = ops, .userdata = userdata};
    r = keeper_bind(keeper);
    if (r == 0)
        r = uv_poll_init(loop, &keeper->poll, keeper->socket);
    if (r < 0) {
        keeper_remove_socket(keeper);
        closep(&keeper->socket);
        return r;
    }
    (void)uv_poll_start(&keeper->poll, UV_READABLE, keeper_readable); /* fails only for wrong arguments */
    return 0;
}

void keeper_remove_socket(struct keeper *keeper)
{
    if (keeper->path)
        (void)unlink(keeper->path);
    if (keeper->directory)
        (void)rmdir(keeper->directory);
    free(steal_ptr(keeper->path));
    free(steal_ptr(keeper->directory));
}

void keeper_close(struct keeper *keeper)
{
    keeper_remove_socket(keeper);
    while (keeper->n > 0)
        keeper_drop(keeper, keeper->n - 1);
    uv_close((uv_handle_t *)&keeper->poll, NULL);
    close(steal_fd(&keeper->socket));
}
