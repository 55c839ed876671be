/* SPDX-License-Identifier: Apache-2.0 */

/* Formation: equal manifests become a layout, memory is admitted and reserved, rank 0's initial weights come in. */

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/open-files.h"
#include "core/diagnosis/cause.h"
#include "daemon/job/model/model.h"
#include "daemon/memory/weights.h"
#include "daemon/nodes/mirror.h"
#include "daemon/nodes/nodes.h"
#include "daemon/nodes/param-norm.h"
#include "daemon/step/budget.h"
#include "daemon/step/device-job.h"
#include "daemon/step/gather-device.h"

static struct evidence_at at_forming(const struct job_rank *rank)
{
    return (struct evidence_at){.rank = rank ? (int64_t)rank->rank : -1, .step = -1, .micro_batch = -1};
}

/* ---- declaring ----------------------------------------------------------------------------------------- */

void job_declare(struct job *job, struct job_rank *rank, const struct request_declare *request)
{
    struct evidence_at at = at_forming(rank);

    if (rank->declared) {
        job_fault(job, rank,
                  cause_declare(&at, "parameters were declared after Form", "declare all of them before zerod_form"));
        return;
    }
    for (size_t i = 0; i < request->n_params; i++) {
        if (manifest_add(&rank->manifest, &request->params[i]) == 0)
            continue;
        job_fault(job, rank,
                  cause_quota(&(struct evidence_quota){.at = at,
                                                       .what = "manifest",
                                                       .unit = "parameters",
                                                       .asked = request->n_params,
                                                       .held = rank->manifest.n,
                                                       .allowed = MANIFEST_MAX_PARAMS,
                                                       .fix = "declare fewer or larger parameters"}));
        return;
    }
}

void form_refuse_all(struct job *job, struct diagnostic *diagnostic)
{
    job_keep(job, diagnostic);
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        if (rank->wait != WAIT_FORM && rank->wait != WAIT_READY)
            continue; /* it may be in the middle of declaring */
        if (rank->wait == WAIT_FORM) {
            rank->declared = false;
            manifest_deinit(&rank->manifest);
        }
        job_refuse(job, rank, diagnostic, false);
    }
}

/* A client that was refused declares everything again. */
static bool is_held(struct job *job, struct job_rank *rank)
{
    if (!job_is_held(job, rank))
        return false;
    manifest_deinit(&rank->manifest);
    return true;
}

void job_form(struct job *job, struct job_rank *rank, const struct request_form *request)
{
    struct evidence_at at = at_forming(rank);
    char what[128];

    if (is_held(job, rank))
        return;
    if (request->n_params != rank->manifest.n) {
        snprintf(what, sizeof(what), "Form.n_params: %u, but %u parameters were declared", request->n_params,
                 rank->manifest.n);
        job_drop_peer(job, rank, what);
        return;
    }
    if (rank->manifest.n == 0) {
        job_fault(job, rank,
                  cause_declare(&at, "no parameter was declared",
                                "zerod_clear_fault, zerod_declare, and then zerod_form again"));
    } else if (job->layout && manifest_digest(&rank->manifest) != job->run.digest) {
        job_fault(job, rank,
                  cause_declare(&at, "the manifest is not the one that this run was formed with",
                                "start the same model, or end the run: zerodctl drop"));
    }
    if (is_held(job, rank))
        return;
    rank->declared = true;
    rank->resumes = job->run.has_weights; /* later, rank 0 of a new run may be ready before this one is answered */
    job_wait(job, rank, WAIT_FORM);
    job_settle(job);
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

/* What a node holds is for its own ranks, and its limits are its own: of several it is said which. */
static void print_what(char *dst, size_t size, const struct job *job, const char *limit)
{
    char node[32] = "";

    if (job->nodes)
        snprintf(node, sizeof(node), " on node %u", job->config->world.node);
    snprintf(dst, size, "memory of the job%s (%s)", node, limit);
}

/* Return: NULL when the job fits, else the refusal. A memfd over a cgroup's limit is an OOM kill, so ask first. */
static struct diagnostic *admit_memory(struct job *job, const struct plan_bytes *bytes)
{
    uint64_t needed = bytes->needed, held = job->memory.quota.used;
    struct memory_headroom headroom;
    char sum[512], what[128];
    struct evidence_quota evidence = {
        .at = at_forming(NULL), .what = what, .unit = "bytes", .asked = needed, .held = held};
    const char *limit;

    print_sum(sum, sizeof(sum), bytes);
    evidence.sum = sum;
    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    if (quota_charge(&job->memory.quota, &job->memory.charge, needed) != 0) {
        limit = "limits.memory";
        evidence.allowed = job->memory.quota.limit;
        evidence.fix = "raise limits.memory, or make the model smaller (zerodctl plan shows what each part needs)";
    } else if (needed > headroom.cgroup_bytes) {
        limit = "what its cgroup may still take";
        evidence.allowed = headroom.cgroup_bytes;
        evidence.fix = "raise the cgroup's limit (MemoryMax= of the unit), or make the model smaller";
    } else if (needed > headroom.available_bytes) {
        limit = "MemAvailable of this machine";
        evidence.allowed = headroom.available_bytes;
        evidence.fix = "free memory on this machine, or make the model smaller";
    } else {
        return NULL;
    }
    charge_deinit(&job->memory.charge);
    print_what(what, sizeof(what), job, limit);
    return cause_quota(&evidence);
}

/* ---- forming ------------------------------------------------------------------------------------------- */

static bool all_declared(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (!job->ranks[r].declared || job->ranks[r].wait != WAIT_FORM)
            return false;
    return true;
}

/* Return: NULL when all manifests are equal, else the refusal. */
static struct diagnostic *compare_manifests(const struct job *job)
{
    const struct manifest *manifests[STEP_MAX_WORLD] = {NULL};
    uint64_t digest = manifest_digest(&job->ranks[job->world.first].manifest);
    bool equal = true;

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        manifests[r] = &job->ranks[r].manifest;
        equal &= manifest_digest(&job->ranks[r].manifest) == digest;
    }
    return equal ? NULL : cause_manifest(manifests, job->world.size);
}

