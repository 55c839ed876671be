/* SPDX-License-Identifier: Apache-2.0 */

/* The queue of orders, which issues one order at a time, the gather and copy orders, and copies beside the queue. */

#include "engine/nccl.h"

#include <inttypes.h>
#include <string.h>

#include "core/base/base.h"

/* ---- the queue ------------------------------------------------------------------------------------------- */

static void *copy_array(struct nccl_engine *engine, const void *array, size_t n, size_t size)
{
    void *copy = calloc(n + 1, size);

    if (!copy)
        engine_fail(engine, "no memory");
    if (n > 0)
        memcpy(copy, array, n * size);
    return copy;
}

static void check_buckets(struct nccl_engine *engine, uint32_t first, uint32_t n)
{
    uint32_t n_buckets = engine->plan.head->n_buckets;

    if (first >= n_buckets || n > n_buckets - first)
        engine_fail(engine, "an order for buckets %" PRIu32 " to %" PRIu64 " of %" PRIu32, first,
                    (uint64_t)first + n - 1, n_buckets);
}

static void check_slots(struct nccl_engine *engine, const struct device_order_reduce *reduce)
{
    const struct device_plan *plan = &engine->plan;
    const struct layout_parcel *parcel;
    uint64_t n_bytes;

    if (reduce->parcel >= plan->head->n_parcels)
        engine_fail(engine, "an order for parcel %" PRIu32 " of %" PRIu32, reduce->parcel, plan->head->n_parcels);
    parcel = &plan->parcels[reduce->parcel];
    n_bytes = parcel->n_elems * dtype_size(plan->buckets[parcel->bucket].grad_dtype);
    for (size_t i = 0; i < reduce->n_slots; i++) {
        const struct device_slot *slot = &reduce->slots[i];
        uint64_t ring =
            engine->n_gpus > slot->local_rank ? engine->gpus[slot->local_rank].pieces[DEVICE_RING].n_bytes : 0;

        if (slot->offset_bytes > ring || n_bytes > ring - slot->offset_bytes)
            engine_fail(engine, "a slot of %" PRIu64 " bytes at %" PRIu64 " of the ring of local rank %" PRIu32,
                        n_bytes, slot->offset_bytes, slot->local_rank);
    }
}

static void check_moves(struct nccl_engine *engine, const struct device_order_copy *copy)
{
    for (size_t i = 0; i < copy->n_moves; i++) {
        const struct device_move *move = &copy->moves[i];
        uint64_t host = engine->segments[move->segment].n_bytes, piece = 0;

        if (move->local_rank < engine->n_gpus)
            piece = engine->gpus[move->local_rank].pieces[move->kind].n_bytes;
        if (move->offset_bytes > piece || move->n_bytes > piece - move->offset_bytes)
            engine_fail(engine, "move %zu is for %" PRIu64 " bytes at %" PRIu64 " of a piece of %" PRIu64, i,
                        move->n_bytes, move->offset_bytes, piece);
        if (move->segment_offset_bytes > host || move->n_bytes > host - move->segment_offset_bytes)
            engine_fail(engine, "move %zu is for %" PRIu64 " bytes at %" PRIu64 " of a segment of %" PRIu64, i,
                        move->n_bytes, move->segment_offset_bytes, host);
    }
}

static void take_reduce(struct nccl_engine *engine, struct nccl_order *order)
{
    struct device_order_reduce *reduce = &order->command.reduce;

    check_slots(engine, reduce);
    reduce->slots = order->array = copy_array(engine, reduce->slots, reduce->n_slots, sizeof(struct device_slot));
}

static void take_update(struct nccl_engine *engine, struct nccl_order *order)
{
    if (engine->plan.head->offload)
        engine_fail(engine, "an update of masters that are in host memory");
    if (order->command.update.step < 1 || order->command.update.step > DEVICE_UNDO_MAX_TAG)
        engine_fail(engine, "an update that makes step %" PRIu64, order->command.update.step);
}

static void take_gather(struct nccl_engine *engine, struct nccl_order *order)
{
    if (engine->plan.head->stage == 3)
        engine_fail(engine, "a gathering of all weights, and this is stage 3");
    check_buckets(engine, order->command.gather.first_bucket, order->command.gather.n_buckets);
}

