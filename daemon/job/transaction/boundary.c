/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Boundaries of one rank: it ends a micro-batch, gives one up, or asks for the step. This file judges such a request
 * before it counts. commit.c continues when all ranks have asked for the step.
 */

#include "daemon/job/transaction/boundary.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/blob.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/diagnosis/evidence.h"
#include "core/layout/layout.h"
#include "core/wire/wire-request.h"
#include "core/wire/wire.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/parcels.h"
#include "daemon/job/model/pushed.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/timeline.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/job/transaction/commit.h"
#include "daemon/job/transaction/step-args.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/state.h"
#include "kernels/update.h"

/*
 * How long a refusal waits for pushes of other ranks that would explain it. Picked: a rank's first iteration may be
 * slower by seconds.
 */
enum { OTHERS_MS = 30000 };

/* ---- end of a micro-batch ------------------------------------------------------------------------------ */

static struct evidence_lost differing(const struct job *job, const struct job_rank *rank)
{
    return (struct evidence_lost){
        .at = job_at(job, rank),
        .pid = rank->kept.pid,
        .aborted = true,
        .differs = true,
        .param = UINT32_MAX,
        .last_message = rank->last_request,
    };
}

static const struct misplaced step_while_open = {
    "the step",
    "a micro-batch is open, and its gradients belong to the step",
    {"zerod_end_backward before zerod_step", "opt.step() when no backward runs, in the thread that ran it"}};
static const struct misplaced norm_while_open = {
    "the gradient norm",
    "a micro-batch is open, and its gradients belong to the norm",
    {"zerod_end_backward before zerod_grad_norm", "clip when no backward runs, in the thread that ran it"}};

static void refuse_position(struct job *job, struct job_rank *rank, enum diagnostic_code code, uint64_t step,
                            uint32_t micro_batch, const char *detail)
{
    struct push_record record = {.incarnation = rank->kept.incarnation,
                                 .sequence = 1,
                                 .step = step,
                                 .micro_batch = micro_batch,
                                 .time_ns = job_now(job)};

    job_fault_push(job, rank, code, NULL, &record, detail);
    job_is_held(job, rank);
}

static bool is_torn(const struct job_rank *rank)
{
    return rank->process.partial.torn || (rank->process.partial.next > 0 && !rank->process.partial.refused);
}

/* Aborts the step, because some parts of a gradient may be in the sums, and the other parts will not come. */
static void abort_torn(struct job *job, struct job_rank *rank)
{
    job_wait(job, rank, WAIT_ABORTED);
    job_abort(job, rank->rank,
              cause_abandoned(&(struct evidence_abandoned){
                  .at = job_at(job, rank),
                  .why = "the rest of a large gradient was not pushed",
                  .n_dropped = job_n_pushed_open(job, rank),
                  .aborted = true,
              }));
    job_todo(job);
}

void job_end_backward(struct job *job, struct job_rank *rank, const struct request_end_backward *request)
{
    if (job_is_stopped(job, rank))
        return;
    if (is_torn(rank)) {
        abort_torn(job, rank);
        return;
    }
    switch (ledger_end(&job->ledger, rank->rank, request->step, request->micro_batch)) {
    case LEDGER_ADMITTED:
        timeline_ended(job, rank);
        if (request->has_blob)
            blob_set(&rank->blob, request->blob, request->n_blob_bytes);
        rank->step.abandoned = false;
        free(steal_ptr(rank->step.given_up_why));
        collect_close(job, rank);
        job_wait(job, rank, WAIT_END);
        collect_all(job);
        break;
    case LEDGER_RETRY:
        job_wait(job, rank, WAIT_END);
        break;
    case LEDGER_E_INCOMPLETE: {
        struct evidence_lost evidence = differing(job, rank);

        job_wait(job, rank, WAIT_ABORTED);
        job_abort(job, rank->rank, cause_rank_lost(&evidence));
        break;
    }
    case LEDGER_E_STALE:
        refuse_position(job, rank, E_STALE, request->step, request->micro_batch, "end of a micro-batch");
        return;
    default:
        refuse_position(job, rank, E_EARLY, request->step, request->micro_batch,
                        "end of a micro-batch that was not begun");
        return;
    }
    job_todo(job);
}

