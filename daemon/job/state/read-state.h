/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct job;
struct job_rank;
struct reading;
struct request_read_state;

void job_read_state(struct job *job, struct job_rank *rank, const struct request_read_state *request);

/* Frees the memory of the last answer to ReadState, even if the client still has its descriptor. */
void job_release_reading(struct job *job, struct job_rank *rank);
void reading_free(struct reading *reading);
