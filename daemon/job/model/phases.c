/* SPDX-License-Identifier: Apache-2.0 */

/* Measures the phases of the ranks, and finds the slowest rank. */

#include "daemon/job/model/phases.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"

enum {
    STEPS_UNTIL_SAID = 50,         /* steps in a row; picked */
    STEPS_COMPARED = 100,          /* picked: the means cover 50 to 100 steps */
    LEAST_SHARE = 10,              /* a tenth of the rank's time; picked: less is hardly worth a look */
    LEAST_BEHIND_NS = 5 * 1000000, /* picked: a busy machine may delay any process that long */
};

_Static_assert((int)STEPS_COMPARED / 2 > 0, "the sums have steps, also when they are halved");

static const char *const where[N_RANK_PHASES] = {
    [PHASE_FORWARD] = "in its forward (from the step's begin to the first gradient: data, forward)",
    [PHASE_BACKWARD] = "in its backward (from the first gradient to the last)",
    [PHASE_REST] = "after its backward (from the last gradient to step())",
};

/* ---- the clock of one rank ----------------------------------------------------------------------------- */

void phases_begin_step(struct job *job, uint64_t now_ns)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct rank_phases *phases = &job->ranks[r].phases;

        phases->is_known = true;
        phases->is_in_backward = false;
        phases->since_ns = now_ns;
        memset(phases->step_ns, 0, sizeof(phases->step_ns));
    }
}

void phases_forget(struct job_rank *rank)
{
    rank->phases.is_known = false;
}

/* Adds the time since the rank's last event to this phase. */
static void spend(struct rank_phases *phases, enum rank_phase phase, uint64_t now_ns)
{
    if (phases->since_ns > 0 && now_ns > phases->since_ns)
        phases->step_ns[phase] += now_ns - phases->since_ns;
    phases->since_ns = now_ns;
}

void phases_begin_backward(struct job_rank *rank, uint64_t now_ns)
{
    spend(&rank->phases, PHASE_FORWARD, now_ns);
    rank->phases.is_in_backward = true;
}

void phases_push(struct job_rank *rank, uint64_t now_ns)
{
    if (rank->phases.is_in_backward)
        spend(&rank->phases, PHASE_BACKWARD, now_ns);
}

static bool ends_backward(enum job_wait wait)
{
    return wait == WAIT_END || wait == WAIT_OTHERS || wait == WAIT_STEP || wait == WAIT_NORM;
}

void phases_wait(struct job_rank *rank, enum job_wait wait, uint64_t now_ns)
{
    struct rank_phases *phases = &rank->phases;

    if (ends_backward(wait)) {
        spend(phases, PHASE_REST, now_ns);
        phases->is_in_backward = false;
    } else {
        spend(phases, phases->is_in_backward ? PHASE_BACKWARD : PHASE_FORWARD, now_ns);
    }
    if (wait != WAIT_SLOT)
        phases->since_ns = 0;
    if (wait == WAIT_WINDOW_BEGIN || wait == WAIT_WINDOW_END)
        phases->is_known = false; /* the step is not comparable, because weights are written */
}

void phases_go_on(struct job_rank *rank, uint64_t now_ns)
{
    if (rank->wait == WAIT_SLOT)
        spend(&rank->phases, PHASE_ROOM, now_ns);
    else if (rank->phases.since_ns == 0)
        rank->phases.since_ns = now_ns;
}

/* ---- steps --------------------------------------------------------------------------------------------- */

static uint64_t own_ns(const struct rank_phases *phases)
{
    return phases->step_ns[PHASE_FORWARD] + phases->step_ns[PHASE_BACKWARD] + phases->step_ns[PHASE_REST];
}

/* Have all ranks of this node asked for the step, and are their times known? */
static bool is_known(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (!job->ranks[r].phases.is_known || !job->ledger.ranks[r].asked)
            return false;
    return true;
}

