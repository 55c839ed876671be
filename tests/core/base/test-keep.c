/* SPDX-License-Identifier: Apache-2.0 */

/* Tests the descriptor store with a small service manager: a datagram socket that the test reads. */

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/keep.h"
#include "tests/group.h"

/* ---- the service manager ------------------------------------------------------------------------------- */

static char folder[] = "/tmp/zerod-test-XXXXXX", path[64];
static int manager;

static int make_manager(void **userdata)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};

    (void)userdata;
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (manager < 0 || !mkdtemp(folder))
        return -1;
    snprintf(path, sizeof(path), "%s/notify", folder);
    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
    setenv("NOTIFY_SOCKET", path, 1);
    return bind(manager, (struct sockaddr *)&sa, sizeof(sa));
}

static int remove_manager(void **userdata)
{
    (void)userdata;
    close(manager);
    return unlink(path) < 0 ? -1 : rmdir(folder);
}

static int init(void **userdata)
{
    (void)userdata;
    setenv("NOTIFY_SOCKET", path, 1);
    return keep_init();
}

static int deinit(void **userdata)
{
    (void)userdata;
    keep_deinit();
    return 0;
}

/* Waits for the next message. Return: the descriptor that came with the message, which the caller closes, or -1. */
static int hear(char *text, size_t size)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec iov = {.iov_base = text, .iov_len = size - 1};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    ssize_t n = recvmsg(manager, &message, MSG_CMSG_CLOEXEC);
    int fd = -1;

    text[MAX(n, (ssize_t)0)] = '\0';
    if (n >= 0 && CMSG_FIRSTHDR(&message))
        memcpy(&fd, CMSG_DATA(&control.header), sizeof(fd));
    return fd;
}

static bool hears_nothing(void)
{
    char byte;

    return recv(manager, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
}

static ino_t inode(int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 ? st.st_ino : 0;
}

/* ---- messages ------------------------------------------------------------------------------------------ */

static void test_put_and_forget(void **userdata)
{
    int fd = memfd_create("test", MFD_CLOEXEC), copy;
    char text[512];

    (void)userdata;
    assert_true(keep_is_on());
    assert_int_equal(keep_put("zerod.ring.3", fd), 0);
    copy = hear(text, sizeof(text));
    assert_string_equal(text, "FDSTORE=1\nFDPOLL=0\nFDNAME=zerod.ring.3");
    assert_true(copy >= 0 && copy != fd);
    assert_int_equal(inode(copy), inode(fd));
    keep_forget("zerod.ring.3");
    assert_int_equal(hear(text, sizeof(text)), -1);
    assert_string_equal(text, "FDSTOREREMOVE=1\nFDNAME=zerod.ring.3");
    assert_int_equal(keep_put("none", -1), -EBADF);
    assert_int_equal(keep_put("closed", 1 << 20), -EBADF);
    close(copy);
    close(fd);
    assert_true(hears_nothing());
}

static void test_names(void **userdata)
{
    char longest[KEEP_MAX_NAME_BYTES + 2], text[512];
    static const char *const wrong[] = {"", "a:b", "a\nFDSTORE=1", "tab\t", "\x7f", "\xc3\xa9"};

    (void)userdata;
    memset(longest, 'x', sizeof(longest));
    longest[KEEP_MAX_NAME_BYTES + 1] = '\0';
    assert_int_equal(keep_put(longest, STDIN_FILENO), -EINVAL);
    longest[KEEP_MAX_NAME_BYTES] = '\0';
    assert_int_equal(keep_put(longest, STDIN_FILENO), 0);
    close(hear(text, sizeof(text)));
    assert_string_equal(text + strlen("FDSTORE=1\nFDPOLL=0\nFDNAME="), longest);
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        assert_int_equal(keep_put(wrong[i], STDIN_FILENO), -EINVAL);
        keep_forget(wrong[i]);
    }
    assert_true(hears_nothing());
}

static void *put_many(void *userdata)
{
    for (unsigned i = 0; i < *(unsigned *)userdata; i++)
        if (keep_put("one of many", STDIN_FILENO) < 0)
            return NULL;
    return userdata;
}

