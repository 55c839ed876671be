/* SPDX-License-Identifier: Apache-2.0 */

/* Executes messages from node 0, by calls of the job and of the exchange. */

#include <assert.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/layout/manifest.h"
#include "daemon/job/attendance.h"
#include "daemon/job/drop.h"
#include "daemon/job/form.h"
#include "daemon/job/init.h"
#include "daemon/job/job.h"
#include "daemon/job/look.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/state/resume.h"
#include "daemon/job/state/save.h"
#include "daemon/job/state/window.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/boundary.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/job/transaction/commit.h"
#include "daemon/memory/state-edits.h"
#include "daemon/nodes/nodes-inside.h"
#include "daemon/nodes/param-norm.h"
#include "daemon/nodes/remote-ranks.h"
#include "daemon/step/executor.h"

/* ---- manifests that differ ----------------------------------------------------------------------------- */

void nodes_forget_shown(struct nodes *nodes)
{
    for (unsigned i = 0; nodes->shown && i < nodes->n; i++)
        manifest_deinit(&nodes->shown[i]);
    free(steal_ptr(nodes->shown));
    nodes->n_shown = 0;
}

const struct manifest *nodes_manifest(const struct nodes *nodes, unsigned node)
{
    assert(node < nodes->n);
    return nodes->shown && nodes->n_shown == nodes->n ? &nodes->shown[node] : NULL;
}

/* Reports this node's manifest. If the manifest is too large for a message, the report and the diagnostic lack it. */
static void hear_show(struct nodes *nodes, const struct node_message *message)
{
    const struct job *job = nodes->job;
    const struct manifest *manifest = &job->ranks[job->world.first].process.manifest;
    const struct request request = {.type = REQUEST_DECLARE,
                                    .declare = {.params = manifest->decls, .n_params = manifest->n}};
    _cleanup_free_ uint8_t *bytes = malloc(NODE_MESSAGE_MAX_BYTES);
    int n = bytes ? wire_pack_request(&nodes->said, &request, bytes, NODE_MESSAGE_MAX_BYTES * 3 / 4) : -ENOMEM;

    nodes_forget_shown(nodes);
    nodes->shown = calloc(nodes->n, sizeof(*nodes->shown));
    nodes_report(nodes, (struct node_message){.kind = NODE_MANIFEST,
                                              .digest = manifest_digest(manifest),
                                              .bytes = bytes,
                                              .n_bytes = n > 0 ? (size_t)n : 0});
}

static void hear_manifest(struct nodes *nodes, const struct node_message *message)
{
    struct wire_arena arena = WIRE_ARENA_NULL;
    struct request request;

    if (!nodes->shown || message->node >= nodes->n || nodes->shown[message->node].n > 0 || wire_arena_init(&arena) < 0)
        return;
    if (wire_unpack_request(&arena, message->bytes, message->n_bytes, &request, nodes->why, sizeof(nodes->why)) == 0 &&
        request.type == REQUEST_DECLARE) {
        for (size_t i = 0; i < request.declare.n_params; i++)
            (void)manifest_add(&nodes->shown[message->node], &request.declare.params[i]);
        nodes->n_shown += request.declare.n_params > 0;
    }
    wire_arena_deinit(&arena);
}

/* ---- motions, steps, ranks --------------------------------------------------------------------------------- */

static void hear_evidence(struct nodes *nodes, const struct node_message *message)
{
    struct wire_arena arena = WIRE_ARENA_NULL;
    struct request request;

    if (message->n_bytes == 0) {
        remote_ranks_hear_evidence(nodes->remote_ranks, message->rank, NULL);
        return;
    }
    if (wire_arena_init(&arena) < 0)
        return;
    if (wire_unpack_request(&arena, message->bytes, message->n_bytes, &request, nodes->why, sizeof(nodes->why)) == 0 &&
        request.type == REQUEST_EVIDENCE)
        remote_ranks_hear_evidence(nodes->remote_ranks, message->rank, &request.evidence);
    wire_arena_deinit(&arena);
}

