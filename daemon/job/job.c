/* SPDX-License-Identifier: Apache-2.0 */

#include "daemon/job/model/model.h"
#include "daemon/nodes/mirror.h"
#include "daemon/nodes/nodes.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "daemon/engines/devices.h"

uint64_t job_now(const struct job *job)
{
    return job->ops.now_ns(job->ops.userdata);
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static void reset_loss_scale(struct job *job)
{
    if (job->config->fp16.enabled)
        lossscale_init(&job->decision.lossscale, &job->config->fp16.scale);
    else
        lossscale_init_off(&job->decision.lossscale);
}

int job_new(struct job **out, const struct config *config, const struct kernels *kernels, struct worker_pool *pool,
            const struct job_ops *ops)
{
    struct job *job = calloc(1, sizeof(*job));

    if (!job)
        return -ENOMEM;
    job->config = job->run.configured = config;
    job->kernels = kernels;
    job->pool = pool;
    job->ops = *ops;
    job->world.size = config->world.size;
    job->world.first = config_first_rank(config);
    job->world.end = job->world.first + config_local_ranks(config);
    assert(job_n_local(job) <= STEP_MAX_RANKS);
    job->abort.rank = -1;
    job->memory.quota.limit = config->limits.memory_bytes ? config->limits.memory_bytes : UINT64_MAX;
    job->ranks = calloc(job->world.size, sizeof(*job->ranks));
    if (!job->ranks) {
        free(job);
        return -ENOMEM;
    }
    for (unsigned r = job->world.first; r < job->world.end; r++)
        job->ranks[r].rank = r;
    reset_loss_scale(job);
    *out = job;
    return 0;
}

void job_note_engine(struct job *job, uint32_t generation, const char *why)
{
    job_keep(job, cause_engine(&(struct evidence_node){
                      .at = {.rank = -1, .step = job->layout ? (int64_t)job->ledger.step : -1, .micro_batch = -1},
                      .generation = generation,
                      .why = why,
                  }));
}

int job_join(struct job *job, const struct nodes_ops *ops)
{
    int r = mirror_new(&job->mirror, job);

    return r < 0 ? r : nodes_new(&job->nodes, job, ops);
}

void job_forget_step(struct job_rank *rank)
{
    rank->proceed = rank->abandoned = false;
    rank->n_given_up = 0;
    free(steal_ptr(rank->given_up_why));
    rank_evidence_reset(&rank->evidence);
    rank->n_forwards_at_step = rank->n_forwards;
    rank->n_backwards_at_step = rank->n_backwards;
}

static void rank_forget_strings(struct job_rank *rank)
{
    for (uint32_t i = 0; i < rank->n_strings; i++)
        free(rank->strings[i]);
    free(rank->strings);
    rank->strings = NULL;
    rank->n_strings = 0;
    rank->string_bytes = 0;
}

/* What belongs to one incarnation. */
static void rank_forget_incarnation(struct job_rank *rank)
{
    rank_forget_strings(rank);
    job_fault_reset(&rank->fault);
    job_fault_reset(&rank->again);
    diagnostic_unref(rank->abort_notice);
    rank->abort_notice = NULL;
    free(rank->client);
    rank->client = NULL;
    rank->declared = rank->formed = rank->ready = false;
    manifest_deinit(&rank->manifest);
    rank->n_pushes = 0;
    rank->partial = (struct partial_push){0};
    rank_evidence_reset(&rank->evidence);
    rank->n_forwards = rank->n_backwards = 0; /* a successor counts from 0 */
    rank->n_forwards_at_step = rank->n_backwards_at_step = 0;
}

static void rank_deinit(struct job_rank *rank)
{
    rank_forget_incarnation(rank);
    ring_orphan(rank->rings[0]);
    ring_orphan(rank->rings[1]);
    free(rank->given_up_why);
    free(rank->blob.data);
    free(rank->blob_committed.data);
    free(rank->blob_step.data);
    free(rank->args.groups);
    free(rank->gathered);
    free(rank->gathering);
    reading_free(rank->given);
}

void job_free(struct job *job)
{
    if (!job)
        return;
    form_drop(job);
    nodes_free(job->nodes);
    mirror_free(job->mirror);
    for (unsigned r = 0; r < job->world.size; r++)
        rank_deinit(&job->ranks[r]);
    kept_deinit(&job->journal.kept);
    diagnostic_unref(job->abort.reason);
    charge_deinit(&job->memory.charge);
    free(job->abort.why);
    free(job->abort.text);
    free(job->abort.class);
    free(job->run.drop_why);
    free(job->run.id);
    free(job->ranks);
    free(job);
}

/* ---- diagnostics --------------------------------------------------------------------------------------- */

static void count_refusal(struct job *job, unsigned code)
{
    for (size_t i = 0; i < job->journal.n_refused; i++) {
        if (job->journal.refused[i].code == code) {
            job->journal.refused[i].n++;
            return;
        }
    }
    if (job->journal.n_refused < ARRAY_SIZE(job->journal.refused)) {
        job->journal.refused[job->journal.n_refused].code = code;
        job->journal.refused[job->journal.n_refused++].n = 1;
    }
}

static struct diagnostic *keep(struct job *job, struct diagnostic *diagnostic, bool stranger)
{
    diagnostic->time_ns = job_now(job);
    kept_add(&job->journal.kept, diagnostic, stranger);
    if (diagnostic->warning)
        job->stats.counters.warnings++;
    else
        count_refusal(job, diagnostic->code);
    job->ops.log(job->ops.userdata, diagnostic);
    return diagnostic;
}

struct diagnostic *job_keep(struct job *job, struct diagnostic *diagnostic)
{
    return keep(job, diagnostic, false);
}

struct diagnostic *job_keep_stranger(struct job *job, struct diagnostic *diagnostic)
{
    return keep(job, diagnostic, true);
}

void job_fault_reset(struct fault *fault)
{
    free(fault->params);
    diagnostic_unref(fault->diagnostic);
    *fault = (struct fault){0};
}

void job_fault(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic)
{
    job_keep(job, diagnostic);
    if (rank->fault.code)
        return; /* the first one stands; the later one is in the log */
    rank->fault.code = diagnostic->code;
    rank->fault.diagnostic = diagnostic_ref(diagnostic);
}

void job_fault_join(struct fault *fault, uint32_t param)
{
    uint32_t capacity = MAX(fault->capacity * 2, 16u);
    uint32_t *params = fault->params;

    if (fault->n_params == MANIFEST_MAX_PARAMS)
        return;
    if (fault->n_params == fault->capacity) {
        params = realloc(fault->params, capacity * sizeof(*params));
        if (!params)
            return; /* the text will name fewer parameters */
        fault->params = params;
        fault->capacity = capacity;
    }
    fault->params[fault->n_params++] = param;
}

void job_fault_push(struct job *job, struct job_rank *rank, enum diagnostic_code code, const struct push_record *first,
                    const struct push_record *second, const char *detail)
{
    struct fault *fault = &rank->fault;

    if (!fault->code) {
        fault->code = code;
        if (first)
            fault->first = *first;
        fault->second = *second;
        fault->other_incarnation = second->incarnation != rank->incarnation;
        snprintf(fault->detail, sizeof(fault->detail), "%s", detail ? detail : "");
    }
    if (fault->code == code && !fault->diagnostic)
        job_fault_join(fault, second->param);
    else
        count_refusal(job, code);
}

void job_refuse_early(struct job *job, struct job_rank *rank, const struct misplaced *misplaced)
{
    const struct push_record record = {.incarnation = rank->incarnation,
                                       .sequence = 1,
                                       .step = job->ledger.step,
                                       .micro_batch = job->ledger.ranks[rank->rank].n_ended,
                                       .time_ns = job_now(job)};
    bool first = !rank->fault.code;

    job_fault_push(job, rank, E_EARLY, NULL, &record, misplaced->what);
    if (first)
        rank->fault.misplaced = misplaced;
    job_is_held(job, rank);
}

static const char *rank_string(const struct job_rank *rank, uint32_t id)
{
    return id < rank->n_strings && rank->strings[id] ? rank->strings[id] : "";
}

/* Strings are borrowed from the rank: cause_*() copy them. */
static struct diagnostic_push spell_out(const struct job_rank *rank, const struct push_record *record)
{
    bool known = record->incarnation == rank->incarnation; /* a predecessor's strings are gone */

    return (struct diagnostic_push){
        .present = record->sequence != 0,
        .record = *record,
        .segment = (char *)(known ? rank_string(rank, record->segment) : ""),
        .site = (char *)(known ? rank_string(rank, record->site) : ""),
    };
}

const char *job_client(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].client)
            return job->ranks[r].client;
    return NULL;
}

