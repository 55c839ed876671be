/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/wire/frame.h"
#include "tests/group.h"
#include "tests/programs/held.h"

/* A pair of connected sockets, and receivers of both kinds. Each test must close its descriptors. */
struct fixture {
    int ours, peer;
    struct frame_batch batch;
    struct frame_buffer buffer;
    size_t n_open;
};

static int setup(void **state)
{
    static struct fixture f;
    int pair[2];

    f = (struct fixture){.n_open = count_fds()};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) < 0)
        return -1;
    f.ours = pair[0];
    f.peer = pair[1];
    *state = &f;
    return frame_batch_init(&f.batch) || frame_buffer_init(&f.buffer);
}

static void hang_up(int *fd)
{
    close(steal_fd(fd));
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    frame_batch_deinit(&f->batch);
    frame_buffer_deinit(&f->buffer);
    closep(&f->ours);
    closep(&f->peer);
    return count_fds() == f->n_open ? 0 : -1;
}

static void send_text(int fd, const char *text)
{
    assert_int_equal(frame_send(fd, text, strlen(text), NULL, 0), 0);
}

static void assert_packet(const struct frame_packet *packet, const char *text)
{
    assert_int_equal(packet->status, 0);
    assert_int_equal(packet->n_bytes, strlen(text));
    assert_memory_equal(packet->data, text, packet->n_bytes);
}

/* Sends more than FRAME_MAX_BYTES, or descriptors, which frame_send() refuses. */
static void send_raw(int fd, size_t n_bytes, const int *fds, size_t n_fds)
{
    _cleanup_free_ uint8_t *data = calloc(1, MAX(n_bytes, (size_t)1));
    struct iovec place = {.iov_base = data, .iov_len = n_bytes};
    union {
        struct cmsghdr header;
        uint8_t bytes[CMSG_SPACE(32 * sizeof(int))];
    } control = {0};
    struct msghdr header = {.msg_iov = &place, .msg_iovlen = 1};
    int large = 1 << 20;

    assert_non_null(data);
    if (n_fds > 0) {
        control.header.cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        memcpy(CMSG_DATA(&control.header), fds, n_fds * sizeof(int));
        header.msg_control = &control;
        header.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
    }
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &large, sizeof(large)), 0);
    assert_int_equal(sendmsg(fd, &header, MSG_NOSIGNAL), n_bytes);
}

/* ---- receiving many ------------------------------------------------------------------------------------ */

static void test_batch(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(frame_receive(f->ours, &f->batch), FRAME_AGAIN);
    assert_int_equal(f->batch.n_packets, 0);

    send_text(f->peer, "one");
    send_text(f->peer, "second");
    assert_int_equal(frame_receive(f->ours, &f->batch), 0);
    assert_int_equal(f->batch.n_packets, 2);
    assert_packet(&f->batch.packets[0], "one");
    assert_packet(&f->batch.packets[1], "second");
    assert_false(f->batch.more);
    assert_false(f->batch.eof);
    assert_int_equal(frame_receive(f->ours, &f->batch), FRAME_AGAIN);
}

static void test_batch_is_bounded(void **state)
{
    struct fixture *f = *state;
    char text[4] = "p00";

    for (unsigned i = 0; i < FRAME_BATCH + 3; i++) {
        text[1] = 'a' + i;
        send_text(f->peer, text);
    }
    assert_int_equal(frame_receive(f->ours, &f->batch), 0);
    assert_int_equal(f->batch.n_packets, FRAME_BATCH);
    assert_true(f->batch.more);
    for (unsigned i = 0; i < FRAME_BATCH; i++)
        assert_int_equal(f->batch.packets[i].data[1], 'a' + i);
    assert_int_equal(frame_receive(f->ours, &f->batch), 0);
    assert_int_equal(f->batch.n_packets, 3);
    assert_false(f->batch.more);
    assert_int_equal(f->batch.packets[0].data[1], 'a' + FRAME_BATCH);
}

