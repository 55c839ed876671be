/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What only the client can know of a fault. It is told for the texts, so too much of it is cut rather than refused: a
 * message that the daemon does not understand would cost the connection.
 */

#include <errno.h>
#include <string.h>

#include "client/lib/handle.h"
#include "core/base/base.h"

/* Parameters of a report: with 3 bytes each they fit into a packet. Picked; texts name five of them. */
enum { MAX_REPORTED = 32768 };

const char *client_fitting(struct client_text *room, const char *text)
{
    static const char more[] = " ...";
    size_t n = sizeof(room->bytes) - sizeof(more);

    if (!text || strnlen(text, sizeof(room->bytes)) < sizeof(room->bytes))
        return text ? text : "";
    while (n > 0 && ((uint8_t)text[n] & 0xc0) == 0x80) /* not inside a character */
        n--;
    memcpy(room->bytes, text, n);
    memcpy(room->bytes + n, more, sizeof(more));
    return room->bytes;
}

static int check_params(struct zerod *c, const char *what, const unsigned *params, size_t n_params)
{
    for (size_t i = 0; i < n_params; i++)
        if (!c->layout || params[i] >= c->layout->n_params)
            return client_fail(c, -EINVAL, "%s: no parameter %u%s", what, params[i],
                               c->layout ? "" : ", as zerod_form was not called");
    return 0;
}

int zerod_evidence(struct zerod *c, const struct zerod_evidence *e)
{
    struct client_text exception, raised_at, swallowed_by, dead_segment, site;
    int r = client_check(c, true);

    if (r == 0)
        r = check_params(c, "zerod_evidence", e->not_called, e->n_not_called);
    if (r == 0)
        r = check_params(c, "zerod_evidence", e->called, e->n_called);
    if (r != 0)
        return r;
    r = client_send(c, &(struct request){
                           .type = REQUEST_EVIDENCE,
                           .evidence =
                               {
                                   .step = c->position.step,
                                   .attempt = c->position.attempt,
                                   .exception = client_fitting(&exception, e->exception),
                                   .raised_at = client_fitting(&raised_at, e->raised_at),
                                   .swallowed_by = client_fitting(&swallowed_by, e->swallowed_by),
                                   .in_forward = e->in_forward,
                                   .requires_grad_changed = e->requires_grad_changed,
                                   .dead_segment = client_fitting(&dead_segment, e->dead_segment),
                                   .n_dead_segments = e->n_dead_segments,
                                   .site = client_fitting(&site, e->site),
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
    struct client_text room;
    int r = client_check(c, false);

    if (r == 0 && !is_reported(code))
        r = client_fail(c, -EINVAL, "zerod_report: %d, expected 1102 to 1107 or 1110", code);
    if (r == 0)
        r = check_params(c, "zerod_report", params, n_params);
    if (r != 0)
        return r;
    r = client_send(c, &(struct request){
                           .type = REQUEST_REPORT,
                           .report = {.code = (uint32_t)code,
                                      .params = params,
                                      .n_params = MIN(n_params, (size_t)MAX_REPORTED),
                                      .detail = client_fitting(&room, detail)},
                       });
    return MIN(r, 0);
}
