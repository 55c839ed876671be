/* SPDX-License-Identifier: Apache-2.0 */

/* A connection that sends commands to a daemon. */

#include "client/control/control.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sysexits.h>
#include <time.h>

#include "core/base/base.h"
#include "core/base/who-may.h"
#include "core/diagnosis/diagnosis.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

enum {
    ANSWER_MAX_BYTES = 1 << 30, /* picked: four times the answer for a million parameters */
};

static int control_fail(struct control *control, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static int control_fail(struct control *control, int code, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(control->error, sizeof(control->error), format, args);
    va_end(args);
    return -code;
}

static int control_fail_errno(struct control *control, const char *what, int error)
{
    char who[WHO_MAY_BYTES];

    if (error == EACCES || error == EPERM) {
        who_may_open(control->path, who);
        return control_fail(control, EX_NOPERM, "not allowed to connect to %s: %s%s", control->path, strerror(error),
                            who);
    }
    return control_fail(control, EX_UNAVAILABLE, "no daemon on %s: %s: %s", control->path, what, strerror(error));
}

/* Fails with the reason that the daemon sent before it closed the connection. */
static int control_fail_refused(struct control *control, const struct wire_diagnostic *diagnostic)
{
    int code = diagnostic->code == E_NOT_ALLOWED   ? EX_NOPERM
               : diagnostic->code == E_BAD_MESSAGE ? EX_PROTOCOL
                                                   : EX_UNAVAILABLE;

    return control_fail(control, code, "%s", diagnostic->text);
}

uint64_t control_clock_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

/* How long the daemon may be silent from now on. */
static int patience_ms(const struct control *control)
{
    uint64_t now = control_clock_ms();

    if (control->until_ms == 0)
        return CONTROL_SILENCE_MS;
    return control->until_ms > now ? (int)MIN(control->until_ms - now, (uint64_t)CONTROL_SILENCE_MS) : 0;
}

static int control_fail_silent(struct control *control)
{
    if (control->until_ms != 0)
        return control_fail(control, EX_TEMPFAIL, "the daemon on %s has not answered in time", control->path);
    return control_fail(control, EX_TEMPFAIL, "the daemon on %s has not answered for %d s", control->path,
                        CONTROL_SILENCE_MS / 1000);
}

/* Return: the daemon's pid; or 0 if the kernel does not report it, or if the service manager made the socket. */
static pid_t peer_pid(const struct control *control)
{
    struct ucred cred;
    socklen_t size = sizeof(cred);

    return getsockopt(control->fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) == 0 && cred.pid > 1 ? cred.pid : 0;
}

/* Return: true if a signal or a debugger has stopped the process. */
static bool is_stopped(pid_t pid)
{
    char path[64], text[512], *end;
    _cleanup_close_ int fd = -1;
    ssize_t n;

    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
    if (n <= 0)
        return false;
    text[n] = '\0';
    end = strrchr(text, ')'); /* the state follows the name */
    return end && (strncmp(end, ") T", 3) == 0 || strncmp(end, ") t", 3) == 0);
}

/* Reports a silence of CONTROL_NOTICE_MS. Return: 0 if the daemon may still answer, or a negative code. */
static int note_silence(struct control *control)
{
    pid_t pid = peer_pid(control);

    if (pid > 0 && is_stopped(pid))
        return control_fail(control, EX_TEMPFAIL,
                            "the daemon on %s does not answer: its process %d is stopped, by a signal or a debugger; "
                            "continue it with kill -CONT %d",
                            control->path, pid, pid);
    if (!control->told_silence)
        fprintf(stderr, "%s: the daemon on %s has not answered for %d s; waiting for up to %d s\n",
                program_invocation_short_name, control->path, CONTROL_NOTICE_MS / 1000, CONTROL_SILENCE_MS / 1000);
    control->told_silence = true;
    return 0;
}

/* Return: > 0 if the connection is ready; 0 if the daemon was silent; or a negative code. */
static int wait_for_events(struct control *control, short events, int timeout_ms)
{
    const struct control_idle *idle = control->idle;
    struct pollfd fds[] = {{.fd = control->fd, .events = events}, {.fd = idle ? idle->fd : -1, .events = POLLIN}};
    int r;

    do {
        r = poll(fds, ARRAY_SIZE(fds), MIN(timeout_ms, patience_ms(control)));
        if (r > 0 && fds[1].revents && idle->call(idle->userdata) != 0)
            return control_fail(control, EX_TEMPFAIL, "the waiting was ended");
    } while ((r < 0 && errno == EINTR) || (r > 0 && !fds[0].revents));
    return r < 0 ? control_fail(control, EX_OSERR, "poll: %s", strerror(errno)) : r;
}

static int control_wait(struct control *control, short events)
{
    bool person_waits = control->until_ms == 0;
    int r = wait_for_events(control, events, person_waits ? CONTROL_NOTICE_MS : CONTROL_SILENCE_MS);

    if (r == 0 && person_waits) {
        r = note_silence(control);
        if (r == 0)
            r = wait_for_events(control, events, CONTROL_SILENCE_MS - CONTROL_NOTICE_MS);
    }
    return r == 0 ? control_fail_silent(control) : MIN(r, 0);
}

static int control_send(struct control *control, const struct request *request)
{
    int n = wire_pack_request(&control->arena, request, control->buffer.data, FRAME_MAX_BYTES), r;

    if (n < 0)
        return control_fail(control, EX_OSERR, "%s", strerror(-n));
    while ((r = frame_send(control->fd, control->buffer.data, n, NULL, 0)) == FRAME_AGAIN) {
        r = control_wait(control, POLLOUT);
        if (r < 0)
            return r;
    }
    /* A daemon that has closed the connection may have sent its reason first. control_receive() receives it. */
    if (r < 0 && r != -ECONNRESET)
        return control_fail_errno(control, "send", -r);
    return 0;
}

/* Receives one reply of the wanted type. The reply lives until the next call. */
static int control_receive(struct control *control, enum reply_type wanted, struct reply *reply)
{
    char why[WIRE_WHY_BYTES];
    int r;

    if (patience_ms(control) == 0) /* an answer whose parts never end must not outlast the limit */
        return control_fail_silent(control);
    while ((r = frame_receive_fds(control->fd, &control->buffer)) == FRAME_AGAIN) {
        r = control_wait(control, POLLIN);
        if (r < 0)
            return r;
    }
    if (r == FRAME_EOF)
        return control_fail(control, EX_UNAVAILABLE, "the daemon on %s has closed the connection", control->path);
    if (r != 0)
        return control_fail_errno(control, "receive", r < 0 ? -r : EPROTO);
    r = wire_unpack_reply(&control->arena, control->buffer.data, control->buffer.n_bytes, reply, why, sizeof(why));
    if (r < 0)
        return control_fail(control, EX_OSERR, "%s", strerror(-r));
    if (r == 0 && reply->type == REPLY_REFUSED)
        return control_fail_refused(control, &reply->refused.diagnostic);
    if (r == 0 && reply->type != wanted)
        return control_fail(control, EX_PROTOCOL, "the daemon on %s answered with %s instead of %s", control->path,
                            reply_type_name(reply->type), reply_type_name(wanted));
    if (r != 0)
        return control_fail(control, EX_PROTOCOL, "the daemon on %s sent an invalid message: %s", control->path, why);
    return 0;
}

/* Limits the time for which connect() waits for room in the daemon's backlog: as long as the daemon may be silent. */
static int limit_connect(struct control *control)
{
    int ms = MAX(patience_ms(control), 1); /* because 0 means no limit */
    struct timeval limit = {.tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000};

    if (setsockopt(control->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) < 0)
        return control_fail(control, EX_OSERR, "setsockopt: %s", strerror(errno));
    return 0;
}

static int control_connect(struct control *control)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int r;

    if (strlen(control->path) >= sizeof(address.sun_path))
        return control_fail(control, EX_USAGE, "%s: a socket's path has at most %zu bytes", control->path,
                            sizeof(address.sun_path) - 1);
    strcpy(address.sun_path, control->path);
    control->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (control->fd < 0)
        return control_fail(control, EX_OSERR, "socket: %s", strerror(errno));
    r = limit_connect(control);
    if (r < 0 || connect(control->fd, (struct sockaddr *)&address, sizeof(address)) == 0)
        return r;
    return errno == EAGAIN ? control_fail_silent(control) : control_fail_errno(control, "connect", errno);
}

