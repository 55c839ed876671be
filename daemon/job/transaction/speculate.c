/* SPDX-License-Identifier: Apache-2.0 */

/* Decides which parcels are updated before the decision, and with which scalars. */

#include "daemon/job/transaction/speculate.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/budget/budget.h"
#include "core/config/config.h"
#include "core/layout/layout.h"
#include "daemon/job/gpu-room.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/parcels.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/transaction/step-args.h"
#include "daemon/step/speculation.h"
#include "daemon/step/step.h"

enum {
    MOST_IN_VAIN = 3,   /* steps without an accepted chunk before some are left out; picked */
    MOST_PAUSE_LOG = 6, /* at most 64 steps are left out at a time; picked */
};

/* ---- when the job is formed ---------------------------------------------------------------------------- */

/* Return: the bytes of host memory that the job needs if so many buckets have spare places. */
static uint64_t needed_with(const struct job *job, uint32_t n_buckets)
{
    struct config config = *job->config;
    struct plan_options options;
    struct plan_bytes bytes;

    config.zero.spare_buckets = n_buckets;
    options = budget_options(&config, job->layout, (struct budget_ranks){.n_local = job_n_local(job)},
                             job->layout->n_parcels);
    plan_bytes_by_class(job->layout, &options, &bytes);
    return bytes.needed;
}

/* Return: the most buckets for whose spare places there is memory. */
static uint32_t most_that_fit(const struct job *job)
{
    uint64_t without = needed_with(job, 0);
    uint32_t least = 0, most = job->layout->n_buckets; /* `least` buckets fit, more than `most` do not */

    while (least < most) {
        uint32_t middle = most - (most - least) / 2;

        if (gpu_room_fits(job, needed_with(job, middle), without))
            least = middle;
        else
            most = middle - 1;
    }
    return least;
}

static void log_choice(const struct job *job, uint32_t n_buckets)
{
    uint64_t without = needed_with(job, 0);
    double mib = (double)(needed_with(job, n_buckets) - without) / (1 << 20);
    double all = (double)(needed_with(job, job->layout->n_buckets) - without) / (1 << 20);

    if (n_buckets == job->layout->n_buckets)
        log_notice("the update begins in the backward, in spare places of %.1f MiB", mib);
    else if (n_buckets == 0)
        log_notice("the update begins when the step is decided: memory is short for spare places (%.1f MiB)", all);
    else
        log_notice(
            "the update of %u of %u buckets begins in the backward, in spare places of %.1f MiB; memory is short "
            "for those of all (%.1f MiB)",
            n_buckets, job->layout->n_buckets, mib, all);
}

void speculate_choose(struct job *job)
{
    enum config_speculate wanted = job->config->zero.speculative_update;
    bool can = config_can_speculate(job->config) && job->coordinator->alone;

    job->run.chosen.zero.spare_buckets = 0;
    if (wanted == CONFIG_SPECULATE && !can)
        log_notice("zero_optimization.speculative_update has no effect: it is for one node, host memory, and stages 1 "
                   "and 2");
    if (wanted == CONFIG_SPECULATE_NOT || !can || job->layout->n_buckets == 0 ||
        (wanted == CONFIG_SPECULATE_AUTO && job->config->zero.gpu_room != CONFIG_GPU_ROOM_MICRO_BATCH))
        return;
    job->run.chosen.zero.spare_buckets = wanted == CONFIG_SPECULATE ? job->layout->n_buckets : most_that_fit(job);
    log_choice(job, job->config->zero.spare_buckets);
}

/* ---- in a step ----------------------------------------------------------------------------------------- */

static void done(void *userdata)
{
    struct job *job = userdata;

    assert(job->work.n_io > 0);
    job->work.n_io--;
    if (job->run.drop_why)
        job_todo(job); /* the drop has waited for this */
}

void speculate_parcel(struct job *job, uint32_t parcel)
{
    struct job_speculation *its = &job->speculation;

    /* A run that was formed with spare places keeps them, whatever the configuration says now. */
    if (!job->step->speculation || job->config->zero.speculative_update == CONFIG_SPECULATE_NOT ||
        job->run.survival.replay || job->phase != JOB_TRAINING ||
        job->work.parcels[parcel].at.micro_batch + 1 != its->n_micro || job->ledger.step < its->pauses_until)
        return;
    if (!its->has_hypers)
        its->s = step_expect(job, its->hypers);
    its->has_hypers = true;
    if (speculation_post(job->step->speculation, parcel, &(struct step_update){.groups = its->hypers, .s = its->s},
                         done, job))
        job->work.n_io++;
}

void speculate_forget(struct job *job)
{
    job->speculation.has_hypers = false;
}

void speculate_note_commit(struct job *job)
{
    struct job_speculation *its = &job->speculation;
    struct speculation_counts counts;

    if (!job->step->speculation)
        return;
    counts = speculation_counts(job->step->speculation);
    its->n_micro = 0;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        its->n_micro = MAX(its->n_micro, job->ledger.ranks[r].n_ended);
    if (counts.n_accepted > its->n_accepted)
        its->n_in_vain = 0;
    else if (counts.n_dropped > its->n_dropped && ++its->n_in_vain >= MOST_IN_VAIN)
        its->pauses_until = job->ledger.step + 1 + (UINT64_C(1) << MIN(its->n_in_vain, (unsigned)MOST_PAUSE_LOG));
    its->n_accepted = counts.n_accepted;
    its->n_dropped = counts.n_dropped;
    speculate_forget(job);
}
