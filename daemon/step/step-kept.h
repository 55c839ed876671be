/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The part of a step in kept memory: which chunks are finished, their results, and the data to finish the chunks that a
 * killed daemon was working on ("torn" chunks). Each sum and each update is an operation with a number. When a chunk is
 * finished, the number of the operation becomes the chunk's stamp.
 *
 * On a worker:
 *
 *     step_begin_chunk()      returns false for a finished chunk, else returns the worker's slot
 *     step_..._in_slot()      runs the kernel
 *     (the caller stores the results)
 *     step_end_chunk()        writes the stamp
 *
 * The next daemon repeats each operation that was not finished. It first finishes the torn chunks, each with the slot
 * that describes it (step_find_torn()), and then processes the other chunks. A slot always describes its worker's
 * current chunk. So if a daemon is killed while it finishes a torn chunk, its successor can finish the chunk.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/step/step.h"

/* Makes the memory, or opens the memory that an earlier daemon kept. Return: 0 or -errno. */
int step_keep(struct step *step);

/* Return: whether the chunk is finished in this operation. Always false in a job without kept memory. */
bool step_is_done(const struct step *step, uint64_t op, uint32_t chunk);

/*
 * Begins a chunk in this worker's slot. *slot: the slot, or NULL without kept memory. Return: false if the chunk is
 * already finished.
 */
bool step_begin_chunk(struct step *step, uint64_t op, uint32_t chunk, struct step_slot **slot);
void step_end_chunk(struct step *step, uint64_t op, uint32_t chunk, struct step_slot *slot);
/* Notes that the chunk's speculative update is accepted, so that the next daemon finishes that. slot: may be NULL. */
void step_accept_in_slot(struct step_slot *slot);

/* Finds the next torn chunk of the operation, and its slot, from slot number *i on. Return: false at the end. */
bool step_find_torn(const struct step *step, uint64_t op, unsigned *i, struct step_slot **slot, uint32_t *chunk);

/* Runs the kernel on the elements of the chunk that are not reduced yet. Stores the results of the whole chunk. */
void step_reduce_in_slot(const struct step *step, struct step_slot *slot, const struct reduce_args *args,
                         struct reduce_result *result);
typedef void step_kernel(const struct update_args *args);
/* Runs the kernel on the elements of the chunk that are not updated yet, or on the whole chunk if slot is NULL. */
void step_update_in_slot(struct step_slot *slot, step_kernel *kernel, const struct update_args *args);

/* Stores step->finding in kept memory. Call it when step->finding has changed. */
void step_keep_found(struct step *step);
