/* SPDX-License-Identifier: Apache-2.0 */

/* JSON of strings with any bytes and of any numbers, and what a builder does when memory runs out. */

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <json-c/json.h>

#include "core/base/base.h"
#include "core/base/json.h"
#include "tests/group.h"

static void expect_text(struct json *j, struct json_object *root, const char *expected)
{
    _cleanup_free_ char *text = json_text(j, root);

    assert_non_null(text);
    assert_string_equal(text, expected);
}

static void test_values(void **userdata)
{
    struct json j = {0};
    struct json_object *root = json_new_object(&j), *array = json_new_array(&j);

    (void)userdata;
    json_put_null(&j, root, "null");
    json_put_bool(&j, root, "yes", true);
    json_put_bool(&j, root, "no", false);
    json_put_u64(&j, root, "most", UINT64_MAX);
    json_put_i64(&j, root, "least", INT64_MIN);
    json_put_string(&j, root, "none", NULL);
    json_put_string(&j, root, "text", "a \"b\" \\ / \n\t");
    json_push_u64(&j, array, 0);
    json_push_string(&j, array, "x");
    json_push(&j, array, json_new_object(&j));
    json_put(&j, root, "array", array);
    expect_text(&j, root,
                "{\"null\":null,\"yes\":true,\"no\":false,\"most\":18446744073709551615,\"least\":-9223372036854775808,"
                "\"none\":null,\"text\":\"a \\\"b\\\" \\\\ / \\n\\t\",\"array\":[0,\"x\",{}]}");
}

static char *print_double(double value)
{
    struct json j = {0};
    struct json_object *root = json_new_object(&j);

    json_put_double(&j, root, "x", value);
    return json_text(&j, root);
}

static void test_short_doubles(void **userdata)
{
    static const struct {
        double value;
        const char *text;
    } cases[] = {
        {0.0, "0"},       {0.1, "0.1"},  {-2.5, "-2.5"},     {1e-4, "0.0001"},
        {65536, "65536"}, {NAN, "null"}, {INFINITY, "null"}, {-INFINITY, "null"},
    };
    char expected[64];

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        _cleanup_free_ char *text = print_double(cases[i].value);

        snprintf(expected, sizeof(expected), "{\"x\":%s}", cases[i].text);
        assert_string_equal(text, expected);
    }
}

/* A number that is printed is read back exactly, and is a valid JSON number. */
static void test_doubles_read_back(void **userdata)
{
    static const double edges[] = {DBL_MIN, DBL_MAX, DBL_TRUE_MIN, -DBL_MAX,           1.0 / 3, 0.1 + 0.2,
                                   5e-324,  1e22,    1e23,         9007199254740993.0, -0.0};
    uint64_t state = 1;

    (void)userdata;
    for (size_t i = 0; i < 3000 + ARRAY_SIZE(edges); i++) {
        _cleanup_free_ char *text = NULL;
        double value, back;

        state = state * 6364136223846793005u + 1442695040888963407u;
        memcpy(&value, &state, sizeof(value));
        if (i < ARRAY_SIZE(edges))
            value = edges[i];
        if (!isfinite(value))
            continue;
        text = print_double(value);
        assert_memory_equal(text, "{\"x\":", 5);
        back = strtod(text + 5, NULL);
        assert_memory_equal(&back, &value, sizeof(value));
    }
}

