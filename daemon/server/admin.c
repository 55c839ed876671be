/* SPDX-License-Identifier: Apache-2.0 */

/* zerodctl's commands. A command reads a snapshot of the job or changes the job, and answers in JSON. */

#include "daemon/server/admin.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sysexits.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "core/wire/status.h"
#include "core/wire/wire-reply.h"
#include "daemon/engines/device-keep.h"
#include "daemon/engines/devices.h"
#include "daemon/job/findings.h"
#include "daemon/job/job.h"
#include "daemon/job/look.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/pushed.h"
#include "daemon/job/model/kept.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/stats.h"
#include "daemon/job/resize.h"
#include "daemon/job/stall.h"
#include "daemon/job/state/save.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/speculate.h"
#include "daemon/memory/ring.h"
#include "daemon/nodes/membership.h"
#include "daemon/nodes/nodes.h"
#include "daemon/nodes/param-norm.h"
#include "daemon/server/questions.h"
#include "daemon/server/service.h"
#include "daemon/server/session.h"
#include "daemon/server/trace-writer.h"
#include "daemon/step/executor.h"
#include "daemon/step/pools.h"
#include "daemon/step/speculation.h"
#include "daemon/step/step.h"

/* ---- snapshots ----------------------------------------------------------------------------------------- */

static const char *phase_word(const struct job *job)
{
    static const char *const words[] = {
        [JOB_WAITING] = "waiting",   [JOB_RESERVING] = "forming",        [JOB_INITIALISING] = "initialising",
        [JOB_TRAINING] = "training", [JOB_UPDATING] = "updating",        [JOB_ABORTING] = "aborting",
        [JOB_WINDOW] = "window",     [JOB_COMMITTING_WINDOW] = "window",
    };

    assert((size_t)job->phase < ARRAY_SIZE(words));
    if (job->run.survival.holds)
        return "holding";
    return job->kept.draining ? "draining" : words[job_shown_phase(job)];
}

static double steps_per_second(const struct job *job)
{
    unsigned n = MIN(job->stats.times.n_recent, (unsigned)ARRAY_SIZE(job->stats.times.recent_ns));
    uint64_t sum = 0;

    for (unsigned i = 0; i < n; i++)
        sum += job->stats.times.recent_ns[i];
    return n >= 2 && sum > 0 ? n * 1e9 / (double)sum : 0;
}

static uint64_t ring_bytes_held(const struct job *job, bool overflow)
{
    uint64_t n = 0;

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        for (size_t i = 0; i < ARRAY_SIZE(job->ranks[r].rings); i++) {
            const struct ring *ring = job->ranks[r].rings[i];

            if (ring)
                n += overflow ? ring->overflow_bytes : ring->ring.n_bytes;
        }
    }
    return n;
}

/*
 * Fills in the memory that the engine process has allocated on GPUs. With an offloaded optimizer, undo copies count as
 * gradients.
 */
static void fill_device_memory(const struct job *job, struct status_bytes *memory)
{
    enum status_memory state = job->memory.planned.offloaded ? STATUS_MEMORY_GRADIENT : STATUS_MEMORY_STATE;
    const struct {
        enum status_memory memory;
        enum device_piece_kind kind;
    } classes[] = {{state, DEVICE_STATE},
                   {state, DEVICE_UNDO},
                   {STATUS_MEMORY_GRADIENT, DEVICE_GRADIENT},
                   {STATUS_MEMORY_RING, DEVICE_RING},
                   {STATUS_MEMORY_WEIGHTS, DEVICE_WEIGHTS},
                   {STATUS_MEMORY_POOL, DEVICE_POOL}};
    const struct device_keep *keep = devices_keep(job->executor->devices);

    for (size_t i = 0; i < ARRAY_SIZE(classes); i++)
        memory[classes[i].memory] = (struct status_bytes){.planned_bytes = memory[classes[i].memory].planned_bytes};
    /* Every engine has all kinds of pieces. Pieces that the stage does not use are nearly empty. */
    for (size_t i = 0; i < ARRAY_SIZE(classes); i++)
        for (unsigned local = 0; memory[classes[i].memory].planned_bytes > 0 && local < job_n_local(job); local++) {
            memory[classes[i].memory].on_device = true;
            memory[classes[i].memory].held_bytes += keep->facts->n_bytes[local][classes[i].kind];
        }
}

