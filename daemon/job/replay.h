/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Replay: serves the records of the journal's log again, in order, by the code that served the events first. Until
 * replay_end(), job->run.survival.replay is set, and nothing is recorded or sent. Sums and verifications end with their
 * records (executor_begin_replay()). The clock shows the time of each record.
 */

#include <stddef.h>
#include <stdint.h>

struct job;

/* Return: 0 or -ENOMEM. */
int replay_begin(struct job *job);
/* Serves all records of the log again. Return: 0, or -errno and a sentence that names the record. */
int replay_log(struct job *job, char *why, size_t why_size);
/* Ends the replay. From then on the job decides and records again. Ranks are away until their processes connect. */
void replay_end(struct job *job);
/* Ends the replay of a log that cannot be replayed. The caller then drops the job. */
void replay_cancel(struct job *job);
