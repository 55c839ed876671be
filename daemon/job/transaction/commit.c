/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The step as a transaction:
 *
 *     all ranks have asked, everything is reduced
 *       norm, verdict (apply or skip), one scale factor
 *     ---- the step is decided: until here nothing of state or weights was written ----
 *       update of every owned partition
 *       commit: epoch + 1, every rank is answered
 *
 * Until the decision an abort is possible (abort.c).
 */

#include "daemon/job/transaction/commit.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/base/blob.h"
#include "core/base/failpoint.h"
#include "core/config/config.h"
#include "core/config/lossscale.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/wire/journal-wire.h"
#include "core/wire/node-wire.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire.h"
#include "daemon/job/model/alike.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/missing.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/pushed.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/stats.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/model/timeline.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/state/save.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/boundary.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/job/transaction/speculate.h"
#include "daemon/job/transaction/step-args.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/state.h"
#include "daemon/step/executor.h"
#include "daemon/step/pools.h"
#include "daemon/step/step.h"
#include "kernels/exact.h"
#include "kernels/update.h"

/* ---- the decision -------------------------------------------------------------------------------------- */

static const struct step_args *first_args(const struct job *job)
{
    static const struct step_args none = {0}; /* not the arguments of a rank, which may be those of an earlier step */

    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ledger.ranks[r].asked)
            return &job->ranks[r].request.args;
    return &none;
}

double job_measure_norm(struct job *job)
{
    struct exact_sum total;

    exact_sum_reset(&total);
    step_norm(job->step, &total);
    return sqrt(exact_sum_round(&total));
}

/* The arguments of the ranks that have asked for the step. */
struct asked {
    const struct step_args *args; /* of the first such rank */
    bool found_inf, proceed;      /* of any such rank */
};

static struct evidence_nonfinite nonfinite_evidence(const struct job *job, bool held)
{
    const struct step_finding *finding = &job->decision.finding;

    return (struct evidence_nonfinite){
        .at = {.layout = job->layout,
               .rank = finding->found && !finding->overflowed ? (int64_t)finding->rank : -1,
               .step = (int64_t)job->ledger.step,
               .micro_batch = finding->found ? (int64_t)finding->micro_batch : -1,
               .client = job_client(job)},
        .param = finding->param,
        .elem = finding->elem,
        .value = finding->value,
        .n_nan = finding->n_nan,
        .n_inf = finding->n_inf,
        .overflowed = finding->overflowed,
        .held = held,
        .loss_scale = step_loss_scale(job, first_args(job)),
    };
}

static bool anybody(const struct job *job, bool (*says)(const struct job_rank *))
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ledger.ranks[r].asked && says(&job->ranks[r])) /* else its arguments are of another step */
            return true;
    return false;
}

static bool found_inf(const struct job_rank *rank)
{
    return rank->request.args.found_inf;
}

static bool proceeds(const struct job_rank *rank)
{
    return rank->step.proceed;
}

/*
 * Does the trainer scale its loss itself? Then it lowers its scale when a step is skipped. A scale of 1 cannot be
 * lowered.
 */
static bool scales_itself(const struct job_rank *rank)
{
    return rank->request.args.loss_scale > 1;
}

/*
 * Must the step be held for a value that is not finite? Under a dynamic loss scale that can be lowered, the step is
 * skipped instead.
 */
static bool holds_nonfinite(const struct job *job, const struct asked *asked)
{
    const struct step_finding *finding = &job->decision.finding;

    return job->config->diagnostics.on_nonfinite == CONFIG_NONFINITE_ERROR &&
           (!job->decision.lossscale.dynamic || lossscale_is_at_minimum(&job->decision.lossscale)) &&
           !(asked->args->loss_scale > 1) && finding->found && !job->ranks[finding->rank].kept.left && !asked->proceed;
}

/*
 * Called under "on_nonfinite: error". Withdraws and refuses the request of the rank that has pushed the value. The
 * other ranks keep waiting. If a dead process has pushed the value, aborts the step instead.
 */
static void hold_for_nonfinite(struct job *job)
{
    struct evidence_nonfinite evidence = nonfinite_evidence(job, true);
    struct job_rank *rank = &job->ranks[job->decision.finding.rank];
    struct diagnostic *refusal = job->decision.lossscale.dynamic
                                     ? cause_loss_scale(&evidence, job->config->fp16.scale.min_scale)
                                     : cause_nonfinite(&evidence);

    assert(job_is_own(job, job->decision.finding.rank));
    job->ledger.ranks[rank->rank].asked = false;
    if (job->decision.finding.micro_batch < job->ledger.ranks[rank->rank].n_inherited) {
        job_abort_inherited(job, rank, refusal);
        return;
    }
    job_fault(job, rank, refusal);
    if (rank->wait == WAIT_STEP)
        job_is_held(job, rank);
}