static void take_fetch(struct nccl_engine *engine, struct nccl_order *order)
{
    struct device_order_fetch *fetch = &order->command.fetch;

    fetch_check(engine, fetch);
    fetch->params = order->array = copy_array(engine, fetch->params, fetch->n_params, sizeof(struct device_fetched));
}

static void take_copy(struct nccl_engine *engine, struct nccl_order *order)
{
    struct device_order_copy *copy = &order->command.copy;

    check_moves(engine, copy);
    copy->moves = order->array = copy_array(engine, copy->moves, copy->n_moves, sizeof(struct device_move));
}

/* ---- gather ---------------------------------------------------------------------------------------------- */

static bool is_owned(const struct nccl_engine *engine, uint32_t bucket)
{
    return engine->plan.buckets[bucket].owner != LAYOUT_NO_OWNER && engine->plan.buckets[bucket].n_elems > 0;
}

/* Saves the rank's own slice, which is inside the array that NCCL writes. NCCL should write the bytes that the slice
 * already has. But it promises nothing if the process is killed, and the slice has no other copy. */
static void save_slice(struct nccl_engine *engine, struct nccl_gpu *gpu, const struct nccl_order *order,
                       uint32_t bucket)
{
    struct device_mark mark = {.tag = order->tag, .kind = DEVICE_MARK_GATHER, .index = bucket};
    uint64_t n_bytes;
    uint8_t *slice = nccl_weights(engine, gpu, bucket, &n_bytes);

    /* The previous bucket's copy is needed until that bucket is gathered. */
    engine_join(engine, gpu, false);
    undo_keep(engine, gpu, (unsigned)order->lane, &mark, slice, n_bytes);
    engine_join(engine, gpu, true);
}

/* Gathers one bucket in place, in one group over all local ranks: each rank's slice is already at its place in the
 * rank's copy. */
static void gather_bucket(struct nccl_engine *engine, struct nccl_order *order, uint32_t bucket)
{
    const struct layout_bucket *b = &engine->plan.buckets[bucket];
    uint64_t n_bytes = 0;

    for (unsigned i = 0; i < engine->n_gpus; i++) {
        engine_use(engine, &engine->gpus[i]);
        save_slice(engine, &engine->gpus[i], order, bucket);
    }
    engine_check_nccl(engine, ncclGroupStart(), "ncclGroupStart");
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];
        uint8_t *slice = nccl_weights(engine, gpu, bucket, &n_bytes);

        engine_use(engine, gpu);
        engine_check_nccl(engine,
                          ncclAllGather(slice, slice - gpu->rank * n_bytes, gpu->places.buckets[bucket].slice_elems,
                                        collect_dtype(b->dtype), gpu->communicator, gpu->comm),
                          "ncclAllGather");
        order->n_sent += n_bytes * (engine->plan.head->world_size - 1);
        order->n_received += n_bytes * (engine->plan.head->world_size - 1);
    }
    engine_check_nccl(engine, ncclGroupEnd(), "ncclGroupEnd");
}

/* Sends an owned bucket from its owner to all other ranks. */
static void exchange_owned(struct nccl_engine *engine, struct nccl_gpu *gpu, struct nccl_order *order,
                           const struct layout_bucket *b)
{
    uint8_t *whole = gpu->pieces[DEVICE_WEIGHTS].at + b->weight_offset_bytes;
    uint64_t n_bytes = b->n_elems * dtype_size(b->dtype);

    if (gpu->rank != b->owner) {
        engine_check_nccl(
            engine, ncclRecv(whole, b->n_elems, collect_dtype(b->dtype), (int)b->owner, gpu->communicator, gpu->comm),
            "ncclRecv");
        order->n_received += n_bytes;
        return;
    }
    for (unsigned rank = 0; rank < engine->plan.head->world_size; rank++) {
        if (rank == b->owner)
            continue;
        engine_check_nccl(engine,
                          ncclSend(whole, b->n_elems, collect_dtype(b->dtype), (int)rank, gpu->communicator, gpu->comm),
                          "ncclSend");
        order->n_sent += n_bytes;
    }
}

