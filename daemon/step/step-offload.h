/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The update of a step whose gradients and weights lie on GPUs while its masters and moments lie here
 * (offload_optimizer). Accumulators come to staging, the kernels of this process update masters and moments, as for a
 * job in host memory, and the owned slices of the new weights go back, to be gathered over there. Nothing else crosses.
 *
 * That is done by *portions*, runs of parcels that fit into one of a few slots of staging: while one is updated, the
 * next ones come and the last ones go.
 *
 * An engine may end at any moment. Copies that it has not reported are given again (devices.h) and write the same
 * bytes; a portion is updated once, when its copy has been reported, by a process that does not end with the engine.
 * Loop thread, but offload_reserve().
 */

struct offload;
struct segment;
struct step;
struct step_ops;

/* step: has its state and devices, and must outlive it. Return: 0 or -errno. */
int offload_new(struct offload **out, struct step *step);
void offload_free(struct offload *offload);

/* The pages of staging. Any thread, once. Return: 0 or -errno. */
int offload_reserve(struct offload *offload);
/* What an engine writes accumulators to: DEVICES_STAGING. */
const struct segment *offload_staging(const struct offload *offload);

/* Of a step whose `offload` is set. */
extern const struct step_ops step_offload_ops;