/* Drops the rank's open micro-batch. If a part of it is in a sum already, the step begins again without it. */
static void abandon(struct job *job, struct job_rank *rank)
{
    uint32_t n_pushed = job_n_pushed_open(job, rank);
    struct evidence_abandoned evidence = {
        .at = job_at(job, rank), .why = rank->step.given_up_why ? rank->step.given_up_why : "", .n_dropped = n_pushed};
    struct diagnostic *diagnostic;

    evidence.aborted = ledger_abandon(&job->ledger, rank->rank) == LEDGER_MUST_ABORT;
    diagnostic = cause_abandoned(&evidence);
    rank->step.abandoned = true;
    rank->step.n_given_up = n_pushed;
    if (evidence.aborted) {
        job_wait(job, rank, WAIT_ABORTED);
        job_abort(job, rank->rank, diagnostic);
        job_todo(job);
        return;
    }
    job_keep(job, diagnostic);
    collect_drop_open(job, rank);
    job_answer_done(job, rank);
}

void job_abandon_backward(struct job *job, struct job_rank *rank, const struct request_abandon_backward *request)
{
    job_fault_reset(&rank->process.fault); /* the pushes of that fault are given up */
    rank->process.partial = (struct partial_push){0};
    if (job_is_held(job, rank))
        return;
    free(rank->step.given_up_why);
    rank->step.given_up_why = *request->why ? strdup(request->why) : NULL;
    if (!collect_has_promised(job, rank)) {
        abandon(job, rank);
        return;
    }
    job_wait(job, rank, WAIT_ABANDON);
    parcels_withdraw(job->coordinator);
}

void job_withdrawn(struct job *job)
{
    assert(!parcels_withdraws(job->coordinator));
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->wait == WAIT_ABANDON)
            abandon(job, rank);
        else if (rank->kept.left && job->ledger.ranks[r].open)
            job_give_up_open(job, rank);
    }
    collect_all(job);
}

/* ---- asking for the step ------------------------------------------------------------------------------- */

struct params {
    uint32_t *ids; /* owned */
    uint32_t n;
};

/*
 * Lists the trainable parameters that the rank must push, and has not pushed in this step. among: whether it must push
 * each parameter; NULL: it must push all that are not declared as unused.
 */
static struct params missing_of(const struct job *job, unsigned rank, const uint8_t *among)
{
    struct params params = {.ids = calloc(job->layout->n_params + 1, sizeof(uint32_t))};

    for (uint32_t p = 0; params.ids && p < job->layout->n_params; p++)
        if (job->layout->params[p].trainable && !job_has_pushed(job, rank, p) &&
            (among ? among[p] : !job->missing.is_declared[p]))
            params.ids[params.n++] = p;
    return params;
}

/* Has no rank pushed any of these parameters in this step so far? */
static bool missing_on_all(const struct job *job, const struct params *missing)
{
    for (unsigned r = 0; r < job->world.size; r++)
        for (uint32_t i = 0; i < missing->n; i++)
            if (job_has_pushed(job, r, missing->ids[i]))
                return false;
    return true;
}

/* Has no rank pushed these parameters in any applied step? */
static bool never_pushed(const struct job *job, const struct params *missing)
{
    for (uint32_t i = 0; i < missing->n; i++)
        if (job->state->progress.counts[missing->ids[i]] > 0)
            return false;
    return true;
}

/* Has another attached rank ended fewer micro-batches than this rank? Then it may still push the missing gradients. */
static bool others_are_behind(const struct job *job, const struct job_rank *rank)
{
    for (unsigned r = 0; r < job->world.size; r++) {
        const struct ledger_rank *other = &job->ledger.ranks[r];

        if (job_rank_is_here(&job->ranks[r]) && !job->ranks[r].kept.left && !other->asked &&
            other->n_ended < job->ledger.ranks[rank->rank].n_ended)
            return true;
    }
    return false;
}

