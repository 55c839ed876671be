/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Boundaries: the end of a micro-batch, and the step as a transaction.
 *
 *     all ranks have asked, everything is reduced
 *       norm, verdict (apply or skip), one scale factor
 *     ---- the step is decided: until here nothing of state or weights was written ----
 *       update of every owned partition
 *       commit: epoch + 1, every rank is answered
 *
 * An abort is possible until the decision and leaves no trace of the step but attempt + 1.
 */

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/base.h"
#include "daemon/failpoint.h"
#include "daemon/job.h"

/* ---- blobs ------------------------------------------------------------------------------------------------ */

static void blob_reset(struct blob *blob)
{
    free(blob->data);
    *blob = (struct blob){0};
}

/* Out of memory keeps the old one: a restart then redoes more, which is safe. */
static void blob_set(struct blob *blob, const uint8_t *data, size_t n_bytes)
{
    uint8_t *copy = malloc(MAX(n_bytes, (size_t)1));

    if (!copy)
        return;
    if (n_bytes > 0)
        memcpy(copy, data, n_bytes);
    free(blob->data);
    *blob = (struct blob){.data = copy, .n_bytes = n_bytes};
}

/* ---- end of a micro-batch ----------------------------------------------------------------------------------- */

static struct evidence_lost differing(const struct job *job, const struct job_rank *rank)
{
    return (struct evidence_lost){
        .at = job_at(job, rank), .pid = rank->pid, .aborted = true, .differs = true, .param = UINT32_MAX,
        .last_message = rank->last_request,
    };
}

static void refuse_position(struct job *job, struct job_rank *rank, enum diagnostic_code code, uint64_t step,
                            uint32_t micro_batch, const char *detail)
{
    struct push_record record = {.incarnation = rank->incarnation, .sequence = 1, .step = step,
                                 .micro_batch = micro_batch, .time_ns = job_now(job)};

    job_fault_push(job, rank, code, NULL, &record, detail);
    job_is_held(job, rank);
}

