/* SPDX-License-Identifier: Apache-2.0 */

/* Tables of the client protocol: the allowed contents of each field of a request or reply. */

#include "core/wire/wire.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/push-record.h"
#include "core/wire/frame.h"
#include "core/wire/wire-envelope.h"
#include "proto/zerod.pb-c.h"

/*
 * The allowed values of each field, message by message in the order of the proto. The proto's comments give the limits.
 * Comments in these tables give the reasons for other limits.
 */

enum {
    MAX_DIAGNOSTIC_LINE = 1024, /* title, names, sites; with the next two limits, a diagnostic has at most 110 KiB */
    MAX_DIAGNOSTIC_FIELD = 4 * 1024,
    MAX_DIAGNOSTIC_TEXT = 32 * 1024,
    MAX_LABEL = 64,
    MAX_ARG = 4096, /* PATH_MAX */
    SLOT_ALIGN = 64,
    PAGE_ALIGN = 4096, /* also valid if pages are larger */
};

#define ELEMS_LIMIT (UINT64_C(1) << 62) /* counts of elements are below this, so that fp32 bytes fit into 64 bits */

/* ---- both ways ----------------------------------------------------------------------------------------- */

static const struct wire_rule segment_rules[] = {
    ENUM(Segment, wire_segment, kind, .max = WIRE_SEGMENT_PUBLISHED),
    U64(Segment, wire_segment, n_bytes, .min = PAGE_ALIGN, .multiple_of = PAGE_ALIGN),
    BOOL(Segment, wire_segment, cuda),
};
static const struct wire_table segment_table = WIRE_TABLE(segment, wire_segment, segment_rules);

static const struct wire_rule position_rules[] = {
    U64(Position, wire_position, step),
    U32(Position, wire_position, micro_batch),
    U32(Position, wire_position, attempt),
    U32(Position, wire_position, n_windows),
};
static const struct wire_table position_table = WIRE_TABLE(position, wire_position, position_rules);

static const struct wire_rule push_record_rules[] = {
    U64(PushRecord, wire_push_record, sequence),
    U64(PushRecord, wire_push_record, step),
    U32(PushRecord, wire_push_record, micro_batch),
    U32(PushRecord, wire_push_record, param),
    U32(PushRecord, wire_push_record, ordinal),
    U64(PushRecord, wire_push_record, task),
    U32(PushRecord, wire_push_record, depth),
    STRING(PushRecord, wire_push_record, segment, .max = MAX_DIAGNOSTIC_LINE, .flags = WIRE_CUT),
    U32(PushRecord, wire_push_record, call),
    STRING(PushRecord, wire_push_record, site, .max = MAX_DIAGNOSTIC_LINE, .flags = WIRE_CUT),
    U64(PushRecord, wire_push_record, time_ns),
};
static const struct wire_table push_record_table = WIRE_TABLE(push_record, wire_push_record, push_record_rules);

/* diagnostic_field has char *, because a struct diagnostic owns its texts. */
#define OWN_STRING(M, S, field, ...) WIRE_SCALAR(WIRE_STRING, char *, char *, M, S, field, __VA_ARGS__)
static const struct wire_rule diagnostic_field_rules[] = {
    OWN_STRING(DiagnosticField, diagnostic_field, label, .max = MAX_LABEL, .flags = WIRE_CUT),
    OWN_STRING(DiagnosticField, diagnostic_field, text, .max = MAX_DIAGNOSTIC_FIELD,
               .flags = WIRE_CUT | WIRE_MULTILINE),
};
static const struct wire_table diagnostic_field_table =
    WIRE_TABLE(diagnostic_field, diagnostic_field, diagnostic_field_rules);