static void update_is_done(void *userdata, int result)
{
    struct job *job = userdata;

    (void)failpoint("updated");
    assert(job->work.n_io > 0);
    job->work.n_io--;
    if (result < 0) { /* the update was cancelled */
        if (job->run.drop_why)
            job_todo(job); /* the drop has waited for the update */
        return;
    }
    assert(job->phase == JOB_UPDATING);
    step_commit(job->step);
    job->state->progress.n_applied++;
    report_progress(job, (struct report){REPORT_UPDATED});
}

static void choose_hypers(struct job *job, const struct step_args *args)
{
    for (uint32_t g = 0; g < job->layout->n_groups; g++)
        job->decision.hypers[g] = job_hyper(job, args, g);
}

static void note_times(struct job *job)
{
    struct job_times *times = &job->stats.times;

    times->decided_ns = times->first_asked_ns = job_now(job);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ledger.ranks[r].asked)
            times->first_asked_ns = MIN(times->first_asked_ns, job->ranks[r].request.asked_ns);
}

static void warn_accumulated(struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->process.again.code && !rank->kept.again_reported)
            job_fault_diagnostic(job, rank, &rank->process.again, true);
        rank->kept.again_reported |= rank->process.again.code != 0;
        job_fault_reset(&rank->process.again);
    }
}

/* Fills in the verdict. norm: of the gradients of all ranks, unscaled. Return: false if the step is held. */
static bool judge_step(struct job *job, const struct asked *asked, double norm, const uint8_t *pushed_all,
                       struct node_verdict *verdict)
{
    const struct step_args *args = asked->args;
    double scale = step_divisor(job) * step_loss_scale(job, args);
    double max_norm = args->has_max_norm ? args->max_norm : job->config->gradient_clipping, coef;
    bool skips_missing = job->config->diagnostics.on_missing == CONFIG_MISSING_SKIP;

    norm /= scale;
    verdict->nonfinite = !isfinite(norm);
    verdict->found_inf = asked->found_inf;
    if (verdict->nonfinite && !verdict->found_inf && holds_nonfinite(job, asked))
        return false;
    coef = max_norm > 0 ? fmin(1.0, max_norm / (norm + 1e-6)) : 1.0;
    verdict->norm = norm;
    verdict->s = coef / scale;
    verdict->norm_scale = 1.0 / scale;
    verdict->apply = !verdict->nonfinite && !verdict->found_inf && !(skips_missing && missing_any(job, pushed_all));
    if (verdict->apply)
        choose_hypers(job, args);
    return true;
}

/*
 * Updates the loss scale, and reports values that are not finite. Every node does the same, because all have the same
 * verdict.
 */
static void note_nonfinite(struct job *job, const struct node_verdict *verdict)
{
    struct evidence_nonfinite evidence;

    if (verdict->nonfinite && !verdict->found_inf && !job->decision.lossscale.dynamic && !anybody(job, scales_itself)) {
        evidence = nonfinite_evidence(job, false);
        job_keep(job, cause_nonfinite(&evidence));
    }
    if (lossscale_update(&job->decision.lossscale, verdict->nonfinite || verdict->found_inf) ==
        LOSSSCALE_E_AT_MINIMUM) {
        evidence = nonfinite_evidence(job, false);
        job_keep(job, cause_loss_scale(&evidence, job->config->fp16.scale.min_scale));
    }
}

static void note_findings(struct job *job, const struct node_verdict *verdict)
{
    phases_note_step(job);
    zero_lr_note_step(job);
    zero_gradient_note_step(job, verdict->pushed_all);
}

static struct reply step_done(const struct job *job, const struct job_rank *rank)
{
    return (struct reply){
        .type = REPLY_STEP_DONE,
        .step_done =
            {
                .position = job_position(job, rank),
                .applied = job->kept.applied,
                .norm = job->kept.norm,
                .loss_scale = job_loss_scale(job),
                .lr = job->kept.lr,
                .n_missing = job->kept.n_missing,
            },
    };
}