/* Gathers all buckets with an owner in one group. All owners send at the same time; the gather does not write the
 * owners' own copies. */
static void gather_owned(struct nccl_engine *engine, struct nccl_order *order)
{
    const struct device_order_gather *g = &order->command.gather;

    engine_check_nccl(engine, ncclGroupStart(), "ncclGroupStart");
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        engine_use(engine, &engine->gpus[i]);
        for (uint32_t bucket = g->first_bucket; bucket < g->first_bucket + g->n_buckets; bucket++)
            if (is_owned(engine, bucket))
                exchange_owned(engine, &engine->gpus[i], order, &engine->plan.buckets[bucket]);
    }
    engine_check_nccl(engine, ncclGroupEnd(), "ncclGroupEnd");
}

static int gather_issue(struct nccl_engine *engine, struct nccl_order *order)
{
    const struct device_order_gather *g = &order->command.gather;
    uint32_t end = g->first_bucket + g->n_buckets;

    if (!engine->groups)
        return 0;
    if (order->step == 0) {
        engine_count_collective(engine, g->collective);
        engine_join_all(engine, true);
        order->bucket = g->first_bucket;
        order->step = 1;
    }
    while (collect_poll(engine) == 0) {
        uint32_t bucket = order->bucket++;

        if (bucket > end) {
            engine_join_all(engine, false);
            return 0;
        }
        if (bucket == end && engine->plan.head->n_matrices > 0)
            gather_owned(engine, order);
        else if (bucket < end && !is_owned(engine, bucket) && engine->plan.buckets[bucket].n_elems > 0)
            gather_bucket(engine, order, bucket);
    }
    return NCCL_AGAIN;
}

/* ---- copy ------------------------------------------------------------------------------------------------ */

/* Puts the moves on the GPUs' main streams, or on their streams for copies beside the queue. */
static void put_moves(struct nccl_engine *engine, const struct device_order_copy *copy)
{
    for (size_t i = 0; i < copy->n_moves; i++) {
        const struct device_move *move = &copy->moves[i];
        struct nccl_gpu *gpu = &engine->gpus[move->local_rank];
        uint8_t *device = gpu->pieces[move->kind].at + move->offset_bytes;
        uint8_t *host = engine->segments[move->segment].map + move->segment_offset_bytes;

        engine_use(engine, gpu);
        engine_check_cuda(engine, gpu,
                          cudaMemcpyAsync(move->write ? device : host, move->write ? host : device, move->n_bytes,
                                          move->write ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                                          copy->aside ? gpu->aside : gpu->main),
                          "cudaMemcpyAsync");
    }
}

static int copy_issue(struct nccl_engine *engine, struct nccl_order *order)
{
    put_moves(engine, &order->command.copy);
    /* A later order may send the bytes that this order has written. */
    engine_join_all(engine, true);
    return 0;
}

/* ---- trainers -------------------------------------------------------------------------------------------- */

/* Return: whether the trainer's GPU has passed the point, or the point was released because the GPU will never pass
 * it. */
static bool is_reached(const struct nccl_engine *engine, uint32_t local_rank, uint64_t point)
{
    const struct nccl_gpu *gpu = &engine->gpus[local_rank];

    return point <= gpu->released || progress_is_reached(gpu->progress, point);
}

/* Return: whether the order waits for a trainer. A trainer pushes work that is only queued; its GPU may finish that
 * work seconds later. */
static bool awaits_trainer(const struct nccl_engine *engine, const struct nccl_order *order)
{
    const struct device_order_reduce *reduce = &order->command.reduce;
    const struct device_order_copy *copy = &order->command.copy;

    for (size_t i = 0; order->command.type == DEVICE_COMMAND_REDUCE && i < reduce->n_slots; i++)
        if (!is_reached(engine, reduce->slots[i].local_rank, reduce->slots[i].point))
            return true;
    for (size_t i = 0; order->command.type == DEVICE_COMMAND_COPY && i < copy->n_moves; i++)
        if (!is_reached(engine, copy->moves[i].local_rank, copy->moves[i].point))
            return true;
    return false;
}

