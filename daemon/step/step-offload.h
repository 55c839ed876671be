/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The update of a step whose gradients and weights lie on GPUs while its masters and moments lie in host memory
 * (offload_optimizer). The engine copies accumulators to staging, the kernels of this process update masters and
 * moments, as for a job in host memory, and the engine copies the owned slices of the new weights back and gathers
 * them. Nothing else crosses between GPU and host memory.
 *
 * The update proceeds by *portions*, runs of parcels that fit into one of a few slots of staging: while one is updated,
 * the next ones are copied in and the last ones are copied back.
 *
 * An engine may end at any moment. Copies that it has not reported are ordered again (devices.h) and write the same
 * bytes. This process, which does not end with the engine, updates a portion once, when its copy has been reported.
 * For the loop thread, except offload_reserve().
 */

struct offload;
struct segment;
struct step;
struct step_ops;

/* step: has its state and devices, and must outlive it. Return: 0 or -errno. */
int offload_new(struct offload **out, struct step *step);
void offload_free(struct offload *offload);

/* Reserves the pages of staging. Any thread, once. Return: 0 or -errno. */
int offload_reserve(struct offload *offload);
/* The segment that the engine writes accumulators to: DEVICES_STAGING. */
const struct segment *offload_staging(const struct offload *offload);

/* For a step whose `offload` is set. */
extern const struct step_ops step_offload_ops;
