/* SPDX-License-Identifier: Apache-2.0 */

/* The engine's writev(): which bytes it sends as pages, which it copies, and what it returns to gloo. */

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/segment.h"
#include "engine/gloo-pages.h"

enum { N_BYTES = 64 * 4096, FILL = 0x5a };

struct fixture {
    struct segment segment;
    int sockets[2]; /* from, to; both nonblocking */
};

static void begin(struct fixture *f)
{
    assert_int_equal(segment_init(&f->segment, "test", N_BYTES), 0);
    for (size_t i = 0; i < N_BYTES; i++)
        f->segment.map[i] = (uint8_t)(i * 7 + i / 4096);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, f->sockets), 0);
    pages_add((const char *)f->segment.map, N_BYTES, f->segment.fd);
}

static void end(struct fixture *f)
{
    pages_remove((const char *)f->segment.map);
    close(f->sockets[0]);
    close(f->sockets[1]);
    segment_deinit(&f->segment);
}

static ssize_t send_parts(int fd, const char *header, size_t n_header, const void *bytes, size_t n_bytes)
{
    struct iovec parts[2] = {{(void *)header, n_header}, {(void *)bytes, n_bytes}};

    return n_header > 0 ? writev(fd, parts, 2) : writev(fd, parts + 1, 1);
}

static void expect_received(struct fixture *f, const void *expected, size_t n)
{
    char got[3 * 4096];

    assert_true(n <= sizeof(got));
    assert_int_equal(recv(f->sockets[1], got, n, 0), n);
    assert_memory_equal(got, expected, n);
}

/*
 * Bytes of a segment are sent as pages, with and without a header, and unaligned. So a later change of these bytes
 * reaches the receiver.
 */
static void test_pages(void **state)
{
    struct fixture f;
    uint8_t *bytes;

    begin(&f);
    bytes = f.segment.map + 4096 + 5;
    assert_int_equal(send_parts(f.sockets[0], "header", 6, bytes, 9000), 6 + 9000);
    assert_int_equal(send_parts(f.sockets[0], NULL, 0, bytes + 9000, 100), 100);
    memset(bytes + 17, FILL, 5000);
    expect_received(&f, "header", 6);
    expect_received(&f, bytes, 9000);
    expect_received(&f, bytes + 9000, 100);
    end(&f);
}

/* Other memory, and memory of a removed segment, is copied. */
static void test_copies(void **state)
{
    struct fixture f;
    char copy[100];

    begin(&f);
    memcpy(copy, f.segment.map, sizeof(copy));
    assert_int_equal(send_parts(f.sockets[0], "other", 5, copy, sizeof(copy)), 5 + sizeof(copy));
    pages_remove((const char *)f.segment.map);
    assert_int_equal(send_parts(f.sockets[0], "other", 5, f.segment.map, sizeof(copy)), 5 + sizeof(copy));
    memset(f.segment.map, FILL, sizeof(copy));
    for (unsigned i = 0; i < 2; i++) {
        expect_received(&f, "other", 5);
        expect_received(&f, copy, sizeof(copy));
    }
    end(&f);
}

/* When the socket is full, writev() returns what was sent, then EAGAIN. No byte is lost or sent twice. */
static void test_full(void **state)
{
    struct fixture f;
    size_t sent = 0, received = 0;
    ssize_t n;
    uint8_t got[4096];

    begin(&f);
    while (sent < N_BYTES) {
        n = send_parts(f.sockets[0], NULL, 0, f.segment.map + sent, N_BYTES - sent);
        if (n > 0) {
            sent += (size_t)n;
            continue;
        }
        assert_true(n == -1 && errno == EAGAIN);
        if (sent == received)
            fail_msg("the socket is empty, and takes nothing");
        n = recv(f.sockets[1], got, sizeof(got), 0);
        assert_in_range(n, 1, sizeof(got));
        assert_memory_equal(got, f.segment.map + received, n);
        received += (size_t)n;
    }
    for (; received < N_BYTES; received += (size_t)n) {
        n = recv(f.sockets[1], got, sizeof(got), 0);
        assert_in_range(n, 1, sizeof(got));
        assert_memory_equal(got, f.segment.map + received, n);
    }
    end(&f);
}

/* An error of the header is returned at once. An error of the bytes is returned by the next call. */
static void test_errors(void **state)
{
    struct fixture f;

    begin(&f);
    pages_add((const char *)f.segment.map, N_BYTES, -1);
    assert_int_equal(send_parts(f.sockets[0], "header", 6, f.segment.map, 10), 6);
    assert_int_equal(send_parts(f.sockets[0], NULL, 0, f.segment.map, 10), -1);
    assert_int_equal(errno, EBADF);
    expect_received(&f, "header", 6);
    while (send(f.sockets[0], "x", 1, 0) == 1)
        ;
    assert_int_equal(send_parts(f.sockets[0], "header", 6, f.segment.map, 10), -1);
    assert_int_equal(errno, EAGAIN);
    end(&f);
}

/* sendfile() refuses a file that is open for appending. */
static void test_refused(void **state)
{
    _cleanup_close_ int file = memfd_create("to", MFD_CLOEXEC);
    struct fixture f;
    uint8_t got[5000];

    begin(&f);
    assert_int_equal(fcntl(file, F_SETFL, O_APPEND), 0);
    assert_int_equal(send_parts(file, NULL, 0, f.segment.map + 3, sizeof(got)), sizeof(got));
    assert_int_equal(pread(file, got, sizeof(got), 0), sizeof(got));
    assert_memory_equal(got, f.segment.map + 3, sizeof(got));
    end(&f);
}

/* An address belongs to the segment that contains it, not to its neighbours. */
static void test_several(void **state)
{
    struct fixture f[2];

    for (unsigned i = 0; i < 2; i++)
        begin(&f[i]);
    memset(f[1].segment.map, FILL, N_BYTES);
    for (unsigned i = 0; i < 2; i++) {
        assert_int_equal(send_parts(f[0].sockets[0], NULL, 0, f[i].segment.map + N_BYTES - 50, 50), 50);
        expect_received(&f[0], f[i].segment.map + N_BYTES - 50, 50);
    }
    for (unsigned i = 0; i < 2; i++)
        end(&f[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages),   cmocka_unit_test(test_copies),  cmocka_unit_test(test_full),
        cmocka_unit_test(test_refused), cmocka_unit_test(test_several), cmocka_unit_test(test_errors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
