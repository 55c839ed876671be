/* SPDX-License-Identifier: Apache-2.0 */

/* Asks for steps, and aborts them. */

#include <errno.h>
#include <math.h>

#include "client/lib/handle.h"
#include "client/lib/push.h"
#include "client/lib/api-step.h"
#include "client/lib/api-window.h"
#include "client/lib/written.h"
#include "core/base/base.h"
#include "core/wire/hyper-check.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

void step_forget(struct zerod *c, const struct wire_position *position)
{
    c->position = *position;
    window_close(c);
    push_close(c);
}

static struct wire_hyper wire_hyper(const struct zerod_hyper *h)
{
#define FIELD(kind, field, plain, text, gives, range, only) .field = h->field,
    return (struct wire_hyper){HYPER_FIELDS(FIELD).given = h->given};
#undef FIELD
}

/* Return: the first group with a wrong setting, which is in *problem; n_groups if there is no such group. */
static unsigned find_wrong_hyper(const struct zerod *c, const struct zerod_hyper *groups, unsigned n_groups,
                                 struct hyper_problem *problem)
{
    for (unsigned g = 0; groups && g < n_groups; g++) {
        struct wire_hyper wanted = wire_hyper(&groups[g]), hyper = hyper_merge(&c->welcome.hyper, &wanted);

        if (hyper_is_wrong(c->optimizer, &hyper, problem))
            return g;
    }
    return n_groups;
}

static int check_hypers(struct zerod *c, const struct zerod_step_args *args)
{
    struct hyper_problem problem;
    unsigned g = find_wrong_hyper(c, args->groups, args->n_groups, &problem);

    return g == args->n_groups
               ? 0
               : call_fail(&c->call, ZEROD_REFUSED, "zerod_step: %s of parameter group %u is %g; expected %s",
                           problem.name, g, problem.value, problem.expected);
}

/* Return: true also for NaN. */
static bool is_below_0_or_infinite(double value)
{
    return !(value >= 0) || isinf(value);
}

/* Checks the arguments. A refused request is not sent, so the caller can ask for the step again. */
static int check_args(struct zerod *c, const struct zerod_step_args *args)
{
    if (args && args->groups && args->n_groups != c->layout->n_groups)
        return call_fail(&c->call, -EINVAL, "zerod_step: n_groups is %u, but %u parameter groups were declared",
                         args->n_groups, c->layout->n_groups);
    if (args && args->blob && args->blob_len > WIRE_MAX_BLOB_BYTES)
        return call_fail(&c->call, -EINVAL, "zerod_step: a blob of %zu bytes; at most %d", args->blob_len,
                         WIRE_MAX_BLOB_BYTES);
    if (args && args->max_norm && is_below_0_or_infinite(*args->max_norm))
        return call_fail(&c->call, ZEROD_REFUSED, "zerod_step: max_norm is %g; expected a finite number of at least 0",
                         *args->max_norm);
    if (args && is_below_0_or_infinite(args->loss_scale))
        return call_fail(&c->call, ZEROD_REFUSED,
                         "zerod_step: loss_scale is %g; expected a finite number of at least 0", args->loss_scale);
    return args ? check_hypers(c, args) : 0;
}

static struct request_step step_request(const struct zerod *c, const struct zerod_step_args *args,
                                        struct wire_hyper *groups)
{
    struct request_step request = {
        .step = c->position.step, .attempt = c->position.attempt, .wants_decision = c->flags & ZEROD_OVERLAP_UPDATE};

    if (!args)
        return request;
    for (unsigned g = 0; args->groups && g < args->n_groups; g++)
        groups[g] = wire_hyper(&args->groups[g]);
    request.groups = groups;
    request.n_groups = args->groups ? args->n_groups : 0;
    request.has_max_norm = args->max_norm != NULL;
    request.max_norm = args->max_norm ? *args->max_norm : 0;
    request.loss_scale = args->loss_scale;
    request.found_inf = args->found_inf;
    request.has_blob = args->blob != NULL;
    request.blob = args->blob;
    request.n_blob_bytes = args->blob ? args->blob_len : 0;
    return request;
}

int zerod_expect(struct zerod *c, const struct zerod_hyper *groups, unsigned n_groups)
{
    int r = handle_check_formed(c);

    if (r != 0 || !c->speculates)
        return r != 0 ? r : 1;
    if (n_groups != c->layout->n_groups)
        return call_fail(&c->call, -EINVAL, "zerod_expect: n_groups is %u, but %u parameter groups were declared",
                         n_groups, c->layout->n_groups);
    free(steal_ptr(c->expected));
    if (find_wrong_hyper(c, groups, n_groups, &(struct hyper_problem){0}) < n_groups)
        return 0; /* zerod_step() will refuse it */
    c->expected = calloc(n_groups, sizeof(*c->expected));
    for (unsigned g = 0; c->expected && g < n_groups; g++)
        c->expected[g] = wire_hyper(&groups[g]);
    return 0; /* without memory, the daemon expects the settings of the last step */
}

int zerod_step(struct zerod *c, const struct zerod_step_args *args, struct zerod_step_result *result)
{
    struct wire_hyper groups[WIRE_MAX_GROUPS];
    struct reply reply;
    int r = handle_check_formed(c);

    if (r == 0)
        r = check_args(c, args);
    if (r == 0)
        r = zerod_check_weights(c, NULL);
    if (r == 0)
        r = c->memory->wait(c);
    if (r != 0)
        return r;
    r = call_ask(&c->call, &(struct request){.type = REQUEST_STEP, .step = step_request(c, args, groups)},
                 REPLY_STEP_DONE, &reply);
    if (r != 0)
        return r;
    c->position = reply.step_done.position;
    c->call.loss_scale = reply.step_done.loss_scale;
    if (result)
        *result = (struct zerod_step_result){
            .epoch = reply.step_done.position.step,
            .applied = reply.step_done.applied,
            .grad_norm = reply.step_done.norm,
            .loss_scale = reply.step_done.loss_scale,
            .lr = reply.step_done.lr,
            .n_missing = reply.step_done.n_missing,
        };
    return c->call.owes ? 0 : c->memory->weights->refresh(c);
}

int zerod_grad_norm(struct zerod *c, double *norm)
{
    struct reply reply;
    int r = handle_check_formed(c);

    if (r == 0)
        r = call_ask(&c->call, &(struct request){.type = REQUEST_GRAD_NORM}, REPLY_DONE, &reply);
    if (r == 0)
        *norm = reply.done.norm;
    return r;
}

int zerod_abort_step(struct zerod *c, const char *why)
{
    struct call_text room;
    struct reply reply;
    int r = handle_check_formed(c);

    if (r == 0)
        r = call_ask(&c->call,
                     &(struct request){.type = REQUEST_ABORT_STEP, .abort_step = {.why = call_fit_text(&room, why)}},
                     REPLY_DONE, &reply);
    if (r != 0)
        return r;
    step_forget(c, &reply.done.position);
    written_forget_reported(c);
    return call_acknowledge_abort(&c->call, c->position.attempt);
}

int zerod_clear_fault(struct zerod *c)
{
    struct reply reply;
    int r = handle_check(c);

    if (r == 0)
        r = call_ask(&c->call, &(struct request){.type = REQUEST_CLEAR_FAULT}, REPLY_DONE, &reply);
    if (r == 0)
        written_forget_reported(c);
    return r;
}
