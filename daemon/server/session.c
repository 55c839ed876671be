/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A session reads requests from one connection and sends replies. sessions_reap() closes the doomed sessions of the
 * list.
 */

#include "daemon/server/session.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/open-files.h"
#include "core/base/log.h"
#include "core/diagnosis/cause.h"
#include "core/wire/wire-reply.h"
#include "daemon/job/attendance.h"
#include "daemon/job/rank-lost.h"
#include "daemon/job/job.h"
#include "daemon/job/look.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/server/service.h"

/* Limits for answers that a client has not read; picked, not measured. A diagnostic or a part of JSON has at most 128
 * KiB. */
enum { MAX_QUEUED_PACKETS = 64, MAX_QUEUED_BYTES = 8 << 20 };

/* The number of batches that are read after a process has died. The kernel holds at most some 300 packets of a sender.
 */
enum { LAST_ROUNDS = 64 };

static void on_socket(uv_poll_t *handle, int status, int events);
static void on_pid(uv_poll_t *handle, int status, int events);
static void serve_packet(struct session *session, const struct frame_packet *packet);

void session_set_state(struct session *session, enum session_state state)
{
    static const unsigned from[] = {
        [SESSION_ATTACHED] = SESSION_HELLO,
        [SESSION_FORMED] = SESSION_ATTACHED,
        [SESSION_CONTROL] = SESSION_HELLO,
        [SESSION_WATCH] = SESSION_HELLO,
        [SESSION_LEFT] = SESSION_ATTACHED | SESSION_FORMED,
        [SESSION_CLOSED] =
            SESSION_HELLO | SESSION_ATTACHED | SESSION_FORMED | SESSION_CONTROL | SESSION_LEFT | SESSION_WATCH,
    };

    assert(from[state] & session->state);
    session->state = state;
}

int64_t session_rank_number(const struct session *session)
{
    return session->rank ? (int64_t)session->rank->rank : -1;
}

struct diagnostic *session_keep(struct session *session, struct diagnostic *diagnostic)
{
    struct job *job = session->service->job;

    return session->rank ? job_keep(job, diagnostic) : job_keep_stranger(job, diagnostic);
}

/* ---- the list ------------------------------------------------------------------------------------------ */

static void link_session(struct session *session)
{
    struct service *service = session->service;

    session->next = service->sessions;
    session->link = &service->sessions;
    if (session->next)
        session->next->link = &session->next;
    service->sessions = session;
}

static void unlink_session(struct session *session)
{
    *session->link = session->next;
    if (session->next)
        session->next->link = session->link;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static void on_session_closed(uv_handle_t *handle)
{
    struct session *session = handle->data;

    assert(session->state == SESSION_CLOSED);
    assert(session->n_handles > 0);
    if (--session->n_handles > 0)
        return;
    close(session->fd);
    if (session->pidfd >= 0)
        close(session->pidfd);
    listener_peer_deinit(&session->peer);
    frame_queue_deinit(&session->queue);
    free(session);
}

/*
 * Watches fd for input. Sets *is_handle if the handle must be closed later, which is possible even on failure. Return:
 * 0 or -errno.
 */
static int watch_fd(struct session *session, uv_poll_t *handle, int fd, uv_poll_cb callback, bool *is_handle)
{
    uv_loop_t *loop = session->service->loop;
    int r = uv_poll_init(loop, handle, fd);

    assert(!*is_handle);
    if (r < 0)
        return r;
    handle->data = session;
    session->n_handles++;
    *is_handle = true;
    return open_files_watch(handle, UV_READABLE, callback);
}

/*
 * Watches the peer's pidfd, which becomes readable when the process ends. End-of-file on the socket is not enough,
 * because a child of the trainer may have inherited the socket. A peer has no pidfd if it has already ended, or is in a
 * PID namespace that this process does not see. Return: 0 or -errno.
 */
static int watch_peer(struct session *session)
{
    if (session->peer.pid > 0)
        session->pidfd = (int)syscall(SYS_pidfd_open, session->peer.pid, 0);
    if (session->pidfd < 0)
        return session->peer.pid > 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM) ? -errno : 0;
    return watch_fd(session, &session->pid_poll, session->pidfd, on_pid, &session->watches_pid);
}

static void close_session(struct session *session)
{
    struct job_rank *rank = steal_ptr(session->rank);

    assert(session->state != SESSION_CLOSED);
    session_set_state(session, SESSION_CLOSED);
    unlink_session(session);
    questions_cancel(&session->service->questions, &session->question);
    if (session->hello)
        attendance_waits_no_more(session->service->job, session->hello_rank);
    free(steal_ptr(session->hello));
    if (rank && rank->peer == session) { /* false if a newer connection of the process has the rank */
        job_record(session->service->job, rank, JOURNAL_DETACH, NULL, 0, NULL, 0);
        job_detach(session->service->job, rank);
    }
    if (session->watched)
        look_detach(session->watched, session);
    if (session->watches_pid)
        uv_close((uv_handle_t *)&session->pid_poll, on_session_closed);
    if (session->watches_socket)
        uv_close((uv_handle_t *)&session->socket_poll, on_session_closed);
    assert(session->n_handles == (unsigned)session->watches_pid + session->watches_socket);
    if (session->n_handles == 0) { /* the socket was never watched */
        assert(frame_queue_is_empty(&session->queue));
        close(session->fd);
        if (session->pidfd >= 0)
            close(session->pidfd);
        listener_peer_deinit(&session->peer);
        free(session);
    }
}

