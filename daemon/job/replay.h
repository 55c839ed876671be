/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Replay: serves the journal's records again, in order, by the code that served them first. Meanwhile
 * job->run.survival.replays is set, so nothing is sent or recorded.
 */

#include <stddef.h>

struct job;

/* Serves all records of the log again. Return: 0, or -errno and a sentence that names the record. */
int replay_log(struct job *job, char *why, size_t why_size);

/* Ends the replay. From then on the job decides and records again. Its ranks are away until their processes connect. */
void replay_end(struct job *job);