static int control_hello(struct control *control)
{
    char name[64];
    struct request request = {
        .type = REQUEST_HELLO,
        .hello = {.version_min = WIRE_VERSION,
                  .version_max = WIRE_VERSION,
                  .role = WIRE_ROLE_CONTROL,
                  .incarnation = 1,
                  .client = name},
    };
    struct reply reply;
    uint64_t random;
    int r;

    snprintf(name, sizeof(name), "%s %s", program_invocation_short_name, ZEROD_VERSION);
    if (getrandom(&random, sizeof(random), 0) == sizeof(random) && random != 0)
        request.hello.incarnation = random;
    r = control_send(control, &request);
    return r < 0 ? r : control_receive(control, REPLY_WELCOME, &reply);
}

static int control_open(struct control *control, const char *path, uint64_t until_ms, const struct control_idle *idle)
{
    int r;

    *control = (struct control){.fd = -1,
                                .path = path,
                                .until_ms = until_ms,
                                .idle = idle,
                                .arena = WIRE_ARENA_NULL,
                                .buffer = FRAME_BUFFER_NULL};
    if (!path || !*path)
        return control_fail(control, EX_USAGE, "which daemon? Say --socket PATH, or set ZEROD_SOCKET");
    r = wire_arena_init(&control->arena);
    if (r == 0)
        r = frame_buffer_init(&control->buffer);
    if (r < 0)
        return control_fail(control, EX_OSERR, "%s", strerror(-r));
    r = control_connect(control);
    return r < 0 ? r : control_hello(control);
}

