/* SPDX-License-Identifier: Apache-2.0 */

/* Attendance: ranks attach, leave, die and come back. */

#include "daemon/job/attendance.h"
#include "daemon/job/rank-lost.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/keep.h"
#include "core/base/log.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/wire/wire.h"
#include "daemon/job/drop.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/state/save.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/boundary.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/ledger/ledger.h"
#include "daemon/step/executor.h"
#include "kernels/gemm.h"

/* Checks the run id, and records the first one. Return: NULL if the run may attach, else the refusal. */
static struct diagnostic *check_run(struct job *job, const struct evidence_at *at, const char *run_id)
{
    if (!run_id || !*run_id)
        return NULL;
    if (job->kept.run_id && strcmp(job->kept.run_id, run_id) != 0)
        return cause_other_run(at, job->kept.run_id, run_id, job->state ? job->state->progress.epoch : 0);
    if (!job->kept.run_id)
        job->kept.run_id = strdup(run_id);
    return NULL;
}

/*
 * Checks whether the sender may have the rank. A live rank belongs to its process, which may connect again. The data
 * that a formed rank left behind belongs to its user. Return: NULL, or the refusal.
 */
static struct diagnostic *check_owner(const struct job *job, const struct job_rank *rank,
                                      const struct job_attach *attach, const struct evidence_at *at)
{
    bool same_process = rank->kept.secret == attach->hello->incarnation && rank->kept.pid == attach->pid &&
                        rank->kept.uid == attach->uid;

    if (rank->kept.left) /* the process has left, but its old connection is still open */
        same_process = true;
    if (rank->peer && !same_process && rank->kept.pid > 0 && rank->kept.pid == attach->pid &&
        rank->kept.uid == attach->uid)
        return cause_rank_taken_by_itself(at, rank->kept.pid);
    if (rank->peer && !same_process)
        return cause_rank_taken(at, rank->kept.pid, rank->attached_ns, job_now(job));
    if (rank->kept.incarnation && job->layout && rank->kept.owner != attach->uid && !attach->is_admin)
        return cause_rank_owned(at, attach->uid, attach->gid, rank->kept.owner);
    return NULL;
}

/* ---- processes that have left ---------------------------------------------------------------------------- */

/* Has every rank of the world left, and ended its connection? */
static bool nobody_is_left(const struct job *job)
{
    for (unsigned r = 0; r < job->world.size; r++)
        if (!job->ranks[r].kept.left || job->ranks[r].peer)
            return false;
    return true;
}

/*
 * Under save_on_stop, saves the last step of the run, because the option covers the end of a run, too. Return: whether
 * a checkpoint is still to be written.
 */
static bool is_to_be_saved(struct job *job)
{
    if (job->config->checkpoint.save_on_stop && !job->run.saves_last) {
        job->run.saves_last = true;
        (void)job_save(job);
    }
    return save_is_busy(job);
}

/*
 * Must the process wait before it attaches again? Rank 0 waits until all ranks have left, because until then the run
 * continues without rank 0. The other ranks wait until rank 0 is back, because rank 0 decides whether the run
 * continues.
 */
static bool comes_early(struct job *job, const struct job_rank *rank, const struct request_hello *hello)
{
    if (job->run.drop_why)
        return true;
    if (!job->layout || !rank->kept.left)
        return false;
    if (rank->rank > 0 || !nobody_is_left(job))
        return true;
    if (!hello->anew)
        return false;
    if (!is_to_be_saved(job))
        report_progress(job, (struct report){REPORT_END_RUN});
    return job->layout != NULL; /* NULL: the job was dropped at once */
}

/*
 * Detaches the rank if its process has left, but the rank is still away. This happens when an earlier daemon died
 * before it recorded the end of the process's connection.
 */
static void detach_if_it_left(struct job *job, struct job_rank *rank, const struct job_attach *attach)
{
    if (rank->peer != RANK_IS_AWAY || !rank->kept.left || rank->kept.pid <= 0 || rank->kept.pid != attach->pid ||
        rank->kept.uid != attach->uid)
        return;
    job_record(job, rank, JOURNAL_DETACH, NULL, 0, NULL, 0);
    job_detach(job, rank);
}

