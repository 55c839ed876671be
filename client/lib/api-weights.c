/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The weights that the caller sees, at addresses that never change. In stage 3 weights are readable while they are
 * gathered. The two kinds of memory (memory.h) implement this.
 */

#include <errno.h>
#include <stdlib.h>

#include "client/lib/handle.h"
#include "client/lib/api-weights.h"
#include "core/base/base.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

bool weights_is_stage3(const struct zerod *c)
{
    return c->welcome.stage == 3;
}

size_t weights_param_bytes(const struct zerod *c, uint32_t param)
{
    return c->layout->params[param].n_elems * dtype_size(c->layout->params[param].dtype);
}

uint64_t weights_bytes(const struct zerod *c)
{
    return weights_is_stage3(c) ? c->layout->range_bytes : c->layout->weight_bytes;
}

uint64_t weights_offset(const struct zerod *c, uint32_t param)
{
    const struct layout_param *p = &c->layout->params[param];

    return weights_is_stage3(c) ? p->range_offset_bytes : p->weight_offset_bytes;
}

uint8_t *weights_visible(const struct zerod *c)
{
    return c->private_weights ? c->private_weights : c->weights.base;
}

const void *zerod_weight(struct zerod *c, unsigned param)
{
    if (handle_is_formed(c) != 0)
        return NULL;
    if (param >= c->layout->n_params) {
        call_fail(&c->call, -EINVAL, "zerod_weight: no parameter %u", param);
        return NULL;
    }
    return c->memory->weights->weight(c, param);
}

int zerod_memory(struct zerod *c, enum zerod_memory which, void **base, size_t *n_bytes)
{
    int r = handle_is_formed(c);

    if (r == 0 && which != ZEROD_MEMORY_RING && which != ZEROD_MEMORY_WEIGHTS)
        r = call_fail(&c->call, -EINVAL, "zerod_memory: there is no memory %d", (int)which);
    if (r != 0)
        return r;
    *base = NULL;
    *n_bytes = 0;
    c->memory->share(c, which, base, n_bytes);
    return 0;
}

/* ---- gather and release -------------------------------------------------------------------------------- */

/* Undoes one gather of the parameter. Hides it after the last one. Return: 0 or fatal. */
static int release_one(struct zerod *c, uint32_t param)
{
    return --c->gathered[param] > 0 ? 0 : c->memory->weights->hide(c, param);
}

static int check_ids(struct zerod *c, const char *call, const unsigned *params, size_t n_params)
{
    int r = handle_check_formed(c);

    for (size_t i = 0; r == 0 && i < n_params; i++)
        if (params[i] >= c->layout->n_params)
            r = call_fail(&c->call, -EINVAL, "%s: no parameter %u", call, params[i]);
    return r;
}

enum { IDS_PER_PACKET = 16384 }; /* at most 5 bytes each */

/* Return: how many of n_left parameters one packet holds. */
static size_t part_of(size_t n_left)
{
    return MIN(n_left, (size_t)IDS_PER_PACKET);
}

/* Return: as part_of(), but at most as many as memory has room for. */
static size_t gathered_at_once(const struct zerod *c, const unsigned *params, size_t n_left)
{
    return c->memory->weights->count_fitting(c, params, part_of(n_left));
}

static int send_release(struct zerod *c, const unsigned *params, size_t n_params)
{
    uint32_t n_mends = c->call.mend.n;
    int r = 0;

    /* Stops after a reconnect, because weights_say_held() has sent the new daemon the gathered parameters. */
    for (size_t i = 0, n; r == 0 && i < n_params && c->call.mend.n == n_mends; i += n) {
        n = part_of(n_params - i);
        r = MIN(call_send(&c->call,
                          &(struct request){.type = REQUEST_RELEASE, .release = {.params = params + i, .n_params = n}}),
                0);
    }
    return r;
}

/*
 * Asks the daemon to gather. Sets *offsets to the parameters' places in the pool, or to NULL if the daemon sent none.
 * The places are valid until the next message. Return: as call_ask().
 */
static int ask_for(struct zerod *c, const unsigned *params, size_t n, const uint64_t **offsets)
{
    struct reply reply;
    int r = call_ask(&c->call, &(struct request){.type = REQUEST_GATHER, .gather = {.params = params, .n_params = n}},
                     REPLY_DONE, &reply);

    *offsets = NULL;
    if (r != 0)
        return r;
    *offsets = reply.done.n_pool_offsets == n ? reply.done.pool_offsets : NULL;
    return c->memory->weights->check_gathered(c, params, n, &reply.done);
}

static int show_one(struct zerod *c, uint32_t param, const uint64_t *offsets, size_t i)
{
    return c->memory->weights->show(c, param, offsets ? offsets[i] : 0);
}

/*
 * Undoes a failed gather: hides the first n_shown parameters, and makes the daemon release the first n_asked. Return:
 * status or fatal.
 */
static int undo_gather(struct zerod *c, const unsigned *params, size_t n_shown, size_t n_asked, int status)
{
    int r = 0;

    if (c->call.fatal)
        return status;
    for (size_t i = 0; r == 0 && i < n_shown; i++)
        r = release_one(c, params[i]);
    if (r == 0)
        r = send_release(c, params, n_asked);
    return r == 0 ? status : r;
}

/*
 * Shows the parameters of one request, and counts the gathers. On failure *n_shown is the number of counted ones.
 * Return: as weight_ops.show().
 */
