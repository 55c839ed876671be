/* SPDX-License-Identifier: Apache-2.0 */

/* Forms a job: makes the layout from equal manifests, admits and reserves memory, and then accepts initial weights. */

#include "daemon/job/form.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/keep.h"
#include "core/base/log.h"
#include "core/base/process-limit.h"
#include "core/base/sequence.h"
#include "core/base/worker.h"
#include "core/budget/budget.h"
#include "core/budget/plan.h"
#include "core/config/config.h"
#include "core/config/schedule.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/layout/manifest.h"
#include "core/wire/journal-wire.h"
#include "core/wire/wire-request.h"
#include "daemon/job/journal-base.h"
#include "daemon/job/drop.h"
#include "daemon/job/executor-events.h"
#include "daemon/job/formed.h"
#include "daemon/job/gpu-room.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/state/resume.h"
#include "daemon/job/transaction/speculate.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/quota.h"
#include "daemon/memory/state.h"
#include "daemon/step/executor.h"
#include "daemon/step/step.h"
#include "kernels/update.h"

/* ---- declaring ----------------------------------------------------------------------------------------- */

void job_declare(struct job *job, struct job_rank *rank, const struct request_declare *request)
{
    struct evidence_at at = job_at_forming(rank);

    if (rank->process.declared) {
        job_fault(job, rank,
                  cause_declare(&at, "parameters were declared after Form", "declare all of them before zerod_form"));
        return;
    }
    for (size_t i = 0; i < request->n_params; i++) {
        if (manifest_add(&rank->process.manifest, &request->params[i]) == 0)
            continue;
        job_fault(job, rank,
                  cause_quota(&(struct evidence_quota){.at = at,
                                                       .what = "manifest",
                                                       .unit = "parameters",
                                                       .asked = request->n_params,
                                                       .held = rank->process.manifest.n,
                                                       .allowed = MANIFEST_MAX_PARAMS,
                                                       .fix = "declare fewer or larger parameters"}));
        return;
    }
}

/*
 * Refuses the rank if a fault or an abort is pending. Then frees the rank's manifest, because the client declares
 * again.
 */
static bool is_held(struct job *job, struct job_rank *rank)
{
    if (!job_is_held(job, rank))
        return false;
    manifest_deinit(&rank->process.manifest);
    return true;
}

/* Refuses a rank with a parameter for Muon if the job has another optimizer. Return: true if the rank was refused. */
static bool refuse_muon(struct job *job, struct job_rank *rank, const struct evidence_at *at)
{
    const struct config_optimizer *optimizer = &job->config->optimizer;
    char name[128], what[256];

    for (uint32_t p = 0; optimizer->type != OPTIMIZER_MUON && p < rank->process.manifest.n; p++) {
        const struct layout_decl *decl = &rank->process.manifest.decls[p];

        if (!decl->muon)
            continue;
        layout_print_name(name, sizeof(name), decl->name, decl->name_len);
        snprintf(what, sizeof(what), "%s was declared for Muon, and the optimizer of this job is %s", name,
                 config_optimizer_name(optimizer));
        job_fault(job, rank, cause_declare(at, what, "optimizer: {type: Muon} in the daemon's configuration"));
        return true;
    }
    return false;
}

void job_form(struct job *job, struct job_rank *rank, const struct request_form *request)
{
    struct evidence_at at = job_at_forming(rank);
    char what[128];

    if (is_held(job, rank))
        return;
    if (request->n_params != rank->process.manifest.n) {
        snprintf(what, sizeof(what), "Form.n_params: %u, but %u parameters were declared", request->n_params,
                 rank->process.manifest.n);
        job_drop_peer(job, rank, what);
        return;
    }
    if (rank->process.manifest.n == 0) {
        job_fault(job, rank,
                  cause_declare(&at, "no parameter was declared",
                                "zerod_clear_fault, zerod_declare, and then zerod_form again"));
    } else if (!refuse_muon(job, rank, &at) && job->layout &&
               manifest_digest(&rank->process.manifest) != job->kept.digest) {
        job_fault(job, rank,
                  cause_declare(&at, "the manifest is not the one that this run was formed with",
                                "start the same model, or end the run: zerodctl drop"));
    }
    if (is_held(job, rank))
        return;
    rank->process.declared = true;
    rank->process.wants_published = request->wants_published;
    rank->process.from_gpu = request->from_gpu;
    /* Decided now, because rank 0 of a new run may be ready before this rank is answered. */
    rank->kept.resumes = job->kept.has_weights || job->run.was_loaded;
    job_wait(job, rank, WAIT_FORM);
    job_todo(job);
}

