/* SPDX-License-Identifier: Apache-2.0 */

#include "daemon/nodes.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/base.h"
#include "daemon/cause.h"
#include "daemon/devices.h"
#include "daemon/failpoint.h"
#include "daemon/job.h"
#include "daemon/log.h"
#include "daemon/mirror.h"
#include "daemon/param-norm.h"
#include "daemon/rewrite.h"

struct packet {
    struct packet *next;
    bool report; /* to the leader; else from it */
    size_t n_bytes;
    uint8_t data[];
};

struct nodes {
    struct job *job;
    struct nodes_ops ops;
    unsigned n, self;
    struct leader *leader; /* node 0's */
    struct exchange *exchange;
    struct packet *first, **last;
    struct wire_arena heard, said; /* what is said while something is heard needs room of its own */
    uint8_t *buffer;               /* NODE_MESSAGE_MAX_BYTES */
    uint32_t generation;
    bool connected;               /* all engines of the generation are */
    bool has_engine, has_devices; /* that of this node's host memory is, that of its GPUs */
    bool said_declared, said_unformed, said_request;
    bool withdraws;   /* and node 0 has not answered */
    bool holds_back;  /* of BACK, until it is answered */
    unsigned back;    /* the rank */
    uint64_t *passed; /* parcels, of passed_micro_batch: reported together */
    uint32_t n_passed, passed_micro_batch;
    uint64_t *masks;            /* scratch, per part of the largest parcel */
    struct wire_hyper *verdict; /* node 0: groups of the last one */
    struct manifest *shown;     /* per node, after SHOW; NULL: none are shown */
    unsigned n_shown;
    char why[640]; /* room for what an engine says */
};

/* ---- life ---------------------------------------------------------------------------------------------- */

static void leader_says(void *userdata, const struct node_message *message);
static bool leader_judges(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                          struct node_message *hold);
static void leader_complains(void *userdata, unsigned node, const char *why);
static void parcel_is_moved(void *userdata, uint64_t tag, uint32_t parcel);

static int give_order(void *userdata, const struct engine_order *order)
{
    struct nodes *nodes = userdata;

    return nodes->ops.order(nodes->ops.userdata, order);
}

static void ask_fetch(void *userdata, const struct exchange_service *asked);

static int share(void *userdata, enum exchange_segment number, const struct segment *segment)
{
    struct nodes *nodes = userdata;

    /* Also to one that is connecting. One that is still to be started is given all that there are then. */
    return nodes->ops.share(nodes->ops.userdata, number, segment);
}

static void cannot_be_done(void *userdata, const char *why);
static void forget_shown(struct nodes *nodes);

static int make_leader(struct nodes *nodes)
{
    unsigned n_sources[LEADER_MAX_NODES];

    for (unsigned i = 0; i < nodes->n; i++)
        n_sources[i] = exchange_n_pieces(nodes->job->config, i);
    return leader_new(
        &nodes->leader,
        &(struct leader_options){
            .n_nodes = nodes->n,
            .n_sources = n_sources,
            .stage = (unsigned)nodes->job->config->zero.stage,
            .partitions_all = config_partitions_all(nodes->job->config),
            .ops = {.say = leader_says, .judge = leader_judges, .complain = leader_complains, .userdata = nodes},
        });
}

int nodes_new(struct nodes **out, struct job *job, const struct nodes_ops *ops)
{
    struct nodes *nodes = calloc(1, sizeof(*nodes));
    const struct exchange_ops exchange_ops = {.order = give_order,
                                              .moved = parcel_is_moved,
                                              .fetch = ask_fetch,
                                              .share = share,
                                              .wrong = cannot_be_done,
                                              .userdata = nodes};
    int r;

    if (!nodes)
        return -ENOMEM;
    nodes->job = job;
    nodes->ops = *ops;
    nodes->n = (unsigned)job->config->world.nodes.n_items;
    nodes->self = job->config->world.node;
    nodes->last = &nodes->first;
    nodes->buffer = malloc(NODE_MESSAGE_MAX_BYTES);
    r = nodes->buffer ? exchange_new(&nodes->exchange, job, &exchange_ops) : -ENOMEM;
    if (r == 0)
        r = wire_arena_init(&nodes->heard);
    if (r == 0)
        r = wire_arena_init(&nodes->said);
    if (r == 0 && nodes->self == 0)
        r = make_leader(nodes);
    if (r < 0) {
        nodes_free(nodes);
        return r;
    }
    *out = nodes;
    return 0;
}

