/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The executor of an offloaded optimizer. Gradients and weights are on GPUs. Masters, moments and a copy of the weights
 * are in host memory. So this executor reads and writes state like executor-host.c, and executor_store() copies the
 * weights to the GPUs. The update is in step-offload.c.
 */

#include "core/base/base.h"
#include "core/budget/exchange-plan.h"
#include "core/config/config.h"
#include "daemon/engines/devices.h"
#include "daemon/step/executor-device.h"
#include "daemon/step/executor-host.h"
#include "daemon/step/step-offload.h"
#include "daemon/step/step.h"

static int offload_executor_reserve(const struct executor *executor)
{
    const struct segment *landing = &device_of(executor)->landing;
    int r = devices_reserve(executor->devices);

    if (r == 0)
        r = offload_reserve(device_of(executor)->offload);
    return r == 0 ? segment_reserve(landing, 0, landing->n_bytes) : r;
}

static void share_staging(struct executor *executor)
{
    devices_share(executor->devices, DEVICES_STAGING, offload_staging(device_of(executor)->offload));
    devices_share(executor->devices, DEVICES_WEIGHTS, &executor->state->weights);
}

static void offload_executor_start(struct executor *executor, bool adopted)
{
    share_staging(executor);
    device_start(executor, adopted);
}

/* On several nodes in stages 1 and 2, copies all weights from a GPU, because host memory has only the owned weights. */
static int offload_executor_show(struct executor *executor, const struct segment *segment, executor_done done,
                                 void *userdata)
{
    return executor->gathers || !executor->several_nodes ? host_show(executor, segment, done, userdata)
                                                         : device_show_weights(executor, segment, done, userdata);
}

static void offload_executor_free(struct executor *executor)
{
    offload_free(device_of(executor)->offload);
    device_free_executor(executor);
}

static const struct executor_ops offload_ops = {
    .reserve = offload_executor_reserve,
    .start = offload_executor_start,
    .free = offload_executor_free,
    .segments = device_segments,
    .init = device_init,
    .adopt = device_adopt,
    .verify = device_verify,
    .read = host_read,
    .show = offload_executor_show,
    .load = host_load,
    .store = device_store,
};

static int make_offload_step(struct executor *executor)
{
    struct device_executor *device = device_of(executor);
    const struct config_zero *zero = &executor->options.config->zero;
    const struct state_options state = {.no_gradient = true, .n_spares = zero->spare_buckets};
    int r = executor_make_step(executor, &state, &step_offload_ops);

    if (r == 0)
        r = offload_new(&device->offload, executor->step, zero->early_buckets);
    if (r < 0)
        return r;
    executor->step->offload = device->offload;
    executor->holds_state = true;
    if (!executor->gathers || !executor->several_nodes)
        return 0;
    executor->landing = &device->landing;
    return segment_init(&device->landing, "pool", exchange_plan_pool_bytes(executor->options.config, executor->options.layout));
}

int executor_offload_new(struct executor **out, const struct executor_options *options)
{
    int r = device_make(out, &offload_ops, options);

    return r < 0 ? r : make_offload_step(*out);
}