/* ---- the table of orders --------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*take)(struct nccl_engine *engine, struct nccl_order *order);   /* checks the order and copies its arrays */
    int (*issue)(struct nccl_engine *engine, struct nccl_order *order);   /* Return: 0: all issued; or NCCL_AGAIN */
    void (*finish)(struct nccl_engine *engine, struct nccl_order *order); /* NULL: no results */
} kinds[N_DEVICE_COMMAND_TYPES] = {
    [DEVICE_COMMAND_REDUCE] = {"a reduction", take_reduce, reduce_issue, reduce_finish},
    [DEVICE_COMMAND_UPDATE] = {"an update", take_update, update_issue, NULL},
    [DEVICE_COMMAND_GATHER] = {"a gathering of weights", take_gather, gather_issue, NULL},
    [DEVICE_COMMAND_COPY] = {"a copy", take_copy, copy_issue, NULL},
    [DEVICE_COMMAND_FETCH] = {"a fetch of parameters", take_fetch, fetch_issue, NULL},
};

/* ---- the copy beside the queue --------------------------------------------------------------------------- */

/* Begins a copy that waits for no other order: what it reads was written by orders that have ended. */
static void begin_aside(struct nccl_engine *engine, struct nccl_order *order)
{
    const struct device_order_copy *copy = &order->command.copy;

    if (engine->aside)
        engine_fail(engine, "a copy aside while another one is under way");
    for (size_t i = 0; i < copy->n_moves; i++)
        if (copy->moves[i].write || copy->moves[i].point > 0)
            engine_fail(engine, "move %zu of a copy aside writes to a device, or waits for a trainer", i);
    put_moves(engine, copy);
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];

        engine_use(engine, gpu);
        engine_check_cuda(engine, gpu, cudaEventRecord(gpu->aside_event, gpu->aside), "cudaEventRecord");
    }
    engine->aside = order;
}

void orders_add(struct nccl_engine *engine, const struct device_command *command)
{
    struct nccl_order *order = calloc(1, sizeof(*order));

    if (!order)
        engine_fail(engine, "no memory");
    order->command = *command;
    order->lane = -1;
    order->clock_ns = engine_now_ns();
    if (!device_command_order(command, &order->tag, &order->timeout_ms) || engine->phase != NCCL_IS_READY)
        engine_fail(engine, "an order out of place");
    engine->tag = &order->tag;
    kinds[command->type].take(engine, order);
    if (command->type == DEVICE_COMMAND_COPY && command->copy.aside)
        begin_aside(engine, order);
    engine->tag = NULL;
    if (engine->aside == order)
        return;
    if (engine->last)
        engine->last->next = order;
    else
        engine->first = order;
    engine->last = order;
}

/* ---- progress -------------------------------------------------------------------------------------------- */

static bool take_lane(struct nccl_engine *engine, struct nccl_order *order)
{
    for (unsigned lane = 0; lane < DEVICE_LANES; lane++) {
        if (engine->in_flight[lane])
            continue;
        engine->in_flight[lane] = order;
        engine->n_in_flight++;
        order->lane = (int)lane;
        for (unsigned i = 0; i < engine->n_gpus; i++) {
            struct nccl_lane *l = &engine->gpus[i].lanes[lane];

            l->lists.n_used = l->lists.n_uploaded = l->n_results_used = 0;
            l->owned = l->own = (struct nccl_outcome){.n_ranges = 0};
        }
        return true;
    }
    return false;
}

/* Issues the first order as far as possible. Return: true if the whole order is issued. */
static bool issue_next(struct nccl_engine *engine)
{
    struct nccl_order *order = engine->first;

    if (!order || (order->lane < 0 && (awaits_trainer(engine, order) || !take_lane(engine, order))))
        return false;
    engine->tag = &order->tag;
    if (kinds[order->command.type].issue(engine, order) == 0) {
        for (unsigned i = 0; i < engine->n_gpus; i++) {
            struct nccl_gpu *gpu = &engine->gpus[i];

            engine_use(engine, gpu);
            engine_check_cuda(engine, gpu, cudaEventRecord(gpu->lanes[order->lane].done, gpu->main), "cudaEventRecord");
        }
        engine->first = order->next;
        if (!engine->first)
            engine->last = NULL;
    }
    engine->tag = NULL;
    return engine->first != order;
}