struct evidence_at job_at(const struct job *job, const struct job_rank *rank)
{
    struct evidence_at at = {
        .layout = job->layout, .rank = rank->rank, .step = -1, .micro_batch = -1, .client = rank->client};

    if (job->layout) {
        at.step = (int64_t)job->ledger.step;
        at.micro_batch = job->ledger.ranks[rank->rank].n_ended;
    }
    return at;
}

void job_drop_peer(struct job *job, struct job_rank *rank, const char *what)
{
    struct evidence_at at = job_at(job, rank);
    struct diagnostic *diagnostic = job_keep(job, cause_bad_message(&at, what));

    if (rank->peer)
        job->ops.drop(job->ops.userdata, rank->peer, diagnostic);
}

/* Pushes that were refused alike become one diagnostic when somebody has to be told. */
struct diagnostic *job_fault_diagnostic(struct job *job, struct job_rank *rank, struct fault *fault, bool accumulated)
{
    struct evidence_at at = job_at(job, rank);

    if (fault->diagnostic)
        return fault->diagnostic;
    if (accumulated) /* told with the step, when the micro-batch has ended */
        at.micro_batch = fault->first.micro_batch;
    if (fault->code == E_DUPLICATE)
        fault->diagnostic = cause_duplicate(&(struct evidence_duplicate){
            .at = at,
            .code = fault->code,
            .params = fault->params,
            .n_params = fault->n_params,
            .first = spell_out(rank, &fault->first),
            .second = spell_out(rank, &fault->second),
            .sums_known = fault->sums_known,
            .sums_equal = fault->sums_equal,
            .abort_step = rank->on_duplicate == CONFIG_DUPLICATE_ABORT_STEP,
            .accumulated = accumulated,
        });
    else if (fault->code == E_GRAPH_CHANGED)
        fault->diagnostic = cause_graph_changed(
            &(struct evidence_graph){.at = at, .params = fault->params, .n_params = fault->n_params, .extra = true});
    else
        fault->diagnostic = cause_push(&(struct evidence_push){
            .at = at,
            .code = fault->code,
            .params = fault->params,
            .n_params = fault->n_params,
            .push = spell_out(rank, &fault->second),
            .other_incarnation = fault->other_incarnation,
            .asked = job->layout && job->ledger.ranks[rank->rank].asked,
            .detail = fault->detail,
            .cause = fault->misplaced ? fault->misplaced->cause : NULL,
            .fix = fault->misplaced ? fault->misplaced->fix : NULL,
        });
    job_keep(job, diagnostic_ref(fault->diagnostic));
    return fault->diagnostic;
}

