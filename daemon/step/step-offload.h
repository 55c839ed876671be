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
 * The sums of the first parcels, as many as memory allows, have places of their own in staging. They are copied there
 * *early*: as soon as all expected gradients of the parcel are in its accumulators, beside the reductions of other
 * parcels (DeviceCopy.aside). An early copy is used by the update if the parcel was not reduced again after it.
 * Otherwise the sums are copied again, like those of other parcels.
 *
 * An engine may end at any moment, and this process then continues with a new engine. Copies that the old engine has
 * not reported as done are ordered again (devices.h), and write the same bytes. A portion is updated only once, after
 * the engine has reported the copy of its accumulators. Loop thread, except offload_reserve().
 */

#include <stdint.h>

struct offload;
struct segment;
struct step;
struct step_ops;

/*
 * step: must already have its state and devices, and must outlive the result. early_buckets: the sums of so many first
 * buckets are copied early. Return: 0 or -errno.
 */
int offload_new(struct offload **out, struct step *step, uint32_t early_buckets);
void offload_free(struct offload *offload);

/* Reserves the pages of staging. Call it once, on any thread. Return: 0 or -errno. */
int offload_reserve(struct offload *offload);
/* Return: the segment to which the engine copies accumulators (DEVICES_STAGING). */
const struct segment *offload_staging(const struct offload *offload);

/* The functions of a step whose `offload` is set. */
extern const struct step_ops step_offload_ops;
