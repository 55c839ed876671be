/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The commands and reports of proto/device.proto as plain structs. The proto is the specification: it defines names and
 * meanings of fields. wire.h describes texts, arrays and memory.
 *
 * Unpacking validates every field by the tables of device-wire.c. The receiver checks facts that depend on state (that
 * a bucket exists, that a place is inside a piece).
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct wire_arena;

enum {
    DEVICE_WIRE_VERSION = 4,
    DEVICE_MAX_NODES = 512,
    DEVICE_MAX_LOCAL = 16,     /* GPUs of a node */
    DEVICE_MAX_SEGMENTS = 8,   /* segments of host memory at one time; the caller assigns the numbers */
    DEVICE_MAX_MOVES = 2048,   /* in one order, so that the order fits into one frame */
    DEVICE_MAX_FETCHES = 4096, /* in one order, so that the order fits into one frame */
    DEVICE_POOL_ALIGN = 256,   /* alignment of fetched parameters */
    DEVICE_MAX_WORLD = 1024,
    DEVICE_MAX_KEY_BYTES = 64,
    DEVICE_MAX_VALUE_BYTES = 4096,
    DEVICE_MAX_WHAT_BYTES = 512,
    DEVICE_GPU_BYTES = 16, /* size of a CUuuid */
    DEVICE_SETUP_FDS = 3,  /* descriptors of plan, inputs and results */
};

#define DEVICE_MAX_BYTES (UINT64_C(1) << 48)
#define DEVICE_MAX_TAG (UINT64_MAX - 1)

enum device_piece_kind {
    DEVICE_STATE,    /* moments, and masters that are not weights */
    DEVICE_GRADIENT, /* accumulators of the owned partitions */
    DEVICE_WEIGHTS,  /* stages 1 and 2: all buckets; fp32 weights are their own masters */
    DEVICE_RING,     /* slots, written by the trainer */
    DEVICE_UNDO,
    DEVICE_POOL, /* stage 3: fetched parameters */
    DEVICE_N_PIECES,
};

struct device_piece {
    uint32_t kind; /* enum device_piece_kind */
    uint64_t n_bytes;
    bool has_fd;
};

struct device_memory {
    uint32_t local_rank;
    const struct device_piece *pieces;
    size_t n_pieces;
    const uint8_t *gpu; /* DEVICE_GPU_BYTES bytes, or NULL */
    size_t n_gpu_bytes;
};

struct device_pair {
    const char *key;
    const uint8_t *value;
    size_t n_value_bytes;
};

struct device_setup {
    uint32_t version;
    uint32_t generation;
    uint32_t node, n_nodes;
    uint32_t connect_timeout_ms;
    uint64_t plan_bytes, inputs_bytes, results_bytes;
};

struct device_share {
    uint32_t number;
    uint64_t n_bytes;
};

struct device_release {
    uint32_t local_rank;
    uint64_t point;
};

struct device_slot {
    uint32_t local_rank;
    uint64_t offset_bytes;
    uint64_t point;
};

struct device_order_reduce {
    uint64_t tag;
    uint32_t timeout_ms;
    uint64_t collective;
    uint32_t parcel, micro_batch, pass;
    const struct device_slot *slots;
    size_t n_slots;
    bool give_only;
    uint64_t op;
};

struct device_order_update {
    uint64_t tag;
    uint32_t timeout_ms;
    uint64_t step;
};

struct device_order_gather {
    uint64_t tag;
    uint32_t timeout_ms;
    uint64_t collective;
    uint32_t first_bucket, n_buckets;
};

struct device_move {
    bool write; /* true: to the device; false: from it */
    uint32_t local_rank, kind;
    uint64_t offset_bytes;
    uint32_t segment;
    uint64_t segment_offset_bytes, n_bytes;
    uint64_t point;
};

struct device_order_copy {
    uint64_t tag;
    uint32_t timeout_ms;
    const struct device_move *moves;
    size_t n_moves;
    bool aside;
};

struct device_fetched {
    uint32_t param;
    uint64_t offset_bytes;
};

struct device_order_fetch {
    uint64_t tag;
    uint32_t timeout_ms;
    uint64_t collective;
    uint32_t rank; /* number in the world of the rank whose pool gets the parameters */
    const struct device_fetched *params;
    size_t n_params;
};

struct device_ready {
    const char *versions;
};

struct device_done {
    uint64_t tag;
    uint64_t n_bytes_sent, n_bytes_received;
};

struct device_failed {
    const char *what;
    bool has_tag;
    uint64_t tag;
};

enum device_command_type {
    DEVICE_COMMAND_SETUP = 1,
    DEVICE_COMMAND_MEMORY,
    DEVICE_COMMAND_VALUE,
    DEVICE_COMMAND_SHARE,
    DEVICE_COMMAND_REDUCE,
    DEVICE_COMMAND_UPDATE,
    DEVICE_COMMAND_GATHER,
    DEVICE_COMMAND_COPY,
    DEVICE_COMMAND_FETCH,
    DEVICE_COMMAND_RELEASE,
    N_DEVICE_COMMAND_TYPES,
};

struct device_command {
    enum device_command_type type;
    union {
        struct device_setup setup;
        struct device_memory memory;
        struct device_pair value;
        struct device_share share;
        struct device_order_reduce reduce;
        struct device_order_update update;
        struct device_order_gather gather;
        struct device_order_copy copy;
        struct device_order_fetch fetch;
        struct device_release release;
    };
};

enum device_report_type {
    DEVICE_REPORT_MEMORY = 1,
    DEVICE_REPORT_VALUE,
    DEVICE_REPORT_READY,
    DEVICE_REPORT_DONE,
    DEVICE_REPORT_FAILED,
    N_DEVICE_REPORT_TYPES,
};

struct device_report {
    enum device_report_type type;
    union {
        struct device_memory memory;
        struct device_pair value;
        struct device_ready ready;
        struct device_done done;
        struct device_failed failed;
    };
};

/*
 * Return: the number of the pieces' descriptors, one for each has_fd. In a command to the engine they follow the
 * descriptor of the progress page.
 */
size_t device_memory_n_fds(const struct device_memory *memory);

/* Reads tag and timeout of a command that is an order. Return: false if the command is no order. */
bool device_command_order(const struct device_command *command, uint64_t *tag, uint32_t *timeout_ms);

/*
 * Unpacks a packet into a struct that points into the arena. On WIRE_E_INVALID, why is a sentence: message, field,
 * actual value, expected value. Return: 0, WIRE_E_INVALID or -ENOMEM.
 */
int device_unpack_command(struct wire_arena *arena, const void *data, size_t n_bytes, struct device_command *out,
                          char *why, size_t why_size);
int device_unpack_report(struct wire_arena *arena, const void *data, size_t n_bytes, struct device_report *out,
                         char *why, size_t why_size);

/* Packs a struct. Keeps nothing in the arena. Return: the packet's size, -EMSGSIZE if size is too small, or -ENOMEM. */
int device_pack_command(struct wire_arena *arena, const struct device_command *command, void *buffer, size_t size);
int device_pack_report(struct wire_arena *arena, const struct device_report *report, void *buffer, size_t size);
