/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reconnects after a break: connects and sends Hello until a daemon answers. If that daemon has adopted the run, it is
 * sent the strings, the gathered parameters of stage 3, and the recorded requests that it does not have. If that daemon
 * has not adopted the run, and zerod_form() has not returned, the job is formed again. After zerod_form() a lost run is
 * fatal.
 *
 * A break during a reconnect starts the reconnect again. The times without a connection add up until an answer comes,
 * so that a request that kills every daemon ends with a timeout.
 */

#include "client/lib/reconnect.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/lib/handle.h"
#include "client/lib/api-weights.h"
#include "core/base/base.h"
#include "core/diagnosis/diagnosis.h"
#include "core/wire/frame.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

enum {
    FIRST_PAUSE_MS = 10,
    MAX_PAUSE_MS = 250,
    /* Picked: how long the socket may be absent or closed before the job ends. A daemon that is stopped for good
     * removes its socket. A service manager closes the socket if it starts no other daemon; otherwise it keeps the
     * socket open until the next daemon listens. A daemon that a person starts creates the socket again within this
     * time. */
    ABSENT_MS = 2000,
};

/* ---- hello and welcome --------------------------------------------------------------------------------- */

static char *copy_text(const char *text)
{
    return strdup(text ? text : "");
}

int resume_init(struct zerod *c, const struct zerod_options *options)
{
    const char *run_id = options->run_id ? options->run_id : getenv("ZEROD_RUN_ID");
    const char *restarts_left = getenv("ZEROD_RESTARTS_LEFT");

    c->wants.run_id = copy_text(run_id);
    c->wants.client = copy_text(options->client ? options->client : program_invocation_short_name);
    c->wants.optimizer = copy_text(options->optimizer);
    c->wants.momentum = options->momentum;
    c->wants.on_duplicate = (enum wire_on_duplicate)options->on_duplicate;
    c->wants.is_last = restarts_left && strcmp(restarts_left, "0") == 0;
    return c->wants.run_id && c->wants.client && c->wants.optimizer ? 0 : -ENOMEM;
}

void resume_deinit(struct zerod *c)
{
    free(c->wants.run_id);
    free(c->wants.client);
    free(c->wants.optimizer);
    free(c->run_id);
    free(c->optimizer);
}

/* Return: true if the rank has mapped the last daemon's memory, so that it continues with the next daemon. */
static bool resumes(const struct zerod *c)
{
    return c->layout != NULL;
}

struct request_hello resume_hello(const struct zerod *c)
{
    return (struct request_hello){
        .version_min = WIRE_VERSION,
        .version_max = WIRE_VERSION,
        .role = WIRE_ROLE_TRAINER,
        .rank = c->rank,
        .run_id = c->wants.run_id,
        .incarnation = c->incarnation,
        .on_duplicate = c->wants.on_duplicate,
        .client = c->wants.client,
        .optimizer = c->wants.optimizer,
        .momentum = c->wants.momentum,
        .resumes = resumes(c),
        .n_sent = resumes(c) ? c->call.recorded.n_sent : 0,
        .waits = resumes(c) && c->call.waits,
        .is_last = c->wants.is_last,
        .again = c->flags & (ZEROD_AGAIN | ZEROD_ANEW),
        .anew = c->flags & ZEROD_ANEW,
    };
}

int resume_keep_welcome(struct zerod *c, const struct reply_welcome *welcome)
{
    c->welcome = *welcome;
    if (!c->run_id) /* later, because the caller has pointers to these strings */
        c->run_id = strdup(welcome->run_id);
    if (!c->optimizer)
        c->optimizer = strdup(welcome->optimizer);
    c->welcome.server = NULL;
    c->welcome.run_id = c->run_id;
    c->welcome.optimizer = c->optimizer;
    c->call.mend.reattach_ms = welcome->reattach_ms;
    return c->run_id && c->optimizer ? 0 : call_fatal(&c->call, -ENOMEM, "out of memory");
}

