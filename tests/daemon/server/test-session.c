/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Connections to a whole server, from accept to close: who may connect and for how long, what happens to others when
 * one client misbehaves, and what a closed connection leaves behind.
 */

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "core/base/base.h"
#include "daemon/job/model/rank.h"
#include "daemon/server/places.h"
#include "daemon/server/questions.h"
#include "tests/daemon/server/local-server.h"
#include "tests/group.h"

enum { NOBODY = 54321 };

/* Errors that the next calls of the two functions below return. The linker takes these functions instead of libc's. */
static int receive_error, send_error;
static unsigned n_receive_errors, n_send_errors;

int recvmmsg(int fd, struct mmsghdr *messages, unsigned n, int flags, struct timespec *timeout)
{
    if (n_receive_errors > 0) {
        n_receive_errors--;
        errno = receive_error;
        return -1;
    }
    return (int)syscall(SYS_recvmmsg, fd, messages, n, flags, timeout);
}

ssize_t send(int fd, const void *data, size_t n_bytes, int flags)
{
    if (n_send_errors > 0) {
        n_send_errors--;
        errno = send_error;
        return -1;
    }
    return syscall(SYS_sendto, fd, data, n_bytes, flags, NULL, 0);
}

static struct request admin(const char *command)
{
    return (struct request){.type = REQUEST_ADMIN, .admin = {.command = command}};
}

/* Asserts that the server still answers. */
static void check_alive(struct local *local)
{
    struct request request = admin("ranks");
    struct client c;

    client_open(&c, local);
    client_hello(&c, WIRE_ROLE_CONTROL, 0);
    client_say(&c, &request);
    client_expect(&c, REPLY_ADMIN_PART);
    assert_true(c.reply.admin_part.last);
    client_close(&c);
}

static void wait_until_free(struct local *local, unsigned rank)
{
    while (server_service(local->server)->job->ranks[rank].peer)
        local_turn(local);
}

/* ---- who is let in ------------------------------------------------------------------------------------- */

static void test_through_the_socket(void **userdata)
{
    struct local local;
    struct client c;

    (void)userdata;
    local_start(&local, 1, "");
    client_connect(&c, &local);
    client_hello(&c, WIRE_ROLE_TRAINER, 0);
    assert_int_equal(server_service(local.server)->job->ranks[0].kept.pid, getpid());
    assert_int_equal(server_service(local.server)->job->ranks[0].kept.uid, geteuid());
    client_close(&c);
    wait_until_free(&local, 0);
    local_stop(&local);
}

static void test_not_allowed(void **userdata)
{
    struct request trainer = hello_request(WIRE_ROLE_TRAINER, 0, 1), control = hello_request(WIRE_ROLE_CONTROL, 0, 1);
    struct local local;
    struct client c;

    (void)userdata;
    local_start(&local, 1, "");
    client_open_as(&c, &local, NOBODY);
    client_say(&c, &trainer);
    client_expect_dropped(&c, E_NOT_ALLOWED, "54321");
    client_close(&c);
    client_open_as(&c, &local, NOBODY);
    client_say(&c, &control);
    client_expect_dropped(&c, E_NOT_ALLOWED, "listen.allow_users");
    client_close(&c);
    assert_null(server_service(local.server)->job->ranks[0].peer);
    local_stop(&local);
}

/* A user who may train and look, but not change the job. */
static void test_allowed_but_no_admin(void **userdata)
{
    struct request drain = admin("drain"), status = admin("status");
    struct local local;
    struct client c;

    (void)userdata;
    local_start(&local, 1, "");
    client_open(&c, &local);
    client_hello(&c, WIRE_ROLE_CONTROL, 0);
    c.session->peer.uid = c.session->peer.gid = NOBODY;
    c.session->peer.n_groups = 0;
    client_say(&c, &status);
    client_expect(&c, REPLY_ADMIN_PART);
    assert_int_equal(c.reply.admin_part.exit_code, 0);
    client_say(&c, &drain);
    client_expect(&c, REPLY_ADMIN_PART);
    assert_int_not_equal(c.reply.admin_part.exit_code, 0);
    client_expect_closed(&c);
    assert_false(server_service(local.server)->job->kept.draining);
    client_close(&c);
    local_stop(&local);
}