/* ---- memory -------------------------------------------------------------------------------------------- */

static void print_sum(char *dst, size_t size, const struct plan_bytes *b)
{
    if (b->offloaded) {
        snprintf(dst, size,
                 "state %" PRIu64 " + staging %" PRIu64 " + fixed %" PRIu64 " = %" PRIu64 " bytes\n(and %" PRIu64
                 " bytes on the GPUs)",
                 b->state, b->staging, b->fixed, b->needed, b->device);
        return;
    }
    if (b->device > 0) {
        snprintf(dst, size,
                 "staging %" PRIu64 " + fixed %" PRIu64 " = %" PRIu64 " bytes\n(and %" PRIu64 " bytes on the GPUs)",
                 b->staging, b->fixed, b->needed, b->device);
        return;
    }
    snprintf(dst, size,
             "state %" PRIu64 " + gradient %" PRIu64 " + ring %" PRIu64 " + staging %" PRIu64 "\n+ weights %" PRIu64
             " + pool %" PRIu64 " + fixed %" PRIu64 " = %" PRIu64 " bytes",
             b->state, b->gradient, b->ring, b->staging, b->weights, b->pool, b->fixed, b->needed);
}

/* In a job of several nodes the text names the node, because each node has its own limits. */
static void print_what(char *dst, size_t size, const struct job *job, const char *limit)
{
    char node[32] = "";

    if (!job->coordinator->alone)
        snprintf(node, sizeof(node), " on node %u", job->config->world.node);
    snprintf(dst, size, "memory of the job%s (%s)", node, limit);
}

/*
 * Charges the job's memory. Return: NULL if the job fits, else the refusal. The limits are checked first, because a
 * memfd over a cgroup's limit causes an OOM kill.
 */
static struct diagnostic *admit_memory(struct job *job, const struct plan_bytes *bytes)
{
    uint64_t needed = bytes->needed, held = job->memory.quota.used;
    struct memory_headroom headroom;
    char sum[512], what[128];
    struct evidence_quota evidence = {
        .at = job_at_forming(NULL), .what = what, .unit = "bytes", .asked = needed, .held = held};
    const char *limit;

    print_sum(sum, sizeof(sum), bytes);
    evidence.sum = sum;
    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    if (quota_charge(&job->memory.quota, &job->memory.charge, needed) != 0) {
        limit = "limits.memory";
        evidence.allowed = job->memory.quota.limit;
        evidence.fix = "raise limits.memory, or make the model smaller (zerodctl plan shows what each part needs)";
    } else if (needed > headroom.cgroup_bytes) {
        limit = "memory left in its cgroup";
        evidence.allowed = headroom.cgroup_bytes;
        evidence.fix = "raise the cgroup's limit (MemoryMax= of the unit), or make the model smaller";
    } else if (needed > headroom.available_bytes) {
        limit = "MemAvailable of this machine";
        evidence.allowed = headroom.available_bytes;
        evidence.fix = "free memory on this machine, or make the model smaller";
    } else {
        return NULL;
    }
    if (job->config->zero.speculative_update == CONFIG_SPECULATE &&
        (job->config->zero.spare_buckets > 0 || job->config->zero.early_buckets > 0))
        evidence.fix = "set zero_optimization.speculative_update to auto, which takes memory only if there is enough, or "
                       "give the job more memory (zerodctl plan shows what each part needs)";
    charge_deinit(&job->memory.charge);
    print_what(what, sizeof(what), job, limit);
    return cause_quota(&evidence);
}

/* ---- stages of forming --------------------------------------------------------------------------------- */

/* Return: -EINVAL if there is a refusal, which the job then owns; SEQUENCE_OVER if refusal is NULL. */
static int refuse_with(struct job *job, struct diagnostic *refusal)
{
    if (!refusal)
        return SEQUENCE_OVER;
    assert(!job->forming.refusal);
    job->forming.refusal = refusal;
    return -EINVAL;
}

static int compare_manifests(void *userdata)
{
    struct job *job = userdata;
    const struct manifest *manifests[STEP_MAX_WORLD] = {NULL};
    uint64_t digest = manifest_digest(&job->ranks[job->world.first].process.manifest);
    bool equal = true;

    _Static_assert((int)CONFIG_MAX_RANKS <= (int)STEP_MAX_WORLD, "there is room for the manifests of all ranks");
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        manifests[r] = &job->ranks[r].process.manifest;
        equal &= manifest_digest(&job->ranks[r].process.manifest) == digest;
    }
    return refuse_with(job, equal ? NULL : cause_manifest(manifests, job->world.size));
}

