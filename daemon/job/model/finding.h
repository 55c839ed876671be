/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Findings: gradients and times of a job that are odd, but no error that the daemon could refuse. The status shows a
 * finding as long as it holds. Each kind has its own file, which looks at each step and adds its findings.
 */

#include <stdint.h>

enum finding_kind {
    FINDING_RANK_NORM,     /* rank-norm.h */
    FINDING_ZERO_GRADIENT, /* zero-gradient.h */
    FINDING_ZERO_LR,       /* zero-lr.h */
    FINDING_SLOW_RANK,     /* phases.h */
    N_FINDINGS,
};

enum {
    FINDINGS_MAX = 16,
    FINDING_TEXT_BYTES = 512,
};

struct finding {
    enum finding_kind kind;
    int64_t rank;  /* -1: none */
    int64_t param; /* -1: none */
    char text[FINDING_TEXT_BYTES];
};

struct findings {
    struct finding list[FINDINGS_MAX];
    unsigned n;
};

/* Adds a finding. Return: the finding, to be filled in, or NULL if there is no room. */
struct finding *findings_add(struct findings *findings, enum finding_kind kind);