/* ---- memory of the kernel ------------------------------------------------------------------------------ */

/* A connection is kept if the kernel has no memory for a moment. */
static void test_short_of_memory(void **userdata)
{
    static const int errors[] = {ENOMEM, ENOBUFS};
    struct local local;
    struct client c;

    (void)userdata;
    local_start(&local, 1, "");
    for (size_t i = 0; i < ARRAY_SIZE(errors); i++) {
        struct request request = admin("ranks");

        client_open(&c, &local);
        client_hello(&c, WIRE_ROLE_CONTROL, 0);
        client_say(&c, &request);
        receive_error = send_error = errors[i];
        n_receive_errors = n_send_errors = 3;
        client_expect(&c, REPLY_ADMIN_PART);
        assert_true(c.reply.admin_part.last);
        assert_int_equal(n_receive_errors + n_send_errors, 0);
        client_close(&c);
    }
    local_stop(&local);
}

/* ---- how many, how long -------------------------------------------------------------------------------- */

static void open_control(struct client *c, struct local *local, uid_t uid)
{
    client_open_as(c, local, uid);
    client_hello(c, WIRE_ROLE_CONTROL, 0);
}

static void expect_no_place(struct local *local, uid_t uid)
{
    struct request hello = hello_request(WIRE_ROLE_CONTROL, 0, 1);
    struct client c;

    client_open_as(&c, local, uid);
    client_say(&c, &hello);
    client_expect_dropped(&c, E_QUOTA, "limits.clients");
    client_close(&c);
}

/* Makes it look as if the client has sent nothing for that long. */
static void be_silent(struct client *c, unsigned seconds)
{
    c->session->quiet_ns -= seconds * UINT64_C(1000000000);
}

static unsigned n_controls(struct local *local)
{
    unsigned n = 0;

    for (const struct session *s = server_service(local->server)->sessions; s; s = s->next)
        n += s->state == SESSION_CONTROL;
    return n;
}

static void test_limit_of_clients(void **userdata)
{
    struct client clients[3], idle[20], trainer;
    struct local local;

    (void)userdata;
    local_start(&local, 1, "limits: {clients: 2}\n");
    for (size_t i = 0; i < ARRAY_SIZE(idle); i++) /* silent connections take no client's place */
        client_connect(&idle[i], &local);
    for (size_t i = 0; i < 2; i++)
        open_control(&clients[i], &local, LOCAL_ALLOWED_UID);
    expect_no_place(&local, LOCAL_ALLOWED_UID);
    client_open(&trainer, &local);
    client_hello(&trainer, WIRE_ROLE_TRAINER, 0); /* ranks have their own places */

    client_close(&clients[0]);
    while (n_controls(&local) == 2)
        local_turn(&local);
    open_control(&clients[2], &local, LOCAL_ALLOWED_UID);
    for (size_t i = 1; i < 3; i++)
        client_close(&clients[i]);
    for (size_t i = 0; i < ARRAY_SIZE(idle); i++)
        client_close(&idle[i]);
    client_close(&trainer);
    local_stop(&local);
}

/* If all clients are of one kind, the one that was silent for longest is dropped. One that has just asked is kept. */
static void test_silent_ones_go_first(void **userdata)
{
    struct request status = admin("status");
    struct client clients[4];
    struct local local;

    (void)userdata;
    local_start(&local, 1, "limits: {clients: 3}\n");
    for (size_t i = 0; i < 3; i++)
        open_control(&clients[i], &local, LOCAL_ALLOWED_UID);
    for (size_t i = 0; i < 3; i++)
        be_silent(&clients[i], i == 1 ? 3 : 2);
    client_say(&clients[0], &status); /* this client is no longer silent */
    client_expect(&clients[0], REPLY_ADMIN_PART);
    open_control(&clients[3], &local, LOCAL_ALLOWED_UID);
    client_expect_closed(&clients[1]);
    client_close(&clients[1]);
    open_control(&clients[1], &local, LOCAL_ALLOWED_UID);
    client_expect_closed(&clients[2]);
    expect_no_place(&local, LOCAL_ALLOWED_UID);
    client_say(&clients[0], &status);
    client_expect(&clients[0], REPLY_ADMIN_PART);
    for (size_t i = 0; i < 4; i++)
        client_close(&clients[i]);
    local_stop(&local);
}