static void fill_memory(const struct job *job, struct status_bytes *memory)
{
    const struct plan_bytes *planned = &job->memory.planned;

    if (!job->layout)
        return;
    memory[STATUS_MEMORY_STATE] =
        (struct status_bytes){job->state->state.n_bytes + job->state->spare.n_bytes, planned->state};
    memory[STATUS_MEMORY_GRADIENT] = (struct status_bytes){job->state->gradient.n_bytes, planned->gradient};
    memory[STATUS_MEMORY_RING] = (struct status_bytes){ring_bytes_held(job, false), planned->ring};
    memory[STATUS_MEMORY_OVERFLOW] = (struct status_bytes){ring_bytes_held(job, true), planned->overflow};
    memory[STATUS_MEMORY_STAGING] = (struct status_bytes){0, planned->staging};
    memory[STATUS_MEMORY_WEIGHTS] = (struct status_bytes){job->state->weights.n_bytes, planned->weights};
    memory[STATUS_MEMORY_POOL] = (struct status_bytes){pools_held_bytes(job->executor->pools), planned->pool};
    memory[STATUS_MEMORY_FIXED] = (struct status_bytes){planned->fixed, planned->fixed};
    if (planned->offloaded)
        memory[STATUS_MEMORY_STATE].held_bytes += job->state->weights.n_bytes;
    if (job->executor->on_gpus)
        memory[STATUS_MEMORY_STAGING].held_bytes = planned->staging;
    if (job->executor->on_gpus && job->phase != JOB_RESERVING) /* false during allocation */
        fill_device_memory(job, memory);
}

static void fill_counters(const struct job *job, struct status *status)
{
    const struct job_counters *c = &job->stats.counters;
    struct speculation_counts early = {0};
    uint64_t overflows = 0;

    if (job->step && job->step->speculation)
        early = speculation_counts(job->step->speculation);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        overflows += job->ranks[r].rings[0] ? job->ranks[r].rings[0]->n_overflows : 0;
    status->counters = (struct status_counters){
        .n_pushes_admitted = job->kept.n_admitted,
        .n_pushes_retried = c->retried,
        .n_pushes_dropped = c->dropped,
        .n_pushes_accumulated = c->accumulated,
        .n_pushes_redone = c->redone,
        .n_aborts = job->kept.n_aborts,
        .n_reattaches = job->kept.n_reattaches,
        .n_overflow_slots = overflows,
        .n_warnings = c->warnings,
        .n_early_updates = early.n_accepted,
        .n_early_updates_dropped = early.n_dropped,
    };
}

static void fill_early(const struct job *job, struct status_early *early)
{
    struct speculate_obstacle obstacle;

    if (!job->layout)
        return;
    speculate_find_obstacle(job, &obstacle);
    early->n_elems = job->speculation.n_elems_early;
    early->n_elems_last = job->speculation.n_elems_last;
    early->prevented_by = obstacle.word;
    snprintf(early->why, sizeof(early->why), "%s", obstacle.word ? obstacle.text : "");
}

static void fill_step(const struct job *job, struct status *status)
{
    const struct job_times *t = &job->stats.times;

    status->step = job->layout ? job->ledger.step : 0;
    status->attempt = job->layout ? job->ledger.attempt : 0;
    status->n_applied = job->kept.n_steps_applied;
    status->n_skipped = job->kept.n_steps_skipped;
    status->n_missing_steps = job->missing.n_missing;
    status->n_missing_params = job->kept.n_missing;
    status->loss_scale = job_loss_scale(job);
    status->has_grad_norm = job->kept.has_norm;
    status->groups = job->decision.has_hypers ? job->decision.hypers : NULL;
    status->grad_norm = job->kept.norm;
    status->lr = job->kept.lr;
    status->steps_per_s = steps_per_second(job);
    status->last_step_ns = t->step_last_ns;
    status->phases[STATUS_PHASE_WAIT] = (struct status_time){job->waits.total_ns, t->wait_last_ns};
    status->phases[STATUS_PHASE_REDUCE] = (struct status_time){t->reduce_total_ns, t->reduce_last_ns};
    status->phases[STATUS_PHASE_UPDATE] = (struct status_time){t->update_total_ns, t->update_last_ns};
    status->overlap_bytes = job->stats.counters.overlap_bytes;
    status->overlap_reduced_bytes = job->stats.counters.overlap_reduced_bytes;
    status->slowest_rank = job->kept.has_norm && t->slowest_rank < job->world.size ? (int64_t)t->slowest_rank : -1;
    status->slowest_behind_ns = t->slowest_behind_ns;
}