static unsigned find_last(const struct job *job, uint64_t *behind_ns)
{
    unsigned last = job->world.first;
    uint64_t next_ns = 0;

    for (unsigned r = last + 1; r < job->world.end; r++)
        if (own_ns(&job->ranks[r].phases) > own_ns(&job->ranks[last].phases))
            last = r;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (r != last)
            next_ns = MAX(next_ns, own_ns(&job->ranks[r].phases));
    assert(own_ns(&job->ranks[last].phases) >= next_ns);
    *behind_ns = own_ns(&job->ranks[last].phases) - next_ns;
    return last;
}

static void forget_compared(struct job *job, unsigned last)
{
    job->slow = (struct job_slow){.rank = last};
    for (unsigned r = job->world.first; r < job->world.end; r++)
        memset(job->ranks[r].phases.compared_ns, 0, sizeof(job->ranks[r].phases.compared_ns));
}

/* Halves the sums, so that later steps count more. */
static void halve(struct job *job)
{
    job->slow.n_compared /= 2;
    job->slow.behind_ns /= 2;
    job->slow.own_ns /= 2;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        for (size_t i = 0; i < N_RANK_PHASES; i++)
            job->ranks[r].phases.compared_ns[i] /= 2;
}

static void compare_phases(struct job *job)
{
    uint64_t behind_ns;
    unsigned last = find_last(job, &behind_ns);

    if (last != job->slow.rank || job->slow.n_in_a_row == 0)
        forget_compared(job, last);
    job->slow.n_in_a_row++;
    job->slow.n_compared++;
    job->slow.behind_ns += behind_ns;
    job->slow.own_ns += own_ns(&job->ranks[last].phases);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        for (size_t i = 0; i < N_RANK_PHASES; i++)
            job->ranks[r].phases.compared_ns[i] += job->ranks[r].phases.step_ns[i];
    if (job->slow.n_compared >= STEPS_COMPARED)
        halve(job);
}

void phases_note_step(struct job *job)
{
    if (!is_known(job))
        return;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        for (size_t i = 0; i < N_RANK_PHASES; i++)
            job->ranks[r].phases.total_ns[i] += job->ranks[r].phases.step_ns[i];
    if (job_n_local(job) > 1)
        compare_phases(job);
}

/* ---- findings ------------------------------------------------------------------------------------------ */

/* Returns the phase in which the slow rank lost most time, compared with the mean of the other ranks. */
static enum rank_phase find_phase(const struct job *job)
{
    static const enum rank_phase own[] = {PHASE_FORWARD, PHASE_BACKWARD, PHASE_REST};
    enum rank_phase found = PHASE_FORWARD;
    double most = -1;

    assert(job_n_local(job) > 1);
    for (size_t i = 0; i < ARRAY_SIZE(own); i++) {
        double others = 0, lost;

        for (unsigned r = job->world.first; r < job->world.end; r++)
            others += r == job->slow.rank ? 0 : (double)job->ranks[r].phases.compared_ns[own[i]];
        lost = (double)job->ranks[job->slow.rank].phases.compared_ns[own[i]] - others / (job_n_local(job) - 1);
        if (lost > most) {
            most = lost;
            found = own[i];
        }
    }
    return found;
}

void phases_find(const struct job *job, struct findings *findings)
{
    const struct job_slow *slow = &job->slow;
    struct finding *finding;

    if (job_n_local(job) < 2 || slow->n_in_a_row < STEPS_UNTIL_SAID ||
        slow->behind_ns < slow->n_compared * (uint64_t)LEAST_BEHIND_NS || slow->behind_ns < slow->own_ns / LEAST_SHARE)
        return;
    assert(slow->n_compared > 0);
    assert(job_is_own(job, slow->rank));
    finding = findings_add(findings, FINDING_SLOW_RANK);
    if (!finding)
        return;
    finding->rank = slow->rank;
    snprintf(finding->text, sizeof(finding->text),
             "rank %u was the last in each of the last %" PRIu32
             " steps: its own work took %.3g ms, %.3g ms more than that of the next slowest rank, mostly %s",
             slow->rank, slow->n_in_a_row, (double)slow->own_ns / 1e6 / slow->n_compared,
             (double)slow->behind_ns / 1e6 / slow->n_compared, where[find_phase(job)]);
}