/* Administrators have extra places and replace other users. Root replaces any of them. */
static void test_places_of_administrators(void **userdata)
{
    struct client others[2], admins[PLACES_KEPT + 2], root;
    struct local local;

    (void)userdata;
    local_start(&local, 1, "limits: {clients: 2}\n");
    for (size_t i = 0; i < 2; i++)
        open_control(&others[i], &local, LOCAL_ALLOWED_UID);
    for (size_t i = 0; i < PLACES_KEPT; i++)
        open_control(&admins[i], &local, LOCAL_ADMIN_UID);
    for (size_t i = 0; i < 2; i++)
        assert_int_equal(client_look(&others[i]), CLIENT_SILENCE);
    for (size_t i = 0; i < 2; i++)
        open_control(&admins[PLACES_KEPT + i], &local, LOCAL_ADMIN_UID);
    for (size_t i = 0; i < 2; i++)
        client_expect_closed(&others[i]);
    expect_no_place(&local, LOCAL_ADMIN_UID);
    expect_no_place(&local, LOCAL_ALLOWED_UID);
    open_control(&root, &local, 0);
    for (size_t i = 0; i < 2; i++)
        client_close(&others[i]);
    for (size_t i = 0; i < ARRAY_SIZE(admins); i++)
        client_close(&admins[i]);
    client_close(&root);
    local_stop(&local);
}

/* The test changes the age of the connections, so it does not wait. */
static void test_handshake_timeout(void **userdata)
{
    const uint64_t timeout_ns = UINT64_C(10000) * 1000000;
    struct client silent, young, control, trainer;
    struct local local;

    (void)userdata;
    local_start(&local, 1, "limits: {handshake_timeout: 10s}\n");
    client_open(&silent, &local);
    client_open(&young, &local);
    client_open(&control, &local);
    client_hello(&control, WIRE_ROLE_CONTROL, 0);
    client_open(&trainer, &local);
    client_hello(&trainer, WIRE_ROLE_TRAINER, 0);
    silent.session->accepted_ns -= timeout_ns;
    control.session->accepted_ns -= timeout_ns;
    trainer.session->accepted_ns -= timeout_ns;
    client_expect_closed(&silent); /* without a message, because it may be no zerod client */
    assert_int_equal(client_look(&young), CLIENT_SILENCE);
    assert_int_equal(client_look(&control), CLIENT_SILENCE);
    assert_int_equal(client_look(&trainer), CLIENT_SILENCE);
    be_silent(&control, 11); /* a control that does not ask */
    client_expect_closed(&control);
    assert_int_equal(client_look(&trainer), CLIENT_SILENCE);
    client_hello(&young, WIRE_ROLE_CONTROL, 0);
    client_close(&silent);
    client_close(&young);
    client_close(&control);
    client_close(&trainer);
    local_stop(&local);
}

/* ---- those who go -------------------------------------------------------------------------------------- */

static void test_end_frees_the_rank(void **userdata)
{
    struct local local;
    struct client c;

    (void)userdata;
    local_start(&local, 1, "");
    for (unsigned i = 0; i < 3; i++) {
        client_open(&c, &local);
        client_hello(&c, WIRE_ROLE_TRAINER, 0);
        assert_ptr_equal(server_service(local.server)->job->ranks[0].peer, c.session);
        client_close(&c);
        wait_until_free(&local, 0);
    }
    local_stop(&local);
}

