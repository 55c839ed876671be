/* SPDX-License-Identifier: Apache-2.0 */

/* Text that two processes print alike is printed once, other text is printed for each. No text is delayed for long. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/run/repeats.h"
#include "core/base/base.h"

/* Three streams, whose output is collected in one text. */
struct house {
    struct repeats repeats;
    struct repeats_source sources[3];
    char text[256 * 1024];
    uint64_t now_ms;
};

static struct house house;
static unsigned numbers[ARRAY_SIZE(house.sources)];

static void emit(void *context, const char *text, size_t n_bytes, bool continued)
{
    size_t n = strlen(house.text);

    snprintf(house.text + n, sizeof(house.text) - n, "%s%.*s", continued ? "+" : (*(unsigned *)context ? "1 " : "0 "),
             (int)n_bytes, text);
}

static int set_up(void **state)
{
    (void)state;
    house = (struct house){};
    for (unsigned i = 0; i < ARRAY_SIZE(house.sources); i++) {
        numbers[i] = i % 2;
        repeats_source_init(&house.sources[i], &house.repeats, i % 2 ? "1" : "0", emit, &numbers[i]);
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(house.sources); i++) {
        repeats_release(&house.sources[i], house.now_ms);
        repeats_source_deinit(&house.sources[i]);
    }
    repeats_deinit(&house.repeats);
    assert_null(house.repeats.sources);
    return 0;
}

static void feed(unsigned source, const char *lines)
{
    for (const char *end; *lines; lines = end) {
        end = strchr(lines, '\n') + 1;
        repeats_feed(&house.sources[source], lines, (size_t)(end - lines), false, house.now_ms);
    }
}

#define BODY "  cause  two\n  fix    one\n  state  none\n"

static void test_repeated(void **state)
{
    (void)state;
    feed(0, "E1001 twice: rank 0\n" BODY "on\n");
    feed(1, "Error: E1001 twice: rank 1\n" BODY);
    assert_false(repeats_holds(&house.sources[1]));
    feed(1, "  more\nend\n");
    assert_string_equal(house.text,
                        "0 E1001 twice: rank 0\n0   cause  two\n0   fix    one\n0   state  none\n0 on\n"
                        "1 Error: E1001 twice: rank 1\n1   the same 3 lines as [0] above\n1   more\n1 end\n");
}

static void test_at_one_time(void **state)
{
    (void)state;
    feed(0, "Traceback (most recent call last):\n  a\n");
    feed(1, "Traceback (most recent call last):\n  a\n  b\n  c\n");
    feed(0, "  b\n");
    feed(1, "Error\n"); /* the other process is not done */
    feed(0, "Error\n");
    assert_string_equal(house.text,
                        "0 Traceback (most recent call last):\n0   a\n1 Traceback (most recent call last):\n"
                        "0   b\n1   a\n1   b\n1   c\n1 Error\n0 Error\n");
}

static void test_ahead_of_its_writer(void **state)
{
    (void)state;
    feed(0, "E1001 x\n  a\n");
    feed(1, "E1001 x\n  a\n  b\n");
    feed(0, "  b\n");
    assert_true(repeats_holds(&house.sources[1])); /* process 0 may print more of this text */
    feed(0, "end\n");
    assert_false(repeats_holds(&house.sources[1]));
    assert_string_equal(house.text, "0 E1001 x\n0   a\n1 E1001 x\n0   b\n1   the same 2 lines as [0] above\n0 end\n");
}

static void test_differs(void **state)
{
    (void)state;
    feed(0, "E1001 x\n  a\n  b\n  c\nend\n");
    feed(1, "E1001 x\n  a\n  b\n  d\nend\n");
    assert_non_null(strstr(house.text, "1   a\n1   b\n1   d\n1 end\n"));
    assert_null(strstr(house.text, "same"));
}

static void test_shorter_or_of_another_kind(void **state)
{
    (void)state;
    feed(0, "E1001 x\n  a\n  b\n  c\nend\n");
    feed(1, "E1001 x\n  a\n  b\nend\n");
    feed(1, "E1005 x\n  a\n  b\n  c\nend\n");
    feed(1, "no headline\n  a\n  b\n  c\n");
    assert_null(strstr(house.text, "same"));
    assert_non_null(strstr(house.text, "1 E1001 x\n1   a\n1   b\n1 end\n1 E1005 x\n1   a\n"));
}

static void test_released(void **state)
{
    (void)state;
    feed(0, "E1001 x\n  a\n  b\n  c\n");
    feed(1, "E1001 x\n  a\n  b\n");
    repeats_release(&house.sources[1], house.now_ms); /* the process pauses in the middle of the text */
    feed(1, "  c\n");
    assert_non_null(strstr(house.text, "1 E1001 x\n1   a\n1   b\n1   c\n"));
    feed(2, "E1001 x\n  a\n  b\n  c\n");
    repeats_release(&house.sources[2], house.now_ms); /* a second stream of process 0 */
    assert_non_null(strstr(house.text, "0 E1001 x\n0   the same 3 lines as above\n"));
}

static void test_own_tracebacks(void **state)
{
    (void)state;
    feed(0, "Traceback (most recent call last):\n  a\n  b\nError\n");
    feed(0, "Traceback (most recent call last):\n  a\n  b\nError\n");
    assert_null(strstr(house.text, "same"));
}

/* A traceback ends with the line that names the exception, and notes may follow it. */
static void test_notes(void **state)
{
    (void)state;
    for (unsigned source = 0; source < 2; source++)
        feed(source,
             "Traceback (most recent call last):\n  a\n  b\nTypeError: x\n  note\n  more\nend\n  note\n  more\n");
    assert_non_null(
        strstr(house.text, "1 TypeError: x\n1   the same 2 lines as [0] above\n1 end\n1   note\n1   more\n"));
}

