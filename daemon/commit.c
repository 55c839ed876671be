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
 * An abort is possible until the decision and leaves no trace of the step but attempt + 1.
 */

#include <assert.h>
#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/base.h"
#include "daemon/failpoint.h"
#include "daemon/job.h"

/* ---- the decision -------------------------------------------------------------------------------------- */

static double divisor(const struct job *job)
{
    return job->config->gradient_allreduce_op == CONFIG_ALLREDUCE_MEAN ? job->world_size : 1;
}

static const struct step_args *first_args(const struct job *job)
{
    static const struct step_args none = {0}; /* a rank's own are those of its last step */

    for (unsigned r = 0; r < job->world_size; r++)
        if (job->ledger.ranks[r].asked)
            return &job->ranks[r].args;
    return &none;
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

static bool misses_all(const struct job *job, unsigned rank, const uint32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (job->ledger.ranks[rank].pushed_in_step[ids[i]])
            return false;
    return true;
}

/* Which parameters are missing, on whom; a warning once per set. */
static bool report_missing(struct job *job)
{
    uint32_t n_params = job->layout->n_params;
    _cleanup_free_ uint8_t *flags = calloc(n_params + 1, 1);
    _cleanup_free_ uint32_t *ids = calloc(n_params + 1, sizeof(*ids));
    _cleanup_free_ uint8_t *called = calloc(n_params + 1, 1);
    uint32_t n = 0, n_all = 0;
    uint64_t digest;
    struct evidence_missing evidence = {
        .at = {.layout = job->layout,
               .rank = -1,
               .step = (int64_t)job->ledger.step,
               .micro_batch = -1,
               .client = job_client(job)},
        .warning = true,
        .skipped = job->config->diagnostics.on_missing == CONFIG_MISSING_SKIP,
        .n_trainable = job_n_trainable(job),
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
    for (unsigned r = 0; r < job->world_size; r++)
        rank_evidence_add(&job->ranks[r].evidence, &evidence, called, misses_all(job, r, ids, n));
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
        .loss_scale = step_loss_scale(job),
    };
}

static bool anybody(const struct job *job, bool (*says)(const struct job_rank *))
{
    for (unsigned r = 0; r < job->world_size; r++)
        if (job->ledger.ranks[r].asked && says(&job->ranks[r])) /* one that has left asked for another step */
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

/* A trainer that scales its loss itself lowers the scale when a step is skipped; at 1 there is none to lower. */
static bool scales_itself(const struct job_rank *rank)
{
    return rank->args.loss_scale > 1;
}

/* A dynamic loss scale skips such steps by itself, as long as it can be lowered. */
static bool holds_nonfinite(const struct job *job)
{
    const struct step_finding *finding = &job->step->finding;

    return job->config->diagnostics.on_nonfinite == CONFIG_NONFINITE_ERROR &&
           (!job->lossscale.dynamic || lossscale_is_at_minimum(&job->lossscale)) && !anybody(job, scales_itself) &&
           finding->found && !job->ranks[finding->rank].left && !anybody(job, proceeds);
}

/* on_nonfinite: error. The guilty rank's request is taken back and refused; the others wait on. */
static void hold_for_nonfinite(struct job *job)
{
    struct evidence_nonfinite evidence = nonfinite_evidence(job, true);
    struct job_rank *rank = &job->ranks[job->step->finding.rank];

    job->ledger.ranks[rank->rank].asked = false;
    job_fault(job, rank,
              job->lossscale.dynamic ? cause_loss_scale(&evidence, job->config->fp16.scale.min_scale)
                                     : cause_nonfinite(&evidence));
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

struct hyper job_hyper(const struct job *job, const struct step_args *args, uint32_t group)
{
    const struct config *config = job->config;
    struct hyper hyper = args->groups ? args->groups[group] : config->optimizer.hyper;
    double base[WIRE_MAX_GROUPS];

    if (args->groups || config->scheduler.type == SCHEDULE_NONE)
        return hyper;
    for (uint32_t g = 0; g < job->layout->n_groups; g++)
        base[g] = config->optimizer.hyper.lr;
    hyper.lr =
        schedule_lr(&config->scheduler, base, job->layout->n_groups, group, state_journal(job->state)->n_applied);
    return hyper;
}

static void choose_hypers(struct job *job, const struct step_args *args)
{
    for (uint32_t g = 0; g < job->layout->n_groups; g++)
        job->hypers[g] = job_hyper(job, args, g);
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
    step_update(job->step, &(struct step_update){.groups = job->hypers, .s = coef / scale, .norm_scale = 1.0 / scale},
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

    if (!isfinite(norm) && !inf && holds_nonfinite(job)) {
        hold_for_nonfinite(job);
        return;
    }
    note_waiting(job);
    warn_accumulated(job);
    missing = report_missing(job);
    job->last_norm = norm;
    job->has_norm = true;
    job->applying = isfinite(norm) && !inf && !(missing && job->config->diagnostics.on_missing == CONFIG_MISSING_SKIP);
    if (!isfinite(norm) && !inf && !dynamic && !anybody(job, scales_itself)) {
        evidence = nonfinite_evidence(job, false);
        job_keep(job, cause_nonfinite(&evidence));
    }
    if (lossscale_update(&job->lossscale, !isfinite(norm) || inf) == LOSSSCALE_E_AT_MINIMUM) {
        evidence = nonfinite_evidence(job, false);
        job_keep(job, cause_loss_scale(&evidence, job->config->fp16.scale.min_scale));
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

/* ---- commit -------------------------------------------------------------------------------------------- */

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
    job_forget_step(rank);
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
                   .step_done =
                       {
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

/* ---- abort --------------------------------------------------------------------------------------------- */

static void rewind_rank(struct job *job, struct job_rank *rank)
{
    struct ring *ring = rank->rings[0];

    job_forget_step(rank);
    blob_reset(&rank->blob);
    blob_reset(&rank->blob_step);
    if (rank->blob_committed.data)
        blob_set(&rank->blob, rank->blob_committed.data, rank->blob_committed.n_bytes);
    job_fault_reset(&rank->fault);
    job_fault_reset(&rank->again);
    ring_orphan(steal_ptr(rank->rings[1]));
    if (!rank->peer || rank->left) { /* nobody will say AbortSeen */
        collect_release_ring(job, rank, true);
        rank->declared = rank->formed = rank->ready = false; /* whoever comes back has no ring: it forms again */
        manifest_deinit(&rank->manifest);
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

static void tell_rank(struct job *job, struct job_rank *rank, struct diagnostic *notice)
{
    if (!rank->formed || !rank->peer || rank->left)
        return;
    if (rank->wait == WAIT_ABORT) {
        job_answer_done(job, rank);
        return;
    }
    diagnostic_unref(rank->abort_notice);
    rank->abort_notice = diagnostic_ref(notice);
    if (job_is_collective(rank->wait) || rank->wait == WAIT_WRITE) /* its window is gone */
        job_is_held(job, rank);
}

static void finish_abort(struct job *job)
{
    struct diagnostic *reason = steal_ptr(job->abort_reason), *notice;

    ledger_abort(&job->ledger);
    memset(job->cursors, 0, job->layout->n_buckets * sizeof(*job->cursors));
    step_open(job->step);
    job->counters.aborts++;
    job->counters.batch_bytes = job->counters.batch_reduced_bytes = 0;
    job->phase = JOB_TRAINING;
    for (unsigned r = 0; r < job->world_size; r++)
        rewind_rank(job, &job->ranks[r]);
    notice = job_keep(job, cause_aborted(&(struct evidence_abort){
                               .at = {.layout = job->layout,
                                      .rank = job->abort_rank,
                                      .step = (int64_t)job->ledger.step,
                                      .micro_batch = -1,
                                      .client = job_client(job)},
                               .why = reason ? NULL : job->abort_why,
                               .new_attempt = job->ledger.attempt,
                               .reason = reason,
                           }));
    for (unsigned r = 0; r < job->world_size; r++)
        tell_rank(job, &job->ranks[r], notice);
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
    if (reason && reason->id == 0) /* else it is kept already */
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
    if (job->phase == JOB_TRAINING || job->phase == JOB_WINDOW)
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

/* ---- who can be answered ------------------------------------------------------------------------------- */

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
            job_answer(
                job, rank,
                &(struct reply){
                    .type = REPLY_DONE,
                    .done = {.position = job_position(job, rank), .norm = norm, .loss_scale = job_loss_scale(job)},
                },
                NULL, 0);
    }
}

void commit_settle(struct job *job)
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