static const struct wire_rule diagnostic_rules[] = {
    U32(Diagnostic, wire_diagnostic, code, .min = 1000, .max = 1999),
    STRING(Diagnostic, wire_diagnostic, cause_class, .max = sizeof(((struct diagnostic *)NULL)->cause_class) - 1),
    STRING(Diagnostic, wire_diagnostic, title, .max = MAX_DIAGNOSTIC_LINE, .flags = WIRE_CUT),
    BOOL(Diagnostic, wire_diagnostic, has_rank),
    U32(Diagnostic, wire_diagnostic, rank, HAS(Diagnostic, wire_diagnostic, has_rank)),
    BOOL(Diagnostic, wire_diagnostic, has_step),
    U64(Diagnostic, wire_diagnostic, step, HAS(Diagnostic, wire_diagnostic, has_step)),
    BOOL(Diagnostic, wire_diagnostic, has_micro_batch),
    U32(Diagnostic, wire_diagnostic, micro_batch, HAS(Diagnostic, wire_diagnostic, has_micro_batch)),
    STRINGS(Diagnostic, wire_diagnostic, params, n_params_named, .max = MAX_DIAGNOSTIC_LINE,
            .max_count = DIAGNOSTIC_MAX_PARAMS, .flags = WIRE_CUT),
    U32(Diagnostic, wire_diagnostic, n_params_total),
    MESSAGE(Diagnostic, wire_diagnostic, first, .table = &push_record_table,
            .has_offset = offsetof(struct wire_diagnostic, has_first)),
    MESSAGE(Diagnostic, wire_diagnostic, second, .table = &push_record_table,
            .has_offset = offsetof(struct wire_diagnostic, has_second)),
    MESSAGES(Diagnostic, wire_diagnostic, fields, n_fields, .table = &diagnostic_field_table,
             .max_count = DIAGNOSTIC_MAX_FIELDS),
    STRING(Diagnostic, wire_diagnostic, text, .max = MAX_DIAGNOSTIC_TEXT, .flags = WIRE_CUT | WIRE_MULTILINE),
    U64(Diagnostic, wire_diagnostic, id),
    BOOL(Diagnostic, wire_diagnostic, warning),
};
_Static_assert(MAX_DIAGNOSTIC_LINE * (5 + DIAGNOSTIC_MAX_PARAMS) +
                       DIAGNOSTIC_MAX_FIELDS * (MAX_LABEL + MAX_DIAGNOSTIC_FIELD) + MAX_DIAGNOSTIC_TEXT + 1024 <=
                   FRAME_MAX_BYTES,
               "the largest diagnostic fits into a frame");
const struct wire_table wire_diagnostic_table = WIRE_TABLE(diagnostic, wire_diagnostic, diagnostic_rules);

/* The values are checked later, by hyper-check.c, because their ranges depend on the optimizer (E1108). */
#define RULE_DOUBLE(field) DOUBLE(GroupHyper, wire_hyper, field, .flags = WIRE_FINITE)
#define RULE_BOOL(field) BOOL(GroupHyper, wire_hyper, field)
#define RULE_U32(field) U32(GroupHyper, wire_hyper, field)
#define RULE(kind, field, plain, text, gives, range, only) RULE_##kind(field),
static const struct wire_rule hyper_rules[] = {HYPER_FIELDS(RULE) U32(GroupHyper, wire_hyper, given)};
const struct wire_table wire_hyper_table = WIRE_TABLE(group_hyper, wire_hyper, hyper_rules);

/* ---- client to daemon ---------------------------------------------------------------------------------- */

static const struct wire_rule hello_rules[] = {
    U32(Hello, request_hello, version_min, .min = 1),
    U32(Hello, request_hello, version_max),
    U64(Hello, request_hello, features),
    ENUM(Hello, request_hello, role, .max = WIRE_ROLE_WATCH),
    U32(Hello, request_hello, rank),
    STRING(Hello, request_hello, run_id, .max = WIRE_MAX_RUN_ID_BYTES),
    U64(Hello, request_hello, incarnation, .min = 1),
    ENUM(Hello, request_hello, on_duplicate, .max = WIRE_ON_DUPLICATE_ABORT_STEP),
    STRING(Hello, request_hello, client, .max = WIRE_MAX_RUN_ID_BYTES),
    STRING(Hello, request_hello, optimizer, .max = MAX_LABEL),
    DOUBLE(Hello, request_hello, momentum, .flags = WIRE_POSITIVE),
    BOOL(Hello, request_hello, resumes),
    U64(Hello, request_hello, n_sent),
    BOOL(Hello, request_hello, waits),
    BOOL(Hello, request_hello, is_last),
    BOOL(Hello, request_hello, again),
    BOOL(Hello, request_hello, anew),
};

static bool hello_check(const void *ours, struct wire_problem *problem)
{
    const struct request_hello *hello = ours;

    if (hello->version_max >= hello->version_min)
        return true;
    wire_problem_set(problem, "version_max: %" PRIu32 ", expected at least version_min, %" PRIu32, hello->version_max,
                     hello->version_min);
    return false;
}

static const struct wire_rule param_rules[] = {
    BYTES(Param, layout_decl, name, name_len, .min = 1, .max = WIRE_MAX_NAME_BYTES),
    ENUM(Param, layout_decl, dtype, .max = N_DTYPES - 1),
    ENUM(Param, layout_decl, grad_dtype, .max = N_DTYPES - 1),
    U64S(Param, layout_decl, shape, n_dims, .max_count = LAYOUT_MAX_DIMS),
    U32(Param, layout_decl, group, .max = WIRE_MAX_GROUPS - 1),
    BOOL(Param, layout_decl, trainable),
    BOOL(Param, layout_decl, muon),
};

