/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Speculation: updates chunks while the step is still open, into their spare places (daemon/memory/spare.h), so that
 * little is left to do when the step is decided. Until then the state does not change.
 *
 * An update depends on the chunk's accumulator, its masters and moments, and the scalars of its parameter, which
 * contain the learning rate, the loss scale and the factor of clipping. speculation_post() is told the expected
 * scalars. At the decision, the update is accepted if the scalars are equal to the bit, and the accumulator has not
 * changed. Otherwise the chunk is updated as without speculation. So the bits are the same.
 *
 *     VOID --speculation_post()--> OPEN --a worker--> RUNS --> WHOLE
 *     OPEN, WHOLE --speculation_holds(), speculation_drop()--> VOID
 *
 * Nothing of this is kept. A daemon that adopts a run has speculated on nothing.
 */

#include <stdbool.h>
#include <stdint.h>

struct speculation;
struct step;
struct step_update;
struct update_scalars;

/* step: its state has spare places; must outlive the result. Return: 0 or -ENOMEM. */
int speculation_new(struct speculation **out, struct step *step);
/* speculation may be NULL. No worker may be updating chunks. */
void speculation_free(struct speculation *speculation);

/*
 * Updates the chunks of a parcel on the workers. expected: the coming update. Call it when all expected gradients of
 * the parcel are in the accumulators. done() is called when no worker is at it. Return: false, and done() is not
 * called, if an earlier call for the parcel is not done, or there is nothing to update early.
 */
bool speculation_post(struct speculation *speculation, uint32_t parcel, const struct step_update *expected,
                      void (*done)(void *userdata), void *userdata);
/* The step is decided: chunks that no worker has begun are not updated speculatively any more. */
void speculation_close(struct speculation *speculation);
/* Forgets all speculative updates, because a step begins. */
void speculation_forget(struct speculation *speculation);

/*
 * On a worker: waits until no worker updates the chunk speculatively. speculation_drop(): before its accumulator
 * changes. speculation_holds(): at the decision. Return: whether the speculative update is whole, and was made with
 * these scalars.
 */
void speculation_drop(struct speculation *speculation, uint32_t chunk);
bool speculation_holds(struct speculation *speculation, uint32_t chunk, const struct update_scalars *scalars);

/* Counts since the step was made. Chunks without a speculative update are in none. */
struct speculation_counts {
    uint64_t n_accepted, n_elems_accepted; /* chunks, and their elements */
    uint64_t n_dropped;                    /* chunks updated speculatively, but with other scalars or other sums */
};
struct speculation_counts speculation_counts(const struct speculation *speculation);
