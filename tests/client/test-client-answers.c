/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A daemon's answers are well-formed, but one value is false. The call must fail with a sentence, and must not access
 * memory outside of the segments.
 */

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/wire/wire-reply.h"
#include "tests/client/false-daemon.h"
#include "zerod/client.h"

enum {
    PAGE = 4096,
    N_ELEMS = 5000,
    RING_BYTES = 6 * PAGE,
    WEIGHT_BYTES = 9 * PAGE, /* with room for more ranks */
    STATE_BYTES = 5 * PAGE,
    N_TICKETS = 8,
    MAX_ANSWERS = 16,
    MAX_SEGMENTS = 5,
};

static float values[N_ELEMS];
static char path[64];

/* ---- the script ---------------------------------------------------------------------------------------- */

struct script {
    struct false_answer answers[MAX_ANSWERS];
    uint8_t packets[MAX_ANSWERS][1024];
    size_t n;
    struct wire_arena arena;
};

/* Adds an answer with n_fds descriptors. n_bytes has the size of the memory behind each. */
static void add(struct script *script, const struct reply *reply, const size_t *n_bytes, size_t n_fds, bool is_sealed)
{
    struct false_answer *answer = &script->answers[script->n];
    int n = wire_pack_reply(&script->arena, reply, script->packets[script->n], sizeof(script->packets[0]));

    assert_true(n > 0);
    *answer = (struct false_answer){.data = script->packets[script->n++], .n_bytes = (size_t)n, .n_fds = n_fds};
    for (size_t i = 0; i < n_fds; i++)
        answer->fds[i] = false_memory(n_bytes[i], is_sealed);
}

static void add_done(struct script *script)
{
    add(script, &(struct reply){.type = REPLY_DONE, .done = {.loss_scale = 1}}, NULL, 0, true);
}

/* The memory of a job: what the daemon announces, and the true sizes (n_bytes). */
struct memory {
    uint32_t stage;
    struct wire_segment segments[MAX_SEGMENTS];
    size_t n_bytes[MAX_SEGMENTS];
    size_t n;
    uint64_t ring_bytes;
    uint32_t n_tickets;
    bool can_be_cut;
};

static const struct memory right = {
    .stage = 2,
    .segments = {{WIRE_SEGMENT_RING, RING_BYTES + PAGE, false},
                 {WIRE_SEGMENT_CREDIT, PAGE, false},
                 {WIRE_SEGMENT_WEIGHTS, WEIGHT_BYTES, false},
                 {WIRE_SEGMENT_OVERFLOW, RING_BYTES, false},
                 {WIRE_SEGMENT_PUBLISHED, PAGE, false}},
    .n_bytes = {RING_BYTES + PAGE, PAGE, WEIGHT_BYTES, RING_BYTES, PAGE},
    .n = MAX_SEGMENTS,
    .ring_bytes = RING_BYTES,
    .n_tickets = N_TICKETS,
};

static void add_welcome(struct script *script, uint32_t stage)
{
    add(script,
        &(struct reply){.type = REPLY_WELCOME,
                        .welcome = {.version = WIRE_VERSION,
                                    .world_size = 1,
                                    .stage = stage,
                                    .bucket_elems = 1024,
                                    .server = "test",
                                    .run_id = "",
                                    .optimizer = "AdamW",
                                    .stage3_max_live_elems = 1 << 20}},
        NULL, 0, true);
}

static void begin(struct script *script, const struct memory *memory)
{
    *script = (struct script){.arena = WIRE_ARENA_NULL};
    assert_int_equal(wire_arena_init(&script->arena), 0);
    add_welcome(script, memory->stage);
    add(script,
        &(struct reply){.type = REPLY_FORMED,
                        .formed = {.init_wanted = true,
                                   .segments = memory->segments,
                                   .n_segments = memory->n,
                                   .n_tickets = memory->n_tickets,
                                   .ring_bytes = memory->ring_bytes,
                                   .loss_scale = 1}},
        memory->n_bytes, memory->n, !memory->can_be_cut);
    add_done(script); /* for the initial weights */
    add_done(script); /* for Ready */
}

static void end(struct script *script)
{
    for (size_t i = 0; i < script->n; i++)
        for (size_t k = 0; k < script->answers[i].n_fds; k++)
            close(script->answers[i].fds[k]);
    wire_arena_deinit(&script->arena);
}

