/* SPDX-License-Identifier: Apache-2.0 */

/* The UTF-8 check accepts each character of the Unicode standard's table 3-7, at its bounds, and nothing else. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/utf8.h"
#include "tests/group.h"

static void test_well_formed(void **userdata)
{
    static const char *const texts[] = {"a",
                                        "\x7f",
                                        "\xc2\x80",
                                        "\xdf\xbf",
                                        "\xe0\xa0\x80",
                                        "\xed\x9f\xbf",
                                        "\xee\x80\x80",
                                        "\xf0\x90\x80\x80",
                                        "\xf4\x8f\xbf\xbf"};

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
        size_t n = strlen(texts[i]);

        assert_int_equal(utf8_length(texts[i], n), n);
        assert_int_equal(utf8_length(texts[i], n + 1), n);
        if (n > 1)
            assert_int_equal(utf8_length(texts[i], n - 1), 0);
        assert_true(utf8_begins(texts[i][0]));
        for (size_t k = 1; k < n; k++)
            assert_false(utf8_begins(texts[i][k]));
    }
    assert_int_equal(utf8_length("", 1), 1); /* NUL is a character */
}

static void test_ill_formed(void **userdata)
{
    static const char *const texts[] = {"\x80\x80\x80\x80", "\xc0\x80\x80\x80", "\xc1\xbf\x80\x80", "\xc2\x41\x80\x80",
                                        "\xe0\x9f\xbf\x80", "\xe1\x80\x41\x80", "\xed\xa0\x80\x80", "\xf0\x8f\xbf\xbf",
                                        "\xf1\x80\x80\x41", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff\x80\x80\x80"};

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
        assert_int_equal(utf8_length(texts[i], 4), 0);
}

static void test_control(void **userdata)
{
    static const char *const controls[] = {"", "\n", "\x1f", "\x7f", "\xc2\x80", "\xc2\x9f"};
    static const char *const others[] = {" ", "~", "\xc2\xa0", "\xc3\x80", "\xe2\x80\x80"};

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(controls); i++)
        assert_true(utf8_is_control(controls[i]));
    for (size_t i = 0; i < ARRAY_SIZE(others); i++)
        assert_false(utf8_is_control(others[i]));
}

TEST_GROUP(utf8)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_well_formed),
        cmocka_unit_test(test_ill_formed),
        cmocka_unit_test(test_control),
    };

    return cmocka_run_group_tests_name("utf8", tests, NULL, NULL);
}
