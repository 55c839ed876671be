/* SPDX-License-Identifier: Apache-2.0 */

/* Formation: equal manifests become a layout, memory is admitted and reserved, rank 0's initial weights come in. */

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base.h"
#include "daemon/budget.h"
#include "daemon/cause.h"
#include "daemon/failpoint.h"
#include "daemon/job.h"
#include "daemon/weights.h"

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
    for (unsigned r = 0; r < job->world_size; r++) {
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
    } else if (job->layout && manifest_digest(&rank->manifest) != job->digest) {
        job_fault(job, rank,
                  cause_declare(&at, "the manifest is not the one that this run was formed with",
                                "start the same model, or end the run: zerodctl drop"));
    }
    if (is_held(job, rank))
        return;
    rank->declared = true;
    rank->resumes = job->has_weights; /* later, rank 0 of a new run may be ready before this one is answered */
    job_wait(job, rank, WAIT_FORM);
    job_settle(job);
}

/* ---- memory -------------------------------------------------------------------------------------------- */

static void print_sum(char *dst, size_t size, const struct plan_bytes *b)
{
    snprintf(dst, size,
             "state %" PRIu64 " + gradient %" PRIu64 " + ring %" PRIu64 " + staging %" PRIu64 "\n+ weights %" PRIu64
             " + pool %" PRIu64 " + fixed %" PRIu64 " = %" PRIu64 " bytes",
             b->state, b->gradient, b->ring, b->staging, b->weights, b->pool, b->fixed, b->needed);
}

/* Return: NULL when the job fits, else the refusal. A memfd over a cgroup's limit is an OOM kill, so ask first. */
static struct diagnostic *admit_memory(struct job *job, const struct plan_bytes *bytes)
{
    uint64_t needed = bytes->needed, held = job->memory.used;
    struct memory_headroom headroom;
    struct evidence_quota evidence = {.at = at_forming(NULL), .unit = "bytes", .asked = needed, .held = held};
    char sum[512];

    print_sum(sum, sizeof(sum), bytes);
    evidence.sum = sum;
    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    if (quota_charge(&job->memory, &job->charge, needed) != 0) {
        evidence.what = "memory of the job (limits.memory)";
        evidence.allowed = job->memory.limit;
        evidence.fix = "raise limits.memory, or make the model smaller (zerodctl plan shows what each part needs)";
    } else if (needed > headroom.cgroup_bytes) {
        evidence.what = "memory of the job (what its cgroup may still take)";
        evidence.allowed = headroom.cgroup_bytes;
        evidence.fix = "raise the cgroup's limit (MemoryMax= of the unit), or make the model smaller";
    } else if (needed > headroom.available_bytes) {
        evidence.what = "memory of the job (MemAvailable of this machine)";
        evidence.allowed = headroom.available_bytes;
        evidence.fix = "free memory on this machine, or make the model smaller";
    } else {
        return NULL;
    }
    charge_deinit(&job->charge);
    return cause_quota(&evidence);
}

/* ---- forming ------------------------------------------------------------------------------------------- */

static bool all_declared(const struct job *job)
{
    for (unsigned r = 0; r < job->world_size; r++)
        if (!job->ranks[r].declared || job->ranks[r].wait != WAIT_FORM)
            return false;
    return true;
}

/* Return: NULL when all manifests are equal, else the refusal. */
static struct diagnostic *compare_manifests(const struct job *job)
{
    const struct manifest *manifests[STEP_MAX_RANKS];
    uint64_t digest = manifest_digest(&job->ranks[0].manifest);
    bool equal = true;

    for (unsigned r = 0; r < job->world_size; r++) {
        manifests[r] = &job->ranks[r].manifest;
        equal &= manifest_digest(manifests[r]) == digest;
    }
    return equal ? NULL : cause_manifest(manifests, job->world_size);
}

