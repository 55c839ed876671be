/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The head of the journal: proto/journal.proto as plain structs. The proto defines names and meanings of fields. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/blob.h"
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

/*
 * The part of a rank that survives the daemon. struct job_rank contains it, and the journal's rules point into it, so a
 * new field needs a rule. The rank owns text and bytes; after head_unpack() the arena owns them.
 */
struct rank_kept {
    uint64_t incarnation; /* the daemon's number of the process, not secret; 0: no process has attached yet */
    uint64_t secret;      /* a number that the client chose for this incarnation; never shown */
    uint32_t owner;       /* uid that formed the rank */
    int64_t pid;
    uint32_t uid, gid;
    char *client;
    bool formed, ready, left;
    bool resumes;     /* the run had weights when the rank asked to form */
    uint64_t lost_ns; /* time at which its process was lost; 0: not lost */
    enum wire_on_duplicate on_duplicate;
    uint64_t n_received; /* number of recorded requests of this incarnation */
    uint64_t n_forwards, n_backwards, n_pushes;
    bool again_reported; /* the accumulation of its duplicate gradients was reported */
    struct blob blob;    /* user state of the last committed step */
};

/* The part of a job that survives the daemon. */
struct job_kept {
    uint32_t n_daemons;      /* number of daemons that have served the run */
    char *run_id;            /* NULL: none yet */
    uint64_t digest;         /* hash of the manifest */
    uint64_t n_incarnations; /* number of incarnations of all ranks so far */
    bool given_weights;      /* rank 0 sent all initial weights, or a checkpoint had them */
    bool has_weights;        /* all nodes have the initial weights */
    bool draining;
    bool applied; /* the last decided step was applied */
    bool has_norm;
    double norm, lr;    /* gradient norm and learning rate of the last step */
    uint32_t n_missing; /* parameters that no rank pushed in the last decided step */
    uint64_t n_steps_applied, n_steps_skipped, n_aborts, n_admitted, n_reattaches;
    uint64_t saved_step;  /* step of the last complete checkpoint; 0: none */
    uint32_t n_all_backs; /* several nodes: how often node 0 reported that all ranks are back */
    bool asks_all_back;   /* all ranks left, one of this node is back, and node 0 has not reported that all are back */
};

/* A rank in the head, with the data that other modules have about the rank. */
struct stored_rank {
    struct rank_kept kept;
    uint32_t rank;
    bool is_here;
    uint64_t last_sequence;
    bool has_ended;
    uint64_t ended_step;
    uint32_t ended_micro_batch;
    bool has_blob;
    bool has_notice;
    enum stored_wait wait;
    const struct stored_slot *slots;
    size_t n_slots;
    bool has_ring;
};

struct stored_head {
    struct job_kept kept;
    enum stored_turn turn;
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
    bool has_learnt;
    const uint8_t *learnt;
    size_t n_learnt_bytes;
    bool has_notice;
    struct wire_diagnostic notice;
    const struct stored_rank *ranks;
    size_t n_ranks;
};

/* Pack and unpack the head, like wire_pack_request() and wire_unpack_request(). */
int head_pack(struct wire_arena *arena, const struct stored_head *head, void *buffer, size_t size);
int head_unpack(struct wire_arena *arena, const void *data, size_t n_bytes, struct stored_head *out, char *why,
                size_t why_size);
