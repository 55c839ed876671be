/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The messages between this daemon and one peer, whatever happens to the connections: each message to the peer is kept
 * with its number until it is acknowledged, and the number of the last message from the peer is kept. Numbers count
 * from 1 between two incarnations. Pure: the owner sends and receives.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MAILBOX_OLD = 1, /* came before: not to be delivered again */
    MAILBOX_E_FULL,  /* more is kept than may be; nothing was added */
    MAILBOX_E_GAP,   /* a number that cannot come now */
};

struct mailbox_message {
    struct mailbox_message *next;
    uint64_t number;
    size_t n_bytes;
    uint8_t bytes[]; /* a whole LINK_FRAME_MESSAGE */
};

struct mailbox {
    struct mailbox_message *first, *last; /* not acknowledged, oldest first */
    struct mailbox_message *unsent;       /* the first that the present connection has not got */
    uint64_t n_put;                       /* the last number given */
    uint64_t n_sent;                      /* the last number that any connection has got */
    uint64_t n_acknowledged;              /* the last number that the peer has acknowledged */
    uint64_t n_received;                  /* the last number that has come from the peer */
    size_t n_bytes, max_bytes;            /* kept */
};

void mailbox_init(struct mailbox *mailbox, size_t max_bytes);

/* Drops all kept messages, and restarts the numbers; also when the peer is another process. */
void mailbox_reset(struct mailbox *mailbox);

/* Keeps a copy of a message to the peer. Return: 0, MAILBOX_E_FULL, -ENOMEM. */
int mailbox_put(struct mailbox *mailbox, const void *data, size_t n_bytes);

/* The next message for the present connection, which has it from now on; NULL: none. Lives until acknowledged. */
const struct mailbox_message *mailbox_take(struct mailbox *mailbox);

/* There is a new connection: everything kept is to be sent over it. */
void mailbox_rewind(struct mailbox *mailbox);

/* The peer has all up to this number. Return: 0, or MAILBOX_E_GAP: it was never sent so many. */
int mailbox_acknowledge(struct mailbox *mailbox, uint64_t number);

/* A message has come. Return: 0, to be delivered; MAILBOX_OLD; MAILBOX_E_GAP. */
int mailbox_receive(struct mailbox *mailbox, uint64_t number);
