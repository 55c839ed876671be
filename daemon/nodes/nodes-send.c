/* SPDX-License-Identifier: Apache-2.0 */

/* Messages to other nodes: reports to node 0, and node 0's messages to all nodes. Node 0 queues messages to itself. */

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/log.h"
#include "daemon/nodes/nodes-inside.h"

const char *nodes_address_of(const struct nodes *nodes, unsigned node)
{
    assert(node < nodes->n);
    return nodes->job->config->world.nodes.items[node].address;
}

bool nodes_append(struct packet ***end, const struct packet *packet, const void *data)
{
    struct packet *copy = malloc(sizeof(*copy) + packet->n_bytes);

    assert(!**end); /* *end is the last link; packets after it would be lost */
    assert(!packet->next);
    if (!copy) {
        log_error("out of memory for a message between nodes");
        return false;
    }
    *copy = *packet;
    memcpy(copy->data, data, packet->n_bytes);
    **end = copy;
    *end = &copy->next;
    return true;
}

static void enqueue(struct nodes *nodes, bool report, const uint8_t *data, size_t n_bytes)
{
    struct packet packet = {.report = report, .node = nodes->self, .n_bytes = n_bytes};

    if (nodes_append(&nodes->last, &packet, data))
        nodes->ops.wake(nodes->ops.userdata);
}

/* Return: the number of bytes in the buffer, or 0 if the message could not be packed. */
static size_t pack_into_buffer(struct nodes *nodes, const struct node_message *message)
{
    int n = node_pack(&nodes->said, message, nodes->buffer, NODE_MESSAGE_MAX_BYTES);

    if (n < 0)
        log_error("the message %s between nodes cannot be packed: %s", node_kind_name(message->kind), strerror(-n));
    return (size_t)MAX(n, 0);
}

static void send_to(struct nodes *nodes, unsigned node, const uint8_t *data, size_t n_bytes)
{
    int r = nodes->ops.send(nodes->ops.userdata, node, data, n_bytes);

    if (r < 0)
        log_error("a message to node %u cannot be kept: %s", node, strerror(-r));
}

void nodes_report(struct nodes *nodes, struct node_message message)
{
    const struct job *job = nodes->job;
    size_t n;

    if (job->run.survival.replay) /* the predecessor has reported it */
        return;
    if (message.kind != NODE_PASSED)
        nodes_flush_passed(nodes);
    if (message.kind != NODE_KEPT)
        message.step = job->layout ? job->ledger.step : 0;
    message.attempt = job->layout ? job->ledger.attempt : 0;
    message.node = nodes->self;
    n = pack_into_buffer(nodes, &message);
    if (n == 0)
        return;
    if (nodes->leader)
        enqueue(nodes, true, nodes->buffer, n);
    else
        send_to(nodes, 0, nodes->buffer, n);
    (void)failpoint_at(node_kind_name(message.kind), "reported");
}

void nodes_flush_passed(struct nodes *nodes)
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
    assert(parcel < nodes->job->layout->n_parcels);
    if (nodes->n_passed == nodes->job->layout->n_parcels || nodes->passed_micro_batch != micro_batch)
        nodes_flush_passed(nodes);
    assert(nodes->n_passed < nodes->job->layout->n_parcels);
    nodes->passed_micro_batch = micro_batch;
    nodes->passed[nodes->n_passed++] = parcel;
    nodes->ops.wake(nodes->ops.userdata); /* nodes_serve() reports all passed parcels together */
}

void nodes_say(struct nodes *nodes, const struct node_message *message)
{
    size_t n = pack_into_buffer(nodes, message);

    assert(nodes->self == 0);
    if (n == 0)
        return;
    nodes_record_said(nodes, message->kind, nodes->buffer, n);
    for (unsigned node = 1; node < nodes->n; node++)
        send_to(nodes, node, nodes->buffer, n);
    enqueue(nodes, false, nodes->buffer, n);
    (void)failpoint_at(node_kind_name(message->kind), "said");
}

void nodes_send_packed(struct nodes *nodes, unsigned node, const uint8_t *packed, size_t n_bytes)
{
    assert(node < nodes->n);
    if (node == nodes->self)
        enqueue(nodes, false, packed, n_bytes);
    else
        send_to(nodes, node, packed, n_bytes);
}

void nodes_tell(void *userdata, unsigned node, const struct node_message *message)
{
    struct nodes *nodes = userdata;
    size_t n = pack_into_buffer(nodes, message);

    if (n > 0)
        nodes_send_packed(nodes, node, nodes->buffer, n);
    if (message->kind == NODE_MAY_STOP && nodes->ops.mark && node != nodes->self)
        nodes->ops.mark(nodes->ops.userdata, node);
}

void nodes_decide_again(void *userdata, unsigned node)
{
    struct nodes *nodes = userdata;

    if (nodes->decided)
        nodes_send_packed(nodes, node, nodes->decided, nodes->n_decided_bytes);
}
