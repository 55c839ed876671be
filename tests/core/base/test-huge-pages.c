/* SPDX-License-Identifier: Apache-2.0 */

/* The description of huge pages must match the kernel's file. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/huge-pages.h"
#include "tests/group.h"

static void write_mode(const char *path, const char *line)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(line, file);
    fclose(file);
}

static void test_described(void **state)
{
    static const struct {
        const char *line, *before, *after; /* expected text before and after the file's name */
    } cases[] = {
        {"always within_size advise [never] deny force\n", "huge pages: none, ", " is never; with advise, "},
        {"always within_size advise never [deny] force\n", "huge pages: none, ", " is deny; with advise, "},
        {"always within_size [advise] never deny force\n", "huge pages: as many as are free, ", " is advise"},
        {"[always] within_size advise never deny force\n", "huge pages: as many as are free, ", " is always"},
    };
    static const char none[] = "huge pages: none, this kernel has none for shared memory";
    char path[] = "/tmp/zerod-huge-XXXXXX", expected[160], text[256];
    int fd = mkstemp(path);

    (void)state;
    assert_true(fd >= 0);
    close(fd);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        write_mode(path, cases[i].line);
        huge_pages_describe(path, text, sizeof(text));
        snprintf(expected, sizeof(expected), "%s%s%s", cases[i].before, path, cases[i].after);
        assert_int_equal(strncmp(text, expected, strlen(expected)), 0);
    }
    write_mode(path, "nonsense\n");
    huge_pages_describe(path, text, sizeof(text));
    assert_string_equal(text, none);
    unlink(path);
    huge_pages_describe(path, text, sizeof(text));
    assert_string_equal(text, none);
}

TEST_GROUP(huge_pages)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_described)};

    return cmocka_run_group_tests_name("huge-pages", tests, NULL, NULL);
}
