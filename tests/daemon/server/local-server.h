/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A whole server inside a test, and clients that speak to it by hand. The loop runs only while a test waits for
 * something, so the test controls the order of all messages and replies.
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
    uv_timer_t clock; /* of the server's loop, which closes it */
    unsigned n_turns;
};

struct client {
    struct local *local;
    struct session *session; /* the server's side; NULL: connected through the socket; stale once closed */
    int fd;
    struct wire_arena arena; /* of the last reply */
    struct frame_buffer in;
    struct reply reply;
};

/* Beside this process's: may connect; may change the job as well. Others may not connect. */
enum { LOCAL_ALLOWED_UID = 54322, LOCAL_ADMIN_UID = 54323 };

/* A job of n_ranks, nothing logged; more is appended to its configuration. */
void local_start(struct local *local, unsigned n_ranks, const char *more);
void local_stop(struct local *local);
/* One turn of the loop: waits for the next event, a tick at the latest. Fails a test that has taken far too many. */
void local_turn(struct local *local);

/* A pair of sockets, one of which the server is given. */
void client_open(struct client *c, struct local *local);
/* As a user with no group that counts. */
void client_open_as(struct client *c, struct local *local, uid_t uid);
/* Through the listening socket. */
void client_connect(struct client *c, struct local *local);
void client_close(struct client *c);

/* Return: 0, or FRAME_EOF when the server has closed. */
int client_say(struct client *c, const struct request *request);
void client_say_type(struct client *c, enum request_type type); /* of those without fields */

enum { CLIENT_CLOSED = -1, CLIENT_SILENCE = 0 };

/* Does not wait. Return: the type of the next reply, CLIENT_SILENCE or CLIENT_CLOSED. */
int client_look(struct client *c);
/* As client_look(), but runs the loop until it is not CLIENT_SILENCE. */
int client_hear(struct client *c);
void client_expect(struct client *c, enum reply_type type);
void client_expect_closed(struct client *c);
/* Expects a refusal of this code, with part in its text, that says that the connection is closed; then its end. */
void client_expect_dropped(struct client *c, unsigned code, const char *part);

/* Sends Hello and expects Welcome. */
void client_hello(struct client *c, enum wire_role role, unsigned rank);
struct request hello_request(enum wire_role role, unsigned rank, uint64_t incarnation);
/* Hello, a model of one parameter, Form, Ready: for a job of one rank. */
void client_form(struct client *c);
void client_declare(struct client *c);