/* The arrays that the snapshot of the nodes points to. */
struct nodes_view {
    struct status_nodes nodes;
    struct status_node list[CONFIG_MAX_NODES];
    char whys[CONFIG_MAX_NODES][256];
};

static void view_node(struct nodes_view *view, struct service *service, unsigned i)
{
    const struct config *config = service->config;
    struct membership_node node = membership_node(service->membership, i);

    snprintf(view->whys[i], sizeof(view->whys[i]), "%s", node.why ? node.why : "");
    view->list[i] = (struct status_node){
        .address = node.address,
        .first_rank = config_first_rank_of(config, i),
        .n_ranks = config->world.nodes.items[i].ranks,
        .known = config->world.node == 0 || i == 0 || i == config->world.node,
        .reached = node.up,
        .why = view->whys[i],
        .silent_ns = node.silent_ms == UINT64_MAX ? UINT64_MAX : node.silent_ms * UINT64_C(1000000),
    };
}

/* Return: the view, which the caller frees, or NULL if the job has one node or memory is short. */
static struct nodes_view *view_nodes(struct service *service)
{
    const struct job *job = service->job;
    const struct nodes *nodes = nodes_of(job);
    struct nodes_view *view = nodes ? calloc(1, sizeof(*view)) : NULL;
    struct nodes_status status;

    if (!view)
        return NULL;
    status = nodes_status(nodes);
    assert(status.n_nodes <= CONFIG_MAX_NODES); /* size of the view's arrays */
    view->nodes = (struct status_nodes){
        .node = status.node,
        .list = view->list,
        .n = status.n_nodes,
        .engine = "gloo",
        .generation = status.generation,
        .connected = status.connected,
        .traffic = membership_traffic(service->membership),
        .waits_for = status.waits_for,
        .waits_to = status.waits_to,
    };
    for (unsigned i = 0; i < status.n_nodes; i++)
        view_node(view, service, i);
    return view;
}

static bool uses_gpus(const struct job *job)
{
    return job->executor && job->executor->on_gpus;
}

static struct status_device view_device(const struct job *job)
{
    struct devices_status status = uses_gpus(job) ? devices_status(job->executor->devices) : (struct devices_status){0};

    return (struct status_device){
        .ready = status.ready,
        .pid = status.pid,
        .generation = status.generation,
        .n_failures = status.n_failures,
        .traffic = status.traffic,
        .versions = status.versions && status.versions[0] ? status.versions : NULL,
    };
}

static struct status_checkpoint view_checkpoint(const struct job *job)
{
    const struct job_save *save = &job->save;
    struct save_view view;

    save_describe(job, &view);
    return (struct status_checkpoint){
        .dir = job->config->checkpoint.dir,
        .wanted = save->wanted,
        .is_saving = view.is_saving,
        .saving = {.step = view.step,
                   .n_bytes_done = view.n_bytes_done,
                   .n_bytes = view.n_bytes,
                   .began_ns = view.began_ns,
                   .waited_ns = view.waited_ns},
        .has_last = save->last_ended_ns > 0,
        .last = {.step = job->kept.saved_step,
                 .n_bytes = save->last_bytes,
                 .ended_ns = save->last_ended_ns,
                 .took_ns = save->last_ns,
                 .waited_ns = save->last_waited_ns},
        .n_saved = save->n_saved,
        .n_failed = save->n_failed,
        .why = save->why,
    };
}

