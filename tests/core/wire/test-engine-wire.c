/* SPDX-License-Identifier: Apache-2.0 */

/* Messages between zerod and its engine are packed and unpacked. Invalid messages are refused with a reason. */

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/wire/engine-wire.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"
#include "core/wire/wire.h"
#include "proto/engine.pb-c.h"
#include "tests/core/wire/engine-examples.h"
#include "tests/group.h"

static struct wire_arena arena;
static uint8_t packet[FRAME_MAX_BYTES];
static char why[WIRE_WHY_BYTES];

static int setup(void **state)
{
    return wire_arena_init(&arena);
}

static int teardown(void **state)
{
    wire_arena_deinit(&arena);
    return 0;
}

static size_t pack_command(const struct engine_command *command)
{
    int n = engine_pack_command(&arena, command, packet, sizeof(packet));

    assert_in_range(n, 1, sizeof(packet));
    return (size_t)n;
}

static size_t pack_report(const struct engine_report *report)
{
    int n = engine_pack_report(&arena, report, packet, sizeof(packet));

    assert_in_range(n, 1, sizeof(packet));
    return (size_t)n;
}

/* ---- round trips ---------------------------------------------------------------------------------------- */

/*
 * Return: how many fields are set in the message and its submessages. Of a list of messages, only the first is counted.
 */
static unsigned count_set(const ProtobufCMessage *message)
{
    unsigned n = 0;

    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        const uint8_t *member = (const uint8_t *)message + field->offset;
        const uint32_t *n_or_case = (const void *)((const uint8_t *)message + field->quantifier_offset);
        static const uint8_t zero[sizeof(uint64_t)];

        if (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
            n += *n_or_case == field->id ? 1 + count_set(*(ProtobufCMessage *const *)member) : 0;
        else if (field->label == PROTOBUF_C_LABEL_REPEATED)
            n +=
                *(const size_t *)(const void *)n_or_case > 0 ? 1 + count_set(**(ProtobufCMessage * *const *)member) : 0;
        else if (field->type == PROTOBUF_C_TYPE_MESSAGE)
            n += *(ProtobufCMessage *const *)member ? 1 + count_set(*(ProtobufCMessage *const *)member) : 0;
        else
            n += memcmp(member, zero, field->type == PROTOBUF_C_TYPE_UINT64 ? 8 : 4) != 0;
    }
    return n;
}

static void assert_n_set(const ProtobufCMessageDescriptor *descriptor, size_t n_bytes, unsigned expected)
{
    ProtobufCMessage *message = protobuf_c_message_unpack(descriptor, NULL, n_bytes, packet);

    assert_non_null(message);
    assert_int_equal(count_set(message), expected);
    protobuf_c_message_free_unpacked(message, NULL);
}

static void assert_segments_equal(const struct engine_segment *a, const struct engine_segment *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        assert_true(a[i].number == b[i].number && a[i].n_bytes == b[i].n_bytes);
}

static void assert_setup_equal(const struct engine_setup *a, const struct engine_setup *b)
{
    assert_true(a->version == b->version && a->generation == b->generation && a->node == b->node);
    assert_true(a->n_nodes == b->n_nodes && a->connect_timeout_ms == b->connect_timeout_ms);
    assert_string_equal(a->address, b->address);
    assert_int_equal(a->n_segments, b->n_segments);
    assert_segments_equal(a->segments, b->segments, b->n_segments);
}

static void assert_order_equal(const struct engine_order *a, const struct engine_order *b)
{
    assert_true(a->tag == b->tag && a->timeout_ms == b->timeout_ms && a->n_moves == b->n_moves);
    assert_true(a->lasting == b->lasting);
    for (size_t i = 0; i < b->n_moves; i++) {
        const struct engine_move *p = &a->moves[i], *q = &b->moves[i];

        assert_true(p->node == q->node && p->send == q->send && p->segment == q->segment);
        assert_true(p->offset_bytes == q->offset_bytes && p->n_bytes == q->n_bytes);
    }
}

