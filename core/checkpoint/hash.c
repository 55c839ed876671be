/* SPDX-License-Identifier: Apache-2.0 */

/* Hashes a file, and each MiB of it. */

#include "core/checkpoint/hash.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

#include <xxhash.h>
#ifdef HAVE_XXHASH_DISPATCH /* libxxhash then uses this processor's widest vectors */
#include <xxh_x86dispatch.h>
#endif

#include "core/base/base.h"

struct hash_state {
    XXH3_state_t *whole, *block;
    uint64_t *blocks;
    size_t n_blocks, n_in_block;
};

void hash_free(struct hash_state *state)
{
    if (!state)
        return;
    XXH3_freeState(state->whole);
    XXH3_freeState(state->block);
    free(state->blocks);
    free(state);
}

struct hash_state *hash_new(uint64_t n_bytes)
{
    struct hash_state *state = calloc(1, sizeof(*state));

    if (!state)
        return NULL;
    state->whole = XXH3_createState();
    state->block = XXH3_createState();
    state->blocks = calloc(div_round_up(n_bytes, HASH_BLOCK_BYTES) + 1, sizeof(*state->blocks));
    if (!state->whole || !state->block || !state->blocks) {
        hash_free(state);
        return NULL;
    }
    XXH3_128bits_reset(state->whole);
    XXH3_64bits_reset(state->block);
    return state;
}

static void end_block(struct hash_state *state)
{
    state->blocks[state->n_blocks++] = XXH3_64bits_digest(state->block);
    state->n_in_block = 0;
    XXH3_64bits_reset(state->block);
}

void hash_add(struct hash_state *state, const void *bytes, size_t n_bytes)
{
    const uint8_t *at = bytes;

    XXH3_128bits_update(state->whole, bytes, n_bytes);
    while (n_bytes > 0) {
        size_t n = MIN(n_bytes, HASH_BLOCK_BYTES - state->n_in_block);

        assert(state->n_in_block < HASH_BLOCK_BYTES);
        XXH3_64bits_update(state->block, at, n);
        state->n_in_block += n;
        if (state->n_in_block == HASH_BLOCK_BYTES)
            end_block(state);
        at += n;
        n_bytes -= n;
    }
}

static void print_hash(char *dst, XXH128_hash_t hash)
{
    snprintf(dst, HASH_TEXT_BYTES, "%016" PRIx64 "%016" PRIx64, (uint64_t)hash.high64, (uint64_t)hash.low64);
}

void hash_end(struct hash_state *state, struct file_hash *out)
{
    if (state->n_in_block > 0)
        end_block(state);
    print_hash(out->whole, XXH3_128bits_digest(state->whole));
    out->blocks = steal_ptr(state->blocks);
    out->n_blocks = state->n_blocks;
    hash_free(state);
}

void file_hash_deinit(struct file_hash *hash)
{
    free(hash->blocks);
    *hash = (struct file_hash){0};
}

uint64_t hash_block(const void *bytes, size_t n_bytes)
{
    return XXH3_64bits(bytes, n_bytes);
}

void hash_text(char *dst, const void *bytes, size_t n_bytes)
{
    print_hash(dst, XXH3_128bits(bytes, n_bytes));
}
