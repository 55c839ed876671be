/* SPDX-License-Identifier: Apache-2.0 */

/*
 * zerodctl's commands through a control connection: their answers before and after a job is formed, who may change the
 * job, and the exit codes.
 */

#include <string.h>
#include <sysexits.h>

#include <json-c/json.h>

#include "core/base/base.h"
#include "daemon/job/job.h"
#include "tests/daemon/server/local-server.h"
#include "tests/group.h"

enum { NOBODY = 54321 };

static unsigned n_parts; /* number of parts of the last answer */

static void open_control(struct client *c, struct local *local)
{
    client_open(c, local);
    client_hello(c, WIRE_ROLE_CONTROL, 0);
}

/* Sends a command. Return: its answer, joined from all parts. */
static struct json_object *ask(struct client *c, const char *command, unsigned exit_code)
{
    struct request request = {.type = REQUEST_ADMIN, .admin = {.command = command}};
    struct json_tokener *tokener = json_tokener_new();
    struct json_object *root = NULL;
    bool last = false;

    assert_int_equal(client_say(c, &request), 0);
    for (n_parts = 0; !last; n_parts++) {
        client_expect(c, REPLY_ADMIN_PART);
        assert_null(root);
        assert_true(c->reply.admin_part.n_json_bytes <= WIRE_PART_BYTES);
        root = json_tokener_parse_ex(tokener, (const char *)c->reply.admin_part.json,
                                     (int)c->reply.admin_part.n_json_bytes);
        last = c->reply.admin_part.last;
    }
    assert_int_equal(c->reply.admin_part.exit_code, exit_code);
    assert_non_null(root);
    json_tokener_free(tokener);
    return root;
}

static const char *text_of(struct json_object *root, const char *key)
{
    struct json_object *value = json_object_object_get(root, key);

    assert_non_null(value);
    return json_object_get_string(value);
}

static void expect_state(struct client *control, const char *expected)
{
    struct json_object *root = ask(control, "status", EX_OK);

    assert_string_equal(text_of(root, "state"), expected);
    json_object_put(root);
}

static void expect_error(struct client *control, const char *command, unsigned exit_code, const char *part)
{
    struct json_object *root = ask(control, command, exit_code);

    assert_non_null(strstr(text_of(root, "error"), part));
    json_object_put(root);
}

/* Every question is answered in every phase of the job. */
static void test_questions(void **userdata)
{
    static const char *const commands[] = {"status", "ranks", "params", "diagnostics", "report"};
    struct local local;
    struct client control, trainer;

    (void)userdata;
    local_start(&local, 1, "");
    open_control(&control, &local);
    expect_state(&control, "waiting");
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
        json_object_put(ask(&control, commands[i], EX_OK));
    client_open(&trainer, &local);
    client_form(&trainer);
    expect_state(&control, "training");
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
        json_object_put(ask(&control, commands[i], EX_OK));
    client_close(&trainer);
    while (!job_is_idle(server_service(local.server)->job))
        local_turn(&local);
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
        json_object_put(ask(&control, commands[i], EX_OK));
    client_close(&control);
    local_stop(&local);
}

/* An answer that does not fit into a packet is sent in parts. */
static void test_parts(void **userdata)
{
    struct request report = {.type = REQUEST_REPORT, .report = {.code = E_DRIFTED}};
    char detail[WIRE_MAX_TEXT_BYTES + 1];
    struct local local;
    struct client control, trainer;

    (void)userdata;
    memset(detail, 'x', sizeof(detail) - 1);
    detail[sizeof(detail) - 1] = '\0';
    report.report.detail = detail;
    local_start(&local, 1, "");
    open_control(&control, &local);
    client_open(&trainer, &local);
    client_hello(&trainer, WIRE_ROLE_TRAINER, 0);
    for (unsigned i = 0; i < 100; i++) {
        assert_int_equal(client_say(&trainer, &report), 0);
        client_say_type(&trainer, REQUEST_CLEAR_FAULT);
        client_expect(&trainer, REPLY_DONE);
    }
    json_object_put(ask(&control, "diagnostics", EX_OK));
    assert_true(n_parts > 1);
    client_close(&control);
    client_close(&trainer);
    local_stop(&local);
}