/* A node receives its own LOOK and STACK, too. */
static void hear_look(struct nodes *nodes, const struct node_message *message)
{
    struct job *job = nodes->job;

    if (message->rank >= job->world.size)
        return;
    if (message->kind == NODE_LOOK && job_is_own(job, message->rank))
        look_ask_for_others(job, &job->ranks[message->rank]);
    else if (message->kind == NODE_STACK && !job_is_own(job, message->rank))
        (void)look_answered(job, &job->ranks[message->rank], message->text);
}

/* written: lists the arrays that rank 0 has written, and has the step counts themselves. Return: as
 * exchange_write(). */
static const char *write_window(struct nodes *nodes, const struct exchange_said *said, const uint64_t *written,
                                size_t n)
{
    _cleanup_free_ uint64_t *arrays = calloc(n + 1, sizeof(*arrays));
    const struct state_edits *edits = NULL;
    int r = arrays ? job_window_written(nodes->job, written, n, &edits) : -ENOMEM;
    size_t n_arrays = 0;

    if (r == -ENOENT)
        return "WRITE: no write window is open";
    if (r < 0)
        return "out of memory for what was written in the window";
    for (size_t i = 0; i < n; i++) {
        if ((written[i] & 0xff) == STATE_EDITS_COUNT_FOLLOWS)
            i++;
        else
            arrays[n_arrays++] = written[i];
    }
    return exchange_write(nodes->exchange, said, arrays, n_arrays, edits);
}

static void hear_motion(struct nodes *nodes, const struct node_message *message)
{
    const struct exchange_said said = {
        .tag = message->tag,
        .arrived = message->arrived,
        .parcel = message->parcel,
        .micro_batch = message->micro_batch,
        .pass = message->pass,
        .masks = message->numbers,
        .n_masks = message->n_numbers,
    };
    const char *wrong;

    if (!nodes->connected || !nodes->job->layout)
        return; /* node 0 sends it again in the next generation */
    if (message->kind == NODE_WRITE)
        wrong = write_window(nodes, &said, message->numbers, message->n_numbers);
    else if (message->kind == NODE_EXCHANGE)
        wrong = exchange_parcel(nodes->exchange, &said);
    else if (message->kind == NODE_SPREAD)
        wrong = exchange_spread(nodes->exchange, &said);
    else
        wrong = exchange_gather(nodes->exchange, &said);
    nodes_obeyed(nodes, wrong);
}

static void hear_serve(struct nodes *nodes, const struct node_message *message)
{
    const char *wrong;

    if (!nodes->connected || !nodes->job->layout)
        return; /* node 0 sends it again in the next generation */
    wrong = exchange_serve(nodes->exchange, &(struct exchange_service){.tag = message->tag,
                                                                       .id = message->digest,
                                                                       .node = message->node,
                                                                       .rank = message->rank,
                                                                       .kind = (enum fetch_kind)message->pass,
                                                                       .params = message->numbers,
                                                                       .n_params = message->n_numbers});
    nodes_obeyed(nodes, wrong);
}

/* Accepts the parcel even without an engine, because node 0 relies on that and will send the motion again. */
static void hear_exchange(struct nodes *nodes, const struct node_message *message)
{
    struct parcel *parcel = job_parcel(nodes->job, message->parcel);

    if (parcel && parcel_is_at(parcel, message->micro_batch, message->pass) && parcel_await(parcel))
        collect_take(nodes->job, message->parcel);
    hear_motion(nodes, message);
}

static void hear_withdrawn(struct nodes *nodes, const struct node_message *message)
{
    const struct job *job = nodes->job;

    if (message->node != nodes->self || !nodes->withdraws)
        return;
    nodes->withdraws = false;
    for (uint32_t p = 0; p < job->layout->n_parcels; p++)
        if (parcel_withdraw(&job->work.parcels[p]))
            nodes_ready(nodes, &job->step->reductions[p]);
    job_withdrawn(nodes->job);
}

static void hear_settled(struct nodes *nodes, const struct node_message *message)
{
    const struct parcel *parcel = job_parcel(nodes->job, message->parcel);

    if (!parcel || parcel->state != PARCEL_SUMMED || !parcel_is_at(parcel, message->micro_batch, message->pass))
        return;
    exchange_end_loan(nodes->exchange, message->parcel);
    collect_settled(nodes->job, message->parcel);
}