/* The same with what other nodes have shown of theirs. */
static struct diagnostic *compare_nodes(const struct job *job)
{
    const struct manifest *manifests[STEP_MAX_WORLD] = {NULL};
    unsigned rank = 0;

    for (unsigned node = 0; node < job->config->world.nodes.n_items; node++)
        for (unsigned i = 0; i < job->config->world.nodes.items[node].ranks; i++, rank++)
            manifests[rank] = rank >= job->world.first && rank < job->world.end && job->ranks[rank].manifest.n > 0
                                  ? &job->ranks[rank].manifest
                                  : nodes_manifest(job->nodes, node);
    return cause_manifest(manifests, job->world.size);
}

/* Return: NULL and job->layout, else the refusal. */
static struct diagnostic *make_layout(struct job *job)
{
    const struct manifest *manifest = &job->ranks[job->world.first].manifest;
    struct evidence_at at = at_forming(NULL);
    char name[128], what[256];
    const char *key;
    uint32_t bad = 0;
    int r = layout_new(&job->layout, manifest->decls, manifest->n, job->world.size,
                       job->config->zero.reduce_bucket_size, &bad);

    if (r == LAYOUT_E_DUPLICATE_NAME) {
        layout_print_name(name, sizeof(name), manifest->decls[bad].name, manifest->decls[bad].name_len);
        snprintf(what, sizeof(what), "parameter %u has the name of an earlier one: %s", bad, name);
        return cause_declare(&at, what, "declare each parameter once; tied weights are one parameter");
    }
    if (r != 0)
        return cause_declare(&at,
                             r == LAYOUT_E_TOO_LARGE ? "the parameters have more elements in all than can be laid out"
                                                     : "out of memory for the layout",
                             "declare a smaller model");
    job->run.digest = manifest_digest(manifest);
    if (schedule_check_groups(&job->config->scheduler, job->layout->n_groups, &key) == 0)
        return NULL;
    snprintf(what, sizeof(what), "scheduler.params.%s has not one value per parameter group (%u groups)", key,
             job->layout->n_groups);
    return cause_declare(&at, what, "give one value, or one per group");
}

static int make_ranks(struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        rank->gathered = calloc(job->layout->n_params, sizeof(*rank->gathered));
        if (!rank->gathered)
            return -ENOMEM;
    }
    return 0;
}

