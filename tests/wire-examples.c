/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/wire-examples.h"

#include "daemon/base.h"

static const uint8_t blob[] = {0, 1, 2, 254, 255};
static const uint32_t ids[] = {0, 127, 128, 70000, UINT32_MAX};
static const uint64_t matrix[] = {4096, 1, UINT64_C(1) << 40};

static const struct layout_decl decls[] = {
    {
        .name = "layers.0.attn.q\0\xff",
        .name_len = 17,
        .dtype = DTYPE_BF16,
        .grad_dtype = DTYPE_F16,
        .group = 1023,
        .trainable = true,
        .n_dims = 3,
        .shape = matrix,
    },
    {.name = "b", .name_len = 1, .dtype = DTYPE_F32, .grad_dtype = DTYPE_F32},
};

static const struct wire_hyper hypers[] = {
    {
        .lr = 1e-3,
        .beta1 = 0.9,
        .beta2 = 0.999,
        .eps = 1e-8,
        .weight_decay = 0.01,
        .momentum = -0.5,
        .dampening = 0.1,
        .lr_decay = 1e300,
        .nesterov = true,
    },
    {.lr = 3e-4},
};

static const char *const args[] = {"--json", "", "Maße"};

const struct request example_requests[N_REQUEST_TYPES] = {
    [REQUEST_HELLO] = {.type = REQUEST_HELLO,
                       .hello = {.version_min = 1,
                                 .version_max = 2,
                                 .features = 3,
                                 .role = WIRE_ROLE_CONTROL,
                                 .rank = 7,
                                 .run_id = "run-5",
                                 .incarnation = UINT64_MAX,
                                 .on_duplicate = WIRE_ON_DUPLICATE_ABORT_STEP,
                                 .client = "train.py 1.0"}},
    [REQUEST_DECLARE] = {.type = REQUEST_DECLARE,
                         .declare = {.params = decls, .n_params = ARRAY_SIZE(decls)}},
    [REQUEST_FORM] = {.type = REQUEST_FORM, .form = {.n_params = 2}},
    [REQUEST_INIT] =
        {.type = REQUEST_INIT,
         .init = {.param = 1, .start_elem = 2, .n_elems = (UINT64_C(1) << 62) - 1, .offset_bytes = 64}},
    [REQUEST_READY] = {.type = REQUEST_READY},
    [REQUEST_BEGIN_BACKWARD] =
        {.type = REQUEST_BEGIN_BACKWARD,
         .begin_backward = {.step = 1, .micro_batch = 2, .attempt = 3, .n_forwards = 4, .n_backwards = 5}},
    [REQUEST_INTERN] = {.type = REQUEST_INTERN, .intern = {.id = 65535, .text = "model.py:42"}},
    [REQUEST_PUSH] = {.type = REQUEST_PUSH,
                      .push = {.sequence = 100001,
                               .attempt = 2,
                               .step = 3000,
                               .micro_batch = 4,
                               .param = 5,
                               .ticket = 6,
                               .use = UINT32_MAX,
                               .offset_bytes = UINT64_C(1) << 33,
                               .overflow = true,
                               .pass = 10,
                               .record_only = true,
                               .sum = UINT64_C(0xfedcba9876543210),
                               .ordinal = 13,
                               .task = 14,
                               .depth = 15,
                               .segment = 16,
                               .call = 17,
                               .site = 65535,
                               .flags = 7,
                               .n_bytes = 20,
                               .dtype_plus_one = 3}},
    [REQUEST_SLOT_REQUEST] = {.type = REQUEST_SLOT_REQUEST, .slot_request = {.bucket = 1, .pass = 2}},
    [REQUEST_END_BACKWARD] = {.type = REQUEST_END_BACKWARD,
                              .end_backward = {.step = 1,
                                               .micro_batch = 2,
                                               .attempt = 3,
                                               .has_blob = true,
                                               .blob = blob,
                                               .n_blob_bytes = sizeof(blob)}},
    [REQUEST_ABANDON_BACKWARD] =
        {.type = REQUEST_ABANDON_BACKWARD,
         .abandon_backward = {.step = 1, .micro_batch = 2, .attempt = 3, .why = "ValueError:\n\tbad batch"}},
    [REQUEST_STEP] = {.type = REQUEST_STEP,
                      .step = {.step = 1,
                               .attempt = 2,
                               .groups = hypers,
                               .n_groups = ARRAY_SIZE(hypers),
                               .has_max_norm = true,
                               .max_norm = 1.5,
                               .loss_scale = 65536,
                               .found_inf = true,
                               .has_blob = true,
                               .blob = blob,
                               .n_blob_bytes = sizeof(blob)}},
    [REQUEST_GRAD_NORM] = {.type = REQUEST_GRAD_NORM},
    [REQUEST_GATHER] = {.type = REQUEST_GATHER, .gather = {.params = ids, .n_params = ARRAY_SIZE(ids)}},
    [REQUEST_RELEASE] = {.type = REQUEST_RELEASE, .release = {.params = ids, .n_params = 2}},
    [REQUEST_WRITE_BEGIN] = {.type = REQUEST_WRITE_BEGIN},
    [REQUEST_WRITE_END] = {.type = REQUEST_WRITE_END, .write_end = {.forget = true}},
    [REQUEST_READ_STATE] = {.type = REQUEST_READ_STATE,
                            .read_state = {.param = 9, .kind = WIRE_STATE_GRAD_NORM}},
    [REQUEST_ABORT_STEP] = {.type = REQUEST_ABORT_STEP, .abort_step = {.why = "loss is nan"}},
    [REQUEST_ABORT_SEEN] = {.type = REQUEST_ABORT_SEEN, .abort_seen = {.attempt = 11}},
    [REQUEST_CLEAR_FAULT] = {.type = REQUEST_CLEAR_FAULT},
    [REQUEST_REPORT] =
        {.type = REQUEST_REPORT,
         .report = {.code = 1110, .params = ids, .n_params = 3, .detail = "first line\nsecond line"}},
    [REQUEST_LEAVE] = {.type = REQUEST_LEAVE},
    [REQUEST_ADMIN] = {.type = REQUEST_ADMIN,
                       .admin = {.command = "status", .args = args, .n_args = ARRAY_SIZE(args)}},
};