/* ---- answers ------------------------------------------------------------------------------------------- */

bool job_is_collective(enum job_wait wait)
{
    return wait == WAIT_SLOT || wait == WAIT_END || wait == WAIT_OTHERS || wait == WAIT_STEP || wait == WAIT_NORM ||
           wait == WAIT_WINDOW_BEGIN || wait == WAIT_WINDOW_END || wait == WAIT_ABANDON || wait == WAIT_ABORTED;
}

void job_wait(struct job *job, struct job_rank *rank, enum job_wait wait)
{
    rank->wait = wait;
    rank->wait_ns = job_now(job);
}

void job_answer(struct job *job, struct job_rank *rank, const struct reply *reply, int *fds, size_t n_fds)
{
    rank->wait = WAIT_NONE;
    if (rank->peer)
        job->ops.answer(job->ops.userdata, rank->peer, reply, fds, n_fds);
    else
        for (size_t i = 0; i < n_fds; i++)
            close(fds[i]);
}

double job_loss_scale(const struct job *job)
{
    return job->decision.lossscale.scale;
}

struct wire_position job_position(const struct job *job, const struct job_rank *rank)
{
    struct ledger_position next;

    if (!job->layout)
        return (struct wire_position){0};
    next = ledger_next(&job->ledger, rank->rank);
    return (struct wire_position){
        .step = next.step,
        .micro_batch = next.micro_batch,
        .attempt = job->ledger.attempt,
        .n_windows = (uint32_t)state_journal(job->state)->n_windows,
    };
}