static void test_batch_of_large_packets(void **state)
{
    struct fixture *f = *state;
    _cleanup_free_ uint8_t *data = malloc(FRAME_MAX_BYTES);
    int large = 8 << 20;
    unsigned n = 0;

    assert_non_null(data);
    /* as large as the system allows, because the default holds only one packet */
    assert_int_equal(setsockopt(f->peer, SOL_SOCKET, SO_SNDBUF, &large, sizeof(large)), 0);
    for (; n < 4; n++) {
        memset(data, n + 1, FRAME_MAX_BYTES);
        if (frame_send(f->peer, data, FRAME_MAX_BYTES, NULL, 0) != 0)
            break;
    }
    assert_true(n > 0);
    assert_int_equal(frame_receive(f->ours, &f->batch), 0);
    assert_int_equal(f->batch.n_packets, n);
    for (unsigned i = 0; i < n; i++) {
        memset(data, i + 1, FRAME_MAX_BYTES);
        assert_int_equal(f->batch.packets[i].status, 0);
        assert_int_equal(f->batch.packets[i].n_bytes, FRAME_MAX_BYTES);
        assert_memory_equal(f->batch.packets[i].data, data, FRAME_MAX_BYTES);
    }
}

static void test_batch_too_large(void **state)
{
    struct fixture *f = *state;

    send_raw(f->peer, FRAME_MAX_BYTES + 1, NULL, 0);
    send_raw(f->peer, FRAME_MAX_BYTES + 1000, NULL, 0);
    send_text(f->peer, "after");
    assert_int_equal(frame_receive(f->ours, &f->batch), 0);
    assert_int_equal(f->batch.n_packets, 3);
    assert_int_equal(f->batch.packets[0].status, FRAME_E_TOO_LARGE);
    assert_int_equal(f->batch.packets[1].status, FRAME_E_TOO_LARGE);
    assert_packet(&f->batch.packets[2], "after");
}

static void test_batch_takes_no_descriptor(void **state)
{
    struct fixture *f = *state;
    int fds[32], pipes[2];
    size_t n_open;
    uint8_t byte;

    assert_int_equal(pipe2(pipes, O_CLOEXEC | O_NONBLOCK), 0);
    for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
        fds[i] = pipes[1];
    n_open = count_fds();
    send_text(f->peer, "before");
    send_raw(f->peer, 10, fds, 1);
    send_raw(f->peer, 10, fds, ARRAY_SIZE(fds));
    send_text(f->peer, "after");
    assert_int_equal(frame_receive(f->ours, &f->batch), 0);
    assert_int_equal(f->batch.n_packets, 4);
    assert_packet(&f->batch.packets[0], "before");
    assert_int_equal(f->batch.packets[1].status, FRAME_E_FDS);
    assert_int_equal(f->batch.packets[1].n_bytes, 10);
    assert_int_equal(f->batch.packets[2].status, FRAME_E_FDS);
    assert_packet(&f->batch.packets[3], "after");
    assert_int_equal(count_fds(), n_open);

    /* no process holds the sent descriptor, so the pipe ends when this end is closed */
    hang_up(&pipes[1]);
    assert_int_equal(read(pipes[0], &byte, 1), 0);
    hang_up(&pipes[0]);
}

static void test_batch_end(void **state)
{
    struct fixture *f = *state;

    send_text(f->peer, "last");
    hang_up(&f->peer);
    assert_int_equal(frame_receive(f->ours, &f->batch), 0);
    assert_int_equal(f->batch.n_packets, 1);
    assert_packet(&f->batch.packets[0], "last");
    assert_true(f->batch.eof);
    assert_int_equal(frame_receive(f->ours, &f->batch), FRAME_EOF);
    assert_int_equal(frame_receive(f->ours, &f->batch), FRAME_EOF);
}

/* If the peer closes before it read the answers, its own packets can still be read. */
static void test_batch_reset(void **state)
{
    struct fixture *f = *state;

    send_text(f->ours, "unread");
    send_text(f->peer, "push");
    hang_up(&f->peer);
    assert_int_equal(frame_receive(f->ours, &f->batch), 0);
    assert_int_equal(f->batch.n_packets, 1);
    assert_packet(&f->batch.packets[0], "push");
    assert_int_equal(frame_receive(f->ours, &f->batch), FRAME_EOF);
}

static void test_batch_empty_packet_is_the_end(void **state)
{
    struct fixture *f = *state;

    send_text(f->peer, "first");
    send_raw(f->peer, 0, NULL, 0);
    send_text(f->peer, "never");
    assert_int_equal(frame_receive(f->ours, &f->batch), 0);
    assert_int_equal(f->batch.n_packets, 1);
    assert_true(f->batch.eof);
    send_raw(f->peer, 0, NULL, 0);
    assert_int_equal(frame_receive(f->ours, &f->batch), FRAME_EOF);
    assert_int_equal(f->batch.n_packets, 0);
}

