/* SPDX-License-Identifier: Apache-2.0 */

/* Tables of the engine protocol: the allowed contents of each field of a command or report. */

#include "core/wire/engine-wire.h"

#include <inttypes.h>

#include "core/base/base.h"
#include "core/wire/frame.h"
#include "core/wire/wire-envelope.h"
#include "core/wire/wire-rule.h"
#include "core/wire/wire.h"
#include "proto/engine.pb-c.h"

/* ---- the allowed values of each field, in the order of the proto ---------------------------------------- */

static const struct wire_rule segment_rules[] = {
    U32(EngineSegment, engine_segment, number, .max = ENGINE_MAX_SEGMENTS - 1),
    U64(EngineSegment, engine_segment, n_bytes, .min = 1, .max = ENGINE_MAX_SEGMENT_BYTES),
};
static const struct wire_table segment_table = WIRE_TABLE(engine_segment, engine_segment, segment_rules);

_Static_assert((int)ENGINE_SETUP_SEGMENTS <= (int)FRAME_MAX_FDS, "the segments of a setup travel in one packet");

static const struct wire_rule setup_rules[] = {
    U32(EngineSetup, engine_setup, version, .min = ENGINE_WIRE_VERSION, .max = ENGINE_WIRE_VERSION),
    U32(EngineSetup, engine_setup, generation),
    U32(EngineSetup, engine_setup, node, .max = ENGINE_MAX_NODES - 1),
    U32(EngineSetup, engine_setup, n_nodes, .min = 1, .max = ENGINE_MAX_NODES),
    STRING(EngineSetup, engine_setup, address, .min = 1, .max = ENGINE_MAX_ADDRESS_BYTES),
    U32(EngineSetup, engine_setup, connect_timeout_ms, .min = 1),
    MESSAGES(EngineSetup, engine_setup, segments, n_segments, .table = &segment_table,
             .max_count = ENGINE_SETUP_SEGMENTS),
};

static bool setup_check(const void *ours, struct wire_problem *problem)
{
    const struct engine_setup *setup = ours;

    if (setup->node < setup->n_nodes)
        return true;
    wire_problem_set(problem, "node: %" PRIu32 ", expected less than n_nodes, %" PRIu32, setup->node, setup->n_nodes);
    return false;
}

static const struct wire_rule share_rules[] = {
    MESSAGE(EngineShare, engine_share, segment, .table = &segment_table, .flags = WIRE_REQUIRED),
};

static const struct wire_rule move_rules[] = {
    U32(EngineMove, engine_move, node, .max = ENGINE_MAX_NODES - 1),
    BOOL(EngineMove, engine_move, send),
    U32(EngineMove, engine_move, segment, .max = ENGINE_MAX_SEGMENTS - 1),
    U64(EngineMove, engine_move, offset_bytes, .max = ENGINE_MAX_SEGMENT_BYTES),
    U64(EngineMove, engine_move, n_bytes, .min = 1, .max = ENGINE_MAX_SEGMENT_BYTES),
};
static const struct wire_table move_table = WIRE_TABLE(engine_move, engine_move, move_rules);

/* A key needs one byte, and so does the length of a move. node < 2^14 needs two, a number up to 2^48 seven. */
enum { MOVE_BYTES = 2 + 3 + 2 + 2 + 8 + 8, ORDER_BYTES = 32 };
_Static_assert(ENGINE_MAX_MOVES *MOVE_BYTES + ORDER_BYTES <= FRAME_MAX_BYTES, "the largest order fits into a frame");
_Static_assert(ENGINE_MAX_VALUE_BYTES + ENGINE_MAX_KEY_BYTES + ORDER_BYTES <= FRAME_MAX_BYTES, "so does a value");

static const struct wire_rule order_rules[] = {
    U64(EngineOrder, engine_order, tag, .max = ENGINE_MAX_TAG),
    U32(EngineOrder, engine_order, timeout_ms),
    MESSAGES(EngineOrder, engine_order, moves, n_moves, .table = &move_table, .max_count = ENGINE_MAX_MOVES),
    BOOL(EngineOrder, engine_order, lasting),
};

static bool order_check(const void *ours, struct wire_problem *problem)
{
    const struct engine_order *order = ours;

    if (order->n_moves > 0)
        return true;
    wire_problem_set(problem, "moves: none, expected at least one");
    return false;
}

