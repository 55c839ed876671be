/* SPDX-License-Identifier: Apache-2.0 */

/* Any bytes become text without control characters, and are never cut inside a character. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/run/plain.h"
#include "core/base/base.h"
#include "core/base/utf8.h"

static void test_cases(void **state)
{
    static const struct {
        const char *text, *plain;
        bool is_cut;
    } cases[] = {
        {"", "", false},
        {"1234567", "1234567", false},
        {"12345678", "1234567", true},
        {"123456\303\244", "123456", true},
        {"12345\303\244", "12345\303\244", false},
        {"a\tb\r\n", "a b", false},
        {"\033[1;31mred\033[0m", "red", false},
        {"\033[31", "", false},
        {"\033", "", false},
        {"\033Mup", "up", false},
        {"\302\200\377\303x", "x", false},
        {"   ", "", false},
    };
    char plain[8];

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        assert_int_equal(plain_text(plain, sizeof(plain), cases[i].text, strlen(cases[i].text)), cases[i].is_cut);
        assert_string_equal(plain, cases[i].plain);
    }
}

static void test_any_bytes(void **state)
{
    char text[64], plain[32];
    size_t n;

    srand(1);
    for (int round = 0; round < 20000; round++) {
        for (size_t i = 0; i < sizeof(text); i++)
            text[i] = (char)(rand() % 4 ? rand() : '\033');
        plain_text(plain, sizeof(plain), text, (size_t)rand() % sizeof(text));
        for (const char *s = plain; *s; s += n) {
            n = utf8_length(s, strlen(s));
            assert_true(n > 0 && !utf8_is_control(s));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_any_bytes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