static bool param_check(const void *ours, struct wire_problem *problem)
{
    const struct layout_decl *param = ours;
    uint64_t n_elems = 1;
    bool overflow = false, empty = false;

    for (uint32_t i = 0; i < param->n_dims; i++) {
        empty = empty || param->shape[i] == 0;
        overflow = overflow || __builtin_mul_overflow(n_elems, param->shape[i], &n_elems);
    }
    if (param->muon && !layout_is_for_muon(param)) {
        wire_problem_set(problem, "muon: true, expected false; it is for trainable parameters of two dimensions, each "
                                  "below 2^31");
        return false;
    }
    if (empty || (!overflow && n_elems < ELEMS_LIMIT))
        return true;
    wire_problem_set(problem, "shape: 2^62 elements or more, expected less");
    return false;
}

static const struct wire_table param_table = WIRE_TABLE(param, layout_decl, param_rules, .check = param_check);

static const struct wire_rule declare_rules[] = {
    MESSAGES(Declare, request_declare, params, n_params, .table = &param_table),
};

static const struct wire_rule stack_rules[] = {
    STRING(Stack, request_stack, text, .max = WIRE_MAX_STACK_BYTES, .flags = WIRE_CUT | WIRE_MULTILINE),
};

static const struct wire_rule form_rules[] = {
    U32(Form, request_form, n_params),
    BOOL(Form, request_form, wants_published),
    BOOL(Form, request_form, from_gpu),
};

static const struct wire_rule init_rules[] = {
    U32(Init, request_init, param),
    /* below ELEMS_LIMIT, so that start_elem + n_elems does not overflow */
    U64(Init, request_init, start_elem, .max = ELEMS_LIMIT - 1),
    U64(Init, request_init, n_elems, .max = ELEMS_LIMIT - 1),
    U64(Init, request_init, offset_bytes, .multiple_of = SLOT_ALIGN),
};

static const struct wire_rule begin_backward_rules[] = {
    U64(BeginBackward, request_begin_backward, step),
    U32(BeginBackward, request_begin_backward, micro_batch),
    U32(BeginBackward, request_begin_backward, attempt),
    U64(BeginBackward, request_begin_backward, n_forwards),
    U64(BeginBackward, request_begin_backward, n_backwards),
    MESSAGES(BeginBackward, request_begin_backward, groups, n_groups, .table = &wire_hyper_table,
             .max_count = WIRE_MAX_GROUPS),
};

static const struct wire_rule intern_rules[] = {
    U32(Intern, request_intern, id, .min = 1, .max = WIRE_MAX_STRING_ID),
    STRING(Intern, request_intern, text, .max = WIRE_MAX_TEXT_BYTES),
};

static const struct wire_rule push_rules[] = {
    U64(Push, request_push, sequence),
    U32(Push, request_push, attempt),
    U64(Push, request_push, step),
    U32(Push, request_push, micro_batch),
    U32(Push, request_push, param),
    U32(Push, request_push, ticket),
    U32(Push, request_push, use),
    U64(Push, request_push, offset_bytes, .multiple_of = SLOT_ALIGN),
    BOOL(Push, request_push, overflow),
    U32(Push, request_push, pass),
    BOOL(Push, request_push, record_only),
    U64(Push, request_push, sum),
    U32(Push, request_push, ordinal),
    U64(Push, request_push, task),
    U32(Push, request_push, depth),
    U32(Push, request_push, segment, .max = WIRE_MAX_STRING_ID),
    U32(Push, request_push, call),
    U32(Push, request_push, site, .max = WIRE_MAX_STRING_ID),
    U32(Push, request_push, flags, .max = PUSH_NESTED | PUSH_HOOK_TWICE | PUSH_NEW_FORWARD | PUSH_SITE_IS_BACKWARD),
    U64(Push, request_push, n_bytes),
    U32(Push, request_push, dtype_plus_one, .max = N_DTYPES),
    U32(Push, request_push, part),
    U64(Push, request_push, point),
};

static const struct wire_table push_table = WIRE_TABLE(push, request_push, push_rules);

static const struct wire_rule pushes_rules[] = {
    MESSAGE(Pushes, request_pushes, first, .table = &push_table, .flags = WIRE_REQUIRED),
    U32S(Pushes, request_pushes, others, n_others, .max_count = WIRE_MAX_PUSHES - 1),
};

/* Checks that there are at least two pushes, and that the first has no field that only a single Push may have. */
static bool pushes_check(const void *ours, struct wire_problem *problem)
{
    const struct request_pushes *pushes = ours;
    const struct request_push *first = &pushes->first;

    if (pushes->n_others == 0)
        wire_problem_set(problem, "others: 0 values, expected at least 1");
    else if (first->record_only || first->part || first->point || first->n_bytes || first->dtype_plus_one)
        wire_problem_set(problem, "first: %s, which only a push of its own may have",
                         first->record_only ? "record_only"
                         : first->part      ? "part"
                         : first->point     ? "point"
                         : first->n_bytes   ? "n_bytes"
                                            : "dtype_plus_one");
    else
        return true;
    return false;
}