static int show_all(struct zerod *c, const unsigned *params, size_t n, const uint64_t *offsets, size_t *n_shown)
{
    int finished, r = 0;

    for (*n_shown = 0; *n_shown < n; ++*n_shown) {
        uint32_t param = params[*n_shown];

        if (c->gathered[param] == 0)
            r = show_one(c, param, offsets, *n_shown);
        if (r != 0)
            break;
        c->gathered[param]++;
    }
    /* Finishes after a failure too, because the daemon reuses the pool after the next message. */
    finished = c->memory->weights->finish(c);
    return finished == 0 ? r : finished;
}

int zerod_gather(struct zerod *c, const unsigned *params, size_t n_params)
{
    int r = check_ids(c, "zerod_gather", params, n_params);

    if (r != 0 || !weights_is_stage3(c))
        return r;
    for (size_t i = 0, n, n_shown; i < n_params; i += n) {
        const uint64_t *offsets;

        n = gathered_at_once(c, params + i, n_params - i);
        r = ask_for(c, params + i, n, &offsets);
        if (r != 0)
            return undo_gather(c, params, i, i, r);
        r = show_all(c, params + i, n, offsets, &n_shown);
        if (r != 0)
            return undo_gather(c, params, i + n_shown, i + n, r);
    }
    return 0;
}

int zerod_release(struct zerod *c, const unsigned *params, size_t n_params)
{
    int r = check_ids(c, "zerod_release", params, n_params);

    if (r != 0 || !weights_is_stage3(c))
        return r;
    /* The parameters are hidden before Release is sent, because the daemon may then use their pages for others. */
    for (size_t i = 0; i < n_params; i++) {
        if (c->gathered[params[i]] == 0) {
            (void)send_release(c, params, i);
            return call_fail(&c->call, -EINVAL, "zerod_release: parameter %u is not gathered, or not as often",
                             params[i]);
        }
        r = release_one(c, params[i]);
        if (r != 0)
            return r;
    }
    return send_release(c, params, n_params);
}

/*
 * Gathers these parameters again, shows them, and makes the daemon release them once, so that the counts do not change.
 */
static int gather_again(struct zerod *c, const unsigned *params, size_t n)
{
    const uint64_t *offsets;
    int r;

    /*
     * Another rank may have aborted the step that begins now. This rank has sent nothing for that step, so it asks
     * again.
     */
    do
        r = ask_for(c, params, n, &offsets);
    while (r == ZEROD_ABORTED && !c->call.fatal);
    if (r == ZEROD_REFUSED && !c->call.fatal)
        r = call_fatal(&c->call, -EPROTO, "zerod refused to show the new weights of parameters that are gathered");
    if (r != 0)
        return c->call.fatal;
    for (size_t i = 0; r == 0 && i < n; i++)
        r = show_one(c, params[i], offsets, i);
    if (r == 0)
        r = c->memory->weights->finish(c);
    return r == 0 ? send_release(c, params, n) : r;
}

static bool has_gathered(const struct zerod *c)
{
    for (uint32_t p = 0; p < c->layout->n_params; p++)
        if (c->gathered[p] > 0)
            return true;
    return false;
}

static int gather_all_again(struct zerod *c)
{
    _cleanup_free_ unsigned *held = calloc(c->layout->n_params, sizeof(*held));
    size_t n_held = 0;
    int r = 0;

    if (!held)
        return call_fatal(&c->call, -ENOMEM, "out of memory");
    for (uint32_t p = 0; p < c->layout->n_params; p++)
        if (c->gathered[p] > 0)
            held[n_held++] = p;
    for (size_t i = 0, n; r == 0 && i < n_held; i += n) {
        n = gathered_at_once(c, held + i, n_held - i);
        r = gather_again(c, held + i, n);
    }
    return r;
}

int weights_gather_anew(struct zerod *c)
{
    return has_gathered(c) ? gather_all_again(c) : 0;
}

int zerod_prefetch(struct zerod *c, const unsigned *params, size_t n_params)
{
    int r = check_ids(c, "zerod_prefetch", params, n_params);

    if (r != 0 || !weights_is_stage3(c) || n_params == 0)
        return r;
    /* Sends one packet, because the daemon would ignore a second one while it loads the first. */
    return MIN(call_send(&c->call, &(struct request){.type = REQUEST_PREFETCH,
                                                     .prefetch = {.params = params, .n_params = part_of(n_params)}}),
               0);
}

int weights_say_held(struct zerod *c)
{
    _cleanup_free_ uint32_t *held = weights_is_stage3(c) ? malloc(IDS_PER_PACKET * sizeof(*held)) : NULL;
    size_t n = 0;
    int r = 0;

    if (!held)
        return weights_is_stage3(c) ? call_fatal(&c->call, -ENOMEM, "out of memory") : 0;
    for (uint32_t p = 0; r == 0 && p < c->layout->n_params; p++) {
        for (uint32_t i = 0; r == 0 && i < c->gathered[p]; i++) {
            held[n++] = p;
            if (n < IDS_PER_PACKET)
                continue;
            r = call_say(&c->call, &(struct request){.type = REQUEST_HELD, .held = {.params = held, .n_params = n}});
            n = 0;
        }
    }
    return r == 0 && n > 0
               ? call_say(&c->call, &(struct request){.type = REQUEST_HELD, .held = {.params = held, .n_params = n}})
               : r;
}