void job_end_backward(struct job *job, struct job_rank *rank, const struct request_end_backward *request)
{
    if (job_is_stopped(job, rank))
        return;
    switch (ledger_end(&job->ledger, rank->rank, request->step, request->micro_batch)) {
    case LEDGER_ADMITTED:
        if (request->has_blob)
            blob_set(&rank->blob, request->blob, request->n_blob_bytes);
        rank->abandoned = false;
        collect_close(job, rank);
        job_wait(job, rank, WAIT_END);
        collect_all(job);
        break;
    case LEDGER_RETRY:
        job_wait(job, rank, WAIT_END);
        break;
    case LEDGER_E_INCOMPLETE: {
        struct evidence_lost evidence = differing(job, rank);

        job_wait(job, rank, WAIT_END);
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
    job_settle(job);
}

void job_abandon_backward(struct job *job, struct job_rank *rank, const struct request_abandon_backward *request)
{
    uint32_t n_pushed = job->ledger.ranks[rank->rank].n_pushed_open;
    struct evidence_abandoned evidence = {.at = job_at(job, rank), .why = request->why, .n_dropped = n_pushed};
    struct diagnostic *diagnostic;

    job_fault_reset(&rank->fault); /* the pushes that it is about are given up */
    if (job_is_held(job, rank))
        return;
    evidence.aborted = ledger_abandon(&job->ledger, rank->rank) == LEDGER_MUST_ABORT;
    diagnostic = cause_abandoned(&evidence);
    rank->abandoned = true;
    if (evidence.aborted) {
        job_wait(job, rank, WAIT_END);
        job_abort(job, rank->rank, diagnostic);
        job_settle(job);
        return;
    }
    job_keep(job, diagnostic);
    collect_drop_open(job, rank);
    job_answer_done(job, rank);
}

/* ---- asking for the step -------------------------------------------------------------------------------------- */

static uint32_t n_trainable(const struct job *job)
{
    uint32_t n = 0;

    for (uint32_t p = 0; p < job->layout->n_params; p++)
        n += job->layout->params[p].trainable;
    return n;
}

struct params {
    uint32_t *ids; /* owned */
    uint32_t n;
};

/* Trainable parameters (or learnt ones) that the rank has not pushed in this step. */
static struct params missing_of(const struct job *job, unsigned rank, const uint8_t *among)
{
    struct params params = {.ids = calloc(job->layout->n_params + 1, sizeof(uint32_t))};
    const uint8_t *pushed = job->ledger.ranks[rank].pushed_in_step;

    for (uint32_t p = 0; params.ids && p < job->layout->n_params; p++)
        if (job->layout->params[p].trainable && !pushed[p] && (!among || among[p]))
            params.ids[params.n++] = p;
    return params;
}

/* Do the other ranks that have come as far miss these parameters too? */
static bool missing_on_all(const struct job *job, const struct params *missing)
{
    for (unsigned r = 0; r < job->world_size; r++)
        for (uint32_t i = 0; job->ledger.ranks[r].n_ended > 0 && i < missing->n; i++)
            if (job->ledger.ranks[r].pushed_in_step[missing->ids[i]])
                return false;
    return true;
}

/* Has no rank ever pushed them in a step that was applied? */
static bool never_pushed(const struct job *job, const struct params *missing)
{
    for (uint32_t i = 0; i < missing->n; i++)
        if (state_journal(job->state)->counts[missing->ids[i]] > 0)
            return false;
    return true;
}

/* Return: NULL when this rank may ask, else why not. */
static struct diagnostic *judge_request(const struct job *job, const struct job_rank *rank)
{
    const struct ledger_rank *ledger = &job->ledger.ranks[rank->rank];
    uint64_t configured = job->config->gradient_accumulation_steps;
    uint32_t trainable = n_trainable(job);
    struct params missing = missing_of(job, rank->rank, NULL);
    _cleanup_free_ uint32_t *ids = missing.ids;
    struct evidence_missing evidence = {
        .at = job_at(job, rank),
        .params = missing.ids,
        .n_params = missing.n,
        .n_trainable = trainable,
        .world_size = job->world_size,
        .n_micro_batches = ledger->n_ended,
        .n_configured = (uint32_t)configured,
        .n_forwards = rank->n_forwards - rank->n_forwards_at_step,
        .n_backwards = rank->n_backwards - rank->n_backwards_at_step,
        .abandoned = rank->abandoned,
        .same_on_all_ranks = missing_on_all(job, &missing),
        .same_every_step = never_pushed(job, &missing),
        .n_steps_seen = job->ledger.step + 1,
    };

    if (configured && ledger->n_ended > configured)
        return cause_duplicate(&(struct evidence_duplicate){.at = job_at(job, rank),
                                                            .n_micro_batches = ledger->n_ended,
                                                            .n_configured = (uint32_t)configured});
    if (configured && ledger->n_ended < configured)
        return cause_missing(&evidence);
    evidence.n_configured = 0;
    if (trainable > 0 && (ledger->n_pushed == 0 || rank->abandoned))
        return cause_missing(&evidence);
    if (missing.n > 0 && job->config->diagnostics.on_missing == CONFIG_MISSING_ERROR)
        return cause_missing(&evidence);
    if (job->has_learnt) {
        struct params unlearnt = missing_of(job, rank->rank, job->learnt);
        _cleanup_free_ uint32_t *unlearnt_ids = unlearnt.ids;

        if (unlearnt.n > 0)
            return cause_graph_changed(&(struct evidence_graph){
                .at = job_at(job, rank), .params = unlearnt.ids, .n_params = unlearnt.n});
    }
    return NULL;
}

static void keep_args(struct job_rank *rank, const struct request_step *request, const struct config *config)
{
    struct step_args *args = &rank->args;

    free(args->groups);
    blob_reset(&rank->blob_step);
    *args = (struct step_args){
        .has_max_norm = request->has_max_norm,
        .max_norm = request->max_norm,
        .loss_scale = request->loss_scale,
        .found_inf = request->found_inf,
    };
    if (request->n_groups > 0)
        args->groups = calloc(request->n_groups, sizeof(*args->groups));
    for (size_t i = 0; args->groups && i < request->n_groups; i++) {
        const struct wire_hyper *h = &request->groups[i];

        args->groups[i] = (struct hyper){
            .lr = h->lr, .beta1 = h->beta1, .beta2 = h->beta2, .eps = h->eps, .weight_decay = h->weight_decay,
            .momentum = h->momentum, .dampening = h->dampening, .lr_decay = h->lr_decay, .nesterov = h->nesterov,
            .adam_w_mode = config->optimizer.hyper.adam_w_mode,
        };
        args->n_groups++;
    }
    if (request->has_blob)
        blob_set(&rank->blob_step, request->blob, request->n_blob_bytes);
}

/* Looks for a difference between two ranks' arguments. Return: true and what it is. */
static bool args_differ(const struct step_args *a, const struct step_args *b, struct evidence_args *evidence,
                        char *name, size_t name_size)
{
    static const struct {
        const char *name;
        size_t offset;
    } fields[] = {
        {"lr", offsetof(struct hyper, lr)}, {"beta1", offsetof(struct hyper, beta1)},
        {"beta2", offsetof(struct hyper, beta2)}, {"eps", offsetof(struct hyper, eps)},
        {"weight_decay", offsetof(struct hyper, weight_decay)}, {"momentum", offsetof(struct hyper, momentum)},
        {"dampening", offsetof(struct hyper, dampening)}, {"lr_decay", offsetof(struct hyper, lr_decay)},
    };
    const struct {
        const char *name;
        double a, b;
    } scalars[] = {
        {"number of groups", a->n_groups, b->n_groups},
        {"max_norm", a->has_max_norm ? a->max_norm : -1, b->has_max_norm ? b->max_norm : -1},
        {"loss_scale", a->loss_scale, b->loss_scale},
    };

    evidence->name = name;
    for (size_t i = 0; i < ARRAY_SIZE(scalars); i++) {
        if (scalars[i].a == scalars[i].b)
            continue;
        snprintf(name, name_size, "%s", scalars[i].name);
        evidence->value = scalars[i].a;
        evidence->other_value = scalars[i].b;
        return true;
    }
    for (uint32_t g = 0; g < a->n_groups; g++) {
        for (size_t i = 0; i < ARRAY_SIZE(fields); i++) {
            evidence->value = *(const double *)((const char *)&a->groups[g] + fields[i].offset);
            evidence->other_value = *(const double *)((const char *)&b->groups[g] + fields[i].offset);
            snprintf(name, name_size, "%s of group %u", fields[i].name, g);
            if (evidence->value != evidence->other_value)
                return true;
        }
    }
    return false;
}

/* Return: NULL when the arguments agree with those of the ranks that asked before. */
static struct diagnostic *compare_args(const struct job *job, const struct job_rank *rank)
{
    struct evidence_args evidence = {.at = job_at(job, rank)};
    char name[64];

    for (unsigned r = 0; r < job->world_size; r++) {
        if (r == rank->rank || !job->ledger.ranks[r].asked)
            continue;
        evidence.other_rank = r;
        if (args_differ(&rank->args, &job->ranks[r].args, &evidence, name, sizeof(name)))
            return cause_step_args(&evidence);
        break;
    }
    return NULL;
}

static const char *check_step(const struct job *job, const struct request_step *request)
{
    if (request->step != job->ledger.step || request->attempt != job->ledger.attempt)
        return "Step.step: not the open step";
    if (request->n_groups && request->n_groups != job->layout->n_groups)
        return "Step.groups: not one per parameter group";
    return NULL;
}

void job_step(struct job *job, struct job_rank *rank, const struct request_step *request)
{
    const char *wrong;
    struct diagnostic *refusal;

    if (job_is_stopped(job, rank))
        return;
    wrong = check_step(job, request);
    if (wrong) {
        job_drop_peer(job, rank, wrong);
        return;
    }
    if (job->ledger.ranks[rank->rank].open) {
        refuse_position(job, rank, E_EARLY, request->step, job->ledger.ranks[rank->rank].n_ended,
                        "step while a micro-batch is open: call zerod_end_backward first");
        return;
    }
    keep_args(rank, request, job->config);
    refusal = rank->proceed ? NULL : judge_request(job, rank);
    if (!refusal)
        refusal = compare_args(job, rank);
    if (refusal) {
        job_fault(job, rank, refusal);
        job_is_held(job, rank);
        return;
    }
    if (ledger_ask(&job->ledger, rank->rank) == LEDGER_E_EARLY) {
        refuse_position(job, rank, E_EARLY, request->step, job->ledger.ranks[rank->rank].n_ended,
                        "step before the micro-batch that a predecessor of this rank had begun was done again");
        return;
    }
    rank->asked_ns = job_now(job);
    job_wait(job, rank, WAIT_STEP);
    collect_all(job);
    job_settle(job);
}

void job_grad_norm(struct job *job, struct job_rank *rank)
{
    if (job_is_stopped(job, rank))
        return;
    if (job->ledger.ranks[rank->rank].open) {
        refuse_position(job, rank, E_EARLY, job->ledger.step, job->ledger.ranks[rank->rank].n_ended,
                        "gradient norm while a micro-batch is open: call zerod_end_backward first");
        return;
    }
    job_wait(job, rank, WAIT_NORM);
    job_settle(job);
}

/* ---- the decision --------------------------------------------------------------------------------------------- */

static double divisor(const struct job *job)
{
    return job->config->gradient_allreduce_op == CONFIG_ALLREDUCE_MEAN ? job->world_size : 1;
}

static const struct step_args *first_args(const struct job *job)
{
    for (unsigned r = 0; r < job->world_size; r++)
        if (job->ledger.ranks[r].asked)
            return &job->ranks[r].args;
    return &job->ranks[0].args;
}

static double step_loss_scale(const struct job *job)
{
    double given = first_args(job)->loss_scale;

    return given > 0 ? given : job_loss_scale(job);
}

/* The norm of what is accumulated, unscaled: docs/numerics.md section 2. */
static double measure_norm(struct job *job)
{
    struct exact_sum total;

    exact_sum_reset(&total);
    step_norm(job->step, &total);
    return sqrt(exact_sum_round(&total)) / (divisor(job) * step_loss_scale(job));
}

/* Which parameters are missing, on whom; a warning once per set. */
static bool report_missing(struct job *job)
{
    uint32_t n_params = job->layout->n_params;
    _cleanup_free_ uint8_t *flags = calloc(n_params + 1, 1);
    _cleanup_free_ uint32_t *ids = calloc(n_params + 1, sizeof(*ids));
    uint32_t n = 0, n_all = 0;
    uint64_t digest;
    struct evidence_missing evidence = {
        .at = {.layout = job->layout, .rank = -1, .step = (int64_t)job->ledger.step, .micro_batch = -1},
        .warning = true,
        .skipped = job->config->diagnostics.on_missing == CONFIG_MISSING_SKIP,
        .n_trainable = n_trainable(job),
        .world_size = job->world_size,
    };

    if (!flags || !ids)
        return false;
    for (uint32_t p = 0; p < n_params; p++) {
        unsigned n_missing = 0;

        for (unsigned r = 0; job->layout->params[p].trainable && r < job->world_size; r++)
            n_missing += !job->ledger.ranks[r].pushed_in_step[p];
        flags[p] = n_missing > 0;
        if (n_missing > 0)
            ids[n++] = p;
        n_all += n_missing == job->world_size;
    }
    job->n_missing = n_all;
    digest = n ? XXH3_64bits(flags, n_params) : 0;
    job->n_last_missing = digest == job->last_missing ? job->n_last_missing + 1 : 1;
    evidence.same_every_step = n && job->n_last_missing == job->ledger.step + 1;
    job->last_missing = digest;
    if (n == 0)
        return false;

    for (unsigned i = 0; i < MIN(job->n_missing_seen, (unsigned)ARRAY_SIZE(job->missing_seen)); i++)
        if (job->missing_seen[i] == digest)
            return true;
    job->missing_seen[job->n_missing_seen++ % ARRAY_SIZE(job->missing_seen)] = digest;
    evidence.params = ids;
    evidence.n_params = n;
    evidence.same_on_all_ranks = n == n_all;
    evidence.n_ranks_missing = n == n_all ? job->world_size : 1;
    evidence.n_steps_seen = job->ledger.step + 1;
    job_keep(job, cause_missing(&evidence));
    return true;
}

static struct evidence_nonfinite nonfinite_evidence(const struct job *job, bool held)
{
    const struct step_finding *finding = &job->step->finding;

    return (struct evidence_nonfinite){
        .at = {.layout = job->layout, .rank = finding->rank, .step = (int64_t)job->ledger.step,
               .micro_batch = finding->micro_batch},
        .param = finding->param,
        .elem = finding->elem,
        .value = finding->value,
        .n_nan = finding->n_nan,
        .n_inf = finding->n_inf,
        .overflowed = finding->overflowed,
        .held = held,
        .loss_scale = step_loss_scale(job),
    };
}

static bool anybody(const struct job *job, bool (*says)(const struct job_rank *))
{
    for (unsigned r = 0; r < job->world_size; r++)
        if (says(&job->ranks[r]))
            return true;
    return false;
}

static bool found_inf(const struct job_rank *rank)
{
    return rank->args.found_inf;
}

static bool proceeds(const struct job_rank *rank)
{
    return rank->proceed;
}

/* on_nonfinite: error. The guilty rank's request is taken back and refused; the others wait on. */
static void hold_for_nonfinite(struct job *job)
{
    struct evidence_nonfinite evidence = nonfinite_evidence(job, true);
    struct job_rank *rank = &job->ranks[job->step->finding.rank];

    job->ledger.ranks[rank->rank].asked = false;
    job_fault(job, rank, cause_nonfinite(&evidence));
    if (rank->wait == WAIT_STEP)
        job_is_held(job, rank);
}

static void commit(struct job *job);

static void set_generation(struct job *job)
{
    for (unsigned r = 0; r < job->world_size; r++)
        if (job->ranks[r].rings[0] && job->ranks[r].rings[0]->ready)
            atomic_fetch_add_explicit(&ring_credit_page(job->ranks[r].rings[0])->generation, 1, memory_order_acq_rel);
}

static void update_is_done(void *userdata)
{
    struct job *job = userdata;

    (void)failpoint("updated");
    step_commit(job->step);
    state_journal(job->state)->n_applied++;
    commit(job);
}

static void choose_hypers(struct job *job, const struct step_args *args)
{
    const struct config *config = job->config;
    double base[WIRE_MAX_GROUPS];

    for (uint32_t g = 0; g < job->layout->n_groups; g++)
        base[g] = config->optimizer.hyper.lr;
    for (uint32_t g = 0; g < job->layout->n_groups; g++) {
        job->hypers[g] = args->groups ? args->groups[g] : config->optimizer.hyper;
        if (!args->groups && config->scheduler.type != SCHEDULE_NONE)
            job->hypers[g].lr = schedule_lr(&config->scheduler, base, job->layout->n_groups, g,
                                            state_journal(job->state)->n_applied);
    }
    job->last_lr = job->hypers[0].lr;
}

static void apply(struct job *job, double norm)
{
    const struct step_args *args = first_args(job);
    double max_norm = args->has_max_norm ? args->max_norm : job->config->gradient_clipping;
    double coef = max_norm > 0 ? fmin(1.0, max_norm / (norm + 1e-6)) : 1.0;
    double scale = divisor(job) * step_loss_scale(job);

    choose_hypers(job, args);
    job->phase = JOB_UPDATING;
    set_generation(job);
    step_update(job->step,
                &(struct step_update){.groups = job->hypers, .s = coef / scale, .norm_scale = 1.0 / scale},
                update_is_done, job);
}

static void note_waiting(struct job *job)
{
    uint64_t first = UINT64_MAX, last = 0;

    for (unsigned r = 0; r < job->world_size; r++) {
        if (!job->ledger.ranks[r].asked)
            continue;
        first = MIN(first, job->ranks[r].asked_ns);
        if (job->ranks[r].asked_ns >= last) {
            last = job->ranks[r].asked_ns;
            job->times.slowest_rank = r;
        }
    }
    job->times.wait_last_ns = last > first ? last - first : 0;
    job->times.slowest_behind_ns = job->times.wait_last_ns;
    job->times.decided_ns = job_now(job);
}

static void warn_accumulated(struct job *job)
{
    for (unsigned r = 0; r < job->world_size; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->again.code && !rank->again_reported)
            job_fault_diagnostic(job, rank, &rank->again, true);
        rank->again_reported |= rank->again.code != 0;
        job_fault_reset(&rank->again);
    }
}

/* Decides the step: applies it, commits it as skipped, or holds it. */
static void decide(struct job *job)
{
    double norm = measure_norm(job);
    bool dynamic = job->lossscale.dynamic, inf = anybody(job, found_inf), missing;
    struct evidence_nonfinite evidence;

    if (!isfinite(norm) && !inf && !dynamic && job->config->diagnostics.on_nonfinite == CONFIG_NONFINITE_ERROR &&
        job->step->finding.found && !anybody(job, proceeds)) {
        hold_for_nonfinite(job);
        return;
    }
    note_waiting(job);
    warn_accumulated(job);
    missing = report_missing(job);
    job->last_norm = norm;
    job->has_norm = true;
    job->applying = isfinite(norm) && !inf && !(missing && job->config->diagnostics.on_missing == CONFIG_MISSING_SKIP);
    if (!isfinite(norm) && !inf && !dynamic) {
        evidence = nonfinite_evidence(job, false);
        job_keep(job, cause_nonfinite(&evidence));
    }
    if (lossscale_update(&job->lossscale, !isfinite(norm) || inf) == LOSSSCALE_E_AT_MINIMUM) {
        evidence = nonfinite_evidence(job, false);
        job_fault(job, &job->ranks[job->step->finding.rank],
                  cause_loss_scale(&evidence, job->config->fp16.scale.min_scale));
    }
    state_journal(job->state)->decided = state_journal(job->state)->epoch + 1;
    (void)failpoint("decided");
    if (job->applying) {
        apply(job, norm);
        return;
    }
    job->phase = JOB_UPDATING;
    set_generation(job);
    commit(job);
}

/* ---- commit ------------------------------------------------------------------------------------------------------ */

static void note_times(struct job *job)
{
    struct job_times *times = &job->times;
    uint64_t now = job_now(job);

    times->update_last_ns = now - times->decided_ns;
    times->step_last_ns = now - times->last_commit_ns;
    times->last_commit_ns = now;
    times->wait_total_ns += times->wait_last_ns;
    times->reduce_total_ns += times->reduce_last_ns;
    times->reduce_shown_ns = times->reduce_last_ns;
    times->reduce_last_ns = 0;
    times->update_total_ns += times->update_last_ns;
    times->recent_ns[times->n_recent++ % ARRAY_SIZE(times->recent_ns)] = times->step_last_ns;
    job->counters.overlap_bytes = job->counters.batch_bytes;
    job->counters.overlap_reduced_bytes = job->counters.batch_reduced_bytes;
    job->counters.batch_bytes = job->counters.batch_reduced_bytes = 0;
}

static void close_rank(struct job *job, struct job_rank *rank)
{
    if (rank->blob_step.data) {
        blob_reset(&rank->blob);
        rank->blob = rank->blob_step;
        rank->blob_step = (struct blob){0};
    }
    if (rank->blob.data)
        blob_set(&rank->blob_committed, rank->blob.data, rank->blob.n_bytes);
    rank->proceed = rank->abandoned = false;
    rank->n_forwards_at_step = rank->n_forwards;
    rank->n_backwards_at_step = rank->n_backwards;
    if (rank->rings[0])
        ring_trim(rank->rings[0]);
    (void)job;
}

static void learn_graph(struct job *job)
{
    if (!job->config->diagnostics.static_graph || job->has_learnt || !job->applying)
        return;
    memcpy(job->learnt, job->step->contributed, job->layout->n_params);
    job->has_learnt = true;
}

static void answer_step(struct job *job, struct job_rank *rank)
{
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_STEP_DONE,
                   .step_done = {
                       .position = job_position(job, rank),
                       .applied = job->applying,
                       .norm = job->last_norm,
                       .loss_scale = job_loss_scale(job),
                       .lr = job->last_lr,
                       .n_missing = job->n_missing,
                   },
               },
               NULL, 0);
}

