/* SPDX-License-Identifier: Apache-2.0 */

/* Messages between nodes are packed and unpacked; bytes that are no such message are refused. */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "proto/nodes.pb-c.h"
#include "tests/core/wire/node-examples.h"
#include "tests/group.h"

static struct wire_arena arena;
static uint8_t *packet, *again; /* NODE_MESSAGE_MAX_BYTES */
static char why[256];

static int setup(void **state)
{
    (void)state;
    packet = malloc(NODE_MESSAGE_MAX_BYTES);
    again = malloc(NODE_MESSAGE_MAX_BYTES);
    assert_true(packet && again);
    return wire_arena_init(&arena);
}

static int teardown(void **state)
{
    (void)state;
    wire_arena_deinit(&arena);
    free(packet);
    free(again);
    return 0;
}

static size_t pack(const struct node_message *message)
{
    int n = node_pack(&arena, message, packet, NODE_MESSAGE_MAX_BYTES);

    assert_true(n > 0);
    return (size_t)n;
}

/* ---- there and back ------------------------------------------------------------------------------------ */

static void assert_bytes_equal(const uint8_t *a, size_t n_a, const uint8_t *b, size_t n_b)
{
    assert_int_equal(n_a, n_b);
    if (n_b > 0)
        assert_memory_equal(a, b, n_b);
}

static void assert_groups_equal(const struct wire_hyper *a, size_t n_a, const struct wire_hyper *b, size_t n_b)
{
    assert_int_equal(n_a, n_b);
    for (size_t i = 0; i < n_b; i++) {
        assert_true(a[i].lr == b[i].lr && a[i].beta1 == b[i].beta1 && a[i].beta2 == b[i].beta2 && a[i].eps == b[i].eps);
        assert_true(a[i].weight_decay == b[i].weight_decay && a[i].momentum == b[i].momentum);
        assert_true(a[i].dampening == b[i].dampening && a[i].lr_decay == b[i].lr_decay &&
                    a[i].nesterov == b[i].nesterov);
        assert_true(a[i].ns_a == b[i].ns_a && a[i].ns_b == b[i].ns_b && a[i].ns_c == b[i].ns_c);
        assert_true(a[i].ns_steps == b[i].ns_steps && a[i].match_rms_adamw == b[i].match_rms_adamw);
        assert_int_equal(a[i].given, b[i].given);
    }
}

static void assert_findings_equal(const struct node_finding *a, const struct node_finding *b)
{
    assert_true(a->found == b->found && a->overflowed == b->overflowed && a->micro_batch == b->micro_batch);
    assert_true(a->param == b->param && a->rank == b->rank && a->elem == b->elem && a->value == b->value);
    assert_true(a->n_nan == b->n_nan && a->n_inf == b->n_inf);
}

static void assert_args_equal(const struct request_step *a, const struct request_step *b)
{
    assert_true(a->step == b->step && a->attempt == b->attempt && a->has_max_norm == b->has_max_norm);
    assert_true(a->max_norm == b->max_norm && a->loss_scale == b->loss_scale && a->found_inf == b->found_inf);
    assert_groups_equal(a->groups, a->n_groups, b->groups, b->n_groups);
}

static void assert_verdicts_equal(const struct node_verdict *a, const struct node_verdict *b)
{
    assert_true(a->apply == b->apply && a->nonfinite == b->nonfinite && a->found_inf == b->found_inf);
    assert_true(a->norm == b->norm && a->s == b->s && a->norm_scale == b->norm_scale);
    assert_groups_equal(a->groups, a->n_groups, b->groups, b->n_groups);
    assert_bytes_equal(a->pushed_any, a->n_any_bytes, b->pushed_any, b->n_any_bytes);
    assert_bytes_equal(a->pushed_all, a->n_all_bytes, b->pushed_all, b->n_all_bytes);
    assert_findings_equal(&a->finding, &b->finding);
}

