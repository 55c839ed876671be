/* SPDX-License-Identifier: Apache-2.0 */

/* Requests of one handle to the daemon, and the daemon's answers (call.h). */

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client/lib/call.h"
#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

enum {
    DAEMON_ENDS_MS = 1000,       /* picked: a daemon that stops closes its connections, then frees its memory */
    HOLD_GRAD_BYTES = 64 * 1024, /* picked: a send costs little compared with a copy of this size */
};

/* ---- life ---------------------------------------------------------------------------------------------- */

int call_init(struct call *call)
{
    call->out = malloc(FRAME_MAX_BYTES);
    return call->out && frame_buffer_init(&call->in) == 0 && wire_arena_init(&call->arena) == 0 ? 0 : -ENOMEM;
}

void call_deinit(struct call *call)
{
    if (call->fd >= 0)
        close(call->fd);
    if (call->mine)
        munmap(call->mine, (size_t)sysconf(_SC_PAGESIZE));
    free(call->out);
    recorded_deinit(&call->recorded);
    frame_buffer_deinit(&call->in);
    wire_arena_deinit(&call->arena);
    error_reset(&call->error);
}

int call_check(const struct call *call)
{
    return !*call->mine ? -ECHILD : call->fatal;
}

/* ---- errors -------------------------------------------------------------------------------------------- */

int call_fail(struct call *call, int status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    error_print(&call->error, status, format, args);
    va_end(args);
    return status;
}

int call_fatal(struct call *call, int status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    error_print(&call->error, status, format, args);
    va_end(args);
    call->fatal = status;
    return status;
}

/* ---- waiting ------------------------------------------------------------------------------------------- */

int64_t call_now_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

/*
 * interrupted() is called once a second too, because a signal that arrives before poll(), or that another thread
 * handles, does not end the poll().
 */
enum { ASK_EVERY_MS = 1000 };

/* Return: how long one poll() may last. */
static int poll_ms(const struct call *call, int64_t left_ms)
{
    if (call->interrupted && (left_ms < 0 || left_ms > ASK_EVERY_MS))
        return ASK_EVERY_MS;
    return (int)MIN(left_ms, (int64_t)INT32_MAX);
}

static int timed_out(struct call *call)
{
    if (call->mend.until_ms == 0)
        return call_fatal(call, -ETIMEDOUT,
                          "zerod did not answer within %d ms; zerodctl status shows which rank waits for which",
                          call->timeout_ms);
    if (call->mend.until_ms == call->mend.wait_until_ms)
        return call_fatal(call, -ETIMEDOUT,
                          "zerod was stopped or killed, and no other daemon has answered within %d ms (timeout of the "
                          "call); see its log",
                          call->timeout_ms);
    return call_fatal(call, -ECONNRESET,
                      "zerod was stopped or killed, and no other daemon has answered within %llu ms "
                      "(limits.reattach_timeout); see its log",
                      (unsigned long long)call->mend.reattach_ms);
}

/* Return: 0 when the socket may be ready, or a fatal error. */
static int wait_for_daemon(struct call *call, short events, int64_t deadline_ms)
{
    struct pollfd pollfd = {.fd = call->fd, .events = events};
    int64_t left = deadline_ms < 0 ? -1 : MAX(deadline_ms - call_now_ms(), (int64_t)0);
    int ms = poll_ms(call, left), r = poll(&pollfd, 1, ms);

    if (r < 0 && errno != EINTR)
        return call_fatal(call, -errno, "waiting for zerod: %s", strerror(errno));
    if (r <= 0 && call->interrupted && call->interrupted(call->interrupted_arg) != 0)
        return call_fatal(call, -EINTR, "interrupted while %s %s",
                          events == POLLIN ? "waiting for zerod's answer to" : "sending", call->waits_for);
    if (r < 0 || (r == 0 && ms != left))
        return 0;
    return r == 0 ? timed_out(call) : 0;
}

int call_pause(struct call *call, int64_t ms)
{
    int64_t left = call->mend.until_ms - call_now_ms();

    if (left <= 0)
        return timed_out(call);
    (void)poll(NULL, 0, (int)MIN(ms, left));
    if (call->interrupted && call->interrupted(call->interrupted_arg) != 0)
        return call_fatal(call, -EINTR, "interrupted while waiting for a daemon: the last one was stopped or killed");
    return 0;
}

