/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A bump allocator for one message at a time. Small messages fit into a block that is kept. A large message adds
 * chunks, up to a limit, which the next message frees. Memory that protobuf-c frees stays allocated until then.
 *
 * Each allocation records its size. This shows a NUL inside an unpacked string, because protobuf-c does not report the
 * string's length.
 *
 * One thread at a time.
 */

#include <stddef.h>
#include <stdint.h>

enum {
    WIRE_ARENA_BLOCK_BYTES = 256 * 1024, /* pages are allocated on first use; a Push needs 300 to 1,500 bytes */
    /*
     * A packet has at most 128 KiB. A Declare of 26,000 parameters with names of one byte unpacks to 7 MiB. The worst
     * packet found, with 65,000 empty parameters, unpacks to 13 MiB.
     */
    WIRE_ARENA_MAX_BYTES = 16 * 1024 * 1024,
};

struct wire_chunk;

struct wire_arena {
    uint8_t *block;
    size_t n_used;             /* of the block */
    struct wire_chunk *chunks; /* latest first */
    size_t n_chunk_bytes;      /* of all chunks */
    int failure;               /* since the last reset or rewind: 0, -ENOMEM, or -EMSGSIZE for the limit */
};

/* A state to which an arena can be rewound. */
struct wire_mark {
    size_t n_used;
    struct wire_chunk *chunks;
    size_t n_chunk_used;
};

#define WIRE_ARENA_NULL ((struct wire_arena){.block = NULL})

/* Return: 0 or -ENOMEM. */
int wire_arena_init(struct wire_arena *arena);
void wire_arena_deinit(struct wire_arena *arena);

/* Frees all allocations. */
void wire_arena_reset(struct wire_arena *arena);

/* A rewind frees all allocations since the mark. Marks nest. */
struct wire_mark wire_arena_mark(const struct wire_arena *arena);
void wire_arena_rewind(struct wire_arena *arena, struct wire_mark mark);

/* Return: memory, aligned to 8 bytes and not cleared; NULL on failure, see arena->failure. */
void *wire_arena_alloc(struct wire_arena *arena, size_t n_bytes);

/* Return: the size with which p was allocated. p must come from wire_arena_alloc(). */
size_t wire_arena_size(const void *p);
