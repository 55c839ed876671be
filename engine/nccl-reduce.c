/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A reduction of one parcel: the gradients that the ranks have pushed are sent to the owners of its slices. Each owner
 * adds them to its accumulator.
 *
 * In deterministic mode, each rank sends each owner its slice unchanged, in the gradient's type. The owner adds the
 * slices in the order of docs/numerics.md and reads its own slice straight from the slot. Otherwise NCCL adds: each
 * rank writes its slot as fp32 into staging, and ncclReduceScatter gives each owner the sum of its slice, added in
 * NCCL's own order. NCCL needs slices of equal size. So a parcel that is not a whole bucket, or whose bucket has an
 * owner, is always sent unchanged. A world of more than REDUCE_MAX_LEAVES ranks cannot have such parcels.
 *
 * Position sums are computed for this node's ranks. If all ranks are on this node, the owners compute them during the
 * addition. Otherwise a slot's other slices are added on other nodes, so each rank reads its own slot once more for its
 * position sums.
 */

#include "engine/nccl.h"

#include <inttypes.h>
#include <string.h>

#include "core/base/base.h"

/* A reduce order, and the facts about it that are not in its message. */
struct reduction {
    struct nccl_engine *engine;
    struct nccl_order *order;
    const struct device_order_reduce *order_reduce;
    const struct layout_parcel *parcel;
    const struct layout_bucket *bucket;
    uint32_t parcel_id;
    enum dtype dtype;
    size_t elem_bytes;
    bool exchanges;  /* slices are sent unchanged; else NCCL adds */
    bool is_whole;   /* all ranks of the job are on this node */
    bool gives_only; /* this node has reduced the parcel; other nodes still need its ranks' gradients */
};

static struct reduction reduction_of(struct nccl_engine *engine, struct nccl_order *order)
{
    const struct device_order_reduce *reduce = &order->command.reduce;
    const struct layout_parcel *parcel = &engine->plan.parcels[reduce->parcel];
    const struct layout_bucket *bucket = &engine->plan.buckets[parcel->bucket];
    const struct device_plan_header *head = engine->plan.head;

    return (struct reduction){
        .engine = engine,
        .order = order,
        .order_reduce = reduce,
        .parcel = parcel,
        .bucket = bucket,
        .parcel_id = reduce->parcel,
        .dtype = bucket->grad_dtype,
        .elem_bytes = dtype_size(bucket->grad_dtype),
        .exchanges = nccl_exchanges(&engine->plan, reduce->parcel),
        .is_whole = head->n_local == head->world_size,
        .gives_only = reduce->give_only || reduce_is_done(engine, reduce->parcel, reduce->op),
    };
}

/* The start of a local rank's gradients; NULL if the rank has pushed nothing of this parcel. */
static uint8_t *slot_of(const struct reduction *reduction, const struct nccl_gpu *gpu)
{
    for (size_t i = 0; i < reduction->order_reduce->n_slots; i++)
        if ((int)reduction->order_reduce->slots[i].local_rank == gpu->device)
            return gpu->pieces[DEVICE_RING].at + reduction->order_reduce->slots[i].offset_bytes;
    return NULL;
}

static bool has_pushed(const struct reduction *reduction, uint32_t part, unsigned rank)
{
    return device_pushed(&reduction->engine->plan, &reduction->engine->inputs, part, rank);
}

/* Return: whether the rank has pushed any part of the parcel that the owner owns. Only then the rank sends a slice. All
 * nodes get the same answer, because their masks are equal. */
static bool gives(const struct reduction *reduction, unsigned rank, unsigned owner)
{
    const struct layout_parcel *parcel = reduction->parcel;

    for (uint32_t c = parcel->first_chunk; c < parcel->first_chunk + parcel->n_chunks; c++) {
        const struct layout_chunk *chunk = &reduction->engine->plan.chunks[c];

        if (chunk->rank == owner && has_pushed(reduction, chunk->part, rank))
            return true;
    }
    return false;
}

