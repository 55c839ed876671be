/* SPDX-License-Identifier: Apache-2.0 */

/* Reports once that all ranks push the same bytes, step after step. */

#include "daemon/job/model/alike.h"

#include <math.h>

#include "core/diagnosis/cause.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/pushed.h"

enum {
    STEPS_UNTIL_SAID = 3, /* steps in a row; picked: batches that are equal by chance are not equal three times */
    LEAST_PARAMS = 2,     /* one parameter alone may well have the same gradient on all ranks */
};

void alike_note_step(struct job *job, double norm)
{
    struct job_alike *alike = &job->alike;
    bool is_alike;

    if (alike->is_said || job->world.end - job->world.first < 2)
        return;
    is_alike = alike->n_compared >= LEAST_PARAMS && !alike->differs && isfinite(norm) && norm != 0;
    alike->n_in_a_row = is_alike ? alike->n_in_a_row + 1 : 0;
    alike->n_compared = 0;
    alike->differs = false;
    if (alike->n_in_a_row < STEPS_UNTIL_SAID)
        return;
    alike->is_said = true;
    job_keep(job, cause_alike(&(struct evidence_alike){
                      .at = {.layout = job->layout,
                             .rank = -1,
                             .step = (int64_t)job->ledger.step,
                             .micro_batch = -1,
                             .client = job_client(job)},
                      .first_rank = job->world.first,
                      .n_ranks = job->world.end - job->world.first,
                      .n_params = job_n_trainable(job),
                      .n_steps = alike->n_in_a_row,
                  }));
}
