/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/layout/manifest.h"
#include "core/wire/frame.h"
#include "core/wire/wire.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "proto/zerod.pb-c.h"
#include "tests/core/wire/wire-examples.h"
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

static size_t pack_request(const struct request *request)
{
    int n = wire_pack_request(&arena, request, packet, sizeof(packet));

    assert_in_range(n, 1, sizeof(packet));
    return n;
}

static size_t pack_reply(const struct reply *reply)
{
    int n = wire_pack_reply(&arena, reply, packet, sizeof(packet));

    assert_in_range(n, 1, sizeof(packet));
    return n;
}

/* Asserts that the packet is refused with exactly this sentence. */
static void assert_request_refused(const void *data, size_t n, const char *expected)
{
    struct request out;

    assert_int_equal(wire_unpack_request(&arena, data, n, &out, why, sizeof(why)), WIRE_E_INVALID);
    assert_string_equal(why, expected);
}

static void assert_reply_refused(const void *data, size_t n, const char *expected)
{
    struct reply out;

    assert_int_equal(wire_unpack_reply(&arena, data, n, &out, why, sizeof(why)), WIRE_E_INVALID);
    assert_string_equal(why, expected);
}

/* ---- round trips --------------------------------------------------------------------------------------- */

/*
 * Asserts that every field of the message and of its first submessages is set, so that wire.c's tables miss no field.
 */
static void assert_all_set(const ProtobufCMessage *message)
{
    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        const uint8_t *member = (const uint8_t *)message + field->offset;
        static const uint8_t zero[sizeof(ProtobufCBinaryData)];
        const ProtobufCMessage *sub = NULL;

        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            assert_true(*(const size_t *)((const uint8_t *)message + field->quantifier_offset) > 0);
            if (field->type == PROTOBUF_C_TYPE_MESSAGE)
                sub = **(ProtobufCMessage *const *const *)member;
        } else if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
            sub = *(ProtobufCMessage *const *)member;
            assert_non_null(sub);
        } else if (field->type == PROTOBUF_C_TYPE_STRING) {
            assert_true(**(char *const *)member != '\0');
        } else {
            size_t size = field->type == PROTOBUF_C_TYPE_BYTES ? sizeof(zero)
                          : field->type == PROTOBUF_C_TYPE_UINT64 || field->type == PROTOBUF_C_TYPE_DOUBLE ? 8
                                                                                                           : 4;

            assert_memory_not_equal(member, zero, size);
        }
        /* a second push record has no other fields, and the first of several pushes may leave some unset */
        if (sub && strcmp(field->name, "second") != 0 && strcmp(message->descriptor->short_name, "Pushes") != 0)
            assert_all_set(sub);
    }
}

static void assert_texts_equal(const char *const *a, const char *const *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        assert_string_equal(a[i], b[i]);
}

static void assert_declare_equal(const struct request_declare *a, const struct request_declare *b)
{
    assert_int_equal(a->n_params, b->n_params);
    for (size_t i = 0; i < a->n_params; i++) {
        const struct layout_decl *p = &a->params[i], *q = &b->params[i];

        assert_int_equal(p->name_len, q->name_len);
        assert_memory_equal(p->name, q->name, p->name_len);
        assert_int_equal(p->dtype, q->dtype);
        assert_int_equal(p->grad_dtype, q->grad_dtype);
        assert_int_equal(p->group, q->group);
        assert_int_equal(p->trainable, q->trainable);
        assert_int_equal(p->n_dims, q->n_dims);
        if (p->n_dims > 0)
            assert_memory_equal(p->shape, q->shape, p->n_dims * sizeof(*p->shape));
    }
}

static void assert_hypers_equal(const struct wire_hyper *a, const struct wire_hyper *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const struct wire_hyper *g = &a[i], *h = &b[i];

        assert_true(g->lr == h->lr && g->beta1 == h->beta1 && g->beta2 == h->beta2 && g->eps == h->eps);
        assert_true(g->weight_decay == h->weight_decay && g->momentum == h->momentum);
        assert_true(g->dampening == h->dampening && g->lr_decay == h->lr_decay && g->nesterov == h->nesterov);
        assert_true(g->ns_a == h->ns_a && g->ns_b == h->ns_b && g->ns_c == h->ns_c);
        assert_true(g->ns_steps == h->ns_steps && g->match_rms_adamw == h->match_rms_adamw && g->given == h->given);
    }
}

static void assert_step_equal(const struct request_step *a, const struct request_step *b)
{
    assert_int_equal(a->step, b->step);
    assert_int_equal(a->attempt, b->attempt);
    assert_int_equal(a->n_groups, b->n_groups);
    assert_hypers_equal(a->groups, b->groups, a->n_groups);
    assert_true(a->has_max_norm == b->has_max_norm && a->max_norm == b->max_norm && a->loss_scale == b->loss_scale);
    assert_true(a->found_inf == b->found_inf && a->has_blob == b->has_blob);
    assert_true(a->wants_decision == b->wants_decision);
    assert_int_equal(a->n_blob_bytes, b->n_blob_bytes);
    assert_memory_equal(a->blob, b->blob, a->n_blob_bytes);
}

static void assert_ids_equal(const uint32_t *a, size_t n_a, const uint32_t *b, size_t n_b)
{
    assert_int_equal(n_a, n_b);
    assert_memory_equal(a, b, n_a * sizeof(*a));
}

static void assert_evidence_equal(const struct request_evidence *a, const struct request_evidence *b)
{
    const char *const ours[] = {a->exception, a->raised_at, a->swallowed_by, a->dead_segment, a->site};
    const char *const theirs[] = {b->exception, b->raised_at, b->swallowed_by, b->dead_segment, b->site};

    assert_texts_equal(ours, theirs, ARRAY_SIZE(ours));
    assert_true(a->step == b->step && a->attempt == b->attempt && a->n_dead_segments == b->n_dead_segments);
    assert_true(a->in_forward == b->in_forward && a->requires_grad_changed == b->requires_grad_changed);
    assert_true(a->n_forwards == b->n_forwards && a->n_backwards == b->n_backwards);
    assert_ids_equal(a->not_called, a->n_not_called, b->not_called, b->n_not_called);
    assert_ids_equal(a->called, a->n_called, b->called, b->n_called);
}

/* Asserts that two requests are equal, including what their pointers point to. b is the example. */
static void assert_request_equal(const struct request *a, const struct request *b)
{
    switch (b->type) {
    case REQUEST_HELLO:
        assert_int_equal(a->hello.version_min, b->hello.version_min);
        assert_int_equal(a->hello.version_max, b->hello.version_max);
        assert_int_equal(a->hello.features, b->hello.features);
        assert_int_equal(a->hello.role, b->hello.role);
        assert_int_equal(a->hello.rank, b->hello.rank);
        assert_string_equal(a->hello.run_id, b->hello.run_id);
        assert_int_equal(a->hello.incarnation, b->hello.incarnation);
        assert_int_equal(a->hello.on_duplicate, b->hello.on_duplicate);
        assert_string_equal(a->hello.client, b->hello.client);
        assert_string_equal(a->hello.optimizer, b->hello.optimizer);
        assert_true(a->hello.momentum == b->hello.momentum);
        assert_int_equal(a->hello.resumes, b->hello.resumes);
        assert_int_equal(a->hello.n_sent, b->hello.n_sent);
        assert_int_equal(a->hello.waits, b->hello.waits);
        assert_int_equal(a->hello.is_last, b->hello.is_last);
        assert_int_equal(a->hello.again, b->hello.again);
        assert_int_equal(a->hello.anew, b->hello.anew);
        break;
    case REQUEST_DECLARE:
        assert_declare_equal(&a->declare, &b->declare);
        break;
    case REQUEST_BEGIN_BACKWARD:
        assert_memory_equal(&a->begin_backward, &b->begin_backward, offsetof(struct request_begin_backward, groups));
        assert_int_equal(a->begin_backward.n_groups, b->begin_backward.n_groups);
        assert_hypers_equal(a->begin_backward.groups, b->begin_backward.groups, a->begin_backward.n_groups);
        break;
    case REQUEST_INTERN:
        assert_int_equal(a->intern.id, b->intern.id);
        assert_string_equal(a->intern.text, b->intern.text);
        break;
    case REQUEST_END_BACKWARD:
        assert_int_equal(a->end_backward.step, b->end_backward.step);
        assert_int_equal(a->end_backward.micro_batch, b->end_backward.micro_batch);
        assert_int_equal(a->end_backward.attempt, b->end_backward.attempt);
        assert_true(a->end_backward.has_blob);
        assert_int_equal(a->end_backward.n_blob_bytes, b->end_backward.n_blob_bytes);
        assert_memory_equal(a->end_backward.blob, b->end_backward.blob, b->end_backward.n_blob_bytes);
        break;
    case REQUEST_ABANDON_BACKWARD:
        assert_int_equal(a->abandon_backward.step, b->abandon_backward.step);
        assert_int_equal(a->abandon_backward.micro_batch, b->abandon_backward.micro_batch);
        assert_int_equal(a->abandon_backward.attempt, b->abandon_backward.attempt);
        assert_string_equal(a->abandon_backward.why, b->abandon_backward.why);
        break;
    case REQUEST_STEP:
        assert_step_equal(&a->step, &b->step);
        break;
    case REQUEST_GATHER:
        assert_ids_equal(a->gather.params, a->gather.n_params, b->gather.params, b->gather.n_params);
        break;
    case REQUEST_RELEASE:
        assert_ids_equal(a->release.params, a->release.n_params, b->release.params, b->release.n_params);
        break;
    case REQUEST_PREFETCH:
        assert_ids_equal(a->prefetch.params, a->prefetch.n_params, b->prefetch.params, b->prefetch.n_params);
        break;
    case REQUEST_PUSHES:
        assert_memory_equal(&a->pushes.first, &b->pushes.first, sizeof(a->pushes.first));
        assert_ids_equal(a->pushes.others, a->pushes.n_others, b->pushes.others, b->pushes.n_others);
        break;
    case REQUEST_HELD:
        assert_ids_equal(a->held.params, a->held.n_params, b->held.params, b->held.n_params);
        break;
    case REQUEST_ABORT_STEP:
        assert_string_equal(a->abort_step.why, b->abort_step.why);
        break;
    case REQUEST_REPORT:
        assert_int_equal(a->report.code, b->report.code);
        assert_ids_equal(a->report.params, a->report.n_params, b->report.params, b->report.n_params);
        assert_string_equal(a->report.detail, b->report.detail);
        break;
    case REQUEST_STACK:
        assert_string_equal(a->stack.text, b->stack.text);
        break;
    case REQUEST_EVIDENCE:
        assert_evidence_equal(&a->evidence, &b->evidence);
        break;
    case REQUEST_ADMIN:
        assert_string_equal(a->admin.command, b->admin.command);
        assert_int_equal(a->admin.n_args, b->admin.n_args);
        assert_texts_equal(a->admin.args, b->admin.args, b->admin.n_args);
        break;
    default:
        /* only numbers; both requests were zeroed, so their padding is equal */
        assert_memory_equal(a, b, sizeof(*a));
        break;
    }
}