/* Warnings of Python are compared as a whole, with their first line. */
static void test_warnings(void **state)
{
    (void)state;
    feed(0, "/a/b.py:7: UserWarning: x\n  f()\non\n");
    feed(1, "/a/b.py:7: UserWarning: x\n  f()\non\n");
    feed(1, "/a/b.py:7: UserWarning: y\n  f()\non\n");
    feed(0, "<string>:1: FutureWarning: x\non\n");
    feed(1, "<string>:1: FutureWarning: x\n");
    assert_false(repeats_holds(&house.sources[1]));
    feed(0, "<string>:1: FutureWarning: x\n"); /* process 0 printed it before, so its own is kept */
    feed(0, "Warning: x\nb.py: UserWarning: x\n");
    feed(1, "Warning: x\nb.py: UserWarning: x\n");
    assert_string_equal(house.text, "0 /a/b.py:7: UserWarning: x\n0   f()\n0 on\n"
                                    "1 /a/b.py:7: UserWarning, the same as [0] above\n1 on\n"
                                    "1 /a/b.py:7: UserWarning: y\n1   f()\n1 on\n"
                                    "0 <string>:1: FutureWarning: x\n0 on\n"
                                    "1 <string>:1: FutureWarning, the same as [0] above\n"
                                    "0 <string>:1: FutureWarning: x\n"
                                    "0 Warning: x\n0 b.py: UserWarning: x\n1 Warning: x\n1 b.py: UserWarning: x\n");
}

/* With a process group, torch puts the rank before each line of a traceback, except before empty lines. */
static void test_torchs_rank(void **state)
{
    (void)state;
    for (unsigned source = 0; source < 2; source++) {
        const char *text = source ? "[rank1]: Traceback (most recent call last):\n[rank1]:   a\n[rank1]:   b\n"
                                    "[rank1]: TypeError: x\n[rank1]:   note\n[rank1]:   more\n\n"
                                  : "[rank0]: Traceback (most recent call last):\n[rank0]:   a\n[rank0]:   b\n"
                                    "[rank0]: TypeError: x\n[rank0]:   note\n[rank0]:   more\n\n";
        feed(source, text);
    }
    assert_string_equal(house.text,
                        "0 Traceback (most recent call last):\n0   a\n0   b\n0 TypeError: x\n0   note\n0   more\n0 \n"
                        "1 Traceback (most recent call last):\n1   the same 2 lines as [0] above\n"
                        "1 TypeError: x\n1   the same 2 lines as [0] above\n1 \n");
}

/* The rank is removed only if zerodrun's label says the same, and the line has other text. */
static void test_rank_that_stays(void **state)
{
    (void)state;
    feed(0, "[rank10]: a\n[rank1]: b\n[rank0]:[W c\n [rank0]: d\n");
    repeats_feed(&house.sources[0], "[rank0]: ", 9, false, 0);
    repeats_feed(&house.sources[0], "[rank0]: e\n", 11, true, 0);
    assert_string_equal(house.text, "0 [rank10]: a\n0 [rank1]: b\n0 [W c\n0  [rank0]: d\n0  +[rank0]: e\n");
}

static void test_long_ago(void **state)
{
    (void)state;
    feed(0, "E1001 x\n" BODY "end\n");
    house.now_ms += REPEATS_KEEP_MS;
    feed(1, "E1001 x\n" BODY "end\n");
    assert_null(strstr(house.text, "same"));
}

/* More texts than are remembered, and a text that is too long. */
static void test_bounds(void **state)
{
    char *line = calloc(1, REPEATS_TEXT_BYTES), text[64];

    (void)state;
    for (unsigned i = 0; i < 2 * REPEATS_MAX_TEXTS; i++) {
        snprintf(text, sizeof(text), "E1001 x\n  %u\n  b\nend\n", i);
        feed(0, text);
    }
    feed(1, "E1001 x\n  0\n  b\nend\n"); /* the first text is forgotten */
    assert_null(strstr(house.text, "same"));
    snprintf(text, sizeof(text), "E1001 x\n  %u\n  b\nend\n", 2 * REPEATS_MAX_TEXTS - 1);
    feed(1, text);
    assert_non_null(strstr(house.text, "same 2 lines as [0]"));
    memset(line, ' ', REPEATS_TEXT_BYTES - 2);
    line[REPEATS_TEXT_BYTES - 2] = '\n';
    house.text[0] = '\0';
    for (unsigned source = 0; source < 2; source++) {
        feed(source, "E1002 x\n");
        feed(source, line);
        feed(source, line);
        feed(source, "end\n");
    }
    assert_null(strstr(house.text, "same"));
    assert_int_equal(strlen(house.text), 2 * (2 * (strlen(line) + 2) + strlen("0 E1002 x\n0 end\n")));
    free(line);
}

/* A line that arrives in pieces ends the text. */
static void test_pieces(void **state)
{
    (void)state;
    feed(0, "E1001 x\n" BODY "end\n");
    feed(1, "E1001 x\n  cause  two\n");
    repeats_feed(&house.sources[1], "  fi", 4, false, 0);
    repeats_feed(&house.sources[1], "x\n", 2, true, 0);
    assert_non_null(strstr(house.text, "1 E1001 x\n1   cause  two\n1   fi+x\n"));
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_repeated),
        TEST(test_at_one_time),
        TEST(test_ahead_of_its_writer),
        TEST(test_differs),
        TEST(test_shorter_or_of_another_kind),
        TEST(test_released),
        TEST(test_own_tracebacks),
        TEST(test_torchs_rank),
        TEST(test_rank_that_stays),
        TEST(test_long_ago),
        TEST(test_bounds),
        TEST(test_pieces),
        TEST(test_notes),
        TEST(test_warnings),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