/* Makes job->layout. Return: NULL; or how to mend the error, and `what` receives the error. */
static const char *make_layout(struct job *job, char *what, size_t size)
{
    const struct manifest *manifest = &job->ranks[job->world.first].process.manifest;
    char name[128];
    const char *key;
    uint32_t bad = 0;
    int r = layout_new(&job->layout, manifest->decls, manifest->n, job->world.size,
                       job->config->zero.reduce_bucket_size, &bad);

    if (r == LAYOUT_E_DUPLICATE_NAME) {
        layout_print_name(name, sizeof(name), manifest->decls[bad].name, manifest->decls[bad].name_len);
        snprintf(what, size, "parameter %u has the name of an earlier one: %s", bad, name);
        return "declare each parameter once; tied weights are one parameter";
    }
    if (r != 0) {
        snprintf(what, size, "%s",
                 r == LAYOUT_E_TOO_LARGE ? "the parameters have more elements in all than can be laid out"
                                         : "out of memory for the layout");
        return "declare a smaller model";
    }
    job->kept.digest = manifest_digest(manifest);
    if (schedule_check_groups(&job->config->scheduler, job->layout->n_groups, &key) == 0)
        return NULL;
    snprintf(what, size, "scheduler.params.%s needs one value, or one per parameter group (%u groups)", key,
             job->layout->n_groups);
    return "give one value, or one per group";
}

static int lay_out(void *userdata)
{
    struct evidence_at at = job_at_forming(NULL);
    char what[256];
    const char *fix = make_layout(userdata, what, sizeof(what));

    return refuse_with(userdata, fix ? cause_declare(&at, what, fix) : NULL);
}

static void plan_memory(struct job *job)
{
    struct budget_ranks ranks = {.first_local = job->world.first, .n_local = job_n_local(job)};
    struct plan_options options = budget_options(job->config, job->layout, ranks, job->layout->n_parcels);

    plan_bytes_by_class(job->layout, &options, &job->memory.planned);
}

static int admit_job(void *userdata)
{
    struct job *job = userdata;

    gpu_room_log(job);
    speculate_choose(job);
    plan_memory(job);
    return refuse_with(job, admit_memory(job, &job->memory.planned));
}

static int make_gathered(struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        assert(!rank->gathers.counts);
        rank->gathers.counts = calloc(job->layout->n_params, sizeof(*rank->gathers.counts));
        if (!rank->gathers.counts)
            return -ENOMEM;
    }
    return SEQUENCE_OVER;
}

int form_ledger(struct ledger *ledger, const struct layout *layout, struct ledger_ranks ranks)
{
    _cleanup_free_ uint8_t *trainable = malloc(layout->n_parts + 1);

    assert(ranks.first < ranks.end && ranks.end <= ranks.n);
    assert(layout->world_size == ranks.n);
    if (!trainable)
        return -ENOMEM;
    memset(trainable, true, layout->n_parts); /* frozen parameters have no parts */
    return ledger_init(ledger, ranks, layout->n_parts, trainable, false);
}

static int make_tables(void *userdata)
{
    struct job *job = userdata;
    int r;

    assert(!job->work.parcels && !job->decision.hypers && !job->decision.learnt);
    job->work.parcels = calloc(job->layout->n_parcels + 1, sizeof(*job->work.parcels));
    job->decision.hypers = calloc(job->layout->n_groups, sizeof(*job->decision.hypers));
    job->speculation.hypers = calloc(job->layout->n_groups, sizeof(*job->speculation.hypers));
    job->decision.learnt = calloc(job->layout->n_params, 1);
    if (!job->work.parcels || !job->decision.hypers || !job->speculation.hypers || !job->decision.learnt)
        return -ENOMEM;
    job->work.summing = collect_summing(job);
    r = missing_init(job);
    if (r == 0)
        r = zero_gradient_init(job);
    if (r < 0)
        return r;
    r = form_ledger(&job->ledger, job->layout,
                    (struct ledger_ranks){.first = job->world.first, .end = job->world.end, .n = job->world.size});
    return r < 0 ? r : make_gathered(job);
}

/* Makes the executor. State and step have addresses, but no pages yet. */
static int make_executor(void *userdata)
{
    struct job *job = userdata;
    int r = job_make_executor(job);

    if (r == 0)
        r = coordinator_form(job->coordinator);
    return r < 0 ? r : SEQUENCE_OVER;
}

