/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Descriptors are added to epoll before libuv's loop adds them, because libuv aborts if epoll has no memory for a new
 * descriptor. The test replaces epoll_ctl(), for libuv as well.
 */

#include <errno.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cmocka.h>

#include "core/base/open-files.h"
#include "daemon/link/connection.h"
#include "daemon/link/secure-stream.h"
#include "tests/group.h"

static bool is_short; /* whether adding a descriptor to epoll fails */

__attribute__((visibility("default"))) int epoll_ctl(int epoll, int op, int fd, struct epoll_event *event)
{
    int r = (int)syscall(SYS_epoll_ctl, epoll, op, fd, event);

    if (r == 0 && op == EPOLL_CTL_ADD && is_short) {
        syscall(SYS_epoll_ctl, epoll, EPOLL_CTL_DEL, fd, event);
        errno = ENOMEM;
        return -1;
    }
    return r;
}

/* Turns the loop once while epoll has no memory for new descriptors. */
static void run_short(uv_loop_t *loop)
{
    is_short = true;
    uv_run(loop, UV_RUN_NOWAIT);
    is_short = false;
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    (void)status;
    *(int *)poll->data = events;
}

struct pair {
    uv_loop_t loop;
    uv_poll_t poll;
    int fds[2], events;
};

static void open_pair(struct pair *p)
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, p->fds), 0);
    assert_int_equal(uv_loop_init(&p->loop), 0);
    assert_int_equal(uv_poll_init(&p->loop, &p->poll, p->fds[0]), 0);
    p->events = 0;
    p->poll.data = &p->events;
    assert_int_equal(open_files_watch(&p->poll, UV_READABLE, on_poll), 0);
    uv_run(&p->loop, UV_RUN_NOWAIT); /* adds libuv's own descriptors */
}

static void close_pair(struct pair *p)
{
    uv_close((uv_handle_t *)&p->poll, NULL);
    uv_run(&p->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&p->loop), 0);
    close(p->fds[0]);
    close(p->fds[1]);
}

static void test_watched_before_the_round(void **state)
{
    static const int events[] = {UV_READABLE, UV_READABLE | UV_WRITABLE, UV_READABLE};
    struct pair p;

    (void)state;
    open_pair(&p);
    for (size_t i = 0; i < ARRAY_SIZE(events); i++) { /* begins to watch, then changes the events */
        assert_int_equal(open_files_watch(&p.poll, events[i], on_poll), 0);
        run_short(&p.loop);
    }
    assert_int_equal(send(p.fds[1], "x", 1, 0), 1);
    run_short(&p.loop);
    assert_int_equal(p.events, UV_READABLE);
    uv_poll_stop(&p.poll);
    assert_int_equal(open_files_watch(&p.poll, UV_READABLE, on_poll), 0); /* watches again */
    run_short(&p.loop);
    close_pair(&p);
}

static void test_refused(void **state)
{
    struct pair p;

    (void)state;
    open_pair(&p);
    for (int i = 0; i < 2; i++) { /* the first time, then with a descriptor already watched */
        is_short = true;
        assert_int_equal(open_files_watch(&p.poll, UV_READABLE, on_poll), -ENOMEM);
        is_short = false;
        assert_false(uv_is_active((uv_handle_t *)&p.poll));
        run_short(&p.loop);
        assert_int_equal(open_files_watch(&p.poll, UV_READABLE, on_poll), 0);
        uv_run(&p.loop, UV_RUN_NOWAIT);
    }
    close_pair(&p);
}

/* ---- links between nodes ------------------------------------------------------------------------------- */

struct link {
    uv_loop_t loop;
    uv_tcp_t listener;
    struct connection_options options;
    struct connection *accepted;
    struct sockaddr_in address;
    int r;
};

static void on_connection(uv_stream_t *stream, int status)
{
    struct link *link = stream->data;

    assert_int_equal(status, 0);
    link->r = connection_accept(&link->accepted, &link->options, stream);
}

static void on_failed(struct connection *connection, enum connection_fault fault, const char *what)
{
    (void)fault;
    (void)what;
    connection_close(connection);
}

static void ignore(struct connection *connection)
{
    (void)connection;
}

static void test_link(void **state)
{
    static const struct connection_ops ops = {
        .met = ignore, .drained = ignore, .writable = ignore, .failed = on_failed, .closed = ignore};
    static const struct secure_stream_key key;
    struct link link = {.options = {.ops = &ops, .key = &key, .job = "job", .max_frame_bytes = 1024, .owner = &link},
                        .address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}}};
    struct connection *opened;
    int n = sizeof(link.address);

    (void)state;
    assert_int_equal(uv_loop_init(&link.loop), 0);
    link.options.loop = &link.loop;
    assert_int_equal(uv_tcp_init(&link.loop, &link.listener), 0);
    link.listener.data = &link;
    assert_int_equal(uv_tcp_bind(&link.listener, (struct sockaddr *)&link.address, 0), 0);
    assert_int_equal(uv_listen((uv_stream_t *)&link.listener, 1, on_connection), 0);
    assert_int_equal(uv_tcp_getsockname(&link.listener, (struct sockaddr *)&link.address, &n), 0);
    uv_run(&link.loop, UV_RUN_NOWAIT);

    is_short = true;
    assert_int_equal(connection_open(&opened, &link.options, (struct sockaddr *)&link.address), -ENOMEM);
    is_short = false;
    uv_run(&link.loop, UV_RUN_NOWAIT);
    if (link.accepted)
        connection_close(steal_ptr(link.accepted));
    uv_run(&link.loop, UV_RUN_NOWAIT);

    assert_int_equal(connection_open(&opened, &link.options, (struct sockaddr *)&link.address), 0);
    while (!link.accepted && link.r == 0)
        run_short(&link.loop); /* accepts the other end, which cannot be watched */
    assert_int_equal(link.r, -ENOMEM);
    connection_close(opened);
    uv_close((uv_handle_t *)&link.listener, NULL);
    uv_run(&link.loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&link.loop), 0);
}

TEST_GROUP(open_files)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_watched_before_the_round),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_link),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
