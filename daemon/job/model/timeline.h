/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The job's events for the recorder (core/base/recorder.h): where each rank is between its requests, when a step was
 * decided and committed, what was aborted or refused. Nothing is recorded during replay.
 */

#include <stdint.h>

struct job;
struct job_rank;

/* Part of struct job_rank. 0: not known. */
struct rank_timeline {
    uint64_t answered_ns; /* when the last answer was sent that ends a wait and a phase */
    uint64_t backward_ns; /* when the open backward began */
};

/* Events of the open step. */
void timeline_backward(struct job *job, struct job_rank *rank);
void timeline_ended(struct job *job, struct job_rank *rank);
void timeline_pushed(const struct job *job, const struct job_rank *rank, uint32_t parcel);
/* Called before an answer ends the rank's wait. */
void timeline_answers(struct job *job, struct job_rank *rank);
void timeline_aborted(struct job *job);
void timeline_diagnostic(const struct job *job, int64_t rank, unsigned code);
void timeline_saved(const struct job *job, uint64_t began_ns);

/* Called when the step is committed, but still open in the ledger. */
void timeline_committed(const struct job *job);
/* Called when the ledger has opened another step. */
void timeline_opened(const struct job *job);
