/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * proto/zerod.proto as plain structs, both messages both ways; daemon and client see
 * nothing of protobuf. Names and meanings of fields are those of the proto, which is the
 * specification; here only what differs:
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
    WIRE_VERSION = 2,
    WIRE_MAX_BLOB_BYTES = 64 * 1024,
    WIRE_MAX_TEXT_BYTES = 1024,  /* interned text, why, detail */
    WIRE_MAX_NAME_BYTES = 1024,  /* of a parameter */
    WIRE_MAX_RUN_ID_BYTES = 255, /* client's name, too */
    WIRE_MAX_GROUPS = 1024,
    WIRE_MAX_STRING_ID = 65535,
    WIRE_MAX_SEGMENTS = 8,         /* descriptors in one packet */
    WIRE_MAX_IDS = 65536,          /* of Gather, Release, Report; picked: more go in several messages */
    WIRE_MAX_POOL_OFFSETS = 16384, /* and of a Gather to a GPU: its answer is one packet, too */
    WIRE_MAX_EVIDENCE_IDS = 16384, /* of each list of Evidence: both and its texts fit into a packet; picked */
    WIRE_MAX_ARGS = 64,            /* of Admin; picked */
    WIRE_MAX_EVENTS = 256,
    WIRE_EVENT_BYTES = 64,        /* cudaIpcEventHandle_t */
    WIRE_GPU_BYTES = 16,          /* CUuuid */
    WIRE_PART_BYTES = 120 * 1024, /* an AdminPart with so much JSON fits into a packet */
    WIRE_WHY_BYTES = 256,         /* a good size for the why of wire_unpack_*() */
};

enum {
    WIRE_E_INVALID = 1, /* not a message, or a field that is not allowed: E1403 */
};

enum wire_role {
    WIRE_ROLE_TRAINER = 0,
    WIRE_ROLE_CONTROL = 1,
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
};

enum wire_state_kind {
    WIRE_STATE_MASTER = 0,
    WIRE_STATE_EXP_AVG = 1,
    WIRE_STATE_EXP_AVG_SQ = 2,
    WIRE_STATE_GRAD_NORM = 3,
    WIRE_STATE_STEP_COUNT = 4,
};

/* ---- both ways ----------------------------------------------------------------------------------------- */

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
};

/* ---- client to daemon ---------------------------------------------------------------------------------- */

struct request_hello {
    uint32_t version_min;
    uint32_t version_max;
    uint64_t features;
    enum wire_role role;
    uint32_t rank;
    const char *run_id;
    uint64_t incarnation;
    enum wire_on_duplicate on_duplicate;
    const char *client;
    const char *optimizer;
    double momentum;
};

struct request_declare {
    const struct layout_decl *params;
    size_t n_params;
};

struct request_form {
    uint32_t n_params;
};

struct request_init {
    uint32_t param;
    uint64_t start_elem;
    uint64_t n_elems;
    uint64_t offset_bytes;
};

struct request_begin_backward {
    uint64_t step;
    uint32_t micro_batch;
    uint32_t attempt;
    uint64_t n_forwards;
    uint64_t n_backwards;
};

struct request_intern {
    uint32_t id;
    const char *text;
};

struct request_push {
    uint64_t sequence;
    uint32_t attempt;
    uint64_t step;
    uint32_t micro_batch;
    uint32_t param;
    uint32_t ticket;
    uint32_t use;
    uint64_t offset_bytes;
    bool overflow;
    uint32_t pass;
    bool record_only;
    uint64_t sum;
    uint32_t ordinal;
    uint64_t task;
    uint32_t depth;
    uint32_t segment;
    uint32_t call;
    uint32_t site;
    uint32_t flags; /* PUSH_* of core/diagnosis/push-record.h */
    uint64_t n_bytes;
    uint32_t dtype_plus_one;
    uint32_t part;
    uint32_t event_plus_one;
};

struct request_event {
    uint32_t number;
    const uint8_t *handle; /* WIRE_EVENT_BYTES */
    size_t n_handle_bytes;
};

struct request_slot_request {
    uint32_t bucket, parcel;
    uint32_t pass;
};

