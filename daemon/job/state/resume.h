/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Loads a checkpoint instead of rank 0's weights while the job is formed: the newest whole checkpoint, or if its bytes
 * are wrong, the one before it, and so on; or the checkpoint that the configuration names.
 */

#include <stdint.h>

struct job;
struct resume;

/*
 * A stage of forming, after the memory is reserved. Return: SEQUENCE_OVER if nothing is to be loaded; SEQUENCE_WAITS if
 * the forming sequence continues when the checkpoint is loaded, or fails with job->forming.refusal; or -errno.
 */
int resume_start(struct job *job);
/* Several nodes: continues the forming sequence. All nodes have loaded the same checkpoint, or none. */
void resume_is_agreed(struct job *job);
/*
 * Several nodes: tries an older checkpoint if the loaded one is newer than that step, because another node could load
 * none newer.
 */
void resume_older(struct job *job, uint64_t step);
/* Sets the job to the step of the loaded checkpoint, if there is one. Called when the job is formed. */
void resume_apply(struct job *job);
/* Frees it. No work of it is under way. NULL is fine. */
void resume_free(struct resume *resume);