static void test_unknown_command(void **userdata)
{
    struct local local;
    struct client control;

    (void)userdata;
    local_start(&local, 1, "");
    open_control(&control, &local);
    expect_error(&control, "statu", EX_USAGE, "there is no command \"statu\"");
    expect_state(&control, "waiting"); /* the connection is still open */
    client_close(&control);
    local_stop(&local);
}

/* Only admins may send commands that change the job. Other users get an error, and their connection is closed. */
static void test_not_admin(void **userdata)
{
    static const char *const commands[] = {"drain", "abort-step", "drop"};
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
        struct client control;

        open_control(&control, &local);
        control.session->peer.uid = control.session->peer.gid = NOBODY;
        control.session->peer.n_groups = 0;
        expect_state(&control, "waiting");
        expect_error(&control, commands[i], EX_NOPERM, "E1402");
        client_expect_closed(&control);
        client_close(&control);
    }
    assert_false(server_service(local.server)->job->kept.draining);
    local_stop(&local);
}

static void test_abort_step(void **userdata)
{
    struct local local;
    struct client control, trainer;

    (void)userdata;
    local_start(&local, 1, "");
    open_control(&control, &local);
    expect_error(&control, "abort-step", EX_UNAVAILABLE, "no open step");
    client_open(&trainer, &local);
    client_form(&trainer);
    json_object_put(ask(&control, "abort-step", EX_OK));
    client_say_type(&trainer, REQUEST_CLEAR_FAULT);
    client_expect(&trainer, REPLY_REFUSED);
    assert_true(trainer.reply.refused.aborted);
    assert_int_equal(trainer.reply.refused.position.attempt, 1);
    assert_non_null(strstr(trainer.reply.refused.diagnostic.text, "zerodctl abort-step"));
    client_close(&trainer);
    client_close(&control);
    local_stop(&local);
}

static void test_drop(void **userdata)
{
    struct job *job;
    struct local local;
    struct client control, trainer;

    (void)userdata;
    local_start(&local, 1, "");
    job = server_service(local.server)->job;
    open_control(&control, &local);
    client_open(&trainer, &local);
    client_form(&trainer);
    expect_error(&control, "drop", EX_UNAVAILABLE, "still attached");
    assert_non_null(job->state);
    client_close(&trainer);
    while (!job_is_idle(job))
        local_turn(&local);
    json_object_put(ask(&control, "drop", EX_OK));
    assert_null(job->state);
    expect_state(&control, "waiting");
    client_close(&control);
    local_stop(&local);
}

/* After drain no rank may attach, and the daemon ends with its last trainer. */
static void test_drain(void **userdata)
{
    struct request hello = hello_request(WIRE_ROLE_TRAINER, 0, 99);
    struct local local;
    struct client control, trainer, late;

    (void)userdata;
    local_start(&local, 1, "");
    open_control(&control, &local);
    client_open(&trainer, &local);
    client_form(&trainer);
    json_object_put(ask(&control, "drain", EX_OK));
    expect_state(&control, "draining");
    client_open(&late, &local);
    client_say(&late, &hello);
    client_expect_dropped(&late, E_NOT_ALLOWED, "drained");
    client_close(&late);
    client_close(&trainer);
    assert_int_equal(server_run(local.server), 0); /* returns without a signal */
    client_close(&control);
    local_stop(&local);
}

TEST_GROUP(admin)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_questions), cmocka_unit_test(test_parts),      cmocka_unit_test(test_unknown_command),
        cmocka_unit_test(test_not_admin), cmocka_unit_test(test_abort_step), cmocka_unit_test(test_drop),
        cmocka_unit_test(test_drain),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
