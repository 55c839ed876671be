/* SPDX-License-Identifier: Apache-2.0 */

/* Adoption (adopt.h): restores the head, replays the log, and starts interrupted work again. */

#include "daemon/job/adopt.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/blob.h"
#include "core/base/failpoint.h"
#include "core/base/keep.h"
#include "core/base/log.h"
#include "core/base/open-files.h"
#include "core/base/segment.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis-build.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/manifest.h"
#include "core/wire/journal-wire.h"
#include "daemon/job/attendance.h"
#include "daemon/job/journal-base.h"
#include "daemon/job/drop.h"
#include "daemon/job/form.h"
#include "daemon/job/formed.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/timeline.h"
#include "daemon/job/replay.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/commit.h"
#include "daemon/memory/journal.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/state.h"
#include "daemon/step/step.h"

/* ---- the head ------------------------------------------------------------------------------------------ */

static struct diagnostic *restore_notice(const struct wire_diagnostic *notice)
{
    struct diagnostic *d = diagnostic_new(notice->code, notice->title);

    if (strlen(notice->cause_class) < sizeof(d->cause_class))
        diagnostic_class(d, notice->cause_class);
    diagnostic_at(d, notice->has_rank ? (int64_t)notice->rank : -1, notice->has_step ? (int64_t)notice->step : -1, -1);
    for (size_t i = 0; i < notice->n_fields; i++)
        diagnostic_field(d, notice->fields[i].label, "%s", notice->fields[i].text);
    diagnostic_finish(d);
    d->id = notice->id;
    return d;
}

static bool restore_slots(const struct stored_rank *stored, struct ring *ring)
{
    struct ring_slot *slot;

    for (size_t i = 0; i < stored->n_slots; i++) {
        const struct stored_slot *s = &stored->slots[i];
        const struct ring_use use = {.ticket = s->ticket,
                                     .use = s->use,
                                     .parcel = s->parcel,
                                     .micro_batch = s->micro_batch,
                                     .pass = s->pass,
                                     .attempt = s->attempt,
                                     .offset_bytes = s->offset_bytes,
                                     .n_bytes = s->n_bytes,
                                     .overflow = s->overflow};

        if ((s->overflow && ring_find_grant(ring, s->offset_bytes, round_up(MAX(s->n_bytes, UINT64_C(1)), 64)) < 0) ||
            s->parcel >= ring->n_parcels || ring_open_slot(ring, &use, &slot) != 0)
            return false;
        slot->point = s->point;
    }
    return true;
}

static enum job_wait restore_wait(enum stored_wait wait)
{
    static const enum job_wait waits[] = {
        [STORED_WAIT_NONE] = WAIT_NONE,   [STORED_WAIT_READY] = WAIT_READY,   [STORED_WAIT_STEP] = WAIT_STEP,
        [STORED_WAIT_ABORT] = WAIT_ABORT, [STORED_WAIT_OTHER] = WAIT_ABORTED,
    };

    _Static_assert(ARRAY_SIZE(waits) == STORED_WAIT_OTHER + 1, "head_unpack() admits no other wait");
    return waits[wait];
}

/* Restores the rank's kept data. Text and bytes are copied, because the arena owns them. */
static void restore_kept(const struct job *job, const struct stored_rank *stored, struct rank_kept *kept)
{
    *kept = stored->kept;
    kept->client = *stored->kept.client ? strdup(stored->kept.client) : NULL;
    kept->on_duplicate = attendance_policy(job, stored->kept.on_duplicate);
    kept->lost_ns = MIN(stored->kept.lost_ns, job->run.survival.found_ns);
    kept->blob = (struct blob){0};
    if (stored->has_blob)
        blob_set(&kept->blob, stored->kept.blob.data, stored->kept.blob.n_bytes);
}

