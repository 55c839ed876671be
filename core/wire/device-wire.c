/* SPDX-License-Identifier: Apache-2.0 */

/* Tables of the device protocol: the allowed contents of each field of a command or report. */

#include "core/wire/device-wire.h"

#include <inttypes.h>

#include "core/base/base.h"
#include "core/wire/frame.h"
#include "core/wire/wire-envelope.h"
#include "core/wire/wire-rule.h"
#include "core/wire/wire.h"
#include "proto/device.pb-c.h"

/* ---- the allowed values of each field, in the order of the proto ---------------------------------------- */

static const struct wire_rule piece_rules[] = {
    U32(DevicePiece, device_piece, kind, .max = DEVICE_N_PIECES - 1),
    U64(DevicePiece, device_piece, n_bytes, .max = DEVICE_MAX_BYTES),
    BOOL(DevicePiece, device_piece, has_fd),
};
static const struct wire_table piece_table = WIRE_TABLE(device_piece, device_piece, piece_rules);

_Static_assert((int)DEVICE_N_PIECES + 1 <= (int)FRAME_MAX_FDS,
               "the page and the pieces of a local rank travel in one packet");
_Static_assert((int)DEVICE_SETUP_FDS <= (int)FRAME_MAX_FDS, "the descriptors of a setup travel in one packet");
_Static_assert((int)DEVICE_N_PIECES <= 32 && (int)DEVICE_MAX_LOCAL <= 32, "bits of an unsigned");

static const struct wire_rule memory_rules[] = {
    U32(DeviceMemory, device_memory, local_rank, .max = DEVICE_MAX_LOCAL - 1),
    MESSAGES(DeviceMemory, device_memory, pieces, n_pieces, .table = &piece_table, .max_count = DEVICE_N_PIECES),
    BYTES(DeviceMemory, device_memory, gpu, n_gpu_bytes, .max = DEVICE_GPU_BYTES),
};

static bool memory_check(const void *ours, struct wire_problem *problem)
{
    const struct device_memory *memory = ours;
    unsigned seen = 0;

    for (size_t i = 0; i < memory->n_pieces; i++) {
        unsigned bit = 1u << memory->pieces[i].kind;

        if (seen & bit) {
            wire_problem_set(problem, "pieces[%zu].kind: %" PRIu32 " twice", i, memory->pieces[i].kind);
            return false;
        }
        seen |= bit;
    }
    return true;
}

static const struct wire_rule value_rules[] = {
    STRING(DeviceValue, device_pair, key, .min = 1, .max = DEVICE_MAX_KEY_BYTES),
    BYTES(DeviceValue, device_pair, value, n_value_bytes, .max = DEVICE_MAX_VALUE_BYTES),
};

static const struct wire_rule setup_rules[] = {
    U32(DeviceSetup, device_setup, version, .min = DEVICE_WIRE_VERSION, .max = DEVICE_WIRE_VERSION),
    U32(DeviceSetup, device_setup, generation),
    U32(DeviceSetup, device_setup, node, .max = DEVICE_MAX_NODES - 1),
    U32(DeviceSetup, device_setup, n_nodes, .min = 1, .max = DEVICE_MAX_NODES),
    U32(DeviceSetup, device_setup, connect_timeout_ms, .min = 1),
    U64(DeviceSetup, device_setup, plan_bytes, .min = 1, .max = DEVICE_MAX_BYTES),
    U64(DeviceSetup, device_setup, inputs_bytes, .min = 1, .max = DEVICE_MAX_BYTES),
    U64(DeviceSetup, device_setup, results_bytes, .min = 1, .max = DEVICE_MAX_BYTES),
};

static bool setup_check(const void *ours, struct wire_problem *problem)
{
    const struct device_setup *setup = ours;

    if (setup->node < setup->n_nodes)
        return true;
    wire_problem_set(problem, "node: %" PRIu32 ", expected less than n_nodes, %" PRIu32, setup->node, setup->n_nodes);
    return false;
}

static const struct wire_rule share_rules[] = {
    U32(DeviceShare, device_share, number, .max = DEVICE_MAX_SEGMENTS - 1),
    U64(DeviceShare, device_share, n_bytes, .min = 1, .max = DEVICE_MAX_BYTES),
};

