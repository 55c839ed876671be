/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/job/model/rank.h"

struct evidence_at;
struct job;
struct reply;

/* Answers the rank's request and ends the rank's wait. Takes ownership of the descriptors. */
void job_answer(struct job *job, struct job_rank *rank, const struct reply *reply, int *fds, size_t n_fds);
void job_answer_done(struct job *job, struct job_rank *rank);
/* Sends a message to a rank that waits. A rank that is away (RANK_IS_AWAY) does not get the message. */
void job_tell(struct job *job, const struct job_rank *rank, const struct reply *reply);
void job_refuse(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic, bool aborted);
struct wire_position job_position(const struct job *job, const struct job_rank *rank);

/*
 * Call it before serving a request that has an answer. If an abort or a sticky fault is pending, answers the rank with
 * that. Return: whether the rank was answered.
 */
bool job_is_held(struct job *job, struct job_rank *rank);

/*
 * job_is_held() for a request that needs the other ranks. With on_leave: stop, it also refuses the request if a rank
 * has left.
 */
bool job_is_stopped(struct job *job, struct job_rank *rank);

/* Does the end of this wait depend on other ranks? */
bool job_is_collective(enum job_wait wait);

/* Return: the client program of the first rank of this node that has named one, for texts about all ranks; or NULL. */
const char *job_client(const struct job *job);
struct evidence_at job_at(const struct job *job, const struct job_rank *rank);
void job_wait(struct job *job, struct job_rank *rank, enum job_wait wait);
double job_loss_scale(const struct job *job);
uint64_t job_now(const struct job *job);

/* Return: a rank that has left, if on_leave is stop; else NULL. */
struct job_rank *job_who_left(struct job *job);

/* Returns the place of an event before the first step. rank: NULL for an event of no particular rank. */
struct evidence_at job_at_forming(const struct job_rank *rank);

/* Refuses all ranks that wait to be formed. These ranks may declare again. Takes the reference to the diagnostic. */
void job_refuse_forming(struct job *job, struct diagnostic *diagnostic);

/* Resets the loss scale to its configured initial value. */
void job_reset_loss_scale(struct job *job);
