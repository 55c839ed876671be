/* SPDX-License-Identifier: Apache-2.0 */

/* Forms a job: declares parameters, maps the daemon's memory, and sends initial weights. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client/lib/write-fault.h"
#include "client/lib/handle.h"
#include "client/lib/push.h"
#include "client/lib/written.h"
#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "proto/published.h"

/* ---- declaring ----------------------------------------------------------------------------------------- */

static int declare_one(struct zerod *c, const struct zerod_param *param, size_t index)
{
    struct layout_decl decl = {
        .name = param->name,
        .name_len = param->name_len ? param->name_len
                    : param->name   ? strlen(param->name)
                                    : 0,
        .dtype = (enum dtype)param->dtype,
        .grad_dtype = (enum dtype)param->grad_dtype,
        .group = param->group,
        .trainable = param->trainable,
        .muon = param->muon,
        .n_dims = param->ndim,
        .shape = param->shape,
    };
    const void **inits;
    int r;

    if (!param->name || decl.name_len == 0 || decl.name_len > WIRE_MAX_NAME_BYTES)
        return call_fail(&c->call, -EINVAL, "parameter %zu: a name has 1 to %d bytes", index, WIRE_MAX_NAME_BYTES);
    if (param->ndim > LAYOUT_MAX_DIMS || (param->ndim > 0 && !param->shape) || param->dtype > ZEROD_F16 ||
        param->grad_dtype > ZEROD_F16 || param->group >= WIRE_MAX_GROUPS)
        return call_fail(&c->call, -EINVAL, "parameter %zu (%.*s): dimensions, dtype or group out of range", index,
                         (int)MIN(decl.name_len, (size_t)80), param->name);
    if (decl.muon && !layout_is_for_muon(&decl))
        return call_fail(&c->call, -EINVAL, "parameter %zu (%.*s): Muon is for trainable parameters of two dimensions",
                         index, (int)MIN(decl.name_len, (size_t)80), param->name);
    inits = realloc(c->inits, (c->manifest.n + 1) * sizeof(*inits));
    if (!inits)
        return call_fail(&c->call, -ENOMEM, "out of memory");
    c->inits = inits;
    r = manifest_add(&c->manifest, &decl);
    if (r != 0)
        return call_fail(&c->call, r < 0 ? r : -E2BIG, r < 0 ? "out of memory" : "too many parameters");
    inits[c->manifest.n - 1] = param->init;
    return 0;
}

int zerod_declare(struct zerod *c, const struct zerod_param *params, size_t n_params)
{
    int r = call_check(&c->call);

    if (r == 0 && c->formed)
        r = call_fail(&c->call, -EBUSY, "zerod_declare after zerod_form");
    for (size_t i = 0; r == 0 && i < n_params; i++)
        r = declare_one(c, &params[i], c->manifest.n);
    return r;
}

/* Sends the manifest in as many packets as it needs. */
static int send_manifest(struct zerod *c)
{
    uint32_t first = 0;

    while (first < c->manifest.n) {
        size_t n_bytes = 64;
        uint32_t n = 0;
        int r;

        while (first + n < c->manifest.n) {
            size_t more = wire_param_bytes(&c->manifest.decls[first + n]);

            if (n > 0 && n_bytes + more > FRAME_MAX_BYTES)
                break;
            n_bytes += more;
            n++;
        }
        r = call_send(&c->call, &(struct request){.type = REQUEST_DECLARE,
                                                  .declare = {.params = &c->manifest.decls[first], .n_params = n}});
        if (r != 0)
            return r;
        first += n;
    }
    return 0;
}

/* ---- forming ------------------------------------------------------------------------------------------- */

static int map_segment(struct zerod *c, const struct wire_segment *segment, int fd)
{
    if (segment->kind == WIRE_SEGMENT_OVERFLOW && !segment->cuda && !c->overflow.base)
        return mapping_init(&c->overflow, fd, segment->n_bytes, PROT_READ | PROT_WRITE);
    if (segment->kind == WIRE_SEGMENT_CREDIT && !segment->cuda && !c->credit.base)
        return mapping_init(&c->credit, fd, segment->n_bytes, PROT_READ);
    if (segment->kind == WIRE_SEGMENT_PUBLISHED && !segment->cuda && !c->published.base)
        return mapping_init(&c->published, fd, segment->n_bytes, PROT_READ);
    return c->memory->map(c, segment, fd);
}

static int map_segments(struct zerod *c, const struct reply_formed *formed)
{
    for (size_t i = 0; i < formed->n_segments; i++) {
        int fd = i < c->call.in.n_fds ? steal_fd(&c->call.in.fds[i]) : -1;
        int r = fd < 0 ? -EPROTO : map_segment(c, &formed->segments[i], fd);

        if (r < 0)
            return call_fatal(&c->call, r, "mapping zerod's memory (%llu bytes): %s",
                              (unsigned long long)formed->segments[i].n_bytes, c->memory->why(c, r));
    }
    if (!c->credit.base || c->credit.n_bytes < credit_page_bytes(formed->n_tickets))
        return call_fatal(&c->call, -EPROTO, "zerod sent no page for the credits of %u slots", formed->n_tickets);
    if (c->published.base && c->published.n_bytes < published_page_bytes(c->layout->n_params))
        return call_fatal(&c->call, -EPROTO, "zerod's published page is for fewer parameters than were declared");
    return c->memory->check(c, formed);
}

