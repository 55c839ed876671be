/* SPDX-License-Identifier: Apache-2.0 */

/* The functions of executor.h: those that differ by where the data are call executor->ops. */

#include "daemon/step/executor.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/layout/layout.h"
#include "core/wire/wire-request.h"
#include "daemon/engines/devices.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/weights.h"
#include "daemon/step/executor-ops.h"
#include "daemon/step/pools.h"
#include "daemon/step/step.h"
#include "kernels/position_sum.h"

/* ---- life ---------------------------------------------------------------------------------------------- */

int executor_new(struct executor **out, const struct executor_options *options)
{
    int (*make)(struct executor **, const struct executor_options *) = executor_host_new;
    struct executor *executor = NULL;
    int r;

    if (config_offloads(options->config))
        make = executor_offload_new;
    else if (options->config->device == CONFIG_DEVICE_CUDA)
        make = executor_device_new;
    r = make(&executor, options);
    if (r < 0) {
        executor_stop(executor);
        executor_free(executor);
        return r;
    }
    *out = executor;
    return 0;
}

void executor_free(struct executor *executor)
{
    if (executor)
        executor->ops->free(executor);
}

/* ---- reserving ------------------------------------------------------------------------------------------- */

uint32_t executor_n_reserve_pieces(const struct executor *executor)
{
    return state_n_reserve_pieces(executor->state) + 1;
}

int executor_reserve(struct executor *executor, uint32_t piece)
{
    if (piece < state_n_reserve_pieces(executor->state))
        return state_reserve(executor->state, piece);
    assert(piece == state_n_reserve_pieces(executor->state));
    return executor->ops->reserve(executor);
}

/* ---- verbs ------------------------------------------------------------------------------------------------- */

void executor_start(struct executor *executor, bool adopted)
{
    executor->ops->start(executor, adopted);
}

int executor_reserve_rest(const struct executor *executor)
{
    return executor->ops->reserve(executor);
}

int executor_repartition(struct executor *executor, const struct layout *layout, uint64_t gather_bytes)
{
    return executor->ops->repartition(executor, layout, gather_bytes);
}

void executor_begin_replay(struct executor *executor)
{
    executor->replays = true;
    step_begin_replay(executor->step);
}

void executor_end_replay(struct executor *executor)
{
    executor->replays = false;
    step_end_replay(executor->step);
}

void executor_cancel(struct executor *executor)
{
    if (executor && executor->devices)
        devices_cancel(executor->devices);
}

void executor_stop(struct executor *executor)
{
    if (executor)
        devices_free(steal_ptr(executor->devices));
}

void executor_segments(const struct executor *executor, unsigned local_rank, const struct ring *ring,
                       struct executor_segments *segments)
{
    executor->ops->segments(executor, local_rank, ring, segments);
}

void executor_attend(struct executor *executor, unsigned local_rank, enum executor_attendance what,
                     uint64_t incarnation)
{
    if (!executor->devices)
        return;
    switch (what) {
    case TRAINER_LOST:
        devices_lost_trainer(executor->devices, local_rank);
        break;
    case TRAINER_FOUND:
        devices_found_trainer(executor->devices, local_rank);
        break;
    case TRAINER_REPLACED:
        devices_new_trainer(executor->devices, local_rank, incarnation);
        break;
    }
}

bool executor_awaits(const struct executor *executor, unsigned local_rank, uint64_t point)
{
    return executor && (executor->replays ||
                        (executor->devices && devices_awaits(executor->devices, local_rank, point)));
}

int executor_init(struct executor *executor, const struct executor_init *init)
{
    return executor->ops->init(executor, init);
}

int executor_adopt(struct executor *executor, const uint8_t *weights, executor_done done, void *userdata)
{
    return executor->ops->adopt(executor, weights, done, userdata);
}

int executor_verify(struct executor *executor, const struct executor_verify *verify)
{
    return executor->replays ? 0 : executor->ops->verify(executor, verify);
}

int executor_read(struct executor *executor, const struct executor_read *read)
{
    return executor->ops->read(executor, read);
}

int executor_show(struct executor *executor, const struct segment *segment, executor_done done, void *userdata)
{
    return executor->ops->show(executor, segment, done, userdata);
}

int executor_load(struct executor *executor, executor_done done, void *userdata)
{
    return executor->ops->load(executor, done, userdata);
}

int executor_store(struct executor *executor, executor_done done, void *userdata)
{
    return executor->ops->store(executor, done, userdata);
}

bool executor_is_busy(const struct executor *executor)
{
    return executor && (executor->clears || pools_are_busy(executor->pools));
}