void job_answer_done(struct job *job, struct job_rank *rank)
{
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_DONE,
                   .done = {.position = job_position(job, rank), .loss_scale = job_loss_scale(job)},
               },
               NULL, 0);
}

void job_refuse(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic, bool aborted)
{
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_REFUSED,
                   .refused = {.diagnostic = wire_diagnostic(diagnostic),
                               .aborted = aborted,
                               .position = job_position(job, rank)},
               },
               NULL, 0);
}

/* on_leave: stop. Return: a rank that has left while this one wants to go on, or NULL. */
static struct job_rank *who_left(struct job *job)
{
    for (unsigned r = 0; r < job->world.size; r++)
        if (job->ranks[r].left && job->config->diagnostics.on_leave == CONFIG_LEAVE_STOP)
            return &job->ranks[r];
    return NULL;
}

bool job_is_held(struct job *job, struct job_rank *rank)
{
    struct diagnostic *notice = steal_ptr(rank->abort_notice);

    if (notice) {
        job_refuse(job, rank, notice, true);
        diagnostic_unref(notice);
        return true;
    }
    if (!rank->fault.code)
        return false;
    rank->fault.told = true;
    job_refuse(job, rank, job_fault_diagnostic(job, rank, &rank->fault, false), false);
    return true;
}

bool job_is_stopped(struct job *job, struct job_rank *rank)
{
    struct job_rank *left = who_left(job);

    if (!rank->fault.code && !rank->abort_notice && left)
        job_fault(job, rank,
                  cause_rank_lost(&(struct evidence_lost){
                      .at = job_at(job, left), .pid = left->pid, .left = true, .last_message = left->last_request}));
    return job_is_held(job, rank);
}

/* ---- ranks come and go --------------------------------------------------------------------------------- */

static bool everybody_left(const struct job *job)
{
    for (unsigned r = 0; r < job->world.size; r++)
        if (!job->ranks[r].left)
            return false;
    return true;
}

/* Return: NULL when the run may attach (and the run id is noted), else the refusal. */
static struct diagnostic *check_run(struct job *job, const struct evidence_at *at, const char *run_id)
{
    if (!run_id || !*run_id)
        return NULL;
    if (job->run.id && strcmp(job->run.id, run_id) != 0)
        return cause_other_run(at, job->run.id, run_id, job->state ? state_journal(job->state)->epoch : 0);
    if (!job->run.id)
        job->run.id = strdup(run_id);
    return NULL;
}

/*
 * A live rank is its process's, which may connect again. What a rank that has formed left behind is its user's.
 * Return: NULL, or the refusal.
 */