static int make_tables(struct job *job)
{
    _cleanup_free_ uint8_t *trainable = malloc(job->layout->n_parts + 1);
    int r;

    job->work.cursors = calloc(job->layout->n_parcels + 1, sizeof(*job->work.cursors));
    job->decision.hypers = calloc(job->layout->n_groups, sizeof(*job->decision.hypers));
    job->decision.learnt = calloc(job->layout->n_params, 1);
    if (!trainable || !job->work.cursors || !job->decision.hypers || !job->decision.learnt)
        return -ENOMEM;
    memset(trainable, true, job->layout->n_parts); /* frozen parameters have no parts */
    r = ledger_init(&job->ledger,
                    (struct ledger_ranks){.first = job->world.first, .end = job->world.end, .n = job->world.size},
                    job->layout->n_parts, trainable, false);
    return r < 0 ? r : make_ranks(job);
}

static int make_state(struct job *job)
{
    const struct config *config = job->config;
    int r = config->device == CONFIG_DEVICE_CUDA ? device_job_new(job) : 0;

    if (r < 0)
        return r;
    r = state_new(&job->state, &(struct state_options){
                                   .mirror = job->devices && !config_offloads(config),
                                   .no_gradient = config_offloads(config),
                                   .alone = !job->nodes && !job->devices,
                                   .layout = job->layout,
                                   .stage = (unsigned)config->zero.stage,
                                   .first_rank = job->world.first,
                                   .n_ranks = job_n_local(job),
                                   .moments = optimizer_moments(config->optimizer.type, &config->optimizer.hyper),
                               });
    if (r == 0)
        r = step_new(&job->step, &(struct step_options){
                                     .devices = job->devices,
                                     .wire = job->config->communication_data_type,
                                     .state = job->state,
                                     .kernels = job->kernels,
                                     .pool = job->pool,
                                     .first_local = job->world.first,
                                     .n_local = job_n_local(job),
                                     .optimizer = config->optimizer.type,
                                 });
    if (r == 0 && config->zero.stage == 3 && !job->devices)
        r = pool_new(&job->gathered, job);
    if (r == 0 && job->nodes)
        r = nodes_form(job->nodes);
    return r < 0 ? r : make_tables(job);
}

/* Staging and what comes in from other nodes: the segments before the weights, which are the state's. */
static uint32_t n_exchange_pieces(const struct job *job)
{
    return job->nodes ? segments_n_pieces(exchange_segments(nodes_exchange(job->nodes)), EXCHANGE_WEIGHTS) : 0;
}

static int reserve_exchange(const struct job *job, uint32_t piece)
{
    return segments_reserve(exchange_segments(nodes_exchange(job->nodes)), EXCHANGE_WEIGHTS, piece);
}

static void reserve_run(struct work *work, uint32_t item)
{
    struct job *job = container_of(work, struct job, memory.reserve_work);
    int r;

    (void)failpoint("forming");
    if (item < state_n_reserve_pieces(job->state))
        r = state_reserve(job->state, item);
    else if (job->devices)
        r = device_job_reserve(job);
    else
        r = reserve_exchange(job, item - state_n_reserve_pieces(job->state));
    if (r < 0)
        __atomic_store_n(&job->memory.reserve_result, r, __ATOMIC_RELAXED);
}

/* Takes the diagnostic. */
static void cannot_form(struct job *job, struct diagnostic *refusal)
{
    if (job->nodes)
        nodes_unformed(job->nodes, refusal->code, refusal->text);
    form_refuse_all(job, refusal);
}

static bool anybody_waits(const struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait == WAIT_FORM)
            return true;
    return false;
}

void job_node_differs(struct job *job, unsigned node, const char *difference)
{
    struct diagnostic *diagnostic;

    if (job->phase != JOB_WAITING || job->run.drop_why)
        return;
    diagnostic = cause_nodes_differ(&(struct evidence_node){
        .at = at_forming(NULL),
        .node = node,
        .address = job->config->world.nodes.items[node].address,
        .why = difference,
        .here = job->config->world.node,
    });
    nodes_differ(job->nodes, node, diagnostic->code, diagnostic->text);
    if (anybody_waits(job))
        form_refuse_all(job, diagnostic);
    else
        diagnostic_unref(diagnostic);
    job_settle(job);
}

/* r: a negative errno. */
static void out_of_memory(struct job *job, int r)
{
    char sum[512], what[128];

    print_sum(sum, sizeof(sum), &job->memory.planned);
    print_what(what, sizeof(what), job, "the kernel gave no more");
    form_drop(job);
    cannot_form(job,
                cause_quota(&(struct evidence_quota){.at = at_forming(NULL),
                                                     .what = what,
                                                     .unit = "bytes",
                                                     .asked = job->memory.planned.needed,
                                                     .sum = sum,
                                                     .fix = "free memory on this machine, or make the model smaller",
                                                     .open_files = open_files_if_short(r)}));
}