bool attendance_must_wait(struct job *job, const struct job_attach *attach)
{
    const struct request_hello *hello = attach->hello;
    const struct evidence_at at = {.rank = hello->rank, .step = -1, .micro_batch = -1};
    struct job_rank *rank = job_is_own(job, hello->rank) ? &job->ranks[hello->rank] : NULL;
    struct diagnostic *refusal;

    if (!hello->again || !rank || job->run.survival.holds || job->kept.draining)
        return false; /* job_attach() decides */
    refusal = check_owner(job, rank, attach, &at);
    diagnostic_unref(refusal);
    if (!refusal)
        detach_if_it_left(job, rank, attach);
    if (refusal || !comes_early(job, rank, hello))
        return false;
    if (!rank->again_ns)
        rank->again_ns = job_now(job);
    return true;
}

void attendance_waits_no_more(struct job *job, unsigned rank)
{
    job->ranks[rank].again_ns = 0;
    job_todo(job);
}

static struct diagnostic *check_attach(struct job *job, const struct job_attach *attach)
{
    const struct request_hello *hello = attach->hello;
    struct evidence_at at = {
        .layout = job->layout, .rank = hello->rank, .step = -1, .micro_batch = -1, .client = hello->client};
    struct diagnostic *refusal;
    char what[160];

    if (hello->rank >= job->world.size) {
        snprintf(what, sizeof(what), "Hello.rank: %u, expected 0 to %u (world.size is %u)", hello->rank,
                 job->world.size - 1, job->world.size);
        return cause_bad_message(&at, what);
    }
    if (job->run.survival.holds)
        return cause_held(&at, job->run.survival.holds);
    if (job->run.drop_why && job->phase != JOB_WAITING && job->phase != JOB_RESERVING) /* else ranks declare again */
        return drop_describe(job);
    if (job->kept.draining)
        return cause_not_allowed(&at, attach->uid, attach->gid, "the job is being drained: no rank may attach");
    if (hello->rank < job->world.first || hello->rank >= job->world.end) {
        snprintf(what, sizeof(what), "Hello.rank: %u runs on another node; this is node %u, with ranks %u to %u",
                 hello->rank, job->config->world.node, job->world.first, job->world.end - 1);
        return cause_bad_message(&at, what);
    }
    refusal = check_owner(job, &job->ranks[hello->rank], attach, &at);
    return refusal ? refusal : check_run(job, &at, hello->run_id);
}

/*
 * Has the open step passed the rank's next gradients? No rank waits for a rank that has left, so parcels are reduced or
 * skipped without it. If the rank then pushed gradients of these parcels, they would never be reduced.
 */
static bool was_passed_over(const struct job *job, const struct job_rank *rank)
{
    const struct ledger_rank *ledger = &job->ledger.ranks[rank->rank];

    for (uint32_t i = 0; !ledger->asked && i < job->layout->n_parcels; i++) {
        const struct parcel *parcel = &job->work.parcels[i];

        if (parcel->at.micro_batch > ledger->n_ended ||
            (parcel->at.micro_batch == ledger->n_ended && (parcel->at.pass > 0 || parcel->state != PARCEL_OPEN)))
            return true;
    }
    return false;
}

void job_is_back_late(struct job *job, struct job_rank *rank)
{
    assert(job->layout);
    assert(job_is_own(job, rank->rank));
    job_abort(job, rank->rank,
              cause_rank_back(&(struct evidence_at){.layout = job->layout,
                                                    .rank = rank->rank,
                                                    .step = (int64_t)job->ledger.step,
                                                    .micro_batch = -1,
                                                    .client = rank->kept.client}));
}

/* Marks the rank as back. all: all ranks had left, and all are marked as back. */
static void end_leave(struct job *job, struct job_rank *rank, bool all)
{
    bool was_left = rank->kept.left, missed = false;

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *back = &job->ranks[r];

        if (!back->kept.left || (!all && back != rank))
            continue;
        missed |= job->layout && was_passed_over(job, back);
        back->kept.left = false;
    }
    if (was_left && (all || job->phase == JOB_TRAINING)) /* all: other nodes need the report in every phase */
        report_progress(job, (struct report){REPORT_BACK, .back = {.rank = rank, .all = all, .late = missed}});
    else if (missed)
        job_is_back_late(job, rank);
}

void job_all_are_back(struct job *job, bool own)
{
    for (unsigned r = 0; r < job->world.size; r++)
        if (own || r < job->world.first || r >= job->world.end)
            job->ranks[r].kept.left = false;
}

