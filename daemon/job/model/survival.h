/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The job's records in the journal (daemon/memory/journal.h). An event is recorded before the job handles it. In the
 * next daemon, daemon/job/replay.c replays the records.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/memory/journal.h"

struct job;
struct job_rank;

/* Appends a record to the journal, with the contents data followed by more. rank: NULL for an event of no rank. */
void job_record(struct job *job, const struct job_rank *rank, enum journal_type type, const void *data, size_t n_bytes,
                const void *more, size_t n_more);

/*
 * Stores the present state in the journal's head, with which the next daemon begins. Called after a commit, an abort or
 * a window, and in stages of forming. what: enum stored_turn, which says which ranks must still be answered.
 */
void job_turn(struct job *job, unsigned what);