/* The arrays that the snapshot of the findings points to. */
struct findings_view {
    struct findings findings;
    struct status_finding list[FINDINGS_MAX];
};

/* Return: the view, which the caller frees, or NULL without memory. */
static struct findings_view *view_findings(const struct job *job)
{
    static const char *const words[N_FINDINGS] = {
        [FINDING_RANK_NORM] = "rank-norm",
        [FINDING_ZERO_GRADIENT] = "zero-gradient",
        [FINDING_ZERO_LR] = "zero-lr",
        [FINDING_SLOW_RANK] = "slow-rank",
    };
    struct findings_view *view = calloc(1, sizeof(*view));

    if (!view)
        return NULL;
    findings_of(job, &view->findings);
    assert(view->findings.n <= FINDINGS_MAX);
    for (unsigned i = 0; i < view->findings.n; i++) {
        const struct finding *finding = &view->findings.list[i];

        assert(finding->kind < N_FINDINGS);
        view->list[i] = (struct status_finding){
            .kind = words[finding->kind], .rank = finding->rank, .param = finding->param, .text = finding->text};
    }
    return view;
}

/*
 * Makes the snapshot that "status" prints. refused: an array of ARRAY_SIZE(job->diagnostics.refused) elements. view and
 * findings may be NULL.
 */
static struct status make_status(struct service *service, struct status_refused *refused, const struct nodes_view *view,
                                 const struct findings_view *findings)
{
    const struct config *config = service->config;
    const struct job *job = service->job;
    struct status status = {
        .now_ns = service_now_ns(),
        .job = config->job,
        .run_id = job->kept.run_id,
        .state = phase_word(job),
        .version = service_version(),
        .isa = service->kernels->isa,
        .config_path = config->file,
        .socket_path = config->listen.socket,
        .pid = getpid(),
        .started_ns = service->started_ns,
        .n_daemons = job->run.survival.journal ? job->kept.n_daemons : 0,
        .found_ns = job->run.survival.found_ns,
        .away_ns = job->run.survival.away_ns,
        .held = job->run.survival.holds,
        .stage = (unsigned)config->zero.stage,
        .bucket_elems = job->config->zero.reduce_bucket_size,
        .world_size = job->world.size,
        .layout = job->layout,
        .limit_bytes = config->limits.memory_bytes,
        .refused = refused,
        .n_refused = job->diagnostics.n_refused,
        .findings = findings ? findings->list : NULL,
        .n_findings = findings ? findings->findings.n : 0,
        .nodes = view ? &view->nodes : NULL,
        .has_device = uses_gpus(job),
        .device = view_device(job),
        .checkpoint = view_checkpoint(job),
    };

    assert(job->diagnostics.n_refused <= ARRAY_SIZE(job->diagnostics.refused));
    for (unsigned r = job->world.first; r < job->world.end; r++)
        status.n_attached += job->ranks[r].peer != NULL;
    for (size_t i = 0; i < job->diagnostics.n_refused; i++)
        refused[i] = (struct status_refused){.code = job->diagnostics.refused[i].code, .n = job->diagnostics.refused[i].n};
    status.last_diagnostic = kept_last(&job->diagnostics.kept);
    fill_step(job, &status);
    fill_early(job, &status.early);
    fill_memory(job, status.memory);
    fill_counters(job, &status);
    return status;
}

static const char *rank_word(const struct job *job, const struct job_rank *rank)
{
    if (rank->kept.left)
        return "left";
    if (!rank->peer)
        return rank->kept.lost_ns ? "lost" : "absent";
    if (rank->wait != WAIT_NONE)
        return waits_word(rank->wait);
    if (!job->layout || !rank->kept.formed)
        return "declaring";
    return job->ledger.ranks[rank->rank].open ? "backward" : "computing";
}

/* Adds ns to the rank's wait with these words (state and what). Several kinds of request share the same words. */
static void add_wait(struct status_rank *status, const char *state, const char *what, uint64_t ns)
{
    size_t i = 0;

    while (i < status->n_waits && (status->waits[i].state != state || status->waits[i].what != what))
        i++;
    if (i == status->n_waits && (ns == 0 || i == STATUS_MAX_WAITS))
        return;
    status->n_waits += i == status->n_waits;
    status->waits[i] = (struct status_wait){.state = state, .what = what, .ns = status->waits[i].ns + ns};
}

