/* SPDX-License-Identifier: Apache-2.0 */

/* Requests with which a client reports names of call sites, its own refusals, and evidence. */

#include "daemon/job/client-report.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/diagnosis/evidence.h"
#include "core/wire/wire-evidence.h"
#include "core/wire/wire.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"

enum { MAX_STRING_BYTES = 4 << 20 }; /* per incarnation; call sites of a large model are some 100 KiB */

void job_intern(struct job *job, struct job_rank *rank, const struct request_intern *request)
{
    size_t n_bytes = strlen(request->text) + 1;
    char **strings = rank->process.strings;

    if (rank->process.string_bytes + n_bytes > MAX_STRING_BYTES) {
        job_fault(job, rank,
                  cause_quota(&(struct evidence_quota){.at = job_at(job, rank),
                                                       .what = "interned strings",
                                                       .unit = "bytes",
                                                       .asked = n_bytes,
                                                       .held = rank->process.string_bytes,
                                                       .allowed = MAX_STRING_BYTES,
                                                       .fix = "intern each call site once and use its id"}));
        return;
    }
    if (request->id >= rank->process.n_strings) {
        uint32_t n = MAX(request->id + 1, rank->process.n_strings * 2);

        strings = realloc(rank->process.strings, n * sizeof(*strings));
        if (!strings)
            return; /* diagnostics will not name the call site */
        memset(strings + rank->process.n_strings, 0, (n - rank->process.n_strings) * sizeof(*strings));
        rank->process.strings = strings;
        rank->process.n_strings = n;
    }
    assert(request->id < rank->process.n_strings);
    free(strings[request->id]);
    strings[request->id] = strdup(request->text);
    rank->process.string_bytes += n_bytes;
}

/*
 * Does the fault concern the request for the step, and not a push? Then the step may proceed when the fault is cleared.
 */
static bool is_of_step(const struct fault *fault)
{
    switch (fault->code) {
    case E_MISSING:
    case E_NONFINITE:
    case E_LOSS_SCALE:
        return true;
    case E_DUPLICATE: /* more micro-batches than configured */
    case E_GRAPH_CHANGED:
        return fault->n_params == 0;
    default:
        return false;
    }
}

void job_clear_fault(struct job *job, struct job_rank *rank)
{
    struct diagnostic *notice = steal_ptr(rank->process.abort_notice);

    if (notice) {
        job_refuse(job, rank, notice, true);
        diagnostic_unref(notice);
        return;
    }
    rank->step.proceed = is_of_step(&rank->process.fault);
    job_fault_reset(&rank->process.fault);
    job_answer_done(job, rank);
}

static bool are_params(const struct job *job, const uint32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= job->layout->n_params)
            return false;
    return true;
}

void job_report(struct job *job, struct job_rank *rank, const struct request_report *request)
{
    struct evidence_at at = job_at(job, rank);

    if (request->n_params > 0 && (!job->layout || !are_params(job, request->params, request->n_params))) {
        job_drop_peer(job, rank, "Report.params: no such parameter");
        return;
    }
    job_fault(job, rank,
              cause_report(&at, (enum diagnostic_code)request->code, request->params, request->n_params,
                           request->detail, rank->kept.formed));
}

void job_evidence(struct job *job, struct job_rank *rank, const struct request_evidence *request)
{
    if (!are_params(job, request->not_called, request->n_not_called) ||
        !are_params(job, request->called, request->n_called)) {
        job_drop_peer(job, rank, "Evidence: no such parameter");
        return;
    }
    if (request->step == job->ledger.step && request->attempt == job->ledger.attempt)
        rank_evidence_set(&rank->step.evidence, request, job->layout->n_params);
}