static struct diagnostic *check_owner(const struct job *job, const struct job_rank *rank, const struct job_attach *attach,
                                      const struct evidence_at *at)
{
    bool same_process = rank->secret == attach->hello->incarnation && rank->pid == attach->pid && rank->uid == attach->uid;

    if (rank->peer && !same_process && rank->pid > 0 && rank->pid == attach->pid && rank->uid == attach->uid)
        return cause_rank_taken_by_itself(at, rank->pid);
    if (rank->peer && !same_process)
        return cause_rank_taken(at, rank->pid, rank->attached_ns, job_now(job));
    if (rank->incarnation && job->layout && rank->owner != attach->uid && !attach->is_admin)
        return cause_rank_owned(at, attach->uid, attach->gid, rank->owner);
    return NULL;
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
    if (job->run.drop_why && job->phase != JOB_WAITING && job->phase != JOB_RESERVING) /* else it may declare anew */
        return job_describe_doom(job);
    if (job->run.draining)
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
 * A rank that has left is waited for no more: parcels of the open step are reduced, or passed over, without it.
 * Gradients that it pushes there when it has come back would lie behind the cursors, and it would wait for ever.
 */
static bool was_passed_over(const struct job *job, const struct job_rank *rank)
{
    const struct ledger_rank *ledger = &job->ledger.ranks[rank->rank];

    for (uint32_t i = 0; !ledger->asked && i < job->layout->n_parcels; i++) {
        const struct cursor *cursor = &job->work.cursors[i];

        if (cursor->micro_batch > ledger->n_ended ||
            (cursor->micro_batch == ledger->n_ended && (cursor->pass > 0 || job->step->reductions[i].busy ||
                                                        (job->nodes && exchange_keeps(nodes_exchange(job->nodes), i)))))
            return true;
    }
    return false;
}

void job_is_back_late(struct job *job, struct job_rank *rank)
{
    job_abort(job, rank->rank,
              cause_rank_back(&(struct evidence_at){.layout = job->layout,
                                                    .rank = rank->rank,
                                                    .step = (int64_t)job->ledger.step,
                                                    .micro_batch = -1,
                                                    .client = rank->client}));
}

/* The rank is back; when all had left they are all expected back. */
static void end_leave(struct job *job, struct job_rank *rank)
{
    bool all = everybody_left(job), was_left = rank->left, missed = false;

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *back = &job->ranks[r];

        if (!back->left || (!all && back != rank))
            continue;
        missed |= job->layout && was_passed_over(job, back);
        back->left = false;
    }
    if (was_left && job->nodes && job->phase == JOB_TRAINING)
        nodes_back(job->nodes, rank->rank, all, missed);
    else if (missed)
        job_is_back_late(job, rank);
}

void job_all_are_back(struct job *job, bool own)
{
    for (unsigned r = 0; r < job->world.size; r++)
        if (own || r < job->world.first || r >= job->world.end)
            job->ranks[r].left = false;
    mirror_repeat(job->mirror);
}

static void start_incarnation(struct job *job, struct job_rank *rank, const struct job_attach *attach)
{
    bool goes_on = rank->incarnation && rank->secret == attach->hello->incarnation;
    bool successor = rank->incarnation && !goes_on;

    if (!job->layout || !rank->incarnation)
        rank->owner = attach->uid;
    if (!goes_on) {
        rank_forget_incarnation(rank);
        rank->incarnation = ++job->run.n_incarnations;
        rank->secret = attach->hello->incarnation;
    }
    if (!job->layout)
        return;
    if (successor)
        collect_keep_promises(job, rank);
    if (successor && job->devices)
        devices_forget_events(job->devices, rank->rank - job->world.first);
    if (ledger_attach(&job->ledger, rank->rank, rank->incarnation) == 1 && successor) {
        job->stats.counters.reattaches++;
        rank->proceed &= job->ledger.ranks[rank->rank].asked; /* what it did not ask with it has not chosen */
        collect_release_ring(job, rank, false);
    }
}

/* A configuration without an optimizer has the one that the first rank wants: the others are told. */
static void choose_optimizer(struct job *job, const struct request_hello *hello)
{
    if (job->layout || job->nodes)
        return;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].peer)
            return;
    job->run.chosen = *job->run.configured;
    job->config = config_choose_optimizer(&job->run.chosen, hello->optimizer, hello->momentum) ? &job->run.chosen
                                                                                           : job->run.configured;
}

