/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct job;
struct job_rank;

/* Finds the kept ring of a rank that was formed by an earlier daemon. Return: 0 or -errno. */
int formed_find_ring(struct job *job, struct job_rank *rank);
/* Replay: an earlier daemon sent the rank Formed. Finds the rank's ring, if needed. Return: 0 or -errno. */
int formed_again(struct job *job, struct job_rank *rank);

/* Gives a rank that waits to be formed its ring, or answers Formed. */
void formed_settle(struct job *job, struct job_rank *rank);