static void test_request_round_trip(void **state)
{
    for (unsigned type = 1; type < N_REQUEST_TYPES; type++) {
        const struct request *example = &example_requests[type];
        size_t n = pack_request(example);
        struct request out;
        Zerod__V1__ClientMessage *message;

        memset(&out, 0, sizeof(out));
        assert_int_equal(example->type, type);
        if (wire_unpack_request(&arena, packet, n, &out, why, sizeof(why)) != 0)
            fail_msg("%s", why);
        assert_int_equal(out.type, type);
        assert_request_equal(&out, example);

        message = zerod__v1__client_message__unpack(NULL, n, packet);
        assert_non_null(message);
        assert_int_equal(message->kind_case, type);
        assert_all_set(&message->hello->base);
        zerod__v1__client_message__free_unpacked(message, NULL);
    }
}

static void assert_positions_equal(const struct wire_position *a, const struct wire_position *b)
{
    assert_true(a->step == b->step && a->micro_batch == b->micro_batch);
    assert_true(a->attempt == b->attempt && a->n_windows == b->n_windows);
}

static void assert_segments_equal(const struct wire_segment *a, size_t n_a, const struct wire_segment *b, size_t n_b)
{
    assert_int_equal(n_a, n_b);
    for (size_t i = 0; i < n_a; i++)
        assert_true(a[i].kind == b[i].kind && a[i].n_bytes == b[i].n_bytes && a[i].cuda == b[i].cuda);
}

static void assert_records_equal(const struct wire_push_record *a, const struct wire_push_record *b)
{
    assert_true(a->sequence == b->sequence && a->step == b->step && a->micro_batch == b->micro_batch);
    assert_true(a->param == b->param && a->ordinal == b->ordinal && a->task == b->task && a->depth == b->depth);
    assert_true(a->call == b->call && a->time_ns == b->time_ns);
    assert_string_equal(a->segment, b->segment);
    assert_string_equal(a->site, b->site);
}

static void assert_diagnostics_equal(const struct wire_diagnostic *a, const struct wire_diagnostic *b)
{
    assert_int_equal(a->code, b->code);
    assert_string_equal(a->cause_class, b->cause_class);
    assert_string_equal(a->title, b->title);
    assert_true(a->has_rank == b->has_rank && a->rank == b->rank);
    assert_true(a->has_step == b->has_step && a->step == b->step);
    assert_true(a->has_micro_batch == b->has_micro_batch && a->micro_batch == b->micro_batch);
    assert_int_equal(a->n_params_named, b->n_params_named);
    assert_texts_equal(a->params, b->params, b->n_params_named);
    assert_int_equal(a->n_params_total, b->n_params_total);
    assert_true(a->has_first == b->has_first && a->has_second == b->has_second);
    assert_records_equal(&a->first, &b->first);
    assert_records_equal(&a->second, &b->second);
    assert_int_equal(a->n_fields, b->n_fields);
    for (size_t i = 0; i < b->n_fields; i++) {
        assert_string_equal(a->fields[i].label, b->fields[i].label);
        assert_string_equal(a->fields[i].text, b->fields[i].text);
    }
    assert_string_equal(a->text, b->text);
    assert_true(a->id == b->id && a->warning == b->warning);
}

static void assert_formed_equal(const struct reply_formed *a, const struct reply_formed *b)
{
    assert_true(a->resumed == b->resumed && a->init_wanted == b->init_wanted && a->has_blob == b->has_blob);
    assert_positions_equal(&a->position, &b->position);
    assert_segments_equal(a->segments, a->n_segments, b->segments, b->n_segments);
    assert_int_equal(a->n_blob_bytes, b->n_blob_bytes);
    assert_memory_equal(a->blob, b->blob, b->n_blob_bytes);
    assert_true(a->n_tickets == b->n_tickets && a->ring_bytes == b->ring_bytes && a->digest == b->digest);
    assert_true(a->loss_scale == b->loss_scale);
    assert_true(a->first_point == b->first_point && a->bucket_elems == b->bucket_elems);
    assert_int_equal(a->speculates, b->speculates);
    assert_int_equal(a->n_gpu_bytes, b->n_gpu_bytes);
    assert_memory_equal(a->gpu, b->gpu, b->n_gpu_bytes);
}

static void assert_reply_equal(const struct reply *a, const struct reply *b)
{
    switch (b->type) {
    case REPLY_WELCOME:
        assert_int_equal(a->welcome.version, b->welcome.version);
        assert_int_equal(a->welcome.features, b->welcome.features);
        assert_int_equal(a->welcome.world_size, b->welcome.world_size);
        assert_int_equal(a->welcome.stage, b->welcome.stage);
        assert_int_equal(a->welcome.bucket_elems, b->welcome.bucket_elems);
        assert_int_equal(a->welcome.on_duplicate, b->welcome.on_duplicate);
        assert_string_equal(a->welcome.server, b->welcome.server);
        assert_int_equal(a->welcome.private_weights, b->welcome.private_weights);
        assert_string_equal(a->welcome.run_id, b->welcome.run_id);
        assert_int_equal(a->welcome.stage3_max_live_elems, b->welcome.stage3_max_live_elems);
        assert_string_equal(a->welcome.optimizer, b->welcome.optimizer);
        assert_hypers_equal(&a->welcome.hyper, &b->welcome.hyper, 1);
        assert_true(a->welcome.max_norm == b->welcome.max_norm && a->welcome.accumulation == b->welcome.accumulation);
        assert_true(a->welcome.has_scheduler == b->welcome.has_scheduler && a->welcome.mean == b->welcome.mean);
        assert_true(a->welcome.fp16 == b->welcome.fp16 && a->welcome.cuda == b->welcome.cuda);
        assert_int_equal(a->welcome.configured, b->welcome.configured);
        assert_int_equal(a->welcome.resumed, b->welcome.resumed);
        assert_int_equal(a->welcome.n_received, b->welcome.n_received);
        assert_int_equal(a->welcome.reattach_ms, b->welcome.reattach_ms);
        assert_int_equal(a->welcome.configured_stage, b->welcome.configured_stage);
        assert_true(a->welcome.looks == b->welcome.looks);
        break;
    case REPLY_FORMED:
        assert_formed_equal(&a->formed, &b->formed);
        break;
    case REPLY_DONE:
        assert_positions_equal(&a->done.position, &b->done.position);
        assert_segments_equal(a->done.segments, a->done.n_segments, b->done.segments, b->done.n_segments);
        assert_true(a->done.norm == b->done.norm && a->done.loss_scale == b->done.loss_scale);
        break;
    case REPLY_STATE_IS:
        assert_segments_equal(a->state_is.segments, a->state_is.n_segments, b->state_is.segments,
                              b->state_is.n_segments);
        assert_true(a->state_is.n_elems == b->state_is.n_elems && a->state_is.norm == b->state_is.norm);
        assert_int_equal(a->state_is.count, b->state_is.count);
        assert_int_equal(a->state_is.offset_bytes, b->state_is.offset_bytes);
        break;
    case REPLY_REFUSED:
        assert_diagnostics_equal(&a->refused.diagnostic, &b->refused.diagnostic);
        assert_true(a->refused.closing == b->refused.closing && a->refused.aborted == b->refused.aborted);
        assert_positions_equal(&a->refused.position, &b->refused.position);
        break;
    case REPLY_ADMIN_PART:
        assert_int_equal(a->admin_part.n_json_bytes, b->admin_part.n_json_bytes);
        assert_memory_equal(a->admin_part.json, b->admin_part.json, b->admin_part.n_json_bytes);
        assert_true(a->admin_part.last == b->admin_part.last && a->admin_part.exit_code == b->admin_part.exit_code);
        break;
    default:
        assert_memory_equal(a, b, sizeof(*a));
        break;
    }
}