static void start_incarnation(struct job *job, struct job_rank *rank, const struct job_attach *attach)
{
    /* A process that did not receive the layout declares again, even if an earlier daemon formed the job. */
    bool goes_on = rank->kept.incarnation && rank->kept.secret == attach->hello->incarnation &&
                   (attach->hello->resumes || !rank->kept.formed || !job->run.survival.found_ns);
    bool successor = rank->kept.incarnation && !goes_on;

    if (!job->layout || !rank->kept.incarnation)
        rank->kept.owner = attach->uid;
    if (!goes_on) {
        rank_forget_incarnation(rank);
        rank->kept.incarnation = ++job->kept.n_incarnations;
        rank->kept.secret = attach->hello->incarnation;
    }
    assert(rank->kept.incarnation > 0); /* 0: never attached */
    if (!job->layout)
        return;
    if (successor)
        collect_keep_promises(job, rank);
    if (successor)
        executor_attend(job->executor, rank->rank - job->world.first, TRAINER_REPLACED, rank->kept.incarnation);
    if (ledger_attach(&job->ledger, rank->rank, rank->kept.incarnation) == 1 && successor) {
        job->kept.n_reattaches++;
        rank->step.proceed &= job->ledger.ranks[rank->rank].asked; /* a later request must be judged */
        collect_release_ring(job, rank, false);
    }
}

void attendance_choose(struct job *job, const char *optimizer, double momentum)
{
    struct config_world world = job->run.chosen.world;

    job->run.chosen = *job->run.configured;
    job->run.chosen.world = world;
    (void)config_choose_optimizer(&job->run.chosen, optimizer, momentum);
}

/* If the configuration names no optimizer, the first rank that attaches chooses it for all ranks. */
static void choose_optimizer(struct job *job, const struct request_hello *hello)
{
    const char *optimizer = hello->optimizer;
    const struct gemm *gemm;
    char why[256];

    if (job->layout || !job->coordinator->alone || job_anybody_is_here(job))
        return;
    if (optimizer && strcmp(optimizer, "Muon") == 0 && !config_gives(job->run.configured, "optimizer") &&
        config_needs_openblas(job->run.configured, OPTIMIZER_MUON) && gemm_load(&gemm, why, sizeof(why)) < 0) {
        log_line(LOG_WARNING, "%s", why);
        optimizer = NULL;
    }
    attendance_choose(job, optimizer, hello->momentum);
}

enum wire_on_duplicate attendance_policy(const struct job *job, enum wire_on_duplicate wanted)
{
    static const enum wire_on_duplicate policies[] = {
        [CONFIG_DUPLICATE_REJECT] = WIRE_ON_DUPLICATE_REJECT,
        [CONFIG_DUPLICATE_ACCUMULATE] = WIRE_ON_DUPLICATE_ACCUMULATE,
        [CONFIG_DUPLICATE_ABORT_STEP] = WIRE_ON_DUPLICATE_ABORT_STEP,
    };

    assert((size_t)job->config->diagnostics.on_duplicate < ARRAY_SIZE(policies));
    return wanted == WIRE_ON_DUPLICATE_AS_CONFIGURED ? policies[job->config->diagnostics.on_duplicate] : wanted;
}

/* ---- ranks that are away ------------------------------------------------------------------------------- */

bool job_resume(struct job *job, const struct job_attach *attach, struct job_rank **out)
{
    const struct request_hello *hello = attach->hello;
    struct job_rank *rank = hello->rank < job->world.size ? &job->ranks[hello->rank] : NULL;

    assert(attach->peer && attach->peer != RANK_IS_AWAY);
    if (!rank || rank->peer != RANK_IS_AWAY || rank->away.dropped || rank->kept.secret != hello->incarnation ||
        rank->kept.pid != attach->pid || rank->kept.uid != attach->uid)
        return false;
    rank->peer = attach->peer;
    rank->process.is_last = hello->is_last;
    rank->last_ns = job_now(job);
    *out = rank;
    job_todo(job);
    return true;
}

/* ---- ranks that attach and leave ----------------------------------------------------------------------- */

/*
 * Was the same process refused for the same reason last time? A waiting client sends Hello several times a second, and
 * its refusal is logged only once.
 */