static void hear_measure(struct nodes *nodes, const struct node_message *message)
{
    struct node_message sum = {.kind = NODE_SUM};
    struct exact_sum squares;

    job_describe_sum(nodes->job, &squares, &sum.finding);
    sum.bytes = (const uint8_t *)&squares;
    sum.n_bytes = sizeof(squares);
    nodes_report(nodes, sum);
}

bool nodes_judge(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                 struct node_message *hold)
{
    struct nodes *nodes = userdata;
    const struct job_request request = {.squares = &merged->squares,
                                        .finding = &merged->finding,
                                        .args = merged->args,
                                        .proceed = merged->proceed,
                                        .pushed_all = merged->pushed_all};

    assert(verdict->n_groups == 0); /* job_judge() appends to nodes->verdict */
    return job_judge(nodes->job, &request, verdict, nodes->verdict, hold);
}

static void hear_back(struct nodes *nodes, const struct node_message *message)
{
    struct job *job = nodes->job;
    bool own = message->node == nodes->self;

    if (!job->layout)
        return;
    if (message->proceed) {
        job->kept.n_all_backs = message->pass;
        job->kept.asks_all_back = false;
        job_all_are_back(job, !nodes->holds_back);
        remote_ranks_repeat(nodes->remote_ranks);
    }
    if (own || message->proceed) {
        nodes->said_request &= job->phase == JOB_WINDOW; /* an open window continues */
        nodes->holds_back = message->forget;             /* if so, an abort follows, which ends this */
        nodes->back_waits = false;
    }
    if (own && message->forget)
        job_is_back_late(job, &job->ranks[nodes->back]);
}

static void hear_commit(struct nodes *nodes, const struct node_message *message)
{
    nodes->commits = true;
    if (nodes->updated)
        nodes_commit(nodes);
}

static void hear_closed(struct nodes *nodes, const struct node_message *message)
{
    nodes->closes = nodes->job->phase == JOB_COMMITTING_WINDOW || window_stores(nodes->job);
    if (!nodes->closes || nodes->stored)
        nodes_close(nodes);
}

static void hear_aborted(struct nodes *nodes, const struct node_message *message)
{
    nodes_end_request(nodes);
    nodes->withdraws = false;
    nodes->n_passed = 0;
    if (nodes->job->phase != JOB_UPDATING) /* else the abort is about the next step */
        exchange_end_loans(nodes->exchange);
    job_aborted(nodes->job, message);
}

/* Refuses the job if this GPU room would give another layout than this node already has. Return: true if refused. */
static bool refuse_other_layout(struct nodes *nodes, enum config_gpu_room room)
{
    static const char why[] = "another node's daemon was started anew, and its ranks need other buckets";
    const struct config *config = nodes->job->config;
    bool is_large = config->zero.gpu_room != CONFIG_GPU_ROOM_NONE;

    if (!config_chooses_bucket(config) || is_large == (room != CONFIG_GPU_ROOM_NONE))
        return false;
    nodes_unformed(nodes, 0, why);
    drop_begin(nodes->job, 0, why);
    return true;
}

/* This node may already have formed its part, before another node lost its part. */
static void hear_form(struct nodes *nodes, const struct node_message *message)
{
    enum config_gpu_room room = MIN(message->pass, (uint32_t)CONFIG_GPU_ROOM_MICRO_BATCH);
    const struct job *job = nodes->job;

    if (job->phase != JOB_INITIALISING) {
        job_form_now(nodes->job, message->text, room);
        return;
    }
    if (refuse_other_layout(nodes, room))
        return;
    nodes_formed(nodes);
    if (config_loads(job->config))
        nodes_loaded(nodes, job->run.was_loaded, job->state->progress.epoch, job->run.loaded_digest);
    if (job->kept.given_weights && nodes->leader)
        nodes_have_weights(nodes);
}

/* Begins training. Called when all nodes have the initial weights. */
void nodes_train(struct nodes *nodes)
{
    nodes->trains = false;
    exchange_spread_is_over(nodes->exchange);
    executor_empty(nodes->job->executor);
    job_train(nodes->job);
}

/*
 * Loads an older checkpoint, if another node could not read the loaded one. Otherwise continues, because all nodes
 * agree on the loaded checkpoint, or on none.
 */
