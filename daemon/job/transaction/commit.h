/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct exact_sum;
struct hyper;
struct job;
struct node_finding;
struct node_message;
struct node_verdict;
struct request_step;
struct wire_hyper;

/* The requests of all nodes for the step, merged into one. Borrowed. */
struct job_request {
    const struct exact_sum *squares;
    const struct node_finding *finding; /* the first value that is not finite, by micro-batch, parameter, element */
    const struct request_step *args;    /* of the first rank that asks, but found_inf of any rank; NULL: no rank asks */
    bool proceed;
    const uint8_t *pushed_all; /* a bit per parameter, set if all ranks have pushed it */
};

void commit_settle(struct job *job);
/* Answers the ranks that wait for the step, after a commit. */
void commit_answer(struct job *job);

/* Fills in this node's exact sum of squares, and the origin of the first value that is not finite. */
void job_describe_sum(struct job *job, struct exact_sum *squares, struct node_finding *finding);
/* Fills in the arguments with which this node's ranks ask for the step. groups: room for one hyper per group. */
void job_describe_request(const struct job *job, struct node_message *message, struct wire_hyper *groups);

/*
 * On node 0: finds the verdict on the merged request of all nodes. groups: room for one hyper for each group. Return:
 * false if the step is held. Then hold says for which rank.
 */
bool job_judge(struct job *job, const struct job_request *merged, struct node_verdict *verdict,
               struct wire_hyper *groups, struct node_message *hold);
void job_carry_out(struct job *job, const struct node_verdict *verdict);
void job_hold(struct job *job, const struct node_message *message);

/* Answers the ranks that wait for the norm. norm: the norm of the accumulated gradient, unscaled. */
void job_norm_is(struct job *job, double norm);
void job_commit(struct job *job);

/* One node: finds and carries out the verdict on the step, if all ranks that have not left have asked for it. */
void job_decide(struct job *job);

/* Returns the norm of the gradients accumulated on this node, unscaled: docs/numerics.md section 2. */
double job_measure_norm(struct job *job);