static int restore_rank(struct job *job, const struct stored_rank *stored, struct diagnostic *notice)
{
    struct job_rank *rank = &job->ranks[stored->rank];
    struct ledger_rank *ledger = &job->ledger.ranks[stored->rank];
    int r = 0;

    restore_kept(job, stored, &rank->kept);
    rank_forget_step(rank); /* the head was written between two steps */
    rank->process.declared = rank->kept.formed;
    rank->process.abort_notice = stored->has_notice ? diagnostic_ref(notice) : NULL;
    if (stored->has_blob)
        blob_set(&rank->blob, rank->kept.blob.data, rank->kept.blob.n_bytes);
    rank->peer = stored->is_here ? RANK_IS_AWAY : NULL;
    rank->attached_ns = rank->last_ns = job->run.survival.found_ns;
    job->run.was_loaded |= rank->kept.resumes && !job->kept.has_weights;
    ledger->incarnation = rank->kept.incarnation;
    ledger->last_sequence = stored->last_sequence;
    ledger->last_ended = ledger->last_ended_at_commit = (struct ledger_position){
        .valid = stored->has_ended, .step = stored->ended_step, .micro_batch = stored->ended_micro_batch};
    ledger->accumulate = rank->kept.on_duplicate == WIRE_ON_DUPLICATE_ACCUMULATE;
    if (stored->has_ring)
        r = formed_find_ring(job, rank);
    if (r == 0 && stored->has_ring && !restore_slots(stored, rank->rings[0]))
        r = -EINVAL;
    if (restore_wait(stored->wait) != WAIT_NONE)
        job_wait(job, rank, restore_wait(stored->wait));
    return r;
}

static void restore_job(struct job *job, const struct stored_head *head)
{
    struct lossscale *scale = &job->decision.lossscale;

    assert(!job->kept.run_id);
    assert(job->ledger.n_ranks == job->world.size);
    job->kept = head->kept;
    job->kept.run_id = *head->kept.run_id ? strdup(head->kept.run_id) : NULL;
    job->ledger.step = head->step;
    job->ledger.attempt = head->attempt;
    job->state->progress.epoch = head->step;
    job->state->progress.n_applied = head->n_applied;
    job->state->progress.n_windows = head->n_windows;
    state_use_counts(job->state, head->counts_copy);
    job->rank_norm.looked_at = head->step + 1; /* no sample of this step, whose slots may be gone */
    step_found(job->step, head->n_ops, head->squares_copy, head->norm_scale);
    if (scale->dynamic) {
        scale->scale = head->loss_scale;
        scale->hysteresis_left = head->hysteresis_left;
        scale->n_steps = head->n_scaled_steps;
        scale->window_start = head->window_start;
    }
    job->decision.has_learnt = head->has_learnt && head->n_learnt_bytes == job->layout->n_params;
    if (job->decision.has_learnt)
        memcpy(job->decision.learnt, head->learnt, head->n_learnt_bytes);
    job->save.has_step = head->kept.saved_step > 0;
    job->save.step = head->kept.saved_step;
    job->stats.times.last_commit_ns = job_now(job);
    job->phase = head->kept.has_weights ? JOB_TRAINING : JOB_INITIALISING;
}

/*
 * Answers the ranks that waited when the earlier daemon wrote the head. Most of these ranks have the answer already,
 * because the earlier daemon sent it afterwards.
 */
static void answer_ranks(struct job *job, enum stored_turn turn)
{
    switch (turn) {
    case TURN_TRAINING:
        for (unsigned r = job->world.first; r < job->world.end; r++)
            if (job->ranks[r].wait == WAIT_READY)
                job_answer_done(job, &job->ranks[r]);
        break;
    case TURN_COMMITTED:
        commit_answer(job);
        break;
    case TURN_ABORTED:
        abort_answer(job);
        break;
    default:
        break;
    }
}

static int restore(struct job *job, const struct stored_head *head, char *why, size_t why_size)
{
    struct diagnostic *notice = head->has_notice ? restore_notice(&head->notice) : NULL;
    int r = 0;

    if (head->kept.digest != job->kept.digest) {
        snprintf(why, why_size, "the manifest in its journal does not match the journal's head");
        r = -EINVAL;
    } else
        restore_job(job, head);
    for (size_t i = 0; r == 0 && i < head->n_ranks; i++) {
        if (!job_is_own(job, head->ranks[i].rank))
            r = -EINVAL;
        else
            r = restore_rank(job, &head->ranks[i], notice);
        if (r < 0)
            snprintf(why, why_size, "the memory of rank %u is not as the journal says: %s", head->ranks[i].rank,
                     strerror(-r));
    }
    diagnostic_unref(notice);
    if (r == 0)
        answer_ranks(job, head->turn);
    return r;
}

/* ---- kept segments ------------------------------------------------------------------------------------- */

static bool is_of_family(const char *name)
{
    static const char *const families[] = {"ring.", "overflow.", "credit.", "device.", "step.", "published."};

    for (size_t i = 0; i < ARRAY_SIZE(families); i++)
        if (strncmp(name, families[i], strlen(families[i])) == 0)
            return true;
    return false;
}