static void finish_commit(struct job *job)
{
    learn_graph(job);
    ledger_commit(&job->ledger);
    memset(job->cursors, 0, job->layout->n_buckets * sizeof(*job->cursors));
    step_open(job->step);
    set_generation(job);
    job->phase = JOB_TRAINING;
    job->counters.applied += job->applying;
    job->counters.skipped += !job->applying;
    note_times(job);
    for (unsigned r = 0; r < job->world_size; r++)
        close_rank(job, &job->ranks[r]);
    for (unsigned r = 0; r < job->world_size; r++)
        if (job->ranks[r].wait == WAIT_STEP)
            answer_step(job, &job->ranks[r]);
    job_settle(job);
}

static void commit(struct job *job)
{
    struct state_journal *journal = state_journal(job->state);

    journal->epoch++;
    journal->n_windows = 0;
    if (!job->applying || !pool_refresh(job, finish_commit))
        finish_commit(job);
}

/* ---- abort ---------------------------------------------------------------------------------------------------------- */

static void rewind_rank(struct job *job, struct job_rank *rank)
{
    struct ring *ring = rank->rings[0];

    rank->proceed = rank->abandoned = false;
    blob_reset(&rank->blob);
    blob_reset(&rank->blob_step);
    if (rank->blob_committed.data)
        blob_set(&rank->blob, rank->blob_committed.data, rank->blob_committed.n_bytes);
    job_fault_reset(&rank->fault);
    job_fault_reset(&rank->again);
    ring_orphan(steal_ptr(rank->rings[1]));
    if (!rank->peer) {
        collect_release_ring(job, rank, true);
        return;
    }
    /* Its client may still write into these slots: they come back with AbortSeen. Until then they hold nothing. */
    for (uint32_t i = 0; ring && i < ring->n_tickets; i++) {
        ring->slots[i].posted = false;
        ring->slots[i].n_pushed = 0;
    }
    if (ring && ring->ready)
        atomic_store_explicit(&ring_credit_page(ring)->attempt, job->ledger.attempt, memory_order_release);
}

