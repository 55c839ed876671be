/* SPDX-License-Identifier: Apache-2.0 */

/* Sends and receives frames, the packets of a SOCK_SEQPACKET socket, without waiting. */

#include "core/wire/frame.h"

#include <assert.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "core/base/base.h"

enum {
    PACKET_BYTES = FRAME_MAX_BYTES + 1, /* one byte more than allowed, so that an array of packets stays aligned */
};

/* A queued packet. */
struct frame_out {
    struct frame_out *next;
    size_t n_bytes;
    size_t n_fds;
    int fds[FRAME_MAX_FDS];
    uint8_t data[];
};

union frame_control {
    struct cmsghdr header;
    uint8_t bytes[CMSG_SPACE(FRAME_MAX_FDS * sizeof(int))];
};

static void fds_close(int *fds, size_t n_fds)
{
    for (size_t i = 0; i < n_fds; i++) {
        closep(&fds[i]);
        fds[i] = -1;
    }
}

/* Converts the errno of a failed receive or send. */
static int frame_error(int error)
{
    switch (error) {
    case EAGAIN:
        return FRAME_AGAIN;
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN:
        return FRAME_EOF;
    default:
        return -error;
    }
}

/*
 * Must the receive be repeated? If the peer closes with unread data, a receive fails with ECONNRESET before it returns
 * the peer's last packets: a trainer's last pushes, or the daemon's refusal. The error is reported once. The second
 * receive returns the packets, and later receives the end.
 */
static bool receive_again(unsigned *n_resets)
{
    return errno == EINTR || (errno == ECONNRESET && (*n_resets)++ == 0);
}

/* ---- the daemon's side --------------------------------------------------------------------------------- */

int frame_batch_init(struct frame_batch *batch)
{
    void *memory;

    *batch = FRAME_BATCH_NULL;
    memory = mmap(NULL, (size_t)FRAME_BATCH * PACKET_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return -ENOMEM;
    batch->memory = memory;
    return 0;
}

void frame_batch_deinit(struct frame_batch *batch)
{
    if (batch->memory)
        munmap(batch->memory, (size_t)FRAME_BATCH * PACKET_BYTES);
    *batch = FRAME_BATCH_NULL;
}

static struct frame_packet packet_of(const struct mmsghdr *message)
{
    const struct msghdr *header = &message->msg_hdr;

    return (struct frame_packet){
        .data = header->msg_iov->iov_base,
        .n_bytes = MIN(message->msg_len, (unsigned)FRAME_MAX_BYTES),
        /* There is no room for control messages, so the kernel drops them and sets MSG_CTRUNC. */
        .status = header->msg_flags & MSG_CTRUNC                                        ? FRAME_E_FDS
                  : header->msg_flags & MSG_TRUNC || message->msg_len > FRAME_MAX_BYTES ? FRAME_E_TOO_LARGE
                                                                                        : 0,
    };
}

int frame_receive_some(int fd, struct frame_batch *batch, size_t n_packets)
{
    struct mmsghdr messages[FRAME_BATCH];
    struct iovec places[FRAME_BATCH];
    unsigned n_resets = 0;
    int n;

    assert(n_packets > 0 && n_packets <= FRAME_BATCH);
    batch->n_packets = 0;
    batch->more = false;
    batch->eof = false;
    for (size_t i = 0; i < n_packets; i++) {
        places[i] = (struct iovec){.iov_base = batch->memory + i * PACKET_BYTES, .iov_len = PACKET_BYTES};
        messages[i] = (struct mmsghdr){.msg_hdr = {.msg_iov = &places[i], .msg_iovlen = 1}};
    }
    do {
        n = recvmmsg(fd, messages, (unsigned)n_packets, MSG_DONTWAIT, NULL);
    } while (n < 0 && receive_again(&n_resets));
    if (n < 0)
        return frame_error(errno);

    for (int i = 0; i < n && !batch->eof; i++) {
        if (messages[i].msg_len == 0)
            batch->eof = true;
        else
            batch->packets[batch->n_packets++] = packet_of(&messages[i]);
    }
    batch->more = batch->n_packets == n_packets;
    return batch->n_packets > 0 ? 0 : FRAME_EOF;
}

int frame_receive(int fd, struct frame_batch *batch)
{
    return frame_receive_some(fd, batch, FRAME_BATCH);
}

/* ---- the client's side --------------------------------------------------------------------------------- */

int frame_buffer_init(struct frame_buffer *buffer)
{
    *buffer = FRAME_BUFFER_NULL;
    buffer->data = malloc(PACKET_BYTES);
    return buffer->data ? 0 : -ENOMEM;
}

void frame_buffer_deinit(struct frame_buffer *buffer)
{
    fds_close(buffer->fds, buffer->n_fds);
    free(buffer->data);
    *buffer = FRAME_BUFFER_NULL;
}

static void take_fds(struct frame_buffer *buffer, struct msghdr *header)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        /*
         * The control buffer has room for FRAME_MAX_FDS descriptors, and the kernel puts all into one control message.
         */
        buffer->n_fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        assert(buffer->n_fds <= FRAME_MAX_FDS);
        memcpy(buffer->fds, CMSG_DATA(c), buffer->n_fds * sizeof(int));
    }
}

