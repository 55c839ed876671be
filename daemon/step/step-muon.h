/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The update of a job with Muon, in the memory of this process. The layout says which parameters are matrices that Muon
 * updates. One worker does all of a matrix:
 *
 *     for each chunk    the momentum buffer takes the gradient; the accumulator becomes what is to be orthogonalised
 *     the matrix        is orthogonalised, from the accumulators into scratch memory
 *     for each chunk    masters and weights change by the result
 *
 * The other parameters are updated chunk by chunk with AdamW.
 *
 * A killed daemon loses no step (step-kept.h): each of the two passes is an operation of its own, which does each chunk
 * once. The scratch memory is lost. The next daemon computes it again from the accumulators, which are kept, with the
 * same bits.
 */

struct config;
struct step;
struct step_ops;

extern const struct step_ops step_muon_ops;

/* Logs how long matrices will take in each step. */
void step_muon_announce(const struct step *step, const struct config *config);

/* Reserves the pages of the scratch memory, if the step has any. Any thread, once. Return: 0 or -errno. */
int step_muon_reserve(const struct step *step);
