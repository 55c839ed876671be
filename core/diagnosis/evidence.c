/* SPDX-License-Identifier: Apache-2.0 */

/* Keeps the evidence of ranks' clients, and merges it into the evidence of a diagnostic. */

#include "core/diagnosis/evidence.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"

void rank_evidence_reset(struct rank_evidence *evidence)
{
    free(evidence->exception);
    free(evidence->raised_at);
    free(evidence->swallowed_by);
    free(evidence->dead_segment);
    free(evidence->site);
    free(evidence->called);
    *evidence = (struct rank_evidence){0};
}

/* Merges the states of modules. If two ranks disagree about a module, the module counts as called. */
static void add_called(const struct rank_evidence *evidence, struct evidence_missing *missing, uint8_t *called)
{
    if (!evidence->called || !called)
        return;
    for (size_t i = 0; i < missing->n_params; i++)
        called[i] = MAX(called[i], evidence->called[missing->params[i]]);
    missing->called = called;
}

void rank_evidence_add(const struct rank_evidence *evidence, struct evidence_missing *missing, uint8_t *called,
                       bool whole)
{
    if (!evidence->present)
        return;
    if (evidence->exception && !missing->exception.text) {
        missing->exception.text = evidence->exception;
        missing->exception.raised_at = evidence->raised_at;
        missing->exception.swallowed_by = evidence->swallowed_by;
        missing->exception.in_forward = evidence->in_forward;
    }
    if (whole && evidence->dead_segment && !missing->dead_segments.first) {
        missing->dead_segments.first = evidence->dead_segment;
        missing->dead_segments.n = evidence->n_dead_segments;
        missing->dead_segments.site = evidence->site;
    }
    missing->requires_grad_changed |= whole && evidence->requires_grad_changed;
    missing->n_forwards = MAX(missing->n_forwards, evidence->n_forwards);
    missing->n_backwards = MAX(missing->n_backwards, evidence->n_backwards);
    add_called(evidence, missing, called);
}
