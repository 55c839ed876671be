/* SPDX-License-Identifier: Apache-2.0 */

/* Keeps messages until they are acknowledged, and recognises messages that are received twice. */

#include "daemon/link/mailbox.h"

#include <assert.h>

#include "core/base/base.h"
#include "daemon/link/link-frame.h"

/* Return: the bytes that count against max_bytes for this message. */
static size_t cost(const struct mailbox_message *message)
{
    return sizeof(*message) + message->n_bytes;
}

void mailbox_init(struct mailbox *mailbox, size_t max_bytes)
{
    *mailbox = (struct mailbox){.max_bytes = max_bytes};
}

static void drop_first(struct mailbox *mailbox)
{
    struct mailbox_message *message = mailbox->first;

    assert(mailbox->n_bytes >= cost(message));
    mailbox->first = message->next;
    if (!mailbox->first)
        mailbox->last = NULL;
    if (mailbox->unsent == message)
        mailbox->unsent = message->next;
    mailbox->n_bytes -= cost(message);
    free(message);
}

void mailbox_reset(struct mailbox *mailbox)
{
    while (mailbox->first)
        drop_first(mailbox);
    assert(mailbox->n_bytes == 0);
    mailbox_init(mailbox, mailbox->max_bytes);
}

int mailbox_put(struct mailbox *mailbox, const void *data, size_t n_bytes)
{
    struct link_frame frame = {
        .kind = LINK_FRAME_MESSAGE, .number = mailbox->n_put + 1, .data = data, .n_bytes = n_bytes};
    size_t n_packed = link_frame_packed_bytes(&frame);
    struct mailbox_message *message;

    assert(mailbox->n_sent <= mailbox->n_put);
    assert(!mailbox->last || mailbox->last->number == mailbox->n_put); /* numbers have no gap */
    if (mailbox->n_bytes + sizeof(*message) + n_packed > mailbox->max_bytes)
        return MAILBOX_E_FULL;
    message = malloc(sizeof(*message) + n_packed);
    if (!message)
        return -ENOMEM;
    *message = (struct mailbox_message){.number = frame.number, .n_bytes = n_packed};
    link_frame_pack(&frame, message->bytes);
    if (mailbox->last)
        mailbox->last->next = message;
    else
        mailbox->first = message;
    mailbox->last = message;
    if (!mailbox->unsent)
        mailbox->unsent = message;
    mailbox->n_bytes += cost(message);
    mailbox->n_put = message->number;
    return 0;
}

const struct mailbox_message *mailbox_take(struct mailbox *mailbox)
{
    struct mailbox_message *message = mailbox->unsent;

    if (!message)
        return NULL;
    assert(message->number > mailbox->n_acknowledged);
    assert(message->number <= mailbox->n_sent + 1); /* messages are sent in order, without gaps */
    mailbox->unsent = message->next;
    mailbox->n_sent = MAX(mailbox->n_sent, message->number);
    return message;
}

void mailbox_rewind(struct mailbox *mailbox)
{
    mailbox->unsent = mailbox->first;
}

int mailbox_acknowledge(struct mailbox *mailbox, uint64_t number)
{
    if (number > mailbox->n_sent)
        return MAILBOX_E_GAP;
    while (mailbox->first && mailbox->first->number <= number)
        drop_first(mailbox);
    assert(!mailbox->first || mailbox->first->number == MAX(mailbox->n_acknowledged, number) + 1);
    mailbox->n_acknowledged = MAX(mailbox->n_acknowledged, number);
    return 0;
}

int mailbox_receive(struct mailbox *mailbox, uint64_t number)
{
    if (number <= mailbox->n_received)
        return MAILBOX_OLD;
    if (number != mailbox->n_received + 1)
        return MAILBOX_E_GAP;
    mailbox->n_received = number;
    return 0;
}