static void assert_pair_equal(const struct engine_pair *a, const struct engine_pair *b)
{
    assert_string_equal(a->key, b->key);
    assert_int_equal(a->n_value_bytes, b->n_value_bytes);
    assert_memory_equal(a->value, b->value, b->n_value_bytes);
}

static void test_commands(void **state)
{
    /* The message counts as one field, and so does a list, besides the fields of its first element. */
    static const unsigned n_set[N_ENGINE_COMMAND_TYPES] = {0, 1 + 7 + 2, 1 + 1 + 2, 1 + 4 + 5, 1 + 2};

    for (unsigned type = 1; type < N_ENGINE_COMMAND_TYPES; type++) {
        const struct engine_command *example = &engine_example_commands[type];
        size_t n = pack_command(example);
        struct engine_command out;

        assert_int_equal(example->type, type);
        assert_n_set(&zerod__v1__engine_command__descriptor, n, n_set[type]);
        assert_int_equal(engine_unpack_command(&arena, packet, n, &out, why, sizeof(why)), 0);
        assert_int_equal(out.type, type);
        if (type == ENGINE_COMMAND_SETUP)
            assert_setup_equal(&out.setup, &example->setup);
        else if (type == ENGINE_COMMAND_SHARE)
            assert_segments_equal(&out.share.segment, &example->share.segment, 1);
        else if (type == ENGINE_COMMAND_ORDER)
            assert_order_equal(&out.order, &example->order);
        else
            assert_pair_equal(&out.value, &example->value);
    }
}

static void test_reports(void **state)
{
    static const unsigned n_set[N_ENGINE_REPORT_TYPES] = {0, 1 + 2, 1, 1 + 3, 1 + 3};

    for (unsigned type = 1; type < N_ENGINE_REPORT_TYPES; type++) {
        const struct engine_report *example = &engine_example_reports[type];
        size_t n = pack_report(example);
        struct engine_report out;

        assert_int_equal(example->type, type);
        assert_n_set(&zerod__v1__engine_report__descriptor, n, n_set[type]);
        assert_int_equal(engine_unpack_report(&arena, packet, n, &out, why, sizeof(why)), 0);
        assert_int_equal(out.type, type);
        if (type == ENGINE_REPORT_VALUE)
            assert_pair_equal(&out.value, &example->value);
        else if (type == ENGINE_REPORT_DONE)
            assert_memory_equal(&out.done, &example->done, sizeof(out.done));
        else if (type == ENGINE_REPORT_FAILED)
            assert_true(strcmp(out.failed.what, example->failed.what) == 0 && out.failed.has_tag &&
                        out.failed.tag == example->failed.tag);
    }
}

/* The largest order and the largest value fit into a frame. */
static void test_largest(void **state)
{
    static struct engine_move moves[ENGINE_MAX_MOVES];
    static uint8_t value[ENGINE_MAX_VALUE_BYTES];
    static char key[ENGINE_MAX_KEY_BYTES + 1];
    struct engine_command order = {
        .type = ENGINE_COMMAND_ORDER,
        .order = {.tag = ENGINE_MAX_TAG, .timeout_ms = UINT32_MAX, .moves = moves, .n_moves = ENGINE_MAX_MOVES},
    };
    struct engine_command pair = {
        .type = ENGINE_COMMAND_VALUE,
        .value = {.key = key, .value = value, .n_value_bytes = sizeof(value)},
    };
    struct engine_command out;

    for (size_t i = 0; i < ARRAY_SIZE(moves); i++)
        moves[i] = (struct engine_move){ENGINE_MAX_NODES - 1, true, ENGINE_MAX_SEGMENTS - 1, ENGINE_MAX_SEGMENT_BYTES,
                                        ENGINE_MAX_SEGMENT_BYTES};
    assert_int_equal(engine_unpack_command(&arena, packet, pack_command(&order), &out, why, sizeof(why)), 0);
    assert_order_equal(&out.order, &order.order);
    memset(key, 'k', sizeof(key) - 1);
    memset(value, 0xff, sizeof(value));
    assert_int_equal(engine_unpack_command(&arena, packet, pack_command(&pair), &out, why, sizeof(why)), 0);
    assert_pair_equal(&out.value, &pair.value);
    assert_int_equal(engine_pack_command(&arena, &pair, packet, sizeof(value)), -EMSGSIZE);
}