static void assert_messages_equal(const struct node_message *a, const struct node_message *b)
{
    assert_true(a->kind == b->kind && a->step == b->step && a->attempt == b->attempt && a->generation == b->generation);
    assert_true(a->tag == b->tag && a->parcel == b->parcel && a->micro_batch == b->micro_batch && a->pass == b->pass);
    assert_true(a->digest == b->digest && a->node == b->node && a->rank == b->rank && a->has_rank == b->has_rank);
    assert_true(a->norm == b->norm && a->arrived == b->arrived && a->proceed == b->proceed);
    assert_int_equal(a->forget, b->forget);
    assert_string_equal(a->reason, b->reason ? b->reason : "");
    assert_string_equal(a->cause_class, b->cause_class ? b->cause_class : "");
    assert_int_equal(a->n_numbers, b->n_numbers);
    for (size_t i = 0; i < b->n_numbers; i++)
        assert_true(a->numbers[i] == b->numbers[i]);
    assert_string_equal(a->text, b->text ? b->text : "");
    assert_bytes_equal(a->bytes, a->n_bytes, b->bytes, b->n_bytes);
    assert_bytes_equal(a->pushed_any, a->n_any_bytes, b->pushed_any, b->n_any_bytes);
    assert_bytes_equal(a->pushed_all, a->n_all_bytes, b->pushed_all, b->n_all_bytes);
    assert_bytes_equal(a->awaited, a->n_awaited_bytes, b->awaited, b->n_awaited_bytes);
    assert_args_equal(&a->args, &b->args);
    assert_findings_equal(&a->finding, &b->finding);
    assert_verdicts_equal(&a->verdict, &b->verdict);
}

static void assert_there_and_back(const struct node_message *message)
{
    struct node_message out;
    size_t n = pack(message);

    memset(&out, 0xa5, sizeof(out));
    assert_int_equal(node_unpack(&arena, packet, n, &out, why, sizeof(why)), 0);
    assert_messages_equal(&out, message);
    assert_int_equal(node_pack(&arena, &out, again, NODE_MESSAGE_MAX_BYTES), n);
    assert_memory_equal(packet, again, n);
}

static void test_kinds(void **state)
{
    uint64_t seen = 0;

    (void)state;
    for (size_t i = 0; i < N_NODE_EXAMPLES; i++) {
        assert_there_and_back(&node_examples[i]);
        seen |= UINT64_C(1) << node_examples[i].kind;
    }
    for (unsigned i = 0; i < zerod__v1__node_kind__descriptor.n_values; i++) {
        const ProtobufCEnumValue *value = &zerod__v1__node_kind__descriptor.values[i];

        assert_true(value->value == 0 || (seen >> value->value & 1)); /* each kind has an example */
        assert_string_equal(node_kind_name((enum node_kind)value->value), value->name + strlen("NODE_"));
    }
    assert_string_equal(node_kind_name((enum node_kind)63), "?");
}

static bool is_set(const ProtobufCMessage *proto, const ProtobufCFieldDescriptor *field)
{
    const void *at = (const uint8_t *)proto + field->offset;

    if (field->label == PROTOBUF_C_LABEL_REPEATED)
        return *(const size_t *)((const uint8_t *)proto + field->quantifier_offset) > 0;
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING:
        return **(char *const *)at != '\0';
    case PROTOBUF_C_TYPE_BYTES:
        return ((const ProtobufCBinaryData *)at)->len > 0;
    case PROTOBUF_C_TYPE_MESSAGE:
        return *(void *const *)at != NULL;
    case PROTOBUF_C_TYPE_DOUBLE:
        return *(const double *)at != 0;
    case PROTOBUF_C_TYPE_UINT64:
        return *(const uint64_t *)at != 0;
    default: /* uint32, bool, enum */
        return *(const uint32_t *)at != 0;
    }
}