int job_attach(struct job *job, const struct job_attach *attach, struct job_rank **out, struct diagnostic **refusal)
{
    static const enum config_on_duplicate policies[] = {
        [WIRE_ON_DUPLICATE_REJECT] = CONFIG_DUPLICATE_REJECT,
        [WIRE_ON_DUPLICATE_ACCUMULATE] = CONFIG_DUPLICATE_ACCUMULATE,
        [WIRE_ON_DUPLICATE_ABORT_STEP] = CONFIG_DUPLICATE_ABORT_STEP,
    };
    const struct request_hello *hello = attach->hello;
    struct job_rank *rank;

    *refusal = check_attach(job, attach);
    if (*refusal) {
        job_keep_stranger(job, diagnostic_ref(*refusal));
        return 1;
    }
    rank = &job->ranks[hello->rank];
    if (rank->peer) { /* the same process on a new connection: the old one is dead or about to be */
        job->ops.drop(job->ops.userdata, rank->peer, NULL);
        job_detach(job, rank);
    }
    choose_optimizer(job, hello);
    end_leave(job, rank);
    start_incarnation(job, rank, attach);
    if (rank->formed) /* a reconnect goes on where it was */
        rank->lost_ns = 0;
    if (rank->formed && job->devices)
        devices_found_trainer(job->devices, rank->rank - job->world.first);
    rank->peer = attach->peer;
    rank->pid = attach->pid;
    rank->uid = attach->uid;
    rank->gid = attach->gid;
    free(rank->client);
    rank->client = strdup(hello->client);
    rank->attached_ns = rank->last_ns = job_now(job);
    rank->on_duplicate = hello->on_duplicate == WIRE_ON_DUPLICATE_AS_CONFIGURED ? job->config->diagnostics.on_duplicate
                                                                                : policies[hello->on_duplicate];
    if (job->layout)
        job->ledger.ranks[rank->rank].accumulate = rank->on_duplicate == CONFIG_DUPLICATE_ACCUMULATE;
    *out = rank;
    return 0;
}

uint32_t job_n_trainable(const struct job *job)
{
    uint32_t n = 0;

    for (uint32_t p = 0; p < job->layout->n_params; p++)
        n += job->layout->params[p].trainable;
    return n;
}

bool job_has_pushed(const struct job *job, unsigned rank, uint32_t param)
{
    return job->ledger.ranks[rank].pushed_in_step[layout_last_part(job->layout, param)];
}

bool job_has_pushed_now(const struct job *job, unsigned rank, uint32_t param)
{
    return ledger_entry(&job->ledger, rank, layout_last_part(job->layout, param))->n_pushed > 0;
}

bool job_awaits(const struct job *job, const struct job_rank *rank, uint32_t param)
{
    const struct ring *ring = rank->rings[0];

    return job->layout->params[param].trainable && !job_has_pushed_now(job, rank->rank, param) &&
           !(ring && ring_is_held_back(ring, param));
}

uint32_t job_n_pushed_open(const struct job *job, const struct job_rank *rank)
{
    uint32_t n = 0;

    for (uint32_t p = 0; p < job->layout->n_params; p++)
        n += job->layout->params[p].trainable && job_has_pushed_now(job, rank->rank, p);
    return n;
}

static void describe_debt(const struct job *job, const struct job_rank *rank, char *dst, size_t size)
{
    const struct ledger_rank *ledger = &job->ledger.ranks[rank->rank];
    uint32_t n_trainable = job_n_trainable(job);

    if (ledger->asked)
        snprintf(dst, size, "nothing: it had asked for the step");
    else if (!ledger->open && ledger->n_ended > 0)
        snprintf(dst, size, "the request for the step, or more micro-batches than the %u it had ended",
                 ledger->n_ended);
    else
        snprintf(dst, size, "%u of %u parameters of micro-batch %u", n_trainable - job_n_pushed_open(job, rank),
                 n_trainable, ledger->n_ended);
}