static void test_reply_round_trip(void **state)
{
    for (unsigned type = 1; type < N_REPLY_TYPES; type++) {
        const struct reply *example = &example_replies[type];
        size_t n = pack_reply(example);
        struct reply out;
        Zerod__V1__ServerMessage *message;

        memset(&out, 0, sizeof(out));
        assert_int_equal(example->type, type);
        if (wire_unpack_reply(&arena, packet, n, &out, why, sizeof(why)) != 0)
            fail_msg("%s", why);
        assert_int_equal(out.type, type);
        assert_reply_equal(&out, example);

        message = zerod__v1__server_message__unpack(NULL, n, packet);
        assert_non_null(message);
        assert_int_equal(message->kind_case, type);
        assert_all_set(&message->welcome->base);
        zerod__v1__server_message__free_unpacked(message, NULL);
    }
}

/* No field is set. NULL and 0 are packed; texts become "", and the refusal names a field that must be set. */
static void test_empty_round_trip(void **state)
{
    static const char *const request_faults[N_REQUEST_TYPES] = {
        [REQUEST_HELLO] = "Hello.version_min: 0, expected at least 1",
        [REQUEST_INTERN] = "Intern.id: 0, expected 1 to 65535",
        [REQUEST_PUSHES] = "Pushes.others: 0 values, expected at least 1",
        [REQUEST_REPORT] = "Report.code: 0, expected 1102 to 1107 or 1110",
        [REQUEST_ADMIN] = "Admin.command: 0 bytes, expected 1 to 64",
    };
    static const char *const reply_faults[N_REPLY_TYPES] = {
        [REPLY_WELCOME] = "Welcome.version: 0, expected at least 1",
        [REPLY_REFUSED] = "Refused.diagnostic.code: 0, expected 1000 to 1999",
    };
    struct request request, request_out;
    struct reply reply, reply_out;
    size_t n;

    for (unsigned type = 1; type < N_REQUEST_TYPES; type++) {
        memset(&request, 0, sizeof(request));
        memset(&request_out, 0xaa, sizeof(request_out));
        request.type = type;
        n = pack_request(&request);
        if (request_faults[type]) {
            assert_request_refused(packet, n, request_faults[type]);
            continue;
        }
        assert_int_equal(wire_unpack_request(&arena, packet, n, &request_out, why, sizeof(why)), 0);
        assert_int_equal(request_out.type, type);
        assert_int_equal(pack_request(&request_out), n);
    }
    for (unsigned type = 1; type < N_REPLY_TYPES; type++) {
        memset(&reply, 0, sizeof(reply));
        memset(&reply_out, 0xaa, sizeof(reply_out));
        reply.type = type;
        n = pack_reply(&reply);
        if (reply_faults[type]) {
            assert_reply_refused(packet, n, reply_faults[type]);
            continue;
        }
        assert_int_equal(wire_unpack_reply(&arena, packet, n, &reply_out, why, sizeof(why)), 0);
        assert_int_equal(reply_out.type, type);
    }

    n = pack_request(&(struct request){.type = REQUEST_ABORT_STEP});
    assert_int_equal(wire_unpack_request(&arena, packet, n, &request_out, why, sizeof(why)), 0);
    assert_string_equal(request_out.abort_step.why, "");
    n = pack_request(&(struct request){.type = REQUEST_GATHER});
    assert_int_equal(wire_unpack_request(&arena, packet, n, &request_out, why, sizeof(why)), 0);
    assert_null(request_out.gather.params);
    n = pack_request(&(struct request){.type = REQUEST_END_BACKWARD, .end_backward.has_blob = true});
    assert_int_equal(wire_unpack_request(&arena, packet, n, &request_out, why, sizeof(why)), 0);
    assert_true(request_out.end_backward.has_blob && !request_out.end_backward.blob);
}

/* ---- limits -------------------------------------------------------------------------------------------- */

static const char *text_of(size_t n)
{
    static char text[8192];

    assert_true(n < sizeof(text));
    memset(text, 'x', n);
    text[n] = '\0';
    return text;
}

static const uint8_t large_blob[WIRE_MAX_BLOB_BYTES + 1];
static const uint32_t many_ids[WIRE_MAX_IDS + 1];

static void check_request(const struct request *request, const char *expected)
{
    size_t n = pack_request(request);
    struct request out;

    if (expected)
        assert_request_refused(packet, n, expected);
    else if (wire_unpack_request(&arena, packet, n, &out, why, sizeof(why)) != 0)
        fail_msg("%s", why);
}

static void check_reply(const struct reply *reply, const char *expected)
{
    size_t n = pack_reply(reply);
    struct reply out;

    if (expected)
        assert_reply_refused(packet, n, expected);
    else if (wire_unpack_reply(&arena, packet, n, &out, why, sizeof(why)) != 0)
        fail_msg("%s", why);
}

/* Asserts that the example with one change is refused with this sentence, or accepted if the sentence is NULL. */
#define REQUEST_CASE(type_, change, expected)                                                                          \
    do {                                                                                                               \
        struct request q = example_requests[type_];                                                                    \
        change;                                                                                                        \
        check_request(&q, expected);                                                                                   \
    } while (0)
#define REPLY_CASE(type_, change, expected)                                                                            \
    do {                                                                                                               \
        struct reply q = example_replies[type_];                                                                       \
        change;                                                                                                        \
        check_reply(&q, expected);                                                                                     \
    } while (0)

static void test_limits_of_hello(void **state)
{
    REQUEST_CASE(REQUEST_HELLO, q.hello.version_min = 0, "Hello.version_min: 0, expected at least 1");
    REQUEST_CASE(REQUEST_HELLO, q.hello.version_min = 3, "Hello.version_max: 2, expected at least version_min, 3");
    REQUEST_CASE(REQUEST_HELLO, q.hello.role = 3, "Hello.role: 3, expected 0 to 2");
    REQUEST_CASE(REQUEST_HELLO, q.hello.role = -1, "Hello.role: -1, expected 0 to 2");
    REQUEST_CASE(REQUEST_HELLO, q.hello.incarnation = 0, "Hello.incarnation: 0, expected at least 1");
    REQUEST_CASE(REQUEST_HELLO, q.hello.on_duplicate = 4, "Hello.on_duplicate: 4, expected 0 to 3");
    REQUEST_CASE(REQUEST_HELLO, q.hello.run_id = text_of(255), NULL);
    REQUEST_CASE(REQUEST_HELLO, q.hello.run_id = text_of(256), "Hello.run_id: 256 bytes, expected 0 to 255");
    REQUEST_CASE(REQUEST_HELLO, q.hello.client = text_of(255), NULL);
    REQUEST_CASE(REQUEST_HELLO, q.hello.client = text_of(256), "Hello.client: 256 bytes, expected 0 to 255");
}

#define PARAM_CASE(change, expected)                                                                                   \
    do {                                                                                                               \
        struct layout_decl decls[2] = {example_requests[REQUEST_DECLARE].declare.params[1],                            \
                                       example_requests[REQUEST_DECLARE].declare.params[0]};                           \
        struct layout_decl *p = &decls[1];                                                                             \
        p->muon = false;                                                                                               \
        struct request q = {.type = REQUEST_DECLARE, .declare = {.params = decls, .n_params = 2}};                     \
        change;                                                                                                        \
        check_request(&q, expected);                                                                                   \
    } while (0)

#define NO_MUON                                                                                                        \
    "Declare.params[1].muon: true, expected false; it is for trainable parameters of two dimensions, each below 2^31"

