/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct job;

/* Which sets of parameters were missing: a warning comes once per set. */
struct job_missing {
    uint64_t seen[64]; /* digests of the sets that were reported */
    unsigned n_seen;
    uint64_t last;     /* digest of the last step's set, 0: none was missing */
    uint64_t n_last;   /* steps in a row with that set */
    uint32_t n_params; /* that no rank pushed in the step under way */
};

/* Warns of parameters that a rank has not pushed; any, all: a bit per parameter, who of the world has pushed it. */
void missing_report(struct job *job, const uint8_t *any, const uint8_t *all);

/* Has a rank not pushed a parameter that is trained? */
bool missing_any(const struct job *job, const uint8_t *all);
