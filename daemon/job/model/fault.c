/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The fault of a rank. The first refusal stays until the client clears it. Refusals for the same reason become one
 * diagnostic.
 */

#include "daemon/job/model/fault.h"

#include <assert.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/manifest.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/ledger/ledger.h"

void job_fault_reset(struct fault *fault)
{
    free(fault->params);
    diagnostic_unref(fault->diagnostic);
    *fault = (struct fault){0};
}

void job_fault(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic)
{
    job_keep(job, diagnostic);
    if (rank->process.fault.code)
        return; /* the first fault stays; the later one is only logged */
    assert(diagnostic->code != 0); /* 0: no fault */
    assert(!rank->process.fault.diagnostic);
    rank->process.fault.code = diagnostic->code;
    rank->process.fault.diagnostic = diagnostic_ref(diagnostic);
}

void job_fault_join(struct fault *fault, uint32_t param)
{
    uint32_t capacity = MAX(fault->capacity * 2, 16u);
    uint32_t *params = fault->params;

    assert(!fault->diagnostic);
    if (fault->n_params == MANIFEST_MAX_PARAMS)
        return;
    if (fault->n_params == fault->capacity) {
        params = realloc(fault->params, capacity * sizeof(*params));
        if (!params)
            return; /* the text will name fewer parameters */
        fault->params = params;
        fault->capacity = capacity;
    }
    assert(fault->n_params < fault->capacity);
    fault->params[fault->n_params++] = param;
}

void job_fault_push(struct job *job, struct job_rank *rank, enum diagnostic_code code, const struct push_record *first,
                    const struct push_record *second, const char *detail)
{
    struct fault *fault = &rank->process.fault;

    assert(code != 0); /* 0: no fault */
    if (!fault->code) {
        fault->code = code;
        if (first)
            fault->first = *first;
        fault->second = *second;
        fault->other_incarnation = second->incarnation != rank->kept.incarnation;
        snprintf(fault->detail, sizeof(fault->detail), "%s", detail ? detail : "");
    }
    if (fault->code == code && !fault->diagnostic)
        job_fault_join(fault, second->param);
    else
        diagnostics_count(job, code);
}

void job_refuse_early(struct job *job, struct job_rank *rank, const struct misplaced *misplaced)
{
    const struct push_record record = {.incarnation = rank->kept.incarnation,
                                       .sequence = 1,
                                       .step = job->ledger.step,
                                       .micro_batch = job->ledger.ranks[rank->rank].n_ended,
                                       .time_ns = job_now(job)};
    bool first = !rank->process.fault.code;

    job_fault_push(job, rank, E_EARLY, NULL, &record, misplaced->what);
    if (first)
        rank->process.fault.misplaced = misplaced;
    job_is_held(job, rank);
}

static const char *rank_string(const struct job_rank *rank, uint32_t id)
{
    return id < rank->process.n_strings && rank->process.strings[id] ? rank->process.strings[id] : "";
}

/* The strings are borrowed from the rank, because cause_*() copy them. */
static struct diagnostic_push spell_out(const struct job_rank *rank, const struct push_record *record)
{
    bool known = record->incarnation == rank->kept.incarnation; /* a predecessor's strings are gone */

    return (struct diagnostic_push){
        .present = record->sequence != 0,
        .record = *record,
        .segment = (char *)(known ? rank_string(rank, record->segment) : ""),
        .site = (char *)(known ? rank_string(rank, record->site) : ""),
    };
}

void job_drop_peer(struct job *job, struct job_rank *rank, const char *what)
{
    struct evidence_at at = job_at(job, rank);
    struct diagnostic *diagnostic = job_keep(job, cause_bad_message(&at, what));

    job_disconnect(job, rank, diagnostic);
}

void job_disconnect(struct job *job, struct job_rank *rank, const struct diagnostic *diagnostic)
{
    rank->n_disconnects++;
    if (rank->peer == RANK_IS_AWAY)
        rank->away.dropped = true;
    else if (rank->peer)
        job->ops.drop(job->ops.userdata, rank->peer, diagnostic);
}

/*
 * Returns the fault's diagnostic, which is made when it is first needed. It covers all pushes that were refused for the
 * same reason.
 */
struct diagnostic *job_fault_diagnostic(struct job *job, struct job_rank *rank, struct fault *fault, bool accumulated)
{
    struct evidence_at at = job_at(job, rank);

    assert(fault->code != 0);
    if (fault->diagnostic)
        return fault->diagnostic;
    if (accumulated) /* the fault is reported with the step, after the micro-batch has ended */
        at.micro_batch = fault->first.micro_batch;
    if (fault->code == E_DUPLICATE)
        fault->diagnostic = cause_duplicate(&(struct evidence_duplicate){
            .at = at,
            .code = fault->code,
            .params = fault->params,
            .n_params = fault->n_params,
            .first = spell_out(rank, &fault->first),
            .second = spell_out(rank, &fault->second),
            .sums_known = fault->sums_known,
            .sums_equal = fault->sums_equal,
            .abort_step = rank->kept.on_duplicate == WIRE_ON_DUPLICATE_ABORT_STEP,
            .accumulated = accumulated,
        });
    else if (fault->code == E_GRAPH_CHANGED)
        fault->diagnostic = cause_graph_changed(
            &(struct evidence_graph){.at = at, .params = fault->params, .n_params = fault->n_params, .extra = true});
    else
        fault->diagnostic = cause_push(&(struct evidence_push){
            .at = at,
            .code = fault->code,
            .params = fault->params,
            .n_params = fault->n_params,
            .push = spell_out(rank, &fault->second),
            .other_incarnation = fault->other_incarnation,
            .asked = job->layout && job->ledger.ranks[rank->rank].asked,
            .detail = fault->detail,
            .cause = fault->misplaced ? fault->misplaced->cause : NULL,
            .fix = fault->misplaced ? fault->misplaced->fix : NULL,
        });
    job_keep(job, diagnostic_ref(fault->diagnostic));
    return fault->diagnostic;
}