/* A message with all fields set. */
static void test_fields(void **state)
{
    struct node_message all = node_examples[10];
    ProtobufCMessage *proto;
    size_t n;

    (void)state;
    assert_int_equal(all.kind, NODE_ASKED);
    all.generation = 1;
    all.tag = 2;
    all.parcel = 3;
    all.micro_batch = 4;
    all.pass = 5;
    all.numbers = node_examples[8].numbers;
    all.n_numbers = node_examples[8].n_numbers;
    all.digest = 6;
    all.node = 7;
    all.rank = 8;
    all.text = "text";
    all.bytes = node_examples[5].bytes;
    all.n_bytes = node_examples[5].n_bytes;
    all.finding = node_examples[12].finding;
    all.verdict = node_examples[26].verdict;
    all.norm = 9;
    all.arrived = 10;
    all.forget = true;
    all.reason = "E1302 all of it\nand more";
    all.cause_class = "D1";
    all.awaited = all.pushed_any;
    all.n_awaited_bytes = all.n_any_bytes;
    assert_there_and_back(&all);
    n = pack(&all);
    proto = protobuf_c_message_unpack(&zerod__v1__node_message__descriptor, NULL, n, packet);
    assert_non_null(proto);
    for (unsigned i = 0; i < proto->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &proto->descriptor->fields[i];

        assert_true(is_set(proto, field));
    }
    protobuf_c_message_free_unpacked(proto, NULL);
}

/* ---- limits -------------------------------------------------------------------------------------------- */

static void assert_refused(const void *data, size_t n_bytes, const char *expected)
{
    struct node_message out;

    assert_int_equal(node_unpack(&arena, data, n_bytes, &out, why, sizeof(why)), WIRE_E_INVALID);
    assert_string_equal(why, expected);
}