static void reserve_done(struct work *work)
{
    struct job *job = container_of(work, struct job, memory.reserve_work);

    job->work.n_io--;
    if (job->run.drop_why) {
        form_settle_doom(job);
        return;
    }
    if (job->memory.reserve_result < 0) {
        out_of_memory(job, job->memory.reserve_result);
        return;
    }
    if (job->devices)
        device_job_start(job);
    else
        job_formed(job);
}

void job_unformed(struct job *job, struct diagnostic *diagnostic)
{
    form_drop(job);
    cannot_form(job, diagnostic);
    job_settle(job);
}

void job_formed(struct job *job)
{
    struct state_journal *journal = state_journal(job->state);

    journal->magic = STATE_MAGIC;
    journal->version = 1;
    journal->manifest_digest = job->run.digest;
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        if (job->ranks[r].peer)
            ledger_attach(&job->ledger, r, job->ranks[r].incarnation);
        job->ledger.ranks[r].accumulate = job->ranks[r].on_duplicate == CONFIG_DUPLICATE_ACCUMULATE;
    }
    job->phase = JOB_INITIALISING;
    if (job->nodes && !job->devices) /* else that was said when its memory was there, but for the GPUs' */
        nodes_formed(job->nodes);
    job_settle(job);
}

static void start_forming(struct job *job)
{
    struct diagnostic *refusal = compare_manifests(job);
    struct plan_options options;
    int r;

    if (!refusal)
        refusal = make_layout(job);
    if (!refusal) {
        options = budget_options(job->config, job->layout,
                                 (struct budget_ranks){.first_local = job->world.first, .n_local = job_n_local(job)},
                                 job->layout->n_parcels);
        plan_bytes_by_class(job->layout, &options, &job->memory.planned);
        refusal = admit_memory(job, &job->memory.planned);
    }
    if (refusal) {
        form_drop(job); /* first: who is refused is told where it stands, and that is nowhere */
        cannot_form(job, refusal);
        return;
    }
    r = make_state(job);
    if (r < 0) {
        out_of_memory(job, r);
        return;
    }
    job->phase = JOB_RESERVING;
    job->memory.reserve_result = 0;
    job->memory.reserve_work =
        (struct work){.run = reserve_run,
                      .done = reserve_done,
                      .n_items = state_n_reserve_pieces(job->state) + n_exchange_pieces(job) + (job->devices != NULL)};
    job->work.n_io++;
    worker_post(job->pool, &job->memory.reserve_work);
}

void job_form_now(struct job *job, const char *run_id)
{
    if (job->phase != JOB_WAITING)
        return;
    if (!job->run.id && *run_id)
        job->run.id = strdup(run_id);
    if (all_declared(job))
        start_forming(job);
    else
        nodes_unformed(job->nodes, 0, "a rank has gone while the job was being formed");
}

/* Before there are weights nothing is lost: the job was not formed. */
struct diagnostic *job_describe_doom(const struct job *job)
{
    struct evidence_at at = {.rank = -1, .step = job->run.has_weights ? (int64_t)job->ledger.step : -1, .micro_batch = -1};

    if (job->run.has_weights)
        return cause_node_reborn(&(struct evidence_node){.at = at, .why = job->run.drop_why});
    if (job->run.drop_code == E_OTHER_RUN)
        return cause_runs_differ(&at, job->run.drop_why);
    if (job->nodes && nodes_manifest(job->nodes, 0))
        return compare_nodes(job);
    if (job->run.drop_code)
        return cause_refused_elsewhere(&at, job->run.drop_code, job->run.drop_why);
    return cause_declare(&at, job->run.drop_why, "see what the other nodes say");
}

static void tell_given_up(struct job *job)
{
    struct diagnostic *diagnostic = job_describe_doom(job);

    if (job->phase == JOB_WAITING || job->phase == JOB_RESERVING) {
        form_refuse_all(job, diagnostic);
        return;
    }
    diagnostic = job_keep(job, diagnostic);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].peer)
            job->ops.drop(job->ops.userdata, job->ranks[r].peer, diagnostic);
}

