/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Slots and pushes. A slot holds a parcel's gradients (core/layout/layout.h) of one micro-batch and
 * pass; the client places it in the ring, first fit, and names it by a ticket
 * until the credit page says that it has been reduced. No room in the ring: the
 * daemon is asked for an overflow extent, the only wait there is in a backward.
 * A large gradient is pushed in parts, so that the ring need not hold all of it.
 */

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "client/lib/handle.h"
#include "core/base/base.h"
#include "core/base/failpoint.h"

/* ---- tickets ------------------------------------------------------------------------------------------- */

int push_init(struct zerod *c, uint32_t n_tickets)
{
    c->n_tickets = n_tickets;
    c->tickets = calloc(n_tickets, sizeof(*c->tickets));
    c->used = calloc(n_tickets, sizeof(*c->used));
    c->slots = malloc((c->layout->n_parcels + 1) * sizeof(*c->slots));
    c->places = calloc(c->layout->n_params, sizeof(*c->places));
    c->n_pushed = calloc(c->layout->n_params, sizeof(*c->n_pushed));
    c->slotted = calloc(c->layout->n_params, sizeof(*c->slotted));
    c->gathered = calloc(c->layout->n_params, sizeof(*c->gathered));
    if (!c->tickets || !c->used || !c->slots || !c->places || !c->n_pushed || !c->slotted || !c->gathered)
        return client_fatal(c, -ENOMEM, "out of memory");
    for (uint32_t i = 0; i < c->layout->n_parcels; i++)
        c->slots[i] = CLIENT_NO_TICKET;
    return 0;
}

void push_deinit(struct zerod *c)
{
    free(c->tickets);
    free(c->used);
    free(c->slots);
    free(c->n_pushed);
    free(c->slotted);
    free(c->gathered);
    free(c->scratch);
    cuda_release(c->cuda, c->device_scratch);
    for (uint32_t i = 0; c->places && i < c->layout->n_params; i++) {
        if (c->cuda)
            cuda_release(c->cuda, c->places[i]);
        else
            free(c->places[i]);
    }
    free(c->places);
    for (uint32_t i = 0; i < c->string_capacity; i++)
        free(c->strings[i].text);
    free(c->strings);
}

static uint32_t credits(const struct zerod *c, uint32_t ticket)
{
    const struct credit_page *page = (const struct credit_page *)c->credit.base;

    return atomic_load_explicit(&page->credits[ticket], memory_order_acquire);
}

static void unlink_ticket(struct zerod *c, uint32_t ticket)
{
    uint32_t *link = &c->slots[c->tickets[ticket].parcel];

    while (*link != CLIENT_NO_TICKET && *link != ticket)
        link = &c->tickets[*link].next;
    if (*link == ticket)
        *link = c->tickets[ticket].next;
}

/* Takes back what has been credited. used[] stays sorted by place within its segment. */
static void reap(struct zerod *c)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < c->n_used; i++) {
        struct ticket *ticket = &c->tickets[c->used[i]];

        if (ticket->in_use && ticket->pushed && credits(c, c->used[i]) != ticket->use) {
            ticket->in_use = false;
            unlink_ticket(c, c->used[i]); /* the parcel's list must not lead into another's */
        }
        if (ticket->in_use)
            c->used[n++] = c->used[i];
    }
    c->n_used = n;
}

void push_close(struct zerod *c)
{
    c->open = false;
    if (!c->layout || !c->n_pushed || !c->slotted)
        return;
    memset(c->n_pushed, 0, c->layout->n_params * sizeof(*c->n_pushed));
    memset(c->slotted, 0, c->layout->n_params * sizeof(*c->slotted));
    for (uint32_t i = 0; i < c->layout->n_parcels; i++)
        c->slots[i] = CLIENT_NO_TICKET;
    for (uint32_t i = 0; i < c->n_used; i++)
        if (!c->tickets[c->used[i]].pushed)
            c->tickets[c->used[i]].in_use = false; /* the daemon never heard of it */
    reap(c);
}