int64_t call_deadline(const struct call *call)
{
    if (call->mend.until_ms > 0)
        return call->mend.until_ms;
    return call->timeout_ms > 0 ? call_now_ms() + call->timeout_ms : -1;
}

int call_watch(struct call *call, int64_t until_ms, int64_t *ask_ms)
{
    const struct timespec moment = {.tv_nsec = 100 * 1000};
    struct pollfd pollfd = {.fd = call->fd, .events = POLLIN};
    int r = ppoll(&pollfd, 1, &moment, NULL), error = errno;
    int64_t now_ms = call_now_ms();
    bool asks = r < 0 || (*ask_ms != 0 && now_ms >= *ask_ms);

    if (r > 0)
        return 1;
    if (r < 0 && error != EINTR)
        return call_fatal(call, -error, "waiting for zerod: %s", strerror(error));
    if (asks && call->interrupted && call->interrupted(call->interrupted_arg) != 0)
        return call_fatal(call, -EINTR, "interrupted while waiting for weights of the last step");
    if (asks || *ask_ms == 0)
        *ask_ms = now_ms + ASK_EVERY_MS;
    return until_ms >= 0 && now_ms >= until_ms ? timed_out(call) : 0;
}

/* ---- breaks -------------------------------------------------------------------------------------------- */

/* Return: the pid of the process that listens at the other end of the socket; 0: unknown. */
static pid_t listener_of(int fd)
{
    struct ucred peer = {0};
    socklen_t n_bytes = sizeof(peer);

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n_bytes) == 0 ? peer.pid : 0;
}

/*
 * Return: true if this connection's daemon still runs and accepts connections. The answer is false for a new daemon at
 * the same address, and for the socket of a service manager, which always accepts. When a daemon has been killed, the
 * kernel may close the listening socket last. So the new connection and the process are watched for DAEMON_ENDS_MS, and
 * the answer is false if either ends.
 */
static bool is_still_served(const struct call *call)
{
    _cleanup_close_ int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    pid_t pid = listener_of(call->fd);
    _cleanup_close_ int process = pid > 1 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
    struct pollfd ends[] = {{.fd = fd}, {.fd = process, .events = POLLIN}};

    if (fd < 0 || process < 0 || connect(fd, (const struct sockaddr *)&call->address, sizeof(call->address)) < 0)
        return false;
    return listener_of(fd) == pid && poll(ends, ARRAY_SIZE(ends), DAEMON_ENDS_MS) == 0;
}

int call_lost(struct call *call)
{
    return call_fatal(call, -ECONNRESET, "zerod has closed the connection: it was stopped or killed; see its log");
}

/*
 * Reconnects after a break. If the daemon still accepts connections, it has closed only this connection, which is
 * fatal, because a daemon that ends closes its listening socket first. Return: as on_break().
 */
static int mend(struct call *call)
{
    int r;

    if (call->fatal)
        return call->fatal;
    if (is_still_served(call))
        return call_fatal(call, -ECONNRESET,
                          "zerod has closed only this connection and is still running; its log has the reason");
    if (!call->mend.on_break || call->mend.reattach_ms == 0)
        return call_lost(call);
    r = call->mend.on_break(call->mend.arg);
    call->mend.n += r == 0;
    return r;
}

/* ---- sending ------------------------------------------------------------------------------------------- */

/* Packs a request into call->out at *n_bytes, and advances *n_bytes. */
static int pack_into_out(struct call *call, const struct request *request, size_t *n_bytes, struct frame_packet *packet)
{
    int n = wire_pack_request(&call->arena, request, call->out + *n_bytes, FRAME_MAX_BYTES - *n_bytes);

    call->waits_for = request_type_name(request->type);
    if (n < 0)
        return call_fatal(call, n, "%s does not fit into a packet", request_type_name(request->type));
    *packet = (struct frame_packet){.data = call->out + *n_bytes, .n_bytes = (size_t)n};
    *n_bytes += (size_t)n;
    (void)failpoint_at(request_type_name(request->type), "send");
    return 0;
}

