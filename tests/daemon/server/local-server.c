/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/daemon/server/local-server.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <syslog.h>

#include "core/base/base.h"
#include "core/base/log.h"

/* No test needs more turns. A timer ends each turn, because an idle server would sleep. */
enum { MAX_TURNS = 400, TURN_MS = 50 };

/* ---- the server ---------------------------------------------------------------------------------------- */

static void on_clock(uv_timer_t *clock)
{
    (void)clock;
}

static void start_clock(struct local *local)
{
    assert_int_equal(uv_timer_init(server_service(local->server)->loop, &local->clock), 0);
    assert_int_equal(uv_timer_start(&local->clock, on_clock, TURN_MS, TURN_MS), 0);
}

void local_start(struct local *local, unsigned n_ranks, const char *more)
{
    static const char format[] = "job: local\n"
                                 "listen: {socket: %s, allow_users: [\"%u\"], admin_users: [\"%u\"]}\n"
                                 "world: {size: %u}\n"
                                 "threads: 1\n"
                                 "%s";
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    char text[1024], why[256];
    int r;

    *local = (struct local){.folder = "/tmp/zerod-test-XXXXXX"};
    assert_non_null(mkdtemp(local->folder));
    snprintf(local->socket, sizeof(local->socket), "%s/socket", local->folder);
    snprintf(text, sizeof(text), format, local->socket, LOCAL_ALLOWED_UID, LOCAL_ADMIN_UID, n_ranks, more);
    r = config_load_string(&local->config, &(struct config_source){.text = {"f.yaml", text, strlen(text)}}, &problems);
    if (r != 0)
        config_problems_print(stderr, &problems);
    assert_int_equal(r, 0);
    config_problems_deinit(&problems);
    log_init("local", LOG_EMERG);
    if (server_new(&local->server, local->config, why, sizeof(why)) != 0)
        fail_msg("%s", why);
    start_clock(local);
}

void local_stop(struct local *local)
{
    server_free(local->server);
    config_free(local->config);
    assert_int_equal(rmdir(local->folder), 0); /* the folder is empty */
}

void local_turn(struct local *local)
{
    if (local->n_turns++ == MAX_TURNS)
        fail_msg("what is waited for does not come");
    uv_run(server_service(local->server)->loop, UV_RUN_ONCE);
}

/* ---- clients ------------------------------------------------------------------------------------------- */

static void init(struct client *c, struct local *local)
{
    *c = (struct client){.local = local, .fd = -1, .in = FRAME_BUFFER_NULL, .arena = WIRE_ARENA_NULL};
    assert_int_equal(wire_arena_init(&c->arena), 0);
    assert_int_equal(frame_buffer_init(&c->in), 0);
}

void client_open(struct client *c, struct local *local)
{
    int pair[2];

    init(c, local);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
    c->fd = pair[0];
    assert_int_equal(session_new(&c->session, server_service(local->server), pair[1]), 0);
}

void client_open_as(struct client *c, struct local *local, uid_t uid)
{
    client_open(c, local);
    c->session->peer.uid = uid;
    c->session->peer.gid = uid;
    c->session->peer.n_groups = 0;
}

void client_connect(struct client *c, struct local *local)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};

    init(c, local);
    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", local->socket);
    c->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    assert_true(c->fd >= 0);
    assert_int_equal(connect(c->fd, (struct sockaddr *)&sa, sizeof(sa)), 0);
}

void client_close(struct client *c)
{
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
    frame_buffer_deinit(&c->in);
    wire_arena_deinit(&c->arena);
}

int client_say(struct client *c, const struct request *request)
{
    static uint8_t buffer[FRAME_MAX_BYTES];
    struct wire_arena arena;
    int n, r;

    assert_int_equal(wire_arena_init(&arena), 0);
    n = wire_pack_request(&arena, request, buffer, sizeof(buffer));
    wire_arena_deinit(&arena);
    assert_true(n > 0);
    r = frame_send(c->fd, buffer, (size_t)n, NULL, 0);
    if (r != FRAME_EOF)
        assert_int_equal(r, 0);
    return r;
}

void client_say_type(struct client *c, enum request_type type)
{
    assert_int_equal(client_say(c, &(struct request){.type = type}), 0);
}

int client_look(struct client *c)
{
    char why[WIRE_WHY_BYTES];
    int r = frame_receive_fds(c->fd, &c->in);

    if (r == FRAME_AGAIN)
        return CLIENT_SILENCE;
    if (r == FRAME_EOF || r == -ECONNRESET)
        return CLIENT_CLOSED;
    assert_int_equal(r, 0);
    assert_int_equal(wire_unpack_reply(&c->arena, c->in.data, c->in.n_bytes, &c->reply, why, sizeof(why)), 0);
    return (int)c->reply.type;
}

int client_hear(struct client *c)
{
    int got = client_look(c);

    while (got == CLIENT_SILENCE) {
        local_turn(c->local);
        got = client_look(c);
    }
    return got;
}

static const char *word(int got)
{
    return got == CLIENT_CLOSED ? "the end" : got == CLIENT_SILENCE ? "nothing" : reply_type_name((enum reply_type)got);
}

void client_expect(struct client *c, enum reply_type type)
{
    int got = client_hear(c);

    if (got != (int)type)
        fail_msg("expected %s, got %s\n%s", reply_type_name(type), word(got),
                 got == REPLY_REFUSED ? c->reply.refused.diagnostic.text : "");
}

void client_expect_closed(struct client *c)
{
    int got = client_hear(c);

    if (got != CLIENT_CLOSED)
        fail_msg("expected the end, got %s\n%s", word(got),
                 got == REPLY_REFUSED ? c->reply.refused.diagnostic.text : "");
}

void client_expect_dropped(struct client *c, unsigned code, const char *part)
{
    const struct wire_diagnostic *d = &c->reply.refused.diagnostic;

    client_expect(c, REPLY_REFUSED);
    if (d->code != code || !strstr(d->text, part))
        fail_msg("expected E%u with \"%s\", got\n%s", code, part, d->text);
    assert_true(c->reply.refused.closing);
    client_expect_closed(c);
}

/* ---- the right way ------------------------------------------------------------------------------------- */

struct request hello_request(enum wire_role role, unsigned rank, uint64_t incarnation)
{
    return (struct request){
        .type = REQUEST_HELLO,
        .hello = {.version_min = WIRE_VERSION,
                  .version_max = WIRE_VERSION,
                  .role = role,
                  .rank = rank,
                  .incarnation = incarnation,
                  .client = "test"},
    };
}

void client_hello(struct client *c, enum wire_role role, unsigned rank)
{
    static uint64_t incarnation;
    struct request request = hello_request(role, rank, ++incarnation);

    assert_int_equal(client_say(c, &request), 0);
    client_expect(c, REPLY_WELCOME);
}

void client_declare(struct client *c)
{
    static const uint64_t shape[] = {100};
    static const struct layout_decl decl = {
        .name = "weight", .name_len = 6, .trainable = true, .n_dims = 1, .shape = shape};

    client_say(c, &(struct request){.type = REQUEST_DECLARE, .declare = {.params = &decl, .n_params = 1}});
}

void client_form(struct client *c)
{
    client_hello(c, WIRE_ROLE_TRAINER, 0);
    client_declare(c);
    client_say(c, &(struct request){.type = REQUEST_FORM, .form = {.n_params = 1}});
    client_expect(c, REPLY_FORMED);
    client_say_type(c, REQUEST_READY);
    client_expect(c, REPLY_DONE);
}
