/* SPDX-License-Identifier: Apache-2.0 */

/* A file's hashes equal those of one call of xxHash over all its bytes, whatever the size of the pieces. */

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <xxhash.h>

#include "core/base/base.h"
#include "core/checkpoint/hash.h"
#include "tests/group.h"

enum { MIB = HASH_BLOCK_BYTES, MAX_BYTES = 3 * MIB + 1 };

static uint8_t *bytes;

static int setup(void **state)
{
    uint64_t x = 88172645463325252;

    (void)state;
    bytes = malloc(MAX_BYTES);
    for (size_t i = 0; bytes && i < MAX_BYTES; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes[i] = (uint8_t)x;
    }
    return bytes ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    free(bytes);
    return 0;
}

static void check(const struct file_hash *hash, size_t n_bytes)
{
    XXH128_hash_t whole = XXH3_128bits(bytes, n_bytes);
    char text[HASH_TEXT_BYTES], expected[64];

    snprintf(expected, sizeof(expected), "%016" PRIx64 "%016" PRIx64, (uint64_t)whole.high64, (uint64_t)whole.low64);
    assert_string_equal(hash->whole, expected);
    hash_text(text, bytes, n_bytes);
    assert_string_equal(text, expected);
    assert_int_equal(hash->n_blocks, div_round_up(n_bytes, MIB));
    for (size_t i = 0; i < hash->n_blocks; i++) {
        size_t n = MIN(n_bytes - i * MIB, (size_t)MIB);

        assert_true(hash->blocks[i] == XXH3_64bits(bytes + i * MIB, n));
        assert_true(hash->blocks[i] == hash_block(bytes + i * MIB, n));
    }
}

/* Hashes n_bytes in pieces of `piece` bytes. */
static void hash_in_pieces(size_t n_bytes, size_t piece)
{
    struct hash_state *state = hash_new(n_bytes);
    struct file_hash hash = {0};

    assert_non_null(state);
    for (size_t at = 0; at < n_bytes; at += piece)
        hash_add(state, bytes + at, MIN(n_bytes - at, piece));
    hash_end(state, &hash);
    check(&hash, n_bytes);
    file_hash_deinit(&hash);
    assert_null(hash.blocks);
}

static void test_one_call(void **state)
{
    static const size_t sizes[] = {0, 1, 17, 4095, MIB - 1, MIB, MIB + 1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 3 * MIB};
    static const size_t pieces[] = {1009, 4096, MIB - 1, MIB, MIB + 1, MAX_BYTES};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
        for (size_t k = 0; k < ARRAY_SIZE(pieces); k++)
            hash_in_pieces(sizes[i], pieces[k]);
}

static void test_single_bytes(void **state)
{
    (void)state;
    hash_in_pieces(5000, 1);
}

/* An empty piece changes nothing. */
static void test_empty_pieces(void **state)
{
    struct hash_state *s = hash_new(MIB);
    struct file_hash hash;

    (void)state;
    hash_add(s, bytes, 0);
    hash_add(s, bytes, MIB);
    hash_add(s, bytes, 0);
    hash_end(s, &hash);
    check(&hash, MIB);
    file_hash_deinit(&hash);
}

/* A writer that gives up can free the state at any time. */
static void test_gives_up(void **state)
{
    struct hash_state *s = hash_new(2 * MIB);

    (void)state;
    hash_add(s, bytes, MIB + 5);
    hash_free(s);
    hash_free(NULL);
}

TEST_GROUP(hash)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_call),
        cmocka_unit_test(test_single_bytes),
        cmocka_unit_test(test_empty_pieces),
        cmocka_unit_test(test_gives_up),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