int control_init(struct control *control, const char *path)
{
    return control_open(control, path, 0, NULL);
}

int control_init_within(struct control *control, const char *path, unsigned timeout_ms)
{
    return control_open(control, path, control_clock_ms() + timeout_ms, NULL);
}

int control_init_idle(struct control *control, const char *path, unsigned timeout_ms, const struct control_idle *idle)
{
    return control_open(control, path, control_clock_ms() + timeout_ms, idle);
}

void control_deinit(struct control *control)
{
    closep(&control->fd);
    frame_buffer_deinit(&control->buffer);
    wire_arena_deinit(&control->arena);
    control->fd = -1;
}

static int answer_append(struct answer *answer, const struct reply_admin_part *part)
{
    size_t n_bytes = answer->n_bytes + part->n_json_bytes;
    char *json;

    if (n_bytes > ANSWER_MAX_BYTES)
        return -EFBIG;
    json = realloc(answer->json, n_bytes + 1);
    if (!json)
        return -ENOMEM;
    if (part->n_json_bytes > 0)
        memcpy(json + answer->n_bytes, part->json, part->n_json_bytes);
    json[n_bytes] = '\0';
    answer->json = json;
    answer->n_bytes = n_bytes;
    answer->exit_code = part->exit_code;
    return 0;
}

/* Receives the next part of an answer. Only the last part may be empty, because an answer must end. */
static int receive_part(struct control *control, struct reply *reply)
{
    int r = control_receive(control, REPLY_ADMIN_PART, reply);

    if (r == 0 && reply->admin_part.n_json_bytes == 0 && !reply->admin_part.last)
        r = control_fail(control, EX_PROTOCOL, "the daemon on %s sent an empty part of an answer", control->path);
    return r;
}

int control_ask(struct control *control, const char *command, struct answer *answer)
{
    struct request request = {
        .type = REQUEST_ADMIN,
        .admin = {.command = command},
    };
    struct reply reply;
    int r = control_send(control, &request);

    *answer = ANSWER_NULL;
    if (r < 0)
        return r;
    do {
        r = receive_part(control, &reply);
        if (r == 0 && answer_append(answer, &reply.admin_part) < 0)
            r = control_fail(control, EX_OSERR, "the answer is too large for memory");
        if (r < 0) {
            answer_deinit(answer);
            return r;
        }
    } while (!reply.admin_part.last);
    return 0;
}

void answer_deinit(struct answer *answer)
{
    free(answer->json);
    *answer = ANSWER_NULL;
}

int control_ask_once(const char *prefix, const char *path, const char *command, struct answer *answer)
{
    struct control control;
    int r = control_init(&control, path);

    if (r == 0)
        r = control_ask(&control, command, answer);
    if (r < 0)
        fprintf(stderr, "%s: %s\n", prefix, control.error);
    control_deinit(&control);
    return r;
}
