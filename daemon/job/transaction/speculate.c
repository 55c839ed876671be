/* SPDX-License-Identifier: Apache-2.0 */

/* Decides which parcels are updated before the decision, and with which scalars. */

#include "daemon/job/transaction/speculate.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/budget/budget.h"
#include "core/budget/step-sizes.h"
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

/* How many first buckets have memory for work before the decision. */
struct choice {
    uint32_t early, spare; /* struct config_zero */
};

/* Return: the bytes of host memory that the job needs with that choice. */
static uint64_t needed_with(const struct job *job, struct choice choice)
{
    struct budget_ranks ranks = {.first_local = job->world.first, .n_local = job_n_local(job)};
    struct config config = *job->config;
    struct plan_options options;
    struct plan_bytes bytes;

    config.zero.early_buckets = choice.early;
    config.zero.spare_buckets = choice.spare;
    options = budget_options(&config, job->layout, ranks, job->layout->n_parcels);
    plan_bytes_by_class(job->layout, &options, &bytes);
    return bytes.needed;
}

/* Return: the bytes that ranks may ask for later: for a write window, and to read the largest parameter. */
static uint64_t asked_later(const struct job *job)
{
    uint64_t largest = 0;

    for (uint32_t p = 0; p < job->layout->n_params; p++)
        largest = MAX(largest, job->layout->params[p].n_elems);
    return job->layout->weight_bytes + largest * sizeof(float);
}

static bool fits(const struct job *job, uint64_t needed, uint64_t without)
{
    const struct quota *quota = &job->memory.quota;

    return gpu_room_fits(job, needed, without) && asked_later(job) <= quota->limit - quota->used - needed;
}

/* Sets *n, a field of the choice, to the most buckets for which there is memory. */
static void choose_most(const struct job *job, const struct choice *choice, uint32_t *n)
{
    uint64_t without = needed_with(job, (struct choice){0});
    uint32_t least = 0, most = job->layout->n_buckets; /* `least` buckets fit, more than `most` do not */

    while (least < most) {
        *n = most - (most - least) / 2;
        if (fits(job, needed_with(job, *choice), without))
            least = *n;
        else
            most = *n - 1;
    }
    *n = least;
}

/* For an optimizer in host memory, of a job on GPUs. */
static void log_copies(const struct job *job, uint32_t n_buckets)
{
    const struct layout *layout = job->layout;
    uint64_t n_bytes = offload_staging_bytes(layout, job->world.first, job_n_local(job), n_buckets);

    log_notice("the sums of %u of %u buckets are copied to host memory in the backward; room for sums: %.1f MiB",
               n_buckets, layout->n_buckets, (double)n_bytes / (1 << 20));
}