static void test_limits_of_params(void **state)
{
    static const uint64_t huge[] = {UINT64_C(1) << 31, UINT64_C(1) << 31, 0};
    static const uint64_t wide[] = {1, UINT64_C(1) << 31};
    static const uint64_t wraps[] = {UINT64_MAX, UINT64_MAX};
    static const uint64_t wraps_early[] = {UINT64_C(1) << 63, 2, 5};
    static const uint64_t most[] = {(UINT64_C(1) << 62) - 1};
    static const uint64_t ones[17] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

    PARAM_CASE(p->name_len = 0, "Declare.params[1].name: 0 bytes, expected 1 to 1024");
    PARAM_CASE((p->name = text_of(1024), p->name_len = 1024), NULL);
    PARAM_CASE((p->name = text_of(1025), p->name_len = 1025), "Declare.params[1].name: 1025 bytes, expected 1 to 1024");
    PARAM_CASE(p->dtype = 3, "Declare.params[1].dtype: 3, expected 0 to 2");
    PARAM_CASE(p->grad_dtype = -7, "Declare.params[1].grad_dtype: -7, expected 0 to 2");
    PARAM_CASE((p->shape = ones, p->n_dims = 16), NULL);
    PARAM_CASE((p->shape = ones, p->n_dims = 17), "Declare.params[1].shape: 17 values, expected at most 16");
    PARAM_CASE((p->shape = huge, p->n_dims = 2), "Declare.params[1].shape: 2^62 elements or more, expected less");
    PARAM_CASE((p->shape = wraps, p->n_dims = 2), "Declare.params[1].shape: 2^62 elements or more, expected less");
    PARAM_CASE((p->shape = wraps_early, p->n_dims = 3),
               "Declare.params[1].shape: 2^62 elements or more, expected less");
    PARAM_CASE((p->shape = most, p->n_dims = 1), NULL);
    PARAM_CASE((p->shape = huge, p->n_dims = 3), NULL); /* a dimension is 0 */
    PARAM_CASE(p->n_dims = 0, NULL);
    PARAM_CASE(p->muon = true, NULL);
    PARAM_CASE((p->muon = true, p->n_dims = 1), NO_MUON);
    PARAM_CASE((p->muon = true, p->trainable = false), NO_MUON);
    PARAM_CASE((p->muon = true, p->shape = wide), NO_MUON);
    PARAM_CASE(p->group = 1024, "Declare.params[1].group: 1024, expected 0 to 1023");
}

static void test_limits_of_backward(void **state)
{
    REQUEST_CASE(REQUEST_INIT, q.init.offset_bytes = 65, "Init.offset_bytes: 65, expected a multiple of 64");
    REQUEST_CASE(REQUEST_INIT, q.init.start_elem = UINT64_C(1) << 62,
                 "Init.start_elem: 4611686018427387904, expected 0 to 4611686018427387903");
    REQUEST_CASE(REQUEST_INIT, q.init.n_elems = UINT64_MAX,
                 "Init.n_elems: 18446744073709551615, expected 0 to 4611686018427387903");
    REQUEST_CASE(REQUEST_INTERN, q.intern.id = 0, "Intern.id: 0, expected 1 to 65535");
    REQUEST_CASE(REQUEST_INTERN, q.intern.id = 65536, "Intern.id: 65536, expected 1 to 65535");
    REQUEST_CASE(REQUEST_INTERN, q.intern.text = text_of(1024), NULL);
    REQUEST_CASE(REQUEST_INTERN, q.intern.text = text_of(1025), "Intern.text: 1025 bytes, expected 0 to 1024");
    REQUEST_CASE(REQUEST_PUSH, q.push.offset_bytes = 32, "Push.offset_bytes: 32, expected a multiple of 64");
    REQUEST_CASE(REQUEST_PUSH, q.push.segment = 65536, "Push.segment: 65536, expected 0 to 65535");
    REQUEST_CASE(REQUEST_PUSH, q.push.site = 65536, "Push.site: 65536, expected 0 to 65535");
    REQUEST_CASE(REQUEST_PUSH, q.push.flags = 16, "Push.flags: 16, expected 0 to 15");
    REQUEST_CASE(REQUEST_PUSH, q.push.dtype_plus_one = 4, "Push.dtype_plus_one: 4, expected 0 to 3");
    REQUEST_CASE(REQUEST_PUSHES, q.pushes.first.flags = 16, "Pushes.first.flags: 16, expected 0 to 15");
    REQUEST_CASE(REQUEST_PUSHES, (q.pushes.others = many_ids, q.pushes.n_others = 63), NULL);
    REQUEST_CASE(REQUEST_PUSHES, (q.pushes.others = many_ids, q.pushes.n_others = 64),
                 "Pushes.others: 64 values, expected at most 63");
    REQUEST_CASE(REQUEST_PUSHES, q.pushes.n_others = 0, "Pushes.others: 0 values, expected at least 1");
    REQUEST_CASE(REQUEST_PUSHES, q.pushes.first.record_only = true,
                 "Pushes.first: record_only, which only a push of its own may have");
    REQUEST_CASE(REQUEST_PUSHES, q.pushes.first.part = 1, "Pushes.first: part, which only a push of its own may have");
    REQUEST_CASE(REQUEST_PUSHES, q.pushes.first.point = 1,
                 "Pushes.first: point, which only a push of its own may have");
    REQUEST_CASE(REQUEST_PUSHES, q.pushes.first.n_bytes = 1,
                 "Pushes.first: n_bytes, which only a push of its own may have");
    REQUEST_CASE(REQUEST_PUSHES, q.pushes.first.dtype_plus_one = 1,
                 "Pushes.first: dtype_plus_one, which only a push of its own may have");
    REQUEST_CASE(REQUEST_END_BACKWARD, (q.end_backward.blob = large_blob, q.end_backward.n_blob_bytes = 65536), NULL);
    REQUEST_CASE(REQUEST_END_BACKWARD, (q.end_backward.blob = large_blob, q.end_backward.n_blob_bytes = 65537),
                 "EndBackward.blob: 65537 bytes, expected 0 to 65536");
    REQUEST_CASE(REQUEST_ABANDON_BACKWARD, q.abandon_backward.why = text_of(1024), NULL);
    REQUEST_CASE(REQUEST_ABANDON_BACKWARD, q.abandon_backward.why = text_of(1025),
                 "AbandonBackward.why: 1025 bytes, expected 0 to 1024");
}

static void test_limits_of_step(void **state)
{
    static struct wire_hyper groups[WIRE_MAX_GROUPS + 1];

    REQUEST_CASE(REQUEST_STEP, q.step.max_norm = NAN, "Step.max_norm: nan, expected a finite number");
    REQUEST_CASE(REQUEST_STEP, q.step.max_norm = -1, "Step.max_norm: -1, expected at least 0");
    REQUEST_CASE(REQUEST_STEP, q.step.loss_scale = INFINITY, "Step.loss_scale: inf, expected a finite number");
    REQUEST_CASE(REQUEST_STEP, q.step.loss_scale = -0.5, "Step.loss_scale: -0.5, expected at least 0");
    REQUEST_CASE(REQUEST_STEP, (q.step.blob = large_blob, q.step.n_blob_bytes = 65537),
                 "Step.blob: 65537 bytes, expected 0 to 65536");
    REQUEST_CASE(REQUEST_STEP, (q.step.groups = groups, q.step.n_groups = 1024), NULL);
    REQUEST_CASE(REQUEST_STEP, (q.step.groups = groups, q.step.n_groups = 1025),
                 "Step.groups: 1025 values, expected at most 1024");
    for (unsigned i = 0; i < 8; i++) {
        static const char *const names[] = {"lr",           "beta1",    "beta2",     "eps",
                                            "weight_decay", "momentum", "dampening", "lr_decay"};
        struct wire_hyper bad[3] = {0};
        char expected[80];

        (&bad[2].lr)[i] = -INFINITY;
        snprintf(expected, sizeof(expected), "Step.groups[2].%s: -inf, expected a finite number", names[i]);
        REQUEST_CASE(REQUEST_STEP, (q.step.groups = bad, q.step.n_groups = 3), expected);
    }
}

