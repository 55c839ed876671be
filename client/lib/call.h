/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Requests to the daemon, its answers, and the error that ends the connection. A fatal error is sticky: call_check()
 * returns it from then on. A refusal is not sticky in this file, because the daemon itself repeats it.
 *
 * Pushes may be held for a moment, so that one system call sends several. The daemon sees held pushes in the ring, so
 * it does not report their parameters as owed if this rank hangs. Without a place for them in the ring, no push is
 * held.
 *
 * A broken connection is a pause, because the next daemon takes over the state of the last one. on_break() reconnects,
 * and sends the requests that the next daemon does not have (reconnect.c); then the call continues. Recorded requests
 * are sent from copies, which are kept until an answer proves that the daemon has received them. For a request that is
 * not recorded, the call that waits for the answer sends it again. The connection has ended for good if the daemon has
 * sent a reason for closing it, or if the daemon lives and has closed only this connection.
 *
 * Outcomes of calls: 0; ZEROD_REFUSED or ZEROD_ABORTED; or a negative sticky error, called fatal below. One thread at a
 * time.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/un.h>

#include "client/lib/error.h"
#include "client/lib/recorded.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "core/wire/wire.h"
#include "proto/credit.h"

/* Further outcomes. */
enum {
    CALL_SAID_WHY = 1, /* sending: the daemon has closed the connection, and its reason can be received */
    CALL_BROKEN = 4,   /* without reconnecting: the connection has ended, and nothing can be received */
    CALL_ANEW = 5,     /* inside zerod_form(): the next daemon does not have this rank, so forming begins again */
};

enum {
    HELD_RUNS = 8, /* picked; pushes of alternating buckets, as with and without weight decay, need several runs */
};

/* Held pushes that differ only in their parameter, and become one message. */
struct held_run {
    struct request_push first;
    uint32_t others[HELD_PUSHES - 1];
    uint32_t n_others;
};

/* The pushes that are held, as runs, for one send (call_hold()). */
struct call_held {
    struct held_pushes *shown; /* their place in the ring; NULL: none; not owned */
    struct held_run runs[HELD_RUNS];
    size_t n_runs;
    size_t n_pushes; /* in all runs */
    uint64_t n_grad_bytes;
};

/* How a broken connection is mended. */
struct call_mend {
    /*
     * Called when the connection has broken. If it is NULL, or reattach_ms is 0, a break is fatal. Return: 0 if the
     * next daemon has all requests; CALL_ANEW; or fatal.
     */
    int (*on_break)(void *arg);
    void *arg;
    uint64_t reattach_ms;  /* limit of a reconnect; from the daemon */
    int64_t down_ms;       /* time without a connection since the last answer */
    int64_t until_ms;      /* deadline while on_break() runs, else 0 */
    int64_t wait_until_ms; /* deadline of the wait that broke; -1: none */
    uint32_t n;            /* number of successful reconnects */
};

struct call {
    int fd;                     /* owned; -1: none. Later connections have the same number */
    struct sockaddr_un address; /* the daemon's */
    bool *mine;                 /* owned: a page that the kernel clears in a forked child */
    int fatal;                  /* 0, or the sticky -errno */
    int timeout_ms;             /* limit of a wait for an answer; 0: none */
    bool left;                  /* zerod_leave() has succeeded */
    int (*interrupted)(void *arg);
    void *interrupted_arg;

    /* Called when the daemon has aborted the step, before this rank acknowledges the abort. */
    void (*on_abort)(void *arg, const struct wire_position *position);
    void *on_abort_arg;

    struct call_mend mend;
    bool waits;               /* the last recorded request has no answer yet */
    bool owes;                /* a decided Step has no answer yet; call_settle() must precede other requests */
    struct recorded recorded; /* requests that the next daemon may need */

    const char *waits_for; /* name of the request that is being sent or answered; static */
    double loss_scale;     /* from the last answer that had one */
    struct client_error error;
    struct frame_buffer in; /* the last answer, with its descriptors */
    struct wire_arena arena;
    uint8_t *out; /* FRAME_MAX_BYTES */
    struct call_held held;
};

/* Allocates the buffers; the caller connects fd. Return: 0 or -ENOMEM, without a text. */
int call_init(struct call *call);
void call_deinit(struct call *call);

/* Return: 0; -ECHILD in a forked child; or the sticky error. */
int call_check(const struct call *call);

/* Sets the handle's error; call_fatal() also makes it sticky. Return: status. */
int call_fail(struct call *call, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));
int call_fatal(struct call *call, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Milliseconds of CLOCK_MONOTONIC. */
int64_t call_now_ms(void);

/* Sets the fatal error of a connection that has ended for good. Return: fatal. */
int call_lost(struct call *call);

/*
 * Sends the held pushes and then the request, without waiting for an answer. If the connection breaks, a request that
 * is not recorded is lost. The sender need not send it again, because on_break() sends the next daemon all state that
 * it needs. Return: 0; CALL_SAID_WHY; CALL_ANEW; or a sticky error.
 */
int call_send(struct call *call, const struct request *request);

/*
 * As call_send(), for a push that other pushes follow at once. n_grad_bytes: size of the gradient that was copied for
 * it. Held pushes may be sent in another order; their sequence numbers follow the order of sending.
 */
int call_hold(struct call *call, const struct request_push *push, uint64_t n_grad_bytes);

/* Sends the held pushes. Return: as call_send(). */
int call_flush(struct call *call);

/*
 * Sends a request and waits for its answer, which must have this type. When it returns ZEROD_ABORTED, the abort has
 * been acknowledged. Data of reply and the descriptors in call->in live until the next call. Return: an outcome (see
 * the top), or CALL_ANEW.
 */
int call_ask(struct call *call, const struct request *request, enum reply_type type, struct reply *reply);

/* Waits for the answer to a decided Step. Call it only if call->owes is set. Return: as call_ask(). */
int call_settle(struct call *call, struct reply *reply);

/* Return: the deadline of a wait that begins now, in milliseconds of CLOCK_MONOTONIC; -1: none. */
int64_t call_deadline(const struct call *call);

/*
 * Sleeps for a tenth of a millisecond. *ask_ms: 0 before the first sleep; then call_watch() sets it to the time of the
 * next call of interrupted(). Return: 0; 1 if something can be received, or the connection is broken; or fatal if
 * interrupted() does not return 0, or until_ms has passed.
 */
int call_watch(struct call *call, int64_t until_ms, int64_t *ask_ms);

/* Tells the daemon that this rank has seen the abort. Return: 0, CALL_ANEW or fatal. */
int call_acknowledge_abort(struct call *call, uint32_t attempt);

/* ---- for on_break(): without reconnecting, and without recording ---- */

/* Sends packed packets. Return: 0, CALL_SAID_WHY, CALL_BROKEN or fatal. */
int call_transmit(struct call *call, const struct frame_packet *packets, size_t n_packets);

/* Packs and sends a request. Return: as call_transmit(). */
int call_say(struct call *call, const struct request *request);

/* Receives an answer. until_ms: the deadline; -1: none. Return: 0, CALL_BROKEN or fatal. */
int call_receive(struct call *call, int64_t until_ms, struct reply *reply);

/* Waits for a moment. Return: 0 or fatal. */
int call_pause(struct call *call, int64_t ms);

struct call_text {
    char bytes[WIRE_MAX_TEXT_BYTES + 1];
};

/* Return: text, or "" for NULL; or a cut copy in room if text is too long for a message. */
const char *call_fit_text(struct call_text *room, const char *text);