/* keep_put() waits when there are more messages than the manager's queue holds. */
static void test_slow_manager(void **userdata)
{
    FILE *file = fopen("/proc/sys/net/unix/max_dgram_qlen", "re");
    char text[512];
    pthread_t thread;
    void *result;
    unsigned n = 0;

    (void)userdata;
    assert_true(file && fscanf(file, "%u", &n) == 1);
    fclose(file);
    n = MIN(n, 1000u) + 20;
    assert_int_equal(pthread_create(&thread, NULL, put_many, &n), 0);
    for (unsigned i = 0; i < n; i++) {
        int fd = hear(text, sizeof(text));

        assert_true(fd >= 0);
        close(fd);
    }
    pthread_join(thread, &result);
    assert_ptr_equal(result, &n);
    assert_true(hears_nothing());
}

/* Reads two messages and closes the descriptor of the second. */
static void *answer_barrier(void *userdata)
{
    char *texts = userdata;

    close(hear(texts, 256));
    close(hear(texts + 256, 256));
    return NULL;
}

static void test_confirm(void **userdata)
{
    char texts[2][256], text[256];
    pthread_t thread;
    int fd;

    (void)userdata;
    assert_int_equal(pthread_create(&thread, NULL, answer_barrier, texts), 0);
    assert_int_equal(keep_put("a", STDIN_FILENO), 0);
    assert_int_equal(keep_confirm(60000), 0);
    pthread_join(thread, NULL);
    assert_string_equal(texts[0], "FDSTORE=1\nFDPOLL=0\nFDNAME=a");
    assert_string_equal(texts[1], "BARRIER=1");
    assert_int_equal(keep_confirm(20), -ETIMEDOUT);
    fd = hear(text, sizeof(text));
    assert_string_equal(text, "BARRIER=1");
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(keep_confirm(0), -ETIMEDOUT);
    close(hear(text, sizeof(text)));
}

static void expect_off(void)
{
    assert_false(keep_is_on());
    assert_int_equal(keep_put("a", STDIN_FILENO), -ENOTCONN);
    assert_int_equal(keep_confirm(60000), -ENOTCONN);
    keep_forget("a");
}

static void test_no_manager(void **userdata)
{
    static const char *const none[] = {"", "@", "relative", "vsock:2:1234"};
    char text[sizeof(((struct sockaddr_un *)0)->sun_path) + 1];

    (void)userdata;
    expect_off(); /* keep_init() was not called */
    keep_deinit();
    unsetenv("NOTIFY_SOCKET");
    assert_int_equal(keep_init(), 0);
    expect_off();
    keep_deinit();
    for (size_t i = 0; i < ARRAY_SIZE(none); i++) {
        setenv("NOTIFY_SOCKET", none[i], 1);
        assert_int_equal(keep_init(), 0);
        expect_off();
        keep_deinit();
    }
    memset(text, '/', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    setenv("NOTIFY_SOCKET", text, 1);
    assert_int_equal(keep_init(), 0);
    expect_off();
    keep_deinit();
    init(NULL);
    assert_true(keep_is_on());
    keep_switch_off();
    expect_off();
    assert_true(hears_nothing());
    keep_deinit();
}

static void test_manager_is_gone(void **userdata)
{
    (void)userdata;
    setenv("NOTIFY_SOCKET", "/nowhere/notify", 1);
    assert_int_equal(keep_init(), 0);
    assert_true(keep_is_on());
    assert_int_equal(keep_put("a", STDIN_FILENO), -ENOENT);
    assert_int_equal(keep_confirm(60000), -ENOENT);
    keep_deinit();
}

/* An abstract socket name: '@' stands for a zero byte, and all later bytes belong to the name. */
static void test_abstract_manager(void **userdata)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    socklen_t size = sizeof(sa);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    char text[128];
    ssize_t n;

    (void)userdata;
    assert_int_equal(bind(fd, (struct sockaddr *)&sa, sizeof(sa.sun_family)), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&sa, &size), 0);
    snprintf(text, sizeof(text), "@%.*s", (int)(size - offsetof(struct sockaddr_un, sun_path) - 1), sa.sun_path + 1);
    setenv("NOTIFY_SOCKET", text, 1);
    assert_int_equal(keep_init(), 0);
    keep_forget("a");
    n = recv(fd, text, sizeof(text) - 1, MSG_DONTWAIT);
    text[MAX(n, (ssize_t)0)] = '\0';
    assert_string_equal(text, "FDSTOREREMOVE=1\nFDNAME=a");
    keep_deinit();
    close(fd);
}

