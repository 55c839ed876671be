/* SPDX-License-Identifier: Apache-2.0 */

/* The log on stderr: which lines are printed, their prefixes, and that diagnostics are printed completely. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/base/notify.h"
#include "core/diagnosis/diagnosis-log.h"
#include "core/diagnosis/diagnosis.h"
#include "tests/group.h"

static int sink_fd, old_stderr;
static char text[16384];

static void begin(void)
{
    fflush(stderr);
    old_stderr = dup(STDERR_FILENO);
    sink_fd = memfd_create("stderr", MFD_CLOEXEC);
    assert_true(old_stderr >= 0 && sink_fd >= 0);
    assert_int_equal(dup2(sink_fd, STDERR_FILENO), STDERR_FILENO);
}

/* Return: what was written since begin(). */
static const char *end(void)
{
    ssize_t n;

    fflush(stderr);
    assert_int_equal(dup2(old_stderr, STDERR_FILENO), STDERR_FILENO);
    close(old_stderr);
    n = pread(sink_fd, text, sizeof(text) - 1, 0);
    assert_true(n >= 0);
    text[n] = '\0';
    close(sink_fd);
    return text;
}

static void test_lines(void **userdata)
{
    (void)userdata;
    begin();
    log_init("llama", LOG_NOTICE);
    log_error("no %s for rank %d", "memory", 3);
    log_notice("ready");
    assert_string_equal(end(), "zerod[llama]: no memory for rank 3\nzerod[llama]: ready\n");
}

static void test_levels(void **userdata)
{
    static const struct {
        int level;
        const char *text;
    } cases[] = {
        {LOG_EMERG, ""},
        {LOG_ERR, "zerod[j]: e\n"},
        {LOG_WARNING, "zerod[j]: e\nzerod[j]: w\n"},
        {LOG_NOTICE, "zerod[j]: e\nzerod[j]: w\nzerod[j]: n\n"},
        {LOG_INFO, "zerod[j]: e\nzerod[j]: w\nzerod[j]: n\nzerod[j]: i\n"},
        {LOG_DEBUG, "zerod[j]: e\nzerod[j]: w\nzerod[j]: n\nzerod[j]: i\nzerod[j]: d\n"},
    };

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        begin();
        log_init("j", cases[i].level);
        log_error("e");
        log_line(LOG_WARNING, "w");
        log_notice("n");
        log_info("i");
        log_line(LOG_DEBUG, "d");
        assert_string_equal(end(), cases[i].text);
    }
}

/* A line that is too long is cut, and still ends with a newline. */
static void test_long_line(void **userdata)
{
    static char line[10000];
    const char *got;

    (void)userdata;
    memset(line, 'x', sizeof(line) - 1);
    begin();
    log_init("j", LOG_INFO);
    log_error("%s", line);
    got = end();
    assert_memory_equal(got, "zerod[j]: xxx", 13);
    assert_in_range(strlen(got), 1000, 4096);
    assert_int_equal(got[strlen(got) - 1], '\n');
    assert_int_equal(strspn(got + 10, "x"), strlen(got) - 11);
}

static struct diagnostic *make_diagnostic(bool warning)
{
    struct diagnostic *d = diagnostic_new(E_STALE, NULL);

    d->warning = warning;
    diagnostic_at(d, 1, 2, 3);
    diagnostic_field(d, "cause", "first line\nsecond line");
    return diagnostic_finish(d);
}

static void test_diagnostics(void **userdata)
{
    char expected[4096];

    (void)userdata;
    for (int warning = 0; warning < 2; warning++) {
        struct diagnostic *d = make_diagnostic(warning);

        snprintf(expected, sizeof(expected), "zerod[j]: %s\n", d->text);
        assert_non_null(strstr(d->text, "second line"));
        begin();
        log_init("j", LOG_WARNING);
        log_diagnostic(d);
        assert_string_equal(end(), expected);
        begin();
        log_init("j", LOG_ERR);
        log_diagnostic(d);
        assert_string_equal(end(), warning ? "" : expected);
        begin();
        log_init("j", LOG_CRIT);
        log_diagnostic(d);
        assert_string_equal(end(), "");
        diagnostic_unref(d);
    }
}