static const struct wire_rule slot_request_rules[] = {
    U32(SlotRequest, request_slot_request, bucket),
    U32(SlotRequest, request_slot_request, parcel),
    U32(SlotRequest, request_slot_request, pass),
};

static const struct wire_rule end_backward_rules[] = {
    U64(EndBackward, request_end_backward, step),
    U32(EndBackward, request_end_backward, micro_batch),
    U32(EndBackward, request_end_backward, attempt),
    BOOL(EndBackward, request_end_backward, has_blob),
    BYTES(EndBackward, request_end_backward, blob, n_blob_bytes, .max = WIRE_MAX_BLOB_BYTES,
          HAS(EndBackward, request_end_backward, has_blob)),
};

static const struct wire_rule abandon_backward_rules[] = {
    U64(AbandonBackward, request_abandon_backward, step),
    U32(AbandonBackward, request_abandon_backward, micro_batch),
    U32(AbandonBackward, request_abandon_backward, attempt),
    STRING(AbandonBackward, request_abandon_backward, why, .max = WIRE_MAX_TEXT_BYTES, .flags = WIRE_MULTILINE),
};

static const struct wire_rule step_rules[] = {
    U64(Step, request_step, step),
    U32(Step, request_step, attempt),
    MESSAGES(Step, request_step, groups, n_groups, .table = &wire_hyper_table, .max_count = WIRE_MAX_GROUPS),
    BOOL(Step, request_step, has_max_norm),
    DOUBLE(Step, request_step, max_norm, .flags = WIRE_POSITIVE, HAS(Step, request_step, has_max_norm)),
    DOUBLE(Step, request_step, loss_scale, .flags = WIRE_POSITIVE),
    BOOL(Step, request_step, found_inf),
    BOOL(Step, request_step, has_blob),
    BYTES(Step, request_step, blob, n_blob_bytes, .max = WIRE_MAX_BLOB_BYTES, HAS(Step, request_step, has_blob)),
    BOOL(Step, request_step, wants_decision),
};

const struct wire_table wire_step_table = WIRE_TABLE(step, request_step, step_rules);

static const struct wire_rule gather_rules[] = {
    U32S(Gather, request_gather, params, n_params, .max_count = WIRE_MAX_IDS),
};

static const struct wire_rule release_rules[] = {
    U32S(Release, request_release, params, n_params, .max_count = WIRE_MAX_IDS),
};

static const struct wire_rule held_rules[] = {
    U32S(Held, request_held, params, n_params, .max_count = WIRE_MAX_IDS),
};

static const struct wire_rule prefetch_rules[] = {
    U32S(Prefetch, request_prefetch, params, n_params, .max_count = WIRE_MAX_IDS),
};

static const struct wire_rule write_end_rules[] = {
    BOOL(WriteEnd, request_write_end, forget),
    U32(WriteEnd, request_write_end, n_windows),
};

static const struct wire_rule read_state_rules[] = {
    U32(ReadState, request_read_state, param),
    ENUM(ReadState, request_read_state, kind, .max = WIRE_STATE_STEP_COUNT),
};

static const struct wire_rule save_checkpoint_rules[] = {
    BOOL(SaveCheckpoint, request_save_checkpoint, wait),
};

/* A count is at most 2^53, because it is read as a double. */
static const struct wire_rule write_state_rules[] = {
    U32(WriteState, request_write_state, param),
    ENUM(WriteState, request_write_state, kind, .max = WIRE_STATE_STEP_COUNT),
    U64(WriteState, request_write_state, count, .max = UINT64_C(1) << 53),
};

static bool write_state_check(const void *ours, struct wire_problem *problem)
{
    const struct request_write_state *write = ours;

    if (write->kind == WIRE_STATE_GRAD_NORM)
        wire_problem_set(problem, "kind: 3, expected 0 to 2, or 4");
    else if (write->kind != WIRE_STATE_STEP_COUNT && write->count != 0)
        wire_problem_set(problem, "count: %" PRIu64 ", expected 0 but with kind 4", write->count);
    else
        return true;
    return false;
}

static const struct wire_rule abort_step_rules[] = {
    STRING(AbortStep, request_abort_step, why, .max = WIRE_MAX_TEXT_BYTES, .flags = WIRE_MULTILINE),
};

static const struct wire_rule abort_seen_rules[] = {
    U32(AbortSeen, request_abort_seen, attempt),
};

static const struct wire_rule report_rules[] = {
    U32(Report, request_report, code),
    U32S(Report, request_report, params, n_params, .max_count = WIRE_MAX_IDS),
    STRING(Report, request_report, detail, .max = WIRE_MAX_TEXT_BYTES, .flags = WIRE_MULTILINE),
};