static void test_clean(void **userdata)
{
    static const struct {
        const char *from, *to;
    } cases[] = {
        {"", ""},
        {"plain ~", "plain ~"},
        {"two\nlines\tand a tab", "two\nlines\tand a tab"},
        {"\r\x01\x1b[2J\x7f", "\\x0d\\x01\\x1b[2J\\x7f"},
        {"z\xc3\xa9ro \xe2\x82\xac \xf0\x9f\x98\x80", "z\xc3\xa9ro \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"\xff\xfe", "\\xff\\xfe"},
        {"\xc2\x9b", "\\xc2\\x9b"},                   /* CSI as one character */
        {"\xc0\x80", "\\xc0\\x80"},                   /* overlong NUL */
        {"\xe0\x9f\xbf", "\\xe0\\x9f\\xbf"},          /* overlong */
        {"\xed\xa0\x80", "\\xed\\xa0\\x80"},          /* half a surrogate pair */
        {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"}, /* beyond U+10FFFF */
        {"\xf0\x8f\xbf\xbf", "\\xf0\\x8f\\xbf\\xbf"},
        {"\xe2\x82", "\\xe2\\x82"}, /* cut off by the end */
        {"\xe2\x82x", "\\xe2\\x82x"},
        {"\xf0\x9f\x98", "\\xf0\\x9f\\x98"},
        {"\xc3", "\\xc3"},
        {"\xc2\xa0", "\xc2\xa0"},
        {"\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf"},
    };

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        /* Allocated in its exact size, so that a sanitizer finds reads beyond its end. */
        _cleanup_free_ char *from = strdup(cases[i].from), *to = json_clean(from);

        assert_string_equal(to, cases[i].to);
    }
}

/* Return: whether s is one valid character. Decodes it and checks its code point, instead of using the table. */
static bool is_one_good_character(const unsigned char *s, size_t n)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    uint32_t code = n == 1 ? s[0] : s[0] & (0xffu >> (n + 1));
    size_t expected = s[0] < 0x80                   ? 1
                      : s[0] >= 0xf0 && s[0] < 0xf8 ? 4
                      : s[0] >= 0xe0 && s[0] < 0xf0 ? 3
                      : s[0] >= 0xc0 && s[0] < 0xe0 ? 2
                                                    : 0;

    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return false;
        code = code << 6 | (s[i] & 0x3f);
    }
    return expected == n && code >= least[n] && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000) &&
           !(code < 0x20 && code != '\n' && code != '\t') && !(code >= 0x7f && code < 0xa0);
}

/* Sequences of two to four bytes whose bytes are near the limits. */
static void test_clean_by_another_way(void **userdata)
{
    static const unsigned char tails[] = {0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0};
    unsigned char s[5] = {0};

    (void)userdata;
    for (unsigned i = 0; i < 256 * 8 * 8 * 8; i++) {
        s[0] = (unsigned char)(i / 512);
        if (s[0] < 0xc0)
            continue;
        s[1] = tails[i / 64 % 8];
        s[2] = tails[i / 8 % 8];
        s[3] = tails[i % 8];
        for (size_t n = 2; n <= 4; n++) {
            unsigned char cut[5] = {0};
            _cleanup_free_ char *to = NULL;

            memcpy(cut, s, n);
            to = json_clean((const char *)cut);
            assert_int_equal(strcmp(to, (const char *)cut) == 0, is_one_good_character(cut, n));
        }
    }
}

/* After a failure no text is returned, nothing is freed twice, and nothing leaks. */
static void test_failure(void **userdata)
{
    struct json j = {0};
    struct json_object *root = json_new_object(&j);

    (void)userdata;
    json_put_u64(&j, root, "a", 1);
    json_put(&j, root, "b", NULL); /* as if this value could not be allocated */
    assert_true(j.failed);
    json_put_u64(&j, root, "c", 3);
    assert_null(json_text(&j, root));

    j = (struct json){0};
    json_put(&j, NULL, "a", json_object_new_int(1)); /* no object to put it into; the value is freed nevertheless */
    assert_true(j.failed);
    j = (struct json){0};
    json_push(&j, NULL, json_object_new_int(1));
    assert_true(j.failed);
    j = (struct json){0};
    json_put_null(&j, NULL, "a");
    assert_true(j.failed);
    j = (struct json){0};
    assert_null(json_text(&j, NULL));
}

TEST_GROUP(json)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_short_doubles),
        cmocka_unit_test(test_doubles_read_back),
        cmocka_unit_test(test_clean),
        cmocka_unit_test(test_clean_by_another_way),
        cmocka_unit_test(test_failure),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
