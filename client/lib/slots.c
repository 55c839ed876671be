/* SPDX-License-Identifier: Apache-2.0 */

/* Keeps the used slots of one handle, and finds places for new ones (slots.h). */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/lib/call.h"
#include "client/lib/slots.h"
#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/layout/layout.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

enum { NO_TICKET = UINT32_MAX };

int slots_init(struct slots *slots, uint32_t n_tickets)
{
    slots->n_tickets = n_tickets;
    slots->tickets = calloc(n_tickets, sizeof(*slots->tickets));
    slots->used = calloc(n_tickets, sizeof(*slots->used));
    slots->first = malloc((slots->layout->n_parcels + 1) * sizeof(*slots->first));
    if (!slots->tickets || !slots->used || !slots->first)
        return -ENOMEM;
    for (uint32_t i = 0; i < slots->layout->n_parcels; i++)
        slots->first[i] = NO_TICKET;
    return 0;
}

void slots_deinit(struct slots *slots)
{
    free(slots->tickets);
    free(slots->used);
    free(slots->first);
    *slots = (struct slots){0};
}

static uint32_t credits(const struct slots *slots, uint32_t ticket)
{
    return atomic_load_explicit(&slots->credits->credits[ticket], memory_order_acquire);
}

static void unlink_ticket(struct slots *slots, uint32_t ticket)
{
    uint32_t *link = &slots->first[slots->tickets[ticket].parcel];

    while (*link != NO_TICKET && *link != ticket)
        link = &slots->tickets[*link].next;
    if (*link == ticket)
        *link = slots->tickets[ticket].next;
}

/* Frees the tickets that the daemon has credited. used[] stays sorted by offset. */
static void free_credited(struct slots *slots)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < slots->n_used; i++) {
        struct ticket *ticket = &slots->tickets[slots->used[i]];

        if (ticket->in_use && ticket->pushed && credits(slots, slots->used[i]) != ticket->use) {
            ticket->in_use = false;
            unlink_ticket(slots, slots->used[i]); /* so that this parcel's list does not lead into another list */
        }
        if (ticket->in_use)
            slots->used[n++] = slots->used[i];
    }
    slots->n_used = n;
}

void slots_close(struct slots *slots)
{
    if (!slots->first)
        return;
    for (uint32_t i = 0; i < slots->layout->n_parcels; i++)
        slots->first[i] = NO_TICKET;
    for (uint32_t i = 0; i < slots->n_used; i++)
        if (!slots->tickets[slots->used[i]].pushed)
            slots->tickets[slots->used[i]].in_use = false; /* the daemon has not received this ticket */
    free_credited(slots);
}

/* Finds the lowest gap of n_bytes in the ring. Return: false if no gap is large enough. */
static bool find_gap(const struct slots *slots, uint64_t n_bytes, uint64_t *offset, uint32_t *at)
{
    uint64_t end = 0;

    for (uint32_t i = 0; i < slots->n_used; i++) {
        const struct ticket *ticket = &slots->tickets[slots->used[i]];

        if (ticket->overflow)
            continue;
        if (ticket->offset_bytes - end >= n_bytes) {
            *offset = end;
            *at = i;
            return true;
        }
        end = round_up(ticket->offset_bytes + ticket->n_bytes, 64);
    }
    *offset = end;
    *at = slots->n_used;
    return end <= slots->ring_bytes && slots->ring_bytes - end >= n_bytes;
}

/* Return: a ticket that neither the client nor the daemon uses, or NO_TICKET. */
static uint32_t free_ticket(struct slots *slots)
{
    for (uint32_t i = 0; i < slots->n_tickets; i++) {
        uint32_t ticket = (slots->next_ticket + i) % slots->n_tickets;

        if (!slots->tickets[ticket].in_use) {
            slots->next_ticket = (ticket + 1) % slots->n_tickets;
            return ticket;
        }
    }
    return NO_TICKET;
}

struct ring_place {
    bool overflow;
    uint64_t offset_bytes;
    uint32_t at; /* index in used[] */
};

static int ask_for_place(struct slots *slots, uint32_t parcel, uint32_t pass, uint64_t n_bytes,
                         struct ring_place *place, bool *retry)
{
    uint32_t bucket = slots->layout->parcels[parcel].bucket;
    struct request request = {
        .type = REQUEST_SLOT_REQUEST,
        .slot_request = {.bucket = bucket,
                         .parcel = parcel - slots->layout->buckets[bucket].first_parcel,
                         .pass = pass},
    };
    struct reply reply;
    int r = call_ask(slots->call, &request, REPLY_SLOT_GRANT, &reply);

    if (r != 0)
        return r;
    *retry = reply.slot_grant.in_ring;
    if (!*retry && (reply.slot_grant.offset_bytes > slots->overflow_bytes ||
                    n_bytes > slots->overflow_bytes - reply.slot_grant.offset_bytes))
        return call_fatal(slots->call, -EPROTO, "zerod granted a slot behind the end of its overflow memory");
    *place = (struct ring_place){.overflow = true, .offset_bytes = reply.slot_grant.offset_bytes, .at = slots->n_used};
    return 0;
}

static int find_ring_place(struct slots *slots, uint32_t parcel, uint32_t pass, uint64_t n_bytes,
                           struct ring_place *place)
{
    bool retry = true;
    int r = 0;

    while (r == 0 && retry) {
        free_credited(slots);
        *place = (struct ring_place){0};
        if (slots->n_used < slots->n_tickets && find_gap(slots, n_bytes, &place->offset_bytes, &place->at))
            return 0;
        r = ask_for_place(slots, parcel, pass, n_bytes, place, &retry);
    }
    return r;
}

int slots_get(struct slots *slots, uint32_t parcel, uint32_t pass, uint32_t *out)
{
    struct ring_place place;
    uint64_t n_bytes;
    uint32_t ticket;
    int r;

    for (ticket = slots->first[parcel]; ticket != NO_TICKET; ticket = slots->tickets[ticket].next) {
        if (slots->tickets[ticket].pass == pass) {
            *out = ticket;
            return 0;
        }
    }
    n_bytes = layout_parcel_bytes(slots->layout, parcel);
    r = find_ring_place(slots, parcel, pass, n_bytes, &place);
    if (r != 0)
        return r;
    ticket = free_ticket(slots);
    if (ticket == NO_TICKET || slots->n_used == slots->n_tickets)
        return call_fail(slots->call, ZEROD_REFUSED, "all %u slots are in use", slots->n_tickets);
    slots->tickets[ticket] = (struct ticket){
        .in_use = true,
        .overflow = place.overflow,
        .use = credits(slots, ticket),
        .parcel = parcel,
        .pass = pass,
        .offset_bytes = place.offset_bytes,
        .n_bytes = n_bytes,
        .next = slots->first[parcel],
    };
    memmove(&slots->used[place.at + 1], &slots->used[place.at], (slots->n_used - place.at) * sizeof(*slots->used));
    slots->used[place.at] = ticket;
    slots->n_used++;
    slots->first[parcel] = ticket;
    *out = ticket;
    (void)failpoint("slot");
    return 0;
}