/* As pack_into_out(); keeps a copy if the request is recorded. */
static int pack_to_keep(struct call *call, const struct request *request, size_t *n_bytes, struct frame_packet *packet)
{
    int r = pack_into_out(call, request, n_bytes, packet);

    if (r == 0 && request_is_recorded(request->type) &&
        recorded_add(&call->recorded, packet->data, (uint32_t)packet->n_bytes) < 0)
        return call_fatal(call, -ENOMEM, "out of memory");
    return r;
}

static bool can_receive(const struct call *call)
{
    char byte;

    return recv(call->fd, &byte, sizeof(byte), MSG_PEEK | MSG_DONTWAIT) > 0;
}

int call_transmit(struct call *call, const struct frame_packet *packets, size_t n_packets)
{
    size_t n_sent;
    int r;

    for (;;) {
        r = frame_send_many(call->fd, packets, n_packets, &n_sent);
        if (r == 0) {
            (void)failpoint_at(call->waits_for, "sent");
            return 0;
        }
        if (r == FRAME_EOF)
            return can_receive(call) ? CALL_SAID_WHY : CALL_BROKEN;
        if (r < 0)
            return call_fatal(call, r, "sending %s: %s", call->waits_for, strerror(-r));
        r = wait_for_daemon(call, POLLOUT, call_deadline(call));
        if (r < 0)
            return r;
        packets += n_sent;
        n_packets -= n_sent;
    }
}

int call_say(struct call *call, const struct request *request)
{
    struct frame_packet packet;
    size_t n_bytes = 0;
    int r = pack_into_out(call, request, &n_bytes, &packet);

    return r == 0 ? call_transmit(call, &packet, 1) : r;
}

/* As call_transmit(), for packets of pack_to_keep(), and reconnects after a break. */
static int send_packets(struct call *call, const struct frame_packet *packets, size_t n_packets)
{
    int r = call_transmit(call, packets, n_packets);

    if (r != CALL_BROKEN)
        return r;
    call->mend.wait_until_ms = call_deadline(call);
    return mend(call);
}

static int check_left(struct call *call)
{
    assert(!call->owes);
    return call->left ? call_fail(call, -EINVAL, "zerod_leave was called: only zerod_close is left") : 0;
}

static void show_n_held(struct call *call)
{
    atomic_store_explicit(&call->held.shown->n, (uint32_t)call->held.n_pushes, memory_order_release);
}

/* Return: the request of a run. sequence: the number of its first push. */
static struct request request_of(const struct held_run *run, uint64_t sequence)
{
    struct request_push first = run->first;

    first.sequence = sequence;
    if (run->n_others == 0)
        return (struct request){.type = REQUEST_PUSH, .push = first};
    return (struct request){
        .type = REQUEST_PUSHES,
        .pushes = {.first = first, .others = run->others, .n_others = run->n_others},
    };
}

int call_flush(struct call *call)
{
    struct call_held *held = &call->held;
    struct frame_packet packets[HELD_RUNS];
    uint64_t sequence = held->runs[0].first.sequence; /* number of the oldest held push */
    size_t n_bytes = 0, n_runs = held->n_runs;
    int r = 0;

    if (n_runs == 0)
        return 0;
    held->n_runs = held->n_pushes = 0;
    held->n_grad_bytes = 0;
    for (size_t i = 0; i < n_runs && r == 0; i++) {
        struct request request = request_of(&held->runs[i], sequence);

        sequence += 1 + held->runs[i].n_others;
        r = pack_to_keep(call, &request, &n_bytes, &packets[i]);
    }
    if (r == 0)
        r = send_packets(call, packets, n_runs);
    show_n_held(call);
    return r;
}

/* Return: true if a message of several pushes can contain this one. */
static bool is_plain(const struct request_push *push)
{
    return !push->record_only && push->part == 0 && push->point == 0 && push->n_bytes == 0 && push->dtype_plus_one == 0;
}

/* Return: true if both pushes are plain, and differ only in parameter and sequence. */
static bool goes_with(const struct request_push *first, const struct request_push *push)
{
    return first->ticket == push->ticket && first->use == push->use && first->offset_bytes == push->offset_bytes &&
           first->overflow == push->overflow && first->pass == push->pass && first->attempt == push->attempt &&
           first->step == push->step && first->micro_batch == push->micro_batch && first->ordinal == push->ordinal &&
           first->task == push->task && first->depth == push->depth && first->segment == push->segment &&
           first->call == push->call && first->site == push->site && first->flags == push->flags && is_plain(first) &&
           is_plain(push);
}

