/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The leader, node 0's other task: it receives the reports of all nodes and says what comes next (proto/nodes.proto).
 * Pure: messages in, messages out; no clock, no I/O, no waiting. All nodes get its messages in one sequence, node 0
 * included, which obeys them like any other node.
 *
 * The leader keeps the facts that it cannot ask for again: which partial sums are ready, which exchange has arrived at
 * which node, and that a step is decided. It ignores reports of an earlier step or attempt.
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
    const struct request_step *args; /* of the lowest node with a rank that asks; found_inf: of any node */
    bool proceed;
    uint8_t *pushed_any, *pushed_all; /* a bit per parameter */
    size_t n_bits_bytes;
};

struct leader_ops {
    /* Sends the message to all nodes. Borrowed. */
    void (*say)(void *userdata, const struct node_message *message);
    /*
     * Finds the verdict on the step; its pointers stay valid until the next call. Return: false: the step is held, and
     * hold says why: a finding, or the rank whose arguments differ.
     */
    bool (*judge)(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                  struct node_message *hold);
    /* Sends the message to one node. Borrowed. */
    void (*tell)(void *userdata, unsigned node, const struct node_message *message);
    /* Sends to one node the DECIDED that was said last. */
    void (*decide_again)(void *userdata, unsigned node);
    /* A node has sent a report that is not valid. why: a sentence. */
    void (*complain)(void *userdata, unsigned node, const char *why);
    void *userdata;
};

struct leader_options {
    unsigned n_nodes;
    const unsigned *n_sources; /* per node: its pieces */
    unsigned stage;
    bool partitions_all; /* stage 3 on GPUs: GPUs gather from each other, and frozen parameters have owners, too */
    bool loads;          /* nodes look for a checkpoint before the first step */
    struct leader_ops ops;
};

/* Return: 0 or -ENOMEM. */
int leader_new(struct leader **out, const struct leader_options *options);
void leader_free(struct leader *leader);

/* Node 0 has made the job's layout, or dropped the job (NULL). Borrowed. Return: 0 or -ENOMEM. */
int leader_form(struct leader *leader, const struct layout *layout);

/*
 * One node cannot be part of the job, and node 0 has refused its own ranks: refuses the other nodes that have declared.
 */
void leader_refuse_without(struct leader *leader, unsigned node, unsigned code, const char *why);

/*
 * Node 0's daemon has taken over a run from the one before it, at this step. The leader says nothing until all nodes
 * have reported where they stand (KEPT), and must not hear anything else until then. After leader_form(). applies: if
 * the step is decided, whether it is applied. is_saved: the last committed step is on the disk.
 */
void leader_take_over(struct leader *leader, uint64_t step, bool applies, bool is_saved);
bool leader_is_returning(const struct leader *leader);

/* A report of a node. Copies the parts that it keeps. */
void leader_hear(struct leader *leader, unsigned node, const struct node_message *message);

/*
 * The network between nodes was interrupted, and is back: replaces all engines, because the kernel may wait as long as
 * the interruption lasted before it resends the old engines' data.
 */
void leader_reconnect(struct leader *leader);

/* The node's state is lost, so the job is over. */
void leader_lose(struct leader *leader, unsigned node, const char *why);

/*
 * Another daemon of the node is there. What the one before reported of its end does not count, so that no node stops
 * before the new one has said where it stands.
 */
void leader_meet(struct leader *leader, unsigned node);

/* Was the node's daemon told to stop, and that it may? It is not waited for. */
bool leader_is_left_by(const struct leader *leader, unsigned node);

/* For status: nodes that node 0 waits for, as a mask; 0: none. And what they are to do, "to ask for the step"; static.
 */
uint64_t leader_waits_for(const struct leader *leader);
const char *leader_waits_to(const struct leader *leader);
