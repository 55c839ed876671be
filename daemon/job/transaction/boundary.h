/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct diagnostic;
struct job;
struct job_rank;
struct request_abandon_backward;
struct request_end_backward;
struct request_step;

void job_end_backward(struct job *job, struct job_rank *rank, const struct request_end_backward *request);
void job_abandon_backward(struct job *job, struct job_rank *rank, const struct request_abandon_backward *request);

/* Gives up the open backward of a rank that has left. */
void job_give_up_open(struct job *job, struct job_rank *rank);
void job_step(struct job *job, struct job_rank *rank, const struct request_step *request);
void job_grad_norm(struct job *job, struct job_rank *rank);

/* Judges the requests for the step that have waited for pushes of other ranks. */
void boundary_settle(struct job *job);

/*
 * Called when the coordinator has withdrawn the promised parcels that node 0 does not await. Ranks that wait for this
 * (WAIT_ABANDON) then give up their backward.
 */
void job_withdrawn(struct job *job);

/* Aborts the step because of data that a dead process of that rank left in it. Takes the refusal, which may be NULL. */
void job_abort_inherited(struct job *job, const struct job_rank *from, struct diagnostic *refusal);

/* Return: NULL if the rank's arguments agree with those of the first other rank that has asked, else the refusal. */
struct diagnostic *job_compare_args(const struct job *job, const struct job_rank *rank);
