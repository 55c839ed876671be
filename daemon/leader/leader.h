/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The leader runs on node 0. It receives the reports of all nodes, and decides what they do next (proto/nodes.proto).
 * Pure: messages in, messages out; no clock, no I/O, no waiting. All nodes, including node 0, receive its messages in
 * the same sequence. Node 0 obeys them like any other node.
 *
 * The leader keeps the facts that it cannot ask for again: which partial sums are ready, which exchange has arrived at
 * which node, and whether the step is decided. It ignores reports of an earlier step or attempt.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/budget/exchange-plan.h"
#include "core/layout/layout.h"
#include "core/wire/node-wire.h"
#include "kernels/exact.h"

enum { LEADER_MAX_NODES = NODE_MAX_NODES };

struct leader;

/* The reports of all nodes, merged when a step can be decided. */
struct leader_merged {
    struct exact_sum squares;
    struct node_finding finding;     /* the first by micro-batch, parameter, element */
    const struct request_step *args; /* of the first node that has arguments; found_inf: if any node has set it */
    bool proceed;
    uint8_t *pushed_any, *pushed_all; /* a bit per parameter */
    size_t n_bits_bytes;
};

struct leader_ops {
    /* Sends the message, which is borrowed, to all nodes. */
    void (*say)(void *userdata, const struct node_message *message);
    /*
     * Finds the verdict on the step. The verdict's pointers stay valid until the next call. Return: true; or false if
     * the step is held. Then `hold` has the reason: a finding, or the rank whose arguments differ.
     */
    bool (*judge)(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                  struct node_message *hold);
    /* Sends the message, which is borrowed, to one node. */
    void (*tell)(void *userdata, unsigned node, const struct node_message *message);
    /* Sends the last DECIDED to one node again. */
    void (*decide_again)(void *userdata, unsigned node);
    /* Called when a node has sent an invalid report. why: a sentence. */
    void (*complain)(void *userdata, unsigned node, const char *why);
    void *userdata;
};

struct leader_options {
    unsigned n_nodes;
    const unsigned *n_sources; /* the number of pieces of each node */
    unsigned stage;
    bool partitions_all; /* stage 3 on GPUs: GPUs gather from each other, and frozen parameters have owners, too */
    bool loads;          /* nodes look for a checkpoint before the first step */
    struct leader_ops ops;
};

/* Return: 0 or -ENOMEM. */
int leader_new(struct leader **out, const struct leader_options *options);
void leader_free(struct leader *leader);

/* Sets the layout that node 0 has made, which is borrowed. NULL: node 0 has dropped the job. Return: 0 or -ENOMEM. */
int leader_form(struct leader *leader, const struct layout *layout);

/*
 * Refuses all nodes if any has declared, because `node` cannot be part of the job. Only while the leader waits for
 * declarations.
 */
void leader_refuse_without(struct leader *leader, unsigned node, unsigned code, const char *why);

/*
 * Call it after leader_form(), when node 0's daemon has adopted a run. Until all nodes have reported their positions in
 * the run (KEPT), the leader sends nothing, and the caller holds all other reports. step: the run's open step. applies:
 * whether that step is applied, if it is decided. is_saved: whether the last committed step is on the disk.
 */
void leader_take_over(struct leader *leader, uint64_t step, bool applies, bool is_saved);
bool leader_is_returning(const struct leader *leader);

/* Handles a report of a node. Copies the parts that it keeps. */
void leader_hear(struct leader *leader, unsigned node, const struct node_message *message);

/*
 * Replaces all engines. Call it when the network between nodes works again after an interruption. The kernel may wait
 * as long as the interruption lasted before it resends the old engines' data.
 */
void leader_reconnect(struct leader *leader);

/* Ends the job, because the node's state is lost. A job that has no weights yet is formed again. */
void leader_lose(struct leader *leader, unsigned node, const char *why);

/*
 * Call it when another daemon of the node has connected. Forgets the old daemon's ENDED, so that no node stops before
 * the new daemon has reported its position.
 */
void leader_meet(struct leader *leader, unsigned node);

/* Was the node's daemon told to stop, and did node 0 send it MAY_STOP? Other nodes do not wait for such a node. */
bool leader_is_left_by(const struct leader *leader, unsigned node);

/*
 * For status. leader_waits_for() returns a mask of the nodes that node 0 waits for. leader_waits_to() returns a static
 * text about what these nodes must do, such as "to ask for the step".
 */
uint64_t leader_waits_for(const struct leader *leader);
const char *leader_waits_to(const struct leader *leader);
