/* SPDX-License-Identifier: Apache-2.0 */

/* The largest data cache is found among the caches that a folder describes. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/caches.h"
#include "tests/group.h"

static void write_file(const char *folder, unsigned index, const char *name, const char *text)
{
    char path[256];
    FILE *file;

    snprintf(path, sizeof(path), "%s/index%u", folder, index);
    (void)mkdir(path, 0700);
    snprintf(path, sizeof(path), "%s/index%u/%s", folder, index, name);
    file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void test_found(void **state)
{
    char folder[] = "/tmp/zerod-caches-XXXXXX", command[64];

    (void)state;
    assert_non_null(mkdtemp(folder));
    assert_int_equal(caches_bytes_in(folder), 0);
    write_file(folder, 0, "type", "Data\n");
    write_file(folder, 0, "size", "48K\n");
    write_file(folder, 1, "type", "Instruction\n");
    write_file(folder, 1, "size", "64M\n");
    assert_int_equal(caches_bytes_in(folder), 48 << 10);
    write_file(folder, 3, "type", "Unified\n");
    write_file(folder, 3, "size", "32768K\n");
    assert_int_equal(caches_bytes_in(folder), 32 << 20);
    write_file(folder, 2, "type", "Unified\n");
    write_file(folder, 2, "size", "33M\n");
    assert_int_equal(caches_bytes_in(folder), 33 << 20);
    write_file(folder, 2, "size", "none\n");
    assert_int_equal(caches_bytes_in(folder), 32 << 20);
    snprintf(command, sizeof(command), "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

static void test_never_nothing(void **state)
{
    (void)state;
    assert_true(caches_last_level_bytes() > 0);
}

TEST_GROUP(caches)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_found), cmocka_unit_test(test_never_nothing)};

    return cmocka_run_group_tests_name("caches", tests, NULL, NULL);
}
