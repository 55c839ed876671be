/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Replay: the journal's records are served again, in their order, by the code that served them first. Nothing is sent
 * and nothing is recorded meanwhile: job->run.survival.replays is set.
 */

#include <stddef.h>

struct job;

/* Serves all records of the log again. Return: 0, or -errno and a sentence that names the record. */
int replay_log(struct job *job, char *why, size_t why_size);

/* Ends the replay: the job decides and records by itself again. Its ranks are away until their processes connect. */
void replay_end(struct job *job);
