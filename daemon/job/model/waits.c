/* SPDX-License-Identifier: Apache-2.0 */

/* Finds which rank waits for which, and for how long. */

#include "daemon/job/model/waits.h"

#include <assert.h>

#include "core/base/base.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/memory/ring.h"

static_assert((int)WAITS_N_KINDS == (int)WAIT_ABORT + 1, "all waits are counted");

const char *waits_word(enum job_wait wait)
{
    static const char *const words[WAITS_N_KINDS] = {
        [WAIT_FORM] = "forming",  [WAIT_INIT] = "initialising",   [WAIT_READY] = "initialising",
        [WAIT_SLOT] = "slot",     [WAIT_END] = "boundary",        [WAIT_OTHERS] = "step",
        [WAIT_STEP] = "step",     [WAIT_NORM] = "norm",           [WAIT_GATHER] = "gather",
        [WAIT_READ] = "read",     [WAIT_WINDOW_BEGIN] = "window", [WAIT_WINDOW_END] = "window",
        [WAIT_WRITE] = "window",  [WAIT_ABANDON] = "boundary",    [WAIT_ABORT] = "abort",
        [WAIT_ABORTED] = "abort", [WAIT_SAVE] = "checkpoint",
    };

    assert((unsigned)wait < WAITS_N_KINDS);
    return words[wait];
}

const char *waits_for_word(enum wait_for what)
{
    static const char *const words[N_WAIT_FOR] = {
        [WAIT_FOR_DAEMON] = "daemon", [WAIT_FOR_RANKS] = "ranks", [WAIT_FOR_NODES] = "nodes"};

    assert((unsigned)what < N_WAIT_FOR);
    return words[what];
}

/* ---- how far ranks have come --------------------------------------------------------------------------- */

/* How far ranks have come, or how far they must come so that others need not wait for them. */
struct reached {
    uint32_t n_ended; /* ended micro-batches of the open step; UINT32_MAX: the rank has asked for the step */
    bool asked, norm, window_begin, window_end, declared, ready;
};

static const struct reached nowhere = {0}, everywhere = {UINT32_MAX, true, true, true, true, true, true};

/* Return: the lesser of a and b in each field. */
static struct reached least(struct reached a, struct reached b)
{
    return (struct reached){
        MIN(a.n_ended, b.n_ended),    a.asked && b.asked,       a.norm && b.norm,  a.window_begin && b.window_begin,
        a.window_end && b.window_end, a.declared && b.declared, a.ready && b.ready};
}

/* Return: the greater of a and b in each field. */
static struct reached most(struct reached a, struct reached b)
{
    return (struct reached){
        MAX(a.n_ended, b.n_ended),    a.asked || b.asked,       a.norm || b.norm,  a.window_begin || b.window_begin,
        a.window_end || b.window_end, a.declared || b.declared, a.ready || b.ready};
}

static bool has_reached(struct reached one, struct reached wanted)
{
    return one.n_ended >= wanted.n_ended && one.asked >= wanted.asked && one.norm >= wanted.norm &&
           one.window_begin >= wanted.window_begin && one.window_end >= wanted.window_end &&
           one.declared >= wanted.declared && one.ready >= wanted.ready;
}

/*
 * Returns the rank's wait. A rank that got the decision counts as not waiting, although its answer is still to come,
 * because it continues with its forward.
 */
static enum job_wait wait_of(const struct job *job, const struct job_rank *rank)
{
    return rank->wait == WAIT_STEP && rank->process.wants_decision && job->phase == JOB_UPDATING ? WAIT_NONE
                                                                                                 : rank->wait;
}

static bool waits_for_pushes(const struct job_rank *rank)
{
    return rank->wait == WAIT_SLOT || rank->wait == WAIT_END;
}

/* Does the rank wait for work that zerod does for this rank alone? */
static bool is_served(const struct job_rank *rank)
{
    return rank->wait == WAIT_GATHER || rank->wait == WAIT_READ || rank->wait == WAIT_WRITE || rank->wait == WAIT_SAVE;
}

/*
 * Returns how far the rank has come. It is `everywhere` for a rank that has left, because no rank waits for it. It is
 * also `everywhere` for a rank that waits for pushes or for zerod's work, because the others then wait for the same.
 */
static struct reached reached_by(const struct job *job, const struct job_rank *rank)
{
    const struct ledger_rank *ledger = job->layout ? &job->ledger.ranks[rank->rank] : NULL;
    bool asked = ledger && (ledger->asked || rank->wait == WAIT_OTHERS);

    if (job->layout &&
        (rank->kept.left || (job_is_own(job, rank->rank) && (waits_for_pushes(rank) || is_served(rank)))))
        return everywhere;
    return (struct reached){
        .n_ended = asked    ? UINT32_MAX
                   : ledger ? ledger->n_ended
                            : 0,
        .asked = asked,
        .norm = asked || rank->wait == WAIT_NORM,
        .window_begin = rank->wait == WAIT_WINDOW_BEGIN,
        .window_end = rank->wait == WAIT_WINDOW_END,
        .declared = rank->process.declared,
        .ready = rank->kept.ready || rank->wait == WAIT_INIT || rank->wait == WAIT_READY,
    };
}

static struct reached reached_by_all(const struct job *job, unsigned first, unsigned end)
{
    struct reached all = everywhere;

    for (unsigned r = first; r < end; r++)
        all = least(all, reached_by(job, &job->ranks[r]));
    return all;
}

