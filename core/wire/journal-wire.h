/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* proto/journal.proto as plain structs: the head of the journal. Names and meanings of fields are those of the proto. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/wire/wire-arena.h"
#include "core/wire/wire.h"

enum stored_turn {
    TURN_FORMED = 0,
    TURN_TRAINING = 1,
    TURN_COMMITTED = 2,
    TURN_ABORTED = 3,
    TURN_WINDOW = 4,
};

enum stored_wait {
    STORED_WAIT_NONE = 0,
    STORED_WAIT_READY = 1,
    STORED_WAIT_STEP = 2,
    STORED_WAIT_ABORT = 3,
    STORED_WAIT_OTHER = 4,
};

struct stored_slot {
    uint32_t ticket;
    uint32_t use;
    uint32_t parcel;
    uint32_t micro_batch;
    uint32_t pass;
    uint32_t attempt;
    bool overflow;
    uint64_t point;
    uint64_t offset_bytes;
    uint64_t n_bytes;
};

struct stored_rank {
    uint32_t rank;
    uint64_t incarnation;
    uint64_t secret;
    bool is_here;
    uint32_t owner;
    int64_t pid;
    uint32_t uid;
    uint32_t gid;
    const char *client;
    bool formed;
    bool ready;
    bool left;
    bool resumes;
    uint64_t lost_ns;
    enum wire_on_duplicate on_duplicate;
    uint64_t n_received;
    uint64_t last_sequence;
    bool has_ended;
    uint64_t ended_step;
    uint32_t ended_micro_batch;
    bool has_blob;
    const uint8_t *blob;
    size_t n_blob_bytes;
    uint64_t n_forwards;
    uint64_t n_backwards;
    uint64_t n_pushes;
    bool has_notice;
    bool again_reported;
    enum stored_wait wait;
    const struct stored_slot *slots;
    size_t n_slots;
    bool has_ring;
};

struct stored_head {
    enum stored_turn turn;
    uint32_t n_daemons;
    const char *run_id;
    uint64_t digest;
    uint64_t n_incarnations;
    bool given_weights;
    bool has_weights;
    bool draining;
    uint64_t step;
    uint32_t attempt;
    uint64_t n_applied;
    uint64_t n_windows;
    uint32_t counts_copy;
    uint32_t squares_copy;
    double norm_scale;
    uint64_t n_ops;
    double loss_scale;
    uint32_t hysteresis_left;
    uint64_t n_scaled_steps;
    uint64_t window_start;
    bool applied;
    bool has_norm;
    double norm;
    double lr;
    uint32_t n_missing;
    bool has_learnt;
    const uint8_t *learnt;
    size_t n_learnt_bytes;
    bool has_notice;
    struct wire_diagnostic notice;
    const struct stored_rank *ranks;
    size_t n_ranks;
    uint64_t n_steps_applied;
    uint64_t n_steps_skipped;
    uint64_t n_aborts;
    uint64_t n_admitted;
    uint64_t n_reattaches;
    uint64_t saved_step;
};

/* As wire_pack_request() and wire_unpack_request(). */
int head_pack(struct wire_arena *arena, const struct stored_head *head, void *buffer, size_t size);
int head_unpack(struct wire_arena *arena, const void *data, size_t n_bytes, struct stored_head *out, char *why,
                size_t why_size);
