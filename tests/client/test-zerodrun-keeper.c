/* SPDX-License-Identifier: Apache-2.0 */

/* Tests the keeper of a daemon's descriptors, with this process as the daemon, and how often a daemon is restarted. */

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "client/run/environment.h"
#include "client/run/keeper.h"
#include "client/run/restarts.h"
#include "core/base/base.h"
#include "core/base/keep.h"
#include "core/base/open-files.h"

static struct keeper keeper;
static uv_loop_t loop;
static char noted[128];
static unsigned n_noted, n_ready;
static uint64_t extended_ms;

static void note(void *userdata, const char *text)
{
    (void)userdata;
    n_noted++;
    snprintf(noted, sizeof(noted), "%s", text);
}

static void ready(void *userdata)
{
    (void)userdata;
    n_ready++;
}

static void extend(void *userdata, uint64_t timeout_ms)
{
    (void)userdata;
    extended_ms = timeout_ms;
}

static const struct keeper_ops ops = {.note = note, .ready = ready, .extend = extend};

/* Makes a keeper that expects messages of this process as the daemon's. */
static int start(void **userdata)
{
    (void)userdata;
    n_noted = n_ready = 0;
    extended_ms = 0;
    open_files_raise();
    if (uv_loop_init(&loop) < 0 || keeper_init(&keeper, &loop, &ops, NULL) < 0)
        return -1;
    keeper_expect(&keeper, getpid());
    setenv("NOTIFY_SOCKET", keeper.path, 1);
    return keep_init();
}

static int stop(void **userdata)
{
    (void)userdata;
    keep_deinit();
    keeper_close(&keeper);
    uv_run(&loop, UV_RUN_DEFAULT);
    return uv_loop_close(&loop);
}

static void put(const char *name, int fd)
{
    assert_int_equal(keep_put(name, fd), 0);
    keeper_drain(&keeper);
}

static void put_new(const char *name)
{
    int fd = memfd_create("test", MFD_CLOEXEC);

    assert_true(fd >= 0);
    put(name, fd);
    close(fd);
}

static void send_text(const char *text, const int *fds, size_t n_fds)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(8 * sizeof(int))];
    } control = {
        .header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(n_fds * sizeof(int))}};
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    struct iovec iov = {.iov_base = (char *)text, .iov_len = strlen(text)};
    struct msghdr message = {.msg_name = &sa, .msg_namelen = sizeof(sa), .msg_iov = &iov, .msg_iovlen = 1};
    int s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", keeper.path);
    if (n_fds > 0) {
        memcpy(CMSG_DATA(&control.header), fds, n_fds * sizeof(int));
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
    }
    assert_true(sendmsg(s, &message, 0) >= 0);
    close(s);
    keeper_drain(&keeper);
}

/* ---- the text of a message ----------------------------------------------------------------------------- */

static void test_parse(void **userdata)
{
    static const struct {
        const char *text, *name;
        bool store, remove, barrier, ready;
        uint64_t extend_us;
    } rows[] = {
        {"FDSTORE=1\nFDNAME=zerod.ring.3", "zerod.ring.3", .store = true},
        {"FDNAME=a\nFDSTORE=1\n", "a", .store = true},
        {"FDSTORE=1", "stored", .store = true},
        {"FDSTORE=1\nFDNAME=a\nFDNAME=b", "b", .store = true},
        {"FDSTOREREMOVE=1\nFDNAME=a", "a", .remove = true},
        {"BARRIER=1", "stored", .barrier = true},
        {"READY=1\nSTATUS=FDSTORE=1\nFDSTORE=0\nFDSTORE=11\nfdstore=1", "stored", .ready = true},
        {"EXTEND_TIMEOUT_USEC=30000000", "stored", .extend_us = 30000000},
        {"EXTEND_TIMEOUT_USEC=", "stored"},
        {"EXTEND_TIMEOUT_USEC=-1\nEXTEND_TIMEOUT_USEC=1s\nREADY=0\nREADY=11", "stored"},
        {"EXTEND_TIMEOUT_USEC=9999999999999999999999", "stored"},
        {"\n\n\nFDSTORE=1\n\n", "stored", .store = true},
        {"", "stored"},
    };
    static const char *const wrong[] = {"FDNAME=", "FDNAME=a:b", "FDSTORE=1\nFDNAME=a\t", "FDNAME=\xc3\xa9\nFDSTORE=1"};
    char text[300];
    struct keeper_message message;

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        assert_int_equal(keeper_parse(&message, rows[i].text, strlen(rows[i].text)), 0);
        assert_string_equal(message.name, rows[i].name);
        assert_int_equal(message.store, rows[i].store);
        assert_int_equal(message.remove, rows[i].remove);
        assert_int_equal(message.barrier, rows[i].barrier);
        assert_int_equal(message.ready, rows[i].ready);
        assert_int_equal(message.extend_us, rows[i].extend_us);
    }
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++)
        assert_int_equal(keeper_parse(&message, wrong[i], strlen(wrong[i])), -EINVAL);
    assert_int_equal(keeper_parse(&message, "FDNAME=a\0b", 10), -EINVAL);
    memset(text, 'x', sizeof(text));
    memcpy(text, "FDNAME=", 7);
    assert_int_equal(keeper_parse(&message, text, 7 + KEEP_MAX_NAME_BYTES), 0);
    assert_int_equal(strlen(message.name), KEEP_MAX_NAME_BYTES);
    assert_int_equal(keeper_parse(&message, text, 7 + KEEP_MAX_NAME_BYTES + 1), -EINVAL);
}

