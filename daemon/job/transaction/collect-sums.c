/* SPDX-License-Identifier: Apache-2.0 */

/* Makes the sums of parcels. When a sum is made, records it, and credits the slots. */

#include <assert.h>
#include <stdlib.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/layout/layout.h"
#include "core/wire/journal-wire.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/parcels.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/stats.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/transaction/admit.h"
#include "daemon/job/transaction/collect-inside.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/ring.h"
#include "daemon/step/step.h"

/* Counts the bytes that were reduced before the last rank ended its backward. overlap_comm increases this count. */
static void count_overlap(struct job *job, const struct reduction *reduction, uint64_t n_bytes)
{
    struct job_counters *counters = &job->stats.counters;
    bool overlapped = false;

    if (counters->batch != reduction->micro_batch) {
        counters->batch = reduction->micro_batch;
        counters->batch_bytes = counters->batch_reduced_bytes = 0;
    }
    for (unsigned r = job->world.first; r < job->world.end; r++)
        overlapped |= !collect_has_ended(job, &job->ranks[r], reduction->micro_batch);
    counters->batch_bytes += n_bytes;
    if (overlapped)
        counters->batch_reduced_bytes += n_bytes;
}

/* Returns the index of the sum of part i of a rank in the journal's list of a reduction's sums. */
static size_t sum_index(const struct job *job, const struct reduction *reduction, unsigned local, uint32_t i)
{
    return local * (size_t)job->layout->parcels[reduction->parcel].n_parts + i;
}

static uint64_t sum_of(const struct job *job, const struct reduction *reduction, unsigned local, uint32_t i)
{
    return step_sum(job->step, reduction, local, job->layout->parcels[reduction->parcel].first_part + i);
}

/* Records the reduction's sums in the ledger, except those of a micro-batch that has ended meanwhile. */
static void tell_sums(struct job *job, const struct reduction *reduction, unsigned rank)
{
    const struct layout_parcel *parcel = &job->layout->parcels[reduction->parcel];

    unsigned local = rank - job->world.first;

    for (uint32_t i = 0; i < parcel->n_parts; i++) {
        uint32_t part = parcel->first_part + i;
        const struct ledger_entry *entry = ledger_entry(&job->ledger, rank, part);

        if (reduction->masks[i] >> local & 1 && entry->n_summed < entry->n_posted)
            (void)ledger_sum(&job->ledger, rank, part, sum_of(job, reduction, local, i));
    }
}

/* Compares the sums of the ranks' parts, until two differ. */
static void note_alike(struct job *job, const struct reduction *reduction)
{
    uint32_t n_parts = job->layout->parcels[reduction->parcel].n_parts;

    for (uint32_t i = 0; !job->alike.differs && !job->alike.is_said && i < n_parts; i++) {
        uint64_t all = job_n_local(job) < 64 ? (UINT64_C(1) << job_n_local(job)) - 1 : UINT64_MAX;

        if (reduction->masks[i] == 0)
            continue;
        job->alike.n_compared++;
        job->alike.differs = reduction->masks[i] != all;
        for (unsigned local = 1; !job->alike.differs && local < job_n_local(job); local++)
            job->alike.differs = sum_of(job, reduction, local, i) != sum_of(job, reduction, 0, i);
    }
}

/* Records the sums before they are used, so that the next daemon knows them and does not sum again. */
static void record_sums(struct job *job, const struct reduction *reduction, enum journal_type type)
{
    uint32_t n_parts = job->layout->parcels[reduction->parcel].n_parts;
    size_t n = (size_t)job_n_local(job) * n_parts, n_bytes = n * sizeof(uint64_t);
    struct journal_summed summed = {.parcel = reduction->parcel, .n_sums = (uint32_t)n};
    uint64_t *sums;

    if (!job->run.survival.journal || job->phase == JOB_ABORTING)
        return;
    sums = calloc(n + 1, sizeof(*sums));
    for (unsigned local = 0; sums && local < job_n_local(job); local++)
        for (uint32_t i = 0; i < n_parts; i++)
            if (reduction->masks[i] >> local & 1)
                sums[sum_index(job, reduction, local, i)] = sum_of(job, reduction, local, i);
    if (sums)
        job_record(job, NULL, type, &summed, sizeof(summed), sums, n_bytes);
    else
        journal_give_up(job->run.survival.journal, -ENOMEM);
    free(sums);
}