void nodes_free(struct nodes *nodes)
{
    if (!nodes)
        return;
    while (nodes->first) {
        struct packet *packet = nodes->first;

        nodes->first = packet->next;
        free(packet);
    }
    nodes_drop(nodes);
    forget_shown(nodes);
    leader_free(nodes->leader);
    exchange_free(nodes->exchange);
    wire_arena_deinit(&nodes->heard);
    wire_arena_deinit(&nodes->said);
    free(nodes->verdict);
    free(nodes->buffer);
    free(nodes);
}

static const char *address_of(const struct nodes *nodes, unsigned node)
{
    return nodes->job->config->world.nodes.items[node].address;
}

struct exchange *nodes_exchange(struct nodes *nodes)
{
    return nodes->exchange;
}

int nodes_form(struct nodes *nodes)
{
    const struct layout *layout = nodes->job->layout;
    uint32_t most = 0;
    int r;

    for (uint32_t p = 0; p < layout->n_parcels; p++)
        most = MAX(most, layout->parcels[p].n_parts);
    nodes->passed = calloc(layout->n_parcels + 1, sizeof(*nodes->passed));
    nodes->masks = calloc(most + 1, sizeof(*nodes->masks));
    nodes->verdict = calloc(layout->n_groups + 1, sizeof(*nodes->verdict));
    if (!nodes->passed || !nodes->masks || !nodes->verdict)
        return -ENOMEM;
    r = exchange_form(nodes->exchange);
    if (r == 0 && nodes->leader)
        r = leader_form(nodes->leader, layout);
    return r;
}

void nodes_drop(struct nodes *nodes)
{
    if (nodes->leader)
        (void)leader_form(nodes->leader, NULL);
    nodes->ops.stop_engine(nodes->ops.userdata);
    nodes->has_engine = nodes->has_devices = false;
    if (nodes->exchange)
        exchange_drop(nodes->exchange);
    free(steal_ptr(nodes->passed));
    free(steal_ptr(nodes->masks));
    free(steal_ptr(nodes->verdict));
    nodes->n_passed = 0;
    nodes->said_declared = nodes->said_request = nodes->withdraws = nodes->holds_back = nodes->connected = false;
}

/* ---- sending and queueing ------------------------------------------------------------------------------ */

static void enqueue(struct nodes *nodes, bool report, size_t n_bytes)
{
    struct packet *packet = malloc(sizeof(*packet) + n_bytes);

    if (!packet) { /* the step stalls, and that is said; nothing is wrong but the time it takes */
        log_error("out of memory for a message between nodes");
        return;
    }
    *packet = (struct packet){.report = report, .n_bytes = n_bytes};
    memcpy(packet->data, nodes->buffer, n_bytes);
    *nodes->last = packet;
    nodes->last = &packet->next;
    nodes->ops.wake(nodes->ops.userdata);
}

/* Return: bytes in the buffer; 0: it could not be packed. */
static size_t pack(struct nodes *nodes, const struct node_message *message)
{
    int n = node_pack(&nodes->said, message, nodes->buffer, NODE_MESSAGE_MAX_BYTES);

    if (n < 0)
        log_error("the message %s between nodes cannot be packed: %s", node_kind_name(message->kind), strerror(-n));
    return (size_t)MAX(n, 0);
}

static void send_to(struct nodes *nodes, unsigned node, size_t n_bytes)
{
    int r = nodes->ops.send(nodes->ops.userdata, node, nodes->buffer, n_bytes);

    if (r < 0)
        log_error("a message to node %u cannot be kept: %s", node, strerror(-r));
}

static void flush_passed(struct nodes *nodes);

void nodes_report(struct nodes *nodes, struct node_message message)
{
    const struct job *job = nodes->job;
    size_t n;

    if (message.kind != NODE_PASSED)
        flush_passed(nodes);
    message.step = job->layout ? job->ledger.step : 0;
    message.attempt = job->layout ? job->ledger.attempt : 0;
    message.node = nodes->self;
    n = pack(nodes, &message);
    if (n == 0)
        return;
    if (nodes->leader)
        enqueue(nodes, true, n);
    else
        send_to(nodes, 0, n);
}

static void leader_says(void *userdata, const struct node_message *message)
{
    struct nodes *nodes = userdata;
    size_t n = pack(nodes, message);

    if (n == 0)
        return;
    for (unsigned node = 1; node < nodes->n; node++)
        send_to(nodes, node, n);
    enqueue(nodes, false, n);
}

static void leader_complains(void *userdata, unsigned node, const char *why)
{
    (void)userdata;
    log_error("node %u: %s", node, why);
}

