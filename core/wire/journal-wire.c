/* SPDX-License-Identifier: Apache-2.0 */

/* The tables of the journal's head say what each of its fields may hold. */

#include "core/wire/journal-wire.h"

#include "core/base/base.h"
#include "core/wire/device-wire.h"
#include "core/wire/wire-envelope.h"
#include "core/wire/wire-rule.h"
#include "proto/journal.pb-c.h"

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
    U64(StoredRank, stored_rank, incarnation),
    U64(StoredRank, stored_rank, secret),
    BOOL(StoredRank, stored_rank, is_here),
    U32(StoredRank, stored_rank, owner),
    I64(StoredRank, stored_rank, pid),
    U32(StoredRank, stored_rank, uid),
    U32(StoredRank, stored_rank, gid),
    STRING(StoredRank, stored_rank, client, .max = WIRE_MAX_RUN_ID_BYTES),
    BOOL(StoredRank, stored_rank, formed),
    BOOL(StoredRank, stored_rank, ready),
    BOOL(StoredRank, stored_rank, left),
    BOOL(StoredRank, stored_rank, resumes),
    U64(StoredRank, stored_rank, lost_ns),
    ENUM(StoredRank, stored_rank, on_duplicate, .max = WIRE_ON_DUPLICATE_ABORT_STEP),
    U64(StoredRank, stored_rank, n_received),
    U64(StoredRank, stored_rank, last_sequence),
    BOOL(StoredRank, stored_rank, has_ended),
    U64(StoredRank, stored_rank, ended_step),
    U32(StoredRank, stored_rank, ended_micro_batch),
    BOOL(StoredRank, stored_rank, has_blob),
    BYTES(StoredRank, stored_rank, blob, n_blob_bytes, .max = WIRE_MAX_BLOB_BYTES),
    U64(StoredRank, stored_rank, n_forwards),
    U64(StoredRank, stored_rank, n_backwards),
    U64(StoredRank, stored_rank, n_pushes),
    BOOL(StoredRank, stored_rank, has_notice),
    BOOL(StoredRank, stored_rank, again_reported),
    ENUM(StoredRank, stored_rank, wait, .max = STORED_WAIT_OTHER),
    MESSAGES(StoredRank, stored_rank, slots, n_slots, .table = &slot_table),
    BOOL(StoredRank, stored_rank, has_ring),
};
static const struct wire_table rank_table = WIRE_TABLE(stored_rank, stored_rank, rank_rules);

static const struct wire_rule head_rules[] = {
    ENUM(StoredHead, stored_head, turn, .max = TURN_WINDOW),
    U32(StoredHead, stored_head, n_daemons),
    STRING(StoredHead, stored_head, run_id, .max = WIRE_MAX_RUN_ID_BYTES),
    U64(StoredHead, stored_head, digest),
    U64(StoredHead, stored_head, n_incarnations),
    BOOL(StoredHead, stored_head, given_weights),
    BOOL(StoredHead, stored_head, has_weights),
    BOOL(StoredHead, stored_head, draining),
    U64(StoredHead, stored_head, step),
    U32(StoredHead, stored_head, attempt),
    U64(StoredHead, stored_head, n_applied),
    U64(StoredHead, stored_head, n_windows),
    U32(StoredHead, stored_head, counts_copy),
    U32(StoredHead, stored_head, squares_copy),
    DOUBLE(StoredHead, stored_head, norm_scale),
    U64(StoredHead, stored_head, n_ops),
    DOUBLE(StoredHead, stored_head, loss_scale),
    U32(StoredHead, stored_head, hysteresis_left),
    U64(StoredHead, stored_head, n_scaled_steps),
    U64(StoredHead, stored_head, window_start),
    BOOL(StoredHead, stored_head, applied),
    BOOL(StoredHead, stored_head, has_norm),
    DOUBLE(StoredHead, stored_head, norm),
    DOUBLE(StoredHead, stored_head, lr),
    U32(StoredHead, stored_head, n_missing),
    BOOL(StoredHead, stored_head, has_learnt),
    BYTES(StoredHead, stored_head, learnt, n_learnt_bytes),
    MESSAGE(StoredHead, stored_head, notice, .table = &wire_diagnostic_table,
            .has_offset = offsetof(struct stored_head, has_notice)),
    MESSAGES(StoredHead, stored_head, ranks, n_ranks, .table = &rank_table),
    U64(StoredHead, stored_head, n_steps_applied),
    U64(StoredHead, stored_head, n_steps_skipped),
    U64(StoredHead, stored_head, n_aborts),
    U64(StoredHead, stored_head, n_admitted),
    U64(StoredHead, stored_head, n_reattaches),
    U64(StoredHead, stored_head, saved_step),
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