int session_new(struct session **out, struct service *service, int fd)
{
    struct session *session = calloc(1, sizeof(*session));
    int r;

    if (!session) {
        close(fd);
        return -ENOMEM;
    }
    session->service = service;
    session->fd = fd;
    session->pidfd = -1;
    session->state = SESSION_HELLO;
    session->accepted_ns = service_now_ns();
    frame_queue_init(&session->queue, MAX_QUEUED_PACKETS, MAX_QUEUED_BYTES);
    link_session(session);

    session->events = UV_READABLE;
    r = listener_peer_init(&session->peer, fd);
    if (r == 0)
        r = watch_fd(session, &session->socket_poll, fd, on_socket, &session->watches_socket);
    if (r == 0)
        r = watch_peer(session);
    if (r < 0) {
        close_session(session);
        return r;
    }
    *out = session;
    return 0;
}

/*
 * Serves the kept Hellos. Repeats this until no rank attaches, because a rank that attaches may allow another rank to
 * attach.
 */
static void serve_waiting(struct service *service)
{
    bool any;

    do {
        any = false;
        for (struct session *session = service->sessions; session; session = session->next) {
            const struct frame_packet hello = {.data = session->hello, .n_bytes = session->n_hello_bytes};

            if (!session->hello || session->doomed)
                continue;
            serve_packet(session, &hello);
            any |= !session->hello;
        }
    } while (any);
}

void sessions_reap(struct service *service)
{
    struct session *session, *next;

    if (service->job)
        job_settle(service->job);
    serve_waiting(service);
    /*
     * Repeats, because closing a session may doom another session: the job then sends to its ranks, and a rank that
     * does not read is doomed.
     */
    while (service->some_doomed) {
        service->some_doomed = false;
        for (session = service->sessions; session; session = next) {
            next = session->next;
            if (session->doomed)
                close_session(session);
        }
        if (service->job)
            job_settle(service->job);
    }
}

void session_doom(struct session *session)
{
    session->doomed = true;
    session->service->some_doomed = true;
}

/* ---- sending ------------------------------------------------------------------------------------------- */

/* Logs why a connection is closed without an answer. After a few lines, logs only the number of such connections. */
static void note_closed(struct session *session, const char *why)
{
    log_limited(&session->service->closed, service_now_ns() / 1000000, LOG_ERR,
                "a connection of pid %d is closed, because %s", (int)session->peer.pid, why);
}

/*
 * Return: whether the session may read its next request. A control connection may only when all its answers are sent.
 */
static bool may_read(const struct session *session)
{
    if (session->state != SESSION_CONTROL)
        return true;
    return session->question.state == QUESTION_NONE && frame_queue_is_empty(&session->queue);
}

void session_want_events(struct session *session)
{
    bool has_more = !frame_queue_is_empty(&session->queue) || session->question.state == QUESTION_BLOCKED;
    int events = (may_read(session) ? UV_READABLE : UV_DISCONNECT) | (has_more ? UV_WRITABLE : 0), r;
    char why[160];

    if (events == session->events || session->doomed)
        return;
    session->events = events;
    r = open_files_watch(&session->socket_poll, events, on_socket);
    if (r == 0)
        return;
    snprintf(why, sizeof(why), "it cannot be watched: %s", strerror(-r));
    note_closed(session, why);
    session_doom(session);
}

/* Logs why a connection fails. The peer sees only the closed connection, and libzerod refers the user to the log. */
static void note_failure(struct session *session, const char *what, int r)
{
    char why[160];

    if (r == FRAME_E_FULL)
        snprintf(why, sizeof(why), "it does not read its answers");
    else
        snprintf(why, sizeof(why), "nothing can be %s it: %s", what, strerror(-r));
    if (r == FRAME_E_FULL || r < 0)
        note_closed(session, why);
}

static void send_bytes(struct session *session, const uint8_t *packed, size_t n_bytes, int *fds, size_t n_fds)
{
    int r = frame_queue_send(&session->queue, session->fd, packed, n_bytes, fds, n_fds);

    if (r != 0) {
        note_failure(session, "sent to", r);
        session_doom(session);
    } else if (!frame_queue_is_empty(&session->queue)) {
        session_want_events(session);
    }
}

