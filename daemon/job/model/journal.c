/* SPDX-License-Identifier: Apache-2.0 */

/* The journal keeps each diagnostic, counts refusals by code, and hands both to the log. */

#include "daemon/job/model/journal.h"

#include "core/base/base.h"
#include "core/diagnosis/diagnosis.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/kept.h"
#include "daemon/job/model/model.h"

void journal_count(struct job *job, unsigned code)
{
    for (size_t i = 0; i < job->journal.n_refused; i++) {
        if (job->journal.refused[i].code == code) {
            job->journal.refused[i].n++;
            return;
        }
    }
    if (job->journal.n_refused < ARRAY_SIZE(job->journal.refused)) {
        job->journal.refused[job->journal.n_refused].code = code;
        job->journal.refused[job->journal.n_refused++].n = 1;
    }
}

static struct diagnostic *keep(struct job *job, struct diagnostic *diagnostic, bool stranger)
{
    diagnostic->time_ns = job_now(job);
    kept_add(&job->journal.kept, diagnostic, stranger);
    if (diagnostic->warning)
        job->stats.counters.warnings++;
    else
        journal_count(job, diagnostic->code);
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