void job_give_up(struct job *job, unsigned code, const char *why)
{
    if (job->run.drop_why)
        return;
    job->run.drop_code = code;
    job->run.drop_why = strdup(why);
    if (!job->run.drop_why)
        return;
    tell_given_up(job);
    if (job->nodes && job->layout)
        exchange_cancel(nodes_exchange(job->nodes)); /* nobody will serve them any more */
    if (job->devices && job->phase != JOB_WAITING)
        devices_cancel(job->devices); /* nor will other nodes' GPUs answer */
    form_settle_doom(job);
}

/* Nobody is attached who was told of a layout, and nothing works on the memory that is to go. */
static bool may_drop(const struct job *job)
{
    if (job->work.n_under_way > 0 || job->work.n_io > 0 || gather_is_busy(job) || window_is_busy(job->window))
        return false;
    for (unsigned r = job->world.first; job->phase != JOB_WAITING && job->phase != JOB_RESERVING && r < job->world.end;
         r++)
        if (job->ranks[r].peer)
            return false;
    return true;
}

void form_settle_doom(struct job *job)
{
    if (!job->run.drop_why || !may_drop(job))
        return;
    free(steal_ptr(job->run.drop_why));
    if (job->phase == JOB_WAITING || job->phase == JOB_RESERVING)
        form_drop(job); /* ranks may be declaring again */
    else
        job_reset(job);
    job_settle(job);
}

void form_drop(struct job *job)
{
    devices_free(steal_ptr(job->devices)); /* first: what it cancels holds rings */
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];

        ring_orphan(steal_ptr(rank->rings[0]));
        ring_orphan(steal_ptr(rank->rings[1]));
        free(rank->gathered);
        rank->gathered = NULL;
        rank->formed = false;
    }
    if (job->nodes)
        nodes_drop(job->nodes);
    if (job->mirror)
        mirror_forget(job->mirror);
    param_norm_forget(job);
    window_free(job->window);
    pool_free(job->gathered);
    device_gather_free(job->device_gathered);
    step_free(job->step);
    ledger_deinit(&job->ledger);
    state_free(job->state);
    layout_free(job->layout);
    free(job->work.cursors);
    free(job->decision.hypers);
    free(job->decision.learnt);
    job->abort.said_attempt = 0;
    job->abort.next = false;
    job->window = NULL;
    job->gathered = NULL;
    job->device_gathered = NULL;
    job->step = NULL;
    job->state = NULL;
    job->layout = NULL;
    job->work.cursors = NULL;
    job->decision.hypers = NULL;
    job->decision.learnt = NULL;
    job->missing.n_seen = 0;
    job->missing.last = job->missing.n_last = 0;
    job->run.given_weights = job->run.has_weights = job->decision.has_learnt = job->decision.has_norm = false;
    charge_deinit(&job->memory.charge);
    job->phase = JOB_WAITING;
}

/* ---- a rank's segments, and the answer to Form --------------------------------------------------------- */

/* Reserving the pages of a ring; the rank may be gone before it ends. */
struct ring_start {
    struct work work;
    struct job *job;
    struct job_rank *rank;
    struct ring *ring;
    int result;
};

static void ring_start_run(struct work *work, uint32_t item)
{
    struct ring_start *start = container_of(work, struct ring_start, work);

    (void)item;
    start->result = segment_reserve(&start->ring->ring, 0, start->ring->ring.n_bytes);
    if (start->result == 0)
        start->result = segment_reserve(&start->ring->credit, 0, start->ring->credit.n_bytes);
}

static uint64_t own_ring_bytes(const struct job *job)
{
    bool overlap = job->config->zero.overlap_comm;

    return job->devices ? plan_device_ring_bytes(job->layout, overlap)
                        : plan_ring_bytes(job->layout, overlap,
                                          budget_ring_holds_all(job->config, job->layout, job_n_local(job)));
}

/* r: why it has none, a negative errno. */
static void refuse_ring(struct job *job, struct job_rank *rank, int r)
{
    ring_orphan(steal_ptr(rank->rings[0]));
    job_fault(job, rank,
              cause_quota(&(struct evidence_quota){.at = at_forming(rank),
                                                   .what = "ring of the rank",
                                                   .unit = "bytes",
                                                   .asked = own_ring_bytes(job),
                                                   .fix = "free memory on this machine",
                                                   .open_files = open_files_if_short(r)}));
    if (rank->wait == WAIT_FORM)
        job_is_held(job, rank);
}