/* ---- reports ------------------------------------------------------------------------------------------- */

void nodes_declared(struct nodes *nodes, bool declared)
{
    const struct job *job = nodes->job;

    if (nodes->said_declared == declared)
        return;
    nodes->said_declared = declared;
    nodes->said_unformed &= !declared;
    nodes_report(nodes, (struct node_message){
                            .kind = declared ? NODE_DECLARED : NODE_UNDECLARED,
                            .digest = declared ? manifest_digest(&job->ranks[job->first_rank].manifest) : 0,
                            .text = declared && job->run_id ? job->run_id : "",
                        });
}

void nodes_formed(struct nodes *nodes)
{
    nodes_report(nodes, (struct node_message){.kind = NODE_FORMED});
}

void nodes_unformed(struct nodes *nodes, unsigned code, const char *why)
{
    nodes->said_unformed = code != 0; /* then its ranks are told what */
    nodes_report(nodes, (struct node_message){.kind = NODE_UNFORMED, .tag = code, .text = why});
}

/* ---- manifests that differ ----------------------------------------------------------------------------- */

static void forget_shown(struct nodes *nodes)
{
    for (unsigned i = 0; nodes->shown && i < nodes->n; i++)
        manifest_deinit(&nodes->shown[i]);
    free(steal_ptr(nodes->shown));
    nodes->n_shown = 0;
}

const struct manifest *nodes_manifest(const struct nodes *nodes, unsigned node)
{
    return nodes->shown && nodes->n_shown == nodes->n ? &nodes->shown[node] : NULL;
}

