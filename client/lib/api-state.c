/* SPDX-License-Identifier: Apache-2.0 */

/* Reads state of a parameter (masters, moments, counts) between steps, and writes it inside a write window. */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "client/lib/handle.h"
#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

int zerod_read_state(struct zerod *c, unsigned param, enum zerod_state which, void *dst)
{
    struct mapping mapping = MAPPING_NULL;
    struct reply reply;
    uint64_t n_elems;
    int r = handle_check_formed(c);

    if (r == 0 && (which > ZEROD_STEP_COUNT || (which != ZEROD_GRAD_NORM && param >= c->layout->n_params)))
        r = call_fail(&c->call, -EINVAL, "zerod_read_state: no parameter %u of %u, or no such state", param,
                      c->layout->n_params);
    if (r == 0)
        r = call_ask(&c->call,
                     &(struct request){.type = REQUEST_READ_STATE,
                                       .read_state = {.param = param, .kind = (enum wire_state_kind)which}},
                     REPLY_STATE_IS, &reply);
    if (r != 0)
        return r;
    if (which == ZEROD_GRAD_NORM) {
        memcpy(dst, &reply.state_is.norm, sizeof(double));
        return 0;
    }
    if (which == ZEROD_STEP_COUNT) {
        memcpy(dst, &(double){(double)reply.state_is.count}, sizeof(double));
        return 0;
    }
    n_elems = c->layout->params[param].n_elems;
    if (n_elems == 0)
        return 0;
    if (reply.state_is.n_segments == 0 || reply.state_is.n_elems != n_elems ||
        reply.state_is.segments[0].n_bytes < n_elems * sizeof(float))
        return call_fatal(&c->call, -EPROTO, "zerod answered a question for state without all of it");
    r = mapping_init(&mapping, steal_fd(&c->call.in.fds[0]), reply.state_is.segments[0].n_bytes, PROT_READ);
    if (r < 0)
        return call_fail(&c->call, r, "mapping the state of a parameter: %s", strerror(-r));
    memcpy(dst, mapping.base, n_elems * sizeof(float));
    mapping_deinit(&mapping);
    return 0;
}

int zerod_save_checkpoint(struct zerod *c, bool wait)
{
    struct reply reply;
    int r = handle_check_formed(c);

    return r ? r
             : call_ask(&c->call, &(struct request){.type = REQUEST_SAVE_CHECKPOINT, .save_checkpoint = {.wait = wait}},
                        REPLY_DONE, &reply);
}

/* Sets *count for ZEROD_STEP_COUNT. Return: 0, or an error if this state cannot be written. */
static int check_state(struct zerod *c, unsigned param, enum zerod_state which, const void *src, uint64_t *count)
{
    double n = 0;

    if (param >= c->layout->n_params || which > ZEROD_STEP_COUNT || which == ZEROD_GRAD_NORM)
        return call_fail(&c->call, -EINVAL, "zerod_write_state: no parameter %u of %u, or no state that can be written",
                         param, c->layout->n_params);
    if (which == ZEROD_STEP_COUNT)
        memcpy(&n, src, sizeof(n));
    if (!(n >= 0 && n <= 0x1p53) || n != (double)(uint64_t)n)
        return call_fail(&c->call, -EINVAL,
                         "zerod_write_state: a step count of %g; expected a whole number from 0 to 2^53", n);
    *count = (uint64_t)n;
    return 0;
}

/* Writes the values where the daemon will read them. Every failure is fatal, because the daemon already expects them.
 * */
static int fill_place(struct zerod *c, const struct reply_state_is *place, uint64_t n_elems, const void *src)
{
    size_t n_bytes = n_elems * sizeof(float);
    _cleanup_close_ int fd = steal_fd(&c->call.in.fds[0]);
    void *base;

    if (place->n_elems != n_elems || place->offset_bytes > place->segments[0].n_bytes ||
        n_bytes > place->segments[0].n_bytes - place->offset_bytes ||
        mapping_check(fd, place->offset_bytes, n_bytes) < 0)
        return call_fatal(&c->call, -EPROTO, "zerod gave a place for other state than was asked for");
    base = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)place->offset_bytes);
    if (base == MAP_FAILED)
        return call_fatal(&c->call, -errno, "mapping the state to be written: %s", strerror(errno));
    (void)failpoint("state-mapped");
    memcpy(base, src, n_bytes);
    munmap(base, n_bytes);
    return 0;
}

int zerod_write_state(struct zerod *c, unsigned param, enum zerod_state which, const void *src)
{
    struct reply reply;
    uint64_t count = 0;
    int r = handle_check_formed(c);

    if (r == 0)
        r = check_state(c, param, which, src, &count);
    if (r == 0)
        r = call_ask(
            &c->call,
            &(struct request){.type = REQUEST_WRITE_STATE,
                              .write_state = {.param = param, .kind = (enum wire_state_kind)which, .count = count}},
            REPLY_STATE_IS, &reply);
    if (r != 0)
        return r;
    if (which == ZEROD_STEP_COUNT || c->layout->params[param].n_elems == 0 || c->rank != 0)
        return 0; /* the request has the count; of the other states only rank 0's are used */
    if (reply.state_is.n_segments == 0)
        return call_fatal(&c->call, -EPROTO, "zerod gave no place for the state to be written");
    return fill_place(c, &reply.state_is, c->layout->params[param].n_elems, src);
}
