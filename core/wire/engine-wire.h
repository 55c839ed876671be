/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The commands and reports of proto/engine.proto as plain structs. The proto is the specification: it defines names and
 * meanings of fields. wire.h describes texts, arrays and memory.
 *
 * Unpacking validates every field by the tables of engine-wire.c. The caller checks facts that depend on state (that a
 * node exists, that an order was sent). The engine is a child process that may fail at any time and in any way, so its
 * reports are checked like those of a stranger.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/traffic.h"

struct wire_arena;

enum {
    ENGINE_WIRE_VERSION = 1,
    ENGINE_MAX_SEGMENTS = 10,  /* at one time; the caller assigns the numbers */
    ENGINE_SETUP_SEGMENTS = 8, /* the first ones are sent with the setup: as many as a packet has descriptors */
    ENGINE_MAX_MOVES = 4096,   /* in one order, so that the order fits into one frame */
    ENGINE_MAX_NODES = 512,
    ENGINE_MAX_ADDRESS_BYTES = 255,
    ENGINE_MAX_KEY_BYTES = 64,
    ENGINE_MAX_VALUE_BYTES = 96 * 1024, /* for gloo: an address of at most 192 bytes for each other node */
    ENGINE_MAX_WHAT_BYTES = 512,
};

#define ENGINE_MAX_SEGMENT_BYTES (UINT64_C(1) << 48) /* more than a process can map */
#define ENGINE_MAX_TAG (UINT64_MAX - 1)

struct engine_segment {
    uint32_t number;
    uint64_t n_bytes;
};

struct engine_setup {
    uint32_t version;
    uint32_t generation;
    uint32_t node, n_nodes;
    const char *address;
    uint32_t connect_timeout_ms;
    const struct engine_segment *segments;
    size_t n_segments;
};

struct engine_share {
    struct engine_segment segment;
};

struct engine_move {
    uint32_t node;
    bool send; /* false: receive */
    uint32_t segment;
    uint64_t offset_bytes, n_bytes; /* n_bytes > 0 */
};

struct engine_order {
    uint64_t tag; /* unique within a generation; equal on both ends of the order's moves; at most ENGINE_MAX_TAG */
    uint32_t timeout_ms;
    enum traffic_kind kind; /* for struct traffic; not sent */
    const struct engine_move *moves;
    size_t n_moves; /* 1 to ENGINE_MAX_MOVES */
    bool lasting;   /* sent data does not change until the receiving nodes have it */
};

struct engine_pair {
    const char *key;
    const uint8_t *value;
    size_t n_value_bytes;
};

struct engine_done {
    uint64_t tag;
    uint64_t n_bytes_sent, n_bytes_received;
};

struct engine_failed {
    const char *what;
    bool has_tag;
    uint64_t tag;
};

enum engine_command_type {
    ENGINE_COMMAND_SETUP = 1,
    ENGINE_COMMAND_SHARE,
    ENGINE_COMMAND_ORDER,
    ENGINE_COMMAND_VALUE,
    N_ENGINE_COMMAND_TYPES,
};

struct engine_command {
    enum engine_command_type type;
    union {
        struct engine_setup setup;
        struct engine_share share;
        struct engine_order order;
        struct engine_pair value;
    };
};

enum engine_report_type {
    ENGINE_REPORT_VALUE = 1,
    ENGINE_REPORT_READY,
    ENGINE_REPORT_DONE,
    ENGINE_REPORT_FAILED,
    N_ENGINE_REPORT_TYPES,
};

struct engine_report {
    enum engine_report_type type;
    union {
        struct engine_pair value;
        struct engine_done done;
        struct engine_failed failed;
    };
};

/*
 * Unpacks a packet into a struct that points into the arena. On WIRE_E_INVALID, why is a sentence: message, field,
 * actual value, expected value. Return: 0, WIRE_E_INVALID or -ENOMEM.
 */
int engine_unpack_command(struct wire_arena *arena, const void *data, size_t n_bytes, struct engine_command *out,
                          char *why, size_t why_size);
int engine_unpack_report(struct wire_arena *arena, const void *data, size_t n_bytes, struct engine_report *out,
                         char *why, size_t why_size);

/* Packs a struct. Keeps nothing in the arena. Return: the packet's size, -EMSGSIZE if size is too small, or -ENOMEM. */
int engine_pack_command(struct wire_arena *arena, const struct engine_command *command, void *buffer, size_t size);
int engine_pack_report(struct wire_arena *arena, const struct engine_report *report, void *buffer, size_t size);