static bool report_check(const void *ours, struct wire_problem *problem)
{
    const struct request_report *report = ours;

    switch (report->code) {
    case E_GRADIENT:
    case E_PARAMETER:
    case E_REPOINTED:
    case E_DRIFTED:
    case E_WEIGHT_WRITTEN:
    case E_REDUCED_TWICE:
    case E_RELEASED_READ:
        return true;
    default:
        wire_problem_set(problem, "code: %" PRIu32 ", expected 1102 to 1107 or 1110", report->code);
        return false;
    }
}

#define EVIDENCE_TEXT(field, ...) STRING(Evidence, request_evidence, field, .max = WIRE_MAX_TEXT_BYTES, __VA_ARGS__)
static const struct wire_rule evidence_rules[] = {
    U64(Evidence, request_evidence, step),
    U32(Evidence, request_evidence, attempt),
    EVIDENCE_TEXT(exception, .flags = WIRE_MULTILINE),
    EVIDENCE_TEXT(raised_at),
    EVIDENCE_TEXT(swallowed_by),
    BOOL(Evidence, request_evidence, in_forward),
    BOOL(Evidence, request_evidence, requires_grad_changed),
    EVIDENCE_TEXT(dead_segment),
    U32(Evidence, request_evidence, n_dead_segments),
    EVIDENCE_TEXT(site),
    U64(Evidence, request_evidence, n_forwards),
    U64(Evidence, request_evidence, n_backwards),
    U32S(Evidence, request_evidence, not_called, n_not_called, .max_count = WIRE_MAX_EVIDENCE_IDS),
    U32S(Evidence, request_evidence, called, n_called, .max_count = WIRE_MAX_EVIDENCE_IDS),
};

static const struct wire_rule admin_rules[] = {
    STRING(Admin, request_admin, command, .min = 1, .max = MAX_LABEL),
    STRINGS(Admin, request_admin, args, n_args, .max = MAX_ARG, .max_count = WIRE_MAX_ARGS),
};

#define TABLE_EMPTY(M)                                                                                                 \
    {                                                                                                                  \
        .descriptor = &zerod__v1__##M##__descriptor                                                                    \
    }

static const struct wire_table request_tables[N_REQUEST_TYPES] = {
    [REQUEST_HELLO] = WIRE_TABLE(hello, request_hello, hello_rules, .check = hello_check),
    [REQUEST_DECLARE] = WIRE_TABLE(declare, request_declare, declare_rules),
    [REQUEST_FORM] = WIRE_TABLE(form, request_form, form_rules),
    [REQUEST_INIT] = WIRE_TABLE(init, request_init, init_rules),
    [REQUEST_READY] = TABLE_EMPTY(ready),
    [REQUEST_BEGIN_BACKWARD] = WIRE_TABLE(begin_backward, request_begin_backward, begin_backward_rules),
    [REQUEST_INTERN] = WIRE_TABLE(intern, request_intern, intern_rules),
    [REQUEST_PUSH] = WIRE_TABLE(push, request_push, push_rules),
    [REQUEST_SLOT_REQUEST] = WIRE_TABLE(slot_request, request_slot_request, slot_request_rules),
    [REQUEST_END_BACKWARD] = WIRE_TABLE(end_backward, request_end_backward, end_backward_rules),
    [REQUEST_ABANDON_BACKWARD] = WIRE_TABLE(abandon_backward, request_abandon_backward, abandon_backward_rules),
    [REQUEST_STEP] = WIRE_TABLE(step, request_step, step_rules),
    [REQUEST_GRAD_NORM] = TABLE_EMPTY(grad_norm),
    [REQUEST_GATHER] = WIRE_TABLE(gather, request_gather, gather_rules),
    [REQUEST_RELEASE] = WIRE_TABLE(release, request_release, release_rules),
    [REQUEST_WRITE_BEGIN] = TABLE_EMPTY(write_begin),
    [REQUEST_WRITE_END] = WIRE_TABLE(write_end, request_write_end, write_end_rules),
    [REQUEST_READ_STATE] = WIRE_TABLE(read_state, request_read_state, read_state_rules),
    [REQUEST_SAVE_CHECKPOINT] = WIRE_TABLE(save_checkpoint, request_save_checkpoint, save_checkpoint_rules),
    [REQUEST_ABORT_STEP] = WIRE_TABLE(abort_step, request_abort_step, abort_step_rules),
    [REQUEST_ABORT_SEEN] = WIRE_TABLE(abort_seen, request_abort_seen, abort_seen_rules),
    [REQUEST_CLEAR_FAULT] = TABLE_EMPTY(clear_fault),
    [REQUEST_REPORT] = WIRE_TABLE(report, request_report, report_rules, .check = report_check),
    [REQUEST_LEAVE] = TABLE_EMPTY(leave),
    [REQUEST_ADMIN] = WIRE_TABLE(admin, request_admin, admin_rules),
    [REQUEST_EVIDENCE] = WIRE_TABLE(evidence, request_evidence, evidence_rules),
    [REQUEST_WRITE_STATE] = WIRE_TABLE(write_state, request_write_state, write_state_rules, .check = write_state_check),
    [REQUEST_PREFETCH] = WIRE_TABLE(prefetch, request_prefetch, prefetch_rules),
    [REQUEST_HELD] = WIRE_TABLE(held, request_held, held_rules),
    [REQUEST_PUSHES] = WIRE_TABLE(pushes, request_pushes, pushes_rules, .check = pushes_check),
    [REQUEST_STACK] = WIRE_TABLE(stack, request_stack, stack_rules),
};

