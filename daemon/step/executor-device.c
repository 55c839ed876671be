/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The executor on GPUs. Gradients, state and weights are on GPUs, and engines (devices.h) run the step. device-io.c
 * copies values that this process needs in host memory: a parameter's state for a reader, initial weights, and write
 * windows. Initial weights and write windows use the staging copy (executor.h).
 */

#include "daemon/step/executor-device.h"

#include <assert.h>
#include <fcntl.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/keep.h"
#include "core/budget/plan.h"
#include "core/config/config.h"
#include "core/wire/device-wire.h"
#include "daemon/engines/device-keep.h"
#include "daemon/engines/devices.h"
#include "daemon/memory/ring.h"
#include "daemon/step/gather-device.h"
#include "daemon/step/step-device.h"
#include "daemon/step/step.h"

_Static_assert((int)CONFIG_MAX_LOCAL_GPUS <= (int)DEVICE_MAX_LOCAL, "what config admits, an order must hold");

/* ---- reports of engines -------------------------------------------------------------------------------------- */

static const struct executor_events *events_of(const struct executor *executor)
{
    return &executor->options.events;
}

/* Begins the report of an event, which may end the job and free the executor. In that case after() frees the memory. */
static const struct executor_events *begin_report(struct executor *executor)
{
    device_of(executor)->reporting = true;
    return &executor->options.events;
}

static void after(void *userdata)
{
    struct device_executor *device = device_of(userdata);
    const struct executor_events events = device->base.options.events;

    device->reporting = false;
    if (device->freed)
        free(device);
    events.after(events.userdata);
}

static void end_clearing(struct executor *executor, int result, const char *why)
{
    const struct executor_events *events = events_of(executor);

    assert(executor->clears);
    executor->clears = false;
    if (result < 0) {
        events->unformed(events->userdata, result, why);
        return;
    }
    events->formed(events->userdata);
    if (devices_status(executor->devices).ready)
        events->ready(events->userdata);
}

static void confirm_run(struct work *work, uint32_t item)
{
    struct device_executor *device = container_of(work, struct device_executor, confirmation);

    (void)item;
    device->confirmed = keep_is_on() ? keep_confirm(KEEP_TIMEOUT_MS) : 0;
}

static void confirm_done(struct work *work)
{
    struct device_executor *device = container_of(work, struct device_executor, confirmation);

    end_clearing(&device->base, device->confirmed, "the service manager does not keep the memory of the GPUs");
}

/*
 * Handles the end of clear(). Then waits until the service manager keeps the memory's descriptors, because the job is
 * formed only after that.
 */
static void is_cleared(void *userdata, int result)
{
    struct executor *executor = userdata;

    if (result < 0) {
        end_clearing(executor, result, NULL);
        return;
    }
    device_of(executor)->confirmation = (struct work){.run = confirm_run, .done = confirm_done, .n_items = 1};
    worker_post(executor->options.pool, &device_of(executor)->confirmation);
}

/* Zeroes new GPU memory, because moments and the padding between weights begin with zero. */
static int clear(struct executor *executor)
{
    static const enum device_piece_kind kinds[] = {DEVICE_STATE, DEVICE_WEIGHTS};
    const struct device_keep *keep = devices_keep(executor->devices);
    struct devices_move moves[DEVICE_MAX_LOCAL * ARRAY_SIZE(kinds)];
    size_t n = 0;

    assert(executor->n_local <= DEVICE_MAX_LOCAL);
    for (unsigned local = 0; local < executor->n_local; local++)
        for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
            if (keep->places[local].piece_bytes[kinds[i]] > 0)
                moves[n++] = (struct devices_move){.write = true,
                                                   .local_rank = local,
                                                   .kind = kinds[i],
                                                   .n_bytes = keep->places[local].piece_bytes[kinds[i]]};
    return devices_copy(executor->devices, moves, n, is_cleared, executor);
}

/* Stage 3: makes the bookkeeping of the ranks' pools. Call it when the engine has allocated the GPU memory. */
static int make_gather(struct executor *executor)
{
    assert(!executor->pools);
    return executor->gathers ? device_gather_new(executor) : 0;
}

/* Handles the event that an engine is ready. first: the engine is the first one, which has allocated the GPU memory. */
static void on_ready(void *userdata, bool first)
{
    struct executor *executor = userdata;
    const struct executor_events *events = begin_report(executor);
    int r;

    if (!first) {
        events->ready(events->userdata);
        return;
    }
    r = make_gather(executor);
    if (r == 0)
        r = clear(executor);
    executor->clears = r == 0;
    if (r < 0)
        events->unformed(events->userdata, -ENOMEM, "out of memory");
}

static void on_put(void *userdata, const char *key, const uint8_t *value, size_t n_bytes)
{
    const struct executor_events *events = begin_report(userdata);

    events->put(events->userdata, key, value, n_bytes);
}