/* ---- connecting again ---------------------------------------------------------------------------------- */

struct attempts {
    int64_t pause_ms;
    int64_t absent_ms; /* since when the socket is absent or closed; 0: it is not */
};

/* Connects again, and keeps the number of the descriptor. Return: 0, CALL_BROKEN (try again) or fatal. */
static int connect_again(struct call *call, struct attempts *attempts)
{
    _cleanup_close_ int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd >= 0 && connect(fd, (const struct sockaddr *)&call->address, sizeof(call->address)) == 0) {
        attempts->absent_ms = 0;
        return dup3(fd, call->fd, O_CLOEXEC) < 0 ? CALL_BROKEN : 0;
    }
    if (fd < 0 || (errno != ENOENT && errno != ECONNREFUSED))
        attempts->absent_ms = 0;
    else if (attempts->absent_ms == 0)
        attempts->absent_ms = call_now_ms();
    else if (call_now_ms() - attempts->absent_ms >= ABSENT_MS)
        return call_lost(call);
    return CALL_BROKEN;
}

/*
 * Handles a refusal of Hello. Hello is sent again if the daemon has not closed the last connection yet (E_RANK_TAKEN),
 * or waits until a person repairs the state that it cannot adopt (E_HELD). Return: CALL_BROKEN (try again) or fatal.
 */
static int hello_refused(struct call *call, const struct attempts *attempts, const struct reply_refused *refusal)
{
    bool may_change = refusal->diagnostic.code == E_RANK_TAKEN || refusal->diagnostic.code == E_HELD;

    if (may_change && call_now_ms() + attempts->pause_ms < call->mend.until_ms)
        return CALL_BROKEN;
    call->fatal = -ECONNABORTED;
    error_from_diagnostic(&call->error, call->fatal, &refusal->diagnostic);
    return call->fatal;
}

/* Sends Hello. Return: 0 if *reply is Welcome; CALL_BROKEN; or fatal. */
static int greet(struct zerod *c, const struct attempts *attempts, struct reply *reply)
{
    struct call *call = &c->call;
    int r = call_say(call, &(struct request){.type = REQUEST_HELLO, .hello = resume_hello(c)});

    if (r == 0 || r == CALL_SAID_WHY)
        r = call_receive(call, call->mend.until_ms, reply);
    if (r != 0)
        return r;
    if (reply->type == REPLY_REFUSED)
        return hello_refused(call, attempts, &reply->refused);
    if (reply->type != REPLY_WELCOME)
        return call_fatal(call, -EPROTO, "zerod answered Hello with %s", reply_type_name(reply->type));
    return 0;
}

/* ---- the next daemon ----------------------------------------------------------------------------------- */

static int state_lost(struct zerod *c)
{
    return call_fatal(&c->call, -ESTALE,
                      "zerod was started anew and has lost the state of the run, which had reached step %llu: nobody "
                      "kept the state when the last daemon ended. Start the ranks again from the last checkpoint. To "
                      "keep the state of later runs, use zerodrun or the systemd unit, which restart the daemon with "
                      "its state, or persist: in the configuration",
                      (unsigned long long)c->position.step);
}

static bool is_same_job(const struct reply_welcome *a, const struct reply_welcome *b)
{
    return a->world_size == b->world_size && a->stage == b->stage && a->on_duplicate == b->on_duplicate &&
           a->private_weights == b->private_weights && strcmp(a->optimizer, b->optimizer) == 0 && a->fp16 == b->fp16 &&
           a->accumulation == b->accumulation && a->cuda == b->cuda;
}

