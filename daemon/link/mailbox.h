/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The messages between this daemon and one peer, over all their connections. A message to the peer is kept with its
 * number until it is acknowledged. Of messages from the peer, the number of the last one is kept. For
 * each pair of incarnations, ours and the peer's, numbers begin at 1. Pure: the owner sends and receives.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MAILBOX_OLD = 1, /* came before, and is not delivered again */
    MAILBOX_E_FULL,  /* max_bytes would be exceeded; nothing was added */
    MAILBOX_E_GAP,   /* the number cannot come now */
};

struct mailbox_message {
    struct mailbox_message *next;
    uint64_t number;
    size_t n_bytes;
    uint8_t bytes[]; /* a whole LINK_FRAME_MESSAGE */
};

struct mailbox {
    struct mailbox_message *first, *last; /* not acknowledged, oldest first */
    struct mailbox_message *unsent;       /* the first one not sent over the present connection */
    uint64_t n_put;                       /* the number of the last message put */
    uint64_t n_sent;                      /* the highest number sent over any connection */
    uint64_t n_acknowledged;              /* the last number that the peer has acknowledged */
    uint64_t n_received;                  /* the last number that has come from the peer */
    size_t n_bytes, max_bytes;            /* bytes kept, and their limit */
};

void mailbox_init(struct mailbox *mailbox, size_t max_bytes);

/* Drops all kept messages, and restarts the numbers, as for a new process of the peer. */
void mailbox_reset(struct mailbox *mailbox);

/* Keeps a copy of a message to the peer. Return: 0, MAILBOX_E_FULL or -ENOMEM. */
int mailbox_put(struct mailbox *mailbox, const void *data, size_t n_bytes);

/*
 * Return: the next message to send over the present connection, or NULL. It counts as sent, and is valid until
 * acknowledged.
 */
const struct mailbox_message *mailbox_take(struct mailbox *mailbox);

/* Counts all kept messages as unsent, because the connection is new. */
void mailbox_rewind(struct mailbox *mailbox);

/*
 * Drops the messages up to this number, which the peer has received. Return: 0, or MAILBOX_E_GAP if that number was
 * never sent.
 */
int mailbox_acknowledge(struct mailbox *mailbox, uint64_t number);

/* Notes a message of the peer. Return: 0 if it is to be delivered, else MAILBOX_OLD or MAILBOX_E_GAP. */
int mailbox_receive(struct mailbox *mailbox, uint64_t number);