/* One that is too large for a message is not shown: then the text does without. */
static void show_manifest(struct nodes *nodes)
{
    const struct job *job = nodes->job;
    const struct manifest *manifest = &job->ranks[job->first_rank].manifest;
    const struct request request = {.type = REQUEST_DECLARE,
                                    .declare = {.params = manifest->decls, .n_params = manifest->n}};
    _cleanup_free_ uint8_t *bytes = malloc(NODE_MESSAGE_MAX_BYTES);
    int n = bytes ? wire_pack_request(&nodes->said, &request, bytes, NODE_MESSAGE_MAX_BYTES * 3 / 4) : -ENOMEM;

    forget_shown(nodes);
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

void nodes_evidence(struct nodes *nodes, unsigned rank, const struct request_evidence *evidence, uint64_t *digest)
{
    struct request request = {.type = REQUEST_EVIDENCE};
    _cleanup_free_ uint8_t *bytes = evidence ? malloc(NODE_MESSAGE_MAX_BYTES) : NULL;
    uint64_t last = *digest;
    int n = 0;

    if (bytes) {
        request.evidence = *evidence;
        n = MAX(wire_pack_request(&nodes->said, &request, bytes, NODE_MESSAGE_MAX_BYTES * 3 / 4), 0);
    }
    *digest = n > 0 ? XXH3_64bits(bytes, (size_t)n) : 0;
    if (*digest != last)
        nodes_report(nodes,
                     (struct node_message){
                         .kind = NODE_EVIDENCE, .has_rank = true, .rank = rank, .bytes = bytes, .n_bytes = (size_t)n});
}

static void hear_evidence(struct nodes *nodes, const struct node_message *message)
{
    struct wire_arena arena = WIRE_ARENA_NULL;
    struct request request;

    if (message->n_bytes == 0) {
        mirror_hear_evidence(nodes->job->mirror, message->rank, NULL);
        return;
    }
    if (wire_arena_init(&arena) < 0)
        return;
    if (wire_unpack_request(&arena, message->bytes, message->n_bytes, &request, nodes->why, sizeof(nodes->why)) == 0 &&
        request.type == REQUEST_EVIDENCE)
        mirror_hear_evidence(nodes->job->mirror, message->rank, &request.evidence);
    wire_arena_deinit(&arena);
}

void nodes_have_weights(struct nodes *nodes)
{
    nodes_report(nodes, (struct node_message){.kind = NODE_WEIGHTS});
}

/* Nobody has asked for it. */
static void give_up(struct nodes *nodes, const char *why)
{
    nodes_report(nodes, (struct node_message){.kind = NODE_ABORT, .reason = why});
}

void nodes_asked(struct nodes *nodes)
{
    size_t n = job_bits_bytes(nodes->job);
    _cleanup_free_ uint8_t *any = malloc(n), *all = malloc(n);
    struct node_message message = {.kind = NODE_ASKED, .pushed_any = any, .pushed_all = all};

    if (nodes->said_request)
        return;
    nodes->said_request = true;
    if (!any || !all) {
        give_up(nodes, "out of memory for the list of pushed parameters");
        return;
    }
    job_find_pushed(nodes->job, any, all);
    message.n_any_bytes = message.n_all_bytes = n;
    job_describe_request(nodes->job, &message, nodes->verdict);
    nodes_report(nodes, message);
}

void nodes_want_norm(struct nodes *nodes)
{
    if (nodes->said_request)
        return;
    nodes->said_request = true;
    nodes_report(nodes, (struct node_message){.kind = NODE_WANT_NORM});
}

void nodes_want_window(struct nodes *nodes)
{
    if (nodes->said_request)
        return;
    nodes->said_request = true;
    nodes_report(nodes, (struct node_message){.kind = NODE_WINDOW});
}

void nodes_end_window(struct nodes *nodes, const struct rewrite *rewrite, bool forget)
{
    size_t n = rewrite ? rewrite_list(rewrite, NULL) : 0;
    _cleanup_free_ uint64_t *numbers = calloc(n + 1, sizeof(*numbers));

    if (nodes->said_request)
        return;
    nodes->said_request = true;
    if (!numbers) {
        give_up(nodes, "out of memory for the list of what was written");
        return;
    }
    if (rewrite)
        rewrite_list(rewrite, numbers);
    nodes_report(nodes,
                 (struct node_message){.kind = NODE_WINDOW_END, .numbers = numbers, .n_numbers = n, .forget = forget});
}

void nodes_stored(struct nodes *nodes)
{
    nodes_report(nodes, (struct node_message){.kind = NODE_STORED});
}

void nodes_updated(struct nodes *nodes)
{
    nodes_report(nodes, (struct node_message){.kind = NODE_UPDATED});
}

void nodes_abort(struct nodes *nodes, int64_t rank, const char *why, const struct diagnostic *reason)
{
    nodes_report(nodes, (struct node_message){
                            .kind = NODE_ABORT,
                            .has_rank = rank >= 0,
                            .rank = (uint32_t)MAX(rank, (int64_t)0),
                            .text = why,
                            .reason = reason ? reason->text : "",
                            .cause_class = reason ? reason->cause_class : "",
                        });
}

void nodes_back(struct nodes *nodes, unsigned rank, bool all, bool late)
{
    if (!late && (nodes->holds_back || (!nodes->said_request && !all)))
        return;
    nodes->holds_back = true;
    nodes->back = rank;
    nodes_report(nodes, (struct node_message){.kind = NODE_BACK, .proceed = all, .forget = late});
}

bool nodes_hold_back(const struct nodes *nodes)
{
    return nodes->holds_back;
}

/* What this node has asked for has come, or is void: it may ask again. */
static void end_request(struct nodes *nodes)
{
    nodes->said_request = nodes->holds_back = false;
}

/* Return: whether every local rank has pushed every part. */
static bool fill_masks(struct nodes *nodes, const struct reduction *reduction)
{
    const struct step *step = reduction->step;
    uint32_t n_parts = step->layout->parcels[reduction->parcel].n_parts;
    bool whole = true;

    /* Between GPUs each rank's gradient travels by itself. */
    for (uint32_t k = 0; step->devices && k < n_parts; k++) {
        nodes->masks[k] = reduction->masks[k];
        whole &= (unsigned)__builtin_popcountll(reduction->masks[k]) == step->n_local;
    }
    for (uint32_t k = 0; !step->devices && k < n_parts; k++) {
        nodes->masks[k] = 0;
        for (unsigned i = 0; i < step->n_pieces; i++) {
            unsigned first = step->pieces[i].first - step->first_local;
            uint64_t ranks = ((UINT64_C(2) << (step->pieces[i].n - 1)) - 1) << first;
            bool present = reduction->masks[k] & ranks;

            nodes->masks[k] |= (uint64_t)present << i;
            whole &= present;
        }
    }
    return whole;
}

void nodes_ready(struct nodes *nodes, const struct reduction *reduction)
{
    bool whole = fill_masks(nodes, reduction);

    nodes_report(nodes, (struct node_message){
                            .kind = NODE_READY,
                            .parcel = reduction->parcel,
                            .micro_batch = reduction->micro_batch,
                            .pass = reduction->pass,
                            .numbers = nodes->masks,
                            .n_numbers = whole ? 0 : nodes->job->layout->parcels[reduction->parcel].n_parts,
                        });
}

void nodes_withdraw(struct nodes *nodes)
{
    if (nodes->withdraws)
        return;
    nodes->withdraws = true;
    nodes_report(nodes, (struct node_message){.kind = NODE_WITHDRAW});
}

bool nodes_withdraws(const struct nodes *nodes)
{
    return nodes->withdraws;
}

static void flush_passed(struct nodes *nodes)
{
    uint32_t n = nodes->n_passed;

    if (n == 0)
        return;
    nodes->n_passed = 0;
    nodes_report(nodes, (struct node_message){.kind = NODE_PASSED,
                                              .micro_batch = nodes->passed_micro_batch,
                                              .numbers = nodes->passed,
                                              .n_numbers = n});
}

void nodes_passed(struct nodes *nodes, uint32_t parcel, uint32_t micro_batch)
{
    if (nodes->n_passed == nodes->job->layout->n_parcels || nodes->passed_micro_batch != micro_batch)
        flush_passed(nodes);
    nodes->passed_micro_batch = micro_batch;
    nodes->passed[nodes->n_passed++] = parcel;
    nodes->ops.wake(nodes->ops.userdata); /* which reports them together */
}

static void parcel_is_moved(void *userdata, uint64_t tag, uint32_t parcel)
{
    nodes_report(userdata, (struct node_message){.kind = NODE_MOVED, .tag = tag, .parcel = parcel});
}

static void ask_fetch(void *userdata, const struct exchange_service *asked)
{
    nodes_report(userdata, (struct node_message){.kind = NODE_FETCH,
                                                 .digest = asked->id,
                                                 .pass = asked->kind,
                                                 .rank = asked->rank,
                                                 .numbers = asked->params,
                                                 .n_numbers = asked->n_params});
}

/* ---- the engine ---------------------------------------------------------------------------------------- */

enum { VALUE_OF_DEVICES = 1 }; /* tag of VALUE: of the engines of GPUs */

/* The engines of the generation are of no more use. */
static void end_generation(struct nodes *nodes)
{
    nodes->connected = nodes->has_engine = nodes->has_devices = false;
    if (nodes->job->devices)
        devices_stop(nodes->job->devices); /* first: what it has under way is forgotten then */
    exchange_broken(nodes->exchange);
}

static void engine_is_broken(struct nodes *nodes, const char *why)
{
    end_generation(nodes);
    nodes_report(nodes, (struct node_message){.kind = NODE_BROKEN, .generation = nodes->generation, .text = why});
}

/* All nodes are told a sentence around this node's name. */
static void break_engine(struct nodes *nodes, const char *before, const char *after, const char *what)
{
    snprintf(nodes->why, sizeof(nodes->why), "%snode %u (%s) %s%s", before, nodes->self, address_of(nodes, nodes->self),
             after, what);
    engine_is_broken(nodes, nodes->why);
}

static void cannot_be_done(void *userdata, const char *why)
{
    break_engine(userdata, "", "cannot do what node 0 says: ", why);
}

/* wrong: NULL, or why it could not be. */
static void obeyed(struct nodes *nodes, const char *wrong)
{
    if (wrong)
        break_engine(nodes, "", "cannot do what node 0 says: ", wrong);
}

static void hear_engine(struct nodes *nodes, const struct node_message *message)
{
    char why[256];

    if (message->generation <= nodes->generation || !nodes->job->layout)
        return;
    nodes->generation = message->generation;
    end_generation(nodes);
    if (message->text[0])
        job_note_engine(nodes->job, nodes->generation, message->text);
    if (nodes->ops.start_engine(nodes->ops.userdata, nodes->generation, exchange_segments(nodes->exchange), why,
                                sizeof(why)) < 0)
        break_engine(nodes, "", "has no engine: ", why);
    else if (nodes->job->devices)
        devices_next(nodes->job->devices, nodes->generation);
    job_settle(nodes->job); /* an abort may have waited for what is forgotten */
}

static void is_connected(struct nodes *nodes)
{
    size_t n = exchange_list_arrived(nodes->exchange, NULL, 0);
    _cleanup_free_ uint64_t *tags = calloc(n + 1, sizeof(*tags));

    if (!tags) {
        engine_is_broken(nodes, "out of memory");
        return;
    }
    nodes->connected = true;
    (void)exchange_list_arrived(nodes->exchange, tags, n);
    nodes_report(nodes, (struct node_message){
                            .kind = NODE_CONNECTED, .generation = nodes->generation, .numbers = tags, .n_numbers = n});
}

static void try_connected(struct nodes *nodes)
{
    if (nodes->has_engine && (nodes->has_devices || !nodes->job->devices))
        is_connected(nodes);
}

void nodes_engine_ready(struct nodes *nodes)
{
    nodes->has_engine = true;
    try_connected(nodes);
}

void nodes_devices_ready(struct nodes *nodes)
{
    nodes->has_devices = true;
    try_connected(nodes);
}

void nodes_engine_done(struct nodes *nodes, const struct engine_done *done)
{
    exchange_done(nodes->exchange, done);
    job_settle(nodes->job);
}

static void put(struct nodes *nodes, uint64_t tag, const char *key, const uint8_t *value, size_t n_bytes)
{
    nodes_report(nodes, (struct node_message){.kind = NODE_VALUE,
                                              .generation = nodes->generation,
                                              .tag = tag,
                                              .text = key,
                                              .bytes = value,
                                              .n_bytes = n_bytes});
}

void nodes_engine_put(struct nodes *nodes, const char *key, const uint8_t *value, size_t n_bytes)
{
    put(nodes, 0, key, value, n_bytes);
}

void nodes_devices_put(struct nodes *nodes, const char *key, const uint8_t *value, size_t n_bytes)
{
    put(nodes, VALUE_OF_DEVICES, key, value, n_bytes);
}

void nodes_devices_failed(struct nodes *nodes, const char *why)
{
    break_engine(nodes, "on ", "", why);
    job_settle(nodes->job);
}

static void hear_value(struct nodes *nodes, const struct node_message *message)
{
    if (message->generation != nodes->generation || message->node == nodes->self)
        return;
    if (message->tag == VALUE_OF_DEVICES && nodes->job->devices)
        devices_value(nodes->job->devices, message->text, message->bytes, message->n_bytes);
    else if (message->tag == 0)
        (void)nodes->ops.value(nodes->ops.userdata, message->text, message->bytes, message->n_bytes);
}

void nodes_engine_failed(struct nodes *nodes, const struct engine_failure *failure)
{
    bool started = failure->kind != ENGINE_NOT_STARTED;

    break_engine(nodes, started ? "the engine of " : "",
                 !started                       ? "has no engine: "
                 : failure->kind == ENGINE_SAID ? "says: "
                                                : "",
                 failure->what);
    job_settle(nodes->job);
}

/* ---- what node 0 says ---------------------------------------------------------------------------------- */

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
        return; /* said again in the next generation */
    if (message->kind == NODE_WRITE)
        wrong = job_window_write(nodes->job, &said, message->numbers, message->n_numbers);
    else if (message->kind == NODE_EXCHANGE)
        wrong = exchange_parcel(nodes->exchange, &said);
    else if (message->kind == NODE_SPREAD)
        wrong = exchange_spread(nodes->exchange, &said);
    else
        wrong = exchange_gather(nodes->exchange, &said);
    obeyed(nodes, wrong);
}

