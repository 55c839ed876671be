/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "core/diagnosis/diagnosis.h"
#include "daemon/ledger/ledger.h"

struct job;
struct job_rank;

/* A request that cannot be made now. Static texts; fix[0] is for callers of the C API, fix[1] for the Python package.
 */
struct misplaced {
    const char *what, *cause, *fix[2];
};

/*
 * The fault of a rank: a refusal that is sticky until cleared. Pushes that are refused later for the same reason join
 * it.
 */
struct fault {
    enum diagnostic_code code; /* 0: none */
    uint32_t *params;          /* owned */
    uint32_t n_params, capacity;
    struct push_record first, second; /* of params[0] */
    bool other_incarnation;
    bool sums_known, sums_equal;
    char detail[192];
    const struct misplaced *misplaced; /* of a refused request; NULL: of a push */
    struct diagnostic *diagnostic;     /* set when the text was first needed; from then on no push joins */
    bool told;                         /* a refusal has told the client; from then on gathers are refused, too */
};

void job_fault(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic); /* takes diagnostic; sticky */

/* Drops a rank whose client broke the protocol (E1403). what: a sentence that says how. */
void job_drop_peer(struct job *job, struct job_rank *rank, const char *what);
/* Closes the rank's connection when the verb has returned. diagnostic: sent to the rank first; NULL: none. */
void job_disconnect(struct job *job, struct job_rank *rank, const struct diagnostic *diagnostic);
struct diagnostic *job_fault_diagnostic(struct job *job, struct job_rank *rank, struct fault *fault, bool accumulated);
void job_fault_join(struct fault *fault, uint32_t param);
void job_fault_push(struct job *job, struct job_rank *rank, enum diagnostic_code code, const struct push_record *first,
                    const struct push_record *second, const char *detail);

/* Refuses and answers a request that came too early (E1003). */
void job_refuse_early(struct job *job, struct job_rank *rank, const struct misplaced *misplaced);
void job_fault_reset(struct fault *fault);