static void hear_load(struct nodes *nodes, const struct node_message *message)
{
    struct job *job = nodes->job;

    nodes->load_tag = message->tag;
    if (message->forget)
        resume_older(job, message->digest);
    else if (job->phase == JOB_RESERVING)
        resume_is_agreed(job);
    else if (message->proceed && job->phase == JOB_INITIALISING)
        nodes_resumed(nodes);
}

static void hear_refuse(struct nodes *nodes, const struct node_message *message)
{
    if (message->node != 0 && message->node == nodes->self)
        return; /* the run that node 0 refuses is not this daemon's */
    if (message->proceed) {
        nodes_form_anew(nodes, message->text);
        return;
    }
    nodes_declared(nodes, false); /* a declaration that crossed the message is refused, too */
    if (message->forget) {
        drop_for_next(nodes->job, message->text);
        return;
    }
    if (message->has_rank && (message->rank == nodes->self || nodes->said_unformed))
        return; /* this node has reported the failure itself */
    drop_begin(nodes->job, (unsigned)message->tag, message->text);
    nodes_forget_shown(nodes);
}

/* ---- messages that call one verb ------------------------------------------------------------------------- */

static void hear_rank(struct nodes *nodes, const struct node_message *message)
{
    remote_ranks_hear(nodes->remote_ranks, message);
}

static void hear_train(struct nodes *nodes, const struct node_message *message)
{
    nodes_train(nodes);
}

static void hear_norm(struct nodes *nodes, const struct node_message *message)
{
    nodes_end_request(nodes);
    job_norm_is(nodes->job, message->norm);
}

static void hear_decided(struct nodes *nodes, const struct node_message *message)
{
    nodes->ends = nodes->ends && nodes->job->phase == JOB_UPDATING;
    job_carry_out(nodes->job, &message->verdict);
}

static void hear_hold(struct nodes *nodes, const struct node_message *message)
{
    nodes_end_request(nodes);
    job_hold(nodes->job, message);
}

static void hear_open(struct nodes *nodes, const struct node_message *message)
{
    nodes->ends = false;
    nodes_end_request(nodes);
    job_window_open(nodes->job);
}

static void hear_store(struct nodes *nodes, const struct node_message *message)
{
    job_window_store(nodes->job);
}

static void hear_save(struct nodes *nodes, const struct node_message *message)
{
    nodes->said_want_save = false;
    save_take(nodes->job, message->step, message->parcel, message->tag);
}

static void hear_publish(struct nodes *nodes, const struct node_message *message)
{
    save_publish(nodes->job, message->tag);
}

static void hear_save_end(struct nodes *nodes, const struct node_message *message)
{
    nodes->said_want_save = false; /* the save that this node wanted may be this one */
    if (message->tag)
        save_end(nodes->job, message->tag, message->text);
    if (!*message->text)
        save_was_made(nodes->job, message->digest, message->parcel);
}

static void hear_want_squares(struct nodes *nodes, const struct node_message *message)
{
    nodes_obeyed(nodes, param_norm_hear_question(nodes, message));
}

static void hear_squares(struct nodes *nodes, const struct node_message *message)
{
    nodes_obeyed(nodes, param_norm_hear_answer(nodes, message));
}

static void hear_stop(struct nodes *nodes, const struct node_message *message)
{
    nodes_hear_stop(nodes, message->kind);
}

/* ---- the table ------------------------------------------------------------------------------------------- */

#define IN(phase) (1U << JOB_##phase)

enum {
    IN_STEP = IN(TRAINING) | IN(WINDOW),
    IN_ABORTABLE = IN_STEP | IN(ABORTING) | IN(UPDATING) | IN(COMMITTING_WINDOW),
};

/*
 * phases: the phases of the job in which the message is valid; 0: all. In other phases the job cannot act on the
 * message, or has already done so. is_of_attempt: the message is ignored if its step or attempt is over. Only node 0
 * receives kinds that are not listed.
 */
