/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct job;
struct job_rank;

/* Gives a rank that waits to be formed its ring, or answers Formed. */
/* An earlier daemon has told the rank the layout: its ring is where it was. Return: 0 or -errno. */
int formed_find_ring(struct job *job, struct job_rank *rank);
int formed_again(struct job *job, struct job_rank *rank);

void formed_settle(struct job *job, struct job_rank *rank);
