/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The update of a step whose gradients and weights are on GPUs, and whose masters and moments are in host memory
 * (offload_optimizer). The engine copies accumulators to staging. The kernels of this process update masters and
 * moments, as in a job without GPUs. The engine copies the owned slices of the new weights back, and gathers them. No
 * other data are copied between GPU and host memory.
 *
 * The update works by *portions*. A portion is a run of parcels that fits into one of a few slots of staging. While a
 * portion is updated, the next portions are copied in, and earlier portions are copied back.
 *
 * An engine may end at any moment, and this process then continues with a new engine. Copies that the old engine has
 * not reported as done are ordered again (devices.h), and write the same bytes. A portion is updated only once, after
 * the engine has reported the copy of its accumulators. Loop thread, except offload_reserve().
 */

struct offload;
struct segment;
struct step;
struct step_ops;

/* step: must already have its state and devices, and must outlive the result. Return: 0 or -errno. */
int offload_new(struct offload **out, struct step *step);
void offload_free(struct offload *offload);

/* Reserves the pages of staging. Call it once, on any thread. Return: 0 or -errno. */
int offload_reserve(struct offload *offload);
/* Return: the segment to which the engine copies accumulators (DEVICES_STAGING). */
const struct segment *offload_staging(const struct offload *offload);

/* The functions of a step whose `offload` is set. */
extern const struct step_ops step_offload_ops;