static bool sends_slots(const struct job *job, uint32_t parcel)
{
    return parcels_sends_slots(job->coordinator, parcel);
}

/* Is part of the parcel's 64-bit sum computed when the pieces of all nodes are added? */
static bool is_summed_later(const struct job *job, uint32_t parcel)
{
    return sends_slots(job, parcel) && parcels_owns_any(job->coordinator, parcel);
}

/*
 * Credits a slot that was read. A slot that is itself sent to other nodes is credited later: when all nodes have it, or
 * the rank is gone.
 */
static void give_back(struct job *job, struct job_rank *rank, struct ring *ring, struct ring_slot *slot)
{
    if (sends_slots(job, slot->parcel) && ring == rank->rings[0]) {
        ring_lend(ring, slot);
        return;
    }
    ring_credit(ring, slot);
    rank->process.slot_credited = true;
}

static uint64_t n_summed_bytes(const struct job *job, const struct reduction *reduction)
{
    const struct layout_parcel *parcel = &job->layout->parcels[reduction->parcel];
    uint64_t n_bytes = 0;

    for (uint32_t i = 0; i < parcel->n_parts; i++)
        n_bytes += (uint64_t)__builtin_popcountll(reduction->masks[i]) *
                   layout_part_bytes(job->layout, parcel->first_part + i);
    return n_bytes;
}

/* Records the sums in the ledger, and credits the slots. */
static void use_sum(struct job *job, const struct reduction *reduction)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];
        struct ring *ring;
        struct ring_slot *slot =
            collect_find_slot(rank, reduction->parcel, reduction->micro_batch, reduction->pass, &ring);

        if (!slot || !slot->posted)
            continue;
        if (!is_summed_later(job, reduction->parcel))
            tell_sums(job, reduction, r);
        if (job->work.summing->give_back)
            job->work.summing->give_back(job, rank, ring, slot);
    }
}

static void end_sum(struct job *job, struct reduction *reduction)
{
    uint32_t parcel = reduction->parcel;

    assert(reduction == &job->step->reductions[parcel]); /* not the reduction that adds all nodes' pieces */
    assert(parcel_is_at(&job->work.parcels[parcel], reduction->micro_batch, reduction->pass));
    (void)failpoint("reduced");
    record_sums(job, reduction, JOURNAL_SUMMED);
    (void)failpoint("summed");
    note_alike(job, reduction);
    if (job->phase != JOB_ABORTING) {
        rank_norm_look_at(job, reduction);
        use_sum(job, reduction);
    }
    for (unsigned local = 0; local < job_n_local(job); local++)
        if (reduction->held[local])
            ring_unhold(steal_ptr(reduction->held[local]));
    parcel_end_sum(&job->work.parcels[parcel]);
    if (job->phase != JOB_ABORTING) {
        count_overlap(job, reduction, n_summed_bytes(job, reduction));
        collect_settle(job);
        collect_parcel(job, parcel);
        for (unsigned r = job->world.first; r < job->world.end; r++)
            admit_settle(job, &job->ranks[r]);
    }
    parcels_summed(job->coordinator, parcel);
    job_todo(job);
}

/* ---- the sum of this node's ranks, in host memory or on the GPUs of one node --------------------------- */

static void sum_is_made(void *userdata, struct reduction *reduction)
{
    struct job *job = userdata;

    collect_end_work(job);
    end_sum(job, reduction);
}

