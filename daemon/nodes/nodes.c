/* SPDX-License-Identifier: Apache-2.0 */

/* This node as one of several: queued messages, the forming of a job, and new engines after a link was down. */

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/log.h"
#include "core/budget/exchange-plan.h"
#include "daemon/job/drop.h"
#include "daemon/job/job.h"
#include "daemon/job/model/model.h"
#include "daemon/nodes/nodes-inside.h"
#include "daemon/nodes/param-norm.h"
#include "daemon/nodes/remote-ranks.h"
#include "daemon/step/executor.h"

/* ---- life ---------------------------------------------------------------------------------------------- */
static int give_order(void *userdata, const struct engine_order *order)
{
    struct nodes *nodes = userdata;

    return nodes->ops.order(nodes->ops.userdata, order);
}

static int pass_segment(void *userdata, enum exchange_segment number, const struct segment *segment)
{
    struct nodes *nodes = userdata;

    /* A connecting engine gets the segment too. A later engine gets all segments when it starts. */
    return nodes->ops.share(nodes->ops.userdata, number, segment);
}

static void leader_says(void *userdata, const struct node_message *message)
{
    nodes_say(userdata, message);
}

static void leader_complains(void *userdata, unsigned node, const char *why)
{
    (void)userdata;
    log_error("node %u: %s", node, why);
}

static int make_leader(struct nodes *nodes)
{
    unsigned n_sources[LEADER_MAX_NODES];

    for (unsigned i = 0; i < nodes->n; i++)
        n_sources[i] = exchange_plan_n_pieces(nodes->job->config, i);
    return leader_new(&nodes->leader, &(struct leader_options){
                                          .n_nodes = nodes->n,
                                          .n_sources = n_sources,
                                          .stage = config_stage(nodes->job->config),
                                          .partitions_all = config_partitions_all(nodes->job->config),
                                          .loads = config_loads(nodes->job->config),
                                          .ops = {.say = leader_says,
                                                  .tell = nodes_tell,
                                                  .decide_again = nodes_decide_again,
                                                  .judge = nodes_judge,
                                                  .complain = leader_complains,
                                                  .userdata = nodes},
                                      });
}

int nodes_new(struct nodes **out, struct job *job, const struct nodes_ops *ops)
{
    struct nodes *nodes = calloc(1, sizeof(*nodes));
    const struct exchange_ops exchange_ops = {.order = give_order,
                                              .moved = nodes_parcel_is_moved,
                                              .fetch = nodes_ask_fetch,
                                              .share = pass_segment,
                                              .wrong = nodes_cannot_be_done,
                                              .userdata = nodes};
    int r;

    if (!nodes)
        return -ENOMEM;
    nodes->job = job;
    nodes->ops = *ops;
    nodes->n = (unsigned)job->config->world.nodes.n_items;
    nodes->self = job->config->world.node;
    assert(nodes->n <= NODE_MAX_NODES); /* a mask has a bit for each node */
    assert(nodes->self < nodes->n);
    nodes->back = job->world.first; /* stands for the unknown rank of a BACK that the predecessor reported */
    nodes->last = &nodes->first;
    nodes->last_held = &nodes->held;
    nodes->buffer = malloc(NODE_MESSAGE_MAX_BYTES);
    r = nodes->buffer ? exchange_new(&nodes->exchange, job, &exchange_ops) : -ENOMEM;
    if (r == 0)
        r = wire_arena_init(&nodes->heard);
    if (r == 0)
        r = wire_arena_init(&nodes->said);
    if (r == 0)
        r = remote_ranks_new(&nodes->remote_ranks, nodes);
    if (r == 0 && nodes->self == 0)
        r = make_leader(nodes);
    if (r < 0) {
        nodes_free(nodes);
        return r;
    }
    *out = nodes;
    return 0;
}

/* Drops the held reports of one node. node: nodes->n for all nodes. */
static void forget_held(struct nodes *nodes, unsigned node)
{
    struct packet **link = &nodes->held;

    while (*link) {
        struct packet *packet = *link;

        if (node < nodes->n && packet->node != node) {
            link = &packet->next;
            continue;
        }
        *link = packet->next;
        free(packet);
    }
    nodes->last_held = link;
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
    nodes_forget_shown(nodes);
    remote_ranks_free(nodes->remote_ranks);
    leader_free(nodes->leader);
    exchange_free(nodes->exchange);
    wire_arena_deinit(&nodes->heard);
    wire_arena_deinit(&nodes->said);
    free(nodes->verdict);
    free(nodes->buffer);
    free(nodes);
}

int nodes_form(struct nodes *nodes)
{
    const struct layout *layout = nodes->job->layout;
    uint32_t most = 0;
    int r;

    assert(!nodes->passed && !nodes->masks && !nodes->verdict); /* nodes_drop() has freed those of the last layout */
    for (uint32_t p = 0; p < layout->n_parcels; p++)
        most = MAX(most, layout->parcels[p].n_parts);
    nodes->passed = calloc(layout->n_parcels + 1, sizeof(*nodes->passed));
    nodes->masks = calloc(most + 1, sizeof(*nodes->masks));
    nodes->verdict = calloc(layout->n_groups + 1, sizeof(*nodes->verdict));
    if (!nodes->passed || !nodes->masks || !nodes->verdict)
        return -ENOMEM;
    nodes->coordinator.sums_at_once = nodes->job->executor->on_gpus;
    r = exchange_form(nodes->exchange);
    if (r == 0 && nodes->leader)
        r = leader_form(nodes->leader, layout);
    return r;
}