struct request_end_backward {
    uint64_t step;
    uint32_t micro_batch;
    uint32_t attempt;
    bool has_blob;
    const uint8_t *blob;
    size_t n_blob_bytes;
};

struct request_abandon_backward {
    uint64_t step;
    uint32_t micro_batch;
    uint32_t attempt;
    const char *why;
};

struct request_step {
    uint64_t step;
    uint32_t attempt;
    const struct wire_hyper *groups;
    size_t n_groups;
    bool has_max_norm;
    double max_norm;
    double loss_scale;
    bool found_inf;
    bool has_blob;
    const uint8_t *blob;
    size_t n_blob_bytes;
};

struct request_gather {
    const uint32_t *params;
    size_t n_params;
};

struct request_release {
    const uint32_t *params;
    size_t n_params;
};

struct request_prefetch {
    const uint32_t *params;
    size_t n_params;
};

struct request_write_end {
    bool forget;
};

struct request_read_state {
    uint32_t param;
    enum wire_state_kind kind;
};

struct request_write_state {
    uint32_t param;
    enum wire_state_kind kind;
    uint64_t count;
};

struct request_abort_step {
    const char *why;
};

struct request_abort_seen {
    uint32_t attempt;
};

struct request_report {
    uint32_t code;
    const uint32_t *params;
    size_t n_params;
    const char *detail;
};

struct request_evidence {
    uint64_t step;
    uint32_t attempt;
    const char *exception;
    const char *raised_at;
    const char *swallowed_by;
    bool in_forward;
    bool requires_grad_changed;
    const char *dead_segment;
    uint32_t n_dead_segments;
    const char *site;
    uint64_t n_forwards;
    uint64_t n_backwards;
    const uint32_t *not_called;
    size_t n_not_called;
    const uint32_t *called;
    size_t n_called;
};

struct request_admin {
    const char *command;
    const char *const *args;
    size_t n_args;
};

/* The numbers are the proto's. */
enum request_type {
    REQUEST_HELLO = 1,
    REQUEST_DECLARE,
    REQUEST_FORM,
    REQUEST_INIT,
    REQUEST_READY,
    REQUEST_BEGIN_BACKWARD,
    REQUEST_INTERN,
    REQUEST_PUSH,
    REQUEST_SLOT_REQUEST,
    REQUEST_END_BACKWARD,
    REQUEST_ABANDON_BACKWARD,
    REQUEST_STEP,
    REQUEST_GRAD_NORM,
    REQUEST_GATHER,
    REQUEST_RELEASE,
    REQUEST_WRITE_BEGIN,
    REQUEST_WRITE_END,
    REQUEST_READ_STATE,
    REQUEST_ABORT_STEP,
    REQUEST_ABORT_SEEN,
    REQUEST_CLEAR_FAULT,
    REQUEST_REPORT,
    REQUEST_LEAVE,
    REQUEST_ADMIN,
    REQUEST_EVIDENCE,
    REQUEST_WRITE_STATE,
    REQUEST_PREFETCH,
    REQUEST_EVENT,
    N_REQUEST_TYPES, /* one more than the last */
};

struct request {
    enum request_type type;
    union { /* Ready, GradNorm, WriteBegin, ClearFault, Leave have no fields */
        struct request_hello hello;
        struct request_declare declare;
        struct request_form form;
        struct request_init init;
        struct request_begin_backward begin_backward;
        struct request_intern intern;
        struct request_push push;
        struct request_event event;
        struct request_slot_request slot_request;
        struct request_end_backward end_backward;
        struct request_abandon_backward abandon_backward;
        struct request_step step;
        struct request_gather gather;
        struct request_release release;
        struct request_prefetch prefetch;
        struct request_write_end write_end;
        struct request_read_state read_state;
        struct request_write_state write_state;
        struct request_abort_step abort_step;
        struct request_abort_seen abort_seen;
        struct request_report report;
        struct request_admin admin;
        struct request_evidence evidence;
    };
};

/* ---- daemon to client ---------------------------------------------------------------------------------- */