/* Checks that no segment was kept twice. Return: false, and a sentence, if one was. */
static bool check_once(char *why, size_t why_size)
{
    for (size_t i = 0; keep_passed(i); i++)
        for (size_t k = 0; k < i; k++)
            if (strcmp(keep_passed(k)->name, keep_passed(i)->name) == 0) {
                snprintf(why, why_size, "segment \"%s\" was kept twice", keep_passed(i)->name);
                return false;
            }
    return true;
}

/* Checks that this version knows all kept segments. Return: false, and a sentence, if it does not. */
static bool check_known(char *why, size_t why_size)
{
    static const char *const known[] = {"journal", "state",  "gradient", "weights",   "counts",
                                        "pool",    "window", "rewrite",  "spreading", "spare"};
    for (size_t i = 0; keep_passed(i); i++) {
        const char *name = keep_passed(i)->name;
        bool is_known = is_of_family(name);

        for (size_t k = 0; k < ARRAY_SIZE(known); k++)
            is_known |= strcmp(name, known[k]) == 0;
        if (!is_known) {
            snprintf(why, why_size, "this version has no segment named \"%s\"", name);
            return false;
        }
    }
    return true;
}

/* Refuses "persist: off", because it would silently lose the kept state. Return: false, and a sentence, if refused. */
static bool check_config(const struct config *config, char *why, size_t why_size)
{
    if (config->persist == CONFIG_PERSIST_RESTART)
        return true;
    snprintf(why, why_size, "the configuration of this daemon says \"persist: off\", with which no state is kept");
    return false;
}

/*
 * Forgets the remaining segments: rings of processes that were replaced, or not yet formed when the daemon was killed.
 */
static void forget_rest(void)
{
    while (keep_passed(0)) {
        char copy[256];

        snprintf(copy, sizeof(copy), "%s", keep_passed(0)->name);
        close(keep_take(copy));
        keep_forget(copy);
    }
}

/*
 * Restores the number of ranks of a run on one node, even if the configuration now has another. Return: 0 or -EINVAL.
 */
static int take_world(struct job *job, const struct stored_head *head)
{
    char limit[256];

    if (!job->coordinator->alone)
        return 0;
    if (head->n_ranks == 0 || head->n_ranks > CONFIG_MAX_LOCAL_RANKS)
        return -EINVAL;
    if (head->n_ranks != job->world.size)
        log_notice("the run keeps its %zu ranks, although the configuration says %u; \"zerodctl resize\" changes the "
                   "number",
                   head->n_ranks, job->world.size);
    drop_ranks(job, (unsigned)head->n_ranks);
    if (open_files_check((unsigned)head->n_ranks, limit, sizeof(limit)) < 0)
        log_error("%s", limit); /* no refusal, because the ranks may be attached */
    return 0;
}

/* Adopts the job. Return: 1; or -errno, and a sentence. */
static int take_over(struct job *job, char *why, size_t why_size)
{
    struct wire_arena arena = WIRE_ARENA_NULL;
    struct manifest manifest = {0};
    struct stored_head head;
    size_t n_bytes;
    const void *bytes = journal_head(job->run.survival.journal, &n_bytes);
    int r = wire_arena_init(&arena);

    snprintf(why, why_size, "its journal is damaged");
    if (r == 0 && (!bytes || head_unpack(&arena, bytes, n_bytes, &head, why, why_size) != 0))
        r = -EINVAL;
    if (r == 0)
        r = take_world(job, &head);
    if (r == 0)
        r = base_read(job, &manifest, why, why_size);
    if (r == 0) {
        *why = '\0';
        r = form_again(job, &manifest, why, why_size);
        if (r < 0 && !*why)
            snprintf(why, why_size, "its memory does not match the manifest and the configuration: %s", strerror(-r));
        if (r < 0 && *segment_missing())
            snprintf(why, why_size, "segment \"%s\" %s", segment_missing(),
                     r == -ENODATA   ? "is missing"
                     : r == -EUCLEAN ? "was overwritten"
                                     : "does not match: its name, its size or its seals differ");
    }
    if (r == 0)
        r = restore(job, &head, why, why_size);
    if (r == 0)
        r = replay_log(job, why, why_size);
    wire_arena_deinit(&arena);
    manifest_deinit(&manifest);
    return r < 0 ? r : 1;
}

