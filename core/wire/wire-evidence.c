/* SPDX-License-Identifier: Apache-2.0 */

/* Converts a rank's evidence from a request, and back to a request. */

#include "core/wire/wire-evidence.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "core/diagnosis/cause.h"
#include "core/diagnosis/evidence.h"
#include "core/wire/wire-request.h"
#include "core/wire/wire.h"

static char *copy_unless_empty(const char *text)
{
    return text && *text ? strdup(text) : NULL;
}

void rank_evidence_set(struct rank_evidence *evidence, const struct request_evidence *request, uint32_t n_params)
{
    rank_evidence_reset(evidence);
    *evidence = (struct rank_evidence){
        .present = true,
        .exception = copy_unless_empty(request->exception),
        .raised_at = copy_unless_empty(request->raised_at),
        .swallowed_by = copy_unless_empty(request->swallowed_by),
        .dead_segment = copy_unless_empty(request->dead_segment),
        .site = copy_unless_empty(request->site),
        .in_forward = request->in_forward,
        .requires_grad_changed = request->requires_grad_changed,
        .n_dead_segments = request->n_dead_segments,
        .n_forwards = request->n_forwards,
        .n_backwards = request->n_backwards,
    };
    if (request->n_not_called + request->n_called > 0)
        evidence->called = calloc(n_params, 1);
    for (size_t i = 0; evidence->called && i < request->n_not_called; i++) {
        assert(request->not_called[i] < n_params);
        evidence->called[request->not_called[i]] = EVIDENCE_NOT_CALLED;
    }
    for (size_t i = 0; evidence->called && i < request->n_called; i++) {
        assert(request->called[i] < n_params);
        evidence->called[request->called[i]] = EVIDENCE_CALLED;
    }
}

static const char *text_of(const char *text)
{
    return text ? text : "";
}

void rank_evidence_describe(const struct rank_evidence *evidence, uint32_t n_params, uint32_t *ids,
                            struct request_evidence *request)
{
    size_t n = 0;

    *request = (struct request_evidence){
        .exception = text_of(evidence->exception),
        .raised_at = text_of(evidence->raised_at),
        .swallowed_by = text_of(evidence->swallowed_by),
        .dead_segment = text_of(evidence->dead_segment),
        .site = text_of(evidence->site),
        .in_forward = evidence->in_forward,
        .requires_grad_changed = evidence->requires_grad_changed,
        .n_dead_segments = evidence->n_dead_segments,
        .n_forwards = evidence->n_forwards,
        .n_backwards = evidence->n_backwards,
    };
    for (uint32_t p = 0; evidence->called && p < n_params; p++)
        if (evidence->called[p] == EVIDENCE_NOT_CALLED)
            ids[n++] = p;
    request->not_called = ids;
    request->n_not_called = n;
    for (uint32_t p = 0; evidence->called && p < n_params; p++)
        if (evidence->called[p] == EVIDENCE_CALLED)
            ids[n++] = p;
    request->called = ids + request->n_not_called;
    request->n_called = n - request->n_not_called;
}