static void test_told(void **userdata)
{
    (void)userdata;
    keep_tell("READY=1");
    keep_switch_off();
    keep_tell("EXTEND_TIMEOUT_USEC=2000000");
    keeper_drain(&keeper);
    assert_int_equal(n_ready, 1);
    assert_int_equal(extended_ms, 2000);
    keeper_expect(&keeper, getpid() + 1); /* as if another daemon was started */
    keep_tell("READY=1");
    keeper_drain(&keeper);
    assert_int_equal(n_ready, 1);
}

/* ---- what is kept -------------------------------------------------------------------------------------- */

static void test_describe(void **userdata)
{
    struct environment env;

    (void)userdata;
    assert_int_equal(environment_init(&env), 0);
    assert_int_equal(keeper_describe(&keeper, &env), 0);
    assert_string_equal(environment_get(&env, "NOTIFY_SOCKET"), keeper.path);
    assert_string_equal(environment_get(&env, "FDSTORE"), "4096");
    assert_null(environment_get(&env, "LISTEN_FDS"));
    put_new("b");
    put_new("a");
    put_new("b");
    assert_int_equal(keeper_describe(&keeper, &env), 0);
    assert_string_equal(environment_get(&env, "LISTEN_FDS"), "3");
    assert_string_equal(environment_get(&env, "LISTEN_FDNAMES"), "b:a:b");
    keep_forget("b");
    keep_forget("there is no such name");
    keeper_drain(&keeper);
    assert_int_equal(keeper_describe(&keeper, &env), 0);
    assert_string_equal(environment_get(&env, "LISTEN_FDNAMES"), "a");
    assert_int_equal(fcntl(keeper.fds[0], F_GETFD), FD_CLOEXEC);
    environment_deinit(&env);
    assert_int_equal(n_noted, 0);
}

/* A daemon that has taken over puts the descriptors that it got again. */
static void test_not_kept_twice(void **userdata)
{
    int fd = memfd_create("a", MFD_CLOEXEC), kept;

    (void)userdata;
    put("a", fd);
    kept = keeper.fds[0];
    put("a", kept);
    put("a", fd);
    assert_int_equal(keeper.n, 1);
    put("b", fd);
    assert_int_equal(keeper.n, 2);
    close(fd);
}

static void test_several_in_a_message(void **userdata)
{
    int pair[2][2], ends[2];
    char byte;

    (void)userdata;
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(pipe2(pair[i], O_CLOEXEC | O_NONBLOCK), 0);
        ends[i] = pair[i][1];
    }
    send_text("FDSTORE=1\nFDNAME=end", ends, 2);
    assert_int_equal(keeper.n, 2);
    send_text("READY=1", ends, 2);              /* extra descriptors are closed, */
    send_text("FDSTORE=1\nFDNAME=:", ends, 2);  /* and those of invalid messages, */
    send_text("FDSTORE=1\nBARRIER=1", ends, 2); /* and those of barriers */
    assert_int_equal(keeper.n, 2);
    close(ends[0]);
    close(ends[1]);
    assert_int_equal(read(pair[0][0], &byte, 1), -1); /* the keeper has the other end open */
    keep_forget("end");
    keeper_drain(&keeper);
    assert_int_equal(read(pair[0][0], &byte, 1), 0);
    assert_int_equal(read(pair[1][0], &byte, 1), 0);
    close(pair[0][0]);
    close(pair[1][0]);
}