static int adopt_kept_job(struct job *job, char *why, size_t why_size)
{
    struct job_survival *survival = &job->run.survival;
    int r = journal_new(&survival->journal);

    if (r == -EUCLEAN || (r == 0 && journal_is_damaged(survival->journal))) {
        snprintf(why, why_size, "its journal was overwritten");
        return keep_passed_state() ? -EINVAL : 0; /* 0: the daemon may have been killed while it made the journal */
    }
    if (r < 0) {
        snprintf(why, why_size, "its journal is missing or of another size");
        return r;
    }
    if (journal_version(survival->journal) != JOURNAL_VERSION) {
        snprintf(why, why_size, "its journal has version %u, and this daemon reads version %d",
                 journal_version(survival->journal), JOURNAL_VERSION);
        return -ENOTSUP;
    }
    if (!check_known(why, why_size))
        return -EINVAL;
    if (!journal_is_valid(survival->journal)) /* killed before the job was formed, so nothing is lost */
        return 0;
    survival->found_ns = job_now(job);
    r = replay_begin(job);
    return r < 0 ? r : take_over(job, why, why_size);
}

/* Records the names of all passed descriptors, for job_give_up_kept(). Return: 0 or -ENOMEM. */
static int note_names(struct job_survival *survival)
{
    size_t n = 0;

    assert(!survival->held && survival->n_held == 0);
    while (keep_passed(n))
        n++;
    survival->held = calloc(n + 1, sizeof(*survival->held));
    for (size_t i = 0; survival->held && i < n; i++) {
        survival->held[i] = strdup(keep_passed(i)->name);
        survival->n_held += survival->held[i] != NULL;
    }
    return survival->n_held == n ? 0 : -ENOMEM;
}

static void forget_names(struct job_survival *survival)
{
    for (size_t i = 0; i < survival->n_held; i++)
        free(survival->held[i]);
    free(steal_ptr(survival->held));
    survival->n_held = 0;
}

/* Resets the job after a failed adoption. The memory stays kept, and the job refuses ranks. */
static void hold_state(struct job *job, const char *why)
{
    struct job_survival *survival = &job->run.survival;

    replay_cancel(job);
    job->run.stopping = true; /* so that drop_all() records, clears and forgets nothing */
    while (worker_pool_wait(job->pool) > 0)
        ;
    drop_all(job);
    job->work.n_under_way = 0; /* it counts replayed sums, which no worker makes */
    job->run.stopping = false;
    segments_stay_kept();
    survival->holds = strdup(why);
    survival->found_ns = 0;
    job_keep(job, cause_held(&(struct evidence_at){.rank = -1, .step = -1, .micro_batch = -1}, why));
}

int job_adopt(struct job *job, char *why, size_t why_size)
{
    struct job_survival *survival = &job->run.survival;
    int r;

    assert(job->phase == JOB_WAITING && !job->layout);
    assert(!survival->holds);
    if (!keep_is_on() || !keep_passed(0))
        return 0;
    (void)failpoint("adopt");
    r = note_names(survival);
    if (r == 0 && (!check_config(job->run.configured, why, why_size) || !check_once(why, why_size)))
        r = -EINVAL;
    segments_must_be_found(true);
    if (r == 0)
        r = adopt_kept_job(job, why, why_size);
    segments_must_be_found(false);
    if (r < 0) {
        hold_state(job, why);
        return r;
    }
    if (r == 0)
        job_give_up_kept(job);
    else
        forget_rest();
    forget_names(survival);
    if (r == 1) {
        job->kept.n_daemons++;
        survival->away_ns = survival->found_ns - MIN(journal_last_beat(survival->journal), survival->found_ns);
        timeline_opened(job);
        replay_end(job);
        (void)failpoint("adopted");
    }
    return r;
}

void job_give_up_kept(struct job *job)
{
    struct job_survival *survival = &job->run.survival;

    assert(!job->layout); /* a formed job still uses the kept memory */
    journal_clear(survival->journal);
    journal_free(steal_ptr(survival->journal));
    forget_rest();
    for (size_t i = 0; i < survival->n_held; i++)
        keep_forget(survival->held[i]);
    forget_names(survival);
    free(steal_ptr(survival->holds));
    segments_forget();
    if (job->run.configured->persist == CONFIG_PERSIST_OFF)
        keep_switch_off();
}