/* Return: NULL and job->layout, else the refusal. */
static struct diagnostic *make_layout(struct job *job)
{
    const struct manifest *manifest = &job->ranks[0].manifest;
    struct evidence_at at = at_forming(NULL);
    char name[128], what[256];
    const char *key;
    uint32_t bad = 0;
    int r = layout_new(&job->layout, manifest->decls, manifest->n, job->world_size,
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
    job->digest = manifest_digest(manifest);
    if (schedule_check_groups(&job->config->scheduler, job->layout->n_groups, &key) == 0)
        return NULL;
    snprintf(what, sizeof(what), "scheduler.params.%s has not one value per parameter group (%u groups)", key,
             job->layout->n_groups);
    return cause_declare(&at, what, "give one value, or one per group");
}

static int make_ranks(struct job *job)
{
    for (unsigned r = 0; r < job->world_size; r++) {
        struct job_rank *rank = &job->ranks[r];

        rank->gathered = calloc(job->layout->n_params, sizeof(*rank->gathered));
        if (!rank->gathered)
            return -ENOMEM;
    }
    return 0;
}

static int make_tables(struct job *job)
{
    _cleanup_free_ uint8_t *trainable = calloc(job->layout->n_params, 1);
    int r;

    job->cursors = calloc(job->layout->n_buckets + 1, sizeof(*job->cursors));
    job->hypers = calloc(job->layout->n_groups, sizeof(*job->hypers));
    job->learnt = calloc(job->layout->n_params, 1);
    if (!trainable || !job->cursors || !job->hypers || !job->learnt)
        return -ENOMEM;
    for (uint32_t p = 0; p < job->layout->n_params; p++)
        trainable[p] = job->layout->params[p].trainable;
    r = ledger_init(&job->ledger, job->world_size, job->layout->n_params, trainable, false);
    return r < 0 ? r : make_ranks(job);
}

static int make_state(struct job *job)
{
    const struct config *config = job->config;
    int r;

    r = state_new(&job->state, &(struct state_options){
                                   .layout = job->layout,
                                   .stage = (unsigned)config->zero.stage,
                                   .first_rank = 0,
                                   .n_ranks = job->world_size,
                                   .moments = optimizer_moments(config->optimizer.type, &config->optimizer.hyper),
                               });
    if (r == 0)
        r = step_new(&job->step, &(struct step_options){
                                     .state = job->state,
                                     .kernels = job->kernels,
                                     .pool = job->pool,
                                     .first_local = 0,
                                     .n_local = job->world_size,
                                     .optimizer = config->optimizer.type,
                                 });
    if (r == 0 && config->zero.stage == 3)
        r = pool_new(&job->gathered, job);
    return r < 0 ? r : make_tables(job);
}

static void reserve_run(struct work *work, uint32_t item)
{
    struct job *job = container_of(work, struct job, reserve_work);
    int r;

    (void)failpoint("forming");
    r = state_reserve(job->state, item);
    if (r < 0)
        __atomic_store_n(&job->reserve_result, r, __ATOMIC_RELAXED);
}

static void out_of_memory(struct job *job)
{
    char sum[512];

    print_sum(sum, sizeof(sum), &job->planned);
    form_drop(job);
    form_refuse_all(
        job, cause_quota(&(struct evidence_quota){.at = at_forming(NULL),
                                                  .what = "memory of the job (the kernel gave no more)",
                                                  .unit = "bytes",
                                                  .asked = job->planned.needed,
                                                  .sum = sum,
                                                  .fix = "free memory on this machine, or make the model smaller"}));
}

static void reserve_done(struct work *work)
{
    struct job *job = container_of(work, struct job, reserve_work);
    struct state_journal *journal;

    if (job->reserve_result < 0) {
        out_of_memory(job);
        return;
    }
    journal = state_journal(job->state);
    journal->magic = STATE_MAGIC;
    journal->version = 1;
    journal->manifest_digest = job->digest;
    for (unsigned r = 0; r < job->world_size; r++) {
        if (job->ranks[r].peer)
            ledger_attach(&job->ledger, r, job->ranks[r].incarnation);
        job->ledger.ranks[r].accumulate = job->ranks[r].on_duplicate == CONFIG_DUPLICATE_ACCUMULATE;
    }
    job->phase = JOB_INITIALISING;
    job_settle(job);
}

static void start_forming(struct job *job)
{
    struct diagnostic *refusal = compare_manifests(job);
    struct plan_options options;

    if (!refusal)
        refusal = make_layout(job);
    if (!refusal) {
        options = budget_options(job->config, job->layout, (struct budget_ranks){.n_local = job->world_size},
                                 job->layout->n_buckets);
        plan_bytes_by_class(job->layout, &options, &job->planned);
        refusal = admit_memory(job, &job->planned);
    }
    if (refusal) {
        form_drop(job); /* first: who is refused is told where it stands, and that is nowhere */
        form_refuse_all(job, refusal);
        return;
    }
    if (make_state(job) < 0) {
        out_of_memory(job);
        return;
    }
    job->phase = JOB_RESERVING;
    job->reserve_result = 0;
    job->reserve_work =
        (struct work){.run = reserve_run, .done = reserve_done, .n_items = state_n_reserve_pieces(job->state)};
    worker_post(job->pool, &job->reserve_work);
}

void form_drop(struct job *job)
{
    for (unsigned r = 0; r < job->world_size; r++) {
        struct job_rank *rank = &job->ranks[r];

        ring_orphan(steal_ptr(rank->rings[0]));
        ring_orphan(steal_ptr(rank->rings[1]));
        free(rank->gathered);
        rank->gathered = NULL;
        rank->formed = false;
    }
    window_free(job->window);
    pool_free(job->gathered);
    step_free(job->step);
    ledger_deinit(&job->ledger);
    state_free(job->state);
    layout_free(job->layout);
    free(job->cursors);
    free(job->hypers);
    free(job->learnt);
    job->window = NULL;
    job->gathered = NULL;
    job->step = NULL;
    job->state = NULL;
    job->layout = NULL;
    job->cursors = NULL;
    job->hypers = NULL;
    job->learnt = NULL;
    job->n_missing_seen = 0;
    job->last_missing = job->n_last_missing = 0;
    job->has_weights = job->has_learnt = job->has_norm = false;
    charge_deinit(&job->charge);
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

static void refuse_ring(struct job *job, struct job_rank *rank)
{
    ring_orphan(steal_ptr(rank->rings[0]));
    job_fault(
        job, rank,
        cause_quota(&(struct evidence_quota){.at = at_forming(rank),
                                             .what = "ring of the rank",
                                             .unit = "bytes",
                                             .asked = plan_ring_bytes(job->layout, job->config->zero.overlap_comm),
                                             .fix = "free memory on this machine"}));
    if (rank->wait == WAIT_FORM)
        job_is_held(job, rank);
}

static void ring_start_done(struct work *work)
{
    struct ring_start *start = container_of(work, struct ring_start, work);
    struct job *job = start->job;
    struct ring *ring = start->ring;

    job->n_io--;
    if (start->result == 0) {
        ring_credit_page(ring)->n_tickets = ring->n_tickets;
        atomic_store_explicit(&ring_credit_page(ring)->attempt, job->ledger.attempt, memory_order_release);
        if (job->phase == JOB_UPDATING || job->phase == JOB_COMMITTING_WINDOW) /* odd while weights are being written */
            atomic_store_explicit(&ring_credit_page(ring)->generation, 1, memory_order_release);
        ring->ready = true;
    } else if (start->rank->rings[0] == ring) {
        refuse_ring(job, start->rank);
    }
    ring_unhold(ring);
    free(start);
    job_settle(job);
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
                                      .ring_bytes = plan_ring_bytes(job->layout, job->config->zero.overlap_comm),
                                      .overflow_bytes = job->layout->arena_bytes,
                                      .n_buckets = job->layout->n_buckets,
                                      .n_tickets = budget_n_tickets(job->layout->n_buckets),
                                  });
    if (r < 0)
        return r;
    start->job = job;
    start->rank = rank;
    start->ring = rank->rings[0];
    start->work = (struct work){.run = ring_start_run, .done = ring_start_done, .n_items = 1};
    ring_hold(start->ring);
    job->n_io++;
    worker_post(job->pool, &steal_ptr(start)->work);
    return 0;
}

