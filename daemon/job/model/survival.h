/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The job's records in the journal (daemon/memory/journal.h). An event is recorded before the job does anything about
 * it; daemon/job/replay.c serves it again for the next daemon.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/memory/journal.h"

struct job;
struct job_rank;

/* rank: NULL, it is of none. data, and then more, are copied. */
void job_record(struct job *job, const struct job_rank *rank, enum journal_type type, const void *data, size_t n_bytes,
                const void *more, size_t n_more);

/*
 * The step was committed or aborted, or the job has got this far in being formed: what is true now becomes the next
 * daemon's beginning. what: enum stored_turn, which tells who is still to be answered.
 */
void job_turn(struct job *job, unsigned what);
