/* SPDX-License-Identifier: Apache-2.0 */

/* Keeps and logs the job's last diagnostics, and counts refusals by code. */

#include "daemon/job/model/diagnostics.h"

#include "core/base/base.h"
#include "core/diagnosis/diagnosis.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/kept.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/timeline.h"

void diagnostics_count(struct job *job, unsigned code)
{
    for (size_t i = 0; i < job->diagnostics.n_refused; i++) {
        if (job->diagnostics.refused[i].code == code) {
            job->diagnostics.refused[i].n++;
            return;
        }
    }
    if (job->diagnostics.n_refused < ARRAY_SIZE(job->diagnostics.refused)) {
        job->diagnostics.refused[job->diagnostics.n_refused].code = code;
        job->diagnostics.refused[job->diagnostics.n_refused++].n = 1;
    }
}

static struct diagnostic *keep(struct job *job, struct diagnostic *diagnostic, bool stranger)
{
    diagnostic->time_ns = job_now(job);
    kept_add(&job->diagnostics.kept, diagnostic, stranger);
    timeline_diagnostic(job, diagnostic->has_rank ? (int64_t)diagnostic->rank : -1, diagnostic->code);
    if (diagnostic->warning)
        job->stats.counters.warnings++;
    else
        diagnostics_count(job, diagnostic->code);
    job->ops.log(job->ops.userdata, diagnostic);
    return diagnostic;
}

struct diagnostic *job_keep(struct job *job, struct diagnostic *diagnostic)
{
    return keep(job, diagnostic, false);
}

struct diagnostic *job_keep_stranger(struct job *job, struct diagnostic *diagnostic)
{
    return keep(job, diagnostic, true);
}