static void ring_start_done(struct work *work)
{
    struct ring_start *start = container_of(work, struct ring_start, work);
    struct job *job = start->job;
    struct ring *ring = start->ring;

    job->work.n_io--;
    if (start->result == 0) {
        ring_credit_page(ring)->n_tickets = ring->n_tickets;
        atomic_store_explicit(&ring_credit_page(ring)->attempt, job->ledger.attempt, memory_order_release);
        if (job->phase == JOB_UPDATING || job->phase == JOB_COMMITTING_WINDOW) /* odd while weights are being written */
            atomic_store_explicit(&ring_credit_page(ring)->generation, 1, memory_order_release);
        ring->ready = true;
    } else if (start->rank->rings[0] == ring) {
        refuse_ring(job, start->rank, start->result);
    }
    ring_unhold(ring);
    free(start);
    job_settle(job);
}

static void ring_is_freed(void *userdata, const struct ring *ring)
{
    struct job *job = userdata;

    if (job->nodes)
        exchange_ring_is_gone(nodes_exchange(job->nodes), ring);
}

/* Return: 0 or -errno. */
static int start_ring(struct job *job, struct job_rank *rank)
{
    _cleanup_free_ struct ring_start *start = calloc(1, sizeof(*start));
    int r;

    if (!start)
        return -ENOMEM;
    r = ring_new(&rank->rings[0], &(struct ring_options){
                                      .rank = rank->rank,
                                      .ring_bytes = own_ring_bytes(job),
                                      .on_device = job->devices != NULL,
                                      .overflow_bytes = job->layout->arena_bytes,
                                      .n_parcels = job->layout->n_parcels,
                                      .n_tickets = budget_n_tickets(job->layout->n_parcels),
                                      .freed = ring_is_freed,
                                      .userdata = job,
                                  });
    if (r < 0)
        return r;
    start->job = job;
    start->rank = rank;
    start->ring = rank->rings[0];
    start->work = (struct work){.run = ring_start_run, .done = ring_start_done, .n_items = 1};
    ring_hold(start->ring);
    job->work.n_io++;
    worker_post(job->pool, &steal_ptr(start)->work);
    return 0;
}

enum { FORMED_SEGMENTS = 4 };

/* Descriptors of a rank's segments, or why there are none: a negative errno. */
static void host_segments(const struct job *job, const struct ring *ring, struct wire_segment *segments, int *fds)
{
    bool stage3 = job->config->zero.stage == 3;
    const struct segment *published = stage3 ? pool_segment(job->gathered) : &job->state->weights;

    segments[0] = (struct wire_segment){.kind = WIRE_SEGMENT_RING, .n_bytes = ring->ring.n_bytes};
    segments[1] = (struct wire_segment){.kind = WIRE_SEGMENT_OVERFLOW, .n_bytes = ring->overflow.n_bytes};
    segments[3] =
        (struct wire_segment){.kind = stage3 ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS, .n_bytes = published->n_bytes};
    fds[0] = segment_open_rw(&ring->ring);
    fds[1] = segment_open_rw(&ring->overflow);
    fds[3] = segment_open_ro(published);
}

static int duplicate(int fd)
{
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);

    return copy < 0 ? -errno : copy;
}

/* A handle of device memory is what it is: nobody can be given less than all of it. */
static void device_segments(const struct job *job, unsigned local, struct wire_segment *segments, int *fds)
{
    const struct device_keep *keep = devices_keep(job->devices);
    bool stage3 = job->config->zero.stage == 3;
    enum device_piece_kind published = stage3 ? DEVICE_POOL : DEVICE_WEIGHTS;

    segments[0] =
        (struct wire_segment){.kind = WIRE_SEGMENT_RING, .n_bytes = keep->n_bytes[local][DEVICE_RING], .cuda = true};
    segments[3] = (struct wire_segment){.kind = stage3 ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS,
                                        .n_bytes = keep->n_bytes[local][published],
                                        .cuda = true};
    fds[0] = duplicate(keep->fds[local][DEVICE_RING]);
    fds[3] = duplicate(keep->fds[local][published]);
}