static void add_waits(struct status_rank *status, const struct rank_waits *waits)
{
    for (unsigned kind = WAIT_NONE + 1; kind < WAITS_N_KINDS; kind++)
        for (unsigned what = 0; what < N_WAIT_FOR; what++)
            add_wait(status, waits_word(kind), waits_for_word(what), waits->total_ns[kind][what]);
}

static struct status_rank make_rank(const struct job *job, const struct job_rank *rank)
{
    bool formed = job->layout != NULL;
    struct ledger_position next = formed ? ledger_next(&job->ledger, rank->rank) : (struct ledger_position){0};

    return (struct status_rank){
        .rank = rank->rank,
        .attached = rank->peer != NULL,
        .pid = rank->kept.pid,
        .uid = rank->kept.uid,
        .state = rank_word(job, rank),
        .client = rank->kept.client,
        .incarnation = rank->kept.incarnation,
        .connected_since_ns = rank->peer ? rank->attached_ns : 0,
        .last_message_ns = rank->last_ns,
        .step = next.step,
        .micro_batch = next.micro_batch,
        .n_pushes = rank->kept.n_pushes,
        .behind_total_ns = rank->waits.behind_total_ns,
        .phases_ns = {[STATUS_RANK_FORWARD] = rank->phases.total_ns[PHASE_FORWARD],
                      [STATUS_RANK_BACKWARD] = rank->phases.total_ns[PHASE_BACKWARD],
                      [STATUS_RANK_ROOM] = rank->phases.total_ns[PHASE_ROOM],
                      [STATUS_RANK_REST] = rank->phases.total_ns[PHASE_REST]},
        .waiting_for = rank->wait != WAIT_NONE ? job_waits_for(job, rank) : NULL,
        .waiting_since_ns = rank->wait != WAIT_NONE ? rank->wait_ns : 0,
        .fault = rank->process.fault.diagnostic,
    };
}

static struct status_rank *make_status_ranks(const struct job *job)
{
    struct status_rank *ranks = calloc(job_n_local(job), sizeof(*ranks));

    for (unsigned r = job->world.first; ranks && r < job->world.end; r++)
        ranks[r - job->world.first] = make_rank(job, &job->ranks[r]);
    for (unsigned r = job->world.first; ranks && r < job->world.end; r++)
        add_waits(&ranks[r - job->world.first], &job->ranks[r].waits);
    return ranks;
}

/* The arrays that the snapshot of the stacks points to. */
struct stacks_view {
    struct status_stack list[CONFIG_MAX_LOCAL_RANKS];
    uint32_t awaited[CONFIG_MAX_LOCAL_RANKS][STATUS_MAX_AWAITED];
};

static void view_stack(const struct job *job, const struct job_rank *rank, struct status_stack *stack,
                       uint32_t *awaited)
{
    *stack = (struct status_stack){.awaited = awaited,
                                   .process = look_process(job, rank),
                                   .is_pending = look_is_awaited(job, rank),
                                   .seen_ns = rank->process.look.text ? rank->process.look.seen_ns : 0,
                                   .text = rank->process.look.text};
    for (uint32_t p = 0; job->layout && job->ledger.ranks[rank->rank].open && p < job->layout->n_params; p++) {
        if (!job_awaits(job, rank, p))
            continue;
        if (stack->n_awaited < STATUS_MAX_AWAITED)
            awaited[stack->n_awaited] = p;
        stack->n_awaited++;
    }
}

/* Return: the view, which the caller frees, or NULL without memory. */
static struct stacks_view *view_stacks(const struct job *job, const struct status_rank *ranks)
{
    struct stacks_view *view = ranks ? calloc(1, sizeof(*view)) : NULL;

    assert(job_n_local(job) <= CONFIG_MAX_LOCAL_RANKS); /* size of the view's arrays */
    for (unsigned i = 0; view && i < job_n_local(job); i++) {
        view_stack(job, &job->ranks[job->world.first + i], &view->list[i], view->awaited[i]);
        view->list[i].rank = &ranks[i];
    }
    return view;
}