static const struct wire_rule release_rules[] = {
    U32(DeviceRelease, device_release, local_rank, .max = DEVICE_MAX_LOCAL - 1),
    U64(DeviceRelease, device_release, point),
};

static const struct wire_rule slot_rules[] = {
    U32(DeviceSlot, device_slot, local_rank, .max = DEVICE_MAX_LOCAL - 1),
    U64(DeviceSlot, device_slot, offset_bytes, .max = DEVICE_MAX_BYTES, .multiple_of = 128),
    U64(DeviceSlot, device_slot, point),
};
static const struct wire_table slot_table = WIRE_TABLE(device_slot, device_slot, slot_rules);

static const struct wire_rule reduce_rules[] = {
    U64(DeviceReduce, device_order_reduce, tag, .max = DEVICE_MAX_TAG),
    U32(DeviceReduce, device_order_reduce, timeout_ms),
    U64(DeviceReduce, device_order_reduce, collective),
    U32(DeviceReduce, device_order_reduce, parcel),
    U32(DeviceReduce, device_order_reduce, micro_batch),
    U32(DeviceReduce, device_order_reduce, pass),
    MESSAGES(DeviceReduce, device_order_reduce, slots, n_slots, .table = &slot_table, .max_count = DEVICE_MAX_LOCAL),
    BOOL(DeviceReduce, device_order_reduce, give_only),
    U64(DeviceReduce, device_order_reduce, op),
};

static bool reduce_check(const void *ours, struct wire_problem *problem)
{
    const struct device_order_reduce *reduce = ours;
    unsigned seen = 0;

    for (size_t i = 0; i < reduce->n_slots; i++) {
        unsigned bit = 1u << reduce->slots[i].local_rank;

        if (seen & bit) {
            wire_problem_set(problem, "slots[%zu].local_rank: %" PRIu32 " twice", i, reduce->slots[i].local_rank);
            return false;
        }
        seen |= bit;
    }
    return true;
}

static const struct wire_rule update_rules[] = {
    U64(DeviceUpdate, device_order_update, tag, .max = DEVICE_MAX_TAG),
    U32(DeviceUpdate, device_order_update, timeout_ms),
    U64(DeviceUpdate, device_order_update, step, .min = 1),
};

static const struct wire_rule gather_rules[] = {
    U64(DeviceGather, device_order_gather, tag, .max = DEVICE_MAX_TAG),
    U32(DeviceGather, device_order_gather, timeout_ms),
    U64(DeviceGather, device_order_gather, collective),
    U32(DeviceGather, device_order_gather, first_bucket),
    U32(DeviceGather, device_order_gather, n_buckets, .min = 1),
};

static const struct wire_rule move_rules[] = {
    BOOL(DeviceMove, device_move, write),
    U32(DeviceMove, device_move, local_rank, .max = DEVICE_MAX_LOCAL - 1),
    U32(DeviceMove, device_move, kind, .max = DEVICE_N_PIECES - 1),
    U64(DeviceMove, device_move, offset_bytes, .max = DEVICE_MAX_BYTES),
    U32(DeviceMove, device_move, segment, .max = DEVICE_MAX_SEGMENTS - 1),
    U64(DeviceMove, device_move, segment_offset_bytes, .max = DEVICE_MAX_BYTES),
    U64(DeviceMove, device_move, n_bytes, .min = 1, .max = DEVICE_MAX_BYTES),
    U64(DeviceMove, device_move, point),
};
static const struct wire_table move_table = WIRE_TABLE(device_move, device_move, move_rules);

/* A key needs one byte, and so does the length of a move. Small numbers need at most two, numbers up to 2^48 seven. */
enum { MOVE_BYTES = 2 + 2 + 2 + 2 + 8 + 2 + 8 + 8 + 11, COPY_BYTES = 32 };
_Static_assert(DEVICE_MAX_MOVES *MOVE_BYTES + COPY_BYTES <= FRAME_MAX_BYTES, "the largest order fits into a frame");

static const struct wire_rule copy_rules[] = {
    U64(DeviceCopy, device_order_copy, tag, .max = DEVICE_MAX_TAG),
    U32(DeviceCopy, device_order_copy, timeout_ms),
    MESSAGES(DeviceCopy, device_order_copy, moves, n_moves, .table = &move_table, .max_count = DEVICE_MAX_MOVES),
    BOOL(DeviceCopy, device_order_copy, aside),
};