static void check_slots_are_there(const struct reduction *reduction)
{
    struct nccl_engine *engine = reduction->engine;

    for (unsigned i = 0; i < engine->n_gpus; i++)
        for (uint32_t k = 0; k < reduction->parcel->n_parts; k++)
            if (has_pushed(reduction, reduction->parcel->first_part + k, engine->gpus[i].rank) &&
                !slot_of(reduction, &engine->gpus[i]))
                engine_fail(engine, "rank %u has pushed part %" PRIu32 ", and has no slot", engine->gpus[i].rank,
                            reduction->parcel->first_part + k);
}

/* Return: the address in staging where the exchange puts a rank's gradients for this GPU's slice. */
static uint8_t *staging_of(const struct reduction *reduction, const struct nccl_gpu *gpu, unsigned rank)
{
    return gpu->lanes[reduction->order->lane].staging +
           reduction->engine->sizes.stride * (rank < gpu->rank ? rank : rank - 1);
}

/* ---- lists ----------------------------------------------------------------------------------------------- */

struct list_maker {
    struct device_reduce_range *ranges;
    struct device_leaf *leaves;
    struct device_chunk *blocks;
    struct nccl_range_note *notes;
    uint16_t *leaf_ranks;
    struct device_reduce_list list;
};

static void maker_init(const struct reduction *reduction, struct nccl_lane *lane, uint32_t max_leaves,
                       struct list_maker *maker)
{
    struct nccl_engine *engine = reduction->engine;
    size_t n = reduction->parcel->n_chunks;
    void *ranges, *leaves, *blocks;

    *maker = (struct list_maker){.notes = lane->notes, .leaf_ranks = lane->leaf_ranks};
    maker->ranges = lists_take(engine, &lane->lists, n * sizeof(*maker->ranges), &ranges);
    maker->leaves = lists_take(engine, &lane->lists, n * max_leaves * sizeof(*maker->leaves), &leaves);
    maker->blocks =
        lists_take(engine, &lane->lists, n * device_chunks_count(CHUNK_ELEMS) * sizeof(*maker->blocks), &blocks);
    maker->list = (struct device_reduce_list){.ranges = ranges, .leaves = leaves, .chunks = blocks};
}

/* Adds one chunk with its leaves, in rank order. */
static void maker_add(struct list_maker *maker, uint32_t chunk_id, const struct layout_chunk *chunk,
                      struct device_reduce_range range, const void *const *data, const struct reduce_join *joins)
{
    struct device_reduce_list *list = &maker->list;

    range.n_elems = chunk->n_elems;
    range.start_elem = chunk->start_elem;
    range.first_leaf = list->n_leaves;
    maker->ranges[list->n_ranges] = range;
    maker->notes[list->n_ranges] =
        (struct nccl_range_note){.chunk = chunk_id, .first_leaf = list->n_leaves, .n_leaves = range.n_leaves};
    device_leaves_fill(&maker->leaves[list->n_leaves], data, range.n_leaves, joins);
    list->n_leaves += range.n_leaves;
    list->n_ranges++;
}

/* Reserves room for the results. Call it after all chunks are added. */
static void take_outcome(const struct reduction *reduction, struct nccl_lane *lane, struct list_maker *maker,
                         bool wants_sums, struct nccl_outcome *outcome)
{
    struct nccl_engine *engine = reduction->engine;
    struct device_reduce_list *list = &maker->list;

    *outcome = (struct nccl_outcome){.n_ranges = list->n_ranges, .n_leaves = list->n_leaves};
    outcome->squares = results_take(engine, lane, list->n_ranges * sizeof(struct exact_sum));
    outcome->sums = results_take(engine, lane, list->n_leaves * sizeof(struct position_sum));
    outcome->findings = results_take(engine, lane, list->n_leaves * sizeof(struct device_finding));
    outcome->overflows = results_take(engine, lane, list->n_ranges * sizeof(struct device_finding));
    list->squares = (void *)(lane->results + outcome->squares);
    list->sums = wants_sums ? (void *)(lane->results + outcome->sums) : NULL;
    list->findings = (void *)(lane->results + outcome->findings);
    list->overflows = (void *)(lane->results + outcome->overflows);
    device_reduce_fill(list, maker->ranges, maker->leaves, maker->blocks);
}