static struct status_param *make_params(const struct job *job)
{
    struct status_param *params = job->layout ? calloc(job->layout->n_params + 1, sizeof(*params)) : NULL;

    for (uint32_t p = 0; params && p < job->layout->n_params; p++)
        params[p] = (struct status_param){
            .n_steps = job->state->progress.counts[p],
            .has_grad_norm = job->kept.has_norm && param_norm_is_here(job, p),
            .grad_norm = step_param_norm(job->step, step_squares(job->step, p)),
        };
    return params;
}

/* ---- commands: each returns JSON, owned by the caller, or NULL when memory is out ---------------------- */

static char *on_status(struct service *service)
{
    struct status_refused refused[ARRAY_SIZE(service->job->diagnostics.refused)];
    _cleanup_free_ struct nodes_view *view = view_nodes(service);
    _cleanup_free_ struct findings_view *findings = view_findings(service->job);
    struct status status = make_status(service, refused, view, findings);

    return status_json(&status);
}

static char *on_ranks(struct service *service)
{
    _cleanup_free_ struct status_rank *ranks = make_status_ranks(service->job);

    return ranks ? ranks_json(ranks, job_n_local(service->job), service_now_ns()) : NULL;
}

/* Asks all ranks of this node for their stacks. The command "stacks" shows the answers as they arrive. */
static char *on_look(struct service *service)
{
    struct job *job = service->job;
    unsigned n = 0;
    char text[64];

    for (unsigned r = job->world.first; r < job->world.end; r++)
        n += look_ask(job, &job->ranks[r]);
    snprintf(text, sizeof(text), "%u ranks of %u are asked where they are", n, job_n_local(job));
    return message_json(text);
}

static char *on_stacks(struct service *service)
{
    const struct job *job = service->job;
    _cleanup_free_ struct status_rank *ranks = make_status_ranks(job);
    _cleanup_free_ struct stacks_view *view = view_stacks(job, ranks);

    return view ? stacks_json(view->list, job_n_local(job), job->layout, service_now_ns()) : NULL;
}

static bool has_pushed_in_step(const void *userdata, unsigned rank, uint32_t part)
{
    const struct job *job = userdata;

    assert(rank >= job->ledger.first_rank);
    assert(rank < job->ledger.end_rank);
    assert(part < job->layout->n_parts);
    return job->ledger.ranks[rank].pushed_in_step[part];
}

static struct status_pushes pushes_of(const struct job *job)
{
    return (struct status_pushes){.first_rank = job->ledger.first_rank,
                                  .end_rank = job->ledger.end_rank,
                                  .has_pushed = has_pushed_in_step,
                                  .userdata = job};
}

static char *on_params(struct service *service)
{
    const struct job *job = service->job;
    _cleanup_free_ struct status_param *params = make_params(job);
    const struct status_pushes pushes = pushes_of(job);

    return params_json(job->layout, job->layout ? &pushes : NULL, params);
}

static char *on_diagnostics(struct service *service)
{
    const struct diagnostic *list[KEPT_MAX];
    size_t n = kept_list(&service->job->diagnostics.kept, list);

    return diagnostics_json(list, n, service->job->layout, service_now_ns());
}

static char *print_config(const struct config *config)
{
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);

    if (!file)
        return NULL;
    config_print(file, config);
    fclose(file);
    return text;
}

static char *on_report(struct service *service)
{
    const struct job *job = service->job;
    struct status_refused refused[ARRAY_SIZE(job->diagnostics.refused)];
    _cleanup_free_ struct nodes_view *view = view_nodes(service);
    _cleanup_free_ struct findings_view *findings = view_findings(service->job);
    struct status status = make_status(service, refused, view, findings);
    _cleanup_free_ struct status_rank *ranks = make_status_ranks(job);
    _cleanup_free_ struct stacks_view *stacks = view_stacks(job, ranks);
    _cleanup_free_ struct status_param *params = make_params(job);
    _cleanup_free_ char *config = print_config(service->job->config);
    const struct status_pushes pushes = pushes_of(job);
    const struct diagnostic *list[KEPT_MAX];

    return report_json(&(struct report){
        .status = &status,
        .ranks = ranks,
        .n_ranks = ranks ? job_n_local(job) : 0,
        .stacks = stacks ? stacks->list : NULL,
        .pushes = job->layout ? &pushes : NULL,
        .params = params,
        .diagnostics = list,
        .n_diagnostics = kept_list(&job->diagnostics.kept, list),
        .config = config,
    });
}