void session_send(struct session *session, const struct reply *reply, int *fds, size_t n_fds)
{
    int n = wire_pack_reply(&session->service->arena, reply, session->service->buffer, FRAME_MAX_BYTES);

    (void)failpoint("answer");
    if (n < 0) {
        for (size_t i = 0; i < n_fds; i++)
            close(fds[i]);
        session_doom(session);
        return;
    }
    send_bytes(session, session->service->buffer, (size_t)n, fds, n_fds);
}

void session_send_packed(struct session *session, const uint8_t *packed, size_t n_bytes)
{
    send_bytes(session, packed, n_bytes, NULL, 0);
}

void session_refuse(struct session *session, const struct diagnostic *diagnostic)
{
    session_send(session,
                 &(struct reply){
                     .type = REPLY_REFUSED,
                     .refused = {.diagnostic = wire_diagnostic(diagnostic), .closing = true},
                 },
                 NULL, 0);
    session_doom(session);
}

/* ---- receiving ----------------------------------------------------------------------------------------- */

static void refuse_message(struct session *session, const char *why)
{
    struct evidence_at at = {.rank = session_rank_number(session), .step = -1, .micro_batch = -1};
    struct diagnostic *diagnostic = session_keep(session, cause_bad_message(&at, why));

    session_refuse(session, diagnostic);
}

static void serve_packet(struct session *session, const struct frame_packet *packet)
{
    struct request request;
    char why[WIRE_WHY_BYTES];
    int r;

    session->service->packet = packet;
    if (packet->status == FRAME_E_TOO_LARGE) {
        refuse_message(session, "a packet of more than 131071 bytes");
        return;
    }
    if (packet->status == FRAME_E_FDS) {
        refuse_message(session, "descriptors travel from the daemon to the client only; those sent were closed");
        return;
    }
    r = wire_unpack_request(&session->service->arena, packet->data, packet->n_bytes, &request, why, sizeof(why));
    if (r == WIRE_E_INVALID)
        refuse_message(session, why);
    else if (r < 0)
        refuse_message(session, "no memory to unpack the message");
    else
        session->service->handle(session, &request);
}

/* Reads and serves one batch of packets. Return: whether the socket may have more packets. */
static bool serve_batch(struct session *session)
{
    struct frame_batch *batch = &session->service->batch;
    /*
     * Reads one packet at a time from a control connection. Its further questions stay in the kernel, so that the
     * connection cannot fill this process's memory.
     */
    size_t n_packets = session->state & (SESSION_HELLO | SESSION_CONTROL) ? 1 : FRAME_BATCH;
    int r = frame_receive_some(session->fd, batch, n_packets);

    session->is_short = frame_is_short(r);
    if (r == FRAME_AGAIN || session->is_short) /* the loop calls again when the socket is readable */
        return false;
    if (r != 0) {
        note_failure(session, "received from", r);
        session_doom(session);
        return false;
    }
    for (size_t i = 0; i < batch->n_packets && !session->doomed; i++)
        serve_packet(session, &batch->packets[i]);
    if (session->state != SESSION_CONTROL)
        questions_give_way(&session->service->questions);
    if (batch->eof)
        session_doom(session);
    return batch->more && !session->doomed;
}

/* Handles a writable socket. Sends the queued packets, and then continues a blocked answer. */
static void send_more(struct session *session)
{
    int r = frame_queue_flush(&session->queue, session->fd);

    if (r != 0 && r != FRAME_AGAIN) {
        note_failure(session, "sent to", r);
        session_doom(session);
    } else if (r == 0 && session->question.state == QUESTION_BLOCKED) {
        questions_unblock(&session->service->questions, &session->question);
    }
    session_want_events(session);
}

static void on_socket(uv_poll_t *handle, int status, int events)
{
    struct session *session = handle->data;

    if (status < 0 || session->doomed || (events & UV_DISCONNECT)) {
        session_doom(session);
        sessions_reap(session->service);
        return;
    }
    /* Serves at most FRAME_ROUNDS batches, so that a flooding session does not starve the others. */
    for (int round = 0; (events & UV_READABLE) && round < FRAME_ROUNDS && !session->doomed; round++)
        if (!may_read(session) || !serve_batch(session))
            break;
    if ((events & UV_WRITABLE) && !session->doomed)
        send_more(session);
    sessions_reap(session->service);
}

/*
 * Ends the session of a dead process. Serves the packets that the process sent before its death, but not later packets
 * of its children.
 */
static void on_pid(uv_poll_t *handle, int status, int events)
{
    struct session *session = handle->data;

    (void)status;
    (void)events;
    for (int round = 0; round < LAST_ROUNDS && !session->doomed; round++)
        if (!may_read(session) || !serve_batch(session))
            break;
    if (session->is_short && !session->doomed)
        return; /* keeps the session, because unread packets remain */
    session_doom(session);
    sessions_reap(session->service);
}