int frame_receive_fds(int fd, struct frame_buffer *buffer)
{
    union frame_control control;
    struct iovec place = {.iov_base = buffer->data, .iov_len = PACKET_BYTES};
    struct msghdr header = {
        .msg_iov = &place,
        .msg_iovlen = 1,
        .msg_control = &control,
        .msg_controllen = sizeof(control),
    };
    unsigned n_resets = 0;
    ssize_t n;
    int r = 0;

    fds_close(buffer->fds, buffer->n_fds);
    buffer->n_fds = 0;
    buffer->n_bytes = 0;
    do {
        n = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n < 0 && receive_again(&n_resets));
    if (n < 0)
        return frame_error(errno);
    take_fds(buffer, &header);
    if (n == 0)
        r = FRAME_EOF;
    else if (header.msg_flags & MSG_CTRUNC)
        /* more than FRAME_MAX_FDS, or more than this process may open; the kernel closed those in excess */
        r = FRAME_E_FDS;
    else if ((header.msg_flags & MSG_TRUNC) || n > FRAME_MAX_BYTES)
        r = FRAME_E_TOO_LARGE;
    if (r) {
        fds_close(buffer->fds, buffer->n_fds);
        buffer->n_fds = 0;
        return r;
    }
    buffer->n_bytes = n;
    return 0;
}

/* ---- sending ------------------------------------------------------------------------------------------- */