static void test_limits_of_other_requests(void **state)
{
    const char *args[WIRE_MAX_ARGS + 1];

    REQUEST_CASE(REQUEST_GATHER, (q.gather.params = many_ids, q.gather.n_params = 65536), NULL);
    REQUEST_CASE(REQUEST_GATHER, (q.gather.params = many_ids, q.gather.n_params = 65537),
                 "Gather.params: 65537 values, expected at most 65536");
    REQUEST_CASE(REQUEST_RELEASE, (q.release.params = many_ids, q.release.n_params = 65537),
                 "Release.params: 65537 values, expected at most 65536");
    REQUEST_CASE(REQUEST_PREFETCH, (q.prefetch.params = many_ids, q.prefetch.n_params = 65537),
                 "Prefetch.params: 65537 values, expected at most 65536");
    REQUEST_CASE(REQUEST_HELD, (q.held.params = many_ids, q.held.n_params = 65537),
                 "Held.params: 65537 values, expected at most 65536");
    REQUEST_CASE(REQUEST_READ_STATE, q.read_state.kind = 5, "ReadState.kind: 5, expected 0 to 4");
    REQUEST_CASE(REQUEST_WRITE_STATE, q.write_state.kind = 5, "WriteState.kind: 5, expected 0 to 4");
    REQUEST_CASE(REQUEST_WRITE_STATE, q.write_state.kind = WIRE_STATE_GRAD_NORM,
                 "WriteState.kind: 3, expected 0 to 2, or 4");
    REQUEST_CASE(REQUEST_WRITE_STATE, q.write_state.kind = WIRE_STATE_EXP_AVG,
                 "WriteState.count: 9007199254740992, expected 0 but with kind 4");
    REQUEST_CASE(REQUEST_WRITE_STATE, (q.write_state.kind = WIRE_STATE_EXP_AVG, q.write_state.count = 0), NULL);
    REQUEST_CASE(REQUEST_WRITE_STATE, q.write_state.count++,
                 "WriteState.count: 9007199254740993, expected 0 to 9007199254740992");
    REQUEST_CASE(REQUEST_ABORT_STEP, q.abort_step.why = text_of(1025), "AbortStep.why: 1025 bytes, expected 0 to 1024");
    REQUEST_CASE(REQUEST_REPORT, q.report.code = 1101, "Report.code: 1101, expected 1102 to 1107 or 1110");
    REQUEST_CASE(REQUEST_REPORT, q.report.code = 1108, "Report.code: 1108, expected 1102 to 1107 or 1110");
    REQUEST_CASE(REQUEST_REPORT, q.report.code = 1102, NULL);
    REQUEST_CASE(REQUEST_REPORT, q.report.code = 1103, NULL);
    REQUEST_CASE(REQUEST_REPORT, q.report.code = 1107, NULL);
    REQUEST_CASE(REQUEST_REPORT, (q.report.params = many_ids, q.report.n_params = 65537),
                 "Report.params: 65537 values, expected at most 65536");
    REQUEST_CASE(REQUEST_REPORT, q.report.detail = text_of(1025), "Report.detail: 1025 bytes, expected 0 to 1024");

    REQUEST_CASE(REQUEST_EVIDENCE, q.evidence.exception = text_of(1024), NULL);
    REQUEST_CASE(REQUEST_EVIDENCE, q.evidence.exception = text_of(1025),
                 "Evidence.exception: 1025 bytes, expected 0 to 1024");
    REQUEST_CASE(REQUEST_EVIDENCE, q.evidence.raised_at = text_of(1025),
                 "Evidence.raised_at: 1025 bytes, expected 0 to 1024");
    REQUEST_CASE(REQUEST_EVIDENCE, q.evidence.swallowed_by = text_of(1025),
                 "Evidence.swallowed_by: 1025 bytes, expected 0 to 1024");
    REQUEST_CASE(REQUEST_EVIDENCE, q.evidence.dead_segment = text_of(1025),
                 "Evidence.dead_segment: 1025 bytes, expected 0 to 1024");
    REQUEST_CASE(REQUEST_EVIDENCE, q.evidence.site = text_of(1025), "Evidence.site: 1025 bytes, expected 0 to 1024");
    REQUEST_CASE(REQUEST_EVIDENCE, (q.evidence.not_called = many_ids, q.evidence.n_not_called = 16384), NULL);
    REQUEST_CASE(REQUEST_EVIDENCE, (q.evidence.not_called = many_ids, q.evidence.n_not_called = 16385),
                 "Evidence.not_called: 16385 values, expected at most 16384");
    REQUEST_CASE(REQUEST_EVIDENCE, (q.evidence.called = many_ids, q.evidence.n_called = 16385),
                 "Evidence.called: 16385 values, expected at most 16384");

    for (size_t i = 0; i < ARRAY_SIZE(args); i++)
        args[i] = "x";
    REQUEST_CASE(REQUEST_ADMIN, q.admin.command = "", "Admin.command: 0 bytes, expected 1 to 64");
    REQUEST_CASE(REQUEST_ADMIN, q.admin.command = text_of(65), "Admin.command: 65 bytes, expected 1 to 64");
    REQUEST_CASE(REQUEST_ADMIN, (q.admin.args = args, q.admin.n_args = 64), NULL);
    REQUEST_CASE(REQUEST_ADMIN, (q.admin.args = args, q.admin.n_args = 65),
                 "Admin.args: 65 values, expected at most 64");
    args[1] = text_of(4097);
    REQUEST_CASE(REQUEST_ADMIN, (q.admin.args = args, q.admin.n_args = 2),
                 "Admin.args[1]: 4097 bytes, expected 0 to 4096");
}

static void test_limits_of_replies(void **state)
{
    struct wire_segment segments[9];

    for (size_t i = 0; i < ARRAY_SIZE(segments); i++)
        segments[i] = (struct wire_segment){.kind = WIRE_SEGMENT_RING, .n_bytes = 4096};

    REPLY_CASE(REPLY_WELCOME, q.welcome.world_size = 0, "Welcome.world_size: 0, expected at least 1");
    REPLY_CASE(REPLY_WELCOME, q.welcome.stage = 4, "Welcome.stage: 4, expected 1 to 3");
    REPLY_CASE(REPLY_WELCOME, q.welcome.stage = 0, "Welcome.stage: 0, expected 1 to 3");
    REPLY_CASE(REPLY_WELCOME, q.welcome.bucket_elems = 0, "Welcome.bucket_elems: 0, expected at least 1");
    REPLY_CASE(REPLY_WELCOME, q.welcome.on_duplicate = 9, "Welcome.on_duplicate: 9, expected 0 to 3");
    REPLY_CASE(REPLY_WELCOME, q.welcome.server = text_of(256), "Welcome.server: 256 bytes, expected 0 to 255");
    REPLY_CASE(REPLY_WELCOME, q.welcome.optimizer = text_of(65), "Welcome.optimizer: 65 bytes, expected 0 to 64");
    REPLY_CASE(REPLY_WELCOME, q.welcome.hyper.lr = INFINITY, "Welcome.hyper.lr: inf, expected a finite number");
    REPLY_CASE(REPLY_WELCOME, q.welcome.max_norm = -1, "Welcome.max_norm: -1, expected at least 0");
    REPLY_CASE(REPLY_WELCOME, q.welcome.run_id = text_of(256), "Welcome.run_id: 256 bytes, expected 0 to 255");
    REPLY_CASE(REPLY_FORMED, q.formed.n_gpu_bytes = 0, NULL);
    REPLY_CASE(REPLY_FORMED, q.formed.n_gpu_bytes = 15, "Formed.gpu: 15 bytes, expected none or 16");
    REPLY_CASE(REPLY_FORMED, (q.formed.segments = segments, q.formed.n_segments = 8), NULL);
    REPLY_CASE(REPLY_FORMED, (q.formed.segments = segments, q.formed.n_segments = 9),
               "Formed.segments: 9 values, expected at most 8");
    segments[1].kind = 10;
    REPLY_CASE(REPLY_FORMED, (q.formed.segments = segments, q.formed.n_segments = 8),
               "Formed.segments[1].kind: 10, expected 0 to 9");
    segments[1].kind = WIRE_SEGMENT_STATE;
    segments[1].n_bytes = 0;
    REPLY_CASE(REPLY_DONE, (q.done.segments = segments, q.done.n_segments = 2),
               "Done.segments[1].n_bytes: 0, expected at least 4096");
    segments[1].n_bytes = 4097;
    REPLY_CASE(REPLY_DONE, (q.done.segments = segments, q.done.n_segments = 2),
               "Done.segments[1].n_bytes: 4097, expected a multiple of 4096");
    REPLY_CASE(REPLY_STATE_IS, (q.state_is.segments = segments, q.state_is.n_segments = 2),
               "StateIs.segments: 2 values, expected at most 1");
    REPLY_CASE(REPLY_FORMED, (q.formed.blob = large_blob, q.formed.n_blob_bytes = 65537),
               "Formed.blob: 65537 bytes, expected 0 to 65536");
    REPLY_CASE(REPLY_FORMED, q.formed.loss_scale = NAN, "Formed.loss_scale: nan, expected a finite number");
    REPLY_CASE(REPLY_DONE, q.done.norm = NAN, NULL);
    REPLY_CASE(REPLY_STEP_DONE, q.step_done.norm = INFINITY, NULL);
    REPLY_CASE(REPLY_STEP_DONE, q.step_done.lr = INFINITY, "StepDone.lr: inf, expected a finite number");
    REPLY_CASE(REPLY_SLOT_GRANT, q.slot_grant.offset_bytes = 1, "SlotGrant.offset_bytes: 1, expected a multiple of 64");
    REPLY_CASE(REPLY_REFUSED, q.refused.diagnostic.code = 2000, "Refused.diagnostic.code: 2000, expected 1000 to 1999");
    REPLY_CASE(REPLY_REFUSED, q.refused.diagnostic.cause_class = "D1234",
               "Refused.diagnostic.cause_class: 5 bytes, expected 0 to 3");
    REPLY_CASE(REPLY_ADMIN_PART, q.admin_part.exit_code = 256, "AdminPart.exit_code: 256, expected 0 to 255");
}