/* ---- daemon to client ---------------------------------------------------------------------------------- */

static const struct wire_rule welcome_rules[] = {
    U32(Welcome, reply_welcome, version, .min = 1),
    U64(Welcome, reply_welcome, features),
    U32(Welcome, reply_welcome, world_size, .min = 1),
    U32(Welcome, reply_welcome, stage, .min = 1, .max = 3),
    U64(Welcome, reply_welcome, bucket_elems, .min = 1),
    ENUM(Welcome, reply_welcome, on_duplicate, .max = WIRE_ON_DUPLICATE_ABORT_STEP),
    STRING(Welcome, reply_welcome, server, .max = WIRE_MAX_RUN_ID_BYTES),
    BOOL(Welcome, reply_welcome, private_weights),
    STRING(Welcome, reply_welcome, run_id, .max = WIRE_MAX_RUN_ID_BYTES),
    U64(Welcome, reply_welcome, stage3_max_live_elems),
    STRING(Welcome, reply_welcome, optimizer, .max = MAX_LABEL),
    MESSAGE(Welcome, reply_welcome, hyper, .table = &wire_hyper_table),
    BOOL(Welcome, reply_welcome, has_scheduler),
    DOUBLE(Welcome, reply_welcome, max_norm, .flags = WIRE_POSITIVE),
    BOOL(Welcome, reply_welcome, mean),
    BOOL(Welcome, reply_welcome, fp16),
    U32(Welcome, reply_welcome, accumulation),
    BOOL(Welcome, reply_welcome, cuda),
    U32(Welcome, reply_welcome, configured),
    BOOL(Welcome, reply_welcome, resumed),
    U64(Welcome, reply_welcome, n_received),
    U64(Welcome, reply_welcome, reattach_ms),
    U32(Welcome, reply_welcome, configured_stage, .max = 3),
    BOOL(Welcome, reply_welcome, looks),
};

static const struct wire_rule formed_rules[] = {
    BOOL(Formed, reply_formed, resumed),
    BOOL(Formed, reply_formed, init_wanted),
    MESSAGE(Formed, reply_formed, position, .table = &position_table),
    MESSAGES(Formed, reply_formed, segments, n_segments, .table = &segment_table, .max_count = WIRE_MAX_SEGMENTS),
    BYTES(Formed, reply_formed, blob, n_blob_bytes, .max = WIRE_MAX_BLOB_BYTES, HAS(Formed, reply_formed, has_blob)),
    BOOL(Formed, reply_formed, has_blob),
    U32(Formed, reply_formed, n_tickets),
    U64(Formed, reply_formed, ring_bytes),
    U64(Formed, reply_formed, digest),
    DOUBLE(Formed, reply_formed, loss_scale, .flags = WIRE_POSITIVE),
    BYTES(Formed, reply_formed, gpu, n_gpu_bytes, .max = WIRE_GPU_BYTES),
    U64(Formed, reply_formed, first_point),
    U64(Formed, reply_formed, bucket_elems),
    BOOL(Formed, reply_formed, speculates),
};

static bool formed_check(const void *ours, struct wire_problem *problem)
{
    const struct reply_formed *formed = ours;

    if (formed->n_gpu_bytes == 0 || formed->n_gpu_bytes == WIRE_GPU_BYTES)
        return true;
    wire_problem_set(problem, "gpu: %zu bytes, expected none or %d", formed->n_gpu_bytes, WIRE_GPU_BYTES);
    return false;
}

/* The norm has no limits, because the norm of a skipped step is not finite. */
static const struct wire_rule done_rules[] = {
    MESSAGE(Done, reply_done, position, .table = &position_table),
    DOUBLE(Done, reply_done, norm),
    MESSAGES(Done, reply_done, segments, n_segments, .table = &segment_table, .max_count = WIRE_MAX_SEGMENTS),
    DOUBLE(Done, reply_done, loss_scale, .flags = WIRE_POSITIVE),
    BOOL(Done, reply_done, rewound),
    BYTES(Done, reply_done, blob, n_blob_bytes, .max = WIRE_MAX_BLOB_BYTES, HAS(Done, reply_done, has_blob)),
    BOOL(Done, reply_done, has_blob),
    U64S(Done, reply_done, pool_offsets, n_pool_offsets, .max_count = WIRE_MAX_POOL_OFFSETS),
};