static void tell_rank(struct job *job, struct job_rank *rank, const struct diagnostic *reason, const char *why)
{
    if (!rank->formed || !rank->peer || rank->left)
        return;
    if (rank->wait == WAIT_ABORT) {
        job_answer_done(job, rank);
        return;
    }
    diagnostic_unref(rank->abort_notice);
    rank->abort_notice = cause_aborted(&(struct evidence_abort){
        .at = {.layout = job->layout, .rank = job->abort_rank, .step = (int64_t)job->ledger.step, .micro_batch = -1},
        .why = why,
        .new_attempt = job->ledger.attempt,
        .reason = reason,
    });
    if (job_is_collective(rank->wait))
        job_is_held(job, rank);
}

static void finish_abort(struct job *job)
{
    struct diagnostic *reason = steal_ptr(job->abort_reason);

    ledger_abort(&job->ledger);
    memset(job->cursors, 0, job->layout->n_buckets * sizeof(*job->cursors));
    step_open(job->step);
    job->counters.aborts++;
    job->counters.batch_bytes = job->counters.batch_reduced_bytes = 0;
    job->phase = JOB_TRAINING;
    for (unsigned r = 0; r < job->world_size; r++)
        rewind_rank(job, &job->ranks[r]);
    for (unsigned r = 0; r < job->world_size; r++)
        tell_rank(job, &job->ranks[r], reason, reason ? NULL : job->abort_why);
    diagnostic_unref(reason);
    free(steal_ptr(job->abort_why));
    job_settle(job);
}

