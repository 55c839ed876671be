/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * proto/zerod.proto as plain structs, so that daemon and client do not use protobuf. This header has the parts that
 * requests and replies share; the messages are in wire-request.h and wire-reply.h. The proto is the specification: it
 * defines names and meanings of fields. The structs differ only in this:
 *
 *  - string: const char *, never NULL after unpacking; NULL is packed as "". Valid UTF-8 without control
 *    characters; texts for people (why, detail, a diagnostic's) may hold newlines and tabs.
 *  - bytes, repeated: pointer and count; the pointer is NULL if the count is 0.
 *  - If has_x is false, x is zero.
 *  - Param is struct layout_decl, Dtype is enum dtype.
 *
 * Unpacking validates every field by the tables of wire.c. The handlers check facts that depend on state (that a rank
 * is below the world size, that a parameter exists). Packing does not validate, because the receiver does. It only
 * cleans strings (other bytes become '?'), and cuts a diagnostic's texts to fit into one packet.
 *
 * Memory (wire-arena.h). Strings, bytes and arrays of an unpacked message are in the arena until the next message is
 * unpacked with it. Packing uses the arena but keeps nothing in it, so an answer may be packed while its request is
 * still in use. One arena suffices for all connections of a thread. Packing and unpacking a Push allocates nothing.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/wire/hyper-fields.h"
#include "core/wire/wire-arena.h"
#include "kernels/dtype.h"

enum {
    WIRE_VERSION = 3,
    WIRE_MAX_BLOB_BYTES = 64 * 1024,
    WIRE_MAX_TEXT_BYTES = 1024, /* length of an interned text, of why, of detail */
    WIRE_MAX_NAME_BYTES = 1024, /* length of a parameter's name */
    WIRE_MAX_STACK_BYTES = 16 * 1024,
    WIRE_MAX_RUN_ID_BYTES = 255, /* also the limit of the client's name */
    WIRE_MAX_GROUPS = 1024,
    WIRE_MAX_STRING_ID = 65535,
    WIRE_MAX_SEGMENTS = 8,         /* descriptors in one packet */
    WIRE_MAX_PUSHES = 64,          /* pushes in one Pushes */
    WIRE_MAX_IDS = 65536,          /* ids in Gather, Release, Report; picked; more ids need several messages */
    WIRE_MAX_POOL_OFFSETS = 16384, /* offsets in a Gather to a GPU, so that its answer fits into one packet */
    WIRE_MAX_EVIDENCE_IDS = 16384, /* ids in a list of Evidence; picked: both lists and its texts fit into a packet */
    WIRE_MAX_ARGS = 64,            /* arguments of Admin; picked */
    WIRE_GPU_BYTES = 16,           /* size of a CUuuid */
    WIRE_PART_BYTES = 120 * 1024,  /* JSON in an AdminPart, so that the message fits into a packet */
    WIRE_WHY_BYTES = 256,          /* recommended size of the why of wire_unpack_*() */
};

enum {
    WIRE_E_INVALID = 1, /* the packet is not a message, or has a field with a value that is not allowed: E1403 */
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
    size_t n_params_named;   /* number of params, at most DIAGNOSTIC_MAX_PARAMS */
    uint32_t n_params_total; /* number of parameters in the diagnostic, also those without a name in params */
    bool has_first, has_second;
    struct wire_push_record first, second;
    const struct diagnostic_field *fields; /* read-only */
    size_t n_fields;
    const char *text;
    uint64_t id;
    bool warning;
};

/* Bits of GroupHyper.given, with the values of enum config_configured. */
enum wire_given {
    WIRE_GIVES_LR = 1 << 1,
    WIRE_GIVES_BETAS = 1 << 2,
    WIRE_GIVES_EPS = 1 << 3,
    WIRE_GIVES_WEIGHT_DECAY = 1 << 4,
    WIRE_GIVES_MOMENTUM = 1 << 5,
    WIRE_GIVES_DAMPENING = 1 << 6,
    WIRE_GIVES_NESTEROV = 1 << 7,
    WIRE_GIVES_LR_DECAY = 1 << 8,
    WIRE_GIVES_START = 1 << 9, /* with WIRE_GIVES_LR: the schedule starts from this lr */
    WIRE_GIVES_NS_COEFFICIENTS = 1 << 10,
    WIRE_GIVES_NS_STEPS = 1 << 11,
    WIRE_GIVES_ADJUST_LR_FN = 1 << 12,
};

#define WIRE_HYPER_FIELD(kind, field, plain, text, gives, range, only) HYPER_TYPE_##kind field;
struct wire_hyper {
    HYPER_FIELDS(WIRE_HYPER_FIELD)
    uint32_t given; /* bits of enum wire_given, plus 1; 0: all bits except WIRE_GIVES_START */
};
#undef WIRE_HYPER_FIELD

/*
 * Return: the most bytes that one parameter adds to a Declare. Clients use it to split a manifest into parts that fit
 * into a packet.
 */
size_t wire_param_bytes(const struct layout_decl *param);

/* Return: a view of a diagnostic, for a reply. d must outlive the view. */
struct wire_diagnostic wire_diagnostic(const struct diagnostic *d);
