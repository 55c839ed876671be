/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Gives the caller places for the gradients of a micro-batch, and pushes them. A large gradient is pushed in parts, so
 * that the ring need not hold all of it.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/lib/handle.h"
#include "client/lib/push.h"
#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

int push_init(struct zerod *c, uint32_t n_tickets)
{
    c->slots.call = &c->call;
    c->slots.layout = c->layout;
    c->slots.credits = (const struct credit_page *)c->credit.base;
    c->slots.ring_bytes = c->ring_bytes;
    c->slots.overflow_bytes = c->overflow.n_bytes;
    c->places = calloc(c->layout->n_params, sizeof(*c->places));
    c->n_pushed = calloc(c->layout->n_params, sizeof(*c->n_pushed));
    c->slotted = calloc(c->layout->n_params, sizeof(*c->slotted));
    if (slots_init(&c->slots, n_tickets) < 0 || !c->places || !c->n_pushed || !c->slotted)
        return call_fatal(&c->call, -ENOMEM, "out of memory");
    return 0;
}

void push_deinit(struct zerod *c)
{
    for (uint32_t i = 0; c->places && i < c->layout->n_params; i++)
        c->memory->gradients->release(c, c->places[i]);
    free(steal_ptr(c->places));
    free(steal_ptr(c->n_pushed));
    free(steal_ptr(c->slotted));
    free(steal_ptr(c->host_scratch));
    c->n_host_scratch_bytes = 0;
    slots_deinit(&c->slots);
    strings_deinit(&c->strings);
}

void push_close(struct zerod *c)
{
    c->open = false;
    if (!c->n_pushed || !c->slotted)
        return;
    memset(c->n_pushed, 0, c->layout->n_params * sizeof(*c->n_pushed));
    memset(c->slotted, 0, c->layout->n_params * sizeof(*c->slotted));
    slots_close(&c->slots);
}

/*
 * Returns the address of a parameter's part in its slot. If the parameter has several parts, each has a slot of its
 * own.
 */
static uint8_t *slot_data(const struct zerod *c, uint32_t ticket, uint32_t param)
{
    const struct layout_param *p = &c->layout->params[param];
    const struct ticket *t = &c->slots.tickets[ticket];
    uint64_t offset = p->n_parts == 1 ? p->offset_elems * dtype_size(p->grad_dtype) : 0;

    return (t->overflow ? c->overflow.base : c->ring.base) + t->offset_bytes + offset;
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
    r = call_send(&c->call, &(struct request){
                                .type = REQUEST_BEGIN_BACKWARD,
                                .begin_backward =
                                    {
                                        .step = c->position.step,
                                        .micro_batch = c->position.micro_batch,
                                        .attempt = c->position.attempt,
                                        .n_forwards = info ? info->n_forwards : 0,
                                        .n_backwards = info ? info->n_backwards : 0,
                                        .groups = c->expected,
                                        .n_groups = c->expected ? c->layout->n_groups : 0,
                                    },
                            });
    free(steal_ptr(c->expected));
    return MIN(r, 0);
}

static bool is_refused_duplicate(const struct zerod *c, uint32_t param)
{
    return c->n_pushed[param] > 0 && c->welcome.on_duplicate != WIRE_ON_DUPLICATE_ACCUMULATE;
}

/*
 * Returns memory for a gradient that is larger than a slot. The handle keeps the memory for later gradients. Return:
 * NULL after a fatal error.
 */
static void *get_place(struct zerod *c, uint32_t param)
{
    if (!c->places[param])
        c->places[param] = c->memory->gradients->alloc(c, param);
    if (c->places[param])
        c->slotted[param] = true;
    return c->places[param];
}

void *zerod_slot(struct zerod *c, unsigned param)
{
    const struct layout_param *p;
    uint32_t ticket;

    if (handle_check_formed(c) != 0)
        return NULL;
    if (!c->open || param >= c->layout->n_params || !c->layout->params[param].trainable) {
        call_fail(&c->call, -EINVAL,
                  c->open ? "zerod_slot: no trainable parameter %u" : "zerod_slot: no micro-batch is open", param);
        return NULL;
    }
    if (is_refused_duplicate(c, param))
        return c->memory->gradients->scratch(c, param);
    p = &c->layout->params[param];
    if (p->n_parts > 1)
        return get_place(c, param);
    if (slots_get(&c->slots, p->first_parcel, c->n_pushed[param], &ticket) != 0)
        return NULL;
    c->slotted[param] = true;
    return slot_data(c, ticket, param);
}

static struct request_push describe_push(struct zerod *c, const struct zerod_push *push)
{
    /* A push outside a micro-batch has the last micro-batch's position, and the daemon refuses it as too late. */
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
        .segment = strings_intern(&c->strings, &c->call, push->segment),
        .call = push->call,
        .site = strings_intern(&c->strings, &c->call, push->site),
        .flags = push->flags & (PUSH_NESTED | PUSH_HOOK_TWICE | PUSH_NEW_FORWARD | PUSH_SITE_IS_BACKWARD),
        .n_bytes = push->n_bytes,
        .dtype_plus_one = push->dtype_plus_one >= 0 && push->dtype_plus_one <= 3 ? (uint32_t)push->dtype_plus_one : 0,
    };
}