static void hear_serve(struct nodes *nodes, const struct node_message *message)
{
    const char *wrong;

    if (!nodes->connected || !nodes->job->layout)
        return; /* said again in the next generation */
    wrong = exchange_serve(nodes->exchange, &(struct exchange_service){.tag = message->tag,
                                                                       .id = message->digest,
                                                                       .node = message->node,
                                                                       .rank = message->rank,
                                                                       .kind = (enum exchange_kind)message->pass,
                                                                       .params = message->numbers,
                                                                       .n_params = message->n_numbers});
    obeyed(nodes, wrong);
}

/* Also without an engine: node 0 counts on it from now on, and will say the motion again. */
static void hear_exchange(struct nodes *nodes, const struct node_message *message)
{
    if (exchange_await(nodes->exchange, message->parcel, message->micro_batch, message->pass))
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
        if (exchange_withdraw(nodes->exchange, p))
            nodes_ready(nodes, &job->step->reductions[p]);
    job_withdrawn(nodes->job);
}

static void hear_settled(struct nodes *nodes, const struct node_message *message)
{
    if (exchange_settled(nodes->exchange, message->parcel, message->micro_batch, message->pass))
        collect_settled(nodes->job, message->parcel);
}

static void hear_measure(struct nodes *nodes)
{
    struct node_message message = {.kind = NODE_SUM};
    struct exact_sum squares;

    job_describe_sum(nodes->job, &squares, &message.finding);
    message.bytes = (const uint8_t *)&squares;
    message.n_bytes = sizeof(squares);
    nodes_report(nodes, message);
}

