/* SPDX-License-Identifier: Apache-2.0 */

/* The listening socket: what happens to a file at its path, who owns it, and who may connect. */

#include <fcntl.h>
#include <grp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/keep.h"
#include "core/config/config.h"
#include "daemon/server/listener.h"
#include "tests/group.h"

enum { NOBODY = 54321, OTHERS = 54322 }; /* a user and a group, neither root's nor this process's */

static char folder[] = "/tmp/zerod-test-XXXXXX";
static char path[64], why[256];

/* ---- the socket ---------------------------------------------------------------------------------------- */

static int start(struct listener *listener)
{
    return listener_init(listener, &(struct config_listen){.socket = path, .mode = 0640}, why, sizeof(why));
}

static void expect_start(struct listener *listener)
{
    if (start(listener) != 0)
        fail_msg("%s", why);
}

static int make_socket(int type)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);

    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&sa, sizeof(sa)), 0);
    return fd;
}

/* Return: the descriptor of a connected socket, or -errno. */
static int try_to_knock(void)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
    return connect(fd, (struct sockaddr *)&sa, sizeof(sa)) == 0 ? fd : -errno;
}

static int knock(void)
{
    int fd = try_to_knock();

    assert_true(fd >= 0);
    return fd;
}

static bool is_there(void)
{
    struct stat st;

    return lstat(path, &st) == 0;
}

static void test_listens(void **userdata)
{
    struct listener listener;
    struct stat st;
    mode_t old = umask(0077); /* must not change the mode in the configuration */
    int client, fd;
    char byte = 0;

    (void)userdata;
    expect_start(&listener);
    assert_int_equal(umask(old), 0077); /* the umask is restored */
    assert_int_equal(lstat(path, &st), 0);
    assert_true(S_ISSOCK(st.st_mode));
    assert_int_equal(st.st_mode & 07777, 0640);
    assert_int_equal(listener_accept(&listener), -EAGAIN);

    client = knock();
    fd = listener_accept(&listener);
    assert_true(fd >= 0);
    assert_true(fcntl(fd, F_GETFL) & O_NONBLOCK);
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(send(client, "x", 1, 0), 1);
    assert_int_equal(recv(fd, &byte, 1, 0), 1);
    assert_int_equal(byte, 'x');
    assert_int_equal(listener_accept(&listener), -EAGAIN);
    close(client);
    close(fd);

    listener_deinit(&listener);
    assert_false(is_there());
    listener_deinit(&listener); /* deinit of an empty listener */
}

static void test_stale_socket(void **userdata)
{
    struct listener listener;

    (void)userdata;
    close(make_socket(SOCK_SEQPACKET)); /* as a killed daemon leaves it */
    expect_start(&listener);
    close(knock());
    listener_deinit(&listener);
}

/* A second daemon neither replaces the first one's socket, nor removes it at its exit. */
static void test_socket_in_use(void **userdata)
{
    struct listener first, second;

    (void)userdata;
    expect_start(&first);
    assert_int_equal(start(&second), -EADDRINUSE);
    assert_non_null(strstr(why, "another daemon already listens there"));
    assert_non_null(strstr(why, path));
    assert_int_equal(second.fd, -1);
    assert_true(is_there());
    close(knock());
    listener_deinit(&first);
}

static void test_other_things_at_the_path(void **userdata)
{
    struct listener listener;
    FILE *file = fopen(path, "w");
    int fd;

    (void)userdata;
    assert_non_null(file);
    fclose(file);
    assert_int_equal(start(&listener), -EEXIST);
    assert_non_null(strstr(why, "no socket"));
    assert_true(is_there());
    assert_int_equal(unlink(path), 0);

    assert_int_equal(symlink("/nowhere", path), 0); /* the link is not followed */
    assert_int_equal(start(&listener), -EEXIST);
    assert_true(is_there());
    assert_int_equal(unlink(path), 0);

    fd = make_socket(SOCK_DGRAM);
    assert_int_equal(start(&listener), -EADDRINUSE);
    assert_non_null(strstr(why, "another kind"));
    assert_true(is_there());
    close(fd);
    assert_int_equal(unlink(path), 0);
}