static size_t pack_raw_client(Zerod__V1__ClientMessage__KindCase kind, void *member)
{
    Zerod__V1__ClientMessage message = ZEROD__V1__CLIENT_MESSAGE__INIT;

    message.kind_case = kind;
    message.hello = member;
    return zerod__v1__client_message__pack(&message, packet);
}

/* A field that is set without its has_x is refused. zerod's own packing leaves such fields out. */
static void test_without_has(void **state)
{
    Zerod__V1__EndBackward end = ZEROD__V1__END_BACKWARD__INIT;
    Zerod__V1__Step step = ZEROD__V1__STEP__INIT;
    Zerod__V1__Diagnostic diagnostic = ZEROD__V1__DIAGNOSTIC__INIT;
    Zerod__V1__Refused refused = ZEROD__V1__REFUSED__INIT;
    Zerod__V1__ServerMessage message = ZEROD__V1__SERVER_MESSAGE__INIT;
    struct request request = example_requests[REQUEST_STEP], out;

    end.blob = (ProtobufCBinaryData){.data = (uint8_t *)"x", .len = 1};
    assert_request_refused(packet, pack_raw_client(ZEROD__V1__CLIENT_MESSAGE__KIND_END_BACKWARD, &end),
                           "EndBackward.blob: set, expected nothing without has_blob");
    step.max_norm = 1;
    assert_request_refused(packet, pack_raw_client(ZEROD__V1__CLIENT_MESSAGE__KIND_STEP, &step),
                           "Step.max_norm: set, expected nothing without has_max_norm");

    refused.diagnostic = &diagnostic;
    diagnostic.code = 1001;
    diagnostic.step = 5;
    message.kind_case = ZEROD__V1__SERVER_MESSAGE__KIND_REFUSED;
    message.refused = &refused;
    assert_reply_refused(packet, zerod__v1__server_message__pack(&message, packet),
                         "Refused.diagnostic.step: set, expected nothing without has_step");
    refused.diagnostic = NULL;
    assert_reply_refused(packet, zerod__v1__server_message__pack(&message, packet),
                         "Refused.diagnostic: missing, expected one");

    request.step.has_max_norm = false;
    request.step.has_blob = false;
    assert_int_equal(wire_unpack_request(&arena, packet, pack_request(&request), &out, why, sizeof(why)), 0);
    assert_true(out.step.max_norm == 0 && out.step.n_blob_bytes == 0 && !out.step.blob);
}

/* ---- texts --------------------------------------------------------------------------------------------- */

/* Packs a message like AbortStep, whose field 1 is these bytes. */
static size_t pack_why(unsigned kind, const void *text, size_t n)
{
    packet[0] = kind << 3 | 2;
    if (kind > 15) {
        packet[0] |= 0x80;
        packet[1] = kind >> 4;
    }
    packet[2] = n + 2;
    packet[3] = 1 << 3 | 2;
    packet[4] = n;
    memcpy(packet + 5, text, n);
    return n + 5;
}

static void test_texts(void **state)
{
    static const struct {
        const char *text;
        size_t n, bad;
        bool why_ok; /* whether a text for people may have it */
    } cases[] = {
        {"a\0b", 3, 1, false},
        {"ab\0", 3, 2, false},
        {"\0", 1, 0, false},
        {"a\x07", 2, 1, false},
        {"tab\t", 4, 3, true},
        {"new\nline", 8, 3, true},
        {"\x7f", 1, 0, false},
        {"\xff", 1, 0, false},
        {"a\x80", 2, 1, false},
        {"\xc3", 1, 0, false},
        {"\xc0\x80", 2, 0, false},
        {"\xe0\x80\x80", 3, 0, false},
        {"\xed\xa0\x80", 3, 0, false},
        {"\xf4\x90\x80\x80", 4, 0, false},
        {"\xf0\x8f\x80\x80", 4, 0, false},
        {"\xe2\x82", 2, 0, false},
        {"\r\n", 2, 0, false},
    };
    static const char *const good[] = {
        "", "plain", "Ma\xc3\x9f", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbf"};
    struct request out;
    char expected[128];

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        size_t n = pack_why(REQUEST_ABORT_STEP, cases[i].text, cases[i].n);

        snprintf(expected, sizeof(expected),
                 "AbortStep.why: byte 0x%02x at %zu, expected UTF-8 without control characters",
                 (uint8_t)cases[i].text[cases[i].bad], cases[i].bad);
        if (cases[i].why_ok)
            assert_int_equal(wire_unpack_request(&arena, packet, n, &out, why, sizeof(why)), 0);
        else
            assert_request_refused(packet, n, expected);

        /* Admin.command is field 1 as well, and must be one line */
        n = pack_why(REQUEST_ADMIN, cases[i].text, cases[i].n);
        snprintf(expected, sizeof(expected),
                 "Admin.command: byte 0x%02x at %zu, expected UTF-8 without control characters",
                 (uint8_t)cases[i].text[cases[i].bad], cases[i].bad);
        assert_request_refused(packet, n, expected);
    }
    for (size_t i = 0; i < ARRAY_SIZE(good); i++) {
        size_t n = pack_why(REQUEST_ABORT_STEP, good[i], strlen(good[i]));

        assert_int_equal(wire_unpack_request(&arena, packet, n, &out, why, sizeof(why)), 0);
        assert_string_equal(out.abort_step.why, good[i]);
    }
}

static void test_packing_cleans_texts(void **state)
{
    struct request out;
    const char *args[] = {"ok", "\xff-\xc3\xa9-\n"};
    size_t n;

    n = pack_request(&(struct request){.type = REQUEST_INTERN, .intern = {.id = 1, .text = "a\nb\x80\xc3\x9f\xc3"}});
    assert_int_equal(wire_unpack_request(&arena, packet, n, &out, why, sizeof(why)), 0);
    assert_string_equal(out.intern.text, "a?b?\xc3\x9f?");

    n = pack_request(&(struct request){.type = REQUEST_ABORT_STEP, .abort_step = {.why = "a\nb\t\r"}});
    assert_int_equal(wire_unpack_request(&arena, packet, n, &out, why, sizeof(why)), 0);
    assert_string_equal(out.abort_step.why, "a\nb\t?");

    n = pack_request(&(struct request){.type = REQUEST_ADMIN, .admin = {.command = "drop", .args = args, .n_args = 2}});
    assert_int_equal(wire_unpack_request(&arena, packet, n, &out, why, sizeof(why)), 0);
    assert_string_equal(out.admin.args[1], "?-\xc3\xa9-?");
}

/* ---- diagnostics --------------------------------------------------------------------------------------- */

/* A diagnostic with the longest texts that are allowed, or with longer ones, fits into a packet. */
static void test_largest_diagnostic(void **state)
{
    enum { N = 200 * 1000 };
    struct reply reply = example_replies[REPLY_REFUSED], out;
    struct wire_diagnostic *d = &reply.refused.diagnostic;
    struct diagnostic_field fields[DIAGNOSTIC_MAX_FIELDS];
    const char *params[DIAGNOSTIC_MAX_PARAMS];
    char *text = malloc(N + 1);

    assert_non_null(text);
    for (size_t i = 0; i < N; i++)
        text[i] = "\xc3\xa9"[i % 2]; /* letters of two bytes, which a cut must not split */
    text[N] = '\0';
    for (size_t i = 0; i < ARRAY_SIZE(fields); i++)
        fields[i] = (struct diagnostic_field){.label = text, .text = text};
    for (size_t i = 0; i < ARRAY_SIZE(params); i++)
        params[i] = text;
    d->title = d->text = d->first.segment = d->first.site = d->second.segment = d->second.site = text;
    d->fields = fields;
    d->n_fields = ARRAY_SIZE(fields);
    d->params = params;
    d->n_params_named = ARRAY_SIZE(params);

    assert_int_equal(wire_unpack_reply(&arena, packet, pack_reply(&reply), &out, why, sizeof(why)), 0);
    d = &out.refused.diagnostic;
    assert_int_equal(strlen(d->title), 1023);
    assert_string_equal(d->title + 1016, "\xc3\xa9\xc3\xa9...");
    assert_int_equal(strlen(d->text), 32 * 1024 - 1);
    assert_int_equal(d->n_fields, DIAGNOSTIC_MAX_FIELDS);
    assert_int_equal(strlen(d->fields[15].text), 4 * 1024 - 1);
    assert_int_equal(strlen(d->fields[15].label), 63);
    free(text);
}

