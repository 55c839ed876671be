/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The requests that a client sends to the daemon, as plain structs. wire.h describes validation, strings and memory of
 * requests and replies.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/wire/wire.h"

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
    bool resumes;
    uint64_t n_sent;
    bool waits;
    bool is_last;
    bool again;
    bool anew;
};

struct request_stack {
    const char *text;
};

struct request_declare {
    const struct layout_decl *params;
    size_t n_params;
};

struct request_form {
    uint32_t n_params;
    bool wants_published;
    bool from_gpu;
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
    const struct wire_hyper *groups;
    size_t n_groups;
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
    uint64_t point;
};

struct request_pushes {
    struct request_push first;
    const uint32_t *others;
    size_t n_others;
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
    bool wants_decision;
};

struct request_gather {
    const uint32_t *params;
    size_t n_params;
};

struct request_release {
    const uint32_t *params;
    size_t n_params;
};

struct request_held {
    const uint32_t *params;
    size_t n_params;
};

struct request_prefetch {
    const uint32_t *params;
    size_t n_params;
};

struct request_write_end {
    bool forget;
    uint32_t n_windows;
};

struct request_save_checkpoint {
    bool wait;
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

/* The types have the numbers of the proto. */
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
    REQUEST_HELD,
    REQUEST_SAVE_CHECKPOINT,
    REQUEST_PUSHES,
    REQUEST_STACK,
    N_REQUEST_TYPES, /* the highest type plus 1 */
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
        struct request_pushes pushes;
        struct request_stack stack;
        struct request_slot_request slot_request;
        struct request_end_backward end_backward;
        struct request_abandon_backward abandon_backward;
        struct request_step step;
        struct request_gather gather;
        struct request_release release;
        struct request_prefetch prefetch;
        struct request_held held;
        struct request_write_end write_end;
        struct request_read_state read_state;
        struct request_save_checkpoint save_checkpoint;
        struct request_write_state write_state;
        struct request_abort_step abort_step;
        struct request_abort_seen abort_seen;
        struct request_report report;
        struct request_admin admin;
        struct request_evidence evidence;
    };
};

/* ---- functions ----------------------------------------------------------------------------------------- */

/*
 * Unpacks a request. data may be freed afterwards. On WIRE_E_INVALID, why is a sentence: message, field, actual value,
 * expected value ("Push.dtype_plus_one: 9, expected 0 to 3"). Return: 0, WIRE_E_INVALID or -ENOMEM.
 */
int wire_unpack_request(struct wire_arena *arena, const void *data, size_t n_bytes, struct request *out, char *why,
                        size_t why_size);

/*
 * Packs a request. Return: the number of bytes in buffer, at least 1; -EMSGSIZE if they do not fit into size; -ENOMEM.
 */
int wire_pack_request(struct wire_arena *arena, const struct request *request, void *buffer, size_t size);

/* Does the open step depend on requests of this type? Client and daemon count these requests (see the proto). */
bool request_is_recorded(enum request_type type);

/* Return: the name of a type for logs, such as "Push" for REQUEST_PUSH. */
const char *request_type_name(enum request_type type);