static void on_failed(void *userdata, uint32_t generation, const char *why)
{
    const struct executor_events *events = begin_report(userdata);

    if (generation == 0)
        events->unformed(events->userdata, -EIO, why);
    else
        events->failed(events->userdata, generation, why);
}

/* ---- life ---------------------------------------------------------------------------------------------------- */

int device_make(struct executor **out, const struct executor_ops *ops, const struct executor_options *options)
{
    const struct config *config = options->config;
    struct device_executor *device = calloc(1, sizeof(*device));
    struct executor *executor;
    int r;

    if (!device)
        return -ENOMEM;
    *out = executor = &device->base;
    device->landing = SEGMENT_NULL;
    executor_set_up(executor, ops, options);
    executor->on_gpus = true;
    executor->ring_bytes = plan_device_ring_bytes(options->layout, config->zero.overlap_comm);
    r = devices_new(
        &executor->devices,
        &(struct devices_options){
            .loop = options->loop,
            .pool = options->pool,
            .kernels = options->kernels,
            .plan = {.layout = options->layout,
                     .stage = config_stage(config),
                     .first_local = executor->first_rank,
                     .n_local = executor->n_local,
                     .optimizer = config->optimizer.type,
                     .moments = config_moments(config),
                     .deterministic = config->deterministic,
                     .offload = config_offloads(config),
                     .ring_bytes = executor->ring_bytes,
                     .pool_bytes = executor->gathers ? plan_device_pool_bytes(options->layout) : 0},
            .node = config->world.node,
            .n_nodes = (unsigned)MAX(config->world.nodes.n_items, (size_t)1),
            .ops = {.ready = on_ready, .failed = on_failed, .put = on_put, .after = after, .userdata = executor},
        });
    return r == 0 && devices_were_found(executor->devices) ? make_gather(executor) : r;
}

static int device_reserve(const struct executor *executor)
{
    int r = devices_reserve(executor->devices);

    return r == 0 && executor->several_nodes ? device_reserve_copy(executor) : r;
}

void device_start(struct executor *executor, bool adopted)
{
    const struct executor_events *events = events_of(executor);

    if (!adopted)
        events->reserved(events->userdata);
    if (!executor->several_nodes) /* on several nodes the owner starts an engine for each generation */
        devices_start(executor->devices);
}

void device_free_executor(struct executor *executor)
{
    struct device_executor *device = device_of(executor);

    segment_deinit(&device->landing);
    executor_deinit(executor);
    if (device->reporting)
        device->freed = true;
    else
        free(device);
}

/* ---- ranks --------------------------------------------------------------------------------------------------- */

static int duplicate(int fd)
{
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);

    return copy < 0 ? -errno : copy;
}

/*
 * Fills in a rank's segments. Shares whole allocations of GPU memory, because a handle cannot grant access to a part.
 */
void device_segments(const struct executor *executor, unsigned local_rank, const struct ring *ring,
                     struct executor_segments *out)
{
    const struct device_keep *keep = devices_keep(executor->devices);
    enum device_piece_kind published = executor->gathers ? DEVICE_POOL : DEVICE_WEIGHTS;

    (void)ring;
    out->gpu = keep->facts->gpus[local_rank];
    out->segments[0] = (struct wire_segment){
        .kind = WIRE_SEGMENT_RING, .n_bytes = keep->facts->n_bytes[local_rank][DEVICE_RING], .cuda = true};
    out->segments[3] = (struct wire_segment){.kind = executor->gathers ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS,
                                             .n_bytes = keep->facts->n_bytes[local_rank][published],
                                             .cuda = true};
    out->segments[4] =
        (struct wire_segment){.kind = WIRE_SEGMENT_PROGRESS, .n_bytes = keep->progress_segments[local_rank].n_bytes};
    out->fds[0] = duplicate(keep->fds[local_rank][DEVICE_RING]);
    out->fds[3] = duplicate(keep->fds[local_rank][published]);
    out->fds[4] = segment_open_rw(&keep->progress_segments[local_rank]);
}

/* ---- the table ----------------------------------------------------------------------------------------------- */

static int device_show(struct executor *executor, const struct segment *segment, executor_done done, void *userdata)
{
    return executor->gathers ? device_show_masters(executor, segment, done, userdata)
                             : device_show_weights(executor, segment, done, userdata);
}

static const struct executor_ops device_ops_table = {
    .reserve = device_reserve,
    .start = device_start,
    .free = device_free_executor,
    .segments = device_segments,
    .init = device_init,
    .adopt = device_adopt,
    .verify = device_verify,
    .read = device_read,
    .show = device_show,
    .load = device_load,
    .store = device_store,
};

int executor_device_new(struct executor **out, const struct executor_options *options)
{
    int r = device_make(out, &device_ops_table, options);

    if (r == 0)
        r = executor_make_step(*out, &(struct state_options){.staging_copy = true}, &step_device_ops);
    if (r == 0)
        (*out)->copy_bytes = (*out)->state->state.n_bytes + (*out)->state->weights.n_bytes;
    return r;
}