void nodes_drop(struct nodes *nodes)
{
    forget_held(nodes, nodes->n);
    if (nodes->leader)
        (void)leader_form(nodes->leader, NULL);
    if (nodes->remote_ranks)
        remote_ranks_forget(nodes->remote_ranks);
    param_norm_forget(nodes);
    nodes->ops.stop_engine(nodes->ops.userdata);
    nodes->has_engine = nodes->has_devices = nodes->said_want_save = false;
    if (nodes->exchange)
        exchange_drop(nodes->exchange);
    free(steal_ptr(nodes->passed));
    free(steal_ptr(nodes->masks));
    free(steal_ptr(nodes->verdict));
    free(steal_ptr(nodes->decided));
    nodes->n_passed = 0;
    nodes_forget_stop(nodes);
    nodes->updated = nodes->stored = nodes->ends = nodes->commits = nodes->closes = nodes->said_kept = false;
    nodes->said_declared = nodes->said_formed = nodes->said_request = nodes->withdraws = nodes->holds_back =
        nodes->connected = false;
}

/* ---- serving ------------------------------------------------------------------------------------------- */

/*
 * Passes a report to the leader, or holds it while the leader is returning. Return: as node_unpack(), with nodes->why.
 */
static int lead(struct nodes *nodes, unsigned node, const void *data, size_t n_bytes)
{
    struct node_message message;
    int r = node_unpack(&nodes->heard, data, n_bytes, &message, nodes->why, sizeof(nodes->why));

    assert(node < nodes->n);
    if (r != 0)
        return r;
    message.node = node;
    if (message.kind == NODE_KEPT) {
        (void)failpoint("kept");
        forget_held(nodes, node); /* reports of the node's previous daemon */
    } else if (leader_is_returning(nodes->leader)) {
        (void)nodes_append(&nodes->last_held, &(struct packet){.report = true, .node = node, .n_bytes = n_bytes}, data);
        return 0;
    }
    leader_hear(nodes->leader, node, &message);
    while (nodes->held && !leader_is_returning(nodes->leader)) {
        _cleanup_free_ struct packet *packet = nodes->held;

        nodes->held = packet->next;
        if (!nodes->held)
            nodes->last_held = &nodes->held;
        if (node_unpack(&nodes->heard, packet->data, packet->n_bytes, &message, nodes->why, sizeof(nodes->why)) != 0)
            continue; /* it was unpacked once, so this is a lack of memory; the step stalls */
        message.node = packet->node;
        leader_hear(nodes->leader, packet->node, &message);
    }
    return 0;
}

const char *nodes_hear(struct nodes *nodes, unsigned node, const void *data, size_t n_bytes)
{
    struct node_message message;
    int r = nodes->leader ? lead(nodes, node, data, n_bytes)
                          : node_unpack(&nodes->heard, data, n_bytes, &message, nodes->why, sizeof(nodes->why));

    assert(nodes->leader || node == 0); /* only node 0 has links to all nodes */
    if (r < 0)
        return "out of memory";
    if (r == WIRE_E_INVALID)
        return nodes->why;
    return nodes->leader ? NULL : nodes_obey(nodes, &message, data, n_bytes);
}

static void handle_own_packet(struct nodes *nodes, const struct packet *packet)
{
    struct node_message message;
    const char *wrong;
    int r = packet->report
                ? lead(nodes, nodes->self, packet->data, packet->n_bytes)
                : node_unpack(&nodes->heard, packet->data, packet->n_bytes, &message, nodes->why, sizeof(nodes->why));

    if (r != 0) {
        log_error("a message of this node's own cannot be read: %s", r < 0 ? strerror(-r) : nodes->why);
        return;
    }
    if (packet->report)
        return;
    wrong = nodes_obey(nodes, &message, packet->data, packet->n_bytes);
    if (wrong)
        log_error("node 0 said %s", wrong);
}

void nodes_serve(struct nodes *nodes)
{
    nodes_flush_passed(nodes);
    while (nodes->first) {
        _cleanup_free_ struct packet *packet = nodes->first;

        nodes->first = packet->next;
        if (!nodes->first)
            nodes->last = &nodes->first;
        handle_own_packet(nodes, packet);
        nodes_flush_passed(nodes);
    }
}

/*
 * Starts a new generation of engines, unless the engines of GPUs are connected. These are kept, because their data may
 * use another network than the daemons' messages, and a new engine must first map all memory on its GPU again.
 */
void nodes_reconnect(struct nodes *nodes)
{
    if (nodes->leader && !(nodes->job->executor && nodes->job->executor->on_gpus && nodes->connected))
        leader_reconnect(nodes->leader);
}

void nodes_differ(struct nodes *nodes, unsigned node, unsigned code, const char *why)
{
    if (nodes->leader)
        leader_refuse_without(nodes->leader, node, code, why);
}

struct nodes_status nodes_status(const struct nodes *nodes)
{
    return (struct nodes_status){
        .n_nodes = nodes->n,
        .node = nodes->self,
        .generation = nodes->generation,
        .connected = nodes->connected,
        .waits_for = nodes->leader ? leader_waits_for(nodes->leader) : 0,
        .waits_to = nodes->leader ? leader_waits_to(nodes->leader) : NULL,
    };
}
