/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The norm of one parameter's gradient in the last decided step, if several nodes have partitions of the parameter.
 * Each node sends the exact squares of its partitions (proto/nodes.proto: WANT_SQUARES, SQUARES), so that the norm is
 * equal, to the bit, to the norm on one node. The rank that asks has not asked for the next step, so no step is decided
 * meanwhile.
 *
 * Messages between living daemons are not lost: a question is answered, or the job ends with a daemon.
 */

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;
struct node_message;
struct nodes;

/* Does this node own the whole parameter? */
bool param_norm_is_here(const struct job *job, uint32_t param);

/* Asks for the norm. The rank waits for it (WAIT_READ), and is then answered. Return: 0 or -ENOMEM. */
int param_norm_ask(struct nodes *nodes, struct job_rank *rank, uint32_t param);

/* Return: NULL, or why the message is not valid: a static sentence. */
const char *param_norm_hear_question(struct nodes *nodes, const struct node_message *message);
const char *param_norm_hear_answer(struct nodes *nodes, const struct node_message *message);

/* Repeats all questions when new engines begin, because a replaced daemon may have lost a question or its answer. */
void param_norm_ask_again(struct nodes *nodes);

/* Forgets all questions when the layout is dropped. Ranks that waited have been answered. */
void param_norm_forget(struct nodes *nodes);