static void test_refused(void **state)
{
    static const struct wire_hyper bad = {.lr = NAN};
    static const struct {
        const char *bytes;
        size_t n_bytes;
        const char *why;
    } cases[] = {
        {"", 0, "NodeMessage.kind: 0, expected 1 to 62"},
        {"\x08\x00", 2, "NodeMessage.kind: 0, expected 1 to 62"},
        {"\x08\x3f", 2, "NodeMessage.kind: 63, expected 1 to 62"},
        {"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 11, "NodeMessage.kind: -1, expected 1 to 62"},
        {"garbage", 7, "NodeMessage: 7 bytes that are not a protobuf message"},
        {"\x08\x01\x72\x01\x07", 5, "NodeMessage.text: byte 0x07 at 0, expected UTF-8 without control characters"},
        {"\x08\x01\x72\x02k\x00", 6, "NodeMessage.text: byte 0x00 at 1, expected UTF-8 without control characters"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        assert_refused(cases[i].bytes, cases[i].n_bytes, cases[i].why);
    assert_refused(packet,
                   pack(&(struct node_message){.kind = NODE_DECIDED, .verdict = {.groups = &bad, .n_groups = 1}}),
                   "NodeMessage.verdict.groups[0].lr: nan, expected a finite number");
    assert_refused(packet, pack(&(struct node_message){.kind = NODE_ASKED, .args = {.loss_scale = -1}}),
                   "NodeMessage.args.loss_scale: -1, expected at least 0");
}

/*
 * Values that are too long are refused. No node sends them: node_pack() cuts texts, and never gets other values of this
 * size.
 */
static void test_too_long(void **state)
{
    static uint8_t bytes[896 * 1024 + 1];
    static char text[32 * 1024 + 2];
    static struct wire_hyper groups[WIRE_MAX_GROUPS + 1];
    struct node_message message = {.kind = NODE_VALUE, .bytes = bytes, .n_bytes = 896 * 1024 + 1};
    struct node_message out;
    Zerod__V1__NodeMessage proto = ZEROD__V1__NODE_MESSAGE__INIT;

    (void)state;
    assert_refused(packet, pack(&message), "NodeMessage.bytes: 917505 bytes, expected 0 to 917504");
    message = (struct node_message){.kind = NODE_ASKED, .pushed_any = bytes, .n_any_bytes = 256 * 1024 + 1};
    assert_refused(packet, pack(&message), "NodeMessage.pushed_any: 262145 bytes, expected 0 to 262144");
    message = (struct node_message){.kind = NODE_ASKED, .pushed_all = bytes, .n_all_bytes = 256 * 1024 + 1};
    assert_refused(packet, pack(&message), "NodeMessage.pushed_all: 262145 bytes, expected 0 to 262144");
    message =
        (struct node_message){.kind = NODE_DECIDED, .verdict = {.pushed_all = bytes, .n_all_bytes = 256 * 1024 + 1}};
    assert_refused(packet, pack(&message), "NodeMessage.verdict.pushed_all: 262145 bytes, expected 0 to 262144");
    message =
        (struct node_message){.kind = NODE_DECIDED, .verdict = {.groups = groups, .n_groups = ARRAY_SIZE(groups)}};
    snprintf(text, sizeof(text), "NodeMessage.verdict.groups: %zu values, expected at most %d", ARRAY_SIZE(groups),
             WIRE_MAX_GROUPS);
    assert_refused(packet, pack(&message), text);

    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    message = (struct node_message){.kind = NODE_ABORT, .text = text};
    assert_int_equal(node_unpack(&arena, packet, pack(&message), &out, why, sizeof(why)), 0);
    assert_int_equal(strlen(out.text), 32 * 1024);
    assert_string_equal(out.text + 32 * 1024 - 4, "x...");
    proto.kind = ZEROD__V1__NODE_KIND__NODE_ABORT;
    proto.text = text;
    assert_refused(packet, zerod__v1__node_message__pack(&proto, packet),
                   "NodeMessage.text: 32769 bytes, expected 0 to 32768");
}

/* The largest valid messages fit. A message that does not fit is not packed. */
static void test_largest(void **state)
{
    static uint8_t bits[256 * 1024], value[64 * 1024];
    static uint64_t numbers[2 * NODE_MESSAGE_MAX_BYTES / 16];
    struct node_message message = {.kind = NODE_ASKED,
                                   .pushed_any = bits,
                                   .n_any_bytes = sizeof(bits),
                                   .pushed_all = bits,
                                   .n_all_bytes = sizeof(bits)};

    (void)state;
    assert_there_and_back(&message);
    message = (struct node_message){.kind = NODE_VALUE, .bytes = value, .n_bytes = sizeof(value)};
    assert_there_and_back(&message);
    memset(numbers, 0xff, sizeof(numbers));
    message = (struct node_message){.kind = NODE_READY, .numbers = numbers, .n_numbers = 100000};
    assert_there_and_back(&message);
    message.n_numbers = ARRAY_SIZE(numbers);
    assert_int_equal(node_pack(&arena, &message, packet, NODE_MESSAGE_MAX_BYTES), -EMSGSIZE);
}

/* Prefixes of a packet, and packets with one changed byte, do no harm. The sanitizers check this. */
static void test_damage(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_NODE_EXAMPLES; k++) {
        size_t n = pack(&node_examples[k]);
        struct node_message out;

        for (size_t i = 0; i < n; i++) {
            int r = node_unpack(&arena, packet, i, &out, why, sizeof(why));

            assert_true(r == 0 || (r == WIRE_E_INVALID && strncmp(why, "NodeMessage", 11) == 0));
            for (unsigned bit = 0; bit < 8; bit++) {
                packet[i] ^= (uint8_t)(1 << bit);
                r = node_unpack(&arena, packet, n, &out, why, sizeof(why));
                assert_true(r == 0 || (r == WIRE_E_INVALID && strncmp(why, "NodeMessage", 11) == 0));
                packet[i] ^= (uint8_t)(1 << bit);
            }
        }
    }
}

TEST_GROUP(node_wire)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),    cmocka_unit_test(test_fields),  cmocka_unit_test(test_refused),
        cmocka_unit_test(test_too_long), cmocka_unit_test(test_largest), cmocka_unit_test(test_damage),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
