/* SPDX-License-Identifier: Apache-2.0 */

/* Generations of engines: node 0 begins a generation, and this node may end it. */

#include <assert.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "daemon/engines/devices.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/nodes/nodes-inside.h"
#include "daemon/nodes/param-norm.h"
#include "daemon/nodes/remote-ranks.h"
#include "daemon/step/executor.h"

enum { VALUE_OF_DEVICES = 1 }; /* tag of a VALUE from an engine of GPUs */

/* Return: the engines of this node's GPUs, or NULL if it has none, or no job is formed. */
static struct devices *devices_of(const struct nodes *nodes)
{
    return nodes->job->executor ? nodes->job->executor->devices : NULL;
}

/* Ends the use of the engines of this generation. */
static void end_generation(struct nodes *nodes)
{
    nodes->connected = nodes->has_engine = nodes->has_devices = false;
    if (devices_of(nodes))
        devices_stop(devices_of(nodes)); /* before exchange_broken(), because it cancels the running orders */
    exchange_broken(nodes->exchange);
}

static void engine_is_broken(struct nodes *nodes, const char *why)
{
    end_generation(nodes);
    nodes_report(nodes, (struct node_message){.kind = NODE_BROKEN, .generation = nodes->generation, .text = why});
}

/* Ends the generation, and reports a sentence about it to all nodes: before, this node's name, after, what. */
static void break_engine(struct nodes *nodes, const char *before, const char *after, const char *what)
{
    snprintf(nodes->why, sizeof(nodes->why), "%snode %u (%s) %s%s", before, nodes->self,
             nodes_address_of(nodes, nodes->self), after, what);
    engine_is_broken(nodes, nodes->why);
}

void nodes_cannot_be_done(void *userdata, const char *why)
{
    break_engine(userdata, "", "cannot do what node 0 says: ", why);
}

void nodes_obeyed(struct nodes *nodes, const char *wrong)
{
    if (wrong)
        break_engine(nodes, "", "cannot do what node 0 says: ", wrong);
}

/* Keeps a diagnostic that engines of this generation begin, and why. */
static void note_engine(struct job *job, uint32_t generation, const char *why)
{
    job_keep(job, cause_engine(&(struct evidence_node){
                      .at = {.rank = -1, .step = job->layout ? (int64_t)job->ledger.step : -1, .micro_batch = -1},
                      .generation = generation,
                      .why = why,
                  }));
}

void nodes_hear_engine(struct nodes *nodes, const struct node_message *message)
{
    char why[256];

    if (message->generation <= nodes->generation || !nodes->job->layout)
        return;
    nodes->generation = message->generation;
    end_generation(nodes);
    if (message->arrived >> nodes->job->config->world.node & 1)
        nodes_ask_again(nodes);
    param_norm_ask_again(nodes);
    remote_ranks_repeat(nodes->remote_ranks); /* another node's daemon may be new */
    if (message->text[0])
        note_engine(nodes->job, nodes->generation, message->text);
    if (nodes->ops.start_engine(nodes->ops.userdata, nodes->generation, exchange_segments(nodes->exchange), why,
                                sizeof(why)) < 0)
        break_engine(nodes, "", "has no engine: ", why);
    else if (devices_of(nodes))
        devices_next(devices_of(nodes), nodes->generation);
    job_todo(nodes->job); /* an abort may have waited for orders of the old engines */
}

static void is_connected(struct nodes *nodes)
{
    size_t n = exchange_list_arrived(nodes->exchange, NULL, 0);
    _cleanup_free_ uint64_t *tags = calloc(n + 1, sizeof(*tags));

    assert(!nodes->connected); /* each engine is ready once, and a generation has new engines */
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
    if (nodes->has_engine && (nodes->has_devices || !devices_of(nodes)))
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
    job_todo(nodes->job);
}

static void report_value(struct nodes *nodes, uint64_t tag, const char *key, const uint8_t *value, size_t n_bytes)
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
    report_value(nodes, 0, key, value, n_bytes);
}

void nodes_devices_put(struct nodes *nodes, const char *key, const uint8_t *value, size_t n_bytes)
{
    report_value(nodes, VALUE_OF_DEVICES, key, value, n_bytes);
}

void nodes_devices_failed(struct nodes *nodes, const char *why)
{
    break_engine(nodes, "on ", "", why);
    job_todo(nodes->job);
}

void nodes_hear_value(struct nodes *nodes, const struct node_message *message)
{
    if (message->generation != nodes->generation || message->node == nodes->self)
        return;
    if (message->tag == VALUE_OF_DEVICES && devices_of(nodes))
        devices_value(devices_of(nodes), message->text, message->bytes, message->n_bytes);
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
    job_todo(nodes->job);
}
