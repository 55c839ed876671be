/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The code that all executors share: construction and destruction, initial weights in host memory, checksums of
 * repeated pushes.
 */

#include "daemon/step/executor.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/caches.h"
#include "core/base/failpoint.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/layout/layout.h"
#include "core/wire/wire-request.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/spare.h"
#include "daemon/memory/weights.h"
#include "daemon/step/executor-ops.h"
#include "daemon/step/pools.h"
#include "daemon/step/speculation.h"
#include "daemon/step/step.h"
#include "kernels/position_sum.h"

void executor_set_up(struct executor *executor, const struct executor_ops *ops, const struct executor_options *options)
{
    const struct config *config = options->config;

    executor->ops = ops;
    executor->options = *options;
    executor->first_rank = config_first_rank(config);
    executor->n_local = config_local_ranks(config);
    executor->several_nodes = options->several_nodes;
    executor->gathers = config_stage(config) == 3;
    assert(executor->n_local > 0 && executor->n_local <= STEP_MAX_RANKS);
}

static int make_step(const struct executor *executor, const struct step_ops *ops, struct step **out)
{
    const struct executor_options *options = &executor->options;

    return step_new(out, &(struct step_options){.ops = ops,
                                                .devices = executor->devices,
                                                .wire = options->config->communication_data_type,
                                                .state = executor->state,
                                                .kernels = options->kernels,
                                                .pool = options->pool,
                                                .cache_bytes = caches_last_level_bytes(),
                                                .publishes = executor->publishes,
                                                .first_local = executor->first_rank,
                                                .n_local = executor->n_local,
                                                .optimizer = options->config->optimizer.type});
}

int executor_make_step(struct executor *executor, const struct state_options *where, const struct step_ops *ops)
{
    const struct executor_options *options = &executor->options;
    const struct config *config = options->config;
    struct state_options state = *where;
    int r;

    state.layout = options->layout;
    state.stage = config_stage(config);
    state.first_rank = executor->first_rank;
    state.n_ranks = executor->n_local;
    state.moments = config_moments(config);
    r = state_new(&executor->state, &state);
    return r < 0 ? r : make_step(executor, ops, &executor->step);
}

/*
 * Copies all values to their first places, because chunks of another number of ranks have other bounds. On the loop
 * thread, because no rank is attached: some seconds for a model of 1 G parameters.
 */
static void bring_home(struct step *step)
{
    if (!step->turns)
        return;
    speculation_forget(step->speculation); /* its results may be in the first places */
    for (uint32_t c = 0; c < step->layout->n_chunks; c++)
        spare_bring_home(step->state, c);
    spare_use(step->state, NULL);
}

int executor_replace_step(struct executor *executor, const struct layout *layout)
{
    const struct layout *before = executor->options.layout;
    struct step *step;
    int r;

    assert(!executor->several_nodes && executor->first_rank == 0);
    assert(executor->state->n_ranks == executor->n_local);
    assert(executor->step->layout == before && executor->state->layout == before);
    bring_home(executor->step);
    state_repartition(executor->state, layout);
    executor->n_local = layout->world_size;
    r = make_step(executor, executor->step->ops, &step);
    if (r < 0) {
        executor->n_local = before->world_size;
        spare_use(executor->state, NULL);
        state_repartition(executor->state, before);
        spare_use(executor->state, executor->step->turns);
        return r;
    }
    step_go_on_from(step, executor->step);
    step_free(executor->step);
    executor->step = step;
    executor->options.layout = layout;
    return 0;
}

void executor_empty(struct executor *executor)
{
    if (!executor->state->staging_copy)
        return;
    segment_punch(&executor->state->state, 0, executor->state->state.n_bytes);
    segment_punch(&executor->state->weights, 0, executor->state->weights.n_bytes);
}

void executor_deinit(struct executor *executor)
{
    assert(!executor->devices); /* executor_stop() was called */
    pools_free(executor->pools);
    step_free(executor->step);
    state_free(executor->state);
}

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