/* Return: NULL if the rank may ask for the step, else the refusal. */
static struct diagnostic *judge_request(const struct job *job, const struct job_rank *rank)
{
    const struct ledger_rank *ledger = &job->ledger.ranks[rank->rank];
    uint64_t configured = job->config->gradient_accumulation_steps;
    uint32_t trainable = job_n_trainable(job);
    struct params missing = missing_of(job, rank->rank, NULL);
    bool on_all = missing_on_all(job, &missing);
    _cleanup_free_ uint32_t *ids = missing.ids;
    _cleanup_free_ uint8_t *called = calloc(missing.n + 1, 1);
    struct evidence_at at = job_at(job, rank);
    struct evidence_missing evidence = {
        .at = at,
        .params = missing.ids,
        .n_params = missing.n,
        .n_trainable = trainable,
        .world_size = on_all && others_are_behind(job, rank) ? 1 : job->world.size, /* ranks whose pushes are known */
        .n_micro_batches = ledger->n_ended,
        .n_configured = (uint32_t)configured,
        .n_forwards = rank->kept.n_forwards - rank->step.n_forwards_before,
        .n_backwards = rank->kept.n_backwards - rank->step.n_backwards_before,
        .given_up = {.abandoned = rank->step.abandoned,
                     .n_pushes = rank->step.n_given_up,
                     .why = rank->step.given_up_why},
        .same_on_all_ranks = on_all,
        .same_every_step = never_pushed(job, &missing),
        .n_steps_seen = job->ledger.step + 1,
    };

    rank_evidence_add(&rank->step.evidence, &evidence, called, true);
    if (ledger->n_ended > 0 && !rank->step.abandoned)
        evidence.at.micro_batch = at.micro_batch = -1; /* the refusal is about the step, not about one micro-batch */
    if (configured && ledger->n_ended > configured)
        return cause_duplicate(&(struct evidence_duplicate){
            .at = at, .n_micro_batches = ledger->n_ended, .n_configured = (uint32_t)configured});
    if (configured && ledger->n_ended < configured)
        return cause_missing(&evidence);
    evidence.n_configured = 0;
    if (trainable > 0 && (ledger->n_pushed == 0 || rank->step.abandoned))
        return cause_missing(&evidence);
    if (missing.n > 0 && job->config->diagnostics.on_missing == CONFIG_MISSING_ERROR)
        return cause_missing(&evidence);
    if (job->decision.has_learnt) {
        struct params unlearnt = missing_of(job, rank->rank, job->decision.learnt);
        _cleanup_free_ uint32_t *unlearnt_ids = unlearnt.ids;

        if (unlearnt.n > 0)
            return cause_graph_changed(
                &(struct evidence_graph){.at = at, .params = unlearnt.ids, .n_params = unlearnt.n});
    }
    return NULL;
}

/* Compares the hyperparameters of one group of two ranks. Return: true if they differ, with the difference. */
static bool hypers_differ(const struct hyper *a, const struct hyper *b, struct evidence_args *evidence,
                          const char **name)
{
#define ROW(kind, field, plain, text, gives, range, only) {text, a->plain, b->plain},
    const struct {
        const char *name;
        double a, b;
    } fields[] = {HYPER_FIELDS(ROW)};
#undef ROW

    for (size_t i = 0; i < ARRAY_SIZE(fields); i++) {
        evidence->value = fields[i].a;
        evidence->other_value = fields[i].b;
        *name = fields[i].name;
        if (fields[i].a != fields[i].b)
            return true;
    }
    return false;
}

/*
 * Compares the arguments of two ranks. A value that one rank sends may equal the other's configured value. Return: true
 * if they differ, with the difference.
 */
static bool args_differ(const struct job *job, const struct step_args *a, const struct step_args *b,
                        struct evidence_args *evidence, char *name, size_t name_size)
{
    const struct {
        const char *name;
        double a, b;
    } scalars[] = {
        {"max_norm", a->has_max_norm ? a->max_norm : NAN, b->has_max_norm ? b->max_norm : NAN},
        {"loss_scale", a->loss_scale > 0 ? a->loss_scale : NAN, b->loss_scale > 0 ? b->loss_scale : NAN},
    };
    const char *field;