/* If a process connects again, its old connection is closed without a message, and the rank stays attached. */
static void test_reconnect(void **userdata)
{
    struct request hello = hello_request(WIRE_ROLE_TRAINER, 0, 77);
    struct local local;
    struct client old, new;

    (void)userdata;
    local_start(&local, 1, "");
    client_open(&old, &local);
    client_say(&old, &hello);
    client_expect(&old, REPLY_WELCOME);
    client_open(&new, &local);
    client_say(&new, &hello);
    client_expect(&new, REPLY_WELCOME);
    client_expect_closed(&old);
    assert_ptr_equal(server_service(local.server)->job->ranks[0].peer, new.session);
    client_close(&old);
    client_close(&new);
    wait_until_free(&local, 0);
    local_stop(&local);
}

static void test_rank_taken(void **userdata)
{
    struct request hello = hello_request(WIRE_ROLE_TRAINER, 0, 78);
    struct local local;
    struct client first, second;

    (void)userdata;
    local_start(&local, 1, "");
    client_open(&first, &local);
    client_hello(&first, WIRE_ROLE_TRAINER, 0);
    client_open(&second, &local);
    client_say(&second, &hello);
    client_expect_dropped(&second, E_RANK_TAKEN, "held by");
    assert_ptr_equal(server_service(local.server)->job->ranks[0].peer, first.session);
    assert_int_equal(client_look(&first), CLIENT_SILENCE);
    client_close(&first);
    client_close(&second);
    local_stop(&local);
}

/* More packets than the daemon reads at a time from one connection, and fewer than its socket can contain. */
enum { MANY = 150 };

/* Starts a trainer that sends many packets and exits. Its child keeps the connection open until `hold` is closed. */
static pid_t start_trainer(struct local *local, const struct request *last_words, const int *hold)
{
    struct request hello = hello_request(WIRE_ROLE_TRAINER, 0, 5);
    struct request intern = {.type = REQUEST_INTERN, .intern = {.id = 1, .text = "model.py:1"}};
    struct client c;
    pid_t pid = fork();
    char byte;

    if (pid != 0)
        return pid;
    close(hold[1]);
    client_connect(&c, local);
    if (client_say(&c, &hello) != 0)
        _exit(1);
    for (int i = 0; i < MANY; i++)
        if (client_say(&c, &intern) != 0)
            _exit(1);
    if (client_say(&c, last_words) != 0)
        _exit(1);
    if (fork() == 0)
        (void)!read(hold[0], &byte, 1);
    _exit(0);
}

/* A process is dead when it has exited, even if a child has its socket. The packets that it sent before still count. */
static void die_with_a_child(unsigned n_errors)
{
    struct request report = {.type = REQUEST_REPORT, .report = {.code = E_DRIFTED, .detail = "its last words"}};
    struct local local;
    struct job *job;
    siginfo_t info;
    int hold[2], status;
    pid_t pid;

    local_start(&local, 1, "");
    job = server_service(local.server)->job;
    assert_int_equal(pipe(hold), 0);
    pid = start_trainer(&local, &report, hold);
    assert_true(pid > 0);
    close(hold[0]);
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
    receive_error = ENOMEM;
    n_receive_errors = n_errors;
    for (int turn = 0; turn < 20 && job->ranks[0].kept.pid == 0; turn++)
        local_turn(&local);
    assert_int_equal(job->ranks[0].kept.pid, pid);
    wait_until_free(&local, 0);
    assert_int_equal(n_receive_errors, 0);
    assert_non_null(kept_last(&job->diagnostics.kept));
    assert_int_equal(kept_last(&job->diagnostics.kept)->id, 1);
    assert_int_equal(kept_last(&job->diagnostics.kept)->code, E_DRIFTED);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    close(hold[1]);
    local_stop(&local);
}

static void test_death_with_a_child(void **userdata)
{
    (void)userdata;
    die_with_a_child(0);
    die_with_a_child(3); /* three reads fail because the kernel has no memory */
}

/* ---- those who misbehave ------------------------------------------------------------------------------- */

