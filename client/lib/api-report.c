/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sends faults and evidence that only the client can see. Long texts and lists are cut, because a message that is too
 * long would end the connection.
 */

#include <errno.h>
#include <string.h>

#include "client/lib/handle.h"
#include "core/base/base.h"
#include "core/wire/wire-request.h"

/* The most parameters in one report. Picked: with 3 bytes each they fit into a packet, and texts name only five. */
enum { MAX_REPORTED = 32768 };

static int check_params(struct zerod *c, const char *what, const unsigned *params, size_t n_params)
{
    for (size_t i = 0; i < n_params; i++)
        if (!c->layout || params[i] >= c->layout->n_params)
            return call_fail(&c->call, -EINVAL, "%s: no parameter %u%s", what, params[i],
                             c->layout ? "" : ", as zerod_form was not called");
    return 0;
}

int zerod_evidence(struct zerod *c, const struct zerod_evidence *e)
{
    struct call_text exception, raised_at, swallowed_by, dead_segment, site;
    int r = handle_check_formed(c);

    if (r == 0)
        r = check_params(c, "zerod_evidence", e->not_called, e->n_not_called);
    if (r == 0)
        r = check_params(c, "zerod_evidence", e->called, e->n_called);
    if (r != 0)
        return r;
    r = call_send(&c->call, &(struct request){
                                .type = REQUEST_EVIDENCE,
                                .evidence =
                                    {
                                        .step = c->position.step,
                                        .attempt = c->position.attempt,
                                        .exception = call_fit_text(&exception, e->exception),
                                        .raised_at = call_fit_text(&raised_at, e->raised_at),
                                        .swallowed_by = call_fit_text(&swallowed_by, e->swallowed_by),
                                        .in_forward = e->in_forward,
                                        .requires_grad_changed = e->requires_grad_changed,
                                        .dead_segment = call_fit_text(&dead_segment, e->dead_segment),
                                        .n_dead_segments = e->n_dead_segments,
                                        .site = call_fit_text(&site, e->site),
                                        .n_forwards = e->n_forwards,
                                        .n_backwards = e->n_backwards,
                                        .not_called = e->not_called,
                                        .n_not_called = MIN(e->n_not_called, (size_t)WIRE_MAX_EVIDENCE_IDS),
                                        .called = e->called,
                                        .n_called = MIN(e->n_called, (size_t)WIRE_MAX_EVIDENCE_IDS),
                                    },
                            });
    return MIN(r, 0);
}

static bool is_reported(int code)
{
    switch (code) {
    case E_GRADIENT:
    case E_PARAMETER:
    case E_REPOINTED:
    case E_DRIFTED:
    case E_WEIGHT_WRITTEN:
    case E_REDUCED_TWICE:
    case E_RELEASED_READ:
        return true;
    default:
        return false;
    }
}

int zerod_report(struct zerod *c, int code, const unsigned *params, size_t n_params, const char *detail)
{
    struct call_text room;
    int r = handle_check(c);

    if (r == 0 && !is_reported(code))
        r = call_fail(&c->call, -EINVAL, "zerod_report: %d, expected 1102 to 1107 or 1110", code);
    if (r == 0)
        r = check_params(c, "zerod_report", params, n_params);
    if (r != 0)
        return r;
    r = call_send(&c->call, &(struct request){
                                .type = REQUEST_REPORT,
                                .report = {.code = (uint32_t)code,
                                           .params = params,
                                           .n_params = MIN(n_params, (size_t)MAX_REPORTED),
                                           .detail = call_fit_text(&room, detail)},
                            });
    return MIN(r, 0);
}
