/* SPDX-License-Identifier: Apache-2.0 */

/* A rank's own memory: what belongs to one incarnation, and what to the open step. */

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
    rank->proceed = rank->abandoned = false;
    rank->n_given_up = 0;
    free(steal_ptr(rank->given_up_why));
    rank_evidence_reset(&rank->evidence);
    rank->n_forwards_at_step = rank->n_forwards;
    rank->n_backwards_at_step = rank->n_backwards;
}

static void rank_forget_strings(struct job_rank *rank)
{
    for (uint32_t i = 0; i < rank->n_strings; i++)
        free(rank->strings[i]);
    free(rank->strings);
    rank->strings = NULL;
    rank->n_strings = 0;
    rank->string_bytes = 0;
}

/* Forgets all data of the rank's current process, before a successor attaches or the rank is freed. */
void rank_forget_incarnation(struct job_rank *rank)
{
    rank_forget_strings(rank);
    job_fault_reset(&rank->fault);
    job_fault_reset(&rank->again);
    diagnostic_unref(rank->abort_notice);
    rank->abort_notice = NULL;
    free(rank->client);
    rank->client = NULL;
    rank->declared = rank->formed = rank->ready = false;
    manifest_deinit(&rank->manifest);
    rank->n_pushes = rank->n_received = 0;
    phases_forget(rank);
    rank->partial = (struct partial_push){0};
    rank_evidence_reset(&rank->evidence);
    rank->timeline = (struct rank_timeline){0};
    free(rank->look.text);
    rank->look = (struct rank_look){0};
    rank->n_forwards = rank->n_backwards = 0; /* a successor counts from 0 */
    rank->n_forwards_at_step = rank->n_backwards_at_step = 0;
}

void rank_deinit(struct job_rank *rank)
{
    rank_forget_incarnation(rank);
    rank_forget_away(rank);
    ring_orphan(rank->rings[0]);
    ring_orphan(rank->rings[1]);
    free(rank->given_up_why);
    free(rank->blob.data);
    free(rank->blob_committed.data);
    free(rank->blob_step.data);
    free(rank->args.groups);
    free(rank->gathered);
    free(rank->gathering);
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
        if (!job->ranks[r].left)
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
