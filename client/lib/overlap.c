/* SPDX-License-Identifier: Apache-2.0 */

/* Lets a forward begin while the update still writes weights (overlap.h). */

#include <errno.h>

#include "client/lib/handle.h"
#include "client/lib/overlap.h"
#include "core/base/base.h"
#include "core/wire/wire-reply.h"
#include "proto/published.h"

enum { LOOKS = 1000 }; /* picked: tens of microseconds, in which a worker completes its current chunk */

/* Yields the core to its other hardware thread between two looks, if the CPU has an instruction for this. */
static void relax(void)
{
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

int overlap_settle(struct zerod *c)
{
    struct reply reply;
    int r = call_settle(&c->call, &reply);

    if (r != 0)
        return r;
    c->position = reply.step_done.position;
    c->call.loss_scale = reply.step_done.loss_scale;
    return c->memory->weights->refresh(c);
}

static bool is_there(const struct zerod *c, uint32_t param)
{
    const struct published_page *page = (const struct published_page *)(const void *)c->published.base;

    return published_is_there(page, param, c->position.step);
}

/* Waits for one parameter. Return: 1 if its weights are written; 0 if the daemon has sent something; or fatal. */
static int await_one(struct zerod *c, uint32_t param, int64_t until_ms)
{
    int64_t ask_ms = 0;
    int r = 0;

    for (unsigned i = 0; i < LOOKS; i++) {
        if (is_there(c, param))
            return 1;
        relax();
    }
    while (r == 0) {
        if (is_there(c, param))
            return 1;
        r = call_watch(&c->call, until_ms, &ask_ms);
    }
    return MIN(r, 0);
}

int overlap_await(struct zerod *c, const unsigned *params, size_t n_params)
{
    int64_t until_ms = call_deadline(&c->call);

    for (size_t i = 0; i < n_params; i++) {
        int r = await_one(c, params[i], until_ms);

        if (r <= 0)
            return r < 0 ? r : overlap_settle(c);
    }
    return 0;
}

int zerod_wait(struct zerod *c, const unsigned *params, size_t n_params)
{
    int r = handle_is_formed(c);

    for (size_t i = 0; r == 0 && i < n_params; i++)
        if (params[i] >= c->layout->n_params)
            r = call_fail(&c->call, -EINVAL, "zerod_wait: no parameter %u", params[i]);
    if (r != 0 || !c->call.owes)
        return r;
    return params ? c->memory->weights->await(c, params, n_params) : overlap_settle(c);
}

int zerod_is_written(const struct zerod *c, unsigned param)
{
    if (!c->formed || param >= c->layout->n_params)
        return 0;
    return !c->call.owes || (!c->private_weights && c->published.base && is_there(c, param));
}
