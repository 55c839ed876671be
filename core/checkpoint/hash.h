/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The hashes of a checkpoint's file, computed while its bytes are written: a 128-bit XXH3 of the whole file, as `xxhsum
 * -H2` prints it, and a 64-bit XXH3 of each MiB, so that several threads can check MiBs separately.
 */

#include <stddef.h>
#include <stdint.h>

enum {
    HASH_BLOCK_BYTES = 1 << 20,
    HASH_TEXT_BYTES = 33, /* 128 bits in hexadecimal, with the NUL */
};

struct hash_state;

struct file_hash {
    char whole[HASH_TEXT_BYTES];
    uint64_t *blocks; /* owned; hashes of each MiB, the last of which may be shorter */
    size_t n_blocks;
};

/* n_bytes: size of the whole file. Return: NULL without memory. */
struct hash_state *hash_new(uint64_t n_bytes);
void hash_add(struct hash_state *state, const void *bytes, size_t n_bytes);
/* Ends the hash after n_bytes bytes were added, and frees the state. */
void hash_end(struct hash_state *state, struct file_hash *out);
void hash_free(struct hash_state *state);
void file_hash_deinit(struct file_hash *hash);

uint64_t hash_block(const void *bytes, size_t n_bytes);
/* Prints the 128-bit hash, in the form of file_hash.whole. dst: HASH_TEXT_BYTES. */
void hash_text(char *dst, const void *bytes, size_t n_bytes);