/*
 * If the reader stops reading, lines are lost, and a later line says how many. The daemon never waits for the reader.
 */
static void test_slow_reader(void **userdata)
{
    int pipe_fds[2], saved = dup(STDERR_FILENO);
    unsigned n_lines = 0, n_dropped = 0;
    char line[1200], *told;
    FILE *reader;

    (void)userdata;
    assert_int_equal(pipe(pipe_fds), 0);
    assert_int_equal(dup2(pipe_fds[1], STDERR_FILENO), STDERR_FILENO);
    close(pipe_fds[1]);
    log_init("j", LOG_INFO);
    assert_int_equal(log_start(), 0);
    memset(line, 'x', sizeof(line) - 1);
    line[sizeof(line) - 1] = '\0';
    for (unsigned i = 0; i < 2000; i++) /* 2.4 MB: more than a pipe and the queue hold */
        log_error("%s", line);
    reader = fdopen(pipe_fds[0], "r");
    assert_non_null(reader);
    while (n_dropped == 0) {
        assert_non_null(fgets(text, sizeof(text), reader));
        told = strstr(text, " lines of this log were dropped");
        n_lines += !told;
        if (told)
            assert_int_equal(sscanf(text, "zerod[j]: %u", &n_dropped), 1);
    }
    assert_int_equal(n_lines + n_dropped, 2000);
    log_error("caught up");
    log_stop();
    assert_int_equal(dup2(saved, STDERR_FILENO), STDERR_FILENO);
    close(saved);
    assert_non_null(fgets(text, sizeof(text), reader));
    assert_string_equal(text, "zerod[j]: caught up\n");
    fclose(reader);
}

/* Processes inherit $JOURNAL_STREAM from a service. The log uses the journal only if stderr is the stream it names. */
static void test_stream_of_somebody_else(void **userdata)
{
    static const char *const values[] = {"1:1", "", "x", "8:", ":8", "18446744073709551615:18446744073709551615"};

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(values); i++) {
        begin();
        setenv("JOURNAL_STREAM", values[i], 1);
        log_init("j", LOG_INFO);
        log_error("here");
        assert_string_equal(end(), "zerod[j]: here\n");
    }
    unsetenv("JOURNAL_STREAM");
}

/* Lines for the journal go to stderr, from which journald knows the unit also if the process ends at once; a prefix
 * tells the level. So does a diagnosis if the socket for structured entries is not there. */
static void test_lines_for_the_journal(void **userdata)
{
    static const struct notify_field field = {.name = "ZEROD_CODE", .value = "E1001"};
    bool has_socket = access("/run/systemd/journal/socket", F_OK) == 0;
    char value[64];
    struct stat st;

    (void)userdata;
    begin();
    assert_int_equal(fstat(STDERR_FILENO, &st), 0);
    snprintf(value, sizeof(value), "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
    setenv("JOURNAL_STREAM", value, 1);
    log_init("j", LOG_INFO);
    log_error("here");
    log_notice("there");
    log_entry(LOG_ERR, "E1001", &field, 1);
    unsetenv("JOURNAL_STREAM");
    assert_string_equal(end(), has_socket ? "<3>here\n<5>there\n" : "<3>here\n<5>there\n<3>E1001\n");
}

TEST_GROUP(log)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines),
        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_long_line),
        cmocka_unit_test(test_diagnostics),
        cmocka_unit_test(test_slow_reader),
        cmocka_unit_test(test_stream_of_somebody_else),
        cmocka_unit_test(test_lines_for_the_journal),
    };

    unsetenv("JOURNAL_STREAM");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