    evidence->name = name;
    for (size_t i = 0; i < ARRAY_SIZE(scalars); i++) {
        if (scalars[i].a == scalars[i].b || (isnan(scalars[i].a) && isnan(scalars[i].b)))
            continue;
        snprintf(name, name_size, "%s", scalars[i].name);
        evidence->value = scalars[i].a;
        evidence->other_value = scalars[i].b;
        return true;
    }
    for (uint32_t g = 0; (a->groups || b->groups) && g < job->layout->n_groups; g++) {
        struct hyper of_a = job_hyper(job, a, g), of_b = job_hyper(job, b, g);

        if (hypers_differ(&of_a, &of_b, evidence, &field)) {
            snprintf(name, name_size, "%s of group %u", field, g);
            return true;
        }
    }
    return false;
}

/* Return: the first other rank that has asked for the step, or NULL. */
static const struct job_rank *first_asked(const struct job *job, const struct job_rank *rank)
{
    for (unsigned r = 0; r < job->world.size; r++)
        if (r != rank->rank && job->ledger.ranks[r].asked)
            return &job->ranks[r];
    return NULL;
}

struct diagnostic *job_compare_args(const struct job *job, const struct job_rank *rank)
{
    const struct job_rank *other = first_asked(job, rank);
    struct evidence_args evidence = {.at = job_at(job, rank)};
    char name[64];

    if (!other)
        return NULL;
    evidence.other_rank = other->rank;
    if (!args_differ(job, &rank->request.args, &other->request.args, &evidence, name, sizeof(name)))
        return NULL;
    return cause_step_args(&evidence);
}

static const char *check_step(const struct job *job, const struct request_step *request)
{
    if (request->step != job->ledger.step || request->attempt != job->ledger.attempt)
        return "Step.step: not the open step";
    if (request->n_groups && request->n_groups != job->layout->n_groups)
        return "Step.groups: the number of entries differs from the number of parameter groups";
    for (size_t i = 0; i < request->n_groups; i++) {
        const char *wrong = job_check_hyper(job->config, &request->groups[i]);

        if (wrong)
            return wrong;
    }
    return NULL;
}

/*
 * Must the judgement wait for other ranks? A rank may ask for the step a moment before the other ranks push the
 * gradients that it lacks. The other ranks' pushes then show the cause.
 */
static bool needs_others(const struct job *job, const struct job_rank *rank)
{
    _cleanup_free_ uint32_t *ids = NULL;
    struct params missing;

    if (job->config->diagnostics.on_missing != CONFIG_MISSING_ERROR || rank->step.abandoned ||
        job->ledger.ranks[rank->rank].n_pushed == 0 || !others_are_behind(job, rank))
        return false;
    missing = missing_of(job, rank->rank, NULL);
    ids = missing.ids;
    return missing.n > 0 && missing_on_all(job, &missing);
}

void job_abort_inherited(struct job *job, const struct job_rank *from, struct diagnostic *refusal)
{
    struct evidence_inherited evidence = {
        .at = job_at(job, from),
        .n_ended = job->ledger.ranks[from->rank].n_inherited,
        .asked = job->ledger.ranks[from->rank].asked,
        .refusal = refusal,
    };
    struct diagnostic *reason;

    evidence.at.micro_batch = -1; /* the refusal is about the step */
    reason = cause_inherited(&evidence);
    diagnostic_unref(refusal);
    job_abort(job, from->rank, reason);
}

/*
 * Refuses the request. from: NULL, or the rank whose dead process has caused the refusal. If there is such a rank,
 * aborts the step instead, because a refused successor could only end, and its successor would be refused, too.
 */
static void refuse_step(struct job *job, struct job_rank *rank, struct diagnostic *refusal, const struct job_rank *from)
{
    if (from) {
        job_wait(job, rank, WAIT_ABORTED);
        job_abort_inherited(job, from, refusal);
        return;
    }
    job_fault(job, rank, refusal);
    job_is_held(job, rank);
}

/* Did a predecessor do the rank's part of the step, with no micro-batch left to push? */
static bool is_heir(const struct job *job, const struct job_rank *rank)
{
    uint64_t configured = job->config->gradient_accumulation_steps;

    return ledger_inherits(&job->ledger, rank->rank) &&
           (!configured || job->ledger.ranks[rank->rank].n_ended >= configured);
}

