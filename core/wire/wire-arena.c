/* SPDX-License-Identifier: Apache-2.0 */

/* Allocates for one message at a time, and keeps the first block. */

#include "core/wire/wire-arena.h"

#include <assert.h>

#include "core/base/base.h"

enum {
    ALIGN_BYTES = 8, /* enough for all parts of a message */
    MIN_CHUNK_BYTES = 64 * 1024,
};

struct wire_chunk {
    struct wire_chunk *next;
    size_t n_bytes, n_used; /* size of data, and used bytes of it */
    uint64_t data[];
};

int wire_arena_init(struct wire_arena *arena)
{
    *arena = WIRE_ARENA_NULL;
    arena->block = malloc(WIRE_ARENA_BLOCK_BYTES);
    return arena->block ? 0 : -ENOMEM;
}

void wire_arena_deinit(struct wire_arena *arena)
{
    wire_arena_reset(arena);
    free(arena->block);
    *arena = WIRE_ARENA_NULL;
}

void wire_arena_reset(struct wire_arena *arena)
{
    wire_arena_rewind(arena, (struct wire_mark){.n_used = 0});
}

struct wire_mark wire_arena_mark(const struct wire_arena *arena)
{
    return (struct wire_mark){
        .n_used = arena->n_used,
        .chunks = arena->chunks,
        .n_chunk_used = arena->chunks ? arena->chunks->n_used : 0,
    };
}

void wire_arena_rewind(struct wire_arena *arena, struct wire_mark mark)
{
    struct wire_chunk *chunk;

    assert(mark.n_used <= arena->n_used);
    while (arena->chunks != mark.chunks) {
        chunk = arena->chunks;
        assert(arena->n_chunk_bytes >= chunk->n_bytes);
        arena->chunks = chunk->next;
        arena->n_chunk_bytes -= chunk->n_bytes;
        free(chunk);
    }
    assert(arena->chunks || arena->n_chunk_bytes == 0);
    assert(!arena->chunks || mark.n_chunk_used <= arena->chunks->n_used);
    if (arena->chunks)
        arena->chunks->n_used = mark.n_chunk_used;
    arena->n_used = mark.n_used;
    arena->failure = 0;
}

static struct wire_chunk *chunk_new(struct wire_arena *arena, size_t n_bytes)
{
    struct wire_chunk *chunk;

    assert(arena->n_chunk_bytes <= WIRE_ARENA_MAX_BYTES);
    n_bytes = MAX(n_bytes, (size_t)MIN_CHUNK_BYTES);
    if (n_bytes > WIRE_ARENA_MAX_BYTES - arena->n_chunk_bytes) {
        arena->failure = -EMSGSIZE;
        return NULL;
    }
    chunk = malloc(sizeof(*chunk) + n_bytes);
    if (!chunk) {
        arena->failure = -ENOMEM;
        return NULL;
    }
    *chunk = (struct wire_chunk){.next = arena->chunks, .n_bytes = n_bytes};
    arena->chunks = chunk;
    arena->n_chunk_bytes += n_bytes;
    return chunk;
}

/* Return: room for n_bytes more, or NULL. n_bytes is a multiple of ALIGN_BYTES. */
static uint8_t *arena_take(struct wire_arena *arena, size_t n_bytes)
{
    struct wire_chunk *chunk = arena->chunks;

    assert(n_bytes % ALIGN_BYTES == 0);
    assert(arena->n_used <= WIRE_ARENA_BLOCK_BYTES);
    assert(!chunk || chunk->n_used <= chunk->n_bytes);
    if (!chunk && n_bytes <= WIRE_ARENA_BLOCK_BYTES - arena->n_used) {
        arena->n_used += n_bytes;
        return arena->block + arena->n_used - n_bytes;
    }
    if (!chunk || n_bytes > chunk->n_bytes - chunk->n_used)
        chunk = chunk_new(arena, n_bytes);
    if (!chunk)
        return NULL;
    chunk->n_used += n_bytes;
    return (uint8_t *)chunk->data + chunk->n_used - n_bytes;
}

void *wire_arena_alloc(struct wire_arena *arena, size_t n_bytes)
{
    uint64_t *p;

    if (n_bytes > WIRE_ARENA_MAX_BYTES) {
        arena->failure = -EMSGSIZE;
        return NULL;
    }
    p = (uint64_t *)arena_take(arena, round_up(n_bytes, ALIGN_BYTES) + sizeof(*p));
    if (!p)
        return NULL;
    *p = n_bytes;
    return p + 1;
}

size_t wire_arena_size(const void *p)
{
    assert((uintptr_t)p % ALIGN_BYTES == 0);
    return ((const uint64_t *)p)[-1];
}
