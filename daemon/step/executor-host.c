/* SPDX-License-Identifier: Apache-2.0 */

/* The executor in host memory. Workers of this process do all work. */

#include "daemon/step/executor-host.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/segment.h"
#include "core/base/worker.h"
#include "core/budget/budget.h"
#include "core/budget/plan.h"
#include "core/config/config.h"
#include "core/layout/layout.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/transfer.h"
#include "daemon/memory/weights.h"
#include "daemon/step/executor-ops.h"
#include "daemon/step/gather-host.h"
#include "daemon/step/published.h"
#include "daemon/step/step-muon.h"
#include "daemon/step/step.h"
#include "kernels/convert.h"
#include "kernels/kernels.h"

/* ---- work for the workers ---------------------------------------------------------------------------------- */

struct host_io {
    struct work work;
    const struct executor *executor;
    executor_done done;
    void *userdata;
    int result;
    uint32_t param;
    enum state_kind kind;
    void *dst;
    const uint8_t *weights;
    struct executor_init init;
};

static void io_done(struct work *work)
{
    struct host_io *io = container_of(work, struct host_io, work);
    executor_done done = io->done;
    void *userdata = io->userdata;
    int result = io->result;

    free(io);
    done(userdata, result);
}

/* Runs the work on the workers with a copy of `what`. Return: 0 or -ENOMEM. */
static int io_post(const struct host_io *what, void (*run)(struct work *work, uint32_t item), uint32_t n_items)
{
    struct host_io *io = malloc(sizeof(*io));

    if (!io)
        return -ENOMEM;
    *io = *what;
    io->work = (struct work){.run = run, .done = io_done, .n_items = n_items};
    worker_post(io->executor->options.pool, &io->work);
    return 0;
}

/* ---- life -------------------------------------------------------------------------------------------------- */

static void host_start(struct executor *executor, bool adopted)
{
    const struct executor_events *events = &executor->options.events;

    if (adopted)
        return;
    events->formed(events->userdata);
    events->reserved(events->userdata);
}

static void set_ring_bytes(struct executor *executor)
{
    const struct config *config = executor->options.config;
    const struct layout *layout = executor->options.layout;

    executor->ring_bytes =
        plan_ring_bytes(layout, config->zero.overlap_comm, budget_ring_holds_all(config, layout, executor->n_local));
}

static int host_repartition(struct executor *executor, const struct layout *layout, uint64_t gather_bytes)
{
    int r = executor_replace_step(executor, layout);

    if (r < 0)
        return r;
    set_ring_bytes(executor);
    executor->options.gather_bytes = gather_bytes;
    if (executor->gathers)
        host_pool_bound(executor->pools, gather_bytes);
    return 0;
}

/*
 * Reserves Muon's memory, on a worker. Logs the expected time of a step, but not again in a daemon that adopts a job.
 */
static int host_reserve(const struct executor *executor)
{
    if (executor->step->muon && !state_was_found(executor->state))
        step_muon_announce(executor->step, executor->options.config);
    return step_muon_reserve(executor->step);
}

static void host_free(struct executor *executor)
{
    executor_deinit(executor);
    free(executor);
}

/* ---- ranks ------------------------------------------------------------------------------------------------- */

static void host_segments(const struct executor *executor, unsigned local_rank, const struct ring *ring,
                          struct executor_segments *out)
{
    const struct segment *published =
        executor->gathers ? host_pool_segment(executor->pools) : &executor->state->weights;
    const struct segment *page;

    (void)local_rank;
    out->segments[0] = (struct wire_segment){.kind = WIRE_SEGMENT_RING, .n_bytes = ring->ring.n_bytes};
    out->segments[1] = (struct wire_segment){.kind = WIRE_SEGMENT_OVERFLOW, .n_bytes = ring->overflow.n_bytes};
    out->segments[3] = (struct wire_segment){.kind = executor->gathers ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS,
                                             .n_bytes = published->n_bytes};
    out->fds[0] = segment_open_rw(&ring->ring);
    out->fds[1] = segment_open_rw(&ring->overflow);
    out->fds[3] = segment_open_ro(published);
    if (executor->step->published) {
        page = published_segment(executor->step->published);
        out->segments[4] = (struct wire_segment){.kind = WIRE_SEGMENT_PUBLISHED, .n_bytes = page->n_bytes};
        out->fds[4] = segment_open_ro(page);
    }
}

/* ---- initial weights --------------------------------------------------------------------------------------- */

static void init_run(struct work *work, uint32_t item)
{
    struct host_io *io = container_of(work, struct host_io, work);

    (void)item;
    io->result =
        executor_store_initial(io->executor, &io->init, io->init.ring->ring.map + io->init.request.offset_bytes);
}

static int host_init_weights(struct executor *executor, const struct executor_init *init)
{
    return io_post(
        &(struct host_io){.executor = executor, .init = *init, .done = init->done, .userdata = init->userdata},
        init_run, 1);
}