/* ---- the rank ------------------------------------------------------------------------------------------ */

struct run {
    struct false_daemon *daemon;
    struct zerod *c;
};

/* Connects a rank, which declares one parameter. */
static struct run connect_to(const struct script *script)
{
    const uint64_t n_elems = N_ELEMS;
    struct run run = {.daemon = false_daemon_new(path)};

    assert_non_null(run.daemon);
    false_daemon_serve(run.daemon, script->answers, script->n);
    assert_int_equal(zerod_connect(&run.c, &(struct zerod_options){.socket = path, .timeout_ms = 10000}), 0);
    assert_int_equal(
        zerod_declare(
            run.c, &(struct zerod_param){.name = "a", .ndim = 1, .shape = &n_elems, .trainable = true, .init = values},
            1),
        0);
    return run;
}

static void disconnect(struct run *run, struct script *script)
{
    zerod_close(run->c);
    false_daemon_join(run->daemon);
    false_daemon_free(run->daemon);
    end(script);
}

static void check_error(const struct run *run, int r, const char *text)
{
    if (r != -EPROTO || !strstr(zerod_error(run->c)->text, text))
        fail_msg("%d, \"%s\" instead of \"%s\"", r, zerod_error(run->c)->text, text);
}

static void check_form(const struct memory *memory, const char *text)
{
    struct script script;
    struct run run;

    begin(&script, memory);
    run = connect_to(&script);
    if (text)
        check_error(&run, zerod_form(run.c), text);
    else
        assert_int_equal(zerod_form(run.c), 0);
    disconnect(&run, &script);
}

static void test_forming(void **state)
{
    struct memory stage3 = right;

    (void)state;
    check_form(&right, NULL);
    stage3.stage = 3;
    stage3.segments[2].kind = WIRE_SEGMENT_POOL;
    check_form(&stage3, NULL);
}

static void test_shorter_than_announced(void **state)
{
    (void)state;
    for (size_t i = 0; i < right.n; i++) {
        struct memory memory = right;

        memory.n_bytes[i] = 0;
        check_form(&memory, "the segment differs from its announcement");
        memory.n_bytes[i] = right.n_bytes[i] - 1;
        check_form(&memory, "the segment differs from its announcement");
    }
}

static void test_can_be_cut(void **state)
{
    struct memory memory = right;

    (void)state;
    memory.can_be_cut = true;
    check_form(&memory, "the segment differs from its announcement");
}

static void test_less_than_the_job_needs(void **state)
{
    struct memory memory = right;

    (void)state;
    memory.segments[2].n_bytes = PAGE;
    check_form(&memory, "zerod sent 4096 bytes of weights, expected at least 36352");
    memory = right;
    memory.n_tickets = 1 << 20;
    check_form(&memory, "zerod sent no page for the credits of 1048576 slots");
    memory = right;
    memory.ring_bytes = RING_BYTES + 2 * PAGE;
    check_form(&memory, "zerod sent no ring of 32768 bytes");
    memory.ring_bytes = UINT64_MAX; /* the end of the ring, rounded up, is 0 */
    check_form(&memory, "zerod sent no ring of 18446744073709551615 bytes");
    memory.ring_bytes = 3;
    check_form(&memory, "zerod's ring of 3 bytes has no room for one weight");
}

static void test_other_kinds(void **state)
{
    (void)state;
    for (size_t i = 0; i < right.n; i++) {
        struct memory memory = right;

        memory.segments[i].kind = WIRE_SEGMENT_POOL;
        check_form(&memory, "the segment differs from its announcement");
        memory.segments[i].kind = right.segments[i ? 0 : 1].kind; /* one kind occurs twice */
        check_form(&memory, "the segment differs from its announcement");
        memory.segments[i] = right.segments[i];
        memory.segments[i].cuda = true;
        check_form(&memory, "the segment differs from its announcement");
    }
}

/* ---- after it was formed ------------------------------------------------------------------------------- */

static struct run form(const struct script *script)
{
    struct run run = connect_to(script);

    assert_int_equal(zerod_form(run.c), 0);
    return run;
}

