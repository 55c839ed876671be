/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The norm of one parameter's gradient in the last decided step, where nodes share its partitions: they are asked for
 * the exact squares of what each owns (proto/nodes.proto: WANT_SQUARES, SQUARES), so that the norm is to the bit what
 * one node computes. A rank that asks has not asked for the next step, so that none is decided meanwhile.
 *
 * Messages between daemons that live are not lost: a question is answered, or the job ends with a daemon.
 */

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;
struct node_message;
struct nodes;

/* Does this node own the whole parameter? */
bool param_norm_is_here(const struct job *job, uint32_t param);

/* The rank waits for the norm (WAIT_READ), and is answered then. Return: 0 or -ENOMEM. */
int param_norm_ask(struct nodes *nodes, struct job_rank *rank, uint32_t param);

/* Return: NULL, or why it makes no sense: a static sentence. */
const char *param_norm_hear_question(struct nodes *nodes, const struct node_message *message);
const char *param_norm_hear_answer(struct nodes *nodes, const struct node_message *message);

/* The layout is dropped: forgets all questions. Ranks that wait were answered before. */
/* Engines begin again: a node whose daemon was replaced may not have heard, or its answer was lost. */
void param_norm_ask_again(struct nodes *nodes);

void param_norm_forget(struct nodes *nodes);