void job_abort(struct job *job, int64_t rank, struct diagnostic *reason)
{
    if (job->phase == JOB_WINDOW)
        window_forget(job);
    if (job->phase != JOB_TRAINING) { /* nothing to abort, or decided already: it only rolls forward */
        diagnostic_unref(reason);
        return;
    }
    if (reason)
        job_keep(job, diagnostic_ref(reason));
    job->phase = JOB_ABORTING;
    job->abort_rank = rank;
    job->abort_reason = reason;
    collect_settle(job);
    if (job->phase == JOB_ABORTING && job->n_under_way == 0)
        finish_abort(job);
}

void job_abort_step(struct job *job, struct job_rank *rank, const char *why)
{
    struct diagnostic *notice = steal_ptr(rank->abort_notice);

    if (notice) { /* it was aborted already: that is what was asked for */
        diagnostic_unref(notice);
        job_answer_done(job, rank);
        return;
    }
    job_fault_reset(&rank->fault);
    job_wait(job, rank, WAIT_ABORT);
    if (job->phase == JOB_TRAINING)
        job->abort_why = strdup(why);
    job_abort(job, rank->rank, NULL);
    if (rank->wait == WAIT_ABORT && job->phase != JOB_ABORTING)
        job_answer_done(job, rank);
}

void job_abort_seen(struct job *job, struct job_rank *rank, uint32_t attempt)
{
    struct ring *ring = rank->rings[0];

    (void)attempt;
    for (uint32_t i = 0; ring && ring->n_held > 0 && i < ring->n_tickets; i++)
        if (ring->slots[i].held && ring->slots[i].attempt < job->ledger.attempt)
            ring_credit(ring, &ring->slots[i]);
    rank->slot_credited = true;
    if (ring)
        ring_reclaim(ring);
}