static const struct wire_rule slot_grant_rules[] = {
    BOOL(SlotGrant, reply_slot_grant, in_ring),
    U64(SlotGrant, reply_slot_grant, offset_bytes, .multiple_of = SLOT_ALIGN),
    U32(SlotGrant, reply_slot_grant, n_warnings),
};

static const struct wire_rule step_done_rules[] = {
    MESSAGE(StepDone, reply_step_done, position, .table = &position_table),
    BOOL(StepDone, reply_step_done, applied),
    DOUBLE(StepDone, reply_step_done, norm),
    DOUBLE(StepDone, reply_step_done, loss_scale, .flags = WIRE_POSITIVE),
    DOUBLE(StepDone, reply_step_done, lr, .flags = WIRE_FINITE),
    U32(StepDone, reply_step_done, n_missing),
    BOOL(StepDone, reply_step_done, is_decision),
};

static const struct wire_rule state_is_rules[] = {
    MESSAGES(StateIs, reply_state_is, segments, n_segments, .table = &segment_table, .max_count = 1),
    U64(StateIs, reply_state_is, n_elems, .max = ELEMS_LIMIT - 1),
    DOUBLE(StateIs, reply_state_is, norm),
    U64(StateIs, reply_state_is, count),
    U64(StateIs, reply_state_is, offset_bytes, .multiple_of = PAGE_ALIGN),
};

static const struct wire_rule refused_rules[] = {
    MESSAGE(Refused, reply_refused, diagnostic, .table = &wire_diagnostic_table, .flags = WIRE_REQUIRED),
    BOOL(Refused, reply_refused, closing),
    BOOL(Refused, reply_refused, aborted),
    MESSAGE(Refused, reply_refused, position, .table = &position_table),
};

static const struct wire_rule admin_part_rules[] = {
    BYTES(AdminPart, reply_admin_part, json, n_json_bytes, .max = WIRE_PART_BYTES),
    BOOL(AdminPart, reply_admin_part, last),
    U32(AdminPart, reply_admin_part, exit_code, .max = 255),
};

static const struct wire_table reply_tables[N_REPLY_TYPES] = {
    [REPLY_WELCOME] = WIRE_TABLE(welcome, reply_welcome, welcome_rules),
    [REPLY_FORMED] = WIRE_TABLE(formed, reply_formed, formed_rules, .check = formed_check),
    [REPLY_DONE] = WIRE_TABLE(done, reply_done, done_rules),
    [REPLY_SLOT_GRANT] = WIRE_TABLE(slot_grant, reply_slot_grant, slot_grant_rules),
    [REPLY_STEP_DONE] = WIRE_TABLE(step_done, reply_step_done, step_done_rules),
    [REPLY_STATE_IS] = WIRE_TABLE(state_is, reply_state_is, state_is_rules),
    [REPLY_REFUSED] = WIRE_TABLE(refused, reply_refused, refused_rules),
    [REPLY_ADMIN_PART] = WIRE_TABLE(admin_part, reply_admin_part, admin_part_rules),
    [REPLY_LOOK] = TABLE_EMPTY(look),
};

_Static_assert((int)WIRE_MAX_SEGMENTS <= (int)FRAME_MAX_FDS, "the segments of a reply travel in one packet");
/* Offsets are below 2^48 (DEVICE_MAX_BYTES), and need at most seven bytes. */
_Static_assert(WIRE_MAX_POOL_OFFSETS * 7 + 256 <= FRAME_MAX_BYTES, "the most offsets fit into a frame");
_Static_assert(WIRE_PART_BYTES + 64 <= FRAME_MAX_BYTES, "the largest AdminPart fits into a frame");

/* ---- the envelope: ClientMessage and ServerMessage, which have the same shape -------------------------- */

static const struct wire_envelope request_envelope = {
    .descriptor = &zerod__v1__client_message__descriptor,
    .case_offset = offsetof(Zerod__V1__ClientMessage, kind_case),
    .member_offset = offsetof(Zerod__V1__ClientMessage, hello),
    .tables = request_tables,
    .n_types = N_REQUEST_TYPES,
};

static const struct wire_envelope reply_envelope = {
    .descriptor = &zerod__v1__server_message__descriptor,
    .case_offset = offsetof(Zerod__V1__ServerMessage, kind_case),
    .member_offset = offsetof(Zerod__V1__ServerMessage, welcome),
    .tables = reply_tables,
    .n_types = N_REPLY_TYPES,
};