static void report_lost(struct job *job, struct job_rank *rank)
{
    char owed[128];
    struct diagnostic *diagnostic;

    describe_debt(job, rank, owed, sizeof(owed));
    diagnostic = cause_rank_lost(&(struct evidence_lost){
        .at = job_at(job, rank),
        .pid = rank->pid,
        .last_message = rank->last_request,
        .owed = owed,
    });
    job_keep(job, diagnostic);
}

static bool anybody_is_here(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].peer)
            return true;
    return false;
}

void job_detach(struct job *job, struct job_rank *rank)
{
    rank->peer = NULL;
    job_release_reading(job, rank);
    rank->wait = WAIT_NONE; /* a request for the step stands: the ledger has it */
    if (job->devices && rank->formed)
        devices_lost_trainer(job->devices, rank->rank - job->world.first);
    job_fault_reset(&rank->fault);
    rank_evidence_reset(&rank->evidence); /* of how this process came to push nothing */
    if (!job->layout) {
        rank_forget_incarnation(rank);
        rank->incarnation = 0;
        if (!anybody_is_here(job)) /* nothing is held that the run id could be the name of */
            free(steal_ptr(job->run.id));
    } else {
        gather_detach(job, rank);
        window_detach(job, rank);
        /* A successor that dies before it is formed does not give its rank more time. */
        if (!rank->left && job->run.has_weights && !rank->lost_ns)
            rank->lost_ns = job_now(job);
        /* Nobody waits for the successor of one that was sent away with all the others. */
        if (!rank->left && rank->formed && !job->run.stopping && !job->run.drop_why)
            report_lost(job, rank);
    }
    job_settle(job);
}

/* What a predecessor's death left added up of a micro-batch that nobody has ended. */
static bool stands_half(const struct job *job, const struct job_rank *rank)
{
    for (uint32_t part = 0; part < job->layout->n_parts; part++)
        if (ledger_entry(&job->ledger, rank->rank, part)->n_redo > 0)
            return true;
    return false;
}

/* Half a backward is no contribution: it is taken back, or if it was added already, the step begins again without it.
 */
void job_give_up_open(struct job *job, struct job_rank *rank)
{
    struct evidence_abandoned evidence = {.at = job_at(job, rank),
                                          .why = "the rank left inside a backward",
                                          .n_dropped = job_n_pushed_open(job, rank),
                                          .aborted = true};

    if (collect_has_promised(job, rank)) {
        nodes_withdraw(job->nodes); /* then again */
        return;
    }
    if (stands_half(job, rank) || ledger_abandon(&job->ledger, rank->rank) == LEDGER_MUST_ABORT) {
        job_abort(job, rank->rank, cause_abandoned(&evidence));
        return;
    }
    collect_drop_open(job, rank);
    collect_all(job); /* nothing more is to come from this rank */
}

/* on_leave: stop. Those who wait are told now; a step that they had asked for is not taken without the one that left.
 */
void job_stop_waiting(struct job *job)
{
    for (unsigned r = job->world.first; who_left(job) && r < job->world.end; r++) {
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
    rank->left = true;
    rank->lost_ns = 0; /* nobody waits for it any more */
    if (job->layout)
        job_give_up_open(job, rank);
    rank->abort_notice = (diagnostic_unref(rank->abort_notice), NULL);
    job_fault_reset(&rank->fault);
    job_answer_done(job, rank);
    job_stop_waiting(job);
    job_settle(job);
}

bool job_is_idle(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].peer)
            return false;
    if (job->work.n_under_way > 0 || job->work.n_io > 0 || gather_is_busy(job) || window_is_busy(job->window))
        return false;
    /* A window that nobody is left to end has changed nothing. */
    return job->phase == JOB_WAITING || job->phase == JOB_TRAINING || job->phase == JOB_INITIALISING ||
           job->phase == JOB_WINDOW;
}

int job_drop(struct job *job, char **why)
{
    if (!job_is_idle(job)) {
        *why = strdup("trainers are still attached: end them first (zerodctl ranks lists them)");
        return 1;
    }
    job_reset(job);
    return 0;
}