/* Return: true if the daemon will refuse the push whatever its bytes are. Then the push is sent without bytes. */
static bool is_record_only(const struct zerod *c, const struct zerod_push *push)
{
    const struct layout_param *p;

    if (!c->open || push->param >= c->layout->n_params || !c->layout->params[push->param].trainable)
        return true;
    p = &c->layout->params[push->param];
    return (push->n_bytes && push->n_bytes != handle_gradient_bytes(c, push->param)) ||
           (push->dtype_plus_one && push->dtype_plus_one != (int)p->grad_dtype + 1) ||
           is_refused_duplicate(c, push->param);
}

static void add_sum(struct zerod *c, const struct zerod_push *push, struct request_push *request)
{
    const void *data = c->memory->gradients->read_duplicate(c, push->param, push->data);
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
    struct request request = {.type = REQUEST_PUSH, .push = describe_push(c, push)};

    request.push.record_only = true;
    if (c->open && push->param < c->layout->n_params && is_refused_duplicate(c, push->param))
        add_sum(c, push, &request.push);
    return c->call.fatal ? c->call.fatal : MIN(call_send(&c->call, &request), 0);
}

/*
 * Copies part i of a parameter into its slot, and writes the slot into the request. from: the bytes; NULL if the slot
 * has them already. Return: as slots_get().
 */
static int place_part(struct zerod *c, uint32_t param, uint32_t i, const void *from, size_t n_bytes,
                      struct request_push *request)
{
    uint32_t ticket;
    int r = slots_get(&c->slots, c->layout->params[param].first_parcel + i, c->n_pushed[param], &ticket);
    struct ticket *slot;

    if (r != 0)
        return r;
    slot = &c->slots.tickets[ticket];
    request->part = i;
    request->ticket = ticket;
    request->use = slot->use;
    request->offset_bytes = slot->offset_bytes;
    request->overflow = slot->overflow;
    request->pass = slot->pass;
    if (from)
        r = c->memory->gradients->put(c, slot_data(c, ticket, param), from, n_bytes);
    if (r == 0)
        r = c->memory->gradients->mark(c, request);
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
        r = MIN(call_send(&c->call, &(struct request){.type = REQUEST_PUSH, .push = *request}), 0);
    }
    return r;
}

static int push_whole(struct zerod *c, const struct zerod_push *push, struct request_push *request)
{
    size_t n_bytes = handle_gradient_bytes(c, push->param);
    int r = place_part(c, push->param, 0, push->data, n_bytes, request);

    if (r != 0)
        return r;
    if (push->flags & ZEROD_PUSH_MORE)
        return MIN(call_hold(&c->call, request, n_bytes), 0);
    return MIN(call_send(&c->call, &(struct request){.type = REQUEST_PUSH, .push = *request}), 0);
}

static int push_gradient(struct zerod *c, const struct zerod_push *push)
{
    struct request_push request = describe_push(c, push);
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
    int r = handle_check_formed(c);

    if (r != 0)
        return r;
    if (is_record_only(c, push))
        return push_record(c, push);
    if (!push->data && !c->slotted[push->param])
        return call_fail(&c->call, -EINVAL,
                         "zerod_push: data is NULL, but zerod_slot() was not called for parameter %u", push->param);
    return push_gradient(c, push);
}

int zerod_flush(struct zerod *c)
{
    int r = handle_check_formed(c);

    return r != 0 ? r : MIN(call_flush(&c->call), 0);
}

static int end_call(struct zerod *c, const struct request *request)
{
    struct wire_position ended = c->position;
    struct reply reply;
    int r = call_ask(&c->call, request, REPLY_DONE, &reply);

    if (r != 0)
        return r;
    c->last = ended;
    c->position = reply.done.position;
    push_close(c);
    return 0;
}

int zerod_end_backward(struct zerod *c, const void *blob, size_t len)
{
    int r = handle_check_formed(c);

    if (r == 0 && blob && len > WIRE_MAX_BLOB_BYTES)
        r = call_fail(&c->call, -EINVAL, "a blob of %zu bytes; at most %d", len, WIRE_MAX_BLOB_BYTES);
    /*
     * Waits for the stream's copies, because unfinished ones would be lost with this process, but an ended micro-batch
     * must not be.
     */
    if (r == 0)
        r = c->memory->gradients->wait_for_pushes(c);
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
    struct call_text room;
    int r = handle_check_formed(c);

    if (r != 0)
        return r;
    return end_call(c, &(struct request){
                           .type = REQUEST_ABANDON_BACKWARD,
                           .abandon_backward =
                               {
                                   .step = c->position.step,
                                   .micro_batch = c->position.micro_batch,
                                   .attempt = c->position.attempt,
                                   .why = call_fit_text(&room, why),
                               },
                       });
}