/* Sends the coming answer early to ranks that can use the time until all weights are written. */
static void tell_decision(struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];
        struct reply reply = step_done(job, rank);

        if (rank->wait != WAIT_STEP || !rank->process.wants_decision)
            continue;
        reply.step_done.is_decision = true;
        reply.step_done.position = (struct wire_position){.step = job->ledger.step + 1, .attempt = job->ledger.attempt};
        job_tell(job, rank, &reply);
    }
}

static void start_update(struct job *job)
{
    job->decision.holds_back = false;
    job->work.n_io++;
    step_update(job->step, &(struct step_update){.groups = job->decision.hypers, .s = job->decision.s}, update_is_done,
                job);
}

/* Carries out the verdict. From here the step cannot be aborted. */
static void carry_out(struct job *job, const struct node_verdict *verdict)
{
    assert(job->phase == JOB_TRAINING);
    assert(job->work.n_under_way == 0); /* all gradients are in the sums */
    assert(job->ledger.step == job->state->progress.epoch);
    note_times(job);
    warn_accumulated(job);
    missing_note_counts(job);
    alike_note_step(job, verdict->norm);
    missing_report(job, verdict->pushed_any, verdict->pushed_all);
    job->kept.norm = verdict->norm;
    job->kept.has_norm = true;
    job->kept.applied = verdict->apply;
    note_nonfinite(job, verdict);
    step_decide(job->step, verdict->norm_scale);
    note_findings(job, verdict);
    (void)failpoint("decided");
    job->phase = JOB_UPDATING;
    job_set_writing(job, true);
    if (!job->kept.applied) {
        report_progress(job, (struct report){REPORT_UPDATED});
        return;
    }
    job->kept.lr = job->decision.hypers[0].lr;
    job->decision.has_hypers = true;
    job->decision.s = verdict->s;
    /* Several nodes: node 0 may order a checkpoint after this node has asked for the step. */
    job->decision.holds_back = save_loads(job);
    if (!job->decision.holds_back)
        start_update(job);
    tell_decision(job);
}

/* ---- commit -------------------------------------------------------------------------------------------- */

static void close_rank(struct job *job, struct job_rank *rank)
{
    if (rank->request.blob.data) {
        blob_reset(&rank->blob);
        rank->blob = rank->request.blob;
        rank->request.blob = (struct blob){0};
    }
    if (rank->blob.data)
        blob_set(&rank->kept.blob, rank->blob.data, rank->blob.n_bytes);
    rank_forget_step(rank);
    if (rank->rings[0])
        ring_trim(rank->rings[0]);
    (void)job;
}

static void learn_graph(struct job *job)
{
    if (!job->config->diagnostics.static_graph || job->decision.has_learnt || !job->kept.applied)
        return;
    memcpy(job->decision.learnt, job->step->contributed, job->layout->n_params);
    job->decision.has_learnt = true;
}

void commit_answer(struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct reply reply = step_done(job, &job->ranks[r]);

        if (job->ranks[r].wait == WAIT_STEP)
            job_answer(job, &job->ranks[r], &reply, NULL, 0);
        else if (job->ranks[r].wait == WAIT_ABORT)
            job_answer_done(job, &job->ranks[r]);
    }
}

static void finish_commit(void *userdata)
{
    struct job *job = userdata;

    assert(job->phase == JOB_UPDATING);
    assert(job->state->progress.epoch == job->ledger.step + 1);
    learn_graph(job);
    timeline_committed(job);
    speculate_note_commit(job);
    ledger_commit(&job->ledger);
    memset(job->work.parcels, 0, job->layout->n_parcels * sizeof(*job->work.parcels));
    step_open(job->step);
    job_set_writing(job, false);
    job->phase = JOB_TRAINING;
    job->kept.n_steps_applied += job->kept.applied;
    job->kept.n_steps_skipped += !job->kept.applied;
    stats_note_step(job);
    phases_begin_step(job, job->stats.times.last_commit_ns);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        close_rank(job, &job->ranks[r]);
    diagnostic_unref(steal_ptr(job->abort.reason)); /* the abort came too late */
    if (!job->abort.next)
        free(steal_ptr(job->abort.why));
    job_turn(job, TURN_COMMITTED);
    (void)failpoint("committed");
    commit_answer(job);
    timeline_opened(job); /* after the answers, because the ranks' waits belong to the old step */
    job_todo(job);
}

