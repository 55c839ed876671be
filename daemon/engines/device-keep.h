/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The keep outlives an engine of GPUs: the descriptors of the device memory that the engine has allocated, and three
 * segments of host memory (the plan, and the inputs and results of orders). A killed engine's memory stays on the GPUs
 * as long as the daemon holds these descriptors. The next engine maps it, and puts back the buckets that were torn in
 * an update.
 *
 * devices.c, which starts engines, owns the keep; an engine borrows it until ended() of device.h.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "core/wire/device-plan.h"
#include "core/wire/device-wire.h"

struct device_keep {
    struct segment plan_segment, inputs_segment, results_segment;
    struct device_plan plan;
    struct device_inputs inputs;
    struct device_results results;
    struct device_places *places;
    uint64_t *frozen;                                    /* as device_plan_places() has it */
    uint64_t piece_bytes[DEVICE_N_PIECES];               /* the size that is needed */
    int fds[DEVICE_MAX_LOCAL][DEVICE_N_PIECES];          /* -1: not allocated yet */
    uint64_t n_bytes[DEVICE_MAX_LOCAL][DEVICE_N_PIECES]; /* the size that was allocated */
    uint8_t gpus[DEVICE_MAX_LOCAL][DEVICE_GPU_BYTES];    /* UUIDs of the GPUs that have the memory */
    bool in_use;                                         /* by an engine that has not ended */
};

/* Pages are reserved. Return: 0 or -errno. */
int device_keep_init(struct device_keep *keep, const struct device_plan_options *options);
void device_keep_deinit(struct device_keep *keep);
