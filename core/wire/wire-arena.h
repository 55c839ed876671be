/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A bump allocator for one message at a time. Small messages fit into a block that is kept; a large
 * one adds chunks, up to a limit, which go with the next message. What protobuf-c
 * frees stays allocated until then.
 *
 * Each allocation knows its size: that is how a NUL inside an unpacked string is noticed,
 * whose length protobuf-c does not report.
 *
 * One thread at a time.
 */

#include <stddef.h>
#include <stdint.h>

enum {
    WIRE_ARENA_BLOCK_BYTES = 256 * 1024, /* pages come when they are used; a Push needs 300 to 1,500 bytes */
    /*
     * A packet is at most 128 KiB. It unpacks to 7 MiB when it is a Declare of 26,000 parameters with names
     * of one byte, and to 13 when it is made of 65,000 parameters of nothing, the worst found.
     */
    WIRE_ARENA_MAX_BYTES = 16 * 1024 * 1024,
};

struct wire_chunk;

struct wire_arena {
    uint8_t *block;
    size_t n_used;             /* of the block */
    struct wire_chunk *chunks; /* latest first */
    size_t n_chunk_bytes;      /* of all chunks */
    int failure;               /* since the last reset or rewind: -ENOMEM, -EMSGSIZE for the limit; or 0 */
};

/* A state of an arena to go back to. */
struct wire_mark {
    size_t n_used;
    struct wire_chunk *chunks;
    size_t n_chunk_used;
};

#define WIRE_ARENA_NULL ((struct wire_arena){.block = NULL})

/* Return: 0 or -ENOMEM. */
int wire_arena_init(struct wire_arena *arena);
void wire_arena_deinit(struct wire_arena *arena);

/* Everything that was allocated is gone. */
void wire_arena_reset(struct wire_arena *arena);

/* A rewind frees all allocations since the mark. Marks nest. */
struct wire_mark wire_arena_mark(const struct wire_arena *arena);
void wire_arena_rewind(struct wire_arena *arena, struct wire_mark mark);

/* Aligned to 8 bytes, not cleared. NULL: see failure. */
void *wire_arena_alloc(struct wire_arena *arena, size_t n_bytes);

/* Bytes asked for when p, which must come from wire_arena_alloc(), was allocated. */
size_t wire_arena_size(const void *p);