/* The lowest gap of n_bytes in the ring. Return: false when there is none. */
static bool find_gap(const struct zerod *c, uint64_t n_bytes, uint64_t *offset, uint32_t *at)
{
    uint64_t end = 0;

    for (uint32_t i = 0; i < c->n_used; i++) {
        const struct ticket *ticket = &c->tickets[c->used[i]];

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
    *at = c->n_used;
    return end <= c->ring_bytes && c->ring_bytes - end >= n_bytes;
}

/* Return: a ticket that is free on both sides, or CLIENT_NO_TICKET. */
static uint32_t free_ticket(struct zerod *c)
{
    for (uint32_t i = 0; i < c->n_tickets; i++) {
        uint32_t ticket = (c->next_ticket + i) % c->n_tickets;

        if (!c->tickets[ticket].in_use) {
            c->next_ticket = (ticket + 1) % c->n_tickets;
            return ticket;
        }
    }
    return CLIENT_NO_TICKET;
}

struct place {
    bool overflow;
    uint64_t offset_bytes;
    uint32_t at; /* index in used[] */
};

static int ask_for_place(struct zerod *c, uint32_t parcel, uint32_t pass, struct place *place, bool *retry)
{
    uint32_t bucket = c->layout->parcels[parcel].bucket;
    struct request request = {
        .type = REQUEST_SLOT_REQUEST,
        .slot_request = {.bucket = bucket, .parcel = parcel - c->layout->buckets[bucket].first_parcel, .pass = pass},
    };
    struct reply reply;
    int r = client_call(c, &request, REPLY_SLOT_GRANT, &reply);

    if (r != 0)
        return r;
    *retry = reply.slot_grant.in_ring;
    *place = (struct place){.overflow = true, .offset_bytes = reply.slot_grant.offset_bytes, .at = c->n_used};
    return 0;
}

static int find_place(struct zerod *c, uint32_t parcel, uint32_t pass, uint64_t n_bytes, struct place *place)
{
    bool retry = true;
    int r = 0;

    while (r == 0 && retry) {
        reap(c);
        *place = (struct place){0};
        if (c->n_used < c->n_tickets && find_gap(c, n_bytes, &place->offset_bytes, &place->at))
            return 0;
        r = ask_for_place(c, parcel, pass, place, &retry);
    }
    return r;
}

/* The slot for a parcel's pass, opened if need be. Return: 0, ZEROD_REFUSED, ZEROD_ABORTED or fatal. */
static int get_slot(struct zerod *c, uint32_t parcel, uint32_t pass, uint32_t *out)
{
    struct place place;
    uint64_t n_bytes;
    uint32_t ticket;
    int r;

    for (ticket = c->slots[parcel]; ticket != CLIENT_NO_TICKET; ticket = c->tickets[ticket].next) {
        if (c->tickets[ticket].pass == pass) {
            *out = ticket;
            return 0;
        }
    }
    n_bytes = layout_parcel_bytes(c->layout, parcel);
    r = find_place(c, parcel, pass, n_bytes, &place);
    if (r != 0)
        return r;
    ticket = free_ticket(c);
    if (ticket == CLIENT_NO_TICKET || c->n_used == c->n_tickets)
        return client_fail(c, ZEROD_REFUSED, "all %u slots are in use", c->n_tickets);
    c->tickets[ticket] = (struct ticket){
        .in_use = true,
        .overflow = place.overflow,
        .use = credits(c, ticket),
        .parcel = parcel,
        .pass = pass,
        .offset_bytes = place.offset_bytes,
        .n_bytes = n_bytes,
        .next = c->slots[parcel],
    };
    memmove(&c->used[place.at + 1], &c->used[place.at], (c->n_used - place.at) * sizeof(*c->used));
    c->used[place.at] = ticket;
    c->n_used++;
    c->slots[parcel] = ticket;
    *out = ticket;
    (void)failpoint("slot");
    return 0;
}

/* Where in its slot a parameter's part lies: a part of several is alone there. Looks at no more than it must. */
static uint8_t *slot_data(const struct zerod *c, uint32_t ticket, uint32_t param)
{
    const struct layout_param *p = &c->layout->params[param];
    const struct ticket *t = &c->tickets[ticket];
    uint64_t offset = p->n_parts == 1 ? p->offset_elems * dtype_size(p->grad_dtype) : 0;

    return (t->overflow ? c->overflow.base : c->ring.base) + t->offset_bytes + offset;
}

static size_t gradient_bytes(const struct zerod *c, uint32_t param)
{
    return c->layout->params[param].n_elems * dtype_size(c->layout->params[param].grad_dtype);
}

/* ---- strings: sent once, named by a number ------------------------------------------------------------- */

static int grow_strings(struct zerod *c)
{
    uint32_t capacity = MAX(c->string_capacity * 2, 64u);
    struct interned *strings = calloc(capacity, sizeof(*strings));

    if (!strings)
        return -ENOMEM;
    for (uint32_t i = 0; i < c->string_capacity; i++) {
        uint32_t at;

        if (!c->strings[i].text)
            continue;
        at = (uint32_t)XXH3_64bits(c->strings[i].text, strlen(c->strings[i].text)) & (capacity - 1);
        while (strings[at].text)
            at = (at + 1) & (capacity - 1);
        strings[at] = c->strings[i];
    }
    free(c->strings);
    c->strings = strings;
    c->string_capacity = capacity;
    return 0;
}

/* Return: the string's id; 0, "unknown", when there is none or no room: evidence is never worth an error. */
static uint32_t intern(struct zerod *c, const char *text)
{
    size_t n = text ? strlen(text) : 0;
    uint32_t at;

    if (n == 0 || n > WIRE_MAX_TEXT_BYTES || c->n_strings >= WIRE_MAX_STRING_ID ||
        (c->n_strings * 2 >= c->string_capacity && grow_strings(c) < 0))
        return 0;
    at = (uint32_t)XXH3_64bits(text, n) & (c->string_capacity - 1);
    for (; c->strings[at].text; at = (at + 1) & (c->string_capacity - 1))
        if (strcmp(c->strings[at].text, text) == 0)
            return c->strings[at].id;
    c->strings[at].text = strdup(text);
    if (!c->strings[at].text)
        return 0;
    c->strings[at].id = ++c->n_strings;
    (void)client_send(c, &(struct request){.type = REQUEST_INTERN, .intern = {.id = c->strings[at].id, .text = text}});
    return c->strings[at].id;
}

/* ---- micro-batches ------------------------------------------------------------------------------------- */

int zerod_begin_backward(struct zerod *c, const struct zerod_backward *info)
{
    int r = zerod_check_weights(c, NULL);

    if (r != 0)
        return r;
    if (!c->open)
        c->ordinal = 0;
    c->open = true;
    c->ordinal++;
    r = client_send(c, &(struct request){
                           .type = REQUEST_BEGIN_BACKWARD,
                           .begin_backward =
                               {
                                   .step = c->position.step,
                                   .micro_batch = c->position.micro_batch,
                                   .attempt = c->position.attempt,
                                   .n_forwards = info ? info->n_forwards : 0,
                                   .n_backwards = info ? info->n_backwards : 0,
                               },
                       });
    return MIN(r, 0);
}

/* Room for a duplicate's bytes outside the ring. Return: NULL when memory is out. */
static void *get_scratch(struct zerod *c, uint32_t param)
{
    size_t n_bytes = gradient_bytes(c, param) + 1;

    if (n_bytes > c->n_scratch_bytes) {
        free(c->scratch);
        c->scratch = malloc(n_bytes);
        c->n_scratch_bytes = c->scratch ? n_bytes : 0;
    }
    return c->scratch;
}

static bool is_refused_duplicate(const struct zerod *c, uint32_t param)
{
    return c->n_pushed[param] > 0 && c->welcome.on_duplicate != WIRE_ON_DUPLICATE_ACCUMULATE;
}

/* The same on the GPU. What is there may still be copied from: it goes when that is done. */
static void *get_device_scratch(struct zerod *c, uint32_t param)
{
    size_t n_bytes = gradient_bytes(c, param) + 1;
    int r = 0;

    if (n_bytes <= c->n_device_scratch_bytes)
        return c->device_scratch;
    r = cuda_wait(c->cuda, c->stream);
    if (r == 0) {
        cuda_release(c->cuda, c->device_scratch);
        c->n_device_scratch_bytes = 0;
        r = cuda_alloc(c->cuda, n_bytes, &c->device_scratch);
    }
    if (r != 0) {
        client_cuda_failed(c, r);
        return NULL;
    }
    c->n_device_scratch_bytes = n_bytes;
    return c->device_scratch;
}

/* Room for a gradient that its ring never holds as a whole; kept. Return: NULL when memory is out. */
static void *get_place(struct zerod *c, uint32_t param)
{
    int r = 0;

    if (!c->places[param] && c->cuda)
        r = cuda_alloc(c->cuda, gradient_bytes(c, param), &c->places[param]);
    else if (!c->places[param])
        r = -posix_memalign((void **)&c->places[param], CLIENT_PLACE_ALIGN_BYTES, gradient_bytes(c, param));
    if (r != 0) {
        if (c->cuda)
            client_cuda_failed(c, r);
        else
            client_fatal(c, r, "out of memory");
        return NULL;
    }
    c->slotted[param] = true;
    return c->places[param];
}

void *zerod_slot(struct zerod *c, unsigned param)
{
    const struct layout_param *p;
    uint32_t ticket;

    if (client_check(c, true) != 0)
        return NULL;
    if (!c->open || param >= c->layout->n_params || !c->layout->params[param].trainable) {
        client_fail(c, -EINVAL,
                    c->open ? "zerod_slot: no trainable parameter %u" : "zerod_slot: no micro-batch is open", param);
        return NULL;
    }
    if (is_refused_duplicate(c, param))
        return c->cuda ? get_device_scratch(c, param) : get_scratch(c, param);
    p = &c->layout->params[param];
    if (p->n_parts > 1)
        return get_place(c, param);
    if (get_slot(c, p->first_parcel, c->n_pushed[param], &ticket) != 0)
        return NULL;
    c->slotted[param] = true;
    return slot_data(c, ticket, param);
}

static struct request_push describe(struct zerod *c, const struct zerod_push *push)
{
    /* Outside a micro-batch a push belongs to the last one: the daemon says that it comes too late. */
    const struct wire_position *at =
        c->open || (c->position.micro_batch == 0 && c->position.step == 0) ? &c->position : &c->last;

    return (struct request_push){
        .sequence = ++c->sequence,
        .attempt = c->position.attempt,
        .step = at->step,
        .micro_batch = at->micro_batch,
        .param = push->param,
        .ordinal = push->ordinal ? push->ordinal : c->ordinal,
        .task = push->task,
        .depth = push->depth,
        .segment = intern(c, push->segment),
        .call = push->call,
        .site = intern(c, push->site),
        .flags = push->flags & (PUSH_NESTED | PUSH_HOOK_TWICE | PUSH_NEW_FORWARD | PUSH_SITE_IS_BACKWARD),
        .n_bytes = push->n_bytes,
        .dtype_plus_one = push->dtype_plus_one >= 0 && push->dtype_plus_one <= 3 ? (uint32_t)push->dtype_plus_one : 0,
    };
}

/* Will the daemon refuse it whatever it holds? Then only the record travels. */
static bool is_record_only(const struct zerod *c, const struct zerod_push *push)
{
    const struct layout_param *p;

    if (!c->open || push->param >= c->layout->n_params || !c->layout->params[push->param].trainable)
        return true;
    p = &c->layout->params[push->param];
    return (push->n_bytes && push->n_bytes != gradient_bytes(c, push->param)) ||
           (push->dtype_plus_one && push->dtype_plus_one != (int)p->grad_dtype + 1) ||
           is_refused_duplicate(c, push->param);
}

/* A duplicate's bytes in host memory; of a job on GPUs a copy. Return: NULL when there are none, or an error. */
static const void *duplicate_bytes(struct zerod *c, const struct zerod_push *push)
{
    const void *from = push->data ? push->data : c->cuda ? c->device_scratch : c->scratch;
    void *copy;
    int r;

    if (!c->cuda || !from)
        return from;
    copy = get_scratch(c, push->param);
    if (!copy)
        return NULL;
    r = cuda_copy_to_host(c->cuda, copy, from, gradient_bytes(c, push->param), c->stream);
    if (r != 0)
        client_cuda_failed(c, r);
    return r == 0 ? copy : NULL;
}

static void add_sum(struct zerod *c, const struct zerod_push *push, struct request_push *request)
{
    const void *data = duplicate_bytes(c, push);
    const struct layout_param *p = &c->layout->params[push->param];

    for (uint32_t i = 0; data && i < p->n_parts; i++) {
        const struct layout_part *part = &c->layout->parts[p->first_part + i];
        const uint8_t *from = (const uint8_t *)data + part->start_elem * dtype_size(p->grad_dtype);
        struct position_sum sum = {0};

        c->kernels->position_sum_update(&sum, p->grad_dtype, from, part->n_elems, part->start_elem);
        request->sum += position_sum_finish(&sum, layout_part_bytes(c->layout, p->first_part + i));
    }
}

static int push_record(struct zerod *c, const struct zerod_push *push)
{
    struct request request = {.type = REQUEST_PUSH, .push = describe(c, push)};

    request.push.record_only = true;
    if (c->open && push->param < c->layout->n_params && is_refused_duplicate(c, push->param))
        add_sum(c, push, &request.push);
    return c->fatal ? c->fatal : MIN(client_send(c, &request), 0);
}

/* Copies on the caller's stream, and names the event that is recorded behind; from: NULL when the bytes are there. */
static int put_on_device(struct zerod *c, uint8_t *to, const void *from, size_t n_bytes, struct request_push *request)
{
    uint8_t handle[CUDA_EVENT_BYTES];
    uint32_t number = 0;
    bool is_new = false;
    int r = from && n_bytes > 0 ? cuda_copy(c->cuda, to, from, n_bytes, c->stream) : 0;

    if (r == 0)
        r = cuda_record(c->cuda, c->stream, &number, &is_new, handle);
    if (r != 0)
        return client_cuda_failed(c, r);
    request->event_plus_one = number + 1;
    if (!is_new)
        return 0;
    return MIN(client_send(c, &(struct request){.type = REQUEST_EVENT, .event = {number, handle, sizeof(handle)}}), 0);
}

/* Puts part i of a parameter into its slot and names the slot; from: NULL when it is there. Return: as get_slot(). */
static int place_part(struct zerod *c, uint32_t param, uint32_t i, const void *from, size_t n_bytes,
                      struct request_push *request)
{
    uint32_t ticket;
    int r = get_slot(c, c->layout->params[param].first_parcel + i, c->n_pushed[param], &ticket);
    struct ticket *slot;

    if (r != 0)
        return r;
    slot = &c->tickets[ticket];
    request->part = i;
    request->ticket = ticket;
    request->use = slot->use;
    request->offset_bytes = slot->offset_bytes;
    request->overflow = slot->overflow;
    request->pass = slot->pass;
    if (c->cuda)
        r = put_on_device(c, slot_data(c, ticket, param), from, n_bytes, request);
    else if (from)
        memcpy(slot_data(c, ticket, param), from, n_bytes);
    (void)failpoint("copy");
    slot->pushed = r == 0;
    return r;
}

static int push_in_parts(struct zerod *c, const struct zerod_push *push, struct request_push *request)
{
    const struct layout_param *p = &c->layout->params[push->param];
    const uint8_t *data = push->data ? push->data : c->places[push->param];
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < p->n_parts; i++) {
        uint64_t offset = c->layout->parts[p->first_part + i].start_elem * dtype_size(p->grad_dtype);

        r = place_part(c, push->param, i, data + offset, layout_part_bytes(c->layout, p->first_part + i), request);
        if (r != 0)
            return r;
        if (i > 0)
            request->sequence = ++c->sequence;
        r = MIN(client_send(c, &(struct request){.type = REQUEST_PUSH, .push = *request}), 0);
    }
    return r;
}

