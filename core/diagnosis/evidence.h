/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What a rank's client says of parameters that it did not push in the open step (Evidence), kept until a text about
 * them is made or the step is over. It is said by the one who is judged, so it explains and never decides: whether
 * something is missing, the ledger knows.
 */

#include <stdbool.h>
#include <stdint.h>

struct evidence_missing;

enum { EVIDENCE_NOT_CALLED = 1, EVIDENCE_CALLED = 2 }; /* of a parameter's module; 0: unknown */

struct rank_evidence {
    bool present;
    char *exception, *raised_at, *swallowed_by, *dead_segment, *site; /* owned; NULL: not said */
    bool in_forward, requires_grad_changed;
    uint32_t n_dead_segments;
    uint64_t n_forwards, n_backwards;
    uint8_t *called; /* n_params, EVIDENCE_* or 0; owned; NULL: nothing said */
};

void rank_evidence_reset(struct rank_evidence *evidence);

/*
 * Adds to missing what it does not say yet; strings are borrowed. called: missing->n_params entries, of which
 * missing->called will be; NULL: no memory. whole: the rank misses all of missing->params; only then are they
 * the segments, or the frozen parameters, that its client speaks of.
 */
void rank_evidence_add(const struct rank_evidence *evidence, struct evidence_missing *missing, uint8_t *called,
                       bool whole);