/* Adds the push to a run. If no run has room, calls call_flush() first. Return: as call_flush(). */
static int add_to_run(struct call *call, const struct request_push *push)
{
    struct call_held *held = &call->held;
    /* Sends earlier passes first, because runs may reorder pushes, but not the passes of one parameter. */
    int r = push->pass > 0 ? call_flush(call) : 0;

    for (size_t i = held->n_runs; r == 0 && i > 0; i--) {
        struct held_run *run = &held->runs[i - 1];

        if (goes_with(&run->first, push)) {
            run->others[run->n_others++] = push->param;
            return 0;
        }
    }
    if (r == 0 && held->n_runs == HELD_RUNS)
        r = call_flush(call);
    if (r != 0)
        return r;
    held->runs[held->n_runs].first = *push;
    held->runs[held->n_runs++].n_others = 0;
    return 0;
}

int call_hold(struct call *call, const struct request_push *push, uint64_t n_grad_bytes)
{
    struct call_held *held = &call->held;
    int r = check_left(call);

    if (r != 0)
        return r;
    if (!held->shown)
        return call_send(call, &(struct request){.type = REQUEST_PUSH, .push = *push});
    r = add_to_run(call, push);
    if (r != 0)
        return r;
    /* If this rank hangs now, the daemon must not report this parameter as owed. */
    atomic_store_explicit(&held->shown->params[held->n_pushes], push->param, memory_order_relaxed);
    held->n_pushes++;
    held->n_grad_bytes += n_grad_bytes;
    show_n_held(call);
    return held->n_pushes == HELD_PUSHES || held->n_grad_bytes >= HOLD_GRAD_BYTES ? call_flush(call) : 0;
}

static int send_one(struct call *call, const struct request *request)
{
    struct frame_packet packet;
    size_t n_bytes = 0;
    int r = pack_to_keep(call, request, &n_bytes, &packet);

    return r == 0 ? send_packets(call, &packet, 1) : r;
}

int call_send(struct call *call, const struct request *request)
{
    uint32_t n_mends = call->mend.n;
    int r = check_left(call);

    if (r == 0)
        r = call_flush(call);
    if (r == 0 && call->mend.n != n_mends && !request_is_recorded(request->type))
        return 0;
    return r == 0 ? send_one(call, request) : r;
}

/*
 * As call_send(), for a request that has an answer. After a reconnect, sends the request again if it is not recorded.
 * Recorded requests are sent again by resume_after_break().
 */
static int send_asking(struct call *call, const struct request *request)
{
    bool is_recorded = request_is_recorded(request->type);
    int r = check_left(call);
    uint32_t n_mends;

    if (r == 0)
        r = call_flush(call);
    if (r != 0)
        return r;
    call->waits = is_recorded;
    do {
        n_mends = call->mend.n;
        r = send_one(call, request);
    } while (r == 0 && !is_recorded && call->mend.n != n_mends);
    return r;
}

/* ---- answers ------------------------------------------------------------------------------------------- */

/* Return: how many descriptors must come with the answer, one for each segment. */
static size_t n_promised(const struct reply *reply)
{
    switch (reply->type) {
    case REPLY_FORMED:
        return reply->formed.n_segments;
    case REPLY_DONE:
        return reply->done.n_segments;
    case REPLY_STATE_IS:
        return reply->state_is.n_segments;
    default:
        return 0;
    }
}

int call_receive(struct call *call, int64_t until_ms, struct reply *reply)
{
    char why[WIRE_WHY_BYTES];
    int r;

    while ((r = frame_receive_fds(call->fd, &call->in)) == FRAME_AGAIN) {
        r = wait_for_daemon(call, POLLIN, until_ms);
        if (r < 0)
            return r;
    }
    if (r == FRAME_EOF)
        return CALL_BROKEN;
    if (r == FRAME_E_FDS)
        return call_fatal(
            call, -EMFILE,
            "the descriptors of zerod's answer were lost: this process has none left; raise ulimit -n, or "
            "close files");
    if (r != 0)
        return call_fatal(call, r < 0 ? r : -EPROTO, "receiving from zerod: %s",
                          r < 0 ? strerror(-r) : "a packet of more than 131071 bytes");
    r = wire_unpack_reply(&call->arena, call->in.data, call->in.n_bytes, reply, why, sizeof(why));
    if (r != 0)
        return call_fatal(call, r < 0 ? r : -EPROTO, "zerod's answer is not understood: %s", why);
    if (n_promised(reply) != call->in.n_fds)
        return call_fatal(call, -EPROTO, "zerod's answer promises %zu segments of memory and brings %zu descriptors",
                          n_promised(reply), call->in.n_fds);
    return 0;
}