/* ---- refusals ------------------------------------------------------------------------------------------- */

static void assert_command_refused(const struct engine_command *command, const char *expected)
{
    struct engine_command out;

    assert_int_equal(engine_unpack_command(&arena, packet, pack_command(command), &out, why, sizeof(why)),
                     WIRE_E_INVALID);
    assert_string_equal(why, expected);
}

static void test_refused_setups(void **state)
{
    static const struct engine_segment far = {ENGINE_MAX_SEGMENTS, 1}, empty = {0, 0};
    static const struct engine_segment many[ENGINE_SETUP_SEGMENTS + 1] = {{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1},
                                                                          {5, 1}, {6, 1}, {7, 1}, {0, 1}};
    struct engine_command c = engine_example_commands[ENGINE_COMMAND_SETUP], good = c;

    c.setup.version = 2;
    assert_command_refused(&c, "EngineSetup.version: 2, expected 1 to 1");
    c = good;
    c.setup.n_nodes = 0;
    assert_command_refused(&c, "EngineSetup.n_nodes: 0, expected 1 to 512");
    c = good;
    c.setup.node = c.setup.n_nodes;
    assert_command_refused(&c, "EngineSetup.node: 3, expected less than n_nodes, 3");
    c = good;
    c.setup.address = "";
    assert_command_refused(&c, "EngineSetup.address: 0 bytes, expected 1 to 255");
    c = good;
    c.setup.connect_timeout_ms = 0;
    assert_command_refused(&c, "EngineSetup.connect_timeout_ms: 0, expected at least 1");
    c = good;
    c.setup.segments = &far;
    c.setup.n_segments = 1;
    assert_command_refused(&c, "EngineSetup.segments[0].number: 10, expected 0 to 9");
    c.setup.segments = &empty;
    assert_command_refused(&c, "EngineSetup.segments[0].n_bytes: 0, expected 1 to 281474976710656");
    c.setup.segments = many;
    c.setup.n_segments = ARRAY_SIZE(many);
    assert_command_refused(&c, "EngineSetup.segments: 9 values, expected at most 8");
}

static void test_refused_orders(void **state)
{
    static const struct {
        struct engine_move move;
        const char *why;
    } cases[] = {
        {{ENGINE_MAX_NODES, true, 0, 0, 1}, "EngineOrder.moves[0].node: 512, expected 0 to 511"},
        {{0, true, ENGINE_MAX_SEGMENTS, 0, 1}, "EngineOrder.moves[0].segment: 10, expected 0 to 9"},
        {{0, true, 0, 0, 0}, "EngineOrder.moves[0].n_bytes: 0, expected 1 to 281474976710656"},
        {{0, true, 0, ENGINE_MAX_SEGMENT_BYTES + 1, 1},
         "EngineOrder.moves[0].offset_bytes: 281474976710657, expected 0 to 281474976710656"},
    };
    struct engine_command c = engine_example_commands[ENGINE_COMMAND_ORDER];

    c.order.n_moves = 0;
    assert_command_refused(&c, "EngineOrder.moves: none, expected at least one");
    c.order.n_moves = 1;
    c.order.tag = UINT64_MAX;
    assert_command_refused(&c, "EngineOrder.tag: 18446744073709551615, expected 0 to 18446744073709551614");
    c.order.tag = 1;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        c.order.moves = &cases[i].move;
        assert_command_refused(&c, cases[i].why);
    }
}

static void assert_report_refused(const void *data, size_t n_bytes, const char *expected)
{
    struct engine_report out;

    assert_int_equal(engine_unpack_report(&arena, data, n_bytes, &out, why, sizeof(why)), WIRE_E_INVALID);
    assert_string_equal(why, expected);
}