/* Returns how far other ranks must come before the wait of this rank can end. */
static struct reached wanted_by(const struct job *job, const struct job_rank *rank)
{
    uint32_t n_ended = job->layout ? job->ledger.ranks[rank->rank].n_ended : 0;

    switch (wait_of(job, rank)) {
    case WAIT_FORM:
        return (struct reached){.declared = !job->layout};
    case WAIT_READY:
        return (struct reached){.ready = true};
    case WAIT_SLOT:
        return (struct reached){.n_ended = n_ended + 1};
    case WAIT_END:
        return (struct reached){.n_ended = n_ended};
    case WAIT_OTHERS:
    case WAIT_STEP:
        return (struct reached){.asked = true};
    case WAIT_NORM:
        return (struct reached){.norm = true};
    case WAIT_WINDOW_BEGIN:
        return (struct reached){.window_begin = true};
    case WAIT_WINDOW_END:
        return (struct reached){.window_end = true};
    default:
        return nowhere;
    }
}

/* Has the rank pushed gradients that are in no sum yet, because other ranks have not pushed theirs? */
static bool has_pushed_alone(const struct job_rank *rank)
{
    for (size_t i = 0; i < ARRAY_SIZE(rank->rings); i++) {
        const struct ring *ring = rank->rings[i];

        for (uint32_t t = 0; ring && ring->n_held > 0 && t < ring->n_tickets; t++)
            if (ring->slots[t].held && !ring->slots[t].posted && !ring->slots[t].redo && ring->slots[t].n_pushed > 0)
                return true;
    }
    return false;
}

/* ---- looking ------------------------------------------------------------------------------------------- */

/* Is the job in a step or a window? No rank trains before there are weights. */
static bool is_training(const struct job *job)
{
    return job->layout && (job->phase == JOB_TRAINING || job->phase == JOB_WINDOW);
}

static enum wait_for what_for(const struct job *job, const struct job_rank *rank, struct reached here,
                              struct reached elsewhere)
{
    struct reached wanted = wanted_by(job, rank);

    if (waits_for_pushes(rank) && !has_pushed_alone(rank))
        return WAIT_FOR_DAEMON;
    if (!has_reached(here, wanted))
        return WAIT_FOR_RANKS;
    return has_reached(elsewhere, wanted) ? WAIT_FOR_DAEMON : WAIT_FOR_NODES;
}

/*
 * Returns how far another node's rank needs this node's ranks to come. This node learns of the rank's request for the
 * step at once, and of its other waits with the next tick. Where the rank ends a micro-batch concerns only its own
 * node, unless GPUs of all nodes sum at once.
 */
static struct reached wanted_elsewhere(const struct job *job, const struct job_rank *rank)
{
    if (job->ledger.ranks[rank->rank].asked)
        return (struct reached){.asked = true};
    return waits_for_pushes(rank) && !job->coordinator->sums_at_once ? nowhere : wanted_by(job, rank);
}

/* Finds the waits of this node's ranks. Return: how far these ranks must come so that no rank waits for them. */
static struct reached look_at_waits(struct job *job)
{
    struct reached here = reached_by_all(job, job->world.first, job->world.end);
    struct reached elsewhere =
        least(reached_by_all(job, 0, job->world.first), reached_by_all(job, job->world.end, job->world.size));
    struct reached wanted = nowhere;

    job->waits.any = false;
    for (unsigned r = 0; r < job->world.size; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (!job_is_own(job, r)) {
            wanted = is_training(job) ? most(wanted, wanted_elsewhere(job, rank)) : wanted;
            continue;
        }
        rank->waits.kind = wait_of(job, rank);
        rank->waits.what = what_for(job, rank, here, elsewhere);
        if (rank->waits.what != WAIT_FOR_DAEMON)
            wanted = most(wanted, wanted_by(job, rank));
        job->waits.any |= is_training(job) && rank->waits.what != WAIT_FOR_DAEMON;
    }
    return wanted;
}

static void mark_awaited(struct job *job)
{
    struct reached wanted = look_at_waits(job);

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        rank->waits.is_awaited =
            is_training(job) && rank->wait == WAIT_NONE && !has_reached(reached_by(job, rank), wanted);
    }
}

/* ---- counting ------------------------------------------------------------------------------------------ */

static void count(struct job *job, uint64_t ns)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct rank_waits *waits = &job->ranks[r].waits;

        assert(waits->kind < WAITS_N_KINDS);
        waits->total_ns[waits->kind][waits->what] += ns; /* the sum of WAIT_NONE is never read */
        waits->behind_step_ns += waits->is_awaited ? ns : 0;
        waits->behind_total_ns += waits->is_awaited ? ns : 0;
    }
    job->waits.step_ns += job->waits.any ? ns : 0;
    job->waits.total_ns += job->waits.any ? ns : 0;
}

void waits_look(struct job *job, uint64_t now_ns)
{
    if (job->run.survival.replay)
        return; /* the earlier daemon's counts are lost, and replay adds none */
    if (job->waits.since_ns > 0 && now_ns > job->waits.since_ns)
        count(job, now_ns - job->waits.since_ns);
    job->waits.since_ns = now_ns;
    mark_awaited(job);
}

void waits_begin_step(struct job *job)
{
    job->waits.step_ns = 0;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        job->ranks[r].waits.behind_step_ns = 0;
}
