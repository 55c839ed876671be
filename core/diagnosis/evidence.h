/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Evidence: a client's report on why its rank did not push parameters in the open step. The daemon keeps it until it
 * makes a text about these parameters, or the step ends. The report comes from the rank at fault, so it only explains.
 * The ledger decides which gradients are missing.
 */

#include <stdbool.h>
#include <stdint.h>

struct evidence_missing;

enum { EVIDENCE_NOT_CALLED = 1, EVIDENCE_CALLED = 2 }; /* state of a parameter's module; 0: unknown */

struct rank_evidence {
    bool present;
    char *exception, *raised_at, *swallowed_by, *dead_segment, *site; /* owned; NULL: not reported */
    bool in_forward, requires_grad_changed;
    uint32_t n_dead_segments;
    uint64_t n_forwards, n_backwards;
    uint8_t *called; /* n_params entries, EVIDENCE_* or 0; owned; NULL: not reported */
};

void rank_evidence_reset(struct rank_evidence *evidence);

/*
 * Fills the fields of missing that are not set yet. Strings are borrowed. called: memory for missing->n_params entries,
 * to which missing->called will point; may be NULL. whole: the rank misses all of missing->params. Only then does the
 * client's evidence about segments and frozen parameters apply.
 */
void rank_evidence_add(const struct rank_evidence *evidence, struct evidence_missing *missing, uint8_t *called,
                       bool whole);