static void test_batch_bad_socket(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(frame_receive(-1, &f->batch), -EBADF);
    assert_int_equal(frame_receive_fds(-1, &f->buffer), -EBADF);
    assert_int_equal(frame_send(-1, "x", 1, NULL, 0), -EBADF);
}

/* ---- receiving one, with descriptors ------------------------------------------------------------------- */

static void test_buffer(void **state)
{
    struct fixture *f = *state;
    int pipes[2], fds[FRAME_MAX_FDS], taken;
    struct stat a, b;
    size_t n_open;

    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), FRAME_AGAIN);
    assert_int_equal(pipe2(pipes, O_CLOEXEC), 0);
    for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
        fds[i] = pipes[i % 2];
    n_open = count_fds();
    assert_int_equal(frame_send(f->peer, "formed", 6, fds, ARRAY_SIZE(fds)), 0);
    send_text(f->peer, "bare");
    assert_int_equal(count_fds(), n_open);

    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), 0);
    assert_int_equal(f->buffer.n_bytes, 6);
    assert_memory_equal(f->buffer.data, "formed", 6);
    assert_int_equal(f->buffer.n_fds, FRAME_MAX_FDS);
    for (size_t i = 0; i < FRAME_MAX_FDS; i++) {
        assert_int_equal(fcntl(f->buffer.fds[i], F_GETFD), FD_CLOEXEC);
        assert_int_equal(fstat(f->buffer.fds[i], &a), 0);
        assert_int_equal(fstat(fds[i], &b), 0);
        assert_int_equal(a.st_ino, b.st_ino);
    }
    assert_int_equal(count_fds(), n_open + FRAME_MAX_FDS);

    /* the next receive closes the descriptors that the receiver did not take */
    taken = steal_fd(&f->buffer.fds[3]);
    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), 0);
    assert_int_equal(f->buffer.n_bytes, 4);
    assert_int_equal(f->buffer.n_fds, 0);
    assert_int_equal(count_fds(), n_open + 1);
    assert_int_equal(fstat(taken, &a), 0);
    close(taken);
    close(pipes[0]);
    close(pipes[1]);
}

static void test_buffer_closes_at_the_end(void **state)
{
    struct fixture *f = *state;
    size_t n_open = count_fds();
    int fds[2] = {f->peer, f->peer};

    assert_int_equal(frame_send(f->peer, "x", 1, fds, 2), 0);
    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), 0);
    assert_int_equal(count_fds(), n_open + 2);
    frame_buffer_deinit(&f->buffer);
    assert_int_equal(count_fds(), n_open);
    frame_buffer_deinit(&f->buffer);
}

static void test_buffer_too_many_descriptors(void **state)
{
    struct fixture *f = *state;
    int fds[FRAME_MAX_FDS + 1];
    size_t n_open = count_fds();

    for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
        fds[i] = f->peer;
    send_raw(f->peer, 10, fds, ARRAY_SIZE(fds));
    send_text(f->peer, "after");
    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), FRAME_E_FDS);
    assert_int_equal(f->buffer.n_fds, 0);
    assert_int_equal(count_fds(), n_open);
    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), 0);
    assert_int_equal(f->buffer.n_bytes, 5);
}

/* If the process has no free descriptor, the kernel drops the packet's descriptors. The packet must be refused. */
static void test_buffer_no_descriptor_left(void **state)
{
    struct fixture *f = *state;
    struct rlimit limit, none;
    int fds[2] = {f->peer, f->peer};
    int r;

    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    assert_int_equal(frame_send(f->peer, "x", 1, fds, 2), 0);
    none = (struct rlimit){.rlim_cur = MAX(f->ours, f->peer) + 1, .rlim_max = limit.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    r = frame_receive_fds(f->ours, &f->buffer);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    assert_int_equal(r, FRAME_E_FDS);
    assert_int_equal(f->buffer.n_fds, 0);
}

static void test_buffer_sizes(void **state)
{
    struct fixture *f = *state;

    send_raw(f->peer, FRAME_MAX_BYTES, NULL, 0);
    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), 0);
    assert_int_equal(f->buffer.n_bytes, FRAME_MAX_BYTES);
    send_raw(f->peer, FRAME_MAX_BYTES + 1, (int[]){f->peer}, 1);
    send_raw(f->peer, FRAME_MAX_BYTES + 2, NULL, 0);
    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), FRAME_E_TOO_LARGE);
    assert_int_equal(f->buffer.n_fds, 0);
    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), FRAME_E_TOO_LARGE);
    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), FRAME_AGAIN);
}