static void test_diagnostic_view(void **state)
{
    struct diagnostic d = {
        .code = E_DUPLICATE,
        .cause_class = "D1",
        .title = (char *)"duplicate gradient refused",
        .has_rank = true,
        .rank = 3,
        .step = 99, /* has_step is false, so it is not packed */
        .params = {(char *)"a", (char *)"b"},
        .n_params_named = 2,
        .n_params = 12,
        .first = {.present = true,
                  .record = {.sequence = 1,
                             .step = 2,
                             .micro_batch = 3,
                             .param = 4,
                             .ordinal = 5,
                             .task = 6,
                             .depth = 7,
                             .call = 8,
                             .time_ns = 9},
                  .segment = (char *)"block",
                  .site = (char *)"m.py:1"},
        .fields = {{.label = (char *)"fix", .text = (char *)"once"}},
        .n_fields = 1,
        .text = (char *)"E1001",
        .id = 5,
        .warning = true,
    };
    struct reply reply = {.type = REPLY_REFUSED, .refused = {.diagnostic = wire_diagnostic(&d)}}, out;
    static const struct wire_push_record first = {.sequence = 1,
                                                  .step = 2,
                                                  .micro_batch = 3,
                                                  .param = 4,
                                                  .ordinal = 5,
                                                  .task = 6,
                                                  .depth = 7,
                                                  .segment = "block",
                                                  .call = 8,
                                                  .site = "m.py:1",
                                                  .time_ns = 9};
    static const struct wire_push_record none = {.segment = "", .site = ""};
    const struct wire_diagnostic *v = &out.refused.diagnostic;

    assert_int_equal(wire_unpack_reply(&arena, packet, pack_reply(&reply), &out, why, sizeof(why)), 0);
    assert_int_equal(v->code, 1001);
    assert_string_equal(v->cause_class, "D1");
    assert_string_equal(v->title, "duplicate gradient refused");
    assert_true(v->has_rank && v->rank == 3 && !v->has_step && v->step == 0 && !v->has_micro_batch);
    assert_int_equal(v->n_params_named, 2);
    assert_string_equal(v->params[1], "b");
    assert_int_equal(v->n_params_total, 12);
    assert_true(v->has_first && !v->has_second);
    assert_records_equal(&v->first, &first);
    assert_records_equal(&v->second, &none);
    assert_int_equal(v->n_fields, 1);
    assert_string_equal(v->fields[0].text, "once");
    assert_string_equal(v->text, "E1001");
    assert_true(v->id == 5 && v->warning);
}

/* ---- envelopes ----------------------------------------------------------------------------------------- */

static void test_envelopes(void **state)
{
    static const uint8_t kind_99[] = {0x9a, 0x06, 0x00};   /* key 99, a message of no bytes */
    static const uint8_t two[] = {0x2a, 0x00, 0x2a, 0x00}; /* Ready, Ready */
    static const uint8_t extra[] = {0x2a, 0x00, 0xa2, 0x06, 0x01, 0x41, 0xa8, 0x06, 0x05}; /* Ready; fields 100, 101 */
    static const uint8_t inner[] = {0x2a, 0x03, 0xa8, 0x06, 0x05};                         /* Ready with a field 101 */
    static const uint8_t hidden[] = {0x2a, 0x00, 0xa1, 0x06, 1, 2, 3, 4, 5,    6,
                                     7,    8,    0xa5, 0x06, 1, 2, 3, 4, 0x2a, 0x00};
    static const uint8_t short_length[] = {0x2a, 0x05, 0x00};
    static const uint8_t key_zero[] = {0x00, 0x00};
    static const uint8_t number[] = {0x28, 0x01}; /* kind 5 as a number */
    static const uint8_t group[] = {0x2b, 0x2c};
    uint8_t trailing[100];
    struct request out;
    size_t n;

    assert_request_refused("", 0, "ClientMessage: an empty packet, expected one message");
    assert_reply_refused("", 0, "ServerMessage: an empty packet, expected one message");
    assert_request_refused(kind_99, sizeof(kind_99), "ClientMessage: message of kind 99, expected 1 to 31");
    assert_reply_refused(kind_99, sizeof(kind_99), "ServerMessage: message of kind 99, expected 1 to 9");
    assert_request_refused(two, sizeof(two), "ClientMessage: 2 messages in one packet, expected one");
    assert_request_refused(hidden, sizeof(hidden), "ClientMessage: 2 messages in one packet, expected one");
    assert_request_refused(short_length, sizeof(short_length),
                           "ClientMessage: 3 bytes that are not a protobuf message");
    assert_request_refused(key_zero, sizeof(key_zero), "ClientMessage: 2 bytes that are not a protobuf message");
    assert_request_refused(number, sizeof(number), "ClientMessage: 2 bytes that are not a protobuf message");
    assert_request_refused(group, sizeof(group), "ClientMessage: 2 bytes that are not a protobuf message");

    /* fields of a later version are no reason to refuse */
    assert_int_equal(wire_unpack_request(&arena, extra, sizeof(extra), &out, why, sizeof(why)), 0);
    assert_int_equal(out.type, REQUEST_READY);
    assert_int_equal(wire_unpack_request(&arena, inner, sizeof(inner), &out, why, sizeof(why)), 0);
    assert_int_equal(out.type, REQUEST_READY);

    /* bytes behind the message that are not a field */
    n = pack_request(&example_requests[REQUEST_FORM]);
    memset(trailing, 0, sizeof(trailing));
    memcpy(trailing, packet, n);
    assert_request_refused(trailing, n + 1, "ClientMessage: 9 bytes that are not a protobuf message");
}

/*
 * Every prefix of a valid packet is refused, or is still a message. Address sanitizer checks that nothing beyond its
 * end is read.
 */
static void test_truncated(void **state)
{
    for (unsigned type = 1; type < N_REQUEST_TYPES; type++) {
        size_t n = pack_request(&example_requests[type]);

        for (size_t i = 0; i < n; i++) {
            _cleanup_free_ uint8_t *part = malloc(MAX(i, (size_t)1));
            struct request out;

            assert_non_null(part);
            memcpy(part, packet, i);
            assert_int_equal(wire_unpack_request(&arena, part, i, &out, why, sizeof(why)), WIRE_E_INVALID);
        }
    }
}

static void test_short_why(void **state)
{
    struct request request = example_requests[REQUEST_PUSH], out;
    char tiny[12];
    size_t n;

    request.push.dtype_plus_one = 4;
    n = pack_request(&request);
    assert_int_equal(wire_unpack_request(&arena, packet, n, &out, tiny, sizeof(tiny)), WIRE_E_INVALID);
    assert_string_equal(tiny, "Push.dtype_");
    assert_int_equal(wire_unpack_request(&arena, packet, n, &out, NULL, 0), WIRE_E_INVALID);
}

/* ---- memory -------------------------------------------------------------------------------------------- */

static void test_packing_keeps_the_request(void **state)
{
    struct request out;
    uint8_t answer[1024];

    assert_int_equal(
        wire_unpack_request(&arena, packet, pack_request(&example_requests[REQUEST_ADMIN]), &out, why, sizeof(why)), 0);
    for (unsigned type = 1; type < N_REPLY_TYPES; type++)
        assert_true(wire_pack_reply(&arena, &example_replies[type], answer, sizeof(answer)) > 0);
    for (unsigned type = 1; type < N_REQUEST_TYPES; type++)
        assert_true(wire_pack_request(&arena, &example_requests[type], answer, sizeof(answer)) > 0);
    assert_request_equal(&out, &example_requests[REQUEST_ADMIN]);
}

static void test_too_small_a_buffer(void **state)
{
    struct request step = example_requests[REQUEST_STEP];
    static const struct wire_hyper groups[WIRE_MAX_GROUPS] = {[0 ... 1023] = {1, 1, 1, 1, 1, 1, 1, 1, true}};

    for (unsigned type = 1; type < N_REQUEST_TYPES; type++) {
        size_t n = pack_request(&example_requests[type]);

        assert_int_equal(wire_pack_request(&arena, &example_requests[type], packet, n), n);
        assert_int_equal(wire_pack_request(&arena, &example_requests[type], packet, n - 1), -EMSGSIZE);
    }
    step.step.groups = groups;
    step.step.n_groups = ARRAY_SIZE(groups);
    step.step.blob = large_blob;
    step.step.n_blob_bytes = WIRE_MAX_BLOB_BYTES;
    assert_int_equal(wire_pack_request(&arena, &step, packet, sizeof(packet)), -EMSGSIZE);
    assert_null(arena.chunks);
}