static int push_whole(struct zerod *c, const struct zerod_push *push, struct request_push *request)
{
    size_t n_bytes = gradient_bytes(c, push->param);
    int r = place_part(c, push->param, 0, push->data, n_bytes, request);

    if (r != 0)
        return r;
    if (push->flags & ZEROD_PUSH_MORE && !c->cuda) /* what is held is told in the ring, which the host cannot write */
        return MIN(client_hold(c, request, n_bytes), 0);
    return MIN(client_send(c, &(struct request){.type = REQUEST_PUSH, .push = *request}), 0);
}

static int push_gradient(struct zerod *c, const struct zerod_push *push)
{
    struct request_push request = describe(c, push);
    bool whole = c->layout->params[push->param].n_parts == 1;
    int r = whole ? push_whole(c, push, &request) : push_in_parts(c, push, &request);

    if (r == 0) {
        c->n_pushed[push->param]++;
        c->slotted[push->param] = false;
    }
    return r;
}

int zerod_push(struct zerod *c, const struct zerod_push *push)
{
    int r = client_check(c, true);

    if (r != 0)
        return r;
    if (is_record_only(c, push))
        return push_record(c, push);
    if (!push->data && !c->slotted[push->param])
        return client_fail(c, -EINVAL,
                           "zerod_push: data is NULL, and zerod_slot() has not told where to write parameter %u",
                           push->param);
    return push_gradient(c, push);
}

