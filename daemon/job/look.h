/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The stacks of ranks. A rank's own process reports its stack over a second connection, the watch. A C program or an
 * older client has no watch, so only its state in the kernel is reported. The text is not trusted: the wire has checked
 * its length and its characters.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct job;
struct job_rank;
struct strbuf;

/* Attaches a process's watch. Return: its rank, or NULL if no rank of this node has that incarnation. */
struct job_rank *look_attach(struct job *job, unsigned rank, uint64_t secret, uint32_t uid, void *peer);
void look_detach(struct job_rank *rank, const void *peer);

/* Asks a rank of any node for its stack, unless it was just asked. Return: whether an answer is to come. */
bool look_ask(struct job *job, struct job_rank *rank);
/* Asks the rank for its stack, and sends the answer to the other nodes, which have asked for it. */
void look_ask_for_others(struct job *job, struct job_rank *rank);
/* Return: whether an answer is to come, and its time-out has not passed. */
bool look_is_awaited(const struct job *job, const struct job_rank *rank);
/* Records the answer. text: copied. Return: false if the rank was not asked. */
bool look_answered(struct job *job, struct job_rank *rank, const char *text);

/*
 * Finds out from the kernel why a process does not answer: it is stopped, or waits uninterruptibly. Return: a static
 * text; NULL if neither is true, or if the process is on another node.
 */
const char *look_process(const struct job *job, const struct job_rank *rank);

/*
 * Appends lines for a diagnostic: the state of the process, or the main thread of its last answer. Return: false if
 * nothing is known.
 */
bool look_describe(const struct job *job, const struct job_rank *rank, struct strbuf *buf);
