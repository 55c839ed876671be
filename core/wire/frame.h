/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Bytes and descriptors over a non-blocking SOCK_SEQPACKET socket. One packet is one
 * frame of 1 to FRAME_MAX_BYTES bytes; what is in it is nobody's business here.
 *
 * Reading. The daemon takes many small packets and no descriptor: frame_receive()
 * with a frame_batch, one for all connections. The client takes one packet at a time, with
 * descriptors: frame_receive_fds() with a frame_buffer. An empty packet cannot be told from the
 * end of the connection and counts as it.
 *
 * Ownership. The socket stays the caller's everywhere. Received bytes live until the next receive with
 * the same batch or buffer. Descriptors in a frame_buffer are its own until they are stolen (steal_fd);
 * descriptors given to a frame_queue are the queue's, also on failure.
 *
 * The end. Sending may say FRAME_EOF while the peer's last packets are still to be received: what a client
 * wants to know then is the refusal with which the daemon closed.
 *
 * Fairness. A batch has at most FRAME_BATCH packets; a server that takes FRAME_ROUNDS of
 * them per readiness and then turns to the next connection lets no one starve.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FRAME_MAX_BYTES = 128 * 1024 - 1,
    FRAME_MAX_FDS = 8, /* a rank's memory on a GPU has seven; segments of Formed are five at most */
    FRAME_BATCH = 16,  /* measured: per packet 16 take two thirds of the time of 1, 64 are not faster */
    FRAME_ROUNDS = 4,  /* picked: 64 packets per readiness */
};

enum {
    FRAME_AGAIN = 1,   /* nothing to read, or no room to write: wait for the socket */
    FRAME_EOF,         /* the peer is gone */
    FRAME_E_TOO_LARGE, /* a packet of more than FRAME_MAX_BYTES; its bytes are lost */
    FRAME_E_FDS,       /* descriptors where none (client: no more than FRAME_MAX_FDS) may be; they are closed */
    FRAME_E_FULL,      /* the peer does not read its answers: the queue's limit is reached, nothing was queued */
};

struct frame_packet {
    const uint8_t *data;
    size_t n_bytes;
    int status; /* 0, FRAME_E_TOO_LARGE or FRAME_E_FDS (data is there, n_bytes at most FRAME_MAX_BYTES) */
};

struct frame_batch {
    uint8_t *memory; /* FRAME_BATCH packets of the largest size; pages come when they are used */
    struct frame_packet packets[FRAME_BATCH];
    size_t n_packets;
    bool more; /* as many as were wanted: there may be more to read at once */
    bool eof;  /* nothing comes after these packets */
};

struct frame_buffer {
    uint8_t *data; /* FRAME_MAX_BYTES + 1, so that it can also be packed into */
    size_t n_bytes;
    int fds[FRAME_MAX_FDS];
    size_t n_fds;
};

struct frame_out;

/* Packets on their way to a peer that does not read fast enough. One per connection. */
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
 * Takes what has arrived, without waiting. Descriptors are never installed in this process.
 * Return: 0 and at least one packet; FRAME_AGAIN; FRAME_EOF; -errno.
 */
int frame_receive(int fd, struct frame_batch *batch);
/* frame_receive() of at most n_packets (1 to FRAME_BATCH). */
int frame_receive_some(int fd, struct frame_batch *batch, size_t n_packets);

/* Return: 0 or -ENOMEM. */
int frame_buffer_init(struct frame_buffer *buffer);
/* Closes the descriptors that were not stolen. */
void frame_buffer_deinit(struct frame_buffer *buffer);

/*
 * Takes one packet and its descriptors (close-on-exec), without waiting; closes what was left of the last
 * packet's. Return: 0; FRAME_AGAIN; FRAME_EOF; FRAME_E_TOO_LARGE, FRAME_E_FDS (no packet, no descriptor);
 * -errno.
 */
int frame_receive_fds(int fd, struct frame_buffer *buffer);

/*
 * Sends one packet whole or not at all, without waiting and without SIGPIPE. fds are not consumed.
 * n_bytes 1 to FRAME_MAX_BYTES, n_fds at most FRAME_MAX_FDS.
 * Return: 0; FRAME_AGAIN; FRAME_EOF; -errno.
 */
int frame_send(int fd, const void *data, size_t n_bytes, const int *fds, size_t n_fds);

/*
 * Sends packets in order, without descriptors, as many as there is room for; status is not looked at. At most
 * FRAME_BATCH of them. *n_sent: how many are on their way. Return: 0, all are; FRAME_AGAIN; FRAME_EOF; -errno.
 */
int frame_send_many(int fd, const struct frame_packet *packets, size_t n_packets, size_t *n_sent);

/* The limits count queued packets, not those in the kernel. An empty queue accepts any one packet. */
void frame_queue_init(struct frame_queue *queue, size_t max_packets, size_t max_bytes);
/* Drops packets that were not sent, and closes their descriptors. */
void frame_queue_deinit(struct frame_queue *queue);

/*
 * Sends a packet, or queues a copy of it behind the others. Takes the descriptors (fds[i] becomes -1), also
 * on failure. Return: 0 (frame_queue_is_empty() says whether to wait for room); FRAME_E_FULL; FRAME_EOF;
 * -ENOMEM; -errno.
 */
int frame_queue_send(struct frame_queue *queue, int fd, const void *data, size_t n_bytes, int *fds, size_t n_fds);

/*
 * Does a result mean that the kernel had no memory for this call? Nothing was received or sent then, and the next call
 * may do. Queues keep what they could not send for that reason.
 */
bool frame_is_short(int r);

/* Return: 0, all is sent; FRAME_AGAIN, something is left; FRAME_EOF; -errno. */
int frame_queue_flush(struct frame_queue *queue, int fd);

static inline bool frame_queue_is_empty(const struct frame_queue *queue)
{
    return !queue->first;
}