/* ---- what is passed ------------------------------------------------------------------------------------ */

enum { FIRST_FD = 3, FAR_AWAY = 100, MAX_PASSED = 4 };

struct passing {
    const int *fds; /* up to MAX_PASSED, -1 at the end */
    const char *n, *names;
    int pid_offset;
};

/* Passes the descriptors to a new process. Return: what look() returns in that process, 0 to 255. */
static int pass(const struct passing *passing, int (*look)(void))
{
    pid_t pid = fork();
    int status;

    assert_true(pid >= 0);
    if (pid == 0) {
        char text[16];
        int n = 0;

        for (; passing->fds[n] >= 0; n++)
            dup2(passing->fds[n], FAR_AWAY + n);
        for (int i = 0; i < MAX_PASSED; i++)
            i < n ? dup2(FAR_AWAY + i, FIRST_FD + i) : close(FIRST_FD + i);
        snprintf(text, sizeof(text), "%d", getpid() + passing->pid_offset);
        setenv("LISTEN_PID", text, 1);
        setenv("LISTEN_FDS", passing->n, 1);
        if (passing->names)
            setenv("LISTEN_FDNAMES", passing->names, 1);
        _exit(look());
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* If the condition is false, returns a number that is derived from the line and is not 0. */
#define EXPECT(condition)                                                                                              \
    do                                                                                                                 \
        if (!(condition))                                                                                              \
            return __LINE__ % 250 + 1;                                                                                 \
    while (0)

static int take_three(void)
{
    int fd;

    EXPECT(keep_init() == 0);
    EXPECT(!getenv("LISTEN_PID") && !getenv("LISTEN_FDS") && !getenv("LISTEN_FDNAMES"));
    EXPECT(getenv("NOTIFY_SOCKET"));
    EXPECT(fcntl(FIRST_FD, F_GETFD) & FD_CLOEXEC && fcntl(FIRST_FD + 2, F_GETFD) & FD_CLOEXEC);
    EXPECT(strcmp(keep_passed(0)->name, "a") == 0 && keep_passed(0)->fd == FIRST_FD);
    EXPECT(strcmp(keep_passed(2)->name, "a") == 0 && keep_passed(2)->fd == FIRST_FD + 2);
    EXPECT(!keep_passed(3));
    EXPECT(keep_take("c") == -1 && keep_take("") == -1);
    fd = keep_take("a");
    EXPECT(fd == FIRST_FD);
    EXPECT(strcmp(keep_passed(0)->name, "b.1") == 0 && keep_passed(1)->fd == FIRST_FD + 2 && !keep_passed(2));
    EXPECT(keep_listen_fd() == -1);
    EXPECT(keep_take("a") == FIRST_FD + 2 && keep_take("a") == -1);
    keep_deinit();
    EXPECT(fcntl(FIRST_FD, F_GETFD) >= 0 && fcntl(FIRST_FD + 1, F_GETFD) < 0 && fcntl(FIRST_FD + 2, F_GETFD) >= 0);
    EXPECT(!keep_passed(0) && keep_take("b.1") == -1);
    EXPECT(keep_init() == 0 && !keep_passed(0)); /* the variables are removed */
    return 0;
}

static int take_without_names(void)
{
    EXPECT(keep_init() == 0);
    EXPECT(strcmp(keep_passed(1)->name, "unknown") == 0);
    EXPECT(keep_take("unknown") == FIRST_FD);
    return 0;
}

static int take_nothing(void)
{
    EXPECT(keep_init() == 0 && !keep_passed(0) && keep_listen_fd() == -1 && !getenv("LISTEN_FDS"));
    return 0;
}

static int init_fails(void)
{
    int r = keep_init();

    EXPECT(r < 0 && !keep_passed(0) && !keep_is_on() && !getenv("LISTEN_FDS"));
    return -r;
}

static void test_take(void **userdata)
{
    int a = memfd_create("a", MFD_CLOEXEC), b = memfd_create("b", MFD_CLOEXEC), three[] = {a, b, a, -1};
    static const char *const wrong[] = {"", "x", "-1", "3x", "99999", "99999999999999999999"};

    (void)userdata;
    assert_int_equal(pass(&(struct passing){.fds = three, .n = "3", .names = "a:b.1:a"}, take_three), 0);
    assert_int_equal(pass(&(struct passing){.fds = three, .n = "2"}, take_without_names), 0);
    assert_int_equal(pass(&(struct passing){.fds = three, .n = "3", .pid_offset = 1}, take_nothing), 0);
    assert_int_equal(pass(&(struct passing){.fds = three, .n = "0"}, take_nothing), 0);
    assert_int_equal(pass(&(struct passing){.fds = three, .n = "3", .names = "a:b"}, init_fails), EINVAL);
    assert_int_equal(pass(&(struct passing){.fds = three, .n = "3", .names = "a:b:c:d"}, init_fails), EINVAL);
    assert_int_equal(pass(&(struct passing){.fds = three, .n = "4", .names = "a:b:c:d"}, init_fails), EBADF);
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++)
        assert_int_equal(pass(&(struct passing){.fds = three, .n = wrong[i]}, init_fails), EINVAL);
    close(a);
    close(b);
}

/* Return: a socket. In AF_UNIX, the kernel chooses its name. */
static int make_socket(int domain, int type, bool listens)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = socket(domain, type | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    if (domain == AF_UNIX)
        assert_int_equal(bind(fd, (struct sockaddr *)&sa, sizeof(sa.sun_family)), 0);
    if (listens)
        assert_int_equal(listen(fd, 1), 0);
    return fd;
}

/* Return: the place of the listening socket, 100 if there is none, or 101 if it is of a wrong kind. */
static int look_for_listening(void)
{
    int fd;

    EXPECT(keep_init() == 0);
    fd = keep_listen_fd();
    EXPECT(fd >= 0 || fd == -1 || (fd == -EINVAL && keep_passed(0)));
    EXPECT(keep_listen_fd() == (fd == -EINVAL ? fd : -1));
    return fd == -1 ? 100 : fd == -EINVAL ? 101 : fd - FIRST_FD;
}

static void test_listening_socket(void **userdata)
{
    int file = memfd_create("a", MFD_CLOEXEC);
    static const struct {
        int domain, type;
        bool listens;
        int found;
    } rows[] = {
        {AF_UNIX, SOCK_SEQPACKET, true, 1}, {AF_UNIX, SOCK_SEQPACKET, false, 101}, {AF_UNIX, SOCK_STREAM, true, 101},
        {AF_UNIX, SOCK_DGRAM, false, 101},  {AF_INET, SOCK_STREAM, true, 101},
    };

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        int s = make_socket(rows[i].domain, rows[i].type, rows[i].listens), fds[] = {file, s, file, -1};
        int two[] = {s, file, s, -1};

        assert_int_equal(pass(&(struct passing){.fds = fds, .n = "3"}, look_for_listening), rows[i].found);
        assert_int_equal(pass(&(struct passing){.fds = two, .n = "3"}, look_for_listening), 101);
        assert_int_equal(pass(&(struct passing){.fds = fds, .n = "1"}, look_for_listening), 100);
        close(s);
    }
    close(file);
}

TEST_GROUP(keep)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_put_and_forget, init, deinit),
        cmocka_unit_test_setup_teardown(test_names, init, deinit),
        cmocka_unit_test_setup_teardown(test_slow_manager, init, deinit),
        cmocka_unit_test_setup_teardown(test_confirm, init, deinit),
        cmocka_unit_test(test_no_manager),
        cmocka_unit_test(test_manager_is_gone),
        cmocka_unit_test(test_abstract_manager),
        cmocka_unit_test_setup_teardown(test_take, init, deinit),
        cmocka_unit_test(test_listening_socket),
    };

    return cmocka_run_group_tests(tests, make_manager, remove_manager);
}
