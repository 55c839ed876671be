/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Questions that are not part of training, against a whole server. Each connection asks one at a time. All who ask the
 * same get one answer. Answers have a share of the loop's time, and trainers are served first.
 */

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "core/base/base.h"
#include "daemon/server/questions.h"
#include "tests/daemon/server/local-server.h"
#include "tests/group.h"

enum { MANY = 20, NOBODY = 54321 };

static struct request admin(const char *command)
{
    return (struct request){.type = REQUEST_ADMIN, .admin = {.command = command}};
}

static void open_control(struct client *c, struct local *local)
{
    client_open(c, local);
    client_hello(c, WIRE_ROLE_CONTROL, 0);
}

/* Makes both lanes pause for an hour. */
static void hold(struct local *local)
{
    struct questions *questions = &server_service(local->server)->questions;

    for (size_t i = 0; i < ARRAY_SIZE(questions->lanes); i++)
        questions->lanes[i].until_ns = uv_hrtime() + UINT64_C(3600000000000);
}

/* Ends the pause of both lanes. */
static void let_go(struct local *local)
{
    struct questions *questions = &server_service(local->server)->questions;

    for (size_t i = 0; i < ARRAY_SIZE(questions->lanes); i++)
        questions->lanes[i].until_ns = 0;
    if (questions->timer.timer_cb)
        assert_int_equal(uv_timer_start(&questions->timer, questions->timer.timer_cb, 0, 0), 0);
}

static void turns(struct local *local, unsigned n)
{
    while (n-- > 0)
        local_turn(local);
}

/* ---- the mechanism --------------------------------------------------------------------------------------- */

static void test_one_answer_for_all(void **userdata)
{
    struct request status = admin("status"), ranks = admin("ranks");
    struct client clients[MANY];
    char first[4096] = "";
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    for (size_t i = 0; i < MANY; i++)
        open_control(&clients[i], &local);
    hold(&local);
    for (size_t i = 0; i < MANY; i++)
        client_say(&clients[i], i % 2 ? &status : &ranks);
    for (size_t i = 0; i < MANY; i++)
        while (clients[i].session->question.state != QUESTION_ASKED)
            local_turn(&local);
    assert_int_equal(server_service(local.server)->questions.n_built, 0);
    let_go(&local);
    clients[0].session->question.is_admin = false; /* both lanes share an answer */
    client_say(&clients[1], &status);              /* asked later, so it needs another answer */
    for (size_t i = 0; i < MANY; i++) {
        const struct reply_admin_part *part = &clients[i].reply.admin_part;

        client_expect(&clients[i], REPLY_ADMIN_PART);
        assert_int_equal(part->exit_code, 0);
        if (i == 1)
            snprintf(first, sizeof(first), "%.*s", (int)part->n_json_bytes, (const char *)part->json);
        else if (i % 2)
            assert_memory_equal(first, part->json, part->n_json_bytes);
    }
    assert_true(server_service(local.server)->questions.n_built <= 3);
    client_expect(&clients[1], REPLY_ADMIN_PART);
    assert_int_equal(server_service(local.server)->questions.n_built, 3);
    for (size_t i = 0; i < MANY; i++)
        client_close(&clients[i]);
    local_stop(&local);
}

/* While a question is being answered, the connection's next questions are not read. */
static void test_one_at_a_time(void **userdata)
{
    struct request status = admin("status");
    struct local local;
    struct client c;
    int n_unread;

    (void)userdata;
    local_start(&local, 1, "");
    open_control(&c, &local);
    hold(&local);
    for (unsigned i = 0; i < 8; i++)
        client_say(&c, &status);
    turns(&local, 4);
    assert_int_equal(c.session->question.state, QUESTION_ASKED);
    for (n_unread = 0; n_unread < 8; n_unread++) { /* counts the unread packets at the session's end of the socket */
        uint8_t byte;

        if (recv(c.session->fd, &byte, 1, MSG_DONTWAIT | MSG_TRUNC) < 0)
            break;
    }
    assert_int_equal(n_unread, 7);
    let_go(&local);
    turns(&local, 1);
    client_say(&c, &status);
    for (unsigned i = 0; i < 2; i++)
        client_expect(&c, REPLY_ADMIN_PART);
    client_close(&c);
    local_stop(&local);
}

/*
 * After each round, the lane pauses for a multiple of the round's time, however many ask. A slow machine needs several
 * rounds for an answer.
 */
static void test_share_of_time(void **userdata)
{
    struct request report = admin("report");
    struct questions *questions;
    struct local local;
    struct client c;

    (void)userdata;
    assert_int_equal(questions_pause_ns(1000), 1000 * (QUESTIONS_SHARE - 1));
    assert_int_equal(questions_pause_ns(UINT64_MAX / 100), QUESTIONS_MAX_PAUSE_NS);
    local_start(&local, 1, "");
    questions = &server_service(local.server)->questions;
    open_control(&c, &local);
    for (unsigned i = 0; i < 3; i++) {
        uint64_t asked_ns, n_rounds = questions->n_rounds;

        client_say(&c, &report);
        asked_ns = uv_hrtime();
        client_expect(&c, REPLY_ADMIN_PART);
        assert_true(questions->n_rounds > n_rounds);
        assert_true(questions->lanes[0].until_ns > asked_ns);
        hold(&local);
        client_say(&c, &report);
        turns(&local, 3);
        assert_int_equal(client_look(&c), CLIENT_SILENCE);
        let_go(&local);
        client_expect(&c, REPLY_ADMIN_PART);
    }
    client_close(&c);
    local_stop(&local);
}