static const struct wire_rule value_rules[] = {
    STRING(EngineValue, engine_pair, key, .min = 1, .max = ENGINE_MAX_KEY_BYTES),
    BYTES(EngineValue, engine_pair, value, n_value_bytes, .max = ENGINE_MAX_VALUE_BYTES),
};

static const struct wire_rule done_rules[] = {
    U64(EngineDone, engine_done, tag, .max = ENGINE_MAX_TAG),
    U64(EngineDone, engine_done, n_bytes_sent),
    U64(EngineDone, engine_done, n_bytes_received),
};

static const struct wire_rule failed_rules[] = {
    STRING(EngineFailed, engine_failed, what, .min = 1, .max = ENGINE_MAX_WHAT_BYTES, .flags = WIRE_CUT),
    BOOL(EngineFailed, engine_failed, has_tag),
    U64(EngineFailed, engine_failed, tag, HAS(EngineFailed, engine_failed, has_tag)),
};

static const struct wire_table command_tables[N_ENGINE_COMMAND_TYPES] = {
    [ENGINE_COMMAND_SETUP] = WIRE_TABLE(engine_setup, engine_setup, setup_rules, .check = setup_check),
    [ENGINE_COMMAND_SHARE] = WIRE_TABLE(engine_share, engine_share, share_rules),
    [ENGINE_COMMAND_ORDER] = WIRE_TABLE(engine_order, engine_order, order_rules, .check = order_check),
    [ENGINE_COMMAND_VALUE] = WIRE_TABLE(engine_value, engine_pair, value_rules),
};

static const struct wire_table report_tables[N_ENGINE_REPORT_TYPES] = {
    [ENGINE_REPORT_VALUE] = WIRE_TABLE(engine_value, engine_pair, value_rules),
    [ENGINE_REPORT_READY] = {.descriptor = &zerod__v1__engine_ready__descriptor},
    [ENGINE_REPORT_DONE] = WIRE_TABLE(engine_done, engine_done, done_rules),
    [ENGINE_REPORT_FAILED] = WIRE_TABLE(engine_failed, engine_failed, failed_rules),
};

/* ---- functions ------------------------------------------------------------------------------------------ */

static const struct wire_envelope command_envelope = {
    .descriptor = &zerod__v1__engine_command__descriptor,
    .case_offset = offsetof(Zerod__V1__EngineCommand, kind_case),
    .member_offset = offsetof(Zerod__V1__EngineCommand, setup),
    .tables = command_tables,
    .n_types = N_ENGINE_COMMAND_TYPES,
};

static const struct wire_envelope report_envelope = {
    .descriptor = &zerod__v1__engine_report__descriptor,
    .case_offset = offsetof(Zerod__V1__EngineReport, kind_case),
    .member_offset = offsetof(Zerod__V1__EngineReport, value),
    .tables = report_tables,
    .n_types = N_ENGINE_REPORT_TYPES,
};

_Static_assert((int)ENGINE_COMMAND_VALUE == (int)ZEROD__V1__ENGINE_COMMAND__KIND_VALUE &&
                   (int)ENGINE_REPORT_FAILED == (int)ZEROD__V1__ENGINE_REPORT__KIND_FAILED,
               "types are numbered like the kinds of the proto");

int engine_unpack_command(struct wire_arena *arena, const void *data, size_t n_bytes, struct engine_command *out,
                          char *why, size_t why_size)
{
    struct wire_problem problem = {.why = why, .size = why_size};
    unsigned type = 0;
    int r = wire_envelope_unpack(&command_envelope, arena, data, n_bytes, &type, &out->setup, &problem);

    out->type = type;
    return r;
}

int engine_unpack_report(struct wire_arena *arena, const void *data, size_t n_bytes, struct engine_report *out,
                         char *why, size_t why_size)
{
    struct wire_problem problem = {.why = why, .size = why_size};
    unsigned type = 0;
    int r = wire_envelope_unpack(&report_envelope, arena, data, n_bytes, &type, &out->value, &problem);

    out->type = type;
    return r;
}

int engine_pack_command(struct wire_arena *arena, const struct engine_command *command, void *buffer, size_t size)
{
    return wire_envelope_pack(&command_envelope, arena, command->type, &command->setup, buffer, size);
}

int engine_pack_report(struct wire_arena *arena, const struct engine_report *report, void *buffer, size_t size)
{
    return wire_envelope_pack(&report_envelope, arena, report->type, &report->value, buffer, size);
}
