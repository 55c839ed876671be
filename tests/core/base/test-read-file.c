/* SPDX-License-Identifier: Apache-2.0 */

/* Reading a file that a user names must end, whatever kind of file it is. */

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/read-file.h"
#include "tests/group.h"

enum { MAX_BYTES = 200 * 1000 };

static char path[64];

static void write_file(size_t n_bytes)
{
    FILE *file = fopen(path, "we");

    assert_non_null(file);
    for (size_t i = 0; i < n_bytes; i++)
        fputc('a' + (int)(i % 26), file);
    assert_int_equal(fclose(file), 0);
}

static int setup(void **state)
{
    (void)state;
    snprintf(path, sizeof(path), "/tmp/zerod-test-read-file-%d", (int)getpid());
    (void)unlink(path);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    (void)unlink(path);
    return 0;
}

static void test_files(void **state)
{
    static const size_t sizes[] = {0, 1, 65535, 65536, MAX_BYTES};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        _cleanup_free_ char *text = NULL;
        size_t n = 1;

        write_file(sizes[i]);
        assert_int_equal(read_file(path, MAX_BYTES, &text, &n), 0);
        assert_int_equal(n, sizes[i]);
        assert_int_equal(strlen(text), n);
        assert_true(n == 0 || text[n - 1] == 'a' + (int)((n - 1) % 26));
    }
}

static void check_refused(const char *name, int r)
{
    char *text = NULL;
    size_t n;

    assert_int_equal(read_file(name, MAX_BYTES, &text, &n), r);
    assert_null(text);
}

static void test_no_end(void **state)
{
    (void)state;
    write_file(MAX_BYTES + 1);
    check_refused(path, -EFBIG);
    check_refused("/dev/zero", -EFBIG);
    check_refused("/", -EISDIR);
    check_refused("/tmp/zerod/no/such/file", -ENOENT);
}

static void test_fifo_without_writer(void **state)
{
    _cleanup_free_ char *text = NULL;
    size_t n = 1;

    (void)state;
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(read_file(path, MAX_BYTES, &text, &n), 0);
    assert_int_equal(n, 0);
}

static void test_pipe(void **state)
{
    _cleanup_free_ char *text = NULL;
    char name[32];
    int fds[2];
    size_t n;

    (void)state;
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    assert_int_equal(write(fds[1], "text", 4), 4);
    close(fds[1]);
    snprintf(name, sizeof(name), "/dev/fd/%d", fds[0]);
    assert_int_equal(read_file(name, MAX_BYTES, &text, &n), 0);
    assert_string_equal(text, "text");
    close(fds[0]);
}

TEST_GROUP(read_file)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_files, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_end, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fifo_without_writer, setup, teardown),
        cmocka_unit_test(test_pipe),
    };

    return cmocka_run_group_tests_name("read-file", tests, NULL, NULL);
}
