/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A bump allocator for one message at a time. Small messages fit into a block that the arena keeps. A large message
 * adds chunks, up to a limit; the next message frees them. Memory that protobuf-c frees stays allocated until then.
 *
 * Each allocation records its size, because protobuf-c does not report the length of an unpacked string. So a NUL
 * inside the string is found.
 *
 * Only one thread uses an arena at a time.
 */

#include <stddef.h>
#include <stdint.h>

enum {
    WIRE_ARENA_BLOCK_BYTES = 256 * 1024, /* pages are allocated on first use; a Push needs 300 to 1,500 bytes */
    /*
     * A packet has at most 128 KiB. A Declare of 26,000 parameters with names of one byte unpacks to 7 MiB. The worst
     * known packet, with 65,000 empty parameters, unpacks to 13 MiB.
     */
    WIRE_ARENA_MAX_BYTES = 16 * 1024 * 1024,
};

struct wire_chunk;

struct wire_arena {
    uint8_t *block;
    size_t n_used;             /* bytes used in the block */
    struct wire_chunk *chunks; /* the latest first */
    size_t n_chunk_bytes;      /* size of all chunks */
    int failure;               /* first failure since the last reset or rewind: 0, -ENOMEM, -EMSGSIZE (limit) */
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

/* Frees all allocations of the arena. */
void wire_arena_reset(struct wire_arena *arena);

/* wire_arena_rewind() frees all allocations since the mark. Marks nest. */
struct wire_mark wire_arena_mark(const struct wire_arena *arena);
void wire_arena_rewind(struct wire_arena *arena, struct wire_mark mark);

/* Return: memory, aligned to 8 bytes and not cleared; NULL on failure, see arena->failure. */
void *wire_arena_alloc(struct wire_arena *arena, size_t n_bytes);

/* Return: the size with which p was allocated. p must come from wire_arena_alloc(). */
size_t wire_arena_size(const void *p);
