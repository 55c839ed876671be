/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Sends and receives bytes and descriptors over a non-blocking SOCK_SEQPACKET socket. One packet is one frame of 1 to
 * FRAME_MAX_BYTES bytes. This module does not read the contents.
 *
 * Reading. The daemon receives many small packets without descriptors, by frame_receive() with one frame_batch for all
 * connections. The client receives one packet at a time, with descriptors, by frame_receive_fds() with a frame_buffer.
 * An empty packet counts as the end of the connection, because recv() returns 0 for both.
 *
 * Ownership. The caller owns the socket. Received bytes are valid until the next receive with the same batch or buffer.
 * A frame_buffer owns its descriptors until they are stolen (steal_fd). A frame_queue owns the descriptors passed to
 * it, even if the call fails.
 *
 * The end. Sending may return FRAME_EOF while the peer's last packets can still be received. A client then reads the
 * refusal with which the daemon closed the connection.
 *
 * Fairness. A batch has at most FRAME_BATCH packets. No connection starves if a server receives at most FRAME_ROUNDS
 * batches per readiness and then serves the next connection.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FRAME_MAX_BYTES = 128 * 1024 - 1,
    FRAME_MAX_FDS = 8, /* a rank's memory on a GPU needs seven, the segments of Formed at most five */
    FRAME_BATCH = 16,  /* measured: with 16, a packet takes two thirds of its time with 1; 64 are not faster */
    FRAME_ROUNDS = 4,  /* picked: 64 packets per readiness */
};

enum {
    FRAME_AGAIN = 1,   /* no packet to read, or no room to write: wait for the socket */
    FRAME_EOF,         /* the peer has closed the connection */
    FRAME_E_TOO_LARGE, /* a packet of more than FRAME_MAX_BYTES; its bytes are lost */
    FRAME_E_FDS,       /* descriptors where the daemon allows none, or too many for a client; they are closed */
    FRAME_E_FULL,      /* the queue's limit is reached, because the peer does not read; nothing was queued */
};

struct frame_packet {
    const uint8_t *data;
    size_t n_bytes;
    int status; /* 0, FRAME_E_TOO_LARGE or FRAME_E_FDS (data is valid, n_bytes at most FRAME_MAX_BYTES) */
};

struct frame_batch {
    uint8_t *memory; /* FRAME_BATCH packets of the largest size; pages are allocated on first use */
    struct frame_packet packets[FRAME_BATCH];
    size_t n_packets;
    bool more; /* as many packets as requested were received: there may be more */
    bool eof;  /* no packet follows these */
};

struct frame_buffer {
    uint8_t *data; /* FRAME_MAX_BYTES + 1; also used for packing */
    size_t n_bytes;
    int fds[FRAME_MAX_FDS];
    size_t n_fds;
};

struct frame_out;

/* Packets that wait because the peer does not read fast enough. One queue per connection. */
struct frame_queue {
    struct frame_out *first, *last;
    size_t n_packets, n_bytes;
    size_t max_packets, max_bytes;
};

#define FRAME_BATCH_NULL ((struct frame_batch){.memory = NULL})
#define FRAME_BUFFER_NULL ((struct frame_buffer){.data = NULL})
#define FRAME_QUEUE_NULL ((struct frame_queue){.first = NULL})

/* Return: 0 or -ENOMEM. */
int frame_batch_init(struct frame_batch *batch);
void frame_batch_deinit(struct frame_batch *batch);

/*
 * Receives the packets that have arrived, without waiting. Never installs descriptors in this process. Return: 0 with
 * at least one packet; FRAME_AGAIN; FRAME_EOF; -errno.
 */
int frame_receive(int fd, struct frame_batch *batch);
/* As frame_receive(), but at most n_packets packets (1 to FRAME_BATCH). */
int frame_receive_some(int fd, struct frame_batch *batch, size_t n_packets);

/* Return: 0 or -ENOMEM. */
int frame_buffer_init(struct frame_buffer *buffer);
/* Closes the descriptors that were not stolen. */
void frame_buffer_deinit(struct frame_buffer *buffer);

/*
 * Receives one packet and its descriptors (close-on-exec), without waiting. Closes descriptors of the last packet that
 * were not stolen. Return: 0; FRAME_AGAIN; FRAME_EOF; FRAME_E_TOO_LARGE or FRAME_E_FDS (without packet and
 * descriptors); -errno.
 */
int frame_receive_fds(int fd, struct frame_buffer *buffer);

/*
 * Sends one packet completely or not at all, without waiting and without SIGPIPE. The caller keeps fds. n_bytes is 1 to
 * FRAME_MAX_BYTES, n_fds at most FRAME_MAX_FDS. Return: 0; FRAME_AGAIN; FRAME_EOF; -errno.
 */
int frame_send(int fd, const void *data, size_t n_bytes, const int *fds, size_t n_fds);

/*
 * Sends at most FRAME_BATCH packets in order, without descriptors, until the socket has no room. Ignores the packets'
 * status. *n_sent: the number of sent packets. Return: 0 if all are sent; else FRAME_AGAIN, FRAME_EOF or -errno.
 */
int frame_send_many(int fd, const struct frame_packet *packets, size_t n_packets, size_t *n_sent);

/* max_packets and max_bytes limit queued packets, not packets in the kernel. An empty queue accepts any one packet. */
void frame_queue_init(struct frame_queue *queue, size_t max_packets, size_t max_bytes);
/* Drops packets that were not sent, and closes their descriptors. */
void frame_queue_deinit(struct frame_queue *queue);

/*
 * Sends a packet, or appends a copy to the queue. Consumes the descriptors (fds[i] becomes -1), even on failure.
 * Return: 0 (wait for room unless frame_queue_is_empty()); FRAME_E_FULL; FRAME_EOF; -ENOMEM; -errno.
 */
int frame_queue_send(struct frame_queue *queue, int fd, const void *data, size_t n_bytes, int *fds, size_t n_fds);

/*
 * Does the result mean that the kernel had no memory for the call? Then nothing was received or sent, and a retry may
 * succeed. Queues keep packets that they could not send for this reason.
 */
bool frame_is_short(int r);

/* Sends the queued packets. Return: 0 if all are sent; FRAME_AGAIN if some are left; FRAME_EOF; -errno. */
int frame_queue_flush(struct frame_queue *queue, int fd);

static inline bool frame_queue_is_empty(const struct frame_queue *queue)
{
    return !queue->first;
}
