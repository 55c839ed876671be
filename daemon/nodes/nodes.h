/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * This node among the others: what it reports to node 0, and what it does when node 0 says so (proto/nodes.proto). On
 * node 0 also the leader, which is reported to like by any other node. job->nodes is NULL in a job of one node.
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

/* Return: 0 or -ENOMEM. */
int nodes_new(struct nodes **out, struct job *job, const struct nodes_ops *ops);
void nodes_free(struct nodes *nodes);

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

/* ---- for the job --------------------------------------------------------------------------------------- */

struct exchange *nodes_exchange(struct nodes *nodes);

/* The layout stands. Return: 0 or -errno. */
int nodes_form(struct nodes *nodes);
void nodes_drop(struct nodes *nodes);

/* Any report; step, attempt and node are filled in. */
void nodes_report(struct nodes *nodes, struct node_message message);

/* Reports. Those that a settle makes are made once, until what they wait for has come. */
void nodes_declared(struct nodes *nodes, bool declared);
void nodes_formed(struct nodes *nodes);
void nodes_unformed(struct nodes *nodes, unsigned code, const char *why);
/* A node's daemon is configured differently: node 0 refuses the ranks of all others that wait to be formed. */
void nodes_differ(struct nodes *nodes, unsigned node, unsigned code, const char *why);
/* What a node's ranks declare, as it has shown; NULL: not all nodes have. */
const struct manifest *nodes_manifest(const struct nodes *nodes, unsigned node);
void nodes_have_weights(struct nodes *nodes);
void nodes_asked(struct nodes *nodes);
void nodes_want_norm(struct nodes *nodes);
void nodes_want_window(struct nodes *nodes);
/* rewrite: what of the state was written here, NULL: nothing. */
void nodes_end_window(struct nodes *nodes, const struct rewrite *rewrite, bool forget);
void nodes_stored(struct nodes *nodes);
void nodes_updated(struct nodes *nodes);
/*
 * What a rank's client says of what it misses; NULL: nothing any more. *digest: of what was told last, 0: nothing. What
 * was told is not told again, and one that is too large for a message is not told: then the texts do without.
 */
void nodes_evidence(struct nodes *nodes, unsigned rank, const struct request_evidence *evidence, uint64_t *digest);
/* A rank of this node is back that had left; all: all of the world had; late: the step was added up without it. */
void nodes_back(struct nodes *nodes, unsigned rank, bool all, bool late);
/* Whoever is back takes part when node 0 has heard of it, and what was asked for without it is settled. */
bool nodes_hold_back(const struct nodes *nodes);
/* reason: NULL, or why in the rank's words. Borrowed. */
void nodes_abort(struct nodes *nodes, int64_t rank, const char *why, const struct diagnostic *reason);

/* All that this node has of a parcel is pushed: what the reduction, which is prepared, will sum. */
void nodes_ready(struct nodes *nodes, const struct reduction *reduction);
/* A rank gives up its backward: what was announced and is not awaited is to be taken back; job_withdrawn() comes,
 * unless the step is aborted. Nothing is announced until then. */
void nodes_withdraw(struct nodes *nodes);
bool nodes_withdraws(const struct nodes *nodes);
/* This node has nothing more of the parcel in that micro-batch. */
void nodes_passed(struct nodes *nodes, uint32_t parcel, uint32_t micro_batch);
