/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sends each type of request in each state of a session. A request that is not allowed gets E1403, which names its type
 * and the state, and the connection is closed. An allowed request reaches its handler, so each type must have one.
 */

#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "daemon/job/job.h"
#include "daemon/job/look.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "tests/core/wire/wire-examples.h"
#include "tests/daemon/server/local-server.h"
#include "tests/group.h"

enum { HELLO, ATTACHED, FORMED, CONTROL, LEFT, WATCH, N_STATES };

static const char *const places[N_STATES] = {
    [HELLO] = "before Hello",      [ATTACHED] = "before Formed",
    [FORMED] = "on a formed rank", [CONTROL] = "on a control connection",
    [LEFT] = "after Leave",        [WATCH] = "on a watch",
};

/* Return: whether proto/zerod.proto allows the request in this state. */
static bool is_allowed(enum request_type type, unsigned state)
{
    switch (type) {
    case REQUEST_HELLO:
        return state == HELLO;
    case REQUEST_DECLARE:
    case REQUEST_FORM:
        return state == ATTACHED;
    case REQUEST_INTERN:
    case REQUEST_CLEAR_FAULT:
    case REQUEST_REPORT:
    case REQUEST_LEAVE:
        return state == ATTACHED || state == FORMED;
    case REQUEST_ADMIN:
        return state == CONTROL;
    case REQUEST_STACK:
        return state == WATCH;
    default:
        return state == FORMED;
    }
}

/* The rank that a watch observes. */
static struct client watched = {.fd = -1};

static void watch(struct client *c, struct local *local)
{
    const struct job_rank *rank = &server_service(local->server)->job->ranks[0];

    client_open(&watched, local);
    client_hello(&watched, WIRE_ROLE_TRAINER, 0);
    assert_int_equal(client_say(c, &(struct request){.type = REQUEST_HELLO,
                                                     .hello = {.version_min = WIRE_VERSION,
                                                               .version_max = WIRE_VERSION,
                                                               .role = WIRE_ROLE_WATCH,
                                                               .incarnation = rank->kept.secret,
                                                               .run_id = "",
                                                               .client = "",
                                                               .optimizer = ""}}),
                     0);
}

static void bring_to(struct client *c, struct local *local, unsigned state)
{
    client_open(c, local);
    switch (state) {
    case ATTACHED:
        client_hello(c, WIRE_ROLE_TRAINER, 0);
        break;
    case FORMED:
        client_form(c);
        break;
    case CONTROL:
        client_hello(c, WIRE_ROLE_CONTROL, 0);
        break;
    case WATCH:
        watch(c, local);
        break;
    case LEFT:
        client_hello(c, WIRE_ROLE_TRAINER, 0);
        client_say_type(c, REQUEST_LEAVE);
        client_expect(c, REPLY_DONE);
        break;
    default:
        break;
    }
}

/* Closes the connections, and waits until the rank is free for the next test. */
static void let_go(struct client *c)
{
    struct job *job = server_service(c->local->server)->job;
    char *why;

    client_close(c);
    if (watched.fd >= 0)
        client_close(&watched);
    watched.fd = -1;
    while (!job_is_idle(job))
        local_turn(c->local);
    assert_int_equal(job_drop(job, &why), 0);
}

static void test_not_allowed(void **userdata)
{
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    for (unsigned state = 0; state < N_STATES; state++) {
        for (unsigned type = REQUEST_HELLO; type < N_REQUEST_TYPES; type++) {
            struct client c;
            char part[128];

            if (is_allowed((enum request_type)type, state))
                continue;
            bring_to(&c, &local, state);
            snprintf(part, sizeof(part), "%s is not allowed %s", request_type_name((enum request_type)type),
                     places[state]);
            assert_int_equal(client_say(&c, &example_requests[type]), 0);
            client_expect_dropped(&c, E_BAD_MESSAGE, part);
            let_go(&c);
        }
    }
    local_stop(&local);
}

/* Sends an allowed request. It may be answered, refused, or served without an answer, but not refused as misplaced. */
static void check_served(struct client *c, enum request_type type)
{
    int got;

    assert_int_equal(client_say(c, &example_requests[type]), 0);
    assert_int_equal(client_say(c, &example_requests[REQUEST_HELLO]), 0); /* a second Hello always ends the session */
    while ((got = client_hear(c)) != CLIENT_CLOSED) {
        const char *text = got == REPLY_REFUSED ? c->reply.refused.diagnostic.text : "";

        assert_int_not_equal(got, CLIENT_SILENCE);
        if (strstr(text, "is not allowed") && !strstr(text, "Hello is not allowed"))
            fail_msg("%s was refused:\n%s", request_type_name(type), text);
    }
}

