/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The norm of one parameter's gradient in the last decided step, if several nodes have partitions of the parameter.
 * Each node sends the exact squares of its partitions (proto/nodes.proto: WANT_SQUARES, SQUARES), so that the norm is
 * equal, to the bit, to the norm on one node. No step is decided before the answer, because the rank that asks for the
 * norm has not asked for the next step yet.
 *
 * Messages between living daemons are not lost. If a daemon dies, the job ends, or all questions are repeated.
 */

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;
struct node_message;
struct nodes;

/* Does this node own all elements of the parameter? */
bool param_norm_is_here(const struct job *job, uint32_t param);

/* Asks all nodes for their squares. The rank waits (WAIT_READ), and is later answered with the norm. Return: 0 or
 * -ENOMEM. */
int param_norm_ask(struct nodes *nodes, struct job_rank *rank, uint32_t param);

/* Return: NULL, or why the message is not valid: a static sentence. */
const char *param_norm_hear_question(struct nodes *nodes, const struct node_message *message);
const char *param_norm_hear_answer(struct nodes *nodes, const struct node_message *message);

/* Repeats all questions when new engines begin, because a replaced daemon may have lost a question or its answer. */
void param_norm_ask_again(struct nodes *nodes);

/* Forgets all questions. Call it when the layout is dropped, and waiting ranks have been answered. */
void param_norm_forget(struct nodes *nodes);