/* The largest evidence fits into a packet. */
static void test_largest_evidence(void **state)
{
    static uint32_t ids[WIRE_MAX_EVIDENCE_IDS];
    struct request request = example_requests[REQUEST_EVIDENCE], out;
    size_t n;

    for (size_t i = 0; i < ARRAY_SIZE(ids); i++)
        ids[i] = MANIFEST_MAX_PARAMS - 1;
    request.evidence.exception = request.evidence.raised_at = request.evidence.swallowed_by = text_of(1024);
    request.evidence.dead_segment = request.evidence.site = text_of(1024);
    request.evidence.not_called = request.evidence.called = ids;
    request.evidence.n_not_called = request.evidence.n_called = ARRAY_SIZE(ids);
    n = pack_request(&request);
    assert_int_equal(wire_unpack_request(&arena, packet, n, &out, why, sizeof(why)), 0);
    assert_evidence_equal(&out.evidence, &request.evidence);
}

/* Fills data with a Declare of equal parameters. The length is padded to four bytes, which protobuf allows. */
static size_t pack_params(uint8_t *data, size_t size, const void *param, size_t n_param_bytes)
{
    size_t n;

    data[0] = REQUEST_DECLARE << 3 | 2;
    for (n = 5; n + n_param_bytes <= size; n += n_param_bytes)
        memcpy(data + n, param, n_param_bytes);
    for (unsigned i = 0; i < 4; i++)
        data[1 + i] = ((n - 5) >> (7 * i) & 0x7f) | (i < 3 ? 0x80 : 0);
    return n;
}

/* The largest part of a manifest fits easily into the arena. What exceeds the arena's limit is refused. */
static void test_arena_limits(void **state)
{
    enum { SIZE = 1 << 20 };
    _cleanup_free_ uint8_t *large = malloc(SIZE);
    struct request out;
    size_t n;

    n = pack_params(packet, sizeof(packet), "\x0a\x03\x0a\x01x", 5);
    assert_int_equal(wire_unpack_request(&arena, packet, n, &out, why, sizeof(why)), 0);
    assert_int_equal(out.declare.n_params, (n - 5) / 5);
    assert_true(arena.n_chunk_bytes < WIRE_ARENA_MAX_BYTES / 2);

    /* empty parameters: two bytes each in the packet, so no packet grows more when unpacked */
    n = pack_params(packet, sizeof(packet), "\x0a\x00", 2);
    assert_request_refused(packet, n, "Declare.params[0].name: 0 bytes, expected 1 to 1024");
    assert_true(arena.n_chunk_bytes < WIRE_ARENA_MAX_BYTES);

    assert_non_null(large);
    n = pack_params(large, SIZE, "\x0a\x00", 2);
    assert_request_refused(large, n, "ClientMessage: more than 16 MiB when unpacked");

    /* all memory is returned */
    assert_int_equal(
        wire_unpack_request(&arena, packet, pack_request(&example_requests[REQUEST_PUSH]), &out, why, sizeof(why)), 0);
    assert_null(arena.chunks);
    assert_int_equal(arena.n_chunk_bytes, 0);
    assert_true(arena.n_used < 2048);
}

static void test_arena(void **state)
{
    struct wire_mark mark;
    uint8_t *p, *q;

    wire_arena_reset(&arena);
    p = wire_arena_alloc(&arena, 5);
    assert_int_equal(wire_arena_size(p), 5);
    assert_int_equal((uintptr_t)p % 8, 0);
    mark = wire_arena_mark(&arena);
    q = wire_arena_alloc(&arena, 100);
    wire_arena_rewind(&arena, mark);
    assert_ptr_equal(wire_arena_alloc(&arena, 200), q);

    p = wire_arena_alloc(&arena, WIRE_ARENA_BLOCK_BYTES);
    assert_non_null(p);
    mark = wire_arena_mark(&arena);
    q = wire_arena_alloc(&arena, 1 << 20);
    memset(q, 1, 1 << 20);
    assert_non_null(wire_arena_alloc(&arena, 1 << 10));
    wire_arena_rewind(&arena, mark);
    memset(p, 2, WIRE_ARENA_BLOCK_BYTES);

    assert_null(wire_arena_alloc(&arena, WIRE_ARENA_MAX_BYTES));
    assert_int_equal(arena.failure, -EMSGSIZE);
    assert_null(wire_arena_alloc(&arena, SIZE_MAX));
    wire_arena_reset(&arena);
    assert_int_equal(arena.failure, 0);
    assert_null(arena.chunks);
}

static void test_param_bytes(void **state)
{
    static const uint64_t shape[16] = {[0 ... 15] = UINT64_MAX};
    struct layout_decl param = {
        .name = text_of(1024),
        .name_len = 1024,
        .dtype = DTYPE_F16,
        .grad_dtype = DTYPE_F16,
        .group = UINT32_MAX,
        .trainable = true,
        .n_dims = 16,
        .shape = shape,
    };
    struct request declare = {.type = REQUEST_DECLARE, .declare = {.params = &param, .n_params = 1}};
    size_t envelope = 8;

    assert_in_range(pack_request(&declare), 1, envelope + wire_param_bytes(&param));
    param = (struct layout_decl){.name = "x", .name_len = 1};
    assert_in_range(pack_request(&declare), 1, envelope + wire_param_bytes(&param));
}

static void test_names(void **state)
{
    assert_string_equal(request_type_name(REQUEST_HELLO), "Hello");
    assert_string_equal(request_type_name(REQUEST_BEGIN_BACKWARD), "BeginBackward");
    assert_string_equal(request_type_name(REQUEST_ADMIN), "Admin");
    assert_string_equal(reply_type_name(REPLY_ADMIN_PART), "AdminPart");
}

/* ---- mutations ----------------------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *seed)
{
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *seed >> 33;
}

/* Changes, removes or inserts a few bytes. */
static size_t mutate(uint8_t *data, size_t n, size_t size, uint64_t *seed)
{
    for (unsigned k = next_random(seed) % 4 + 1; k > 0 && n > 0; k--) {
        size_t at = next_random(seed) % n;

        switch (next_random(seed) % 4) {
        case 0:
            data[at] ^= 1 << next_random(seed) % 8;
            break;
        case 1:
            data[at] = next_random(seed);
            break;
        case 2:
            memmove(data + at, data + at + 1, n - at - 1);
            n--;
            break;
        default:
            if (n < size) {
                memmove(data + at + 1, data + at, n - at);
                data[at] = next_random(seed);
                n++;
            }
            break;
        }
    }
    return n;
}

/* A damaged packet is refused with a reason, or is a message that packs and unpacks to the same bytes. */
static void test_mutations(void **state)
{
    uint64_t seed = 1;
    unsigned n_valid = 0, n_refused = 0;

    for (unsigned round = 0; round < 60000; round++) {
        unsigned type = round % (N_REQUEST_TYPES - 1) + 1;
        uint8_t copy[2048], again[4096];
        struct request request;
        struct reply reply;
        int n, m;

        n = mutate(packet, pack_request(&example_requests[type]), 1500, &seed);
        if (wire_unpack_request(&arena, packet, n, &request, why, sizeof(why)) == 0) {
            n_valid++;
            m = wire_pack_request(&arena, &request, copy, sizeof(copy));
            assert_true(m > 0);
            assert_int_equal(wire_unpack_request(&arena, copy, m, &request, why, sizeof(why)), 0);
            assert_int_equal(wire_pack_request(&arena, &request, again, sizeof(again)), m);
            assert_memory_equal(copy, again, m);
        } else {
            n_refused++;
            assert_non_null(strstr(why, ": "));
        }

        n = mutate(packet, pack_reply(&example_replies[round % (N_REPLY_TYPES - 1) + 1]), 1500, &seed);
        if (wire_unpack_reply(&arena, packet, n, &reply, why, sizeof(why)) == 0) {
            m = wire_pack_reply(&arena, &reply, copy, sizeof(copy));
            assert_true(m > 0);
            assert_int_equal(wire_unpack_reply(&arena, copy, m, &reply, why, sizeof(why)), 0);
            assert_int_equal(wire_pack_reply(&arena, &reply, again, sizeof(again)), m);
            assert_memory_equal(copy, again, m);
        }
    }
    /* some mutations are valid, most are not */
    assert_true(n_valid > 1000 && n_refused > 10000);
}

TEST_GROUP(wire)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_request_round_trip),
        cmocka_unit_test(test_reply_round_trip),
        cmocka_unit_test(test_empty_round_trip),
        cmocka_unit_test(test_limits_of_hello),
        cmocka_unit_test(test_limits_of_params),
        cmocka_unit_test(test_limits_of_backward),
        cmocka_unit_test(test_limits_of_step),
        cmocka_unit_test(test_limits_of_other_requests),
        cmocka_unit_test(test_limits_of_replies),
        cmocka_unit_test(test_without_has),
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_packing_cleans_texts),
        cmocka_unit_test(test_largest_diagnostic),
        cmocka_unit_test(test_diagnostic_view),
        cmocka_unit_test(test_envelopes),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_short_why),
        cmocka_unit_test(test_packing_keeps_the_request),
        cmocka_unit_test(test_too_small_a_buffer),
        cmocka_unit_test(test_largest_evidence),
        cmocka_unit_test(test_arena_limits),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_param_bytes),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_mutations),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