/* Waits for an answer, which proves that the daemon has received all earlier requests. Return: as call_ask(). */
static int await_reply(struct call *call, const struct request *request, struct reply *reply)
{
    int64_t until_ms = call_deadline(call);
    int r;

    while ((r = call_receive(call, until_ms, reply)) == CALL_BROKEN) {
        call->mend.wait_until_ms = until_ms;
        r = mend(call);
        if (r == 0 && !request_is_recorded(request->type))
            r = send_asking(call, request);
        if (r < 0 || r == CALL_ANEW)
            return r;
    }
    if (r < 0)
        return r;
    call->mend.down_ms = 0;
    call->owes = reply->type == REPLY_STEP_DONE && reply->step_done.is_decision;
    call->waits = call->owes;
    recorded_drop(&call->recorded);
    return 0;
}

int call_acknowledge_abort(struct call *call, uint32_t attempt)
{
    int r = call_send(call, &(struct request){.type = REQUEST_ABORT_SEEN, .abort_seen = {.attempt = attempt}});

    return r == CALL_SAID_WHY ? call_lost(call) : r;
}

static int refused(struct call *call, const struct reply_refused *refusal)
{
    int status = refusal->aborted ? ZEROD_ABORTED : ZEROD_REFUSED;
    struct wire_position position = refusal->position;
    int r;

    error_from_diagnostic(&call->error, status, &refusal->diagnostic);
    if (refusal->closing)
        call->fatal = -ECONNABORTED;
    if (!refusal->aborted)
        return status;
    call->on_abort(call->on_abort_arg, &position);
    r = call_acknowledge_abort(call, position.attempt);
    return r != 0 ? r : status;
}

/* Checks the answer's type, and handles a refusal. */
static int judge_reply(struct call *call, const struct request *request, enum reply_type type,
                       const struct reply *reply)
{
    if (reply->type == REPLY_REFUSED)
        return refused(call, &reply->refused);
    if (reply->type == REPLY_DONE && reply->done.loss_scale > 0)
        call->loss_scale = reply->done.loss_scale;
    if (reply->type != type)
        return call_fatal(call, -EPROTO, "zerod answered %s with %s", request_type_name(request->type),
                          reply_type_name(reply->type));
    return 0;
}

int call_ask(struct call *call, const struct request *request, enum reply_type type, struct reply *reply)
{
    int r = send_asking(call, request);

    if (r < 0 || r == CALL_ANEW)
        return r;
    (void)failpoint_at(request_type_name(request->type), "wait");
    r = await_reply(call, request, reply);
    if (r != 0)
        return r;
    (void)failpoint_at(request_type_name(request->type), "answered");
    return judge_reply(call, request, type, reply);
}

int call_settle(struct call *call, struct reply *reply)
{
    const struct request step = {.type = REQUEST_STEP};
    int r;

    call->waits_for = request_type_name(step.type);
    do
        r = await_reply(call, &step, reply);
    while (r == 0 && call->owes);
    return r == 0 ? judge_reply(call, &step, REPLY_STEP_DONE, reply) : r;
}

/* ---- texts --------------------------------------------------------------------------------------------- */

const char *call_fit_text(struct call_text *room, const char *text)
{
    static const char more[] = " ...";
    size_t n = sizeof(room->bytes) - sizeof(more);

    if (!text || strnlen(text, sizeof(room->bytes)) < sizeof(room->bytes))
        return text ? text : "";
    while (n > 0 && ((uint8_t)text[n] & 0xc0) == 0x80) /* does not cut inside a UTF-8 character */
        n--;
    memcpy(room->bytes, text, n);
    memcpy(room->bytes + n, more, sizeof(more));
    return room->bytes;
}
