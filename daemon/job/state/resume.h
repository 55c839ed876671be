/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A job that is being formed begins with a checkpoint instead of rank 0's weights: with the newest whole one, the one
 * before it if a byte of that is wrong, and so on; or with the one that the configuration names.
 */

#include <stdint.h>

struct job;
struct resume;

/*
 * A stage of forming: the memory is there. Return: SEQUENCE_OVER: nothing is to be loaded; SEQUENCE_WAITS: the forming
 * sequence goes on when it is, or fails with job->forming.refusal; or -errno.
 */
int resume_start(struct job *job);
/* Several nodes: all have loaded the same one, or none: the forming sequence goes on. */
void resume_is_agreed(struct job *job);
/* Another node could load none that is newer than that step's. */
void resume_older(struct job *job, uint64_t step);
/* The job has been formed: its ranks go on where the checkpoint ends, if one was loaded. */
void resume_apply(struct job *job);
/* The job goes. NULL is fine. No work of it is under way. */
void resume_free(struct resume *resume);