/* The daemon refuses and closes before it read all pushes. The refusal must arrive. */
static void test_buffer_reset(void **state)
{
    struct fixture *f = *state;

    send_text(f->ours, "push");
    send_text(f->peer, "refused");
    hang_up(&f->peer);
    assert_int_equal(frame_send(f->ours, "push", 4, NULL, 0), FRAME_EOF);
    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), 0);
    assert_int_equal(f->buffer.n_bytes, 7);
    assert_int_equal(frame_receive_fds(f->ours, &f->buffer), FRAME_EOF);
}

/* ---- sending ------------------------------------------------------------------------------------------- */

static size_t fill(int fd, const void *data, size_t n_bytes)
{
    size_t n = 0;
    int r;

    while ((r = frame_send(fd, data, n_bytes, NULL, 0)) == 0)
        n++;
    assert_int_equal(r, FRAME_AGAIN);
    return n;
}

static void test_send_whole_or_not(void **state)
{
    struct fixture *f = *state;
    uint8_t data[5000];
    size_t n;

    memset(data, 7, sizeof(data));
    n = fill(f->peer, data, sizeof(data));
    assert_true(n > 1);
    for (size_t i = 0; i < n; i += f->batch.n_packets) {
        assert_int_equal(frame_receive(f->ours, &f->batch), 0);
        for (size_t k = 0; k < f->batch.n_packets; k++)
            assert_int_equal(f->batch.packets[k].n_bytes, sizeof(data));
    }
    assert_int_equal(frame_receive(f->ours, &f->batch), FRAME_AGAIN);
}

static void test_send_many(void **state)
{
    static const char *const texts[] = {"push 1", "push 22", "push 333"};
    struct frame_packet packets[ARRAY_SIZE(texts)];
    struct fixture *f = *state;
    size_t n_sent;

    for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
        packets[i] = (struct frame_packet){.data = (const uint8_t *)texts[i], .n_bytes = strlen(texts[i])};
    for (size_t n = 1; n <= ARRAY_SIZE(texts); n++) {
        assert_int_equal(frame_send_many(f->peer, packets, n, &n_sent), 0);
        assert_int_equal(n_sent, n);
        assert_int_equal(frame_receive(f->ours, &f->batch), 0);
        assert_int_equal(f->batch.n_packets, n);
        for (size_t i = 0; i < n; i++)
            assert_packet(&f->batch.packets[i], texts[i]);
    }
}

/* If not all packets fit, n_sent is the number that was sent, so the caller can send the rest once. */
static void test_send_many_into_a_full_socket(void **state)
{
    struct frame_packet packets[FRAME_BATCH];
    struct fixture *f = *state;
    uint8_t data[5000];
    size_t n = 0, n_sent, n_received = 0;
    int r = 0;

    memset(data, 7, sizeof(data));
    for (size_t i = 0; i < FRAME_BATCH; i++)
        packets[i] = (struct frame_packet){.data = data, .n_bytes = sizeof(data) - i};
    for (; r == 0; n += n_sent)
        r = frame_send_many(f->peer, packets, FRAME_BATCH, &n_sent);
    assert_int_equal(r, FRAME_AGAIN);
    assert_int_equal(frame_send_many(f->peer, packets, FRAME_BATCH, &n_sent), FRAME_AGAIN);
    assert_int_equal(n_sent, 0);
    for (; n_received < n; n_received += f->batch.n_packets) {
        assert_int_equal(frame_receive(f->ours, &f->batch), 0);
        for (size_t k = 0; k < f->batch.n_packets; k++)
            assert_int_equal(f->batch.packets[k].n_bytes, sizeof(data) - (n_received + k) % FRAME_BATCH);
    }
    assert_int_equal(frame_receive(f->ours, &f->batch), FRAME_AGAIN);
    hang_up(&f->ours);
    assert_int_equal(frame_send_many(f->peer, packets, FRAME_BATCH, &n_sent), FRAME_EOF);
}

