/* SPDX-License-Identifier: Apache-2.0 */

/* Calls the functions of an executor through executor->ops. */

#include "daemon/step/executor.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/layout/layout.h"
#include "core/wire/wire-request.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/weights.h"
#include "daemon/step/executor-ops.h"
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
    return state_n_reserve_pieces(executor->state) + (executor->ops->reserve != NULL);
}

int executor_reserve(struct executor *executor, uint32_t piece)
{
    if (piece < state_n_reserve_pieces(executor->state))
        return state_reserve(executor->state, piece);
    assert(piece == state_n_reserve_pieces(executor->state) && executor->ops->reserve);
    return executor->ops->reserve(executor);
}

/* ---- verbs ------------------------------------------------------------------------------------------------- */

void executor_start(struct executor *executor)
{
    executor->ops->start(executor);
}

int executor_reserve_rest(const struct executor *executor)
{
    return executor->ops->reserve ? executor->ops->reserve(executor) : 0;
}

void executor_go_on(struct executor *executor)
{
    if (executor->ops->go_on)
        executor->ops->go_on(executor);
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
    if (executor)
        executor->ops->cancel(executor);
}

void executor_stop(struct executor *executor)
{
    if (executor)
        executor->ops->stop(executor);
}

void executor_segments(const struct executor *executor, unsigned local_rank, const struct ring *ring,
                       struct executor_segments *segments)
{
    executor->ops->segments(executor, local_rank, ring, segments);
}

void executor_attend(struct executor *executor, unsigned local_rank, enum executor_attendance what,
                     uint64_t incarnation)
{
    executor->ops->attend(executor, local_rank, what, incarnation);
}

bool executor_awaits(const struct executor *executor, unsigned local_rank, uint64_t point)
{
    return executor && (executor->replays || executor->ops->awaits(executor, local_rank, point));
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

int executor_read(struct executor *executor, uint32_t param, enum state_kind kind, float *dst, executor_done done,
                  void *userdata)
{
    return executor->ops->read(executor, param, kind, dst, done, userdata);
}

int executor_read_weights(struct executor *executor, uint32_t param, uint8_t *dst, executor_done done, void *userdata)
{
    return executor->ops->read_weights(executor, param, dst, done, userdata);
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

void executor_empty(struct executor *executor)
{
    executor->ops->empty(executor);
}

bool executor_fits(const struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    return executor->ops->fits(executor, local_rank, params, n_params);
}

void executor_hold(struct executor *executor, uint32_t param)
{
    executor->ops->hold(executor, param);
}

void executor_release(struct executor *executor, uint32_t param)
{
    executor->ops->release(executor, param);
}

void executor_gather(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    executor->ops->gather(executor, local_rank, params, n_params);
}

enum gathered executor_find(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    return executor->ops->find(executor, local_rank, params, n_params);
}

bool executor_places(const struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params,
                     uint64_t *offsets_bytes)
{
    return executor->ops->places(executor, local_rank, params, n_params, offsets_bytes);
}

void executor_hint(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    executor->ops->hint(executor, local_rank, params, n_params);
}

bool executor_refresh(struct executor *executor, void (*done)(void *userdata), void *userdata)
{
    return executor->ops->refresh(executor, done, userdata);
}

bool executor_is_busy(const struct executor *executor)
{
    return executor && executor->ops->is_busy(executor);
}

void executor_let_go(struct executor *executor)
{
    if (executor && executor->ops->let_go)
        executor->ops->let_go(executor);
}

uint64_t executor_held_bytes(const struct executor *executor)
{
    return executor->ops->held_bytes(executor);
}
