/* SPDX-License-Identifier: Apache-2.0 */

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

void executor_set_up(struct executor *executor, const struct executor_ops *ops, const struct executor_options *options)
{
    const struct config *config = options->config;

    executor->ops = ops;
    executor->options = *options;
    executor->first_rank = config_first_rank(config);
    executor->n_local = config_local_ranks(config);
    executor->several_nodes = options->several_nodes;
    executor->gathers = config->zero.stage == 3;
}

int executor_make_step(struct executor *executor, const struct state_options *where, const struct step_ops *ops)
{
    const struct executor_options *options = &executor->options;
    const struct config *config = options->config;
    struct state_options state = *where;
    int r;

    state.layout = options->layout;
    state.stage = (unsigned)config->zero.stage;
    state.first_rank = executor->first_rank;
    state.n_ranks = executor->n_local;
    state.moments = optimizer_moments(config->optimizer.type, &config->optimizer.hyper);
    r = state_new(&executor->state, &state);
    if (r < 0)
        return r;
    return step_new(&executor->step, &(struct step_options){.ops = ops,
                                                            .devices = executor->devices,
                                                            .wire = config->communication_data_type,
                                                            .state = executor->state,
                                                            .kernels = options->kernels,
                                                            .pool = options->pool,
                                                            .first_local = executor->first_rank,
                                                            .n_local = executor->n_local,
                                                            .optimizer = config->optimizer.type});
}

void executor_deinit(struct executor *executor)
{
    assert(!executor->devices); /* stopped */
    step_free(executor->step);
    state_free(executor->state);
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
    return executor->ops->reserve(executor);
}

/* ---- verbs ------------------------------------------------------------------------------------------------- */

void executor_start(struct executor *executor)
{
    executor->ops->start(executor);
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

void executor_attend(struct executor *executor, unsigned local_rank, enum executor_attendance what)
{
    executor->ops->attend(executor, local_rank, what);
}

void executor_event(struct executor *executor, unsigned local_rank, uint32_t number, const uint8_t *handle)
{
    executor->ops->event(executor, local_rank, number, handle);
}

bool executor_has_event(const struct executor *executor, unsigned local_rank, uint32_t number)
{
    return executor && executor->ops->has_event(executor, local_rank, number);
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
    return executor->ops->verify(executor, verify);
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

uint64_t executor_held_bytes(const struct executor *executor)
{
    return executor->ops->held_bytes(executor);
}

/* ---- what implementations share ---------------------------------------------------------------------------- */

static void do_nothing(struct work *work, uint32_t item)
{
    (void)work;
    (void)item;
}

void executor_post_nothing(const struct executor *executor, struct work *work, void (*done)(struct work *work))
{
    *work = (struct work){.run = do_nothing, .done = done, .n_items = 1};
    worker_post(executor->options.pool, work);
}

int executor_store_initial(const struct executor *executor, const struct executor_init *init, const void *bytes)
{
    const struct request_init *request = &init->request;

    weights_store(executor->state, executor->options.kernels, request->param, request->start_elem, request->n_elems,
                  bytes);
    return init->keep ? init->keep(init->userdata, request, bytes) : 0;
}

static void checksum_run(struct work *work, uint32_t item)
{
    struct checksum *checksum = container_of(work, struct checksum, work);
    const struct layout *layout = checksum->executor->options.layout;
    const struct layout_part *part = &layout->parts[checksum->verify.part];
    struct position_sum sum = {0};

    (void)item;
    (void)failpoint("verify");
    checksum->executor->options.kernels->position_sum_update(&sum, layout->params[part->param].grad_dtype,
                                                             checksum->bytes, part->n_elems, part->start_elem);
    checksum->sum = position_sum_finish(&sum, layout_part_bytes(layout, checksum->verify.part));
}

static void checksum_done(struct work *work)
{
    struct checksum *checksum = container_of(work, struct checksum, work);

    checksum_end(checksum, 0);
}

struct checksum *checksum_new(const struct executor *executor, const struct executor_verify *verify)
{
    struct checksum *checksum = calloc(1, sizeof(*checksum));

    if (checksum)
        *checksum = (struct checksum){.executor = executor, .verify = *verify};
    return checksum;
}

void checksum_post(struct checksum *checksum)
{
    checksum->work = (struct work){.run = checksum_run, .done = checksum_done, .n_items = 1};
    worker_post(checksum->executor->options.pool, &checksum->work);
}

void checksum_free(struct checksum *checksum)
{
    free(checksum->copy);
    free(checksum);
}

void checksum_end(struct checksum *checksum, int result)
{
    struct executor_verify verify = checksum->verify;
    uint64_t sum = checksum->sum;

    checksum_free(checksum);
    verify.done(verify.userdata, result, sum);
}