static void launch(const struct reduction *reduction, struct nccl_gpu *gpu, const struct list_maker *maker)
{
    if (maker->list.n_ranges > 0)
        engine_launch(reduction->engine, gpu, device_reduce(gpu->main, &maker->list), "device_reduce");
}

/* ---- the owned chunks ------------------------------------------------------------------------------------ */

struct leaves {
    const void *data[REDUCE_MAX_LEAVES];
    unsigned ranks[REDUCE_MAX_LEAVES];
    struct reduce_join joins[REDUCE_MAX_LEAVES];
    unsigned n;
};

/* Finds the slices as the ranks have sent them. elem: the chunk's first element, counted from the bucket's start. */
static void find_slices(const struct reduction *reduction, const struct nccl_gpu *gpu, const struct layout_chunk *chunk,
                        uint64_t elem, uint64_t slice_begin, struct leaves *leaves)
{
    unsigned world = reduction->engine->plan.head->world_size;
    bool present[REDUCE_MAX_LEAVES];

    leaves->n = 0;
    for (unsigned rank = 0; rank < world; rank++) {
        present[rank] = has_pushed(reduction, chunk->part, rank);
        if (!present[rank])
            continue;
        leaves->ranks[leaves->n] = rank;
        leaves->data[leaves->n++] =
            rank == gpu->rank
                ? slot_of(reduction, gpu) + (elem - reduction->parcel->offset_elems) * reduction->elem_bytes
                : staging_of(reduction, gpu, rank) + (elem - slice_begin) * reduction->elem_bytes;
    }
    if (leaves->n > 0)
        (void)reduce_joins(present, world, leaves->joins);
}

/* Return: the sum that NCCL has computed. In staging it follows this rank's input. */
static const float *scattered(const struct reduction *reduction, const struct nccl_gpu *gpu)
{
    return (const float *)gpu->lanes[reduction->order->lane].staging + reduction->parcel->n_elems;
}

static bool anybody_pushed(const struct reduction *reduction, uint32_t part)
{
    const struct device_plan *plan = &reduction->engine->plan;

    for (uint32_t i = 0; i < plan->head->mask_words; i++)
        if (reduction->engine->inputs.masks[(size_t)part * plan->head->mask_words + i] != 0)
            return true;
    return false;
}

static void find_sum(const struct reduction *reduction, const struct nccl_gpu *gpu, const struct layout_chunk *chunk,
                     uint64_t elem, uint64_t slice_begin, struct leaves *leaves)
{
    leaves->n = anybody_pushed(reduction, chunk->part);
    leaves->ranks[0] = gpu->rank;
    leaves->data[0] = scattered(reduction, gpu) + (elem - slice_begin);
}

/* Lists the owned chunks. Return: true if an accumulator already has an earlier sum. */
static bool list_owned(const struct reduction *reduction, struct nccl_gpu *gpu, struct list_maker *maker)
{
    const struct device_plan *plan = &reduction->engine->plan;
    const struct layout_parcel *parcel = reduction->parcel;
    struct nccl_lane *lane = &gpu->lanes[reduction->order->lane];
    uint64_t begin, end;
    bool adds = false;

    maker_init(reduction, lane, reduction->exchanges ? plan->head->world_size : 1, maker);
    device_parcel_slice(plan, reduction->parcel_id, gpu->rank, &begin, &end);
    for (uint32_t c = parcel->first_chunk; c < parcel->first_chunk + parcel->n_chunks; c++) {
        const struct layout_chunk *chunk = &plan->chunks[c];
        uint64_t elem = plan->params[chunk->param].offset_elems + chunk->start_elem;
        bool first = !reduction->engine->inputs.begun[chunk->part];
        struct leaves leaves;

        if (chunk->rank != gpu->rank)
            continue;
        if (reduction->exchanges)
            find_slices(reduction, gpu, chunk, elem, begin, &leaves);
        else
            find_sum(reduction, gpu, chunk, elem, begin, &leaves);
        if (leaves.n == 0)
            continue;
        for (unsigned i = 0; i < leaves.n; i++)
            maker->leaf_ranks[maker->list.n_leaves + i] = (uint16_t)leaves.ranks[i];
        maker_add(maker, c, chunk,
                  (struct device_reduce_range){.out = nccl_acc(gpu, parcel->bucket, elem),
                                               .n_leaves = (uint16_t)leaves.n,
                                               .dtype = reduction->exchanges ? reduction->dtype : DTYPE_F32,
                                               .first = first},
                  leaves.data, leaves.joins);
        adds |= !first;
    }
    take_outcome(reduction, lane, maker, reduction->exchanges && reduction->is_whole, &lane->owned);
    return adds;
}