static void test_allowed(void **userdata)
{
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    for (unsigned state = ATTACHED; state < LEFT; state++) {
        for (unsigned type = REQUEST_HELLO + 1; type < N_REQUEST_TYPES; type++) {
            struct client c;

            if (!is_allowed((enum request_type)type, state))
                continue;
            bring_to(&c, &local, state);
            check_served(&c, (enum request_type)type);
            let_go(&c);
        }
    }
    local_stop(&local);
}

/*
 * The daemon asks the watch for a look, and gets it. A look that it did not ask for ends the watch. A watch with a
 * wrong name gets no question.
 */
static void test_watch(void **userdata)
{
    struct local local;
    struct client c;
    struct job *job;

    (void)userdata;
    local_start(&local, 1, "");
    job = server_service(local.server)->job;
    client_open(&c, &local);
    watch(&c, &local);
    while (!job->ranks[0].process.look.watch)
        local_turn(&local);
    assert_true(look_ask(job, &job->ranks[0]));
    assert_true(look_ask(job, &job->ranks[0])); /* the daemon asks only once */
    client_expect(&c, REPLY_LOOK);
    assert_int_equal(client_say(&c, &example_requests[REQUEST_STACK]), 0);
    while (!job->ranks[0].process.look.text)
        local_turn(&local);
    assert_string_equal(job->ranks[0].process.look.text, example_requests[REQUEST_STACK].stack.text);
    assert_false(look_is_awaited(job, &job->ranks[0]));
    assert_int_equal(client_say(&c, &example_requests[REQUEST_STACK]), 0);
    client_expect_dropped(&c, E_BAD_MESSAGE, "Stack, which nobody has asked for");
    while (job->ranks[0].process.look.watch)
        local_turn(&local);
    assert_false(look_ask(job, &job->ranks[0]));
    client_close(&c);
    client_open(&c, &local);
    client_say(&c, &(struct request){.type = REQUEST_HELLO,
                                     .hello = {.version_min = WIRE_VERSION,
                                               .version_max = WIRE_VERSION,
                                               .role = WIRE_ROLE_WATCH,
                                               .incarnation = job->ranks[0].kept.secret + 1,
                                               .run_id = "",
                                               .client = "",
                                               .optimizer = ""}});
    assert_int_equal(client_hear(&c), CLIENT_CLOSED);
    let_go(&c);
    local_stop(&local);
}

/* Each type has an example and is allowed in some state, and places[] has all states. */
static void test_table_is_complete(void **userdata)
{
    (void)userdata;
    for (unsigned type = REQUEST_HELLO; type < N_REQUEST_TYPES; type++) {
        unsigned n = 0;

        for (unsigned state = 0; state < N_STATES; state++)
            n += is_allowed((enum request_type)type, state);
        assert_in_range(n, 1, 2);
        assert_int_equal(example_requests[type].type, type);
    }
    assert_int_equal(SESSION_CLOSED, 1 << N_STATES);
}

/* A second request, before the first is answered, is refused as a fault. */
static void test_while_waiting(void **userdata)
{
    struct local local;
    struct client c;

    (void)userdata;
    local_start(&local, 2, "");
    client_open(&c, &local);
    client_hello(&c, WIRE_ROLE_TRAINER, 0);
    client_declare(&c);
    client_say(&c, &(struct request){.type = REQUEST_FORM, .form = {.n_params = 1}}); /* waits for rank 1 */
    client_say_type(&c, REQUEST_CLEAR_FAULT);
    client_expect_dropped(&c, E_BAD_MESSAGE, "ClearFault while the last request has not been answered");
    client_close(&c);
    local_stop(&local);
}

