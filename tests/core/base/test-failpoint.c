/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A failpoint does what the environment says, once, at the right pass. An unknown item ends the process, because a test
 * that tests nothing must not pass. The environment is read once, so each case has a process of its own.
 */

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"

/* Runs body in a child with this environment; NULL sets none. Return: the child's pid. */
static pid_t start(const char *environment, int (*body)(void))
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    (void)!freopen("/dev/null", "w", stderr);
    if (environment)
        setenv("ZEROD_FAILPOINT", environment, 1);
    else
        unsetenv("ZEROD_FAILPOINT");
    _exit(body());
}

static int run(const char *environment, int (*body)(void))
{
    pid_t pid = start(environment, body);
    int status;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

/* Return: a bit for each of seven passes, set if the failpoint failed. Seven bits fit into an exit status. */
static int passes_of(const char *name)
{
    int n = 0;

    for (int i = 0; i < 7; i++) {
        int r = failpoint(name);

        if (r != 0 && r != -ENOMEM)
            return 255;
        n |= (r == -ENOMEM) << i;
    }
    return n;
}

static int passes(void)
{
    return passes_of("reserve");
}

static int other_passes(void)
{
    return passes_of("reserv") | passes_of("reserves") | passes_of("");
}

static int exit_status(int status)
{
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void test_passes(void **userdata)
{
    (void)userdata;
    assert_int_equal(exit_status(run(NULL, passes)), 0);
    assert_int_equal(exit_status(run("", passes)), 0);
    assert_int_equal(exit_status(run("reserve:error", passes)), 1 << 0);
    assert_int_equal(exit_status(run("reserve:error@1", passes)), 1 << 0);
    assert_int_equal(exit_status(run("reserve:error@3", passes)), 1 << 2);
    assert_int_equal(exit_status(run("reserve:error@*", passes)), 127);
    assert_int_equal(exit_status(run("reserve:error@2,reserve:error@4,update:kill", passes)), 1 << 1 | 1 << 3);
    assert_int_equal(exit_status(run("update:kill,reserve:error@7", passes)), 1 << 6);
    assert_int_equal(exit_status(run("reserve:sleep:0@2", passes)), 0);
    assert_int_equal(exit_status(run("reserve:error@*", other_passes)), 0);
}

static int request_passes(void)
{
    return (failpoint_at("Push", "sent") != 0) << 1 | (failpoint_at("Push", "send") != 0) |
           (failpoint_at("Pus", "h.send") != 0) << 2;
}

static void test_requests(void **userdata)
{
    (void)userdata;
    assert_int_equal(exit_status(run("Push.send:error", request_passes)), 1);
    assert_int_equal(exit_status(run("Push.sent:error", request_passes)), 2);
    assert_int_equal(exit_status(run("Step.sent:error", request_passes)), 0);
}

static void test_kill(void **userdata)
{
    int status;

    (void)userdata;
    status = run("reserve:kill@5", passes);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGKILL);
    assert_int_equal(exit_status(run("reserve:kill@8", passes)), 0); /* there are only seven passes */
}

static int pass_and_go_on(void)
{
    int r = failpoint("reserve");

    while (r == 0)
        ;
    return r;
}

static void test_fuse(void **userdata)
{
    int status;

    (void)userdata;
    status = run("reserve:fuse:1000000", pass_and_go_on);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGKILL);
}

static void test_stop(void **userdata)
{
    pid_t pid = start("reserve:stop,reserve:error@2", passes);
    int status;

    (void)userdata;
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
    assert_int_equal(kill(pid, SIGCONT), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(exit_status(status), 1 << 1); /* continues, and fails at the second pass */
}

enum { N_THREADS = 4, N_PASSES = 5000 };

static atomic_int n_errors;

static void *come_by(void *userdata)
{
    for (int i = 0; i < N_PASSES; i++)
        atomic_fetch_add(&n_errors, failpoint("reduce") != 0);
    return userdata;
}

static int threads(void)
{
    pthread_t ids[N_THREADS];

    for (int i = 0; i < N_THREADS; i++)
        if (pthread_create(&ids[i], NULL, come_by, NULL) != 0)
            return 255;
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(ids[i], NULL);
    return atomic_load(&n_errors);
}

/* Passes are counted over all threads, so exactly one thread makes the last pass. */
static void test_threads(void **userdata)
{
    char last[64];

    (void)userdata;
    snprintf(last, sizeof(last), "reduce:error@%d", N_THREADS * N_PASSES);
    assert_int_equal(exit_status(run(last, threads)), 1);
    snprintf(last, sizeof(last), "reduce:error@%d", N_THREADS * N_PASSES + 1);
    assert_int_equal(exit_status(run(last, threads)), 0);
}

static void test_not_understood(void **userdata)
{
    static const char *const wrong[] = {
        "reserve",
        "reserve:",
        "reserve:boom",
        "reserve:errors",
        "reserve:kill:5",
        "reserve:error@",
        "reserve:error@0",
        "reserve:error@x",
        "reserve:error@-1",
        "reserve:error@1x",
        "reserve:sleep:",
        "reserve:sleep:x",
        "reserve:sleep:5x",
        "reserve:fuse",
        "reserve:fuse:x",
        "reserve@1:error",
        ":error",
        "reserve:error,update",
        "reserve:error;update:error",
        "reserve:error@99999999999999999999",
        "a-name-of-more-than-forty-seven-bytes-that-fits-nowhere:error",
    };

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        int status = run(wrong[i], other_passes);

        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT)
            fail_msg("\"%s\" was taken", wrong[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_passes),         cmocka_unit_test(test_requests), cmocka_unit_test(test_kill),
        cmocka_unit_test(test_fuse),           cmocka_unit_test(test_stop),     cmocka_unit_test(test_threads),
        cmocka_unit_test(test_not_understood),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