void job_commit(struct job *job)
{
    assert(job->phase == JOB_UPDATING);
    assert(job->state->progress.epoch == job->ledger.step); /* the step is not committed yet */
    job->state->progress.epoch++;
    job->state->progress.n_windows = 0;
    if (!job->kept.applied || !pools_refresh(job->executor->pools, finish_commit, job))
        finish_commit(job);
}

/* ---- who can be answered ------------------------------------------------------------------------------- */

static bool all_reduced(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (!collect_is_done(job, &job->ranks[r]))
            return false;
    return job->work.n_under_way == 0 && !gather_is_busy(job);
}

/* Have all ranks of this node asked for the step, except ranks that have left, and has at least one rank asked? */
static bool all_asked(const struct job *job)
{
    bool any = false;

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        if (!job->ledger.ranks[r].asked && !job->ranks[r].kept.left)
            return false;
        any |= job->ledger.ranks[r].asked;
    }
    return any;
}

/*
 * Has every rank of this node that has not left asked for the norm or the step, and does at least one wait for the
 * norm? A rank that has asked for the step got the norm already, but its successor may ask for the norm again.
 */
static bool all_want_norm(const struct job *job)
{
    bool any = false;

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        bool wants = job->ranks[r].wait == WAIT_NORM;

        if (!wants && !job->ledger.ranks[r].asked && !job->ranks[r].kept.left)
            return false;
        any |= wants;
    }
    return any;
}

/* norm: of the accumulated gradients, unscaled. */
static void answer_norm(struct job *job, double norm)
{
    norm /= step_divisor(job) * step_loss_scale(job, first_args(job));
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->wait == WAIT_NORM)
            job_answer(
                job, rank,
                &(struct reply){
                    .type = REPLY_DONE,
                    .done = {.position = job_position(job, rank), .norm = norm, .loss_scale = job_loss_scale(job)},
                },
                NULL, 0);
    }
}

/* Does the run end while ranks train? Then no further step is made, because no checkpoint would include it. */
static bool is_cut_short(const struct job *job)
{
    return job->run.ends && job_anybody_is_here(job) && !job_own_left(job);
}

void job_decide(struct job *job)
{
    const struct asked asked = {
        .args = first_args(job), .found_inf = anybody(job, found_inf), .proceed = anybody(job, proceeds)};
    _cleanup_free_ uint8_t *any = malloc(job_bits_bytes(job)), *all = malloc(job_bits_bytes(job));
    struct node_verdict verdict = {.pushed_any = any, .pushed_all = all};

    if (!all_asked(job))
        return;
    if (!any || !all) {
        job_abort(job, -1, NULL);
        return;
    }
    job_find_pushed(job, any, all);
    job->decision.finding = job->step->finding;
    if (judge_step(job, &asked, job_measure_norm(job), all, &verdict))
        carry_out(job, &verdict);
    else
        hold_for_nonfinite(job);
}

void commit_settle(struct job *job)
{
    if (job->decision.holds_back && !save_loads(job)) {
        assert(job->phase == JOB_UPDATING);
        start_update(job);
    }
    if (job->phase != JOB_TRAINING)
        return;
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->wait == WAIT_END && collect_is_done(job, rank)) {
            ledger_forget(&job->ledger, r);
            job_answer_done(job, rank);
        }
    }
    if (!all_reduced(job) || save_loads(job) || is_cut_short(job))
        return;
    if (all_want_norm(job))
        report_progress(job, (struct report){REPORT_WANT_NORM});
    else if (all_asked(job) || job_own_left(job))
        report_progress(job, (struct report){REPORT_ASKED});
}

/* ---- messages of node 0 -------------------------------------------------------------------------------- */

static struct node_finding wire_finding(const struct step_finding *f)
{
    return (struct node_finding){.found = f->found,
                                 .overflowed = f->overflowed,
                                 .micro_batch = f->micro_batch,
                                 .param = f->param,
                                 .rank = f->rank,
                                 .elem = f->elem,
                                 .value = f->value,
                                 .n_nan = f->n_nan,
                                 .n_inf = f->n_inf};
}

/* Checks the numbers that another node has sent before they are used as indices. */
static struct step_finding own_finding(const struct job *job, const struct node_finding *f)
{
    return (struct step_finding){.found = f->found && f->param < job->layout->n_params && f->rank < job->world.size,
                                 .overflowed = f->overflowed,
                                 .micro_batch = f->micro_batch,
                                 .param = f->param,
                                 .rank = f->rank,
                                 .elem = f->elem,
                                 .value = (float)f->value,
                                 .n_nan = f->n_nan,
                                 .n_inf = f->n_inf};
}