void job_reset(struct job *job)
{
    form_drop(job);
    reset_loss_scale(job);
    free(job->run.id);
    job->run.id = NULL;
    job->run.draining = false;
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        rank_deinit(&job->ranks[r]);
        job->ranks[r] = (struct job_rank){.rank = r};
    }
}

/* ---- small requests ------------------------------------------------------------------------------------ */

enum { MAX_STRING_BYTES = 4 << 20 }; /* per incarnation; call sites of a large model are some 100 KiB */

void job_intern(struct job *job, struct job_rank *rank, const struct request_intern *request)
{
    size_t n_bytes = strlen(request->text) + 1;
    char **strings = rank->strings;

    if (rank->string_bytes + n_bytes > MAX_STRING_BYTES) {
        job_fault(job, rank,
                  cause_quota(&(struct evidence_quota){.at = job_at(job, rank),
                                                       .what = "interned strings",
                                                       .unit = "bytes",
                                                       .asked = n_bytes,
                                                       .held = rank->string_bytes,
                                                       .allowed = MAX_STRING_BYTES,
                                                       .fix = "intern each call site once and use its id"}));
        return;
    }
    if (request->id >= rank->n_strings) {
        uint32_t n = MAX(request->id + 1, rank->n_strings * 2);

        strings = realloc(rank->strings, n * sizeof(*strings));
        if (!strings)
            return; /* the site will be unknown */
        memset(strings + rank->n_strings, 0, (n - rank->n_strings) * sizeof(*strings));
        rank->strings = strings;
        rank->n_strings = n;
    }
    free(strings[request->id]);
    strings[request->id] = strdup(request->text);
    rank->string_bytes += n_bytes;
}

/* Was it the step that was held, so that the rank may have it all the same? What a push did is no such thing. */
static bool is_of_step(const struct fault *fault)
{
    switch (fault->code) {
    case E_MISSING:
    case E_NONFINITE:
    case E_LOSS_SCALE:
        return true;
    case E_DUPLICATE: /* more micro-batches than configured */
    case E_GRAPH_CHANGED:
        return fault->n_params == 0;
    default:
        return false;
    }
}

void job_clear_fault(struct job *job, struct job_rank *rank)
{
    struct diagnostic *notice = steal_ptr(rank->abort_notice);

    if (notice) {
        job_refuse(job, rank, notice, true);
        diagnostic_unref(notice);
        return;
    }
    rank->proceed = is_of_step(&rank->fault);
    job_fault_reset(&rank->fault);
    job_answer_done(job, rank);
}

static bool are_params(const struct job *job, const uint32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= job->layout->n_params)
            return false;
    return true;
}

void job_report(struct job *job, struct job_rank *rank, const struct request_report *request)
{
    struct evidence_at at = job_at(job, rank);

    if (request->n_params > 0 && (!job->layout || !are_params(job, request->params, request->n_params))) {
        job_drop_peer(job, rank, "Report.params: no such parameter");
        return;
    }
    job_fault(job, rank,
              cause_report(&at, (enum diagnostic_code)request->code, request->params, request->n_params,
                           request->detail, rank->formed));
}

void job_evidence(struct job *job, struct job_rank *rank, const struct request_evidence *request)
{
    if (!are_params(job, request->not_called, request->n_not_called) ||
        !are_params(job, request->called, request->n_called)) {
        job_drop_peer(job, rank, "Evidence: no such parameter");
        return;
    }
    if (request->step == job->ledger.step && request->attempt == job->ledger.attempt)
        rank_evidence_set(&rank->evidence, request, job->layout->n_params);
}

void job_settle(struct job *job)
{
    if (job->mirror) /* before what is settled is reported: others judge by it */
        mirror_tell(job->mirror, false);
    if (job->phase == JOB_WAITING || job->phase == JOB_RESERVING || job->phase == JOB_INITIALISING) {
        form_settle(job);
        return;
    }
    boundary_settle(job);
    abort_settle(job);
    commit_settle(job);
    window_settle(job);
    form_settle(job); /* successors */
    if (job->mirror)
        mirror_tell(job->mirror, false);
}