/* Prepares to form the job again with a daemon that has not adopted the run. Return: CALL_ANEW or fatal. */
static int form_anew(struct zerod *c, const struct reply_welcome *welcome)
{
    int r;

    if (!is_same_job(&c->welcome, welcome))
        return call_fatal(&c->call, -ESTALE,
                          "zerod was started anew with another configuration while the job was formed; start the ranks "
                          "again");
    recorded_drop(&c->call.recorded);
    c->call.recorded.n_sent = 0; /* the new daemon has received no recorded requests */
    r = resume_keep_welcome(c, welcome);
    return r < 0 ? r : CALL_ANEW;
}

/* Sends the kept packets of requests with numbers above n_received again, unchanged. */
static int send_recorded(struct call *call, uint64_t n_received)
{
    const struct recorded *recorded = &call->recorded;
    uint64_t number = recorded->n_sent - recorded->n_kept;
    struct frame_packet packets[FRAME_BATCH];
    size_t at = 0, n = 0;
    uint32_t n_bytes;
    const uint8_t *data;
    int r = 0;

    while (r == 0 && (data = recorded_next(recorded, &at, &n_bytes))) {
        if (++number <= n_received)
            continue;
        packets[n++] = (struct frame_packet){.data = data, .n_bytes = n_bytes};
        if (n < FRAME_BATCH)
            continue;
        r = call_transmit(call, packets, n);
        n = 0;
    }
    return r == 0 && n > 0 ? call_transmit(call, packets, n) : r;
}

static int send_again(struct zerod *c, uint64_t n_received)
{
    const struct recorded *recorded = &c->call.recorded;
    int r;

    if (n_received > recorded->n_sent || n_received < recorded->n_sent - recorded->n_kept)
        return call_fatal(&c->call, -EPROTO,
                          "zerod has received %llu requests of this rank, expected %llu to %llu: the daemon that was "
                          "started anew has the state of another moment",
                          (unsigned long long)n_received, (unsigned long long)(recorded->n_sent - recorded->n_kept),
                          (unsigned long long)recorded->n_sent);
    r = strings_say_all(&c->strings, &c->call);
    if (r == 0)
        r = weights_say_held(c);
    if (r == 0)
        r = send_recorded(&c->call, n_received);
    return r == CALL_SAID_WHY ? 0 : r; /* the call that continues receives the reason */
}

/* Return: as on_break(), or CALL_BROKEN (try again). */
static int try_once(struct zerod *c, struct attempts *attempts)
{
    struct reply reply;
    int r = connect_again(&c->call, attempts);

    if (r == 0 && c->connecting) /* say_hello() sends Hello again */
        return 0;
    if (r == 0)
        r = greet(c, attempts, &reply);
    if (r != 0)
        return r;
    if (reply.welcome.resumed && resumes(c))
        return send_again(c, reply.welcome.n_received);
    return c->forming ? form_anew(c, &reply.welcome) : state_lost(c);
}

static int64_t mend_until(const struct call *call, int64_t broken_ms)
{
    int64_t until_ms = broken_ms + (int64_t)MIN(call->mend.reattach_ms, (uint64_t)INT32_MAX * 1000);

    return call->mend.wait_until_ms < 0 ? until_ms : MIN(until_ms, call->mend.wait_until_ms);
}

int resume_after_break(void *arg)
{
    struct attempts attempts = {.pause_ms = FIRST_PAUSE_MS};
    struct zerod *c = arg;
    struct call *call = &c->call;
    int64_t broken_ms = call_now_ms() - call->mend.down_ms;
    const char *waits_for = call->waits_for;
    int r;

    if (!resumes(c) && !c->forming && !c->connecting)
        return call_lost(call);
    call->mend.until_ms = mend_until(call, broken_ms);
    while ((r = try_once(c, &attempts)) == CALL_BROKEN) {
        r = call_pause(call, attempts.pause_ms);
        if (r < 0)
            break;
        attempts.pause_ms = MIN(attempts.pause_ms * 2, (int64_t)MAX_PAUSE_MS);
    }
    call->mend.until_ms = 0;
    call->mend.down_ms = call_now_ms() - broken_ms;
    call->waits_for = waits_for;
    return r;
}