static bool leader_judges(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                          struct node_message *hold)
{
    struct nodes *nodes = userdata;

    return job_judge(nodes->job, merged, verdict, nodes->verdict, hold);
}

static void hear_back(struct nodes *nodes, const struct node_message *message)
{
    struct job *job = nodes->job;
    bool own = message->node == nodes->self;

    if (!job->layout)
        return;
    if (message->proceed)
        job_all_are_back(job, !nodes->holds_back);
    if (own || message->proceed) {
        end_request(nodes);
        nodes->holds_back = message->forget; /* until the abort that comes of it */
    }
    if (own && message->forget)
        job_is_back_late(job, &job->ranks[nodes->back]);
}

static void hear_commit(struct nodes *nodes)
{
    end_request(nodes);
    exchange_forget(nodes->exchange);
    job_commit(nodes->job);
}

static void hear_aborted(struct nodes *nodes, const struct node_message *message)
{
    end_request(nodes);
    nodes->withdraws = false;
    nodes->n_passed = 0;
    exchange_forget(nodes->exchange);
    job_aborted(nodes->job, message);
}

/* What belongs to a step that is not the open one is void: an abort has overtaken it, and what it was about. */
static bool is_stale(const struct nodes *nodes, const struct node_message *message)
{
    const struct job *job = nodes->job;

    switch (message->kind) {
    case NODE_MEASURE:
    case NODE_SETTLED:
    case NODE_EXCHANGE:
    case NODE_WITHDRAWN:
        return !job->layout || message->step != job->ledger.step || message->attempt != job->ledger.attempt;
    default:
        return false;
    }
}