static void reserve_run(struct work *work, uint32_t item)
{
    struct job *job = container_of(work, struct job, forming.reserve_work);
    uint32_t n = executor_n_reserve_pieces(job->executor), n_theirs = coordinator_n_reserve_pieces(job->coordinator);
    int r;

    (void)failpoint("forming");
    if (item < n)
        r = executor_reserve(job->executor, item);
    else
        r = item < n + n_theirs ? coordinator_reserve(job->coordinator, item - n) : keep_confirm(KEEP_TIMEOUT_MS);
    if (r < 0)
        __atomic_store_n(&job->forming.reserve_result, r, __ATOMIC_RELAXED);
}

static void reserve_done(struct work *work)
{
    struct job *job = container_of(work, struct job, forming.reserve_work);

    assert(job->phase == JOB_RESERVING);
    assert(job->work.n_io > 0);
    job->work.n_io--;
    if (job->run.drop_why)
        drop_settle(job);
    else
        sequence_advance(&job->forming.sequence, job->forming.reserve_result);
}

static int reserve_memory(void *userdata)
{
    struct job *job = userdata;

    assert(job->phase == JOB_WAITING);
    job->phase = JOB_RESERVING;
    job->forming.has_memory = false;
    job->forming.reserve_result = 0;
    job->forming.reserve_work =
        (struct work){.run = reserve_run,
                      .done = reserve_done,
                      .n_items = executor_n_reserve_pieces(job->executor) +
                                 coordinator_n_reserve_pieces(job->coordinator) + (job->run.survival.journal != NULL)};
    job->work.n_io++;
    worker_post(job->pool, &job->forming.reserve_work);
    return SEQUENCE_WAITS;
}

/*
 * Starts the executor. job_formed() or job_unformed() follows. GPU engines of several nodes start when all nodes have
 * their memory.
 */
static int start_executor(void *userdata)
{
    struct job *job = userdata;

    executor_start(job->executor, false);
    return SEQUENCE_WAITS;
}

/* Loads the configured checkpoint, if there is one, before any rank maps the memory. */
static int load_configured(void *userdata)
{
    return resume_start(userdata);
}

/*
 * Makes the journal before all other kept memory, because that memory is useless to the next daemon without a journal.
 */
static int make_journal(void *userdata)
{
    struct job *job = userdata;
    int r = keep_is_on() ? journal_new(&job->run.survival.journal) : 0;

    return r < 0 ? r : SEQUENCE_OVER;
}

static const sequence_stage stages[] = {compare_manifests, lay_out,     admit_job,      make_journal,
                                        make_executor,     make_tables, reserve_memory, start_executor,
                                        load_configured,   NULL};

/* ---- how forming ends ---------------------------------------------------------------------------------- */

/* Returns the refusal for a stage that failed with r, a negative errno, because there is no memory. */
static struct diagnostic *out_of_memory(const struct job *job, int r)
{
    char sum[512], what[160], why[96];

    print_sum(sum, sizeof(sum), &job->memory.planned);
    snprintf(why, sizeof(why), "the kernel gave no more%s%s", r == -ENOMEM ? "" : ": ",
             r == -ENOMEM ? "" : strerror(-r));
    print_what(what, sizeof(what), job, why);
    return cause_quota(&(struct evidence_quota){.at = job_at_forming(NULL),
                                                .what = what,
                                                .unit = "bytes",
                                                .asked = job->memory.planned.needed,
                                                .sum = sum,
                                                .fix = "free memory on this machine, or make the model smaller",
                                                .limit = process_limit_met(r)});
}

static void open_to_ranks(struct job *job)
{
    assert(job->phase == JOB_RESERVING);
    assert(job->forming.has_memory);
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        if (job->ranks[r].peer)
            ledger_attach(&job->ledger, r, job->ranks[r].kept.incarnation);
        job->ledger.ranks[r].accumulate = job->ranks[r].kept.on_duplicate == WIRE_ON_DUPLICATE_ACCUMULATE;
    }
    job->phase = JOB_INITIALISING;
    resume_apply(job);
    job->kept.n_daemons = 1;
    base_write(job);
    job_turn(job, TURN_FORMED);
    if (job->phase == JOB_INITIALISING && job->kept.given_weights)
        report_progress(job, (struct report){REPORT_RESUMED});
    job_todo(job);
}