static void test_confirm(void **userdata)
{
    int status = -1;
    pid_t pid = fork();

    (void)userdata;
    if (pid == 0)
        _exit(keep_confirm(60000) == 0 ? 0 : 1);
    keeper_expect(&keeper, pid);
    while (waitpid(pid, &status, WNOHANG) == 0)
        uv_run(&loop, UV_RUN_NOWAIT);
    assert_int_equal(status, 0);
}

/* Messages of a daemon that has ended count until the next daemon is started. Those of other processes never count. */
static void test_sender(void **userdata)
{
    int status;
    pid_t pid;

    (void)userdata;
    for (unsigned i = 0; i < 2; i++) {
        pid = fork();
        if (pid == 0)
            _exit(keep_put("a", STDIN_FILENO) == 0 ? 0 : 1);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
        if (i == 1)
            keeper_expect(&keeper, pid); /* the daemon, which has ended */
        keeper_drain(&keeper);
        assert_int_equal(keeper.n, i);
    }
    put("b", STDIN_FILENO);
    assert_int_equal(keeper.n, 1);
    keeper_expect(&keeper, 0);
    put("b", STDIN_FILENO);
    assert_int_equal(keeper.n, 1);
    assert_int_equal(n_noted, 0);
}

static void test_bounds(void **userdata)
{
    char name[KEEP_MAX_NAME_BYTES + 1] = "";
    static char text[KEEPER_MAX_MESSAGE_BYTES + 2];
    unsigned n_names = KEEPER_MAX_NAMES_BYTES / (KEEP_MAX_NAME_BYTES + 1);
    int fd = memfd_create("a", MFD_CLOEXEC);

    (void)userdata;
    memset(name, 'x', KEEP_MAX_NAME_BYTES);
    for (unsigned i = 0; i < n_names + 3; i++)
        put_new(name);
    assert_int_equal(keeper.n, n_names);
    assert_string_equal(noted, "the names of zerod's descriptors are too long: no more of them outlive it");
    assert_int_equal(n_noted, 1);
    keep_forget(name);
    keeper_drain(&keeper);
    assert_int_equal(keeper.n, 0);
    assert_int_equal(keeper.n_names_bytes, 0);

    keeper_expect(&keeper, getpid());
    for (unsigned i = 0; i < KEEPER_MAX_FDS + 3; i++)
        put_new("y");
    assert_int_equal(keeper.n, KEEPER_MAX_FDS);
    assert_string_equal(noted, "keeps 4096 descriptors of zerod already: no more of them outlive it");
    assert_int_equal(n_noted, 2);
    keep_forget("y");
    keeper_drain(&keeper);

    keeper_expect(&keeper, getpid());
    memset(text, '\n', sizeof(text) - 1);
    memcpy(text, "FDSTORE=1", 9);
    send_text(text, &fd, 1);
    assert_int_equal(keeper.n, 0);
    assert_int_equal(n_noted, 3);
    close(fd);
}

/* ---- restarts ------------------------------------------------------------------------------------------ */

static void test_restarts(void **userdata)
{
    struct restarts none = {}, two = {.limit = 2}, many = {.limit = RESTARTS_MAX};

    (void)userdata;
    assert_false(restarts_add(&none, 5));
    assert_true(restarts_add(&two, 5));
    assert_true(restarts_add(&two, 1000));
    assert_false(restarts_add(&two, RESTARTS_WINDOW_MS + 4));
    assert_true(restarts_add(&two, RESTARTS_WINDOW_MS + 5));
    assert_int_equal(two.n, 2);
    assert_false(restarts_add(&two, RESTARTS_WINDOW_MS + 999));
    assert_true(restarts_add(&two, UINT64_C(10) * RESTARTS_WINDOW_MS));
    assert_int_equal(two.n, 1);
    for (unsigned i = 0; i < RESTARTS_MAX; i++)
        assert_true(restarts_add(&many, i));
    assert_false(restarts_add(&many, RESTARTS_MAX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parse),
        cmocka_unit_test_setup_teardown(test_told, start, stop),
        cmocka_unit_test_setup_teardown(test_describe, start, stop),
        cmocka_unit_test_setup_teardown(test_not_kept_twice, start, stop),
        cmocka_unit_test_setup_teardown(test_several_in_a_message, start, stop),
        cmocka_unit_test_setup_teardown(test_confirm, start, stop),
        cmocka_unit_test_setup_teardown(test_sender, start, stop),
        cmocka_unit_test_setup_teardown(test_bounds, start, stop),
        cmocka_unit_test(test_restarts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