static void test_refused_reports(void **state)
{
    static const struct {
        const char *bytes;
        size_t n_bytes;
        const char *why;
    } cases[] = {
        {"", 0, "EngineReport: an empty packet, expected one message"},
        {"garbage", 7, "EngineReport: 7 bytes that are not a protobuf message"},
        {"\x2a\x00", 2, "EngineReport: message of kind 5, expected 1 to 4"},
        {"\x12\x00\x12\x00", 4, "EngineReport: 2 messages in one packet, expected one"},
        {"\x0a\x02\x0a\x00", 4, "EngineValue.key: 0 bytes, expected 1 to 64"},
        {"\x0a\x03\x0a\x01\x07", 5, "EngineValue.key: byte 0x07 at 0, expected UTF-8 without control characters"},
        {"\x0a\x04\x0a\x02k\x00", 6, "EngineValue.key: byte 0x00 at 1, expected UTF-8 without control characters"},
        {"\x22\x00", 2, "EngineFailed.what: 0 bytes, expected 1 to 512"},
        {"\x22\x05\x0a\x01w\x18\x05", 7, "EngineFailed.tag: set, expected nothing without has_tag"},
        {"\x1a\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 13,
         "EngineDone.tag: 18446744073709551615, expected 0 to 18446744073709551614"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        assert_report_refused(cases[i].bytes, cases[i].n_bytes, cases[i].why);
}

/* Packing cuts a text that is too long. Unpacking refuses a text that is too long. */
static void test_texts(void **state)
{
    char text[2 * ENGINE_MAX_WHAT_BYTES];
    struct engine_report report = {.type = ENGINE_REPORT_FAILED, .failed = {.what = text}}, out;
    Zerod__V1__EngineFailed failed = ZEROD__V1__ENGINE_FAILED__INIT;
    Zerod__V1__EngineReport proto = ZEROD__V1__ENGINE_REPORT__INIT;

    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    assert_int_equal(engine_unpack_report(&arena, packet, pack_report(&report), &out, why, sizeof(why)), 0);
    assert_int_equal(strlen(out.failed.what), ENGINE_MAX_WHAT_BYTES);
    assert_string_equal(out.failed.what + ENGINE_MAX_WHAT_BYTES - 4, "x...");
    failed.what = text;
    proto.kind_case = ZEROD__V1__ENGINE_REPORT__KIND_FAILED;
    proto.failed = &failed;
    assert_report_refused(packet, zerod__v1__engine_report__pack(&proto, packet),
                          "EngineFailed.what: 1023 bytes, expected 1 to 512");
}

/* Prefixes of a packet, and packets with one changed byte, do no harm. The sanitizers check this. */
static void test_damage(void **state)
{
    for (unsigned type = 1; type < N_ENGINE_REPORT_TYPES; type++) {
        size_t n = pack_report(&engine_example_reports[type]);
        struct engine_report out;
        uint8_t copy[1024];

        assert_true(n <= sizeof(copy));
        memcpy(copy, packet, n);
        for (size_t i = 0; i < n; i++) {
            int r = engine_unpack_report(&arena, copy, i, &out, why, sizeof(why));

            assert_true(r == WIRE_E_INVALID || r == 0);
            for (unsigned bit = 0; bit < 8; bit++) {
                copy[i] ^= 1 << bit;
                r = engine_unpack_report(&arena, copy, n, &out, why, sizeof(why));
                assert_true(r == 0 || (r == WIRE_E_INVALID && strncmp(why, "Engine", 6) == 0));
                copy[i] ^= 1 << bit;
            }
        }
    }
}

TEST_GROUP(engine_wire)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_commands),       cmocka_unit_test(test_reports),
        cmocka_unit_test(test_largest),        cmocka_unit_test(test_refused_setups),
        cmocka_unit_test(test_refused_orders), cmocka_unit_test(test_refused_reports),
        cmocka_unit_test(test_texts),          cmocka_unit_test(test_damage),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
