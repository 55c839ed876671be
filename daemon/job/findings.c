/* SPDX-License-Identifier: Apache-2.0 */

/* Collects the findings of all kinds. */

#include "daemon/job/findings.h"

#include "daemon/job/model/model.h"
#include "daemon/job/model/phases.h"
#include "daemon/job/model/rank-norm.h"
#include "daemon/job/model/zero-gradient.h"
#include "daemon/job/model/zero-lr.h"

void findings_of(const struct job *job, struct findings *findings)
{
    findings->n = 0;
    if (!job->layout)
        return;
    rank_norm_find(job, findings);
    phases_find(job, findings);
    zero_lr_find(job, findings);
    zero_gradient_find(job, findings);
}
