/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct exact_sum;
struct hyper;
struct job;
struct leader_merged;
struct node_finding;
struct node_message;
struct node_verdict;
struct step_args;
struct wire_hyper;

void commit_settle(struct job *job);

/* Fills what this node's ranks ask the step with; groups: room for one hyper per group. */
/* This node's exact sum of squares, and where a value came from that is not finite. */
void job_describe_sum(struct job *job, struct exact_sum *squares, struct node_finding *finding);
void job_describe_request(const struct job *job, struct node_message *message, struct wire_hyper *groups);

/*
 * Node 0: the verdict on what all know together; groups: room likewise. Return: false when the step is to be held, and
 * hold says for whom.
 */
bool job_judge(struct job *job, const struct leader_merged *merged, struct node_verdict *verdict,
               struct wire_hyper *groups, struct node_message *hold);
void job_carry_out(struct job *job, const struct node_verdict *verdict);
void job_hold(struct job *job, const struct node_message *message);

/* Of what is accumulated, unscaled. */
void job_norm_is(struct job *job, double norm);
void job_commit(struct job *job);

/* What a step with these arguments uses for a group: the arguments', or as configured and scheduled. */
struct hyper job_hyper(const struct job *job, const struct step_args *args, uint32_t group);