/* Reduces the chunks that this GPU's rank owns. Call it when the main stream waits for the event `received`, which
 * marks that staging is complete. */
static void reduce_owned(const struct reduction *reduction, struct nccl_gpu *gpu)
{
    struct nccl_engine *engine = reduction->engine;
    unsigned lane = (unsigned)reduction->order->lane;
    struct device_mark mark = {.tag = reduction->order->tag,
                               .kind = DEVICE_MARK_REDUCE,
                               .index = reduction->parcel_id,
                               .op = reduction->order_reduce->op};
    struct list_maker maker;
    uint64_t begin, end;
    float *acc;
    bool adds;

    if (reduction->gives_only)
        return;
    adds = list_owned(reduction, gpu, &maker);
    if (maker.list.n_ranges == 0)
        return;
    lists_upload(engine, gpu, lane);
    device_parcel_slice(&engine->plan, reduction->parcel_id, gpu->rank, &begin, &end);
    acc = nccl_acc(gpu, reduction->parcel->bucket, begin);
    engine_join_aside(engine, gpu, acc, (end - begin) * sizeof(float));
    if (adds)
        undo_keep(engine, gpu, lane, &mark, acc, (end - begin) * sizeof(float));
    launch(reduction, gpu, &maker);
}

/* ---- the rank's own slot --------------------------------------------------------------------------------- */

/* Writes each chunk that the rank has pushed to staging as fp32, whatever rank owns it: the sum of one leaf. */
static void reduce_own(const struct reduction *reduction, struct nccl_gpu *gpu)
{
    const struct device_plan *plan = &reduction->engine->plan;
    const struct layout_parcel *parcel = reduction->parcel;
    struct nccl_lane *lane = &gpu->lanes[reduction->order->lane];
    float *staging = (float *)lane->staging;
    struct list_maker maker;

    maker_init(reduction, lane, 1, &maker);
    maker.notes += parcel->n_chunks; /* after the notes of the owned chunks */
    for (uint32_t c = parcel->first_chunk; c < parcel->first_chunk + parcel->n_chunks; c++) {
        const struct layout_chunk *chunk = &plan->chunks[c];
        uint64_t elem =
            plan->params[chunk->param].offset_elems + chunk->start_elem - parcel->offset_elems; /* in the parcel */
        const void *data;

        if (!has_pushed(reduction, chunk->part, gpu->rank))
            continue;
        data = slot_of(reduction, gpu) + elem * reduction->elem_bytes;
        maker_add(&maker, c, chunk,
                  (struct device_reduce_range){
                      .out = staging + elem, .n_leaves = 1, .dtype = reduction->dtype, .first = true},
                  &data, NULL);
    }
    take_outcome(reduction, lane, &maker, true, &lane->own);
    lists_upload(reduction->engine, gpu, (unsigned)reduction->order->lane);
    /* Elements that were not pushed, and padding, are +0. */
    engine_check_cuda(reduction->engine, gpu, cudaMemsetAsync(staging, 0, parcel->n_elems * sizeof(float), gpu->main),
                      "cudaMemsetAsync");
    launch(reduction, gpu, &maker);
}

