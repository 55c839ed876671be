/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The update of a job with Muon, in the memory of this process. The layout says which parameters are matrices that Muon
 * updates. One worker updates a whole matrix:
 *
 *     for each chunk    updates the momentum buffer, and writes the matrix to be orthogonalised to the accumulator
 *     for the matrix    orthogonalises it, from the accumulators to scratch memory
 *     for each chunk    updates masters and weights with the result
 *
 * AdamW updates the other parameters chunk by chunk.
 *
 * No step is lost when a daemon is killed (step-kept.h). Each of the two passes is an operation of its own, in which
 * each chunk is changed once. The scratch memory is lost, but the accumulators are kept. The next daemon computes the
 * scratch memory again from the accumulators, with the same bits.
 */

struct config;
struct step;
struct step_ops;

extern const struct step_ops step_muon_ops;

/* Logs the time that Muon's matrix products are expected to take in each step. */
void step_muon_announce(const struct step *step, const struct config *config);

/* Reserves the pages of the scratch memory, if the step uses Muon. Call it once, on any thread. Return: 0 or -errno. */
int step_muon_reserve(const struct step *step);