/* Is the job where node 0 would say that? Elsewhere there is nothing to do it with, or it is under way. */
static bool is_in_place(const struct nodes *nodes, enum node_kind kind)
{
    const struct job *job = nodes->job;
    bool step = job->phase == JOB_TRAINING || job->phase == JOB_WINDOW;

    switch (kind) {
    case NODE_SPREAD:
    case NODE_TRAIN:
        return job->phase == JOB_INITIALISING;
    case NODE_EXCHANGE:
    case NODE_SETTLED:
        return step || job->phase == JOB_ABORTING;
    case NODE_MEASURE:
    case NODE_NORM:
    case NODE_HOLD:
    case NODE_WITHDRAWN:
        return step;
    case NODE_DECIDED: /* a node asks when all that it has is reduced */
        return job->phase == JOB_TRAINING && nodes->said_request && job->n_under_way == 0;
    case NODE_GATHER:
        return (job->phase == JOB_UPDATING && !job->aborts_next) || job->phase == JOB_COMMITTING_WINDOW;
    case NODE_COMMIT:
        return job->phase == JOB_UPDATING && !job->aborts_next;
    case NODE_ABORTED:
        return step || job->phase == JOB_ABORTING || job->phase == JOB_UPDATING;
    default:
        return true;
    }
}

static void hear_refuse(struct nodes *nodes, const struct node_message *message)
{
    if (message->node != 0 && message->node == nodes->self)
        return;                   /* of a run that this daemon has never heard of */
    nodes_declared(nodes, false); /* what was declared while it was on its way is refused, too */
    if (message->has_rank && (message->rank == nodes->self || nodes->said_unformed))
        return; /* it was this node, or this one too, and it has said so */
    job_give_up(nodes->job, (unsigned)message->tag, message->text);
    forget_shown(nodes);
}

/* Forming, engines, ranks, what is fetched. Return: whether it was of these. */
static bool obey_around(struct nodes *nodes, const struct node_message *message)
{
    struct job *job = nodes->job;

    switch (message->kind) {
    case NODE_FORM:
        job_form_now(job, message->text);
        break;
    case NODE_SHOW:
        show_manifest(nodes);
        break;
    case NODE_MANIFEST:
        hear_manifest(nodes, message);
        break;
    case NODE_REFUSE:
        hear_refuse(nodes, message);
        break;
    case NODE_ENGINE:
        hear_engine(nodes, message);
        break;
    case NODE_VALUE:
        hear_value(nodes, message);
        break;
    case NODE_RANK:
        mirror_hear(job->mirror, message);
        break;
    case NODE_EVIDENCE:
        hear_evidence(nodes, message);
        break;
    case NODE_BACK:
        hear_back(nodes, message);
        break;
    case NODE_SERVE:
        hear_serve(nodes, message);
        break;
    case NODE_WANT_SQUARES:
        obeyed(nodes, param_norm_hear_question(job, message));
        break;
    case NODE_SQUARES:
        obeyed(nodes, param_norm_hear_answer(job, message));
        break;
    case NODE_TRAIN:
        job_train(job);
        break;
    default:
        return false;
    }
    return true;
}