/* Computes position sums of only the rank's own slot. */
static void sum_own(const struct reduction *reduction, struct nccl_gpu *gpu)
{
    const struct device_plan *plan = &reduction->engine->plan;
    struct nccl_engine *engine = reduction->engine;
    const struct layout_parcel *parcel = reduction->parcel;
    struct nccl_lane *lane = &gpu->lanes[reduction->order->lane];
    struct device_position_list list = {.n_ranges = 0};
    struct device_position_range *ranges;
    struct device_chunk *blocks;
    void *ranges_there, *blocks_there;

    ranges = lists_take(engine, &lane->lists, parcel->n_chunks * sizeof(*ranges), &ranges_there);
    blocks = lists_take(engine, &lane->lists,
                        (size_t)parcel->n_chunks * device_chunks_count(CHUNK_ELEMS) * sizeof(*blocks), &blocks_there);
    for (uint32_t c = parcel->first_chunk; c < parcel->first_chunk + parcel->n_chunks; c++) {
        const struct layout_chunk *chunk = &plan->chunks[c];
        uint64_t elem = plan->params[chunk->param].offset_elems + chunk->start_elem - parcel->offset_elems;

        if (!has_pushed(reduction, chunk->part, gpu->rank))
            continue;
        ranges[list.n_ranges] =
            (struct device_position_range){.data = slot_of(reduction, gpu) + elem * reduction->elem_bytes,
                                           .n_elems = chunk->n_elems,
                                           .start_elem = chunk->start_elem,
                                           .dtype = reduction->dtype};
        lane->notes[parcel->n_chunks + list.n_ranges] =
            (struct nccl_range_note){.chunk = c, .first_leaf = list.n_ranges, .n_leaves = 1};
        list.n_chunks += device_chunks_fill(&blocks[list.n_chunks], list.n_ranges, chunk->n_elems);
        list.n_ranges++;
    }
    lane->own = (struct nccl_outcome){.n_ranges = list.n_ranges};
    lane->own.sums = results_take(engine, lane, list.n_ranges * sizeof(struct position_sum));
    list.ranges = ranges_there;
    list.chunks = blocks_there;
    list.sums = (void *)(lane->results + lane->own.sums);
    lists_upload(engine, gpu, (unsigned)reduction->order->lane);
    if (list.n_ranges > 0)
        engine_launch(engine, gpu, device_position_sums(gpu->main, &list), "device_position_sums");
}

/* ---- the streams ----------------------------------------------------------------------------------------- */

