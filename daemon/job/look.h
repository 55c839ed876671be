/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Where ranks are: their stacks, as their own processes tell them. A process that can tell has a second connection, its
 * watch; one that cannot, such as a C program or an older client, has none, and nothing is said of it but what the
 * kernel knows. The text comes from a process that nobody need trust: the wire has checked its length and its
 * characters.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct job;
struct job_rank;
struct strbuf;

/* A process's watch. Return: the rank that it belongs to, or NULL: there is none with that incarnation here. */
struct job_rank *look_attach(struct job *job, unsigned rank, uint64_t secret, uint32_t uid, void *peer);
void look_detach(struct job_rank *rank, const void *peer);

/* Asks a rank, also of another node, unless it has just been asked. Return: is an answer to come? */
bool look_ask(struct job *job, struct job_rank *rank);
/* Another node wants to know. */
void look_ask_for_others(struct job *job, struct job_rank *rank);
/* Return: an answer is to come, and there is still time for it. */
bool look_is_awaited(const struct job *job, const struct job_rank *rank);
/* text: copied. Return: false, nobody has asked. */
bool look_answered(struct job *job, struct job_rank *rank, const char *text);

/*
 * What the kernel says of a process that does not answer: it is stopped, or waits where nothing can interrupt it.
 * Return: a static text; NULL: it says nothing of that kind, or the process is on another node.
 */
const char *look_process(const struct job *job, const struct job_rank *rank);

/* The main thread of the last answer, and its process, for a diagnostic: some lines. Return: false, nothing is known.
 */
bool look_describe(const struct job *job, const struct job_rank *rank, struct strbuf *buf);