static void test_no_folder(void **userdata)
{
    struct listener listener;
    struct config_listen config = {.socket = (char *)"/tmp/zerod-test-there-is-no-such-folder/socket", .mode = 0600};

    (void)userdata;
    assert_int_equal(listener_init(&listener, &config, why, sizeof(why)), -ENOENT);
    assert_non_null(strstr(why, config.socket));
    assert_non_null(strstr(why, "directory"));
    assert_int_equal(listener.fd, -1);
}

/* ---- a socket that outlives its daemon ----------------------------------------------------------------- */

enum { PASSED_FD = 3, FAR_AWAY = 100 };

/* For a child process. If the condition is false, returns an exit status that depends on the line. */
#define EXPECT(condition)                                                                                              \
    do                                                                                                                 \
        if (!(condition))                                                                                              \
            return __LINE__ % 250 + 1;                                                                                 \
    while (0)

/* Does what happens when a daemon is killed: the socket is passed to its successor, this process, under `name`. */
static int pass_socket(const char *name)
{
    struct listener listener;
    char pid[16];

    setenv("NOTIFY_SOCKET", "/nowhere", 1); /* no such service manager, so keep_put() fails */
    EXPECT(keep_init() == 0 && keep_is_on());
    EXPECT(start(&listener) == 0 && listener.path);
    EXPECT(dup2(listener.fd, FAR_AWAY) >= 0);
    listener_leave(&listener);
    listener_deinit(&listener);
    keep_deinit();
    EXPECT(is_there() && dup2(FAR_AWAY, PASSED_FD) >= 0);
    close(FAR_AWAY);
    snprintf(pid, sizeof(pid), "%d", getpid());
    setenv("LISTEN_PID", pid, 1);
    setenv("LISTEN_FDS", "1", 1);
    setenv("LISTEN_FDNAMES", name, 1);
    return keep_init();
}

static int take_own(void)
{
    struct listener listener;
    int r = pass_socket("listen");

    EXPECT(r == 0 && start(&listener) == 0);
    EXPECT(listener.fd == PASSED_FD && strcmp(listener.path, path) == 0);
    close(knock());
    r = listener_accept(&listener);
    EXPECT(r >= 0 && listener_accept(&listener) == -EAGAIN);
    listener_deinit(&listener);
    EXPECT(!is_there());
    return 0;
}

static int take_of_systemd(void)
{
    struct listener listener;
    int r = pass_socket("zerod@job.socket");

    EXPECT(r == 0 && start(&listener) == 0);
    EXPECT(listener.fd == PASSED_FD && !listener.path);
    listener_deinit(&listener);
    EXPECT(is_there());
    return unlink(path);
}

/* The path of the passed socket is gone, so the successor makes a new one. */
static int take_unreachable(void)
{
    struct listener listener;
    int r = pass_socket("listen");

    EXPECT(r == 0 && unlink(path) == 0 && start(&listener) == 0);
    EXPECT(listener.path && is_there());
    close(knock());
    r = listener_accept(&listener);
    EXPECT(r >= 0);
    listener_deinit(&listener);
    EXPECT(!is_there());
    return 0;
}

static void test_socket_outlives_its_daemon(void **userdata)
{
    static int (*const successors[])(void) = {take_own, take_of_systemd, take_unreachable};

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(successors); i++) {
        pid_t pid = fork();
        int status;

        if (pid == 0)
            _exit(successors[i]());
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
    }
}

/* ---- who may ------------------------------------------------------------------------------------------- */

static struct config_names names(char **items, size_t n)
{
    return (struct config_names){.items = items, .n_items = n};
}

static bool allows(const struct listener *listener, uid_t uid, gid_t gid, gid_t more)
{
    gid_t groups[] = {NOBODY + 10, more};

    return listener_allows(listener, &(struct listener_peer){.uid = uid, .gid = gid, .groups = groups, .n_groups = 2});
}