static void answer_formed(struct job *job, struct job_rank *rank)
{
    const struct ring *ring = rank->rings[0];
    unsigned local = rank->rank - job->world.first;
    struct wire_segment segments[FORMED_SEGMENTS] = {
        [2] = {.kind = WIRE_SEGMENT_CREDIT, .n_bytes = ring->credit.n_bytes}};
    int fds[FORMED_SEGMENTS] = {-1, -1, segment_open_ro(&ring->credit), -1};
    struct reply reply = {
        .type = REPLY_FORMED,
        .formed =
            {
                .resumed = rank->resumes,
                .init_wanted = !job->run.given_weights && rank->rank == 0,
                .position = job_position(job, rank),
                .n_tickets = ring->n_tickets,
                .ring_bytes = ring->ring_bytes,
                .digest = job->run.digest,
                .has_blob = rank->blob.data != NULL,
                .blob = rank->blob.data,
                .n_blob_bytes = rank->blob.n_bytes,
                .loss_scale = job_loss_scale(job),
                .gpu = job->devices ? devices_keep(job->devices)->gpus[local] : NULL,
                .n_gpu_bytes = job->devices ? WIRE_GPU_BYTES : 0,
            },
    };
    struct wire_segment sent[FORMED_SEGMENTS];
    int sent_fds[FORMED_SEGMENTS];
    size_t n = 0;
    int r = 0;

    if (job->devices)
        device_segments(job, local, segments, fds);
    else
        host_segments(job, ring, segments, fds);
    /* A segment may be empty (no trainable parameter: no overflow): it has no descriptor. */
    for (size_t i = 0; i < ARRAY_SIZE(segments); i++) {
        if (segments[i].n_bytes == 0)
            continue;
        r = MIN(r, fds[i]);
        sent[n] = segments[i];
        sent_fds[n++] = fds[i];
    }
    if (r < 0) {
        for (size_t i = 0; i < n; i++)
            closep(&sent_fds[i]);
        refuse_ring(job, rank, r);
        return;
    }
    reply.formed.segments = sent;
    reply.formed.n_segments = n;
    rank->formed = true;
    rank->lost_ns = 0;
    job_answer(job, rank, &reply, sent_fds, n);
}

/* A successor waits until what its predecessor left behind is settled: ended micro-batches, a request for the step. */
static bool can_take_part(const struct job *job, const struct job_rank *rank)
{
    if (job->phase == JOB_INITIALISING) /* what a rank 0 that died had sent must not come after its successor's */
        return job->work.n_inits == 0;
    if (job->nodes && nodes_hold_back(job->nodes))
        return false;
    return (job->phase == JOB_TRAINING || job->phase == JOB_WINDOW) && !job->ledger.ranks[rank->rank].asked &&
           collect_is_done(job, rank);
}

static void settle_rank(struct job *job, struct job_rank *rank)
{
    int r;

    if (rank->wait != WAIT_FORM)
        return;
    if (rank->rings[1] && !collect_is_done(job, rank))
        return; /* its predecessor's ended micro-batches are still to be reduced */
    ring_orphan(steal_ptr(rank->rings[1]));
    if (!rank->rings[0]) {
        r = start_ring(job, rank);
        if (r < 0)
            refuse_ring(job, rank, r);
        return;
    }
    if (rank->rings[0]->ready && can_take_part(job, rank))
        answer_formed(job, rank);
}

void form_settle(struct job *job)
{
    if (job->run.drop_why) {
        form_settle_doom(job);
        return;
    }
    if (job->phase == JOB_WAITING) {
        if (job->nodes)
            nodes_declared(job->nodes, all_declared(job));
        else if (all_declared(job))
            start_forming(job);
        return;
    }
    if (job->phase == JOB_RESERVING)
        return;
    for (unsigned r = job->world.first; r < job->world.end; r++)
        settle_rank(job, &job->ranks[r]);
}

/* ---- initial weights ----------------------------------------------------------------------------------- */

struct init {
    struct work work;
    struct job *job;
    struct job_rank *rank;
    struct ring *ring;
    struct request_init request;
    int result;
};

static void init_run(struct work *work, uint32_t item)
{
    struct init *init = container_of(work, struct init, work);

    (void)item;
    if (init->job->nodes)
        init->result = exchange_init(nodes_exchange(init->job->nodes), &init->request,
                                     init->ring->ring.map + init->request.offset_bytes);
    weights_store(init->job->state, init->job->kernels, init->request.param, init->request.start_elem,
                  init->request.n_elems, init->ring->ring.map + init->request.offset_bytes);
}

void job_refuse_init(struct job *job, struct job_rank *rank, const struct request_init *request)
{
    job_fault(job, rank,
              cause_quota(&(struct evidence_quota){.at = at_forming(rank),
                                                   .what = "initial weights on their way to other nodes",
                                                   .unit = "bytes",
                                                   .asked = request->n_elems *
                                                            dtype_size(job->layout->params[request->param].dtype),
                                                   .fix = "free memory on this machine"}));
    job_is_held(job, rank);
}