/* The ring has one slot, which the daemon never returns, so the second push needs a slot of the overflow memory. */
static void check_slot(uint64_t offset_bytes, bool is_right)
{
    struct script script;
    struct run run;

    begin(&script, &right);
    add_done(&script);
    add(&script, &(struct reply){.type = REPLY_SLOT_GRANT, .slot_grant = {.offset_bytes = offset_bytes}}, NULL, 0,
        true);
    run = form(&script);
    for (unsigned i = 0; i < 2; i++) {
        float *slot;

        assert_int_equal(zerod_begin_backward(run.c, NULL), 0);
        slot = zerod_slot(run.c, 0);
        assert_true((slot != NULL) == (i == 0 || is_right));
        if (!slot)
            break;
        memcpy(slot, values, sizeof(values));
        assert_int_equal(zerod_push(run.c, &(struct zerod_push){.param = 0}), 0);
        if (i == 0)
            assert_int_equal(zerod_end_backward(run.c, NULL, 0), 0);
    }
    if (!is_right)
        check_error(&run, zerod_clear_fault(run.c), "zerod granted a slot behind the end of its overflow memory");
    disconnect(&run, &script);
}

static void test_slots(void **state)
{
    (void)state;
    check_slot(64, true);
    check_slot(2 * PAGE, false);
    check_slot(RING_BYTES, false);
    check_slot(UINT64_MAX - 63, false);
}

static void check_window(size_t n_bytes, bool is_sealed)
{
    const struct wire_segment segment = {WIRE_SEGMENT_WINDOW, WEIGHT_BYTES, false};
    struct script script;
    struct run run;

    begin(&script, &right);
    add(&script, &(struct reply){.type = REPLY_DONE, .done = {.segments = &segment, .n_segments = 1, .loss_scale = 1}},
        &n_bytes, 1, is_sealed);
    run = form(&script);
    check_error(&run, zerod_write_begin(run.c), "zerod's write window is smaller than 36352 bytes");
    assert_null(zerod_window(run.c, 0));
    disconnect(&run, &script);
}

static void test_windows(void **state)
{
    (void)state;
    check_window(PAGE, true);
    check_window(WEIGHT_BYTES, false);
}

/* Answers questions for state with a segment of this size. */
static void check_state(size_t n_bytes, bool is_sealed, int r)
{
    const struct wire_segment segment = {WIRE_SEGMENT_STATE, STATE_BYTES, false};
    const struct reply reply = {.type = REPLY_STATE_IS,
                                .state_is = {.segments = &segment, .n_segments = 1, .n_elems = N_ELEMS}};
    static float state[N_ELEMS];
    struct script script;
    struct run run;

    begin(&script, &right);
    add(&script, &reply, &n_bytes, 1, is_sealed);
    add(&script, &reply, &n_bytes, 1, is_sealed);
    run = form(&script);
    assert_int_equal(zerod_read_state(run.c, 0, ZEROD_MASTER, state), r);
    assert_int_equal(zerod_write_state(run.c, 0, ZEROD_MASTER, state), r);
    disconnect(&run, &script);
}

static void test_state(void **state)
{
    (void)state;
    check_state(STATE_BYTES, true, 0);
    check_state(PAGE, true, -EPROTO);
    check_state(STATE_BYTES, false, -EPROTO);
}

/* Empty parts are refused, because zerodctl would wait for the end of such an answer for ever. */
static void test_status_of_empty_parts(void **state)
{
    const char *json = NULL;
    struct script script;
    struct run run;

    (void)state;
    begin(&script, &right);
    add_welcome(&script, right.stage);
    for (unsigned i = 0; i < 3; i++)
        add(&script, &(struct reply){.type = REPLY_ADMIN_PART, .admin_part = {.json = (const uint8_t *)""}}, NULL, 0,
            true);
    run = form(&script);
    check_error(&run, zerod_status(run.c, 5000, &json), "sent an empty part of an answer");
    assert_null(json);
    disconnect(&run, &script);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forming),
        cmocka_unit_test(test_shorter_than_announced),
        cmocka_unit_test(test_can_be_cut),
        cmocka_unit_test(test_less_than_the_job_needs),
        cmocka_unit_test(test_other_kinds),
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_state),
        cmocka_unit_test(test_status_of_empty_parts),
    };

    snprintf(path, sizeof(path), "/tmp/zerod-test-answers-%d.sock", (int)getpid());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