struct reply_welcome {
    uint32_t version;
    uint64_t features;
    uint32_t world_size;
    uint32_t stage;
    uint64_t bucket_elems;
    enum wire_on_duplicate on_duplicate;
    const char *server;
    bool private_weights;
    const char *run_id;
    uint64_t stage3_max_live_elems;
    const char *optimizer;
    struct wire_hyper hyper;
    bool has_scheduler;
    double max_norm;
    bool mean;
    bool fp16;
    uint32_t accumulation;
    bool cuda;
    uint32_t configured;
};

struct reply_formed {
    bool resumed;
    bool init_wanted;
    struct wire_position position;
    const struct wire_segment *segments;
    size_t n_segments;
    const uint8_t *blob;
    size_t n_blob_bytes;
    bool has_blob;
    uint32_t n_tickets;
    uint64_t ring_bytes;
    uint64_t digest;
    double loss_scale;
    const uint8_t *gpu; /* none, or WIRE_GPU_BYTES */
    size_t n_gpu_bytes;
};

struct reply_done {
    struct wire_position position;
    double norm; /* may be infinite or not a number */
    const struct wire_segment *segments;
    size_t n_segments;
    double loss_scale;
    bool rewound;
    const uint8_t *blob;
    size_t n_blob_bytes;
    bool has_blob;
    const uint64_t *pool_offsets;
    size_t n_pool_offsets;
};

struct reply_slot_grant {
    bool in_ring;
    uint64_t offset_bytes;
    uint32_t n_warnings;
};

struct reply_step_done {
    struct wire_position position;
    bool applied;
    double norm; /* may be infinite or not a number */
    double loss_scale;
    double lr;
    uint32_t n_missing;
};

struct reply_state_is {
    const struct wire_segment *segments; /* none or one */
    size_t n_segments;
    uint64_t n_elems;
    double norm; /* may be infinite or not a number */
    uint64_t count;
    uint64_t offset_bytes;
};

struct reply_refused {
    struct wire_diagnostic diagnostic;
    bool closing;
    bool aborted;
    struct wire_position position;
};

struct reply_admin_part {
    const uint8_t *json;
    size_t n_json_bytes;
    bool last;
    uint32_t exit_code;
};

/* The numbers are the proto's. */
enum reply_type {
    REPLY_WELCOME = 1,
    REPLY_FORMED,
    REPLY_DONE,
    REPLY_SLOT_GRANT,
    REPLY_STEP_DONE,
    REPLY_STATE_IS,
    REPLY_REFUSED,
    REPLY_ADMIN_PART,
    N_REPLY_TYPES, /* one more than the last */
};

struct reply {
    enum reply_type type;
    union {
        struct reply_welcome welcome;
        struct reply_formed formed;
        struct reply_done done;
        struct reply_slot_grant slot_grant;
        struct reply_step_done step_done;
        struct reply_state_is state_is;
        struct reply_refused refused;
        struct reply_admin_part admin_part;
    };
};

/* ---- the verbs ----------------------------------------------------------------------------------------- */

/*
 * data may go away afterwards. On WIRE_E_INVALID why is a sentence: message, field, what was got, what was
 * expected ("Push.dtype_plus_one: 9, expected 0 to 3").
 * Return: 0, WIRE_E_INVALID, -ENOMEM.
 */
int wire_unpack_request(struct wire_arena *arena, const void *data, size_t n_bytes, struct request *out, char *why,
                        size_t why_size);
int wire_unpack_reply(struct wire_arena *arena, const void *data, size_t n_bytes, struct reply *out, char *why,
                      size_t why_size);

/* Return: bytes written to buffer, at least 1; -EMSGSIZE when they do not fit into size; -ENOMEM. */
int wire_pack_request(struct wire_arena *arena, const struct request *request, void *buffer, size_t size);
int wire_pack_reply(struct wire_arena *arena, const struct reply *reply, void *buffer, size_t size);

/* Most bytes that one parameter adds to a Declare: to cut a manifest into parts that fit into a packet. */
size_t wire_param_bytes(const struct layout_decl *param);

/* A view of a diagnostic, to be put into a reply; d must outlive it. */
struct wire_diagnostic wire_diagnostic(const struct diagnostic *d);

/* "Push" for REQUEST_PUSH, for logs. */
const char *request_type_name(enum request_type type);
const char *reply_type_name(enum reply_type type);
