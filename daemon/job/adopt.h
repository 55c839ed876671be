/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Adoption: a daemon that was started in place of one that was killed takes over its job. The memory is kept, and
 * mapped as it is; the layout is computed anew from the manifest in the journal; the head of the journal says what was true
 * when the step was opened; and the records of its log are served again, by the same code that served them first. Work
 * that was not ended is then begun again. All ranks are away until their processes have connected.
 */

#include <stddef.h>

struct job;

/*
 * Return: 0: there is nothing to take over; 1: it is taken over; -errno and a sentence: it is not, and nothing has
 * changed.
 */
int job_adopt(struct job *job, char *why, size_t why_size);

/* Gives up all that is kept, and says so to whoever keeps it. */
void job_give_up_kept(struct job *job);