static bool copy_check(const void *ours, struct wire_problem *problem)
{
    const struct device_order_copy *copy = ours;

    if (copy->n_moves > 0)
        return true;
    wire_problem_set(problem, "moves: none, expected at least one");
    return false;
}

static const struct wire_rule fetched_rules[] = {
    U32(DeviceFetched, device_fetched, param),
    U64(DeviceFetched, device_fetched, offset_bytes, .max = DEVICE_MAX_BYTES, .multiple_of = DEVICE_POOL_ALIGN),
};
static const struct wire_table fetched_table = WIRE_TABLE(device_fetched, device_fetched, fetched_rules);

/* Sizes as for moves. A parameter's number needs at most five bytes. */
enum { FETCHED_BYTES = 2 + 6 + 8, FETCH_BYTES = 48 };
_Static_assert(DEVICE_MAX_FETCHES *FETCHED_BYTES + FETCH_BYTES <= FRAME_MAX_BYTES, "the largest fetch fits, too");

static const struct wire_rule fetch_rules[] = {
    U64(DeviceFetch, device_order_fetch, tag, .max = DEVICE_MAX_TAG),
    U32(DeviceFetch, device_order_fetch, timeout_ms),
    U64(DeviceFetch, device_order_fetch, collective),
    U32(DeviceFetch, device_order_fetch, rank, .max = DEVICE_MAX_WORLD - 1),
    MESSAGES(DeviceFetch, device_order_fetch, params, n_params, .table = &fetched_table,
             .max_count = DEVICE_MAX_FETCHES),
};

static bool fetch_check(const void *ours, struct wire_problem *problem)
{
    const struct device_order_fetch *fetch = ours;

    if (fetch->n_params > 0)
        return true;
    wire_problem_set(problem, "params: none, expected at least one");
    return false;
}

static const struct wire_rule ready_rules[] = {
    STRING(DeviceReady, device_ready, versions, .min = 1, .max = DEVICE_MAX_WHAT_BYTES, .flags = WIRE_CUT),
};

static const struct wire_rule done_rules[] = {
    U64(DeviceDone, device_done, tag, .max = DEVICE_MAX_TAG),
    U64(DeviceDone, device_done, n_bytes_sent),
    U64(DeviceDone, device_done, n_bytes_received),
};

static const struct wire_rule failed_rules[] = {
    STRING(DeviceFailed, device_failed, what, .min = 1, .max = DEVICE_MAX_WHAT_BYTES, .flags = WIRE_CUT),
    BOOL(DeviceFailed, device_failed, has_tag),
    U64(DeviceFailed, device_failed, tag, HAS(DeviceFailed, device_failed, has_tag)),
};

static const struct wire_table command_tables[N_DEVICE_COMMAND_TYPES] = {
    [DEVICE_COMMAND_SETUP] = WIRE_TABLE(device_setup, device_setup, setup_rules, .check = setup_check),
    [DEVICE_COMMAND_MEMORY] = WIRE_TABLE(device_memory, device_memory, memory_rules, .check = memory_check),
    [DEVICE_COMMAND_VALUE] = WIRE_TABLE(device_value, device_pair, value_rules),
    [DEVICE_COMMAND_SHARE] = WIRE_TABLE(device_share, device_share, share_rules),
    [DEVICE_COMMAND_REDUCE] = WIRE_TABLE(device_reduce, device_order_reduce, reduce_rules, .check = reduce_check),
    [DEVICE_COMMAND_UPDATE] = WIRE_TABLE(device_update, device_order_update, update_rules),
    [DEVICE_COMMAND_GATHER] = WIRE_TABLE(device_gather, device_order_gather, gather_rules),
    [DEVICE_COMMAND_COPY] = WIRE_TABLE(device_copy, device_order_copy, copy_rules, .check = copy_check),
    [DEVICE_COMMAND_FETCH] = WIRE_TABLE(device_fetch, device_order_fetch, fetch_rules, .check = fetch_check),
    [DEVICE_COMMAND_RELEASE] = WIRE_TABLE(device_release, device_release, release_rules),
};

