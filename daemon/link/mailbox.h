/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The messages between this daemon and one peer, over all their connections. A message to the peer is kept with its
 * number until the peer acknowledges it. Of the messages from the peer, only the last number is kept. Numbers begin at
 * 1 for each pair of incarnations, ours and the peer's. The mailbox does no I/O; its owner sends and receives.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MAILBOX_OLD = 1, /* received before: must not be delivered again */
    MAILBOX_E_FULL,  /* the message would exceed max_bytes, so it was not added */
    MAILBOX_E_GAP,   /* the number is not allowed now */
};

struct mailbox_message {
    struct mailbox_message *next;
    uint64_t number;
    size_t n_bytes;
    uint8_t bytes[]; /* a whole LINK_FRAME_MESSAGE */
};

struct mailbox {
    struct mailbox_message *first, *last; /* unacknowledged messages, oldest first */
    struct mailbox_message *unsent;       /* the first message not yet sent over the present connection */
    uint64_t n_put;                       /* the number of the last message put */
    uint64_t n_sent;                      /* the highest number sent over any connection */
    uint64_t n_acknowledged;              /* the last number that the peer has acknowledged */
    uint64_t n_received;                  /* the number of the last message from the peer */
    size_t n_bytes, max_bytes;            /* bytes kept, and their limit */
};

void mailbox_init(struct mailbox *mailbox, size_t max_bytes);

/* Drops all kept messages, and restarts the numbers, because a new process of the peer begins with them. */
void mailbox_reset(struct mailbox *mailbox);

/* Keeps a copy of a message to the peer. Return: 0, MAILBOX_E_FULL or -ENOMEM. */
int mailbox_put(struct mailbox *mailbox, const void *data, size_t n_bytes);

/*
 * Counts the next unsent message as sent over the present connection. Return: the message, valid until it is
 * acknowledged, or NULL if all messages are sent.
 */
const struct mailbox_message *mailbox_take(struct mailbox *mailbox);

/* Counts all kept messages as unsent, because the connection is new. */
void mailbox_rewind(struct mailbox *mailbox);

/*
 * Drops the messages up to this number, because the peer has received them. Return: 0, or MAILBOX_E_GAP if that number
 * was never sent.
 */
int mailbox_acknowledge(struct mailbox *mailbox, uint64_t number);

/* Records the number of a message from the peer. Return: 0 if the message is new, else MAILBOX_OLD or MAILBOX_E_GAP. */
int mailbox_receive(struct mailbox *mailbox, uint64_t number);
