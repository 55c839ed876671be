/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The part of a step in kept memory: the finished chunks, their results, and the data to finish a chunk that a killed
 * daemon was working on. Each sum and each update is an operation with a number. A finished chunk has this number as
 * its stamp.
 *
 * On a worker:
 *
 *     step_begin_chunk()      skips a finished chunk, else gets the slot
 *     step_..._in_slot()      runs the kernel
 *     (the caller stores the results)
 *     step_end_chunk()        writes the stamp
 *
 * The next daemon repeats this for each operation that was not finished. It first finishes the chunks that are in
 * slots, with their slots (step_find_torn()), and then does the other chunks. A slot always describes its worker's
 * current chunk. So if a daemon is killed while it finishes a chunk, the next daemon can finish the chunk.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/step/step.h"

/* Makes the memory, or finds the kept memory. Return: 0 or -errno. */
int step_keep(struct step *step);

/* Return: whether the operation has finished the chunk. Always false in a job without kept memory. */
bool step_is_done(const struct step *step, uint64_t op, uint32_t chunk);

/* *slot: this worker's slot, or NULL without kept memory. Return: false if the chunk is finished. */
bool step_begin_chunk(struct step *step, uint64_t op, uint32_t chunk, struct step_slot **slot);
void step_end_chunk(struct step *step, uint64_t op, uint32_t chunk, struct step_slot *slot);

/* Finds the next slot, from *i, of an unfinished chunk of that operation. Return: false if there is no such slot. */
bool step_find_torn(const struct step *step, uint64_t op, unsigned *i, struct step_slot **slot, uint32_t *chunk);

/* Runs the kernel on the rest of the chunk. The results are those of the whole chunk. */
void step_reduce_in_slot(const struct step *step, struct step_slot *slot, const struct reduce_args *args,
                         struct reduce_result *result);
typedef void step_kernel(const struct update_args *args);
/* Runs the kernel on the rest of the chunk, or on the whole chunk if slot is NULL. */
void step_update_in_slot(struct step_slot *slot, step_kernel *kernel, const struct update_args *args);

/* Stores step->finding in kept memory, because it has changed. */
void step_keep_found(struct step *step);
