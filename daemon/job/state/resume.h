/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Loads a checkpoint instead of rank 0's weights while the job is formed. It is the checkpoint that the configuration
 * names, or else the newest complete checkpoint whose bytes are right.
 */

#include <stdint.h>

struct job;
struct resume;

/*
 * A stage of forming, which runs after the memory is reserved. Return: SEQUENCE_OVER if nothing is to be loaded;
 * -errno; or SEQUENCE_WAITS. After SEQUENCE_WAITS, the forming sequence continues when the checkpoint is loaded, or
 * fails with job->forming.refusal.
 */
int resume_start(struct job *job);
/* Several nodes: called when all nodes have loaded the same checkpoint, or none. Continues the forming sequence. */
void resume_is_agreed(struct job *job);
/*
 * Several nodes: if the loaded checkpoint is newer than that step, tries an older one, because another node could not
 * load a newer one.
 */
void resume_older(struct job *job, uint64_t step);
/* Sets the job to the step of the loaded checkpoint, if there is one. Called when the job is formed. */
void resume_apply(struct job *job);
/* Frees resume. Call it when no work of resume is under way. NULL is fine. */
void resume_free(struct resume *resume);