/* Administrators have their own lane, which does not wait for the other lane's pause. */
static void test_lane_of_administrators(void **userdata)
{
    struct request status = admin("status"), ranks = admin("ranks");
    struct client other, root;
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    open_control(&other, &local);
    other.session->peer.uid = other.session->peer.gid = NOBODY;
    other.session->peer.n_groups = 0;
    open_control(&root, &local);
    hold(&local);
    server_service(local.server)->questions.lanes[0].until_ns = 0;
    client_say(&other, &status);
    turns(&local, 2);
    assert_int_equal(other.session->question.state, QUESTION_ASKED);
    client_say(&root, &ranks); /* another question, because equal ones get one answer */
    client_expect(&root, REPLY_ADMIN_PART);
    assert_int_equal(client_look(&other), CLIENT_SILENCE);
    client_close(&other);
    client_close(&root);
    local_stop(&local);
}

/* A trainer's message is served before an earlier question, so the answer shows the message's effect. */
static void test_trainers_first(void **userdata)
{
    struct request ranks = admin("ranks"), hello = hello_request(WIRE_ROLE_TRAINER, 0, 5);
    struct client control, trainer;
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    open_control(&control, &local);
    client_open(&trainer, &local);
    local_turn(&local);
    client_say(&control, &ranks);
    client_say(&trainer, &hello);
    client_expect(&control, REPLY_ADMIN_PART);
    assert_non_null(
        memmem(control.reply.admin_part.json, control.reply.admin_part.n_json_bytes, "\"attached\":true", 15));
    client_close(&control);
    client_close(&trainer);
    local_stop(&local);
}

/* A turn that serves a trainer answers no question, unless the question has waited too long. */
static void test_gives_way(void **userdata)
{
    struct request ranks = admin("ranks"), intern = {.type = REQUEST_INTERN, .intern = {.text = "model.py:1"}};
    struct client control, trainer;
    struct questions *questions;
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    questions = &server_service(local.server)->questions;
    client_open(&trainer, &local);
    client_hello(&trainer, WIRE_ROLE_TRAINER, 0);
    open_control(&control, &local);
    client_say(&control, &ranks);
    do {
        intern.intern.id++;
        client_say(&trainer, &intern);
        local_turn(&local);
    } while (!questions->due_ns); /* the question has been read */
    for (unsigned i = 0; i < 5 && questions->due_ns + QUESTIONS_PATIENCE_NS / 2 > uv_hrtime(); i++) {
        intern.intern.id++;
        client_say(&trainer, &intern);
        local_turn(&local);
        assert_int_equal(questions->n_built, 0);
    }
    questions->due_ns -= QUESTIONS_PATIENCE_NS;
    intern.intern.id++;
    client_say(&trainer, &intern);
    local_turn(&local);
    assert_int_equal(questions->n_built, 1);
    client_expect(&control, REPLY_ADMIN_PART);
    client_close(&control);
    client_close(&trainer);
    local_stop(&local);
}

/* ---- those who go or do not read ------------------------------------------------------------------------- */

static void test_gone_before_the_answer(void **userdata)
{
    struct request status = admin("status");
    struct client clients[3];
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    for (size_t i = 0; i < 3; i++)
        open_control(&clients[i], &local);
    hold(&local);
    for (size_t i = 0; i < 3; i++)
        client_say(&clients[i], &status);
    for (size_t i = 0; i < 3; i++)
        while (clients[i].session->question.state != QUESTION_ASKED)
            local_turn(&local);
    client_close(&clients[0]);
    client_close(&clients[1]);
    turns(&local, 3);
    let_go(&local);
    client_expect(&clients[2], REPLY_ADMIN_PART);
    assert_null(server_service(local.server)->questions.oldest);
    client_close(&clients[2]);
    local_stop(&local);
}

/* Unread answers of commands are dropped when later answers need their memory. */
static void test_memory_is_bounded(void **userdata)
{
    struct request report = admin("report"), status = admin("status");
    struct client slow, other;
    struct questions *questions;
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    questions = &server_service(local.server)->questions;
    open_control(&slow, &local);
    open_control(&other, &local);
    assert_int_equal(setsockopt(slow.session->fd, SOL_SOCKET, SO_SNDBUF, &(int){4096}, sizeof(int)), 0);
    for (unsigned i = 0; i < 20; i++)
        client_say(&slow, &report);
    while (slow.session->question.state != QUESTION_BLOCKED)
        local_turn(&local);
    questions->kept_bytes += QUESTIONS_MAX_KEPT_BYTES; /* as if the answer were a large model's */
    client_say(&other, &status);
    client_expect(&other, REPLY_ADMIN_PART);
    questions->kept_bytes -= QUESTIONS_MAX_KEPT_BYTES;
    assert_null(questions->oldest);
    while (client_hear(&slow) != CLIENT_CLOSED)
        assert_int_equal(slow.reply.type, REPLY_ADMIN_PART);
    client_close(&slow);
    client_close(&other);
    local_stop(&local);
}

TEST_GROUP(questions)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_answer_for_all),     cmocka_unit_test(test_one_at_a_time),
        cmocka_unit_test(test_share_of_time),          cmocka_unit_test(test_lane_of_administrators),
        cmocka_unit_test(test_trainers_first),         cmocka_unit_test(test_gives_way),
        cmocka_unit_test(test_gone_before_the_answer), cmocka_unit_test(test_memory_is_bounded),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