static char *on_drain(struct service *service)
{
    service->job->kept.draining = true;
    log_notice("draining: no rank may attach, the daemon ends with the last one");
    return message_json("draining: no rank may attach any more; the daemon ends when the last trainer has left");
}

static char *on_abort(struct service *service)
{
    struct job *job = service->job;
    unsigned n = 0;
    char text[256];

    if (job->phase != JOB_TRAINING)
        return error_json("there is no open step: the job is not formed, or the step is decided already");
    free(job->abort.why);
    job->abort.why = strdup("zerodctl abort-step");
    job_abort(job, -1, NULL);
    for (unsigned r = job->world.first; r < job->world.end; r++)
        n += job->ranks[r].peer != NULL;
    if (n == 0)
        return message_json("the step is aborted; no rank is attached to this daemon");
    snprintf(text, sizeof(text),
             "the step is aborted, which the next call of each rank says (%u attached to this daemon): loops over "
             "zerod.steps() begin it again, others end with zerod.StepAborted, and C programs get ZEROD_ABORTED",
             n);
    return message_json(text);
}

static char *on_drop(struct service *service)
{
    _cleanup_free_ char *why = NULL;

    if (job_drop(service->job, &why) != 0)
        return error_json(why ? why : "trainers are still attached");
    log_notice("state dropped by request");
    return message_json("the state is gone; the next run may attach under any run id");
}

/* Changes the world size. argument: the new number of ranks. */
static char *on_resize(struct service *service, const char *argument, uint32_t *exit_code)
{
    struct job *job = service->job;
    unsigned n_ranks, before = job->world.size;
    _cleanup_free_ char *why = NULL;
    char text[256], rest;
    int r;

    *exit_code = EX_USAGE;
    if (*argument < '1' || *argument > '9' || sscanf(argument, "%5u%c", &n_ranks, &rest) != 1)
        return error_json("resize takes a number of ranks from 1 on");
    r = job_resize(job, n_ranks, &why);
    *exit_code = r == 0 ? EX_OK : r == RESIZE_E_BUSY ? EX_TEMPFAIL : r < 0 ? EX_OSERR : EX_UNAVAILABLE;
    if (r != 0)
        return error_json(r < 0 ? "out of memory: the job is as it was" : why);
    if (n_ranks == before)
        snprintf(text, sizeof(text), "ranks of the job: %u, as before", n_ranks);
    else
        snprintf(text, sizeof(text), "ranks of the job: %u, before it was %u; the next step is %" PRIu64, n_ranks,
                 before, job->ledger.step);
    return message_json(text);
}

static char *refuse_save(const struct job *job, const char *why)
{
    char text[256];

    snprintf(text, sizeof(text), "nothing is saved: %s; %s", why,
             job->config->checkpoint.dir ? "ask again when it trains" : "set it, and restart the daemon");
    return error_json(text);
}

static char *on_save(struct service *service)
{
    struct job *job = service->job;
    struct status_save answer = {.dir = job->config->checkpoint.dir};
    struct save_view view;
    const char *why;
    char text[128];

    save_describe(job, &view);
    why = view.is_saved || view.is_current ? NULL : job_save(job);
    if (why)
        return refuse_save(job, why);
    answer.message = text;
    answer.is_saved = view.is_saved;
    answer.step = job->state->progress.epoch;
    /* n_ended after this step's save: a running save of an earlier step ends first. */
    answer.n_ended = job->save.n_saved + job->save.n_failed + !view.is_saved + (view.is_saving && !view.is_current);
    snprintf(text, sizeof(text), "step %" PRIu64 " %s", answer.step,
             view.is_saved     ? "is saved already"
             : view.is_current ? "is being saved"
                               : "will be saved, or a later one");
    return save_json(&answer);
}