/* Messages behind a faulty one in the same batch are not served. */
static void test_doomed_in_a_batch(void **userdata)
{
    struct request hello = hello_request(WIRE_ROLE_TRAINER, 0, 1);
    struct local local;
    struct client c;

    (void)userdata;
    local_start(&local, 1, "");
    client_open(&c, &local);
    client_say_type(&c, REQUEST_READY);
    client_say(&c, &hello);
    client_say_type(&c, REQUEST_LEAVE);
    client_expect_dropped(&c, E_BAD_MESSAGE, "Ready is not allowed before Hello");
    assert_null(server_service(local.server)->job->ranks[0].peer);
    assert_int_equal(kept_last(&server_service(local.server)->job->diagnostics.kept)->id, 1);
    client_close(&c);
    check_alive(&local);
    local_stop(&local);
}

/* A doomed session is closed before the loop waits again, which frees its rank at once. */
static void test_doomed_frees_the_rank(void **userdata)
{
    struct local local;
    struct client c;

    (void)userdata;
    local_start(&local, 1, "");
    client_open(&c, &local);
    client_hello(&c, WIRE_ROLE_TRAINER, 0);
    session_doom(c.session);
    assert_ptr_equal(server_service(local.server)->job->ranks[0].peer, c.session); /* not during other work */
    sessions_reap(server_service(local.server));
    assert_null(server_service(local.server)->job->ranks[0].peer);
    client_expect_closed(&c);
    client_close(&c);
    local_stop(&local);
}

static void test_bad_packets(void **userdata)
{
    static uint8_t large[FRAME_MAX_BYTES + 1];
    uint8_t packed[256];
    struct request hello = hello_request(WIRE_ROLE_CONTROL, 0, 1);
    struct local local;
    struct wire_arena arena;
    struct client c;
    int n, fd;

    (void)userdata;
    local_start(&local, 1, "");
    client_open(&c, &local);
    assert_int_equal(send(c.fd, large, sizeof(large), MSG_NOSIGNAL), sizeof(large));
    client_expect_dropped(&c, E_BAD_MESSAGE, "more than 131071 bytes");
    client_close(&c);

    assert_int_equal(wire_arena_init(&arena), 0);
    n = wire_pack_request(&arena, &hello, packed, sizeof(packed));
    wire_arena_deinit(&arena);
    assert_true(n > 0);
    client_open(&c, &local);
    fd = dup(c.fd);
    assert_int_equal(frame_send(c.fd, packed, (size_t)n, &fd, 1), 0);
    close(fd);
    client_expect_dropped(&c, E_BAD_MESSAGE, "descriptors");
    client_close(&c);

    client_open(&c, &local);
    assert_int_equal(send(c.fd, "", 0, MSG_NOSIGNAL), 0); /* looks like the end of the connection */
    client_expect_closed(&c);
    client_close(&c);
    check_alive(&local);
    local_stop(&local);
}

/* A slow reader gets all answers in order. */
static void test_slow_reader(void **userdata)
{
    struct request commands[] = {admin("ranks"), admin("there-is-no-such-command")};
    struct local local;
    struct client c;

    (void)userdata;
    local_start(&local, 1, "");
    client_open(&c, &local);
    client_hello(&c, WIRE_ROLE_CONTROL, 0);
    assert_int_equal(setsockopt(c.session->fd, SOL_SOCKET, SO_SNDBUF, &(int){4096}, sizeof(int)), 0);
    for (unsigned i = 0; i < 60; i++)
        client_say(&c, &commands[i % 2]);
    while (c.session->question.state != QUESTION_BLOCKED) /* until the socket is full */
        local_turn(&local);
    for (unsigned i = 0; i < 60; i++) {
        client_expect(&c, REPLY_ADMIN_PART);
        assert_int_equal(c.reply.admin_part.exit_code == 0, i % 2 == 0);
    }
    assert_int_equal(client_look(&c), CLIENT_SILENCE);
    assert_true(frame_queue_is_empty(&c.session->queue));
    client_close(&c);
    local_stop(&local);
}

/*
 * A client that never reads costs the daemon one answer, then it is dropped. The test changes the clock, so it does not
 * wait.
 */
