/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Spare places: a second place in memory for the masters and moments of each chunk. A speculative update
 * (daemon/step/speculation.h) writes there while the chunk's values are still valid. When the step is decided and the
 * update is accepted, the chunk *turns*: the values in its other place become valid, and its first place is spare.
 *
 * Which place is valid is a word in kept memory, with the number of the operation that turned the chunk. So if a daemon
 * is killed, its successor knows each chunk's place, and whether the operation has turned the chunk already.
 *
 * Published weights have one place, which ranks map. They are copied there when the update is accepted. fp32 masters
 * and the upper 16 bits of masters of 24 bits are published weights.
 *
 * Only for a state in host memory on one node, in stages 1 and 2, and not for matrices of Muon, which are not updated
 * chunk by chunk. Where memory is short, only the first buckets have spare places, because their gradients come first.
 */

#include "daemon/memory/state.h"

/* turns: a word for each chunk, zero or as an earlier daemon left it; must outlive the state, or the next call. NULL:
 * chunks have one place; all must be at home. */
void spare_use(struct state *state, _Atomic(uint64_t) *turns);

/* Does the chunk have a spare place? */
bool spare_has(const struct state *state, uint32_t chunk);
/* Are the chunk's values in the second place? */
bool spare_is_turned(const struct state *state, uint32_t chunk);
/* Return: the second place of the chunk. */
struct state_place spare_second(const struct state *state, uint32_t chunk);
/*
 * Return: the place to which a speculative update writes: masters and moments that become valid with spare_turn(), and
 * published weights that spare_publish() copies.
 */
struct state_place spare_place(const struct state *state, uint32_t chunk);

/* Copies the published weights of an accepted update. May be repeated, also after spare_turn(). */
void spare_publish(const struct state *state, uint32_t chunk);
/* Turns the chunk, unless the operation has turned it already. */
void spare_turn(const struct state *state, uint32_t chunk, uint64_t op);

/* Copies the values of a turned chunk back to the first place, and turns the chunk. May be repeated. */
void spare_bring_home(const struct state *state, uint32_t chunk);
