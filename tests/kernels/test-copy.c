/* SPDX-License-Identifier: Apache-2.0 */

/* A copy that bypasses the caches copies exactly the given bytes, for all sizes and alignments. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/copy.h"
#include "tests/group.h"

enum { MAX_BYTES = 4096, GUARD = 0x5a };

static void test_sizes(void **state)
{
    uint8_t *dst = aligned_alloc(64, 2 * MAX_BYTES), *src = aligned_alloc(64, 2 * MAX_BYTES);

    (void)state;
    for (size_t i = 0; i < 2 * MAX_BYTES; i++)
        src[i] = (uint8_t)(i * 2654435761u >> 13);
    for (size_t n = 0; n <= MAX_BYTES; n += n < 300 ? 1 : 61)
        for (size_t from = 0; from < 64; from += 13)
            for (size_t to = 0; to < 64; to += to < 16 ? 1 : 16) {
                memset(dst, GUARD, 2 * MAX_BYTES);
                copy_past_caches(dst + to, src + from, n);
                assert_memory_equal(dst + to, src + from, n);
                for (size_t i = 0; i < to; i++)
                    assert_int_equal(dst[i], GUARD);
                for (size_t i = to + n; i < to + n + 64; i++)
                    assert_int_equal(dst[i], GUARD);
            }
    free(dst);
    free(src);
}

TEST_GROUP(copy)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sizes)};

    return cmocka_run_group_tests_name("copy", tests, NULL, NULL);
}
