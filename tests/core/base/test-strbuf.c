/* SPDX-License-Identifier: Apache-2.0 */

/* A strbuf has all text that was added, escapes foreign bytes, and limits its size. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "tests/group.h"

static void test_empty(void **userdata)
{
    struct strbuf buf = {0};

    (void)userdata;
    assert_string_equal(strbuf_text(&buf), "");
    strbuf_add(&buf, "%s", "");
    strbuf_add_bytes(&buf, "x", 0);
    strbuf_add_foreign(&buf, NULL);
    assert_string_equal(strbuf_text(&buf), "");
    assert_int_equal(buf.n_bytes, 0);
    assert_false(buf.cut);
    strbuf_deinit(&buf);
    strbuf_deinit(&buf);
}

/* Adds text piece by piece and in one piece, across every size at which the memory grows. */
static void test_growth(void **userdata)
{
    enum { MAX = 5000 };
    static char expected[MAX + 1];

    (void)userdata;
    for (size_t piece = 1; piece < 400; piece = piece * 3 + 1) {
        struct strbuf buf = {0};

        for (size_t n = 0; n + piece <= MAX; n += piece) {
            for (size_t i = 0; i < piece; i++)
                expected[n + i] = (char)('a' + (n + i) % 26);
            expected[n + piece] = '\0';
            if (n / piece % 2)
                strbuf_add(&buf, "%s", expected + n);
            else
                strbuf_add_bytes(&buf, expected + n, piece);
            assert_int_equal(buf.n_bytes, n + piece);
            assert_true(buf.capacity > buf.n_bytes);
            assert_string_equal(strbuf_text(&buf), expected);
        }
        assert_false(buf.cut);
        strbuf_deinit(&buf);
        assert_string_equal(strbuf_text(&buf), "");
    }
}

/* strbuf_add() formats twice, for the length and for the text, and must read the same arguments both times. */
static void test_format(void **userdata)
{
    struct strbuf buf = {0};

    (void)userdata;
    strbuf_add(&buf, "%s %d %.3f %s", "parameter", -7, 0.125, "of rank");
    strbuf_add(&buf, " %u%%", 3u);
    assert_string_equal(strbuf_text(&buf), "parameter -7 0.125 of rank 3%");
    strbuf_deinit(&buf);
}

static void test_bytes_need_no_end(void **userdata)
{
    static const char bytes[] = {'a', 'b', 'c', 'd'};
    struct strbuf buf = {0};

    (void)userdata;
    strbuf_add_bytes(&buf, bytes, 3);
    assert_string_equal(strbuf_text(&buf), "abc");
    strbuf_deinit(&buf);
}

/* All bytes except 0. The escaped text is printable, and shows the byte's value. */
static void test_foreign(void **userdata)
{
    struct strbuf buf = {0};
    char text[256], expected[16];

    (void)userdata;
    strbuf_add_foreign(&buf, "a\nb\tc\r\x1b[31m\x7f\xff ~");
    assert_string_equal(strbuf_text(&buf), "a\nb\\x09c\\x0d\\x1b[31m\\x7f\\xff ~");
    strbuf_deinit(&buf);
    for (unsigned c = 1; c < 256; c++) {
        snprintf(text, sizeof(text), "%c", (char)c);
        if (c == '\n' || (c >= 32 && c < 127))
            snprintf(expected, sizeof(expected), "%c", (char)c);
        else
            snprintf(expected, sizeof(expected), "\\x%02x", c);
        strbuf_add_foreign(&buf, text);
        assert_string_equal(strbuf_text(&buf), expected);
        strbuf_deinit(&buf);
    }
}

/* Text added before the cut is kept. Text added later is left out, even if it would fit. */
static void test_cut(void **userdata)
{
    static char chunk[60000];
    struct strbuf buf = {0};
    size_t n = 0;

    (void)userdata;
    memset(chunk, 'x', sizeof(chunk));
    while (!buf.cut && n < 100) {
        strbuf_add_bytes(&buf, chunk, sizeof(chunk));
        n += !buf.cut;
    }
    assert_in_range(n, 2, 99);
    assert_int_equal(buf.n_bytes, n * sizeof(chunk));
    assert_int_equal(strlen(strbuf_text(&buf)), buf.n_bytes);
    strbuf_add(&buf, "%s", "y");
    strbuf_add_foreign(&buf, "z");
    assert_int_equal(buf.n_bytes, n * sizeof(chunk));
    assert_true(buf.cut);
    strbuf_deinit(&buf);
    assert_false(buf.cut);
    strbuf_add(&buf, "again");
    assert_string_equal(strbuf_text(&buf), "again");
    strbuf_deinit(&buf);
}

/* A length that does not fit into a size_t must not wrap around. */
static void test_impossible_length(void **userdata)
{
    struct strbuf buf = {0};

    (void)userdata;
    strbuf_add(&buf, "abc");
    strbuf_add_bytes(&buf, "x", SIZE_MAX - 1);
    assert_true(buf.cut);
    assert_string_equal(strbuf_text(&buf), "abc");
    strbuf_deinit(&buf);
}

TEST_GROUP(strbuf)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_growth),
        cmocka_unit_test(test_format),
        cmocka_unit_test(test_bytes_need_no_end),
        cmocka_unit_test(test_foreign),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_impossible_length),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
