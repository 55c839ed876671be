/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The replies that the daemon sends to a client, as plain structs. wire.h describes validation, strings and memory of
 * requests and replies.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/wire/wire.h"

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
    bool resumed;
    uint64_t n_received;
    uint64_t reattach_ms;
    uint32_t configured_stage;
    bool looks;
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
    const uint8_t *gpu; /* NULL, or WIRE_GPU_BYTES bytes */
    size_t n_gpu_bytes;
    uint64_t first_point;
    uint64_t bucket_elems; /* 0: the size is that of Welcome */
    bool speculates;
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
    bool is_decision; /* another StepDone follows when the step has been committed */
};

struct reply_state_is {
    const struct wire_segment *segments; /* no segment, or one */
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

/* The types have the numbers of the proto. */
enum reply_type {
    REPLY_WELCOME = 1,
    REPLY_FORMED,
    REPLY_DONE,
    REPLY_SLOT_GRANT,
    REPLY_STEP_DONE,
    REPLY_STATE_IS,
    REPLY_REFUSED,
    REPLY_ADMIN_PART,
    REPLY_LOOK,    /* has no fields */
    N_REPLY_TYPES, /* the highest type plus 1 */
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

/* ---- functions ----------------------------------------------------------------------------------------- */

/* Like wire_unpack_request(). */
int wire_unpack_reply(struct wire_arena *arena, const void *data, size_t n_bytes, struct reply *out, char *why,
                      size_t why_size);

/* Like wire_pack_request(). */
int wire_pack_reply(struct wire_arena *arena, const struct reply *reply, void *buffer, size_t size);

/* Return: the name of a type for logs, such as "Done" for REPLY_DONE. */
const char *reply_type_name(enum reply_type type);