static void start_here(struct job *job, uint32_t parcel)
{
    struct reduction *reduction = &job->step->reductions[parcel];

    if (!parcel_begin_sum(&job->work.parcels[parcel]))
        return;
    for (unsigned local = 0; local < job_n_local(job); local++) {
        struct ring *ring = NULL;

        if (reduction->sources[local])
            (void)collect_find_slot(&job->ranks[job->world.first + local], parcel, reduction->micro_batch,
                                    reduction->pass, &ring);
        reduction->held[local] = ring;
        if (ring)
            ring_hold(ring);
    }
    collect_begin_work(job);
    step_post(reduction, sum_is_made, job);
}

static void combined_here(struct job *job, uint32_t parcel)
{
    if (!is_summed_later(job, parcel))
        return;
    record_sums(job, &job->step->reductions[parcel], JOURNAL_COMBINED);
    (void)failpoint("combined");
    for (unsigned r = job->world.first; r < job->world.end; r++)
        tell_sums(job, &job->step->reductions[parcel], r);
    collect_settle(job);
}

static bool was_summed_here(struct job *job, uint32_t parcel, const uint64_t *sums)
{
    if (job->work.parcels[parcel].state != PARCEL_SUMMING)
        return false;
    step_was_reduced(&job->step->reductions[parcel], sums);
    return true;
}

static const struct summing here = {
    .start = start_here,
    .combined = combined_here,
    .give_back = give_back,
    .was_summed = was_summed_here,
};

/* ---- the sum of all ranks at once, on the GPUs of several nodes ---------------------------------------- */

/*
 * Does nothing, because node 0 orders the sum. exchange-device.c holds the rings, because a sum may be ordered several
 * times, or never.
 */
static void leave_to_exchange(struct job *job, uint32_t parcel)
{
}

static void combined_at_once(struct job *job, uint32_t parcel)
{
    if (parcel_begin_sum(&job->work.parcels[parcel]))
        end_sum(job, &job->step->reductions[parcel]);
}

static bool was_summed_at_once(struct job *job, uint32_t parcel, const uint64_t *sums)
{
    if (job->work.parcels[parcel].state != PARCEL_TAKEN)
        return false;
    job->step->found_sums = sums;
    combined_at_once(job, parcel);
    job->step->found_sums = NULL;
    return true;
}

/* Slots are credited when all nodes have the sum, because other nodes' GPUs read them until then. */
static const struct summing at_once = {
    .start = leave_to_exchange,
    .combined = combined_at_once,
    .was_summed = was_summed_at_once,
};

const struct summing *collect_summing(const struct job *job)
{
    return job->coordinator->sums_at_once ? &at_once : &here;
}

void collect_combined(struct job *job, uint32_t parcel)
{
    assert(parcel < job->layout->n_parcels);
    job->work.summing->combined(job, parcel);
}

/* ---- what an earlier daemon has done ------------------------------------------------------------------- */

/* Return: the parcel of the record; NULL if it does not exist, or has another number of sums. */
static const struct parcel *parcel_of(const struct job *job, const struct journal_summed *summed)
{
    const struct parcel *its = job_parcel(job, summed->parcel);
    size_t n = its ? (size_t)job_n_local(job) * job->layout->parcels[summed->parcel].n_parts : 0;

    return its && summed->n_sums == n ? its : NULL;
}

bool collect_was_summed(struct job *job, const struct journal_summed *summed)
{
    return parcel_of(job, summed) && job->work.summing->was_summed(job, summed->parcel, summed->sums);
}

bool collect_was_combined(struct job *job, const struct journal_summed *summed)
{
    const struct parcel *its = parcel_of(job, summed);

    if (!its || its->state != PARCEL_SUMMED || !is_summed_later(job, summed->parcel))
        return false;
    job->step->found_sums = summed->sums;
    combined_here(job, summed->parcel);
    job->step->found_sums = NULL;
    return true;
}
