/* SPDX-License-Identifier: Apache-2.0 */

/* Tables of the journal's head: the allowed contents of each field. */

#include "core/wire/journal-wire.h"

#include <assert.h>
#include <stddef.h>

#include "core/base/base.h"
#include "core/wire/device-wire.h"
#include "core/wire/wire-envelope.h"
#include "core/wire/wire-rule.h"
#include "proto/journal.pb-c.h"

/* The rules of stored_rank and stored_head use the offsets of fields in rank_kept and job_kept. */
static_assert(offsetof(struct stored_rank, kept) == 0 && offsetof(struct stored_head, kept) == 0, "kept comes first");

static_assert((int)TURN_WINDOW == (int)ZEROD__V1__TURN__TURN_WINDOW &&
                  (int)STORED_WAIT_OTHER == (int)ZEROD__V1__STORED_WAIT__STORED_WAIT_OTHER,
              "turns and waits are numbered as in the proto");

/* A string that its struct owns. */
#define OWN_STRING(M, S, field, ...) WIRE_SCALAR(WIRE_STRING, char *, char *, M, S, field, __VA_ARGS__)

static const struct wire_rule slot_rules[] = {
    U32(StoredSlot, stored_slot, ticket),       U32(StoredSlot, stored_slot, use),
    U32(StoredSlot, stored_slot, parcel),       U32(StoredSlot, stored_slot, micro_batch),
    U32(StoredSlot, stored_slot, pass),         U32(StoredSlot, stored_slot, attempt),
    BOOL(StoredSlot, stored_slot, overflow),    U64(StoredSlot, stored_slot, point),
    U64(StoredSlot, stored_slot, offset_bytes), U64(StoredSlot, stored_slot, n_bytes),
};
static const struct wire_table slot_table = WIRE_TABLE(stored_slot, stored_slot, slot_rules);

static const struct wire_rule rank_rules[] = {
    U32(StoredRank, stored_rank, rank),
    U64(StoredRank, rank_kept, incarnation),
    U64(StoredRank, rank_kept, secret),
    BOOL(StoredRank, stored_rank, is_here),
    U32(StoredRank, rank_kept, owner),
    I64(StoredRank, rank_kept, pid),
    U32(StoredRank, rank_kept, uid),
    U32(StoredRank, rank_kept, gid),
    OWN_STRING(StoredRank, rank_kept, client, .max = WIRE_MAX_RUN_ID_BYTES),
    BOOL(StoredRank, rank_kept, formed),
    BOOL(StoredRank, rank_kept, ready),
    BOOL(StoredRank, rank_kept, left),
    BOOL(StoredRank, rank_kept, resumes),
    U64(StoredRank, rank_kept, lost_ns),
    ENUM(StoredRank, rank_kept, on_duplicate, .max = WIRE_ON_DUPLICATE_ABORT_STEP),
    U64(StoredRank, rank_kept, n_received),
    U64(StoredRank, stored_rank, last_sequence),
    BOOL(StoredRank, stored_rank, has_ended),
    U64(StoredRank, stored_rank, ended_step),
    U32(StoredRank, stored_rank, ended_micro_batch),
    BOOL(StoredRank, stored_rank, has_blob),
    {.name = "blob",
     .kind = WIRE_BYTES,
     .proto_offset = offsetof(Zerod__V1__StoredRank, blob),
     .offset = offsetof(struct rank_kept, blob.data),
     .count_offset = offsetof(struct rank_kept, blob.n_bytes),
     .n_count_bytes = sizeof(size_t),
     .max = WIRE_MAX_BLOB_BYTES},
    U64(StoredRank, rank_kept, n_forwards),
    U64(StoredRank, rank_kept, n_backwards),
    U64(StoredRank, rank_kept, n_pushes),
    BOOL(StoredRank, stored_rank, has_notice),
    BOOL(StoredRank, rank_kept, again_reported),
    ENUM(StoredRank, stored_rank, wait, .max = STORED_WAIT_OTHER),
    MESSAGES(StoredRank, stored_rank, slots, n_slots, .table = &slot_table),
    BOOL(StoredRank, stored_rank, has_ring),
};
static const struct wire_table rank_table = WIRE_TABLE(stored_rank, stored_rank, rank_rules);

static const struct wire_rule head_rules[] = {
    ENUM(StoredHead, stored_head, turn, .max = TURN_WINDOW),
    U32(StoredHead, job_kept, n_daemons),
    OWN_STRING(StoredHead, job_kept, run_id, .max = WIRE_MAX_RUN_ID_BYTES),
    U64(StoredHead, job_kept, digest),
    U64(StoredHead, job_kept, n_incarnations),
    BOOL(StoredHead, job_kept, given_weights),
    BOOL(StoredHead, job_kept, has_weights),
    BOOL(StoredHead, job_kept, draining),
    U64(StoredHead, stored_head, step),
    U32(StoredHead, stored_head, attempt),
    U64(StoredHead, stored_head, n_applied),
    U64(StoredHead, stored_head, n_windows),
    U32(StoredHead, stored_head, counts_copy, .max = 1),
    U32(StoredHead, stored_head, squares_copy, .max = 1),
    DOUBLE(StoredHead, stored_head, norm_scale),
    U64(StoredHead, stored_head, n_ops),
    DOUBLE(StoredHead, stored_head, loss_scale),
    U32(StoredHead, stored_head, hysteresis_left),
    U64(StoredHead, stored_head, n_scaled_steps),
    U64(StoredHead, stored_head, window_start),
    BOOL(StoredHead, job_kept, applied),
    BOOL(StoredHead, job_kept, has_norm),
    DOUBLE(StoredHead, job_kept, norm),
    DOUBLE(StoredHead, job_kept, lr),
    U32(StoredHead, job_kept, n_missing),
    BOOL(StoredHead, stored_head, has_learnt),
    BYTES(StoredHead, stored_head, learnt, n_learnt_bytes),
    MESSAGE(StoredHead, stored_head, notice, .table = &wire_diagnostic_table,
            .has_offset = offsetof(struct stored_head, has_notice)),
    MESSAGES(StoredHead, stored_head, ranks, n_ranks, .table = &rank_table),
    U64(StoredHead, job_kept, n_steps_applied),
    U64(StoredHead, job_kept, n_steps_skipped),
    U64(StoredHead, job_kept, n_aborts),
    U64(StoredHead, job_kept, n_admitted),
    U64(StoredHead, job_kept, n_reattaches),
    U64(StoredHead, job_kept, saved_step),
    U32(StoredHead, job_kept, n_all_backs),
    BOOL(StoredHead, job_kept, asks_all_back),
};
static const struct wire_table head_table = WIRE_TABLE(stored_head, stored_head, head_rules);

int head_pack(struct wire_arena *arena, const struct stored_head *head, void *buffer, size_t size)
{
    return wire_message_pack(&head_table, arena, head, buffer, size);
}

int head_unpack(struct wire_arena *arena, const void *data, size_t n_bytes, struct stored_head *out, char *why,
                size_t why_size)
{
    struct wire_problem problem = {.why = why, .size = why_size};

    return wire_message_unpack(&head_table, "StoredHead", arena, data, n_bytes, out, &problem);
}