static void await_event(const struct reduction *reduction, struct nccl_gpu *gpu, cudaStream_t stream, cudaEvent_t event)
{
    engine_check_cuda(reduction->engine, gpu, cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

static void record_event(const struct reduction *reduction, struct nccl_gpu *gpu, cudaStream_t stream,
                         cudaEvent_t event)
{
    engine_check_cuda(reduction->engine, gpu, cudaEventRecord(event, stream), "cudaEventRecord");
}

/* Posts this GPU's sends to and receives from all other ranks. */
static void exchange_slices(const struct reduction *reduction, struct nccl_gpu *gpu)
{
    struct nccl_engine *engine = reduction->engine;
    const uint8_t *slot = slot_of(reduction, gpu);
    uint64_t begin, end, own_begin, own_end;

    device_parcel_slice(&engine->plan, reduction->parcel_id, gpu->rank, &own_begin, &own_end);
    for (unsigned rank = 0; rank < engine->plan.head->world_size; rank++) {
        if (rank == gpu->rank)
            continue;
        device_parcel_slice(&engine->plan, reduction->parcel_id, rank, &begin, &end);
        if (begin < end && gives(reduction, gpu->rank, rank)) {
            engine_check_nccl(engine,
                              ncclSend(slot + (begin - reduction->parcel->offset_elems) * reduction->elem_bytes,
                                       end - begin, collect_dtype(reduction->dtype), (int)rank, gpu->communicator,
                                       gpu->comm),
                              "ncclSend");
            reduction->order->n_sent += (end - begin) * reduction->elem_bytes;
        }
        if (own_begin < own_end && gives(reduction, rank, gpu->rank)) {
            engine_check_nccl(engine,
                              ncclRecv(staging_of(reduction, gpu, rank), own_end - own_begin,
                                       collect_dtype(reduction->dtype), (int)rank, gpu->communicator, gpu->comm),
                              "ncclRecv");
            reduction->order->n_received += (own_end - own_begin) * reduction->elem_bytes;
        }
    }
}

static void scatter(const struct reduction *reduction, struct nccl_gpu *gpu)
{
    struct nccl_engine *engine = reduction->engine;
    uint64_t slice = gpu->places.buckets[reduction->parcel->bucket].slice_elems;

    engine_check_nccl(engine,
                      ncclReduceScatter(gpu->lanes[reduction->order->lane].staging,
                                        (void *)(uintptr_t)scattered(reduction, gpu), slice, ncclFloat32, ncclSum,
                                        gpu->communicator, gpu->comm),
                      "ncclReduceScatter");
    reduction->order->n_sent += slice * sizeof(float) * (engine->plan.head->world_size - 1);
    reduction->order->n_received += slice * sizeof(float) * (engine->plan.head->world_size - 1);
}

/* Sends and receives the parcel's slices, in one NCCL group over the node's GPUs. */
static void communicate(const struct reduction *reduction)
{
    struct nccl_engine *engine = reduction->engine;

    engine_check_nccl(engine, ncclGroupStart(), "ncclGroupStart");
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];

        engine_use(engine, gpu);
        if (reduction->exchanges)
            exchange_slices(reduction, gpu);
        else
            scatter(reduction, gpu);
    }
    engine_check_nccl(engine, ncclGroupEnd(), "ncclGroupEnd");
}

/* ---- the order ------------------------------------------------------------------------------------------- */

bool reduce_is_done(const struct nccl_engine *engine, uint32_t parcel, uint64_t op)
{
    return engine->results.reduced[parcel] == op;
}

static void begin_reduction(const struct reduction *reduction)
{
    struct nccl_engine *engine = reduction->engine;

    check_slots_are_there(reduction);
    engine_count_collective(engine, reduction->order_reduce->collective);
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];

        engine_use(engine, gpu);
        if (!reduction->exchanges) {
            reduce_own(reduction, gpu);
            record_event(reduction, gpu, gpu->main, gpu->main_event);
            await_event(reduction, gpu, gpu->comm, gpu->main_event);
        } else if (!reduction->is_whole) {
            sum_own(reduction, gpu);
        }
    }
    if (engine->groups)
        communicate(reduction);
}

static void fetch_results(const struct reduction *reduction, struct nccl_gpu *gpu)
{
    struct nccl_lane *lane = &gpu->lanes[reduction->order->lane];

    if (lane->n_results_used > 0)
        engine_check_cuda(
            reduction->engine, gpu,
            cudaMemcpyAsync(lane->results_host, lane->results, lane->n_results_used, cudaMemcpyDeviceToHost, gpu->main),
            "cudaMemcpyAsync");
}

int reduce_issue(struct nccl_engine *engine, struct nccl_order *order)
{
    struct reduction reduction = reduction_of(engine, order);

    if (reduction.is_whole && reduction.gives_only) {
        engine_count_collective(engine, order->command.reduce.collective);
        return 0;
    }
    if (order->step == 0) {
        begin_reduction(&reduction);
        order->step = 1;
    }
    if (collect_poll(engine) != 0)
        return NCCL_AGAIN;
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];

        engine_use(engine, gpu);
        if (engine->groups) {
            record_event(&reduction, gpu, gpu->comm, gpu->lanes[order->lane].received);
            await_event(&reduction, gpu, gpu->main, gpu->lanes[order->lane].received);
        }
        reduce_owned(&reduction, gpu);
        fetch_results(&reduction, gpu);
    }
    return 0;
}

/* ---- results --------------------------------------------------------------------------------------------- */

