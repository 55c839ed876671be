/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/job/model/rank.h"

struct evidence_at;
struct job;
struct reply;

/* Answers the rank's request and ends its wait. Takes ownership of the descriptors. */
void job_answer(struct job *job, struct job_rank *rank, const struct reply *reply, int *fds, size_t n_fds);
void job_answer_done(struct job *job, struct job_rank *rank);
/* Sends a message to a rank that waits. A rank that is away gets only the answer. */
void job_tell(struct job *job, const struct job_rank *rank, const struct reply *reply);
void job_refuse(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic, bool aborted);
struct wire_position job_position(const struct job *job, const struct job_rank *rank);

/*
 * Called before a request that has an answer is served. Answers with an abort or a sticky fault instead, if there is
 * one. Return: true if it did.
 */
bool job_is_held(struct job *job, struct job_rank *rank);

/*
 * job_is_held() for a request that needs the other ranks. With on_leave: stop, it also refuses the request if a rank
 * has left.
 */
bool job_is_stopped(struct job *job, struct job_rank *rank);

/* Does the end of this wait depend on other ranks? */
bool job_is_collective(enum job_wait wait);

/* Return: the first client program that a rank of this node has named, for texts about all ranks; or NULL. */
const char *job_client(const struct job *job);
struct evidence_at job_at(const struct job *job, const struct job_rank *rank);
void job_wait(struct job *job, struct job_rank *rank, enum job_wait wait);
double job_loss_scale(const struct job *job);
uint64_t job_now(const struct job *job);

/* Return: a rank that has left, if on_leave is stop; else NULL. */
struct job_rank *job_who_left(struct job *job);

/* Returns the place of an event before the first step. rank: NULL for an event of no particular rank. */
struct evidence_at job_at_forming(const struct job_rank *rank);

/* Refuses all ranks that wait to be formed; they may declare again. Takes the diagnostic. */
void job_refuse_forming(struct job *job, struct diagnostic *diagnostic);

/* Sets the configured loss scale, as before any step. */
void job_reset_loss_scale(struct job *job);
