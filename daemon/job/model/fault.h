/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "core/diagnosis/diagnosis.h"
#include "daemon/ledger/ledger.h"

struct job;
struct job_rank;

/*
 * Static texts about a request that cannot be made now. fix[0]: for callers of the C API; fix[1]: for the Python
 * package.
 */
struct misplaced {
    const char *what, *cause, *fix[2];
};

/*
 * A rank's fault is a refusal that stays until the client clears it. Pushes that are refused later for the same reason
 * join the fault.
 */
struct fault {
    enum diagnostic_code code; /* 0: none */
    uint32_t *params;          /* parameters whose pushes were refused; owned */
    uint32_t n_params, capacity;
    struct push_record first, second; /* second: the refused push of params[0]; first: the push that it repeats */
    bool other_incarnation;
    bool sums_known, sums_equal;
    char detail[192];
    const struct misplaced *misplaced; /* texts of the refused request; NULL: a push was refused */
    struct diagnostic *diagnostic;     /* made when it is first needed; after that, no push joins the fault */
    bool told;                         /* the client has received the refusal; after that, gathers are refused, too */
};

void job_fault(struct job *job, struct job_rank *rank,
               struct diagnostic *diagnostic); /* takes diagnostic; the fault stays */

/* Drops a rank whose client broke the protocol (E1403). what: a sentence that says how. */
void job_drop_peer(struct job *job, struct job_rank *rank, const char *what);
/* Closes the rank's connection when the running verb has returned. diagnostic: sent to the rank first; NULL: none. */
void job_disconnect(struct job *job, struct job_rank *rank, const struct diagnostic *diagnostic);
struct diagnostic *job_fault_diagnostic(struct job *job, struct job_rank *rank, struct fault *fault, bool accumulated);
void job_fault_join(struct fault *fault, uint32_t param);
void job_fault_push(struct job *job, struct job_rank *rank, enum diagnostic_code code, const struct push_record *first,
                    const struct push_record *second, const char *detail);

/* Refuses and answers a request that came too early (E1003). */
void job_refuse_early(struct job *job, struct job_rank *rank, const struct misplaced *misplaced);
void job_fault_reset(struct fault *fault);
