/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The conversation with the daemon: requests that are sent, answers that are waited for, and the error that ended it.
 * A fatal error is sticky: call_check() returns it from then on. A refusal is not: the daemon repeats it itself.
 *
 * Pushes may be held for a moment, so that several travel with one system call. The daemon sees in the ring which ones
 * are held, so that it does not count on a rank that hangs; without a place to show them no push is held.
 *
 * A connection that breaks is a pause, because the next daemon takes over what this one knew. on_break() connects again
 * and sends what that daemon has not received (reconnect.c); then the call continues. Recorded requests are sent from
 * copies, which are kept until an answer proves that the daemon has received them. A request that is not recorded is
 * sent again by the call that waits for its answer. If the daemon has said why it closes the connection, or if it lives
 * and has closed this connection alone, that is the end.
 *
 * Outcomes: 0; ZEROD_REFUSED or ZEROD_ABORTED; a negative sticky error. One thread at a time.
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
    CALL_SAID_WHY = 1, /* of a sending: the daemon has hung up, and an answer that says why can be received */
    CALL_BROKEN = 4,   /* without mending: the connection has ended, and nothing can be received */
    CALL_ANEW = 5,     /* inside zerod_form(): the next daemon knows nothing of this rank; the forming begins again */
};

enum {
    HELD_RUNS = 8, /* picked: buckets whose parameters take turns, as those with and without weight decay do */
};

/* Held pushes that differ in their parameter alone: one message. */
struct held_run {
    struct request_push first;
    uint32_t others[HELD_PUSHES - 1];
    uint32_t n_others;
};

struct call {
    int fd;                     /* owned; -1: none. A next connection has the same number */
    struct sockaddr_un address; /* of the daemon */
    bool *mine;                 /* owned: a page that a forked child finds wiped */
    int fatal;                  /* 0, or the sticky -errno */
    int timeout_ms;             /* of an answer; 0: none */
    bool left;                  /* zerod_leave() has succeeded */
    int (*interrupted)(void *arg);
    void *interrupted_arg;

    /* Called when the daemon has aborted the step, before the abort is acknowledged. */
    void (*on_abort)(void *arg, const struct wire_position *position);
    void *on_abort_arg;

    /* Called when the connection has broken. Return: 0, the next daemon has all that was sent; CALL_ANEW; or fatal. If
     * it is NULL, or reattach_ms is 0, a broken connection is the end. */
    int (*on_break)(void *arg);
    void *on_break_arg;
    uint64_t reattach_ms;     /* how long to try, as the daemon said */
    int64_t down_ms;          /* how long there was no connection since the last answer */
    int64_t mend_until_ms;    /* while on_break() runs, else 0 */
    int64_t until_ms;         /* of the wait that broke; -1: none */
    uint32_t n_mends;         /* how often the next daemon got all that was sent */
    bool waits;               /* for the answer of the last recorded request */
    bool owes;                /* it was a Step whose decision has come: nothing may be sent before call_settle() */
    struct recorded recorded; /* requests */

    const char *waits_for; /* name of the request that is sent, or whose answer is waited for; static */
    double loss_scale;     /* as the last answer that had one said */
    struct client_error error;
    struct frame_buffer in; /* the last answer, with its descriptors */
    struct wire_arena arena;
    uint8_t *out;                          /* FRAME_MAX_BYTES */
    struct held_pushes *shown;             /* where the daemon sees what is held; NULL: nowhere; not owned */
    struct held_run runs[HELD_RUNS];
    size_t n_runs;
    size_t n_held; /* in all runs */
    uint64_t n_held_grad_bytes;
};

/* Buffers only; the caller connects fd. Return: 0 or -ENOMEM, without a text. */
int call_init(struct call *call);
void call_deinit(struct call *call);

/* Return: 0; -ECHILD in a forked child; or the sticky error. */
int call_check(const struct call *call);

/* Notes an error; call_fatal() makes it sticky. Return: status. */
int call_fail(struct call *call, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));
int call_fatal(struct call *call, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Milliseconds of CLOCK_MONOTONIC. */
int64_t call_now_ms(void);

/* Notes that the connection has ended for good. Return: fatal. */
int call_lost(struct call *call);

/*
 * Sends the held pushes and then the request, without waiting for an answer. Return: 0; CALL_SAID_WHY; CALL_ANEW; or a
 * sticky error. If the connection breaks, also while the held pushes are sent, a request that is not recorded is lost:
 * its sender must not mind, because on_break() tells the next daemon what it needs to know.
 */
int call_send(struct call *call, const struct request *request);

/*
 * As call_send(), for a push that others follow at once. n_grad_bytes: of gradients that were copied for it. Held
 * pushes may be sent in another order; their sequences are given to them anew, in the order in which they are sent.
 */
int call_hold(struct call *call, const struct request_push *push, uint64_t n_grad_bytes);

/* Sends the held pushes. Return: as call_send(). */
int call_flush(struct call *call);

/*
 * Sends a request and waits for its answer, of that type. On ZEROD_ABORTED the abort has been acknowledged. What reply
 * points to, and the descriptors in call->in, live until the next call.
 * Return: as above, or CALL_ANEW.
 */
int call_ask(struct call *call, const struct request *request, enum reply_type type, struct reply *reply);

/* Waits for the answer that the daemon owes. Return: as call_ask(). */
int call_settle(struct call *call, struct reply *reply);

/* Milliseconds of CLOCK_MONOTONIC until which an answer may take that is waited for from now on; -1: for ever. */
int64_t call_deadline(const struct call *call);

/*
 * Sleeps for a tenth of a millisecond. ask_ms: when the caller is asked next whether it was interrupted;
 * call_watch() keeps it, and it is 0 before the first sleep. Return: 0; 1, something can be received, or the connection
 * is broken; or fatal: interrupted, or until_ms has passed.
 */
int call_watch(struct call *call, int64_t until_ms, int64_t *ask_ms);

/* Tells the daemon that this rank has seen the abort. Return: 0, CALL_ANEW or fatal. */
int call_acknowledge_abort(struct call *call, uint32_t attempt);

/* ---- for on_break(): without mending, and without recording ---- */

/* Sends packets that are packed. Return: 0, CALL_SAID_WHY, CALL_BROKEN or fatal. */
int call_transmit(struct call *call, const struct frame_packet *packets, size_t n_packets);

/* Packs and sends a request. Return: as call_transmit(). */
int call_say(struct call *call, const struct request *request);

/* Receives an answer. until_ms: -1: waits for ever. Return: 0, CALL_BROKEN or fatal. */
int call_receive(struct call *call, int64_t until_ms, struct reply *reply);

/* Waits for a moment. Return: 0 or fatal. */
int call_pause(struct call *call, int64_t ms);

struct call_text {
    char bytes[WIRE_MAX_TEXT_BYTES + 1];
};

/* Return: text (NULL is ""), or as much of it as a message may hold, in room. */
const char *call_fit_text(struct call_text *room, const char *text);