static void adopt_run(struct work *work, uint32_t item)
{
    const struct host_io *io = container_of(work, struct host_io, work);
    const struct executor *executor = io->executor;
    const struct layout_param *p = &executor->options.layout->params[item];

    if (executor->gathers || (p->trainable && p->dtype != DTYPE_F32))
        weights_adopt(executor->state, executor->options.kernels, item, io->weights + p->weight_offset_bytes);
}

static int host_adopt(struct executor *executor, const uint8_t *weights, executor_done done, void *userdata)
{
    return io_post(&(struct host_io){.executor = executor, .weights = weights, .done = done, .userdata = userdata},
                   adopt_run, executor->options.layout->n_params);
}

/* ---- repeated pushes --------------------------------------------------------------------------------------- */

static int host_verify(struct executor *executor, const struct executor_verify *verify)
{
    struct checksum *checksum = checksum_new(executor, verify);

    if (!checksum)
        return -ENOMEM;
    checksum->bytes = verify->slot->data + layout_part_offset_bytes(executor->options.layout, verify->part);
    checksum_post(checksum);
    return 0;
}

/* ---- state ------------------------------------------------------------------------------------------------- */

static void read_frozen_run(struct work *work, uint32_t item)
{
    const struct host_io *io = container_of(work, struct host_io, work);
    const struct executor *executor = io->executor;
    const struct layout_param *p = &executor->options.layout->params[io->param];

    (void)item;
    executor->options.kernels->convert_to_f32(io->dst, state_frozen(executor->state, io->param), p->dtype, p->n_elems);
}

static void read_run(struct work *work, uint32_t item)
{
    const struct host_io *io = container_of(work, struct host_io, work);
    const struct executor *executor = io->executor;
    const struct layout_param *p = &executor->options.layout->params[io->param];
    const struct layout_chunk *chunk = &executor->options.layout->chunks[p->first_chunk + item];

    if (!state_owns(executor->state, chunk->rank))
        return; /* another node owns the chunk */
    weights_widen(executor->state, executor->options.kernels, p->first_chunk + item, io->kind,
                  (float *)io->dst + chunk->start_elem);
}

static void round_run(struct work *work, uint32_t item)
{
    const struct host_io *io = container_of(work, struct host_io, work);
    const struct executor *executor = io->executor;
    const struct layout_param *p = &executor->options.layout->params[io->param];
    const struct layout_chunk *chunk = &executor->options.layout->chunks[p->first_chunk + item];
    uint64_t elem = p->offset_elems + chunk->start_elem;
    uint64_t start = MAX(executor->state->buckets[p->bucket].owned_start, p->offset_elems);

    if (!state_owns(executor->state, chunk->rank))
        return;
    weights_round(executor->state, executor->options.kernels, p->first_chunk + item, 0, chunk->n_elems,
                  (uint8_t *)io->dst + (elem - start) * dtype_size(p->dtype));
}

int host_read(struct executor *executor, const struct executor_read *read)
{
    const struct layout_param *p = &executor->options.layout->params[read->param];
    const struct host_io io = {.executor = executor,
                               .param = read->param,
                               .kind = read->kind,
                               .dst = read->dst,
                               .done = read->done,
                               .userdata = read->userdata};

    if (read->weights)
        return io_post(&io, round_run, p->n_chunks);
    return p->trainable ? io_post(&io, read_run, p->n_chunks) : io_post(&io, read_frozen_run, 1);
}

int host_show(struct executor *executor, const struct segment *segment, executor_done done, void *userdata)
{
    return transfer_start(executor->options.pool, &(struct transfer_options){
                                                      .state = executor->state,
                                                      .kernels = executor->options.kernels,
                                                      .segment = segment,
                                                      .n_params = executor->options.layout->n_params,
                                                      .range = executor->gathers,
                                                      .direction = TRANSFER_FETCH,
                                                      .done = done,
                                                      .userdata = userdata,
                                                  });
}

int host_load(struct executor *executor, executor_done done, void *userdata)
{
    (void)executor;
    (void)done;
    (void)userdata;
    return 1;
}

static const struct executor_ops host_ops = {
    .reserve = host_reserve,
    .start = host_start,
    .repartition = host_repartition,
    .free = host_free,
    .segments = host_segments,
    .init = host_init_weights,
    .adopt = host_adopt,
    .verify = host_verify,
    .read = host_read,
    .show = host_show,
    .load = host_load,
    .store = host_load,
};

int executor_host_new(struct executor **out, const struct executor_options *options)
{
    struct executor *executor = calloc(1, sizeof(*executor));
    int r;

    if (!executor)
        return -ENOMEM;
    *out = executor;
    executor_set_up(executor, &host_ops, options);
    executor->holds_state = true;
    executor->publishes = !executor->several_nodes && !executor->gathers;
    set_ring_bytes(executor);
    r = executor_make_step(
        executor,
        &(struct state_options){.alone = !executor->several_nodes, .n_spares = options->config->zero.spare_buckets},
        options->config->optimizer.type == OPTIMIZER_MUON ? &step_muon_ops : NULL);
    if (r == 0 && executor->gathers)
        r = host_pool_new(executor);
    if (r == 0 && executor->gathers)
        executor->landing = host_pool_segment(executor->pools);
    return r;
}
