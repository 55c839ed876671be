/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * This node among the others: what it reports to node 0, and what it does when node 0 says so (proto/nodes.proto). On
 * node 0 also the leader, which is reported to like by any other node. It is the coordinator of a job of several nodes
 * (daemon/job/model/coordinator.h).
 *
 * A job's verbs report; what node 0 says calls a job's verbs. The two never nest: messages are queued, and served by
 * nodes_serve() from the loop.
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

/* How it reaches the others; given by the server, or by a test. */
struct nodes_ops {
    /* Return: 0 or -errno. */
    int (*send)(void *userdata, unsigned node, const void *data, size_t n_bytes);
    /* nodes_serve() is wanted, soon and not from within. */
    void (*wake)(void *userdata);
    /* Ends the engine of the generation before, and starts the next. Return: 0; -errno and why. */
    int (*start_engine)(void *userdata, uint32_t generation, const struct segment *const *segments, char *why,
                        size_t why_size);
    int (*order)(void *userdata, const struct engine_order *order);
    int (*value)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    int (*share)(void *userdata, unsigned number, const struct segment *segment);
    /* The job is dropped, and its segments with it. */
    void (*stop_engine)(void *userdata);
    void *userdata;
};

struct nodes_status {
    unsigned n_nodes, node;
    uint32_t generation;
    bool connected;
    uint64_t waits_for;   /* node 0: a mask of the nodes that the others wait for */
    const char *waits_to; /* node 0: what they are to do, "to ask for the step"; static */
};

/* Makes it the job's coordinator, which the job frees. Return: 0 or -ENOMEM. */
int nodes_join(struct nodes **out, struct job *job, const struct nodes_ops *ops);

/* Return: the job's coordinator if it is one of several nodes, else NULL. */
struct nodes *nodes_of(const struct job *job);

/* Serves what is queued. */
void nodes_serve(struct nodes *nodes);

/* A message of another node. Return: NULL, or why it makes no sense: valid until the next call. */
const char *nodes_hear(struct nodes *nodes, unsigned node, const void *data, size_t n_bytes);

/* The links to all other nodes stand, and one did not before. */
void nodes_reconnect(struct nodes *nodes);

/* Another node's daemon is not the one it was: what it held is gone. */
void nodes_lose(struct nodes *nodes, unsigned node);

/* The engine of the running generation. */
void nodes_engine_ready(struct nodes *nodes);
void nodes_engine_done(struct nodes *nodes, const struct engine_done *done);
void nodes_engine_put(struct nodes *nodes, const char *key, const uint8_t *value, size_t n_bytes);
void nodes_engine_failed(struct nodes *nodes, const struct engine_failure *failure);

/* The same of the engine of the GPUs, where there are any. why: a sentence without a full stop. */
void nodes_devices_ready(struct nodes *nodes);
void nodes_devices_put(struct nodes *nodes, const char *key, const uint8_t *value, size_t n_bytes);
void nodes_devices_failed(struct nodes *nodes, const char *why);

struct nodes_status nodes_status(const struct nodes *nodes);

/* Another node's daemon is configured differently, so that the job cannot be formed. difference: a text. */
void nodes_hear_difference(struct nodes *nodes, unsigned node, const char *difference);