static int store_blob(struct zerod *c, bool has_blob, const uint8_t *blob, size_t n_bytes)
{
    free(steal_ptr(c->blob));
    c->n_blob_bytes = 0;
    if (!has_blob)
        return 0;
    c->blob = malloc(MAX(n_bytes, (size_t)1));
    if (!c->blob)
        return call_fatal(&c->call, -ENOMEM, "out of memory");
    if (n_bytes > 0)
        memcpy(c->blob, blob, n_bytes);
    c->n_blob_bytes = n_bytes;
    return 0;
}

static int apply_formed(struct zerod *c, const struct reply_formed *formed)
{
    uint64_t bucket_elems = formed->bucket_elems ? formed->bucket_elems : c->welcome.bucket_elems;
    uint32_t bad;
    int r = layout_new(&c->layout, c->manifest.decls, c->manifest.n, c->welcome.world_size, bucket_elems, &bad);

    if (r != 0)
        return call_fatal(&c->call, r < 0 ? r : -EPROTO, "the layout cannot be computed");
    c->position = formed->position;
    c->last = formed->position;
    c->ring_bytes = formed->ring_bytes;
    c->call.loss_scale = formed->loss_scale;
    c->speculates = formed->speculates;
    c->gathered = calloc(c->layout->n_params, sizeof(*c->gathered));
    if (!c->gathered)
        return call_fatal(&c->call, -ENOMEM, "out of memory");
    r = store_blob(c, formed->has_blob, formed->blob, formed->n_blob_bytes);
    if (r == 0)
        r = c->memory->check_gpu(c, formed);
    if (r == 0)
        r = map_segments(c, formed);
    return r < 0 ? r : push_init(c, formed->n_tickets);
}

/* Sends one parameter's initial weights, in pieces that fit into the ring. */
static int send_init(struct zerod *c, uint32_t param)
{
    const struct layout_param *p = &c->layout->params[param];
    size_t size = dtype_size(p->dtype);
    uint64_t most = c->ring_bytes / size;

    if (most == 0 && p->n_elems > 0)
        return call_fatal(&c->call, -EPROTO, "zerod's ring of %llu bytes has no room for one weight",
                          (unsigned long long)c->ring_bytes);
    for (uint64_t start = 0; start < p->n_elems; start += most) {
        uint64_t n = MIN(most, p->n_elems - start);
        struct reply reply;
        int r;

        r = c->memory->gradients->put(c, c->ring.base, (const uint8_t *)c->inits[param] + start * size, n * size);
        if (r == 0)
            r = c->memory->wait(c);
        if (r != 0)
            return r;
        r = call_ask(
            &c->call,
            &(struct request){.type = REQUEST_INIT, .init = {.param = param, .start_elem = start, .n_elems = n}},
            REPLY_DONE, &reply);
        if (r != 0)
            return r;
    }
    return 0;
}

static int get_ready(struct zerod *c, bool init_wanted)
{
    struct reply reply;
    int r = 0;

    for (uint32_t p = 0; r == 0 && init_wanted && p < c->layout->n_params; p++)
        if (c->inits[p])
            r = send_init(c, p);
    if (r == 0)
        r = call_ask(&c->call, &(struct request){.type = REQUEST_READY}, REPLY_DONE, &reply);
    if (r != 0 || !reply.done.rewound)
        return r;
    /* The step was aborted after the answer to Form, so this rank continues at its start. */
    c->position = reply.done.position;
    return store_blob(c, reply.done.has_blob, reply.done.blob, reply.done.n_blob_bytes);
}

static int get_formed(struct zerod *c)
{
    struct reply reply;
    int r = 0;

    /* The GPU is opened before Declare is sent, so that the other ranks do not wait for this rank if that fails. */
    if (c->welcome.cuda && !c->cuda)
        r = cuda_memory_open(c);
    if (r != 0)
        return r;
    r = send_manifest(c);
    if (r == 0 || r == CALL_SAID_WHY)
        r = call_ask(&c->call,
                     &(struct request){.type = REQUEST_FORM,
                                       .form = {.n_params = c->manifest.n,
                                                .wants_published = c->flags & ZEROD_OVERLAP_UPDATE,
                                                .from_gpu = c->flags & ZEROD_COPIES_FROM_GPU}},
                     REPLY_FORMED, &reply);
    if (r != 0)
        return r;
    c->resumed = reply.formed.resumed;
    c->init_wanted = reply.formed.init_wanted;
    r = apply_formed(c, &reply.formed);
    (void)failpoint("formed");
    return r;
}

/* Frees everything that was made from the last daemon's answer to Form. */
static void unform(struct zerod *c)
{
    fault_unregister(c);
    push_deinit(c);
    c->call.held.shown = NULL;
    c->memory->deinit(c);
    mapping_deinit(&c->overflow);
    mapping_deinit(&c->credit);
    mapping_deinit(&c->published);
    free(steal_ptr(c->gathered));
    layout_free(steal_ptr(c->layout));
    written_refreshed(c);
}

static int form(struct zerod *c)
{
    /* A layout exists if the last zerod_form() failed after the answer to Form. */
    int r = c->layout ? 0 : get_formed(c);

    return r == 0 ? get_ready(c, c->init_wanted) : r;
}

int zerod_form(struct zerod *c)
{
    int r = call_check(&c->call);

    if (r == 0 && c->formed)
        r = call_fail(&c->call, -EBUSY, "zerod_form was called already");
    if (r != 0)
        return r;
    c->forming = true;
    while ((r = form(c)) == CALL_ANEW)
        unform(c);
    c->forming = false;
    if (r != 0)
        return r;
    c->formed = true;
    free(steal_ptr(c->inits));
    r = c->memory->weights->refresh(c);
    if (r != 0)
        return r;
    return c->resumed ? ZEROD_RESUMED : 0;
}