static void init_done(struct work *work)
{
    struct init *init = container_of(work, struct init, work);
    struct job *job = init->job;
    struct job_rank *rank = init->rank;

    job->work.n_io--;
    job->work.n_inits--;
    if (rank->wait == WAIT_INIT && rank->rings[0] == init->ring) {
        if (init->result < 0)
            job_refuse_init(job, rank, &init->request);
        else
            job_answer_done(job, rank);
    }
    ring_unhold(init->ring);
    free(init);
    job_settle(job);
}

static const char *check_init(const struct job *job, const struct job_rank *rank, const struct request_init *request)
{
    const struct layout_param *param;
    uint64_t ring_bytes = rank->rings[0] ? rank->rings[0]->ring_bytes : 0, n_bytes;

    if (job->phase != JOB_INITIALISING || job->run.given_weights || rank->rank != 0 || !rank->rings[0])
        return "Init: only rank 0 sends initial weights, once, when Formed asks for them";
    if (request->param >= job->layout->n_params)
        return "Init.param: no such parameter";
    param = &job->layout->params[request->param];
    if (request->start_elem > param->n_elems || request->n_elems > param->n_elems - request->start_elem)
        return "Init.n_elems: beyond the parameter's end";
    n_bytes = request->n_elems * dtype_size(param->dtype);
    if (n_bytes > ring_bytes || request->offset_bytes > ring_bytes - n_bytes)
        return "Init.offset_bytes: beyond the ring's end";
    return NULL;
}

void job_init(struct job *job, struct job_rank *rank, const struct request_init *request)
{
    const char *wrong = check_init(job, rank, request);
    struct evidence_at at = at_forming(rank);
    struct init *init;

    if (job_is_held(job, rank))
        return;
    if (wrong) {
        job_drop_peer(job, rank, wrong);
        return;
    }
    if (job->devices) {
        device_job_init(job, rank, request);
        return;
    }
    init = calloc(1, sizeof(*init));
    if (!init) {
        job_fault(job, rank, cause_declare(&at, "out of memory", "free memory on this machine"));
        job_is_held(job, rank);
        return;
    }
    init->job = job;
    init->rank = rank;
    init->ring = rank->rings[0];
    init->request = *request;
    init->work = (struct work){.run = init_run, .done = init_done, .n_items = 1};
    ring_hold(init->ring);
    job->work.n_io++;
    job->work.n_inits++;
    job_wait(job, rank, WAIT_INIT);
    worker_post(job->pool, &init->work);
}

/* The step was aborted after Formed was sent: what that said is no longer so. */
static void answer_rewound(struct job *job, struct job_rank *rank)
{
    diagnostic_unref(steal_ptr(rank->abort_notice));
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_DONE,
                   .done = {.position = job_position(job, rank),
                            .loss_scale = job_loss_scale(job),
                            .rewound = true,
                            .has_blob = rank->blob.data != NULL,
                            .blob = rank->blob.data,
                            .n_blob_bytes = rank->blob.n_bytes},
               },
               NULL, 0);
}

void job_ready(struct job *job, struct job_rank *rank)
{
    if (rank->abort_notice && !rank->ready) {
        rank->ready = true;
        answer_rewound(job, rank);
        return;
    }
    if (job_is_held(job, rank))
        return;
    rank->ready = true;
    if (!job->run.has_weights)
        job_wait(job, rank, WAIT_READY);
    if (job->phase == JOB_INITIALISING && rank->rank == 0 && !job->run.given_weights) {
        job->run.given_weights = true;
        if (job->nodes)
            nodes_have_weights(job->nodes); /* they are sent to all nodes first */
        else
            job_train(job);
    } else if (job->run.has_weights)
        job_answer_done(job, rank);
    job_settle(job);
}

void job_train(struct job *job)
{
    if (job->nodes)
        exchange_spread_is_over(nodes_exchange(job->nodes));
    if (job->nodes && job->devices)
        device_job_empty(job);
    job->run.has_weights = true;
    job->phase = JOB_TRAINING;
    job->stats.times.last_commit_ns = job_now(job);
    step_open(job->step);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        if (job->ranks[r].wait == WAIT_READY)
            job_answer_done(job, &job->ranks[r]);
}