/* Return: the first GPU that still works on the order, or -1 if the order has ended on all GPUs. */
static int find_busy(struct nccl_engine *engine, const struct nccl_order *order)
{
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        const struct nccl_gpu *gpu = &engine->gpus[i];
        cudaError_t r = cudaEventQuery(order == engine->aside ? gpu->aside_event : gpu->lanes[order->lane].done);

        if (r == cudaErrorNotReady)
            return (int)i;
        engine_check_cuda(engine, &engine->gpus[i], r, "cudaEventQuery");
    }
    return -1;
}

static void finish_order(struct nccl_engine *engine, struct nccl_order *order)
{
    struct device_report report = {
        .type = DEVICE_REPORT_DONE,
        .done = {.tag = order->tag, .n_bytes_sent = order->n_sent, .n_bytes_received = order->n_received}};

    if (kinds[order->command.type].finish)
        kinds[order->command.type].finish(engine, order);
    if (order == engine->aside) {
        engine->aside = NULL;
    } else {
        undo_forget(engine, (unsigned)order->lane); /* before the report; repeating the order then changes nothing */
        engine->in_flight[order->lane] = NULL;
        engine->n_in_flight--;
    }
    free(order->array);
    free(order);
    engine_report(engine, &report, NULL, 0);
}

/* Ends the order if all GPUs have. order: all issued, or NULL. Return: true if the order was ended. */
static bool end_if_done(struct nccl_engine *engine, struct nccl_order *order)
{
    bool ends;

    if (!order)
        return false;
    engine->tag = &order->tag;
    ends = find_busy(engine, order) < 0;
    if (ends)
        finish_order(engine, order);
    engine->tag = NULL;
    return ends;
}

bool orders_progress(struct nccl_engine *engine)
{
    bool moved = end_if_done(engine, engine->aside);

    for (unsigned lane = 0; lane < DEVICE_LANES; lane++)
        if (engine->in_flight[lane] != engine->first)
            moved |= end_if_done(engine, engine->in_flight[lane]);
    if (engine->groups && engine->n_in_flight > 0)
        (void)collect_poll(engine);
    while (issue_next(engine))
        moved = true;
    return moved;
}

static bool is_late(const struct nccl_order *order)
{
    return engine_now_ns() > order->clock_ns + (uint64_t)order->timeout_ms * 1000000;
}

/* Restarts the clocks of all queued orders while the first order waits for a trainer, because this wait must not
 * count. */
static void restart_clocks(struct nccl_engine *engine)
{
    if (!engine->first || engine->first->lane >= 0 || !awaits_trainer(engine, engine->first))
        return;
    for (struct nccl_order *order = engine->first; order; order = order->next)
        order->clock_ns = engine_now_ns();
}

/* Fails the engine if an order that has begun is late. order: may be NULL. */
static void check_deadline(struct nccl_engine *engine, const struct nccl_order *order)
{
    if (!order || !is_late(order))
        return;
    engine->tag = &order->tag;
    if (order == engine->first)
        engine_fail(engine, "%s took more than %" PRIu32 " ms: NCCL has not taken it", kinds[order->command.type].name,
                    order->timeout_ms);
    engine_fail(engine, "%s took more than %" PRIu32 " ms: GPU %d is at it", kinds[order->command.type].name,
                order->timeout_ms, find_busy(engine, order));
}

void orders_check_deadlines(struct nccl_engine *engine)
{
    restart_clocks(engine);
    check_deadline(engine, engine->aside);
    for (unsigned lane = 0; lane < DEVICE_LANES; lane++)
        check_deadline(engine, engine->in_flight[lane]);
    for (struct nccl_order *order = engine->first; order; order = order->next)
        if (is_late(order)) {
            engine->tag = &order->tag;
            engine_fail(engine, "%s took more than %" PRIu32 " ms: it waits for others",
                        kinds[order->command.type].name, order->timeout_ms);
        }
}