_Static_assert((int)REQUEST_PUSH == (int)ZEROD__V1__CLIENT_MESSAGE__KIND_PUSH &&
                   (int)REQUEST_PUSHES == (int)ZEROD__V1__CLIENT_MESSAGE__KIND_PUSHES &&
                   (int)REPLY_ADMIN_PART == (int)ZEROD__V1__SERVER_MESSAGE__KIND_ADMIN_PART,
               "types are numbered like the kinds of the proto");
_Static_assert((int)N_REQUEST_TYPES == (int)ZEROD__V1__CLIENT_MESSAGE__KIND_STACK + 1 &&
                   (int)N_REPLY_TYPES == (int)ZEROD__V1__SERVER_MESSAGE__KIND_LOOK + 1,
               "the tables have all kinds");

/* ---- functions ----------------------------------------------------------------------------------------- */

bool request_is_recorded(enum request_type type)
{
    switch (type) {
    case REQUEST_READY:
    case REQUEST_BEGIN_BACKWARD:
    case REQUEST_PUSH:
    case REQUEST_PUSHES:
    case REQUEST_END_BACKWARD:
    case REQUEST_ABANDON_BACKWARD:
    case REQUEST_STEP:
    case REQUEST_ABORT_STEP:
    case REQUEST_ABORT_SEEN:
    case REQUEST_CLEAR_FAULT:
    case REQUEST_REPORT:
    case REQUEST_LEAVE:
    case REQUEST_EVIDENCE:
        return true;
    default:
        return false;
    }
}

int wire_unpack_request(struct wire_arena *arena, const void *data, size_t n_bytes, struct request *out, char *why,
                        size_t why_size)
{
    struct wire_problem problem = {.why = why, .size = why_size};
    unsigned type = 0;
    int r = wire_envelope_unpack(&request_envelope, arena, data, n_bytes, &type, &out->hello, &problem);

    out->type = type;
    return r;
}

int wire_unpack_reply(struct wire_arena *arena, const void *data, size_t n_bytes, struct reply *out, char *why,
                      size_t why_size)
{
    struct wire_problem problem = {.why = why, .size = why_size};
    unsigned type = 0;
    int r = wire_envelope_unpack(&reply_envelope, arena, data, n_bytes, &type, &out->welcome, &problem);

    out->type = type;
    return r;
}

int wire_pack_request(struct wire_arena *arena, const struct request *request, void *buffer, size_t size)
{
    return wire_envelope_pack(&request_envelope, arena, request->type, &request->hello, buffer, size);
}

int wire_pack_reply(struct wire_arena *arena, const struct reply *reply, void *buffer, size_t size)
{
    return wire_envelope_pack(&reply_envelope, arena, reply->type, &reply->welcome, buffer, size);
}

size_t wire_param_bytes(const struct layout_decl *param)
{
    enum { VARINT = 10, OTHERS = 32 }; /* keys and lengths, dtypes, group, trainable: at most 28 */

    return OTHERS + param->name_len + (size_t)param->n_dims * VARINT;
}

static struct wire_push_record push_view(const struct diagnostic_push *push)
{
    return (struct wire_push_record){
        .sequence = push->record.sequence,
        .step = push->record.step,
        .micro_batch = push->record.micro_batch,
        .param = push->record.param,
        .ordinal = push->record.ordinal,
        .task = push->record.task,
        .depth = push->record.depth,
        .segment = push->segment,
        .call = push->record.call,
        .site = push->site,
        .time_ns = push->record.time_ns,
    };
}

struct wire_diagnostic wire_diagnostic(const struct diagnostic *d)
{
    assert(d->n_params_named <= DIAGNOSTIC_MAX_PARAMS);
    assert(d->n_params_named <= d->n_params);
    assert(d->n_fields <= DIAGNOSTIC_MAX_FIELDS);
    return (struct wire_diagnostic){
        .code = d->code,
        .cause_class = d->cause_class,
        .title = d->title,
        .has_rank = d->has_rank,
        .rank = d->rank,
        .has_step = d->has_step,
        .step = d->step,
        .has_micro_batch = d->has_micro_batch,
        .micro_batch = d->micro_batch,
        .params = (const char *const *)d->params,
        .n_params_named = d->n_params_named,
        .n_params_total = d->n_params,
        .has_first = d->first.present,
        .has_second = d->second.present,
        .first = push_view(&d->first),
        .second = push_view(&d->second),
        .fields = d->fields,
        .n_fields = d->n_fields,
        .text = d->text,
        .id = d->id,
        .warning = d->warning,
    };
}

const char *request_type_name(enum request_type type)
{
    assert(type > 0 && type < N_REQUEST_TYPES);
    return request_tables[type].descriptor->short_name;
}

const char *reply_type_name(enum reply_type type)
{
    assert(type > 0 && type < N_REPLY_TYPES);
    return reply_tables[type].descriptor->short_name;
}