static const struct wire_segment segments[] = {
    {.kind = WIRE_SEGMENT_WEIGHTS, .n_bytes = UINT64_C(4096) << 30},
    {.kind = WIRE_SEGMENT_RING, .n_bytes = 4096},
    {.kind = WIRE_SEGMENT_STATE, .n_bytes = 8192},
};

static const struct diagnostic_field fields[] = {
    {.label = (char *)"parameter", .text = (char *)"layers.0.attn.q\nlayers.1.attn.q"},
    {.label = (char *)"fix", .text = (char *)"call it once"},
};

static const char *const names[] = {"a", "b\\xff", "c", "d", "layers.4"};

#define POSITION                                                                                             \
    {                                                                                                        \
        .step = 1, .micro_batch = 2, .attempt = 3, .n_windows = 4                                            \
    }

const struct reply example_replies[N_REPLY_TYPES] = {
    [REPLY_WELCOME] = {.type = REPLY_WELCOME,
                       .welcome = {.version = 1,
                                   .features = 2,
                                   .world_size = 3,
                                   .stage = 3,
                                   .bucket_elems = 500000000,
                                   .on_duplicate = WIRE_ON_DUPLICATE_ACCUMULATE,
                                   .server = "zerod 0.1.0 avx2",
                                   .private_weights = true,
                                   .run_id = "run-5",
                                   .stage3_max_live_elems = 1000000000}},
    [REPLY_FORMED] = {.type = REPLY_FORMED,
                      .formed = {.resumed = true,
                                 .init_wanted = true,
                                 .position = POSITION,
                                 .segments = segments,
                                 .n_segments = ARRAY_SIZE(segments),
                                 .blob = blob,
                                 .n_blob_bytes = sizeof(blob),
                                 .has_blob = true,
                                 .n_tickets = 64,
                                 .ring_bytes = 1 << 20,
                                 .digest = UINT64_C(0x0123456789abcdef),
                                 .loss_scale = 65536}},
    [REPLY_DONE] =
        {.type = REPLY_DONE,
         .done = {.position = POSITION, .norm = 2.5, .segments = segments, .n_segments = 1, .loss_scale = 2}},
    [REPLY_SLOT_GRANT] = {.type = REPLY_SLOT_GRANT,
                          .slot_grant = {.in_ring = true, .offset_bytes = 128, .n_warnings = 3}},
    [REPLY_STEP_DONE] = {.type = REPLY_STEP_DONE,
                         .step_done = {.position = POSITION,
                                       .applied = true,
                                       .norm = 0.25,
                                       .loss_scale = 4,
                                       .lr = 1e-4,
                                       .n_missing = 6}},
    [REPLY_STATE_IS] =
        {.type = REPLY_STATE_IS,
         .state_is = {.segments = segments + 2, .n_segments = 1, .n_elems = 2048, .norm = 7, .count = 8}},
    [REPLY_REFUSED] = {.type = REPLY_REFUSED,
                       .refused = {.diagnostic = {.code = 1001,
                                                  .cause_class = "D1",
                                                  .title = "duplicate gradient refused",
                                                  .has_rank = true,
                                                  .rank = 1,
                                                  .has_step = true,
                                                  .step = 2,
                                                  .has_micro_batch = true,
                                                  .micro_batch = 3,
                                                  .params = names,
                                                  .n_params_named = ARRAY_SIZE(names),
                                                  .n_params_total = 9,
                                                  .has_first = true,
                                                  .has_second = true,
                                                  .first = {.sequence = 1,
                                                            .step = 2,
                                                            .micro_batch = 3,
                                                            .param = 4,
                                                            .ordinal = 5,
                                                            .task = 6,
                                                            .depth = 7,
                                                            .segment = "block",
                                                            .call = 9,
                                                            .site = "model.py:1",
                                                            .time_ns = 11},
                                                  .second = {.sequence = 12,
                                                             .segment = "",
                                                             .site = "model.py:2"},
                                                  .fields = fields,
                                                  .n_fields = ARRAY_SIZE(fields),
                                                  .text =
                                                      "E1001 duplicate gradient refused\n  fix: call it once",
                                                  .id = 16,
                                                  .warning = true},
                                   .closing = true,
                                   .aborted = true,
                                   .position = POSITION}},
    [REPLY_ADMIN_PART] =
        {.type = REPLY_ADMIN_PART,
         .admin_part = {.json = (const uint8_t *)"{}", .n_json_bytes = 2, .last = true, .exit_code = 69}},
};
