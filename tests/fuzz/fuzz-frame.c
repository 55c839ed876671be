/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A conversation over a socket pair. Four bytes of input are one act of the daemon or its client. A model keeps the
 * sent frames. All of them must arrive once, complete and in order, with their descriptors, or at the daemon without
 * them. At the end no descriptor may be open.
 */

#include <assert.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>

#include "core/base/base.h"
#include "core/wire/frame.h"

enum {
    MAX_SENT = 1024,
    MAX_OPEN = 128,
    QUEUE_PACKETS = 8,
    QUEUE_BYTES = 200 * 1000,
};

struct sent {
    size_t n_bytes;
    size_t n_fds;
    uint8_t fill;
};

/* The frames in one direction. */
struct stream {
    struct sent sent[MAX_SENT];
    size_t n_sent, n_received;
};

struct act {
    uint8_t verb;
    uint8_t n_fds;
    uint16_t size;
};

struct talk {
    int daemon, client; /* sockets; client is -1 after it has hung up */
    struct frame_queue queue;
    struct stream requests, replies;
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t payload[2 * FRAME_MAX_BYTES];
static struct frame_batch batch;
static struct frame_buffer buffer;

static unsigned count_open(void)
{
    unsigned n = 0;

    for (int fd = 0; fd < MAX_OPEN; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static void make_fds(int *fds, size_t n_fds)
{
    for (size_t i = 0; i < n_fds; i++) {
        fds[i] = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
        assert(fds[i] >= 0);
    }
}

/* Return: the next packet of a direction, which the caller sends. */
static struct sent *stream_next(struct stream *stream, const struct act *act)
{
    struct sent *sent = &stream->sent[stream->n_sent];

    *sent = (struct sent){
        .n_bytes = act->size * 2 + 1, /* an odd size, up to FRAME_MAX_BYTES */
        .n_fds = act->n_fds % (FRAME_MAX_FDS + 1),
        .fill = stream->n_sent + 1,
    };
    memset(payload, sent->fill, sent->n_bytes);
    return sent;
}

static void assert_arrived(struct stream *stream, const uint8_t *data, size_t n_bytes)
{
    struct sent *sent = &stream->sent[stream->n_received++];

    assert(stream->n_received <= stream->n_sent);
    assert(n_bytes == MIN(sent->n_bytes, (size_t)FRAME_MAX_BYTES));
    assert(data[0] == sent->fill && data[n_bytes - 1] == sent->fill);
}

/* The client sends a valid packet, or one with descriptors, or one that is too large. */
static void client_sends(struct talk *talk, const struct act *act, bool large)
{
    struct sent *sent = stream_next(&talk->requests, act);
    int fds[FRAME_MAX_FDS];
    int r;

    if (large) {
        *sent = (struct sent){.n_bytes = FRAME_MAX_BYTES + 1 + act->size / 4, .fill = sent->fill};
        memset(payload, sent->fill, sent->n_bytes);
        r = send(talk->client, payload, sent->n_bytes, MSG_NOSIGNAL | MSG_DONTWAIT) < 0;
    } else {
        make_fds(fds, sent->n_fds);
        r = frame_send(talk->client, payload, sent->n_bytes, fds, sent->n_fds);
        for (size_t i = 0; i < sent->n_fds; i++)
            close(fds[i]);
        assert(r == 0 || r == FRAME_AGAIN);
    }
    talk->requests.n_sent += r == 0;
}

static void daemon_receives(struct talk *talk)
{
    int r = frame_receive(talk->daemon, &batch);

    if (r)
        assert(r == (talk->client >= 0 ? FRAME_AGAIN : FRAME_EOF) &&
               talk->requests.n_received == talk->requests.n_sent);
    for (size_t i = 0; i < batch.n_packets; i++) {
        const struct sent *sent = &talk->requests.sent[talk->requests.n_received];

        assert(batch.packets[i].status == (sent->n_fds > 0                   ? FRAME_E_FDS
                                           : sent->n_bytes > FRAME_MAX_BYTES ? FRAME_E_TOO_LARGE
                                                                             : 0));
        assert_arrived(&talk->requests, batch.packets[i].data, batch.packets[i].n_bytes);
    }
}

static void daemon_sends(struct talk *talk, const struct act *act)
{
    struct sent *sent = stream_next(&talk->replies, act);
    int fds[FRAME_MAX_FDS];
    int r;

    make_fds(fds, sent->n_fds);
    r = frame_queue_send(&talk->queue, talk->daemon, payload, sent->n_bytes, fds, sent->n_fds);
    for (size_t i = 0; i < sent->n_fds; i++)
        assert(fds[i] == -1);
    assert(r == 0 || (r == FRAME_E_FULL && talk->queue.n_packets > 0) || (r == FRAME_EOF && talk->client < 0));
    assert(talk->queue.n_packets <= QUEUE_PACKETS && talk->queue.n_bytes <= QUEUE_BYTES);
    talk->replies.n_sent += r == 0;
}

static void daemon_flushes(struct talk *talk)
{
    int r = frame_queue_flush(&talk->queue, talk->daemon);

    assert(r == 0 || r == FRAME_AGAIN || (r == FRAME_EOF && talk->client < 0));
    assert(frame_queue_is_empty(&talk->queue) == (r == 0));
}

static void client_receives(struct talk *talk, const struct act *act)
{
    size_t n_fds = talk->replies.sent[talk->replies.n_received].n_fds;
    int r = frame_receive_fds(talk->client, &buffer);

    if (r) {
        /* frames in the queue have not been sent */
        assert(r == FRAME_AGAIN && talk->replies.n_received + talk->queue.n_packets == talk->replies.n_sent);
        return;
    }
    assert(buffer.n_fds == n_fds);
    assert_arrived(&talk->replies, buffer.data, buffer.n_bytes);
    if (act->n_fds < n_fds)
        close(steal_fd(&buffer.fds[act->n_fds]));
}

static void play(struct talk *talk, const struct act *act)
{
    if (talk->client >= 0) {
        switch (act->verb % 16) {
        case 0 ... 3:
            client_sends(talk, act, false);
            return;
        case 4:
            client_sends(talk, act, true);
            return;
        case 5 ... 7:
            client_receives(talk, act);
            return;
        case 8:
            /* the client dies, rarely */
            if (act->size > 60000)
                close(steal_fd(&talk->client));
            return;
        }
    }
    switch (act->verb % 4) {
    case 0:
    case 1:
        daemon_sends(talk, act);
        return;
    case 2:
        daemon_flushes(talk);
        return;
    default:
        daemon_receives(talk);
        return;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct talk talk;
    unsigned n_open;
    struct act act;
    int pair[2];

    if (!batch.memory && (frame_batch_init(&batch) < 0 || frame_buffer_init(&buffer) < 0))
        return 0;
    n_open = count_open();
    memset(&talk, 0, sizeof(talk));
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) < 0)
        return 0;
    talk.daemon = pair[0];
    talk.client = pair[1];
    frame_queue_init(&talk.queue, QUEUE_PACKETS, QUEUE_BYTES);

    for (size_t i = 0; i + sizeof(act) <= size && i / sizeof(act) < MAX_SENT; i += sizeof(act)) {
        memcpy(&act, data + i, sizeof(act));
        play(&talk, &act);
    }

    frame_queue_deinit(&talk.queue);
    closep(&talk.client);
    close(talk.daemon);
    /* the last packet's are the buffer's until the next one */
    frame_receive_fds(-1, &buffer);
    assert(buffer.n_fds == 0);
    assert(count_open() == n_open);
    return 0;
}