/* A step, a write window, and what moves for them. Return: whether it was of these. */
static bool obey_within(struct nodes *nodes, const struct node_message *message)
{
    struct job *job = nodes->job;

    switch (message->kind) {
    case NODE_EXCHANGE:
        hear_exchange(nodes, message);
        break;
    case NODE_WITHDRAWN:
        hear_withdrawn(nodes, message);
        break;
    case NODE_SPREAD:
    case NODE_GATHER:
    case NODE_WRITE:
        hear_motion(nodes, message);
        break;
    case NODE_OPEN:
        end_request(nodes);
        job_window_open(job);
        break;
    case NODE_STORE:
        job_window_store(job);
        break;
    case NODE_CLOSED:
        end_request(nodes);
        job_window_closed(job);
        break;
    case NODE_SETTLED:
        hear_settled(nodes, message);
        break;
    case NODE_MEASURE:
        hear_measure(nodes);
        break;
    case NODE_NORM:
        end_request(nodes);
        job_norm_is(job, message->norm);
        break;
    case NODE_DECIDED:
        job_carry_out(job, &message->verdict);
        break;
    case NODE_HOLD:
        end_request(nodes);
        job_hold(job, message);
        break;
    case NODE_COMMIT:
        hear_commit(nodes);
        break;
    case NODE_ABORTED:
        hear_aborted(nodes, message);
        break;
    default:
        return false;
    }
    return true;
}

/* Return: NULL, or why it makes no sense. */
static const char *obey(struct nodes *nodes, const struct node_message *message)
{
    if (is_stale(nodes, message))
        return NULL;
    if (!is_in_place(nodes, message->kind)) {
        snprintf(nodes->why, sizeof(nodes->why), "%s, which has no place here now", node_kind_name(message->kind));
        return nodes->why;
    }
    if (!obey_within(nodes, message) && !obey_around(nodes, message)) {
        snprintf(nodes->why, sizeof(nodes->why), "%s, which only node 0 hears", node_kind_name(message->kind));
        return nodes->why;
    }
    job_settle(nodes->job);
    return NULL;
}

/* ---- serving ------------------------------------------------------------------------------------------- */

const char *nodes_hear(struct nodes *nodes, unsigned node, const void *data, size_t n_bytes)
{
    struct node_message message;
    int r = node_unpack(&nodes->heard, data, n_bytes, &message, nodes->why, sizeof(nodes->why));

    if (r < 0)
        return "out of memory";
    if (r == WIRE_E_INVALID)
        return nodes->why;
    if (nodes->leader) {
        message.node = node;
        leader_hear(nodes->leader, node, &message);
        return NULL;
    }
    return obey(nodes, &message);
}

static void serve(struct nodes *nodes, const struct packet *packet)
{
    struct node_message message;
    const char *wrong;
    int r = node_unpack(&nodes->heard, packet->data, packet->n_bytes, &message, nodes->why, sizeof(nodes->why));

    if (r != 0) {
        log_error("a message of this node's own cannot be read: %s", r < 0 ? strerror(-r) : nodes->why);
        return;
    }
    if (packet->report) {
        leader_hear(nodes->leader, 0, &message);
        return;
    }
    wrong = obey(nodes, &message);
    if (wrong)
        log_error("node 0 said %s", wrong);
}

void nodes_serve(struct nodes *nodes)
{
    flush_passed(nodes);
    while (nodes->first) {
        _cleanup_free_ struct packet *packet = nodes->first;

        nodes->first = packet->next;
        if (!nodes->first)
            nodes->last = &nodes->first;
        serve(nodes, packet);
        flush_passed(nodes);
    }
}

void nodes_lose(struct nodes *nodes, unsigned node)
{
    snprintf(nodes->why, sizeof(nodes->why),
             "the daemon of node %u (%s) was started anew, and what the one before it held of the run is gone", node,
             address_of(nodes, node));
    if (nodes->leader) {
        leader_lose(nodes->leader, node, nodes->why);
        return;
    }
    nodes->generation = 0; /* a new leader counts from there */
    nodes->said_declared = false;
    if (nodes->job->phase != JOB_WAITING)
        job_give_up(nodes->job, 0, nodes->why);
    job_settle(nodes->job);
}

struct nodes_status nodes_status(const struct nodes *nodes)
{
    return (struct nodes_status){
        .n_nodes = nodes->n,
        .node = nodes->self,
        .generation = nodes->generation,
        .connected = nodes->connected,
        .totals = exchange_totals(nodes->exchange),
        .waits_for = nodes->leader ? leader_waits_for(nodes->leader) : 0,
        .waits_to = nodes->leader ? leader_waits_to(nodes->leader) : NULL,
    };
}