static bool is_refused_again(struct job *job, const struct request_hello *hello, const struct diagnostic *refusal)
{
    struct job_rank *rank = hello->rank < job->world.size ? &job->ranks[hello->rank] : NULL;
    bool again;

    if (!rank)
        return false;
    again = rank->refusal.secret == hello->incarnation && rank->refusal.code == refusal->code;
    rank->refusal = (struct rank_refusal){.secret = hello->incarnation, .code = refusal->code};
    return again;
}

int job_attach(struct job *job, const struct job_attach *attach, struct job_rank **out, struct diagnostic **refusal)
{
    const struct request_hello *hello = attach->hello;
    struct job_rank *rank;

    assert(attach->peer); /* NULL: no process is attached */
    *refusal = check_attach(job, attach);
    if (*refusal) {
        if (!is_refused_again(job, hello, *refusal))
            job_keep_stranger(job, diagnostic_ref(*refusal));
        return 1;
    }
    rank = &job->ranks[hello->rank];
    if (rank->peer) { /* the same process on a new connection; the old connection is closed, or will be soon */
        job_disconnect(job, rank, NULL);
        job_detach(job, rank);
    }
    choose_optimizer(job, hello);
    end_leave(job, rank, attach->all_had_left);
    start_incarnation(job, rank, attach);
    job->run.saves_last = false;
    job->run.is_next |= hello->anew && !job->layout;
    rank->again_ns = 0;
    if (rank->kept.formed) /* the same process has connected again */
        rank->kept.lost_ns = 0;
    if (rank->kept.formed)
        executor_attend(job->executor, rank->rank - job->world.first, TRAINER_FOUND, rank->kept.incarnation);
    rank->peer = attach->peer;
    rank->process.is_last = hello->is_last;
    rank->refusal.code = 0;
    job->run.is_over = false;
    rank->kept.pid = attach->pid;
    rank->kept.uid = attach->uid;
    rank->kept.gid = attach->gid;
    free(rank->kept.client);
    rank->kept.client = strdup(hello->client);
    rank->attached_ns = rank->last_ns = job_now(job);
    rank->kept.on_duplicate = attendance_policy(job, hello->on_duplicate);
    if (job->layout)
        job->ledger.ranks[rank->rank].accumulate = rank->kept.on_duplicate == WIRE_ON_DUPLICATE_ACCUMULATE;
    *out = rank;
    return 0;
}

void attendance_end(struct job *job, const char *signal)
{
    const struct config_checkpoint *config = &job->config->checkpoint;
    struct evidence_stopped evidence = {
        .at = {.rank = -1,
               .step = job->kept.has_weights ? (int64_t)job->ledger.step : -1,
               .micro_batch = -1,
               .client = job_client(job)},
        .signal = signal,
        .is_kept = keep_is_on(),
        .dir = config->dir,
        .saves_on_stop = config->save_on_stop,
    };
    struct diagnostic *diagnostic;
    struct save_view save;

    save_describe(job, &save);
    evidence.is_saved = save.is_saved;
    job->run.stopping = true;
    diagnostic = job_keep(job, cause_stopped(&evidence));
    for (unsigned r = job->world.first; r < job->world.end; r++)
        job_disconnect(job, &job->ranks[r], diagnostic);
}

/*
 * If a rank has left under "on_leave: stop", refuses the ranks that wait, and withdraws their requests for the step.
 * The step is not made without the rank that left.
 */
void job_stop_waiting(struct job *job)
{
    for (unsigned r = job->world.first; job_who_left(job) && r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (!job_is_collective(rank->wait) || (rank->wait == WAIT_STEP && job->phase == JOB_UPDATING))
            continue;
        if (rank->wait == WAIT_STEP)
            job->ledger.ranks[r].asked = false;
        job_is_stopped(job, rank);
    }
}

void job_leave(struct job *job, struct job_rank *rank)
{
    rank->kept.left = true;
    rank->kept.lost_ns = 0; /* no rank waits for a rank that has left */
    if (job->layout)
        job_give_up_open(job, rank);
    rank->process.abort_notice = (diagnostic_unref(rank->process.abort_notice), NULL);
    job_fault_reset(&rank->process.fault);
    job_answer_done(job, rank);
    job_stop_waiting(job);
    job_todo(job);
}