static void keep_finding(const struct reduction *reduction, const struct device_finding *found, unsigned rank,
                         bool overflowed, uint32_t chunk)
{
    struct device_result_finding *kept = &reduction->engine->results.findings[reduction->parcel_id];
    struct reduce_finding plain;
    uint32_t param = reduction->engine->plan.chunks[chunk].param;

    if (found->n_nan + found->n_inf == 0)
        return;
    device_finding_read(found, &plain);
    if (kept->found &&
        (kept->param < param || (kept->param == param && (kept->elem < plain.first_elem ||
                                                          (kept->elem == plain.first_elem && kept->rank <= rank)))))
        return;
    *kept = (struct device_result_finding){
        .found = true,
        .overflowed = overflowed,
        .param = param,
        .rank = rank,
        .value = plain.first_value,
        .elem = plain.first_elem,
        .n_nan = plain.n_nan,
        .n_inf = plain.n_inf,
    };
}

static void keep_sum(const struct reduction *reduction, uint32_t chunk, unsigned rank, const struct position_sum *sum)
{
    const struct device_plan_header *head = reduction->engine->plan.head;

    reduction->engine->results.sums[(size_t)chunk * head->n_local + (rank - head->first_local)] = *sum;
}

/* Keeps the results of the owned chunks: squares, non-finite values, and sums if all ranks are on this node. */
static void keep_owned(const struct reduction *reduction, const struct nccl_gpu *gpu)
{
    const struct nccl_lane *lane = &gpu->lanes[reduction->order->lane];
    const uint8_t *from = lane->results_host;
    const struct exact_sum *squares = (const void *)(from + lane->owned.squares);
    const struct position_sum *sums = (const void *)(from + lane->owned.sums);
    const struct device_finding *findings = (const void *)(from + lane->owned.findings);
    const struct device_finding *overflows = (const void *)(from + lane->owned.overflows);

    for (uint32_t i = 0; i < lane->owned.n_ranges; i++) {
        const struct nccl_range_note *note = &lane->notes[i];
        struct exact_sum *kept = &reduction->engine->results.squares[note->chunk];

        *kept = squares[i];
        exact_sum_carry(kept);
        for (uint32_t k = note->first_leaf; k < note->first_leaf + note->n_leaves; k++) {
            if (reduction->exchanges && reduction->is_whole)
                keep_sum(reduction, note->chunk, lane->leaf_ranks[k], &sums[k]);
            /* If NCCL has added the slices, the rank's own node finds its non-finite values. */
            if (reduction->exchanges)
                keep_finding(reduction, &findings[k], lane->leaf_ranks[k], false, note->chunk);
        }
        keep_finding(reduction, &overflows[i], 0, true, note->chunk);
    }
}

/* Keeps the results of the rank's own slot: sums, and non-finite values if NCCL adds. */
static void keep_own(const struct reduction *reduction, const struct nccl_gpu *gpu)
{
    const struct nccl_lane *lane = &gpu->lanes[reduction->order->lane];
    const struct position_sum *sums = (const void *)(lane->results_host + lane->own.sums);
    const struct device_finding *findings = (const void *)(lane->results_host + lane->own.findings);

    for (uint32_t i = 0; i < lane->own.n_ranges; i++) {
        const struct nccl_range_note *note = &lane->notes[reduction->parcel->n_chunks + i];

        keep_sum(reduction, note->chunk, gpu->rank, &sums[i]);
        if (!reduction->exchanges)
            keep_finding(reduction, &findings[i], gpu->rank, false, note->chunk);
    }
}

void reduce_finish(struct nccl_engine *engine, struct nccl_order *order)
{
    struct reduction reduction = reduction_of(engine, order);

    if (reduction.gives_only)
        return; /* this node has already kept the results, and perhaps begun the parcel's next reduction */
    engine->results.findings[reduction.parcel_id] = (struct device_result_finding){.found = false};
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        keep_owned(&reduction, &engine->gpus[i]);
        keep_own(&reduction, &engine->gpus[i]);
    }
    __atomic_store_n(&engine->results.reduced[reduction.parcel_id], order->command.reduce.op, __ATOMIC_RELEASE);
}