static void test_send_without_signal(void **state)
{
    struct fixture *f = *state;
    struct frame_queue queue;

    hang_up(&f->peer);
    signal(SIGPIPE, SIG_DFL);
    assert_int_equal(frame_send(f->ours, "x", 1, NULL, 0), FRAME_EOF);
    frame_queue_init(&queue, 4, 100);
    assert_int_equal(frame_queue_send(&queue, f->ours, "x", 1, NULL, 0), FRAME_EOF);
    assert_true(frame_queue_is_empty(&queue));
    frame_queue_deinit(&queue);
}

/* ---- the queue ----------------------------------------------------------------------------------------- */

static void test_queue_keeps_order(void **state)
{
    struct fixture *f = *state;
    struct frame_queue queue;
    uint8_t data[4000] = {0};
    size_t n_queued = 0, n = 0;
    int r;

    frame_queue_init(&queue, 1000, 1 << 20);
    for (uint32_t i = 0; n_queued < 50; i++, n++) {
        memcpy(data, &i, sizeof(i));
        assert_int_equal(frame_queue_send(&queue, f->ours, data, sizeof(data), NULL, 0), 0);
        n_queued += !frame_queue_is_empty(&queue);
    }
    assert_int_equal(queue.n_packets, 50);
    assert_int_equal(queue.n_bytes, 50 * sizeof(data));
    assert_int_equal(frame_queue_flush(&queue, f->ours), FRAME_AGAIN);
    for (uint32_t i = 0; i < n;) {
        r = frame_receive(f->peer, &f->batch);
        assert_int_equal(r, 0);
        for (size_t k = 0; k < f->batch.n_packets; k++, i++)
            assert_memory_equal(f->batch.packets[k].data, &i, sizeof(i));
        r = frame_queue_flush(&queue, f->ours);
        assert_true(r == 0 || r == FRAME_AGAIN);
        assert_int_equal(frame_queue_is_empty(&queue), r == 0);
    }
    assert_true(frame_queue_is_empty(&queue));
    assert_int_equal(queue.n_bytes, 0);
    assert_int_equal(frame_receive(f->peer, &f->batch), FRAME_AGAIN);
    frame_queue_deinit(&queue);
}

/* Queued packets are sent first, even when there is room again. After that, an empty queue sends at once. */
static void test_queue_goes_first(void **state)
{
    struct fixture *f = *state;
    struct frame_queue queue;
    uint8_t data[4000] = {0};
    const struct frame_packet *packets = f->batch.packets;

    frame_queue_init(&queue, 10, 1 << 20);
    for (unsigned round = 0; round < 2; round++) {
        fill(f->ours, data, sizeof(data));
        assert_int_equal(frame_queue_send(&queue, f->ours, "first", 5, NULL, 0), 0);
        while (frame_receive(f->peer, &f->batch) == 0)
            ;
        assert_int_equal(frame_queue_send(&queue, f->ours, "second", 6, NULL, 0), 0);
        assert_int_equal(queue.n_packets, 2);
        assert_int_equal(frame_queue_flush(&queue, f->ours), 0);
        assert_int_equal(frame_queue_send(&queue, f->ours, "third", 5, NULL, 0), 0);
        assert_true(frame_queue_is_empty(&queue));
        assert_int_equal(frame_receive(f->peer, &f->batch), 0);
        assert_int_equal(f->batch.n_packets, 3);
        assert_packet(&packets[0], "first");
        assert_packet(&packets[1], "second");
        assert_packet(&packets[2], "third");
    }
    frame_queue_deinit(&queue);
}