static const struct wire_table report_tables[N_DEVICE_REPORT_TYPES] = {
    [DEVICE_REPORT_MEMORY] = WIRE_TABLE(device_memory, device_memory, memory_rules, .check = memory_check),
    [DEVICE_REPORT_VALUE] = WIRE_TABLE(device_value, device_pair, value_rules),
    [DEVICE_REPORT_READY] = WIRE_TABLE(device_ready, device_ready, ready_rules),
    [DEVICE_REPORT_DONE] = WIRE_TABLE(device_done, device_done, done_rules),
    [DEVICE_REPORT_FAILED] = WIRE_TABLE(device_failed, device_failed, failed_rules),
};

/* ---- functions ------------------------------------------------------------------------------------------ */

static const struct wire_envelope command_envelope = {
    .descriptor = &zerod__v1__device_command__descriptor,
    .case_offset = offsetof(Zerod__V1__DeviceCommand, kind_case),
    .member_offset = offsetof(Zerod__V1__DeviceCommand, setup),
    .tables = command_tables,
    .n_types = N_DEVICE_COMMAND_TYPES,
};

static const struct wire_envelope report_envelope = {
    .descriptor = &zerod__v1__device_report__descriptor,
    .case_offset = offsetof(Zerod__V1__DeviceReport, kind_case),
    .member_offset = offsetof(Zerod__V1__DeviceReport, memory),
    .tables = report_tables,
    .n_types = N_DEVICE_REPORT_TYPES,
};

_Static_assert((int)DEVICE_COMMAND_RELEASE == (int)ZEROD__V1__DEVICE_COMMAND__KIND_RELEASE &&
                   (int)DEVICE_REPORT_FAILED == (int)ZEROD__V1__DEVICE_REPORT__KIND_FAILED,
               "types are numbered like the kinds of the proto");

int device_unpack_command(struct wire_arena *arena, const void *data, size_t n_bytes, struct device_command *out,
                          char *why, size_t why_size)
{
    struct wire_problem problem = {.why = why, .size = why_size};
    unsigned type = 0;
    int r = wire_envelope_unpack(&command_envelope, arena, data, n_bytes, &type, &out->setup, &problem);

    out->type = type;
    return r;
}

int device_unpack_report(struct wire_arena *arena, const void *data, size_t n_bytes, struct device_report *out,
                         char *why, size_t why_size)
{
    struct wire_problem problem = {.why = why, .size = why_size};
    unsigned type = 0;
    int r = wire_envelope_unpack(&report_envelope, arena, data, n_bytes, &type, &out->memory, &problem);

    out->type = type;
    return r;
}

int device_pack_command(struct wire_arena *arena, const struct device_command *command, void *buffer, size_t size)
{
    return wire_envelope_pack(&command_envelope, arena, command->type, &command->setup, buffer, size);
}

int device_pack_report(struct wire_arena *arena, const struct device_report *report, void *buffer, size_t size)
{
    return wire_envelope_pack(&report_envelope, arena, report->type, &report->memory, buffer, size);
}

size_t device_memory_n_fds(const struct device_memory *memory)
{
    size_t n = 0;

    for (size_t i = 0; i < memory->n_pieces; i++)
        n += memory->pieces[i].has_fd;
    return n;
}

bool device_command_order(const struct device_command *command, uint64_t *tag, uint32_t *timeout_ms)
{
    switch (command->type) {
    case DEVICE_COMMAND_REDUCE:
        *tag = command->reduce.tag;
        *timeout_ms = command->reduce.timeout_ms;
        return true;
    case DEVICE_COMMAND_UPDATE:
        *tag = command->update.tag;
        *timeout_ms = command->update.timeout_ms;
        return true;
    case DEVICE_COMMAND_GATHER:
        *tag = command->gather.tag;
        *timeout_ms = command->gather.timeout_ms;
        return true;
    case DEVICE_COMMAND_COPY:
        *tag = command->copy.tag;
        *timeout_ms = command->copy.timeout_ms;
        return true;
    case DEVICE_COMMAND_FETCH:
        *tag = command->fetch.tag;
        *timeout_ms = command->fetch.timeout_ms;
        return true;
    default:
        return false;
    }
}
