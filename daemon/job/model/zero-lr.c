/* SPDX-License-Identifier: Apache-2.0 */

/* Steps that train nothing, because their learning rate is 0. */

#include "daemon/job/model/zero-lr.h"

#include <inttypes.h>
#include <stdio.h>

#include "daemon/job/model/model.h"

enum { STEPS_UNTIL_SAID = 100 }; /* steps in a row; picked: long enough to notice that nothing is trained */

void zero_lr_note_step(struct job *job)
{
    bool is_zero = true;

    if (!job->kept.applied)
        return;
    for (uint32_t g = 0; g < job->layout->n_groups; g++)
        is_zero &= job->decision.hypers[g].lr == 0;
    job->zero_lr.n_in_a_row = is_zero ? job->zero_lr.n_in_a_row + 1 : 0;
}

void zero_lr_find(const struct job *job, struct findings *findings)
{
    struct finding *finding =
        job->zero_lr.n_in_a_row >= STEPS_UNTIL_SAID ? findings_add(findings, FINDING_ZERO_LR) : NULL;

    if (finding)
        snprintf(finding->text, sizeof(finding->text),
                 "the learning rate of all parameter groups was 0 in the last %" PRIu32
                 " steps: they have trained nothing; a scheduler may be at its end, or may not be stepped",
                 job->zero_lr.n_in_a_row);
}