void job_describe_sum(struct job *job, struct exact_sum *squares, struct node_finding *finding)
{
    exact_sum_reset(squares);
    step_norm(job->step, squares);
    exact_sum_carry(squares);
    *finding = wire_finding(&job->step->finding);
}

void job_describe_request(const struct job *job, struct node_message *message, struct wire_hyper *groups)
{
    const struct step_args *args = first_args(job);

    message->has_rank = all_asked(job);
    message->proceed = anybody(job, proceeds);
    job_describe_args(job, args, &message->args, groups);
    message->args.found_inf = anybody(job, found_inf);
}

/*
 * Return: a rank whose arguments differ from those of the first rank that has asked, or -1 if all agree. Arguments may
 * differ, because ranks of two nodes may ask before either node knows of the other request.
 */
static int64_t find_differing(const struct job *job)
{
    for (unsigned r = job->world.size; r-- > 0;) {
        struct diagnostic *difference = job->ledger.ranks[r].asked ? job_compare_args(job, &job->ranks[r]) : NULL;

        diagnostic_unref(difference);
        if (difference)
            return r;
    }
    return -1;
}

bool job_judge(struct job *job, const struct job_request *merged, struct node_verdict *verdict,
               struct wire_hyper *groups, struct node_message *hold)
{
    int64_t differing = find_differing(job);
    struct step_args args = {0};
    const struct asked asked = {
        .args = &args, .found_inf = merged->args && merged->args->found_inf, .proceed = merged->proceed};
    struct exact_sum squares = *merged->squares;
    bool decided;

    if (differing >= 0) {
        *hold = (struct node_message){.has_rank = true, .rank = (uint32_t)differing};
        return false;
    }
    if (merged->args && (merged->args->n_groups == 0 || merged->args->n_groups == job->layout->n_groups))
        job_keep_args(job, &args, merged->args);
    else if (merged->args)
        log_error("a node asked for the step with %zu parameter groups, and the job has %u: its arguments are ignored",
                  merged->args->n_groups, job->layout->n_groups);
    job->decision.finding = own_finding(job, merged->finding);
    decided = judge_step(job, &asked, sqrt(exact_sum_round(&squares)), merged->pushed_all, verdict);
    free(args.groups);
    hold->finding = *merged->finding;
    if (!decided)
        return false;
    assert(verdict->n_groups == 0); /* groups has room for one hyper per group */
    for (uint32_t g = 0; verdict->apply && g < job->layout->n_groups; g++)
        groups[verdict->n_groups++] = job_wire_hyper(&job->decision.hypers[g]);
    verdict->groups = groups;
    return true;
}

void job_carry_out(struct job *job, const struct node_verdict *verdict)
{
    if (job->phase != JOB_TRAINING || verdict->n_any_bytes < job_bits_bytes(job) ||
        verdict->n_all_bytes < job_bits_bytes(job) || (verdict->apply && verdict->n_groups != job->layout->n_groups))
        return;
    for (uint32_t p = 0; p < job->layout->n_params; p++)
        if (verdict->pushed_any[p / 8] >> p % 8 & 1)
            step_contribute(job->step, p); /* perhaps only an earlier daemon has noted the push */
    job->decision.finding = own_finding(job, &verdict->finding);
    for (uint32_t g = 0; verdict->apply && g < job->layout->n_groups; g++)
        job->decision.hypers[g] = job_plain_hyper(job->config, &verdict->groups[g]);
    carry_out(job, verdict);
}

/* Withdraws and refuses the rank's request, as if the other rank had asked first. */
static void hold_for_args(struct job *job, struct job_rank *rank)
{
    struct diagnostic *refusal = job_compare_args(job, rank);

    job->ledger.ranks[rank->rank].asked = false;
    if (refusal)
        job_fault(job, rank, refusal);
    if (refusal && rank->wait == WAIT_STEP)
        job_is_held(job, rank);
}

void job_hold(struct job *job, const struct node_message *message)
{
    job->decision.finding = own_finding(job, &message->finding);
    if (message->has_rank && job_is_own(job, message->rank))
        hold_for_args(job, &job->ranks[message->rank]);
    else if (!message->has_rank && job->decision.finding.found && job_is_own(job, job->decision.finding.rank))
        hold_for_nonfinite(job);
}

void job_norm_is(struct job *job, double norm)
{
    answer_norm(job, norm);
}
