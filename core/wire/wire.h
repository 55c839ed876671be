/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * proto/zerod.proto as plain structs. This header has what requests and replies share; the messages are in
 * wire-request.h and wire-reply.h. Daemon and client see nothing of protobuf. Names and meanings of fields are those of
 * the proto, which is the specification; only these differ:
 *
 *  - string: const char *, never NULL after unpacking, NULL is "" when packing. Valid UTF-8 without
 *    control characters; texts for people (why, detail, a diagnostic's) may hold newlines and tabs.
 *  - bytes, repeated: pointer and count; the pointer is NULL when the count is 0.
 *  - a has_x that is false goes with an x that is zero.
 *  - Param is struct layout_decl, Dtype is enum dtype.
 *
 * Unpacking validates every field: what is allowed stands in the tables of wire.c. What depends on
 * state (a rank below the world size, a parameter that exists) is for the handlers.
 * Packing does not judge: it takes what it gets, and the other side refuses it; only strings are
 * made good (other bytes become '?'), and a diagnostic's texts are cut to fit into one packet.
 *
 * Memory (wire-arena.h). Strings, bytes and arrays of an unpacked message live in the arena until the next
 * message is unpacked with it. Packing borrows the arena but keeps nothing in it, so an answer may be packed
 * while its request is still in use. An arena serves any number of connections of one thread. Packing and
 * unpacking a Push allocates nothing.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/wire/wire-arena.h"
#include "kernels/dtype.h"

enum {
    WIRE_VERSION = 3,
    WIRE_MAX_BLOB_BYTES = 64 * 1024,
    WIRE_MAX_TEXT_BYTES = 1024, /* interned text, why, detail */
    WIRE_MAX_NAME_BYTES = 1024, /* of a parameter */
    WIRE_MAX_STACK_BYTES = 16 * 1024,
    WIRE_MAX_RUN_ID_BYTES = 255, /* client's name, too */
    WIRE_MAX_GROUPS = 1024,
    WIRE_MAX_STRING_ID = 65535,
    WIRE_MAX_SEGMENTS = 8,         /* descriptors in one packet */
    WIRE_MAX_PUSHES = 64,          /* in one Pushes */
    WIRE_MAX_IDS = 65536,          /* of Gather, Release, Report; picked: more go in several messages */
    WIRE_MAX_POOL_OFFSETS = 16384, /* and of a Gather to a GPU: its answer is one packet, too */
    WIRE_MAX_EVIDENCE_IDS = 16384, /* of each list of Evidence: both and its texts fit into a packet; picked */
    WIRE_MAX_ARGS = 64,            /* of Admin; picked */
    WIRE_GPU_BYTES = 16,           /* CUuuid */
    WIRE_PART_BYTES = 120 * 1024,  /* an AdminPart with so much JSON fits into a packet */
    WIRE_WHY_BYTES = 256,          /* a good size for the why of wire_unpack_*() */
};

enum {
    WIRE_E_INVALID = 1, /* not a message, or a field that is not allowed: E1403 */
};

enum wire_role {
    WIRE_ROLE_TRAINER = 0,
    WIRE_ROLE_CONTROL = 1,
    WIRE_ROLE_WATCH = 2,
};

enum wire_on_duplicate {
    WIRE_ON_DUPLICATE_AS_CONFIGURED = 0,
    WIRE_ON_DUPLICATE_REJECT = 1,
    WIRE_ON_DUPLICATE_ACCUMULATE = 2,
    WIRE_ON_DUPLICATE_ABORT_STEP = 3,
};

enum wire_segment_kind {
    WIRE_SEGMENT_RING = 0,
    WIRE_SEGMENT_OVERFLOW = 1,
    WIRE_SEGMENT_CREDIT = 2,
    WIRE_SEGMENT_WEIGHTS = 3,
    WIRE_SEGMENT_WINDOW = 4,
    WIRE_SEGMENT_POOL = 5,
    WIRE_SEGMENT_STATE = 6,
    WIRE_SEGMENT_WINDOW_STATE = 7,
    WIRE_SEGMENT_PROGRESS = 8,
    WIRE_SEGMENT_PUBLISHED = 9,
};

enum wire_state_kind {
    WIRE_STATE_MASTER = 0,
    WIRE_STATE_EXP_AVG = 1,
    WIRE_STATE_EXP_AVG_SQ = 2,
    WIRE_STATE_GRAD_NORM = 3,
    WIRE_STATE_STEP_COUNT = 4,
};

struct wire_segment {
    enum wire_segment_kind kind;
    uint64_t n_bytes;
    bool cuda;
};

struct wire_position {
    uint64_t step;
    uint32_t micro_batch;
    uint32_t attempt;
    uint32_t n_windows;
};

struct wire_push_record {
    uint64_t sequence;
    uint64_t step;
    uint32_t micro_batch;
    uint32_t param;
    uint32_t ordinal;
    uint64_t task;
    uint32_t depth;
    const char *segment;
    uint32_t call;
    const char *site;
    uint64_t time_ns;
};

struct wire_diagnostic {
    uint32_t code;
    const char *cause_class;
    const char *title;
    bool has_rank;
    uint32_t rank;
    bool has_step;
    uint64_t step;
    bool has_micro_batch;
    uint32_t micro_batch;
    const char *const *params;
    size_t n_params_named;   /* in params, at most DIAGNOSTIC_MAX_PARAMS */
    uint32_t n_params_total; /* how many in all */
    bool has_first, has_second;
    struct wire_push_record first, second;
    const struct diagnostic_field *fields; /* not to be written to */
    size_t n_fields;
    const char *text;
    uint64_t id;
    bool warning;
};

/* Bits of GroupHyper.given; those of enum config_configured. */
enum wire_given {
    WIRE_GIVES_LR = 1 << 1,
    WIRE_GIVES_BETAS = 1 << 2,
    WIRE_GIVES_EPS = 1 << 3,
    WIRE_GIVES_WEIGHT_DECAY = 1 << 4,
    WIRE_GIVES_MOMENTUM = 1 << 5,
    WIRE_GIVES_DAMPENING = 1 << 6,
    WIRE_GIVES_NESTEROV = 1 << 7,
    WIRE_GIVES_LR_DECAY = 1 << 8,
    WIRE_GIVES_START = 1 << 9, /* with WIRE_GIVES_LR: it is where the schedule starts from */
    WIRE_GIVES_NS_COEFFICIENTS = 1 << 10,
    WIRE_GIVES_NS_STEPS = 1 << 11,
    WIRE_GIVES_ADJUST_LR_FN = 1 << 12,
};

struct wire_hyper {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    double momentum;
    double dampening;
    double lr_decay;
    bool nesterov;
    double ns_a, ns_b, ns_c;
    uint32_t ns_steps;
    bool match_rms_adamw;
    uint32_t given; /* enum wire_given, and 1; 0: all but WIRE_GIVES_START */
};

/* Most bytes that one parameter adds to a Declare: to cut a manifest into parts that fit into a packet. */
size_t wire_param_bytes(const struct layout_decl *param);

/* A view of a diagnostic, to be put into a reply; d must outlive it. */
struct wire_diagnostic wire_diagnostic(const struct diagnostic *d);
