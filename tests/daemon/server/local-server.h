/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A whole server inside a test, and clients that exchange single messages with it. The loop runs only while a test
 * waits for something, so the test controls the order of all messages and replies.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core/config/config.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"
#include "core/wire/wire.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "daemon/job/model/model.h"
#include "daemon/server/server.h"
#include "daemon/server/service.h"
#include "daemon/server/session.h"

struct local {
    char folder[64], socket[96];
    struct config *config;
    struct server *server;
    uv_timer_t clock; /* in the server's loop; closed by the server */
    unsigned n_turns;
};

struct client {
    struct local *local;
    struct session *session; /* NULL if connected through the socket; invalid after the session's end */
    int fd;
    struct wire_arena arena; /* has the last reply */
    struct frame_buffer in;
    struct reply reply;
};

/*
 * Users that may connect, apart from the test's own. Only LOCAL_ADMIN_UID may change the job. Other users may not
 * connect.
 */
enum { LOCAL_ALLOWED_UID = 54322, LOCAL_ADMIN_UID = 54323 };

/* Starts a server for a job of n_ranks, without a log. `more` is appended to its configuration. */
void local_start(struct local *local, unsigned n_ranks, const char *more);
void local_stop(struct local *local);
/* Turns the loop once, which waits for an event or a tick. Fails the test after too many turns. */
void local_turn(struct local *local);

/* Connects a client through a pair of sockets, one of which the server gets. */
void client_open(struct client *c, struct local *local);
/* Like client_open(), as another user, without groups that the configuration names. */
void client_open_as(struct client *c, struct local *local, uid_t uid);
/* Connects a client through the listening socket. */
void client_connect(struct client *c, struct local *local);
void client_close(struct client *c);

/* Sends a request. Return: 0, or FRAME_EOF if the server has closed the connection. */
int client_say(struct client *c, const struct request *request);
void client_say_type(struct client *c, enum request_type type); /* for types without fields */

enum { CLIENT_CLOSED = -1, CLIENT_SILENCE = 0 };

/* Reads the next reply without waiting. Return: its type, CLIENT_SILENCE or CLIENT_CLOSED. */
int client_look(struct client *c);
/* Like client_look(), but runs the loop until the result is not CLIENT_SILENCE. */
int client_hear(struct client *c);
void client_expect(struct client *c, enum reply_type type);
void client_expect_closed(struct client *c);
/*
 * Expects a refusal with this code, with part in its text, that announces the connection's end. Then expects the end.
 */
void client_expect_dropped(struct client *c, unsigned code, const char *part);

/* Sends Hello and expects Welcome. */
void client_hello(struct client *c, enum wire_role role, unsigned rank);
struct request hello_request(enum wire_role role, unsigned rank, uint64_t incarnation);
/* Forms a job of one rank with a model of one parameter: Hello, Declare, Form, Ready. */
void client_form(struct client *c);
void client_declare(struct client *c);