/* Messages that a later version may send, and bytes that no version sends. */
static void test_unknown(void **userdata)
{
    static const struct {
        uint8_t bytes[4];
        size_t n_bytes;
    } packets[] = {
        {{0x9a, 0x06, 0x00}, 3},       /* field 99, with 0 bytes */
        {{0x82, 0x02, 0x00}, 3},       /* field 32: one beyond the last */
        {{0x08, 0x01}, 2},             /* field 1 as a number */
        {{0xff, 0xff, 0xff, 0xff}, 4}, /* no valid field */
        {{0x0a, 0x05, 0x00}, 3},       /* says 5 bytes, has none */
    };
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    for (size_t i = 0; i < ARRAY_SIZE(packets); i++) {
        struct client c;

        client_open(&c, &local);
        client_hello(&c, WIRE_ROLE_CONTROL, 0);
        assert_int_equal(frame_send(c.fd, packets[i].bytes, packets[i].n_bytes, NULL, 0), 0);
        client_expect_dropped(&c, E_BAD_MESSAGE, "");
        client_close(&c);
    }
    local_stop(&local);
}

static void test_versions(void **userdata)
{
    static const struct {
        uint32_t min, max;
        bool fits;
    } cases[] = {{3, 3, true}, {1, 9, true}, {1, 2, false}, {4, 9, false}};
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct request request = hello_request(WIRE_ROLE_CONTROL, 0, 1);
        struct client c;

        request.hello.version_min = cases[i].min;
        request.hello.version_max = cases[i].max;
        client_open(&c, &local);
        client_say(&c, &request);
        if (cases[i].fits)
            client_expect(&c, REPLY_WELCOME);
        else
            client_expect_dropped(&c, E_BAD_MESSAGE,
                                  cases[i].min == 1 ? "speaks 1 to 2, this daemon 3" : "speaks 4 to 9, this daemon 3");
        client_close(&c);
    }
    local_stop(&local);
}

/* Welcome has the job's configuration. A client may choose its own policy for duplicates. */
static void test_welcome(void **userdata)
{
    struct request request = hello_request(WIRE_ROLE_TRAINER, 1, 5);
    struct local local;
    struct client c, control;

    (void)userdata;
    local_start(&local, 2,
                "zero_optimization: {stage: 3, stage3_on_one_node: gathered, reduce_bucket_size: 1234, stage3_max_live_parameters: 777}\n"
                "diagnostics: {on_duplicate: abort_step}\n"
                "optimizer: {type: Adam, params: {lr: 0.25, betas: [0.5, 0.75], weight_decay: 0.125}}\n"
                "gradient_accumulation_steps: 4\ngradient_clipping: 1.5\nfp16: {enabled: true}\n"
                "scheduler: {type: WarmupLR, params: {warmup_num_steps: 10}}\n");
    request.hello.on_duplicate = WIRE_ON_DUPLICATE_ACCUMULATE;
    request.hello.run_id = "run-7";
    client_open(&c, &local);
    client_say(&c, &request);
    client_expect(&c, REPLY_WELCOME);
    assert_int_equal(c.reply.welcome.version, WIRE_VERSION);
    assert_int_equal(c.reply.welcome.world_size, 2);
    assert_int_equal(c.reply.welcome.stage, 3);
    assert_int_equal(c.reply.welcome.bucket_elems, 1234);
    assert_int_equal(c.reply.welcome.stage3_max_live_elems, 777);
    assert_int_equal(c.reply.welcome.on_duplicate, WIRE_ON_DUPLICATE_ACCUMULATE);
    assert_string_equal(c.reply.welcome.server, service_version());
    assert_string_equal(c.reply.welcome.run_id, "run-7");
    assert_string_equal(c.reply.welcome.optimizer, "AdamW"); /* "Adam" means AdamW unless adam_w_mode is false */
    assert_true(c.reply.welcome.hyper.lr == 0.25 && c.reply.welcome.hyper.weight_decay == 0.125);
    assert_true(c.reply.welcome.hyper.beta1 == 0.5 && c.reply.welcome.hyper.beta2 == 0.75);
    assert_true(c.reply.welcome.has_scheduler && c.reply.welcome.mean && c.reply.welcome.fp16);
    assert_true(c.reply.welcome.max_norm == 1.5 && c.reply.welcome.accumulation == 4);
    client_open(&control, &local);
    client_hello(&control, WIRE_ROLE_CONTROL, 0);
    assert_int_equal(control.reply.welcome.on_duplicate, WIRE_ON_DUPLICATE_ABORT_STEP);
    client_close(&c);
    client_close(&control);
    local_stop(&local);
}

TEST_GROUP(dispatch)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_watch),    cmocka_unit_test(test_table_is_complete), cmocka_unit_test(test_not_allowed),
        cmocka_unit_test(test_allowed),  cmocka_unit_test(test_while_waiting),     cmocka_unit_test(test_unknown),
        cmocka_unit_test(test_versions), cmocka_unit_test(test_welcome),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
