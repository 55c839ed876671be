/* SPDX-License-Identifier: Apache-2.0 */

/* The position sum is compared with its definition. Other tests: which changes it must notice. */

#include "kernels/position_sum.h"

#include "kernels/kernels.h"
#include "tests/group.h"
#include "tests/kernels/kernels-reference.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>
#include <xxhash.h>

static void test_position_reference(void **state)
{
    static char bytes[4 * 100003 + 16];
    const struct kernels *k;
    uint64_t seed = 3;

    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (char)next(&seed);
    for (unsigned i = 0; (k = kernels_nth(i)); i++) {
        for (size_t s = 0; s < ARRAY_SIZE(sizes); s++) {
            for (enum dtype dtype = 0; dtype < N_DTYPES; dtype++) {
                const char *elems = bytes + (s % 3) * 5;
                struct position_sum sum = {0}, expected = position_reference(dtype, elems, sizes[s]);

                k->position_sum_update(&sum, dtype, elems, sizes[s], 0);
                assert_memory_equal(&sum, &expected, sizeof(sum));
                sum = (struct position_sum){0};
                position_sum_update(&sum, dtype, elems, sizes[s], 0);
                assert_memory_equal(&sum, &expected, sizeof(sum));
            }
        }
    }
}

/* The sum of all pieces is the whole's. Pieces begin at any run, and are added in any order. */
static void test_position_pieces(void **state)
{
    static uint16_t elems[10000];
    struct position_sum whole = {0};
    uint64_t seed = 4;

    for (size_t i = 0; i < ARRAY_SIZE(elems); i++)
        elems[i] = (uint16_t)next(&seed);
    position_sum_update(&whole, DTYPE_BF16, elems, ARRAY_SIZE(elems), 0);
    for (int round = 0; round < 100; round++) {
        struct position_sum sum = {0}, last = {0};
        size_t at = 0, n;

        for (; at < ARRAY_SIZE(elems); at += n) {
            struct position_sum *into = next(&seed) & 1 ? &sum : &last;

            n = MIN((next(&seed) % 40) * 64, ARRAY_SIZE(elems) - at);
            position_sum_update(into, DTYPE_BF16, elems + at, n, at);
        }
        position_sum_add(&last, &sum);
        assert_memory_equal(&last, &whole, sizeof(whole));
    }
}

static uint64_t position_of(enum dtype dtype, const void *elems, size_t n_elems)
{
    struct position_sum sum = {0};

    position_sum_update(&sum, dtype, elems, n_elems, 0);
    return position_sum_finish(&sum, n_elems * dtype_size(dtype));
}

static void test_position_notices(void **state)
{
    enum { N = 8192 };
    static float g[N], h[N];
    uint64_t seed = 5, sum;

    /* very coarse gradients: only signs */
    for (size_t i = 0; i < N; i++)
        g[i] = next(&seed) & 1 ? 1 : -1;
    sum = position_of(DTYPE_F32, g, N);
    assert_int_equal(sum, position_of(DTYPE_F32, g, N));
    for (int round = 0; round < 2000; round++) {
        size_t i = next(&seed) % N, j = next(&seed) % 4 ? (i + 16 * (next(&seed) % 600)) % N : next(&seed) % N;

        memcpy(h, g, sizeof(g));
        h[i] = g[j];
        h[j] = g[i];
        assert_int_equal(position_of(DTYPE_F32, h, N) == sum, g[i] == g[j]);
    }
    for (size_t i = 0; i < N; i += 7) {
        memcpy(h, g, sizeof(g));
        h[i] = f32_from_bits(f32_bits(g[i]) ^ 1u << i % 32);
        assert_true(position_of(DTYPE_F32, h, N) != sum);
    }
    for (size_t i = 0; i < N; i++)
        h[i] = 2 * g[i];
    assert_true(position_of(DTYPE_F32, h, N) != sum);
    for (size_t i = 0; i < N; i++)
        h[i] = -g[i];
    assert_true(position_of(DTYPE_F32, h, N) != sum);
}

static uint64_t position_finish_reference(const float *elems, size_t n_elems)
{
    struct position_sum sum = position_reference(DTYPE_F32, elems, n_elems);
    uint64_t message[17];

    memcpy(message, &sum, sizeof(sum));
    message[16] = n_elems * 4;
    return XXH3_64bits(message, sizeof(message));
}

/* Blocks of a constant among zeroes. Moving a block by any distance, in elements or in stripes, changes the sum. */
static void test_position_notices_moves(void **state)
{
    enum { N = 1024, BLOCK = 16 };
    static float g[N];
    static uint64_t seen[N];
    size_t n_seen = 0;

    for (size_t at = 0; at + BLOCK <= N; at++) {
        memset(g, 0, sizeof(g));
        for (size_t i = 0; i < BLOCK; i++)
            g[at + i] = 1;
        seen[n_seen++] = position_of(DTYPE_F32, g, N);
        for (size_t i = 0; i + 1 < n_seen; i++)
            assert_true(seen[i] != seen[n_seen - 1]);
    }
    assert_int_equal(position_finish_reference(g, N), seen[n_seen - 1]);
    /* zeroes at the end count */
    assert_true(position_of(DTYPE_F32, g, N - 1) != position_of(DTYPE_F32, g, N - 2));
}

TEST_GROUP(position_sum)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_position_reference),
        cmocka_unit_test(test_position_pieces),
        cmocka_unit_test(test_position_notices),
        cmocka_unit_test(test_position_notices_moves),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
