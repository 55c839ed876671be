/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct job;
struct job_rank;

/* Maps the kept ring of a rank that an earlier daemon formed. Return: 0 or -errno. */
int formed_find_ring(struct job *job, struct job_rank *rank);
/*
 * Replays a record: an earlier daemon sent Formed to the rank. Maps the rank's kept ring, if needed. Return: 0 or
 * -errno.
 */
int formed_again(struct job *job, struct job_rank *rank);

/*
 * If the rank waits to be formed, makes its ring, or answers Formed when the ring is ready and the rank can take part.
 */
void formed_settle(struct job *job, struct job_rank *rank);