static void answer_formed(struct job *job, struct job_rank *rank)
{
    const struct ring *ring = rank->rings[0];
    bool stage3 = job->config->zero.stage == 3;
    const struct segment *published = stage3 ? pool_segment(job->gathered) : &job->state->weights;
    struct wire_segment segments[4] = {
        {.kind = WIRE_SEGMENT_RING, .n_bytes = ring->ring.n_bytes},
        {.kind = WIRE_SEGMENT_OVERFLOW, .n_bytes = ring->overflow.n_bytes},
        {.kind = WIRE_SEGMENT_CREDIT, .n_bytes = ring->credit.n_bytes},
        {.kind = stage3 ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS, .n_bytes = published->n_bytes},
    };
    int fds[4] = {segment_open_rw(&ring->ring), segment_open_rw(&ring->overflow), segment_open_ro(&ring->credit),
                  segment_open_ro(published)};
    struct reply reply = {
        .type = REPLY_FORMED,
        .formed =
            {
                .resumed = rank->resumes,
                .init_wanted = !job->has_weights && rank->rank == 0,
                .position = job_position(job, rank),
                .n_tickets = ring->n_tickets,
                .ring_bytes = ring->ring_bytes,
                .digest = job->digest,
                .has_blob = rank->blob.data != NULL,
                .blob = rank->blob.data,
                .n_blob_bytes = rank->blob.n_bytes,
                .loss_scale = job_loss_scale(job),
            },
    };
    struct wire_segment sent[4];
    int sent_fds[4];
    size_t n = 0;

    /* A segment may be empty (no trainable parameter: no overflow): it has no descriptor. */
    for (size_t i = 0; i < ARRAY_SIZE(segments); i++) {
        if (segments[i].n_bytes == 0 || fds[i] < 0)
            continue;
        sent[n] = segments[i];
        sent_fds[n++] = fds[i];
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
        return job->n_inits == 0;
    return (job->phase == JOB_TRAINING || job->phase == JOB_WINDOW) && !job->ledger.ranks[rank->rank].asked &&
           collect_is_done(job, rank);
}

static void settle_rank(struct job *job, struct job_rank *rank)
{
    struct evidence_at at = at_forming(rank);

    if (rank->wait != WAIT_FORM)
        return;
    if (rank->rings[1] && !collect_is_done(job, rank))
        return; /* its predecessor's ended micro-batches are still to be reduced */
    ring_orphan(steal_ptr(rank->rings[1]));
    if (!rank->rings[0]) {
        if (start_ring(job, rank) < 0) {
            job_fault(job, rank, cause_declare(&at, "no memory for the rank's ring", "free memory on this machine"));
            job_is_held(job, rank);
        }
        return;
    }
    if (rank->rings[0]->ready && can_take_part(job, rank))
        answer_formed(job, rank);
}

void form_settle(struct job *job)
{
    if (job->phase == JOB_WAITING) {
        if (all_declared(job))
            start_forming(job);
        return;
    }
    if (job->phase == JOB_RESERVING)
        return;
    for (unsigned r = 0; r < job->world_size; r++)
        settle_rank(job, &job->ranks[r]);
}

/* ---- initial weights ----------------------------------------------------------------------------------- */

struct init {
    struct work work;
    struct job *job;
    struct job_rank *rank;
    struct ring *ring;
    struct request_init request;
};

static void init_run(struct work *work, uint32_t item)
{
    struct init *init = container_of(work, struct init, work);

    (void)item;
    weights_store(init->job->state, init->job->kernels, init->request.param, init->request.start_elem,
                  init->request.n_elems, init->ring->ring.map + init->request.offset_bytes);
}

static void init_done(struct work *work)
{
    struct init *init = container_of(work, struct init, work);
    struct job *job = init->job;
    struct job_rank *rank = init->rank;

    job->n_io--;
    job->n_inits--;
    if (rank->wait == WAIT_INIT && rank->rings[0] == init->ring)
        job_answer_done(job, rank);
    ring_unhold(init->ring);
    free(init);
    job_settle(job);
}

static const char *check_init(const struct job *job, const struct job_rank *rank, const struct request_init *request)
{
    const struct layout_param *param;
    uint64_t ring_bytes = rank->rings[0] ? rank->rings[0]->ring_bytes : 0, n_bytes;

    if (job->phase != JOB_INITIALISING || rank->rank != 0 || !rank->rings[0])
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
    job->n_io++;
    job->n_inits++;
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
    if (job->phase == JOB_INITIALISING && rank->rank == 0) {
        job->has_weights = true;
        job->phase = JOB_TRAINING;
        job->times.last_commit_ns = job_now(job);
        step_open(job->step);
        for (unsigned r = 0; r < job->world_size; r++)
            if (job->ranks[r].wait == WAIT_READY)
                job_answer_done(job, &job->ranks[r]);
    }
    if (job->has_weights)
        job_answer_done(job, rank);
    else
        job_wait(job, rank, WAIT_READY);
    job_settle(job);
}
