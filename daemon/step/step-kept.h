/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The part of a step that lies in kept memory: the chunks that are done, their results, and all that is needed to finish
 * a chunk in the midst of which the daemon was killed. Each sum and each update is an operation with a number; a chunk
 * that is done has the number as its stamp.
 *
 * On a worker:
 *
 *     step_begin_chunk()      is it still to be done? then in which slot
 *     step_..._in_slot()      the kernel
 *     (the caller stores the results)
 *     step_end_chunk()        the stamp
 *
 * The next daemon does all this again for each operation that was under way: first the chunks that a slot names, in that
 * slot (step_find_torn()), then the others. A slot never describes anything but the chunk that its worker is at; so a
 * daemon that is killed while it finishes a chunk leaves it to the next one.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/step/step.h"

/* Makes the memory, or finds it. Return: 0 or -errno. */
int step_keep(struct step *step);

/* Return: whether the operation has done the chunk; always false in a job that keeps nothing. */
bool step_is_done(const struct step *step, uint64_t op, uint32_t chunk);

/* Return: false, the chunk is done. *slot: of this worker; NULL: nothing is kept. */
bool step_begin_chunk(struct step *step, uint64_t op, uint32_t chunk, struct step_slot **slot);
void step_end_chunk(struct step *step, uint64_t op, uint32_t chunk, struct step_slot *slot);

/* Finds the next slot, from *i on, in which that operation was cut off. Return: false, there is none. */
bool step_find_torn(const struct step *step, uint64_t op, unsigned *i, struct step_slot **slot, uint32_t *chunk);

/* The kernel on the rest of the chunk. The results are those of the whole chunk. */
void step_reduce_in_slot(const struct step *step, struct step_slot *slot, const struct reduce_args *args,
                         struct reduce_result *result);
typedef void step_kernel(const struct update_args *args);
/* slot: NULL: the kernel on all of the chunk. */
void step_update_in_slot(struct step_slot *slot, step_kernel *kernel, const struct update_args *args);

/* step->finding has changed. */
void step_keep_found(struct step *step);
