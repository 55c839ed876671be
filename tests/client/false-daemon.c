/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/client/false-daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/base/base.h"
#include "core/diagnosis/diagnosis.h"
#include "core/wire/wire-request.h"

enum { CONNECTIONS = 4 }; /* the rank's, and some that ask for the status */

struct false_daemon {
    char path[108];
    int listener;
    pthread_t thread;
    const struct false_answer *answers;
    size_t n, at;
    int fds[CONNECTIONS];
    size_t n_fds;
    struct frame_buffer in;
    struct wire_arena arena;
    uint8_t out[FRAME_MAX_BYTES];
};

static bool has_answer(enum request_type type)
{
    switch (type) {
    case REQUEST_DECLARE:
    case REQUEST_INTERN:
    case REQUEST_BEGIN_BACKWARD:
    case REQUEST_PUSH:
    case REQUEST_PUSHES:
    case REQUEST_RELEASE:
    case REQUEST_PREFETCH:
    case REQUEST_HELD:
    case REQUEST_ABORT_SEEN:
    case REQUEST_REPORT:
    case REQUEST_EVIDENCE:
        return false;
    default:
        return true;
    }
}

static void refuse(struct false_daemon *daemon, int fd)
{
    const struct reply reply = {
        .type = REPLY_REFUSED,
        .refused = {
            .diagnostic = {.code = E_NOT_ALLOWED, .cause_class = "", .title = "", .text = "the script has ended"},
            .closing = true}};
    int n = wire_pack_reply(&daemon->arena, &reply, daemon->out, sizeof(daemon->out));

    if (n > 0)
        (void)frame_send(fd, daemon->out, (size_t)n, NULL, 0);
}

static void answer(struct false_daemon *daemon, int fd)
{
    const struct false_answer *answer;

    if (daemon->at == daemon->n) {
        refuse(daemon, fd);
        return;
    }
    do {
        answer = &daemon->answers[daemon->at++];
        (void)frame_send(fd, answer->data, answer->n_bytes, answer->fds, answer->n_fds);
    } while (answer->more && daemon->at < daemon->n);
}

/* Return: false if the client has hung up. */
static bool serve_packet(struct false_daemon *daemon, int fd)
{
    char why[WIRE_WHY_BYTES];
    struct request request;
    int r = frame_receive_fds(fd, &daemon->in);

    if (r != 0)
        return r == FRAME_AGAIN;
    wire_arena_reset(&daemon->arena);
    r = wire_unpack_request(&daemon->arena, daemon->in.data, daemon->in.n_bytes, &request, why, sizeof(why));
    if (r == 0 && has_answer(request.type))
        answer(daemon, fd);
    return r == 0;
}

static void accept_one(struct false_daemon *daemon)
{
    int fd = accept4(daemon->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0)
        return;
    if (daemon->n_fds == CONNECTIONS)
        close(fd);
    else
        daemon->fds[daemon->n_fds++] = fd;
}

static void *run(void *userdata)
{
    struct false_daemon *daemon = userdata;
    struct pollfd polls[1 + CONNECTIONS];

    do {
        size_t n = daemon->n_fds;

        polls[0] = (struct pollfd){.fd = daemon->listener, .events = POLLIN};
        for (size_t i = 0; i < n; i++)
            polls[1 + i] = (struct pollfd){.fd = daemon->fds[i], .events = POLLIN};
        if (poll(polls, 1 + n, -1) < 0)
            continue;
        for (size_t i = n; i > 0; i--) {
            if (!polls[i].revents || serve_packet(daemon, daemon->fds[i - 1]))
                continue;
            close(daemon->fds[i - 1]);
            daemon->fds[i - 1] = daemon->fds[--daemon->n_fds];
        }
        if (polls[0].revents)
            accept_one(daemon);
    } while (daemon->n_fds > 0);
    return NULL;
}

struct false_daemon *false_daemon_new(const char *path)
{
    struct false_daemon *daemon = calloc(1, sizeof(*daemon));
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    if (!daemon)
        return NULL;
    daemon->in = FRAME_BUFFER_NULL;
    snprintf(daemon->path, sizeof(daemon->path), "%s", path);
    strcpy(address.sun_path, daemon->path);
    (void)unlink(path);
    daemon->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (daemon->listener >= 0 && bind(daemon->listener, (struct sockaddr *)&address, sizeof(address)) == 0 &&
        listen(daemon->listener, CONNECTIONS) == 0 && frame_buffer_init(&daemon->in) == 0 &&
        wire_arena_init(&daemon->arena) == 0)
        return daemon;
    false_daemon_free(daemon);
    return NULL;
}

void false_daemon_free(struct false_daemon *daemon)
{
    if (daemon->listener >= 0)
        close(daemon->listener);
    (void)unlink(daemon->path);
    frame_buffer_deinit(&daemon->in);
    wire_arena_deinit(&daemon->arena);
    free(daemon);
}

void false_daemon_serve(struct false_daemon *daemon, const struct false_answer *answers, size_t n)
{
    daemon->answers = answers;
    daemon->n = n;
    daemon->at = 0;
    if (pthread_create(&daemon->thread, NULL, run, daemon) != 0)
        abort();
}

void false_daemon_join(struct false_daemon *daemon)
{
    (void)pthread_join(daemon->thread, NULL);
}

int false_memory(size_t n_bytes, bool is_sealed)
{
    int fd = memfd_create("false", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0 || ftruncate(fd, (off_t)n_bytes) < 0 || (is_sealed && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) < 0))
        abort();
    return fd;
}
