/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The hashes of a file of a checkpoint, computed while its bytes pass by: XXH3 of 128 bits of all of it, as
 * `xxhsum -H2` prints it, and XXH3 of 64 bits of each MiB, so that a wrong byte is found without the others, and
 * several threads can compare.
 */

#include <stddef.h>
#include <stdint.h>

enum {
    HASH_BLOCK_BYTES = 1 << 20,
    HASH_TEXT_BYTES = 33, /* of 128 bits in hexadecimal, with the NUL */
};

struct hash_state;

struct file_hash {
    char whole[HASH_TEXT_BYTES];
    uint64_t *blocks; /* owned; the last one may be of less than a MiB */
    size_t n_blocks;
};

/* n_bytes: of the whole file. Return: NULL without memory. */
struct hash_state *hash_new(uint64_t n_bytes);
void hash_add(struct hash_state *state, const void *bytes, size_t n_bytes);
/* After all n_bytes. Frees the state. */
void hash_end(struct hash_state *state, struct file_hash *out);
void hash_free(struct hash_state *state);
void file_hash_deinit(struct file_hash *hash);

uint64_t hash_block(const void *bytes, size_t n_bytes);
/* 128 bits, as file_hash.whole has them. dst: HASH_TEXT_BYTES. */
void hash_text(char *dst, const void *bytes, size_t n_bytes);