static const struct {
    void (*hear)(struct nodes *nodes, const struct node_message *message);
    unsigned phases;
    bool is_of_attempt;
} orders[NODE_N_KINDS] = {
    [NODE_FORM] = {hear_form},
    [NODE_SHOW] = {hear_show},
    [NODE_MANIFEST] = {hear_manifest},
    [NODE_REFUSE] = {hear_refuse},
    [NODE_ENGINE] = {nodes_hear_engine},
    [NODE_VALUE] = {nodes_hear_value},
    [NODE_LOAD] = {hear_load},
    [NODE_TRAIN] = {hear_train, IN(INITIALISING)},
    [NODE_RANK] = {hear_rank},
    [NODE_EVIDENCE] = {hear_evidence},
    [NODE_LOOK] = {hear_look},
    [NODE_STACK] = {hear_look},
    [NODE_BACK] = {hear_back},
    [NODE_SERVE] = {hear_serve},
    [NODE_WANT_SQUARES] = {hear_want_squares},
    [NODE_SQUARES] = {hear_squares},
    [NODE_SAVE] = {hear_save},
    [NODE_PUBLISH] = {hear_publish},
    [NODE_SAVE_END] = {hear_save_end},
    [NODE_WANT_ENDED] = {hear_stop},
    [NODE_MAY_STOP] = {hear_stop},
    [NODE_EXCHANGE] = {hear_exchange, IN_STEP | IN(ABORTING), .is_of_attempt = true},
    [NODE_SETTLED] = {hear_settled, IN_STEP | IN(ABORTING), .is_of_attempt = true},
    [NODE_WITHDRAWN] = {hear_withdrawn, IN_STEP, .is_of_attempt = true},
    [NODE_MEASURE] = {hear_measure, IN_STEP, .is_of_attempt = true},
    [NODE_NORM] = {hear_norm, IN_STEP},
    [NODE_HOLD] = {hear_hold, IN_STEP},
    [NODE_DECIDED] = {hear_decided, IN(TRAINING) | IN(UPDATING)},
    [NODE_COMMIT] = {hear_commit, IN(UPDATING)},
    [NODE_ABORTED] = {hear_aborted, IN_ABORTABLE},
    [NODE_OPEN] = {hear_open},
    [NODE_STORE] = {hear_store},
    [NODE_CLOSED] = {hear_closed},
    [NODE_SPREAD] = {hear_motion, IN(INITIALISING)},
    [NODE_GATHER] = {hear_motion, IN(UPDATING) | IN(COMMITTING_WINDOW)},
    [NODE_WRITE] = {hear_motion},
};

static bool is_stale(const struct job *job, const struct node_message *message)
{
    return orders[message->kind].is_of_attempt &&
           (!job->layout || message->step != job->ledger.step || message->attempt != job->ledger.attempt);
}

static bool is_in_place(const struct nodes *nodes, enum node_kind kind)
{
    const struct job *job = nodes->job;
    unsigned phases = orders[kind].phases;

    if (phases && !(phases & 1U << job->phase))
        return false;
    if (kind == NODE_DECIDED) /* a node asks when all its parcels are reduced; DECIDED may be sent twice */
        return job->phase == JOB_UPDATING || (nodes->said_request && job->work.n_under_way == 0);
    if (kind == NODE_COMMIT || kind == NODE_GATHER)
        return !(job->phase == JOB_UPDATING && nodes->ends);
    return true;
}

const char *nodes_obey(struct nodes *nodes, const struct node_message *message, const uint8_t *packed, size_t n_bytes)
{
    const char *name = node_kind_name(message->kind);

    assert((unsigned)message->kind < NODE_N_KINDS); /* node_unpack() refuses other kinds */
    if (is_stale(nodes->job, message))
        return NULL;
    if (!orders[message->kind].hear || !is_in_place(nodes, message->kind)) {
        snprintf(nodes->why, sizeof(nodes->why), "%s, which %s", name,
                 orders[message->kind].hear ? "has no place here now" : "only node 0 hears");
        return nodes->why;
    }
    (void)failpoint_at(name, "heard");
    nodes_record(nodes, message, packed, n_bytes);
    orders[message->kind].hear(nodes, message);
    job_todo(nodes->job);
    job_settle(nodes->job); /* each message is a separate event */
    (void)failpoint_at(name, "obeyed");
    return NULL;
}
