/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the job tells the recorder (core/base/recorder.h): where each rank is between its requests, when a step was
 * decided and committed, what was aborted or refused. Nothing is recorded while an earlier daemon's records are
 * replayed.
 */

#include <stdint.h>

struct job;
struct job_rank;

/* Part of struct job_rank. 0: not known. */
struct rank_timeline {
    uint64_t answered_ns; /* its last request that ends a micro-batch, a step or the forming; or it has attached */
    uint64_t backward_ns; /* its open backward has begun */
};

/* Of the open step. */
void timeline_backward(struct job *job, struct job_rank *rank);
void timeline_ended(struct job *job, struct job_rank *rank);
void timeline_pushed(const struct job *job, const struct job_rank *rank, uint32_t parcel);
/* Before the wait ends. */
void timeline_answers(struct job *job, struct job_rank *rank);
void timeline_aborted(struct job *job);
void timeline_diagnostic(const struct job *job, int64_t rank, unsigned code);
void timeline_saved(const struct job *job, uint64_t began_ns);

/* The step is committed, and the ledger still has it open. */
void timeline_committed(const struct job *job);
/* The ledger has another step open. */
void timeline_opened(const struct job *job);