int frame_send(int fd, const void *data, size_t n_bytes, const int *fds, size_t n_fds)
{
    union frame_control control;
    struct iovec place = {.iov_base = (void *)data, .iov_len = n_bytes};
    struct msghdr header = {.msg_iov = &place, .msg_iovlen = 1};
    ssize_t n;

    assert(n_bytes > 0 && n_bytes <= FRAME_MAX_BYTES && n_fds <= FRAME_MAX_FDS);

    if (n_fds > 0) {
        memset(&control, 0, sizeof(control));
        control.header = (struct cmsghdr){
            .cmsg_len = CMSG_LEN(n_fds * sizeof(int)),
            .cmsg_level = SOL_SOCKET,
            .cmsg_type = SCM_RIGHTS,
        };
        memcpy(CMSG_DATA(&control.header), fds, n_fds * sizeof(int));
        header.msg_control = &control;
        header.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
    }
    do {
        /* send() is used where possible, because sendmsg() makes a push a tenth slower. */
        n = n_fds == 0 ? send(fd, data, n_bytes, MSG_DONTWAIT | MSG_NOSIGNAL)
                       : sendmsg(fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? frame_error(errno) : 0;
}

int frame_send_many(int fd, const struct frame_packet *packets, size_t n_packets, size_t *n_sent)
{
    struct iovec places[FRAME_BATCH];
    struct mmsghdr messages[FRAME_BATCH];
    int n;

    assert(n_packets > 0 && n_packets <= FRAME_BATCH);

    *n_sent = 0;
    if (n_packets == 1) {
        n = frame_send(fd, packets->data, packets->n_bytes, NULL, 0);
        *n_sent = n == 0;
        return n;
    }
    for (size_t i = 0; i < n_packets; i++) {
        assert(packets[i].n_bytes > 0 && packets[i].n_bytes <= FRAME_MAX_BYTES);
        places[i] = (struct iovec){.iov_base = (void *)packets[i].data, .iov_len = packets[i].n_bytes};
        messages[i] = (struct mmsghdr){.msg_hdr = {.msg_iov = &places[i], .msg_iovlen = 1}};
    }
    while (*n_sent < n_packets) {
        n = sendmmsg(fd, messages + *n_sent, (unsigned)(n_packets - *n_sent), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR)
            return frame_error(errno);
        *n_sent += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

static void frame_out_free(struct frame_out *out)
{
    fds_close(out->fds, out->n_fds);
    free(out);
}

void frame_queue_init(struct frame_queue *queue, size_t max_packets, size_t max_bytes)
{
    *queue = (struct frame_queue){.max_packets = max_packets, .max_bytes = max_bytes};
}

static void queue_pop(struct frame_queue *queue)
{
    struct frame_out *out = queue->first;

    assert(queue->n_packets > 0);
    assert(queue->n_bytes >= out->n_bytes);
    assert(out->next || queue->last == out);
    queue->first = out->next;
    if (!queue->first)
        queue->last = NULL;
    queue->n_packets--;
    queue->n_bytes -= out->n_bytes;
    frame_out_free(out);
}

void frame_queue_deinit(struct frame_queue *queue)
{
    while (queue->first)
        queue_pop(queue);
    assert(queue->n_packets == 0 && queue->n_bytes == 0);
    *queue = FRAME_QUEUE_NULL;
}

static bool queue_has_room(const struct frame_queue *queue, size_t n_bytes)
{
    if (!queue->first)
        return true;
    return queue->n_packets < queue->max_packets && n_bytes <= queue->max_bytes - MIN(queue->n_bytes, queue->max_bytes);
}

/* Appends a copy of the packet. On success, consumes the descriptors. */
static int queue_append(struct frame_queue *queue, const void *data, size_t n_bytes, int *fds, size_t n_fds)
{
    struct frame_out *out;

    assert(n_bytes > 0 && n_bytes <= FRAME_MAX_BYTES);
    assert(n_fds <= FRAME_MAX_FDS);
    assert(!queue->first == !queue->last);
    if (!queue_has_room(queue, n_bytes))
        return FRAME_E_FULL;
    out = malloc(sizeof(*out) + n_bytes);
    if (!out)
        return -ENOMEM;
    *out = (struct frame_out){.n_bytes = n_bytes, .n_fds = n_fds};
    memcpy(out->data, data, n_bytes);
    for (size_t i = 0; i < n_fds; i++)
        out->fds[i] = steal_fd(&fds[i]);
    if (queue->last)
        queue->last->next = out;
    else
        queue->first = out;
    queue->last = out;
    queue->n_packets++;
    queue->n_bytes += n_bytes;
    return 0;
}

bool frame_is_short(int r)
{
    return r == -ENOMEM || r == -ENOBUFS;
}

static int send_or_keep(int fd, const void *data, size_t n_bytes, const int *fds, size_t n_fds)
{
    int r = frame_send(fd, data, n_bytes, fds, n_fds);

    return frame_is_short(r) ? FRAME_AGAIN : r;
}

int frame_queue_send(struct frame_queue *queue, int fd, const void *data, size_t n_bytes, int *fds, size_t n_fds)
{
    int r = FRAME_AGAIN;

    if (!queue->first)
        r = send_or_keep(fd, data, n_bytes, fds, n_fds);
    if (r == FRAME_AGAIN)
        r = queue_append(queue, data, n_bytes, fds, n_fds);
    fds_close(fds, n_fds);
    return r;
}

int frame_queue_flush(struct frame_queue *queue, int fd)
{
    struct frame_out *out;
    int r;

    while ((out = queue->first)) {
        r = send_or_keep(fd, out->data, out->n_bytes, out->fds, out->n_fds);
        if (r)
            return r;
        queue_pop(queue);
    }
    return 0;
}
