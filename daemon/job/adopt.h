/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Adoption: a new daemon takes over the job of a killed daemon. It maps the kept memory, and computes the layout again
 * from the manifest in the journal. It restores the state at the start of the step from the journal's head, and replays
 * the journal's log with the code that served the events first. Then it starts unfinished work again. Each rank is away
 * until its process has connected.
 */

#include <stddef.h>

struct job;

/*
 * Adopts the kept job. Return: 0 if there is no job to adopt; 1 if the job is adopted; -errno, and a sentence, if the
 * adoption failed. After a failure, the memory stays kept, and the job refuses ranks.
 */
int job_adopt(struct job *job, char *why, size_t why_size);

/* Deletes the journal, and makes the service manager close all kept descriptors. */
void job_give_up_kept(struct job *job);