static void judge_and_ask(struct job *job, struct job_rank *rank)
{
    const struct job_rank *heir = is_heir(job, rank) ? rank : NULL;
    const struct job_rank *other = first_asked(job, rank);
    struct diagnostic *refusal = rank->step.proceed ? NULL : judge_request(job, rank);

    if (refusal) {
        refuse_step(job, rank, refusal, heir);
        return;
    }
    refusal = job_compare_args(job, rank);
    if (refusal) {
        refuse_step(job, rank, refusal, other->wait == WAIT_STEP ? NULL : other);
        return;
    }
    if (ledger_ask(&job->ledger, rank->rank) == LEDGER_E_EARLY) { /* the predecessor's pushes were not repeated */
        refuse_step(job, rank, NULL, rank);
        return;
    }
    assert(job->ledger.ranks[rank->rank].asked);
    rank->request.asked_ns = job_now(job);
    job_wait(job, rank, WAIT_STEP);
    collect_all(job);
}

void boundary_settle(struct job *job)
{
    for (unsigned r = job->world.first; job->phase == JOB_TRAINING && r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->wait == WAIT_OTHERS &&
            (!needs_others(job, rank) || job_now(job) - rank->wait_ns >= OTHERS_MS * UINT64_C(1000000)))
            judge_and_ask(job, rank);
    }
}

void job_step(struct job *job, struct job_rank *rank, const struct request_step *request)
{
    const char *wrong;

    if (job_is_stopped(job, rank))
        return;
    wrong = check_step(job, request);
    if (wrong) {
        job_drop_peer(job, rank, wrong);
        return;
    }
    if (job->ledger.ranks[rank->rank].open) {
        job_refuse_early(job, rank, &step_while_open);
        return;
    }
    if (!collect_is_done(job, rank)) { /* the rank's slots would delay the step for ever */
        job_drop_peer(job, rank, "Step: AbortSeen was not sent after the last abort");
        return;
    }
    job_keep_args(job, &rank->request.args, request);
    job_keep_args(job, &rank->expected, &(struct request_step){0});
    rank->process.wants_decision = request->wants_decision;
    blob_reset(&rank->request.blob);
    if (request->has_blob)
        blob_set(&rank->request.blob, request->blob, request->n_blob_bytes);
    if (!rank->step.proceed && needs_others(job, rank)) {
        job_wait(job, rank, WAIT_OTHERS);
        job->ops.soon(job->ops.userdata, OTHERS_MS);
        return;
    }
    judge_and_ask(job, rank);
    job_todo(job);
}

void job_grad_norm(struct job *job, struct job_rank *rank)
{
    if (job_is_stopped(job, rank))
        return;
    if (job->ledger.ranks[rank->rank].open) {
        job_refuse_early(job, rank, &norm_while_open);
        return;
    }
    if (!collect_is_done(job, rank)) {
        job_drop_peer(job, rank, "GradNorm: AbortSeen was not sent after the last abort");
        return;
    }
    job_wait(job, rank, WAIT_NORM);
    job_todo(job);
}

/* Do the sums have pushes of a dead predecessor in a micro-batch that the rank has neither pushed again nor ended? */
static bool stands_half(const struct job *job, const struct job_rank *rank)
{
    for (uint32_t part = 0; part < job->layout->n_parts; part++)
        if (ledger_entry(&job->ledger, rank->rank, part)->n_redo > 0)
            return true;
    return false;
}

/*
 * Withdraws the pushes of an unfinished backward. If some are in a sum already, the step is aborted, and begins again
 * without them.
 */
void job_give_up_open(struct job *job, struct job_rank *rank)
{
    struct evidence_abandoned evidence = {
        .at = job_at(job, rank), .n_dropped = job_n_pushed_open(job, rank), .aborted = true};

    if (collect_has_promised(job, rank)) {
        parcels_withdraw(job->coordinator); /* job_withdrawn() calls this again */
        return;
    }
    if (stands_half(job, rank) || ledger_abandon(&job->ledger, rank->rank) == LEDGER_MUST_ABORT) {
        job_abort(job, rank->rank, cause_abandoned(&evidence));
        return;
    }
    collect_drop_open(job, rank);
    collect_all(job); /* parcels may be complete without this rank */
}