int zerod_flush(struct zerod *c)
{
    int r = client_check(c, true);

    return r != 0 ? r : MIN(client_flush(c), 0);
}

static int end_call(struct zerod *c, const struct request *request)
{
    struct wire_position ended = c->position;
    struct reply reply;
    int r = client_call(c, request, REPLY_DONE, &reply);

    if (r != 0)
        return r;
    c->last = ended;
    c->position = reply.done.position;
    push_close(c);
    return 0;
}

int zerod_end_backward(struct zerod *c, const void *blob, size_t len)
{
    int r = client_check(c, true);

    if (r == 0 && blob && len > WIRE_MAX_BLOB_BYTES)
        r = client_fail(c, -EINVAL, "a blob of %zu bytes; at most %d", len, WIRE_MAX_BLOB_BYTES);
    /* An ended micro-batch outlives this process, but what its stream has not done yet would not. */
    if (r == 0 && c->cuda && cuda_wait_for_recorded(c->cuda) != 0)
        r = client_cuda_failed(c, -EIO);
    if (r != 0)
        return r;
    return end_call(c, &(struct request){
                           .type = REQUEST_END_BACKWARD,
                           .end_backward =
                               {
                                   .step = c->position.step,
                                   .micro_batch = c->position.micro_batch,
                                   .attempt = c->position.attempt,
                                   .has_blob = blob != NULL,
                                   .blob = blob,
                                   .n_blob_bytes = blob ? len : 0,
                               },
                       });
}

int zerod_abandon_backward(struct zerod *c, const char *why)
{
    struct client_text room;
    int r = client_check(c, true);

    if (r != 0)
        return r;
    return end_call(c, &(struct request){
                           .type = REQUEST_ABANDON_BACKWARD,
                           .abandon_backward =
                               {
                                   .step = c->position.step,
                                   .micro_batch = c->position.micro_batch,
                                   .attempt = c->position.attempt,
                                   .why = client_fitting(&room, why),
                               },
                       });
}