static bool is_admin(const struct listener *listener, uid_t uid, gid_t gid, gid_t more)
{
    gid_t groups[] = {NOBODY + 10, more};

    return listener_is_admin(listener,
                             &(struct listener_peer){.uid = uid, .gid = gid, .groups = groups, .n_groups = 2});
}

static void test_nobody_is_allowed(void **userdata)
{
    struct listener listener;

    (void)userdata;
    expect_start(&listener);
    assert_true(allows(&listener, 0, NOBODY, NOBODY));
    assert_true(is_admin(&listener, 0, NOBODY, NOBODY));
    assert_true(allows(&listener, geteuid(), NOBODY, NOBODY));
    assert_true(is_admin(&listener, geteuid(), NOBODY, NOBODY));
    assert_false(allows(&listener, NOBODY, NOBODY, NOBODY));
    assert_false(allows(&listener, NOBODY, 0, 0)); /* the group root is not the user root */
    assert_false(is_admin(&listener, NOBODY, NOBODY, NOBODY));
    listener_deinit(&listener);
}

static void test_lists(void **userdata)
{
    char *users[] = {(char *)"54321"}, *groups[] = {(char *)"54322"};
    char *admins[] = {(char *)"54331"}, *admin_groups[] = {(char *)"54332"};
    struct config_listen config = {.socket = path,
                                   .mode = 0600,
                                   .allow_users = names(users, 1),
                                   .allow_groups = names(groups, 1),
                                   .admin_users = names(admins, 1),
                                   .admin_groups = names(admin_groups, 1)};
    struct listener listener;

    (void)userdata;
    assert_int_equal(listener_init(&listener, &config, why, sizeof(why)), 0);
    assert_true(allows(&listener, NOBODY, 7, 7));
    assert_true(allows(&listener, 7, OTHERS, 7));
    assert_true(allows(&listener, 7, 7, OTHERS));            /* a supplementary group */
    assert_false(allows(&listener, OTHERS, NOBODY, NOBODY)); /* a user's number does not count as a group */
    assert_false(allows(&listener, 7, 7, 7));
    assert_false(is_admin(&listener, NOBODY, OTHERS, OTHERS));
    assert_true(is_admin(&listener, 54331, 7, 7));
    assert_true(is_admin(&listener, 7, 54332, 7));
    assert_true(is_admin(&listener, 7, 7, 54332));
    assert_true(allows(&listener, 54331, 7, 7)); /* a user who may change the job may also look at it */
    assert_true(allows(&listener, 7, 7, 54332));
    listener_deinit(&listener);
}

static void test_names_are_looked_up(void **userdata)
{
    char *root[] = {(char *)"root"}, *wrong[] = {(char *)"root", (char *)"there-is-no-such-name"};
    static const char *const bad_ids[] = {"4294967295", "99999999999999999999", "-1", "12x", "+5", ""};
    struct config_listen config = {.socket = path, .mode = 0600, .allow_groups = names(root, 1)};
    struct listener listener;

    (void)userdata;
    assert_int_equal(listener_init(&listener, &config, why, sizeof(why)), 0);
    assert_int_equal(listener.allow.n_gids, 1);
    assert_int_equal(listener.allow.gids[0], 0);
    listener_deinit(&listener);

    config.allow_users = names(wrong, 2);
    assert_int_equal(listener_init(&listener, &config, why, sizeof(why)), -ENOENT);
    assert_non_null(strstr(why, "there is no user \"there-is-no-such-name\""));
    config.allow_users = names(root, 1);
    config.admin_groups = names(wrong, 2);
    assert_int_equal(listener_init(&listener, &config, why, sizeof(why)), -ENOENT);
    assert_non_null(strstr(why, "there is no group \"there-is-no-such-name\""));
    config.admin_groups = names(NULL, 0);
    for (size_t i = 0; i < ARRAY_SIZE(bad_ids); i++) {
        char *bad[] = {(char *)(uintptr_t)bad_ids[i]};

        config.allow_users = names(bad, 1);
        assert_int_equal(listener_init(&listener, &config, why, sizeof(why)), -ENOENT);
        assert_int_equal(listener.fd, -1);
    }
    assert_false(is_there());
}