/* ---- who can be answered ------------------------------------------------------------------------------------------------ */

static bool all_reduced(const struct job *job)
{
    for (unsigned r = 0; r < job->world_size; r++)
        if (!collect_is_done(job, &job->ranks[r]))
            return false;
    return job->n_under_way == 0 && !pool_is_busy(job->gathered);
}

/* Every rank that has not left has asked for the step, and at least one has. */
static bool all_asked(const struct job *job)
{
    bool any = false;

    for (unsigned r = 0; r < job->world_size; r++) {
        if (!job->ledger.ranks[r].asked && !job->ranks[r].left)
            return false;
        any |= job->ledger.ranks[r].asked;
    }
    return any;
}

/* The same for the norm. A rank that has gone on to the step was answered; a successor may be asking again. */
static bool all_want_norm(const struct job *job)
{
    bool any = false;

    for (unsigned r = 0; r < job->world_size; r++) {
        bool wants = job->ranks[r].wait == WAIT_NORM;

        if (!wants && !job->ledger.ranks[r].asked && !job->ranks[r].left)
            return false;
        any |= wants;
    }
    return any;
}

static void answer_norm(struct job *job)
{
    double norm = measure_norm(job);

    for (unsigned r = 0; r < job->world_size; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->wait == WAIT_NORM)
            job_answer(job, rank,
                       &(struct reply){
                           .type = REPLY_DONE,
                           .done = {.position = job_position(job, rank), .norm = norm,
                                    .loss_scale = job_loss_scale(job)},
                       },
                       NULL, 0);
    }
}

void boundary_settle(struct job *job)
{
    if (job->phase == JOB_ABORTING && job->n_under_way == 0)
        finish_abort(job);
    if (job->phase != JOB_TRAINING)
        return;
    for (unsigned r = 0; r < job->world_size; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->wait == WAIT_END && collect_is_done(job, rank)) {
            ledger_forget(&job->ledger, r);
            job_answer_done(job, rank);
        }
    }
    if (!all_reduced(job))
        return;
    if (all_want_norm(job))
        answer_norm(job);
    else if (all_asked(job))
        decide(job);
}
