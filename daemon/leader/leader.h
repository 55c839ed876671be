/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Node 0's other task: it hears where every node stands and says what comes next (proto/nodes.proto). Pure: messages
 * in, messages out; no clock, no I/O, nothing is ever waited for. What it says is told to all nodes in one order,
 * node 0's own included, which obeys it like any other.
 *
 * It keeps what cannot be asked again: which partial sums are ready, which exchange has arrived where, and,
 * once a step is decided, that it is. A report of an earlier step or attempt is ignored.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/layout/layout.h"
#include "core/wire/node-wire.h"
#include "kernels/exact.h"

enum { LEADER_MAX_NODES = NODE_MAX_NODES };

struct leader;

/* What all nodes know together when a step can be decided. */
struct leader_merged {
    struct exact_sum squares;
    struct node_finding finding;     /* the first by micro-batch, parameter, element */
    const struct request_step *args; /* of the lowest node with a rank that asks; found_inf: of any */
    bool proceed;
    uint8_t *pushed_any, *pushed_all; /* a bit per parameter */
    size_t n_bits_bytes;
};

struct leader_ops {
    /* To all nodes. Borrowed. */
    void (*say)(void *userdata, const struct node_message *message);
    /*
     * The verdict on the step; what it points to stays valid until the next call. false: it is held, and hold says why:
     * a finding, or the rank whose arguments differ.
     */
    bool (*judge)(void *userdata, const struct leader_merged *merged, struct node_verdict *verdict,
                  struct node_message *hold);
    /* A node has said what cannot be: why, a sentence. */
    void (*complain)(void *userdata, unsigned node, const char *why);
    void *userdata;
};

struct leader_options {
    unsigned n_nodes;
    const unsigned *n_sources; /* per node: its pieces */
    unsigned stage;
    bool partitions_all; /* stage 3 on GPUs: they gather from each other, and frozen parameters have owners, too */
    struct leader_ops ops;
};

/* Return: 0 or -ENOMEM. */
int leader_new(struct leader **out, const struct leader_options *options);
void leader_free(struct leader *leader);

/* Node 0 has laid the job out, or dropped it (NULL). Borrowed. Return: 0 or -ENOMEM. */
int leader_form(struct leader *leader, const struct layout *layout);

/*
 * One node cannot be part of the job, and node 0 has told its own ranks why. The others that have declared are refused.
 */
void leader_refuse_without(struct leader *leader, unsigned node, unsigned code, const char *why);

/* A report. Takes nothing; what it keeps it copies. */
void leader_hear(struct leader *leader, unsigned node, const struct node_message *message);

/*
 * The way between nodes was interrupted, and is there again: all engines are replaced. What the old ones had under way
 * waits in the kernel until it tries again, which may be as long as the interruption was.
 */
void leader_reconnect(struct leader *leader);

/* What that node knew is gone: the job is over. */
void leader_lose(struct leader *leader, unsigned node, const char *why);

/* For status: nodes that node 0 waits for, as a mask; 0: none. And what they are to do, "to ask for the step"; static.
 */
uint64_t leader_waits_for(const struct leader *leader);
const char *leader_waits_to(const struct leader *leader);