/* Answers with the trace of the last steps. argument: the number of steps. */
static char *on_trace(struct service *service, const char *argument, uint32_t *exit_code)
{
    unsigned n_steps;
    char rest;

    *exit_code = EX_USAGE;
    if (*argument < '1' || *argument > '9' || sscanf(argument, "%9u%c", &n_steps, &rest) != 1)
        return error_json("trace takes a number of steps from 1 on");
    *exit_code = EX_OK;
    return trace_answer(service->job, n_steps);
}

static const struct command {
    const char *name;
    bool admin;
    char *(*run)(struct service *service);
    char *(*run_with)(struct service *service, const char *argument, uint32_t *exit_code); /* if run is NULL */
} table[] = {
    {"status", false, on_status},           {"ranks", false, on_ranks},       {"params", false, on_params},
    {"diagnostics", false, on_diagnostics}, {"report", false, on_report},     {"drain", true, on_drain},
    {"abort-step", true, on_abort},         {"drop", true, on_drop},          {"save", true, on_save},
    {"resize", true, NULL, on_resize},      {"trace", false, NULL, on_trace}, {"look", false, on_look},
    {"stacks", false, on_stacks},
};

/*
 * Finds the command of a text such as "drop" or "resize 3". *argument: the text after the command's name. Return: the
 * command, or NULL if the text has no known command.
 */
static const struct command *find_command(const char *text, const char **argument)
{
    for (size_t i = 0; i < ARRAY_SIZE(table); i++) {
        size_t n = strlen(table[i].name);
        bool has_argument = strncmp(table[i].name, text, n) == 0 && text[n] == ' ';

        *argument = has_argument ? text + n + 1 : "";
        if (table[i].run_with ? has_argument : strcmp(table[i].name, text) == 0)
            return &table[i];
    }
    return NULL;
}

/* ---- answering ----------------------------------------------------------------------------------------- */

static uint32_t exit_code_of(const char *json)
{
    return strncmp(json, "{\"error\"", 8) == 0 || strncmp(json, "{ \"error\"", 9) == 0 ? EX_UNAVAILABLE : EX_OK;
}

char *admin_answer(struct service *service, const char *command, uint32_t *exit_code)
{
    const char *argument;
    const struct command *found = find_command(command, &argument);
    char text[160];
    char *json;

    if (!found) {
        snprintf(text, sizeof(text), "there is no command \"%.32s\"", command);
        *exit_code = EX_USAGE;
        return error_json(text);
    }
    waits_look(service->job, job_now(service->job)); /* so that the answer includes waits that have not ended */
    assert(!found->run != !found->run_with);
    json = found->run ? found->run(service) : found->run_with(service, argument, exit_code);
    if (found->run || !json)
        *exit_code = json ? exit_code_of(json) : EX_OSERR;
    return json ? json : error_json("out of memory");
}

static void refuse_command(struct session *session)
{
    struct evidence_at at = {.rank = -1, .step = -1, .micro_batch = -1};
    struct diagnostic *d = session_keep(session, cause_not_allowed(&at, session->peer.uid, session->peer.gid,
                                                                   "change the job (listen.admin_users, "
                                                                   "listen.admin_groups)"));
    _cleanup_free_ char *json = error_json(d->text);
    const char *answer = json ? json : "{}";

    session_send(session,
                 &(struct reply){
                     .type = REPLY_ADMIN_PART,
                     .admin_part = {.json = (const uint8_t *)answer,
                                    .n_json_bytes = strlen(answer),
                                    .last = true,
                                    .exit_code = EX_NOPERM},
                 },
                 NULL, 0);
    session_doom(session);
}

void admin_request(struct session *session, const struct request_admin *request)
{
    bool is_admin = listener_is_admin(session->service->listener, &session->peer);
    const char *argument;
    const struct command *found = find_command(request->command, &argument);

    assert(session->state == SESSION_CONTROL);
    if (found && found->admin && !is_admin) {
        refuse_command(session);
        return;
    }
    questions_ask(&session->service->questions, &session->question, session->fd, request->command, is_admin);
}
