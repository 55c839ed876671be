/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * This node as one of several: its reports to node 0, and its actions on messages from node 0 (proto/nodes.proto). Node
 * 0 also has the leader, to which it reports like any other node. struct nodes is the coordinator of a job of several
 * nodes (daemon/job/model/coordinator.h).
 *
 * Functions of the job report to node 0, and messages from node 0 call functions of the job. These calls never nest,
 * because a node's messages to itself are queued, and nodes_serve() handles them from the loop.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/wire/node-wire.h"
#include "daemon/engines/engine.h"
#include "daemon/exchange/exchange.h"
#include "daemon/leader/leader.h"
#include "daemon/step/step.h"

struct diagnostic;
struct job;
struct manifest;
struct nodes;

/* Functions to reach the other nodes and this node's engine. The server or a test provides them. */
struct nodes_ops {
    /* Sends a packed message to another node. Return: 0 or -errno. */
    int (*send)(void *userdata, unsigned node, const void *data, size_t n_bytes);
    /* Is the link to that node up? NULL: all links count as up. */
    bool (*reaches)(void *userdata, unsigned node);
    /*
     * Node 0: marks the last message to that node. This daemon stops only after the node has received that message. May
     * be NULL.
     */
    void (*mark)(void *userdata, unsigned node);
    /* Makes the loop call nodes_serve() soon. wake() itself must not call nodes_serve(). */
    void (*wake)(void *userdata);
    /*
     * Ends the engine of the previous generation, and starts the next one. Return: 0, or -errno with a sentence in why.
     */
    int (*start_engine)(void *userdata, uint32_t generation, const struct segment *const *segments, char *why,
                        size_t why_size);
    int (*order)(void *userdata, const struct engine_order *order);
    int (*value)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    int (*share)(void *userdata, unsigned number, const struct segment *segment);
    /* Stops the engine. Called when the job and its segments are dropped. */
    void (*stop_engine)(void *userdata);
    void *userdata;
};

struct nodes_status {
    unsigned n_nodes, node;
    uint32_t generation;
    bool connected;
    uint64_t waits_for;   /* node 0: a mask of the nodes that node 0 waits for */
    const char *waits_to; /* node 0: the action of those nodes, as "to ask for the step"; static */
};

/* Makes *out the job's coordinator, which the job frees. Return: 0 or -ENOMEM. */
int nodes_join(struct nodes **out, struct job *job, const struct nodes_ops *ops);

/* Return: the job's coordinator if it is one of several nodes, else NULL. */
struct nodes *nodes_of(const struct job *job);

/* Handles the queued messages. */
void nodes_serve(struct nodes *nodes);

/* Handles a message of another node. Return: NULL; or why the message is not valid, valid until the next call. */
const char *nodes_hear(struct nodes *nodes, unsigned node, const void *data, size_t n_bytes);

/* Call it when the links to all other nodes are up, and at least one of them was down before. */
void nodes_reconnect(struct nodes *nodes);

/*
 * Notes that this daemon is to stop. nodes_may_stop() becomes true when all nodes have ended every decided step and
 * window, because until then the other nodes need this node.
 */
void nodes_tell_to_stop(struct nodes *nodes);
bool nodes_may_stop(const struct nodes *nodes);
/* Node 0: was that node's daemon told to stop, and did node 0 send it MAY_STOP? */
bool nodes_is_left_by(const struct nodes *nodes, unsigned node);

/* Does this daemon hold the state of a run? */
bool nodes_has_run(const struct nodes *nodes);
/*
 * Call it when a new daemon process of another node appears. first: this daemon has met no earlier process of that
 * node. has_run: the new daemon continues a run. If it does not, the old daemon's state is lost, and this node's run is
 * over.
 */
void nodes_meet(struct nodes *nodes, unsigned node, bool first, bool has_run);

/* Events of the engine of the running generation. */
void nodes_engine_ready(struct nodes *nodes);
void nodes_engine_done(struct nodes *nodes, const struct engine_done *done);
void nodes_engine_put(struct nodes *nodes, const char *key, const uint8_t *value, size_t n_bytes);
void nodes_engine_failed(struct nodes *nodes, const struct engine_failure *failure);

/* Events of the engine of the GPUs, if this node has GPUs. why: a sentence without a full stop. */
void nodes_devices_ready(struct nodes *nodes);
void nodes_devices_put(struct nodes *nodes, const char *key, const uint8_t *value, size_t n_bytes);
void nodes_devices_failed(struct nodes *nodes, const char *why);

struct nodes_status nodes_status(const struct nodes *nodes);

/* Call it when another node's daemon is configured differently, and so the job cannot be formed. difference: a text. */
void nodes_hear_difference(struct nodes *nodes, unsigned node, const char *difference);
