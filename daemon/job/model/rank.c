/* SPDX-License-Identifier: Apache-2.0 */

/* The memory of a rank: data of one incarnation, and data of the open step. */

#include "daemon/job/model/rank.h"

#include "core/base/base.h"
#include "core/diagnosis/diagnosis.h"
#include "core/diagnosis/evidence.h"
#include "core/layout/manifest.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/model.h"
#include "daemon/memory/ring.h"

const char rank_is_away;

void rank_forget_away(struct job_rank *rank)
{
    free(rank->away.answer);
    rank->away = (struct away){0};
}

void rank_forget_step(struct job_rank *rank)
{
    free(rank->step.given_up_why);
    rank_evidence_reset(&rank->step.evidence);
    rank->step = (struct rank_step){
        .n_forwards_before = rank->kept.n_forwards,
        .n_backwards_before = rank->kept.n_backwards,
    };
}

/* Forgets all data of the rank's current process, before a successor attaches or the rank is freed. */
void rank_forget_incarnation(struct job_rank *rank)
{
    struct rank_process *process = &rank->process;

    for (uint32_t i = 0; i < process->n_strings; i++)
        free(process->strings[i]);
    free(process->strings);
    manifest_deinit(&process->manifest);
    job_fault_reset(&process->fault);
    job_fault_reset(&process->again);
    diagnostic_unref(process->abort_notice);
    free(process->look.text);
    *process = (struct rank_process){0};
    phases_forget(rank);

    free(steal_ptr(rank->kept.client));
    rank->kept.formed = rank->kept.ready = false;
    rank->kept.n_received = rank->kept.n_forwards = rank->kept.n_backwards = rank->kept.n_pushes = 0;

    /* The step's other fields are kept, because a backward that this process gave up stays given up. */
    rank_evidence_reset(&rank->step.evidence);
    rank->step.n_forwards_before = rank->step.n_backwards_before = 0;
}

void rank_deinit(struct job_rank *rank)
{
    rank_forget_incarnation(rank);
    rank_forget_away(rank);
    ring_orphan(rank->rings[0]);
    ring_orphan(rank->rings[1]);
    free(rank->step.given_up_why);
    free(rank->blob.data);
    free(rank->kept.blob.data);
    free(rank->request.blob.data);
    free(rank->request.args.groups);
    free(rank->expected.groups);
    free(rank->gathers.counts);
    free(rank->gathers.params);
}

void job_set_writing(struct job *job, bool writing)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].rings[0] && job->ranks[r].rings[0]->ready)
            ring_set_writing(job->ranks[r].rings[0], writing);
}

bool job_anybody_is_here(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].peer)
            return true;
    return false;
}

static bool have_left(const struct job *job, unsigned first, unsigned end)
{
    for (unsigned r = first; r < end; r++)
        if (!job->ranks[r].kept.left)
            return false;
    return true;
}

bool job_all_left(const struct job *job)
{
    return have_left(job, 0, job->world.size);
}

bool job_own_left(const struct job *job)
{
    return have_left(job, job->world.first, job->world.end);
}