/* For a client that never reads, the queue returns FRAME_E_FULL, at its limit of packets or of bytes. */
static void test_queue_is_bounded(void **state)
{
    struct fixture *f = *state;
    struct frame_queue queue;
    uint8_t data[4000] = {0};

    fill(f->ours, data, sizeof(data));
    frame_queue_init(&queue, 3, 1 << 20);
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(frame_queue_send(&queue, f->ours, data, sizeof(data), NULL, 0), 0);
    assert_int_equal(frame_queue_send(&queue, f->ours, data, sizeof(data), NULL, 0), FRAME_E_FULL);
    assert_int_equal(queue.n_packets, 3);
    frame_queue_deinit(&queue);

    frame_queue_init(&queue, 100, 2 * sizeof(data));
    assert_int_equal(frame_queue_send(&queue, f->ours, data, sizeof(data), NULL, 0), 0);
    assert_int_equal(frame_queue_send(&queue, f->ours, data, sizeof(data), NULL, 0), 0);
    assert_int_equal(frame_queue_send(&queue, f->ours, data, 1, NULL, 0), FRAME_E_FULL);
    assert_int_equal(queue.n_bytes, 2 * sizeof(data));
    frame_queue_deinit(&queue);

    /* one packet may exceed the limit, so an empty queue never refuses an answer */
    frame_queue_init(&queue, 1, 10);
    assert_int_equal(frame_queue_send(&queue, f->ours, data, sizeof(data), NULL, 0), 0);
    assert_int_equal(frame_queue_send(&queue, f->ours, data, 1, NULL, 0), FRAME_E_FULL);
    frame_queue_deinit(&queue);
    frame_queue_deinit(&queue);
}

static void test_queue_owns_descriptors(void **state)
{
    struct fixture *f = *state;
    struct frame_queue queue;
    uint8_t data[4000] = {0};
    size_t n_open = count_fds();
    int fds[2];

    frame_queue_init(&queue, 2, 1 << 20);
    fds[0] = dup(f->ours);
    assert_int_equal(frame_queue_send(&queue, f->ours, "sent", 4, fds, 1), 0);
    assert_int_equal(fds[0], -1);
    assert_int_equal(count_fds(), n_open);

    fill(f->ours, data, sizeof(data));
    for (unsigned i = 0; i < 2; i++) {
        fds[0] = dup(f->ours);
        fds[1] = dup(f->ours);
        assert_int_equal(frame_queue_send(&queue, f->ours, "queued", 6, fds, 2), 0);
        assert_true(fds[0] == -1 && fds[1] == -1);
    }
    assert_int_equal(count_fds(), n_open + 4);
    fds[0] = dup(f->ours);
    assert_int_equal(frame_queue_send(&queue, f->ours, "full", 4, fds, 1), FRAME_E_FULL);
    assert_int_equal(fds[0], -1);
    assert_int_equal(count_fds(), n_open + 4);

    /* the first packet arrives with its descriptors, the second is dropped with the queue */
    assert_int_equal(frame_receive_fds(f->peer, &f->buffer), 0);
    assert_int_equal(f->buffer.n_fds, 1);
    while (frame_queue_flush(&queue, f->ours) == FRAME_AGAIN && queue.n_packets == 2)
        assert_int_equal(frame_receive_fds(f->peer, &f->buffer), 0);
    assert_true(queue.n_packets < 2);
    frame_queue_deinit(&queue);
    do {
        assert_int_equal(frame_receive_fds(f->peer, &f->buffer), 0);
    } while (f->buffer.n_fds == 0);
    assert_memory_equal(f->buffer.data, "queued", 6);
    assert_int_equal(f->buffer.n_fds, 2);
    while (frame_receive_fds(f->peer, &f->buffer) == 0)
        ;
    assert_int_equal(count_fds(), n_open);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

TEST_GROUP(frame)
{
    const struct CMUnitTest tests[] = {
        TEST(test_batch),
        TEST(test_batch_is_bounded),
        TEST(test_batch_of_large_packets),
        TEST(test_batch_too_large),
        TEST(test_batch_takes_no_descriptor),
        TEST(test_batch_end),
        TEST(test_batch_reset),
        TEST(test_batch_empty_packet_is_the_end),
        TEST(test_batch_bad_socket),
        TEST(test_buffer),
        TEST(test_buffer_closes_at_the_end),
        TEST(test_buffer_too_many_descriptors),
        TEST(test_buffer_no_descriptor_left),
        TEST(test_buffer_sizes),
        TEST(test_buffer_reset),
        TEST(test_send_whole_or_not),
        TEST(test_send_many),
        TEST(test_send_many_into_a_full_socket),
        TEST(test_send_without_signal),
        TEST(test_queue_keeps_order),
        TEST(test_queue_goes_first),
        TEST(test_queue_is_bounded),
        TEST(test_queue_owns_descriptors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
