/* SPDX-License-Identifier: Apache-2.0 */

/* Write windows, in which the callers of all ranks write weights between two steps. */

#include <errno.h>

#include "client/lib/handle.h"
#include "client/lib/api-weights.h"
#include "client/lib/api-window.h"
#include "core/base/base.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

void window_close(struct zerod *c)
{
    if (!c->window_base)
        return;
    c->window_base = NULL;
    c->memory->weights->close_window(c);
}

int zerod_write_begin(struct zerod *c)
{
    struct reply reply;
    int r = handle_check_formed(c);
    _cleanup_close_ int fd = -1;

    if (r == 0 && c->window_base)
        r = call_fail(&c->call, -EBUSY, "a write window is open already");
    if (r == 0)
        r = zerod_check_weights(c, NULL); /* because the window would replace written memory */
    if (r == 0)
        r = c->memory->wait(c);
    if (r == 0)
        r = call_ask(&c->call, &(struct request){.type = REQUEST_WRITE_BEGIN}, REPLY_DONE, &reply);
    if (r != 0)
        return r;
    c->position = reply.done.position;
    if (reply.done.n_segments > 0)
        fd = steal_fd(&c->call.in.fds[0]);
    if (fd < 0 && c->rank == 0 && c->layout->weight_bytes > 0)
        return call_fatal(&c->call, -EPROTO, "zerod sent no write window");
    r = fd >= 0 ? mapping_check(fd, 0, weights_bytes(c)) : 0;
    if (r < 0)
        return call_fatal(&c->call, r, "zerod's write window is smaller than %llu bytes, or can be cut",
                          (unsigned long long)weights_bytes(c));
    return c->memory->weights->open_window(c, fd);
}

static int ask_for_window_end(struct zerod *c, bool forget)
{
    struct reply reply;
    int r = handle_check_formed(c);

    if (r == 0)
        r = c->memory->wait(c);
    if (r == 0)
        r = call_ask(&c->call,
                     &(struct request){.type = REQUEST_WRITE_END,
                                       .write_end = {.forget = forget, .n_windows = c->position.n_windows}},
                     REPLY_DONE, &reply);
    if (r != 0)
        return r;
    c->position = reply.done.position;
    window_close(c);
    return forget ? 0 : c->memory->weights->refresh(c);
}

int zerod_write_end(struct zerod *c)
{
    return ask_for_window_end(c, false);
}

int zerod_write_forget(struct zerod *c)
{
    return ask_for_window_end(c, true);
}

void *zerod_window(struct zerod *c, unsigned param)
{
    if (handle_check_formed(c) != 0 || !c->window_base || param >= c->layout->n_params)
        return NULL;
    return c->window_base + weights_offset(c, param);
}
