/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/job/model/rank.h"

struct evidence_at;
struct job;
struct reply;

/* Answers the rank's request and ends its wait; fds are taken. */
void job_answer(struct job *job, struct job_rank *rank, const struct reply *reply, int *fds, size_t n_fds);
void job_answer_done(struct job *job, struct job_rank *rank);
/* Tells the rank something while it waits. Not if it is away: it hears the answer. */
void job_tell(struct job *job, const struct job_rank *rank, const struct reply *reply);
void job_refuse(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic, bool aborted);
struct wire_position job_position(const struct job *job, const struct job_rank *rank);

/* Before an answered request is served: delivers an abort or a sticky fault instead. Return: true when it did. */
bool job_is_held(struct job *job, struct job_rank *rank);

/* As job_is_held(), before a request that needs the other ranks: on_leave: stop refuses it when a rank has left. */
bool job_is_stopped(struct job *job, struct job_rank *rank);

/* Does this wait end with what other ranks do? */
bool job_is_collective(enum job_wait wait);

/* The first rank's program, for texts that are about all ranks; NULL: not known. */
const char *job_client(const struct job *job);
struct evidence_at job_at(const struct job *job, const struct job_rank *rank);
void job_wait(struct job *job, struct job_rank *rank, enum job_wait wait);
double job_loss_scale(const struct job *job);
uint64_t job_now(const struct job *job);

/* on_leave: stop. Return: a rank that has left, or NULL. */
struct job_rank *job_who_left(struct job *job);

/* Where something stands that happens before there is a step; rank: NULL when it is of none. */
struct evidence_at job_at_forming(const struct job_rank *rank);

/* Refuses all ranks that wait to be formed; they may declare again. Takes the diagnostic. */
void job_refuse_forming(struct job *job, struct diagnostic *diagnostic);

/* As configured, before any step. */
void job_reset_loss_scale(struct job *job);