static void log_spares(const struct job *job, struct choice choice)
{
    const struct choice none = {.early = choice.early};
    const struct choice every = {.early = choice.early, .spare = job->layout->n_buckets};
    uint64_t without = needed_with(job, none);
    double mib = (double)(needed_with(job, choice) - without) / (1 << 20);
    double all = (double)(needed_with(job, every) - without) / (1 << 20);
    uint32_t n_buckets = choice.spare;

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

/* Fills in the choice, and logs it. can_update: the job can update before the decision. */
static void choose(const struct job *job, bool can_update, struct choice *choice)
{
    bool offloads = config_offloads(job->config), takes_all = job->config->zero.speculative_update == CONFIG_SPECULATE;

    if (takes_all)
        *choice = (struct choice){.early = offloads ? job->layout->n_buckets : 0,
                                  .spare = can_update ? job->layout->n_buckets : 0};
    if (offloads && !takes_all)
        choose_most(job, choice, &choice->early);
    if (can_update && !takes_all)
        choose_most(job, choice, &choice->spare);
    if (offloads)
        log_copies(job, choice->early);
    if (can_update)
        log_spares(job, *choice);
}

void speculate_choose(struct job *job)
{
    struct config_zero *zero = &job->run.chosen.zero;
    bool can_update = config_can_speculate(job->config) && job->coordinator->alone;
    bool offloads = config_offloads(job->config);
    bool computes_on_gpus = offloads || zero->gpu_room == CONFIG_GPU_ROOM_MICRO_BATCH;
    struct choice choice = {0};

    if (zero->speculative_update == CONFIG_SPECULATE && !can_update && !offloads)
        log_notice("zero_optimization.speculative_update has no effect: it is for one node, state in host memory, and "
                   "stages 1 and 2");
    if (job->layout->n_buckets > 0 && (zero->speculative_update == CONFIG_SPECULATE ||
                                       (zero->speculative_update == CONFIG_SPECULATE_AUTO && computes_on_gpus)))
        choose(job, can_update, &choice);
    zero->early_buckets = choice.early;
    zero->spare_buckets = choice.spare;
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

/* Updates the parcel speculatively. Its accumulators are in host memory. */
static void update_parcel(void *userdata, uint32_t parcel)
{
    struct job *job = userdata;
    struct job_speculation *its = &job->speculation;

    if (!job->step->speculation || job->phase != JOB_TRAINING || job->ledger.step < its->pauses_until)
        return;
    if (!its->has_hypers)
        its->s = step_expect(job, its->hypers);
    its->has_hypers = true;
    if (speculation_post(job->step->speculation, parcel, &(struct step_update){.groups = its->hypers, .s = its->s},
                         done, job))
        job->work.n_io++;
}

void speculate_parcel(struct job *job, uint32_t parcel)
{
    /* A run that was formed with places for this keeps them, whatever the configuration says now. */
    if (job->config->zero.speculative_update != CONFIG_SPECULATE_NOT && !job->run.survival.replay &&
        job->phase == JOB_TRAINING && job->work.parcels[parcel].at.micro_batch + 1 == job->speculation.n_micro)
        step_complete(job->step, parcel, update_parcel, job);
}

void speculate_forget(struct job *job)
{
    job->speculation.has_hypers = false;
}

/* Return: the number of elements that the open step updates. */
static uint64_t count_updated(const struct job *job)
{
    uint64_t n_elems = 0;

    for (uint32_t p = 0; p < job->layout->n_params; p++)
        n_elems += job->step->contributed[p] ? job->layout->params[p].n_elems : 0;
    return n_elems;
}

void speculate_note_commit(struct job *job)
{
    struct job_speculation *its = &job->speculation;
    struct speculation_counts counts;

    its->n_micro_expected = its->n_micro;
    its->n_micro = 0;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        its->n_micro = MAX(its->n_micro, job->ledger.ranks[r].n_ended);
    if (!job->step->speculation)
        return;
    counts = speculation_counts(job->step->speculation);
    if (counts.n_accepted > its->counts.n_accepted)
        its->n_in_vain = 0;
    else if (counts.n_dropped > its->counts.n_dropped && ++its->n_in_vain >= MOST_IN_VAIN)
        its->pauses_until = job->ledger.step + 1 + (UINT64_C(1) << MIN(its->n_in_vain, (unsigned)MOST_PAUSE_LOG));
    if (job->kept.applied) {
        its->n_elems_early = counts.n_elems_accepted - its->counts.n_elems_accepted;
        its->n_elems_last = count_updated(job);
    }
    its->counts = counts;
    speculate_forget(job);
}

/* ---- obstacles ----------------------------------------------------------------------------------------- */

/* Return: the number of the first buckets that have spare places. */
static uint32_t n_with_places(const struct job *job)
{
    return MIN(job->config->zero.spare_buckets, job->layout->n_buckets);
}

static void find_missing_places(const struct job *job, struct speculate_obstacle *found)
{
    bool adopted = job->run.survival.found_ns > 0; /* then another daemon chose, perhaps with other settings */

    found->word = adopted ? "adopted" : "memory";
    snprintf(found->text, sizeof(found->text),
             adopted ? "the run began with spare places for %u of %u buckets"
                     : "memory is short: %u of %u buckets have spare places",
             n_with_places(job), job->layout->n_buckets);
}

/* Finds what prevents all early updates of the run. */
static void find_lasting(const struct job *job, struct speculate_obstacle *found)
{
    const struct config *config = job->config;

    if (config->zero.speculative_update == CONFIG_SPECULATE_NOT)
        *found = (struct speculate_obstacle){"configured", "zero_optimization.speculative_update is false"};
    else if (config->device != CONFIG_DEVICE_CPU && !config_offloads(config))
        *found = (struct speculate_obstacle){"gpu-job", "the state is on GPUs (device: cuda without offload_optimizer)"};
    else if (!job->coordinator->alone)
        *found = (struct speculate_obstacle){"several-nodes", "the job has several nodes"};
    else if (config_stage(config) > 2)
        *found = (struct speculate_obstacle){"stage-3", "ranks gather their weights (stage 3)"};
    else if (job->layout->n_buckets == 0)
        *found = (struct speculate_obstacle){"no-buckets", "no parameter is trained"};
    else if (n_with_places(job) == 0 && config->zero.speculative_update == CONFIG_SPECULATE_AUTO &&
             config->device == CONFIG_DEVICE_CPU && config->zero.gpu_room == CONFIG_GPU_ROOM_NONE && !gpu_room_is_for_all(job))
        *found = (struct speculate_obstacle){
            "host-models", "a model is in host memory, and zero_optimization.speculative_update is auto"};
    else if (n_with_places(job) == 0)
        find_missing_places(job, found);
}

/* Finds what prevents the early updates of some steps. */
static void find_passing(const struct job *job, struct speculate_obstacle *found)
{
    const struct job_speculation *its = &job->speculation;

    if (its->n_micro == 0) {
        *found = (struct speculate_obstacle){"micro-batches",
                                             "the number of micro-batches is known after the next step"};
    } else if (its->n_micro_expected == 0 && its->n_elems_last > 0) {
        *found = (struct speculate_obstacle){"micro-batches",
                                             "the number of micro-batches was not known before the last step"};
    } else if (job->ledger.step < its->pauses_until) {
        found->word = "paused";
        snprintf(found->text, sizeof(found->text),
                 "paused until step %" PRIu64 ", because %u steps dropped their early updates: they were clipped, or "
                 "learning rates or micro-batches had changed",
                 its->pauses_until, its->n_in_vain);
    } else if (its->n_micro_expected > 0 && its->n_micro != its->n_micro_expected) {
        found->word = "micro-batches";
        snprintf(found->text, sizeof(found->text), "the last step had %u micro-batches, and %u were expected",
                 its->n_micro, its->n_micro_expected);
    } else if (its->n_in_vain > 0) {
        *found = (struct speculate_obstacle){
            "dropped", "the last early updates were dropped: the step was clipped, or its learning rates had changed"};
    }
}

static uint64_t count_muon(const struct job *job)
{
    uint64_t n_elems = 0;

    for (uint32_t p = 0; p < job->layout->n_params; p++)
        n_elems += job->layout->params[p].muon ? job->layout->params[p].n_elems : 0;
    return n_elems;
}

/* Finds what prevents a part of the early updates of each step. */
static void find_partial(const struct job *job, struct speculate_obstacle *found)
{
    uint64_t n_muon = count_muon(job);

    if (n_with_places(job) < job->layout->n_buckets) {
        find_missing_places(job, found);
    } else if (n_muon > 0) {
        found->word = "muon";
        snprintf(found->text, sizeof(found->text),
                 "Muon updates matrices after the decision: %" PRIu64 " of %" PRIu64 " elements", n_muon,
                 job->layout->trainable_elems);
    } else if (job->speculation.n_elems_early < job->speculation.n_elems_last) {
        *found = (struct speculate_obstacle){"workers",
                                             "the workers had no time for the rest before the step was decided"};
    }
}

void speculate_find_obstacle(const struct job *job, struct speculate_obstacle *found)
{
    found->word = NULL;
    find_lasting(job, found);
    if (!found->word)
        find_passing(job, found);
    if (!found->word)
        find_partial(job, found);
}