static void test_never_reads(void **userdata)
{
    struct request report = admin("report");
    struct local local;
    struct client c;
    uint64_t n_built;

    (void)userdata;
    local_start(&local, 1, "limits: {handshake_timeout: 10s}\n");
    client_open(&c, &local);
    client_hello(&c, WIRE_ROLE_CONTROL, 0);
    assert_int_equal(setsockopt(c.session->fd, SOL_SOCKET, SO_SNDBUF, &(int){4096}, sizeof(int)), 0);
    for (unsigned i = 0; i < 60; i++)
        client_say(&c, &report);
    while (c.session->question.state != QUESTION_BLOCKED)
        local_turn(&local);
    n_built = server_service(local.server)->questions.n_built;
    check_alive(&local); /* turns the loop, too */
    assert_int_equal(c.session->question.state, QUESTION_BLOCKED);
    assert_int_equal(server_service(local.server)->questions.n_built, n_built + 1);
    assert_true(frame_queue_is_empty(&c.session->queue));
    c.session->question.blocked_ns -= UINT64_C(11000000000);
    while (server_service(local.server)->questions.oldest)
        local_turn(&local);
    while (client_hear(&c) != CLIENT_CLOSED)
        assert_int_equal(c.reply.type, REPLY_ADMIN_PART);
    client_close(&c);
    check_alive(&local);
    local_stop(&local);
}

/* A client that floods is served some packets at a time, and other clients in between. */
static void test_flood(void **userdata)
{
    struct request intern = {.type = REQUEST_INTERN, .intern = {.text = "model.py:1"}};
    struct local local;
    struct client flood, other;
    struct job_rank *ranks;

    (void)userdata;
    local_start(&local, 2, "");
    ranks = server_service(local.server)->job->ranks;
    client_open(&flood, &local);
    client_hello(&flood, WIRE_ROLE_TRAINER, 0);
    client_open(&other, &local);
    client_hello(&other, WIRE_ROLE_TRAINER, 1);
    for (intern.intern.id = 1; intern.intern.id <= 200; intern.intern.id++)
        client_say(&flood, &intern);
    client_say_type(&other, REQUEST_CLEAR_FAULT);
    client_expect(&other, REPLY_DONE);
    assert_true(ranks[0].process.string_bytes <= FRAME_BATCH * FRAME_ROUNDS * sizeof("model.py:1"));
    while (ranks[0].process.string_bytes < 200 * sizeof("model.py:1"))
        local_turn(&local);
    client_close(&flood);
    client_close(&other);
    local_stop(&local);
}

/* A descriptor that is not a socket is refused and closed. */
static void test_no_socket(void **userdata)
{
    struct session *session = NULL;
    struct local local;
    int fds[2];

    (void)userdata;
    local_start(&local, 1, "");
    assert_int_equal(pipe(fds), 0);
    assert_int_equal(session_new(&session, server_service(local.server), fds[0]), -ENOTSOCK);
    assert_null(session);
    assert_int_equal(close(fds[0]), -1); /* closed already */
    close(fds[1]);
    check_alive(&local);
    local_stop(&local);
}

TEST_GROUP(session)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_through_the_socket),
        cmocka_unit_test(test_not_allowed),
        cmocka_unit_test(test_allowed_but_no_admin),
        cmocka_unit_test(test_short_of_memory),
        cmocka_unit_test(test_limit_of_clients),
        cmocka_unit_test(test_silent_ones_go_first),
        cmocka_unit_test(test_places_of_administrators),
        cmocka_unit_test(test_handshake_timeout),
        cmocka_unit_test(test_end_frees_the_rank),
        cmocka_unit_test(test_reconnect),
        cmocka_unit_test(test_rank_taken),
        cmocka_unit_test(test_death_with_a_child),
        cmocka_unit_test(test_doomed_in_a_batch),
        cmocka_unit_test(test_doomed_frees_the_rank),
        cmocka_unit_test(test_bad_packets),
        cmocka_unit_test(test_slow_reader),
        cmocka_unit_test(test_never_reads),
        cmocka_unit_test(test_flood),
        cmocka_unit_test(test_no_socket),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