static void ended(void *userdata, int result)
{
    struct job *job = userdata;
    struct diagnostic *refusal = steal_ptr(job->forming.refusal);

    if (result == 0) {
        open_to_ranks(job);
        return;
    }
    if (!refusal)
        refusal = out_of_memory(job, result);
    drop_now(job); /* first, because a refusal reports the rank's position, and there is none now */
    report_progress(job, (struct report){REPORT_UNFORMED, .unformed = {.code = refusal->code, .why = refusal->text}});
    job_refuse_forming(job, refusal);
    job_todo(job);
}

void job_formed(struct job *job)
{
    assert(job->phase == JOB_RESERVING);
    assert(!job->forming.has_memory);
    job->forming.has_memory = true;
    sequence_advance(&job->forming.sequence, 0);
}

void job_unformed(struct job *job, struct diagnostic *diagnostic)
{
    assert(job->phase == JOB_RESERVING);
    sequence_advance(&job->forming.sequence, refuse_with(job, diagnostic));
}

/* ---- a job that an earlier daemon has formed ----------------------------------------------------------- */

static void reserve_again_run(struct work *work, uint32_t item)
{
    struct job *job = container_of(work, struct job, forming.reserve_work);
    int r = item == 0 ? executor_reserve_rest(job->executor) : coordinator_reserve(job->coordinator, item - 1);

    if (r < 0)
        __atomic_store_n(&job->forming.reserve_result, -ENOMEM, __ATOMIC_RELAXED);
}

static void reserve_again_done(struct work *work)
{
    struct job *job = container_of(work, struct job, forming.reserve_work);

    assert(job->work.n_io > 0);
    job->work.n_io--;
    if (job->forming.reserve_result == 0)
        executor_start(job->executor, true);
    else
        log_error("there is not enough memory for what is not kept: what travels between nodes and to GPUs, and what "
                  "Muon computes with; free memory on this machine, and restart zerod: what it keeps stays kept");
    job_todo(job);
}

/*
 * Reserves the memory that is not kept: buffers between nodes, buffers to GPUs, and Muon's work space. This daemon
 * already serves ranks meanwhile.
 */
static void reserve_again(struct job *job)
{
    uint32_t n = 1 + coordinator_n_reserve_pieces(job->coordinator);

    job->forming.reserve_result = 0;
    job->forming.reserve_work = (struct work){.run = reserve_again_run, .done = reserve_again_done, .n_items = n};
    job->work.n_io++;
    worker_post(job->pool, &job->forming.reserve_work);
}

int form_again(struct job *job, const struct manifest *manifest, char *why, size_t why_size)
{
    struct job_rank *first = &job->ranks[job->world.first];
    const char *fix;
    int r;

    assert(job->run.survival.replay);
    assert(job->phase == JOB_WAITING);
    assert(first->process.manifest.n == 0);
    for (uint32_t p = 0; p < manifest->n; p++)
        if (manifest_add(&first->process.manifest, &manifest->decls[p]) != 0)
            return -ENOMEM;
    fix = make_layout(job, why, why_size);
    manifest_deinit(&first->process.manifest);
    if (fix)
        return -EINVAL;
    plan_memory(job);
    (void)quota_charge(&job->memory.quota, &job->memory.charge, job->memory.planned.needed); /* the memory exists */
    r = make_executor(job);
    if (r >= 0) {
        executor_begin_replay(job->executor);
        r = make_tables(job);
    }
    if (r >= 0)
        reserve_again(job);
    return MIN(r, 0);
}

/* ---- how forming begins -------------------------------------------------------------------------------- */

static bool all_declared(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (!job->ranks[r].process.declared || job->ranks[r].wait != WAIT_FORM)
            return false;
    return true;
}

void job_form_now(struct job *job, const char *run_id, enum config_gpu_room room)
{
    if (job->phase != JOB_WAITING)
        return;
    if (!job->kept.run_id && *run_id)
        job->kept.run_id = strdup(run_id);
    if (!all_declared(job)) {
        report_progress(job, (struct report){REPORT_UNFORMED,
                                             .unformed = {.why = "a rank has gone while the job was being formed"}});
        return;
    }
    config_choose_gpu_room(&job->run.chosen, room);
    job->forming.sequence = (struct sequence){.stages = stages, .ended = ended, .userdata = job};
    sequence_run(&job->forming.sequence);
}

/* ---- a rank's segments, and the answer to Form --------------------------------------------------------- */

void form_settle(struct job *job)
{
    if (job->run.drop_why) {
        drop_settle(job);
        return;
    }
    if (job->phase == JOB_WAITING) {
        report_progress(job, (struct report){REPORT_DECLARED, .all_declared = all_declared(job)});
        return;
    }
    if (job->phase == JOB_RESERVING)
        return;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        formed_settle(job, &job->ranks[r]);
}