/* Return: whether a process with this user and these groups can connect to the socket. Needs root. */
static bool opens(uid_t uid, gid_t gid, gid_t further)
{
    pid_t pid = fork();
    int status;

    assert_true(pid >= 0);
    if (pid == 0)
        _exit(setgroups(1, &further) == 0 && setresgid(gid, gid, gid) == 0 && setresuid(uid, uid, uid) == 0 &&
                      try_to_knock() >= 0
                  ? 0
                  : 1);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status == 0;
}

/* All names of all lists can open the socket, with the rights of the mode. */
static void test_named_can_open_it(void **userdata)
{
    char *users[] = {(char *)"54321"}, *groups[] = {(char *)"54322", (char *)"54323"};
    char *admins[] = {(char *)"54331"}, *admin_groups[] = {(char *)"54332", (char *)"54322"};
    struct config_listen config = {.socket = path,
                                   .mode = 0660,
                                   .allow_users = names(users, 1),
                                   .allow_groups = names(groups, 2),
                                   .admin_users = names(admins, 1),
                                   .admin_groups = names(admin_groups, 2)};
    struct listener listener;
    struct stat st;

    (void)userdata;
    if (geteuid() != 0)
        skip();
    assert_int_equal(chmod(folder, 0755), 0);
    assert_int_equal(listener_init(&listener, &config, why, sizeof(why)), 0);
    assert_int_equal(lstat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0660);
    assert_true(opens(54321, 7, 7) && opens(54331, 7, 7));
    assert_true(opens(7, 54322, 7) && opens(7, 7, 54323) && opens(7, 7, 54332));
    assert_false(opens(7, 7, 7));
    assert_false(opens(54322, 7, 7)); /* a group's number does not count as a user */
    listener_deinit(&listener);

    config.mode = 0600;
    assert_int_equal(listener_init(&listener, &config, why, sizeof(why)), 0);
    assert_false(opens(54321, 7, 7) || opens(7, 54322, 7));
    listener_deinit(&listener);
}

/* ---- who is it ----------------------------------------------------------------------------------------- */

static void test_peer(void **userdata)
{
    struct listener_peer peer;
    gid_t *groups = calloc(NGROUPS_MAX, sizeof(*groups));
    int pair[2], n = getgroups(NGROUPS_MAX, groups), file = open("/dev/null", O_RDONLY | O_CLOEXEC);

    (void)userdata;
    assert_true(groups && n >= 0 && file >= 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    assert_int_equal(listener_peer_init(&peer, pair[0]), 0);
    assert_int_equal(peer.pid, getpid());
    assert_int_equal(peer.uid, geteuid());
    assert_int_equal(peer.gid, getegid());
    assert_int_equal(peer.n_groups, n);
    for (int i = 0; i < n; i++)
        assert_int_equal(peer.groups[i], groups[i]);
    listener_peer_deinit(&peer);
    assert_int_equal(peer.n_groups, 0);
    listener_peer_deinit(&peer);
    assert_int_equal(listener_peer_init(&peer, file), -ENOTSOCK);
    listener_peer_deinit(&peer);
    close(pair[0]);
    close(pair[1]);
    close(file);
    free(groups);
}

static int make_folder(void **userdata)
{
    (void)userdata;
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof(path), "%s/socket", folder);
    return 0;
}

static int remove_folder(void **userdata)
{
    (void)userdata;
    return rmdir(folder); /* the folder is empty */
}

TEST_GROUP(listener)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_listens),
        cmocka_unit_test(test_stale_socket),
        cmocka_unit_test(test_socket_in_use),
        cmocka_unit_test(test_other_things_at_the_path),
        cmocka_unit_test(test_no_folder),
        cmocka_unit_test(test_socket_outlives_its_daemon),
        cmocka_unit_test(test_nobody_is_allowed),
        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_names_are_looked_up),
        cmocka_unit_test(test_named_can_open_it),
        cmocka_unit_test(test_peer),
    };

    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
