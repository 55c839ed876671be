/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Stage 3: fetches whole parameters from the masters of their owners into the pool of one rank.
 *
 * Each owner rounds its slice of a parameter to the type of the weights. A GPU may write into the pool if the pool is
 * its own rank's, or if CUDA lets it reach the pool on this node. Such a GPU rounds straight into the slice's place. It
 * copies a slice that needs no rounding: a frozen parameter, or a weight that is a part of its master. Any other GPU
 * rounds into staging, and ncclSend() and ncclRecv() move the slice into the pool; a slice that needs no rounding is
 * sent from its own place.
 *
 * A round is as many parameters as staging has room for. Both ends of a connection must compute the same rounds, or one
 * end would wait for slices that the other end has not begun to send. So the rounds follow only from the plan, which is
 * equal on all nodes.
 *
 * A fetch needs no undo copy: it only reads masters, and a repeated order writes all its slices again.
 */

#include "engine/nccl.h"

#include <inttypes.h>

#include "core/base/base.h"

/* A fetch order, and the facts about it that are not in its message. */
struct fetch {
    struct nccl_engine *engine;
    struct nccl_order *order;
    const struct device_order_fetch *asked;
    struct nccl_gpu *asker; /* the GPU of the rank that asks; NULL if that rank is on another node */
    bool between_nodes;
    bool communicates; /* between nodes, or if a GPU cannot reach another GPU's pool */
};

/* The slice of a fetched parameter that a local rank owns. */
struct slice {
    const uint8_t *from;
    uint64_t n_elems, n_bytes; /* in the type of the weights */
    uint64_t at;               /* offset in the pool, in bytes */
    enum dtype dtype;
    bool is_f32; /* masters in fp32; otherwise the slice has the type of the weights */
};

/* ---- slices ---------------------------------------------------------------------------------------------- */

static struct nccl_gpu *find_gpu(struct nccl_engine *engine, unsigned rank)
{
    unsigned local = rank - engine->plan.head->first_local;

    return local < engine->n_gpus ? &engine->gpus[local] : NULL;
}

static bool writes_pool(const struct fetch *fetch, const struct nccl_gpu *gpu)
{
    return fetch->asker && fetch->asker->pool_writers >> gpu->device & 1;
}

static void find_ways(struct fetch *fetch)
{
    fetch->communicates = fetch->between_nodes = !fetch->asker;
    for (size_t i = 0; fetch->asker && i < fetch->asked->n_params; i++) {
        unsigned first, end;

        device_param_owners(&fetch->engine->plan, fetch->asked->params[i].param, &first, &end);
        for (unsigned rank = first; rank < end; rank++) {
            const struct nccl_gpu *owner = find_gpu(fetch->engine, rank);

            fetch->between_nodes |= !owner;
            fetch->communicates |= !owner || !writes_pool(fetch, owner);
        }
    }
}

static struct fetch fetch_of(struct nccl_engine *engine, struct nccl_order *order)
{
    struct fetch fetch = {.engine = engine, .order = order, .asked = &order->command.fetch};

    fetch.asker = find_gpu(engine, fetch.asked->rank);
    find_ways(&fetch);
    return fetch;
}

/* Return: false if the rank owns no part of the parameter. */
static bool find_slice(const struct fetch *fetch, const struct nccl_gpu *gpu, size_t i, struct slice *slice)
{
    const struct nccl_engine *engine = fetch->engine;
    const struct device_fetched *fetched = &fetch->asked->params[i];
    const struct device_plan_param *param = &engine->plan.params[fetched->param];
    size_t elem_bytes = dtype_size(param->dtype);
    uint64_t begin, end;

    device_param_slice(&engine->plan, fetched->param, gpu->rank, &begin, &end);
    if (begin == end)
        return false;
    *slice = (struct slice){
        .n_elems = end - begin,
        .n_bytes = (end - begin) * elem_bytes,
        .at = fetched->offset_bytes + begin * elem_bytes,
        .dtype = param->dtype,
        .is_f32 = param->bucket != LAYOUT_NO_BUCKET && !device_is_master24(&engine->plan, param->bucket),
    };
    if (param->bucket != LAYOUT_NO_BUCKET)
        slice->from = nccl_master(engine, gpu, param->bucket, param->offset_elems + begin);
    else /* its array begins at the rank's slice */
        slice->from = gpu->pieces[DEVICE_STATE].at + gpu->places.frozen[fetched->param];
    return true;
}

/* ---- checks ---------------------------------------------------------------------------------------------- */

static bool has_part(struct nccl_engine *engine, const struct device_order_fetch *asked)
{
    unsigned first, end;

    if (find_gpu(engine, asked->rank))
        return true;
    for (size_t i = 0; i < asked->n_params; i++) {
        device_param_owners(&engine->plan, asked->params[i].param, &first, &end);
        for (unsigned rank = first; rank < end; rank++)
            if (find_gpu(engine, rank))
                return true;
    }
    return false;
}

static void check_params(struct nccl_engine *engine, const struct device_order_fetch *asked)
{
    const struct nccl_gpu *asker = find_gpu(engine, asked->rank);
    uint32_t n_params = engine->plan.head->n_params;
    _cleanup_free_ uint8_t *seen = calloc(n_params, 1);

    if (!seen)
        engine_fail(engine, "no memory");
    for (size_t i = 0; i < asked->n_params; i++) {
        const struct device_fetched *fetched = &asked->params[i];
        uint64_t n_bytes, pool = asker ? asker->pieces[DEVICE_POOL].n_bytes : UINT64_MAX;

        if (fetched->param >= n_params)
            engine_fail(engine, "a fetch of parameter %" PRIu32 " of %" PRIu32, fetched->param, n_params);
        if (seen[fetched->param])
            engine_fail(engine, "a fetch of parameter %" PRIu32 " twice", fetched->param);
        seen[fetched->param] = 1;
        n_bytes = engine->plan.params[fetched->param].n_elems * dtype_size(engine->plan.params[fetched->param].dtype);
        if (fetched->offset_bytes > pool || n_bytes > pool - fetched->offset_bytes)
            engine_fail(engine, "a place of %" PRIu64 " bytes at %" PRIu64 " of a pool of %" PRIu64, n_bytes,
                        fetched->offset_bytes, pool);
    }
}

void fetch_check(struct nccl_engine *engine, const struct device_order_fetch *asked)
{
    const struct device_plan_header *head = engine->plan.head;

    if (head->stage != 3)
        engine_fail(engine, "a fetch of parameters, and this is stage %" PRIu32, head->stage);
    if (head->offload)
        engine_fail(engine, "a fetch of parameters, whose masters are in host memory");
    if (asked->rank >= head->world_size)
        engine_fail(engine, "a fetch for rank %" PRIu32 " of %" PRIu32, asked->rank, head->world_size);
    check_params(engine, asked);
    if (!has_part(engine, asked))
        engine_fail(engine, "a fetch for rank %" PRIu32 ", in which this node has no part", asked->rank);
}

/* ---- rounds ---------------------------------------------------------------------------------------------- */

/* Return: the first parameter after the round that begins with the next parameter to issue. */
static size_t find_round_end(const struct fetch *fetch)
{
    uint64_t n_bytes = 0;
    size_t i;

    for (i = fetch->order->n_issued; i < fetch->asked->n_params; i++) {
        n_bytes += sizes_staged_bytes(fetch->engine, fetch->asked->params[i].param);
        if (n_bytes > fetch->engine->sizes.fetch)
            break;
    }
    return i;
}

/* Reserves room in the lane's staging for a slice. Return: NULL if the slice is sent from its own place. */
static uint8_t *take_staging(const struct fetch *fetch, const struct nccl_gpu *gpu, const struct slice *slice,
                             uint64_t *n_used)
{
    uint8_t *at = gpu->lanes[fetch->order->lane].staging + *n_used;

    if (!slice->is_f32 || slice->dtype == DTYPE_F32)
        return NULL;
    *n_used += round_up(slice->n_bytes, DEVICE_ALIGN_BYTES);
    if (*n_used > fetch->engine->sizes.fetch)
        engine_fail(fetch->engine, "a round of a fetch needs more than %" PRIu64 " bytes of staging",
                    fetch->engine->sizes.fetch);
    return at;
}

/* ---- work on the main streams ---------------------------------------------------------------------------- */

static void copy_slice(const struct fetch *fetch, struct nccl_gpu *gpu, const struct slice *slice)
{
    engine_check_cuda(fetch->engine, gpu,
                      cudaMemcpyAsync(fetch->asker->pieces[DEVICE_POOL].at + slice->at, slice->from, slice->n_bytes,
                                      cudaMemcpyDeviceToDevice, gpu->main),
                      "cudaMemcpyAsync");
}

/* Counts the blocks that round the round's masters. These are at most the blocks of all chunks, so sizes_find() has
 * reserved enough lists. */
static uint32_t count_blocks(const struct fetch *fetch, const struct nccl_gpu *gpu, size_t end)
{
    uint32_t n = 0;
    struct slice slice;

    for (size_t i = fetch->order->n_issued; i < end; i++)
        if (find_slice(fetch, gpu, i, &slice) && slice.is_f32)
            n += device_chunks_count(slice.n_elems);
    return n;
}

/* Rounds this GPU's slices of the round's parameters, into the pool or into staging. */
static void round_slices(const struct fetch *fetch, struct nccl_gpu *gpu, size_t end)
{
    struct nccl_engine *engine = fetch->engine;
    struct nccl_lists *lists = &gpu->lanes[fetch->order->lane].lists;
    struct device_convert_list list = {.n_chunks = 0};
    struct device_convert_range *ranges;
    struct device_chunk *blocks;
    struct slice slice;
    uint64_t n_used = 0;
    uint32_t n = 0;
    void *ranges_there, *blocks_there;

    ranges = lists_take(engine, lists, (end - fetch->order->n_issued) * sizeof(*ranges), &ranges_there);
    blocks = lists_take(engine, lists, count_blocks(fetch, gpu, end) * sizeof(*blocks), &blocks_there);
    for (size_t i = fetch->order->n_issued; i < end; i++) {
        bool writes = writes_pool(fetch, gpu);
        uint8_t *to;

        if (!find_slice(fetch, gpu, i, &slice))
            continue;
        if (writes && !slice.is_f32)
            copy_slice(fetch, gpu, &slice);
        to = writes ? fetch->asker->pieces[DEVICE_POOL].at + slice.at : take_staging(fetch, gpu, &slice, &n_used);
        if (!slice.is_f32 || !to)
            continue;
        ranges[n] =
            (struct device_convert_range){.dst = to, .src = slice.from, .n_elems = slice.n_elems, .dtype = slice.dtype};
        list.n_chunks += device_chunks_fill(&blocks[list.n_chunks], n++, slice.n_elems);
    }
    list.ranges = ranges_there;
    list.chunks = blocks_there;
    lists_upload(engine, gpu, (unsigned)fetch->order->lane);
    engine_launch(engine, gpu, device_convert_from_f32(gpu->main, &list), "device_convert_from_f32");
}

/* ---- transfers between ranks ----------------------------------------------------------------------------- */

static void send_slices(const struct fetch *fetch, struct nccl_gpu *gpu, size_t end)
{
    struct nccl_engine *engine = fetch->engine;
    struct slice slice;
    uint64_t n_used = 0;

    for (size_t i = fetch->order->n_issued; i < end; i++) {
        const uint8_t *from;

        if (!find_slice(fetch, gpu, i, &slice))
            continue;
        from = take_staging(fetch, gpu, &slice, &n_used);
        engine_check_nccl(engine,
                          ncclSend(from ? from : slice.from, slice.n_elems, collect_dtype(slice.dtype),
                                   (int)fetch->asked->rank, gpu->communicator, gpu->comm),
                          "ncclSend");
    }
}

/* Receives from all owners that cannot write into the pool, in the order in which they send. */
static void receive_slices(const struct fetch *fetch, size_t end)
{
    struct nccl_engine *engine = fetch->engine;
    struct nccl_gpu *asker = fetch->asker;

    for (size_t i = fetch->order->n_issued; i < end; i++) {
        const struct device_fetched *fetched = &fetch->asked->params[i];
        const struct device_plan_param *param = &engine->plan.params[fetched->param];
        unsigned first, last;

        device_param_owners(&engine->plan, fetched->param, &first, &last);
        for (unsigned rank = first; rank < last; rank++) {
            const struct nccl_gpu *owner = find_gpu(engine, rank);
            uint64_t from, to;

            if (owner && writes_pool(fetch, owner))
                continue;
            device_param_slice(&engine->plan, fetched->param, rank, &from, &to);
            engine_check_nccl(
                engine,
                ncclRecv(asker->pieces[DEVICE_POOL].at + fetched->offset_bytes + from * dtype_size(param->dtype),
                         to - from, collect_dtype(param->dtype), (int)rank, asker->communicator, asker->comm),
                "ncclRecv");
        }
    }
}

/* Sends and receives the round's slices, in one NCCL group over the node's GPUs. */
static void communicate(const struct fetch *fetch, size_t end)
{
    struct nccl_engine *engine = fetch->engine;

    engine_join_all(engine, true);
    engine_check_nccl(engine, ncclGroupStart(), "ncclGroupStart");
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];

        engine_use(engine, gpu);
        if (!writes_pool(fetch, gpu))
            send_slices(fetch, gpu, end);
        if (gpu == fetch->asker)
            receive_slices(fetch, end);
    }
    engine_check_nccl(engine, ncclGroupEnd(), "ncclGroupEnd");
}

/* Counts, for the report, the bytes of slices that move from one rank to another. */
static void count_bytes(const struct fetch *fetch, size_t end)
{
    for (size_t i = fetch->order->n_issued; i < end; i++) {
        const struct device_fetched *fetched = &fetch->asked->params[i];
        size_t elem_bytes = dtype_size(fetch->engine->plan.params[fetched->param].dtype);
        unsigned first, last;
        uint64_t from, to;

        device_param_owners(&fetch->engine->plan, fetched->param, &first, &last);
        for (unsigned rank = first; rank < last; rank++) {
            device_param_slice(&fetch->engine->plan, fetched->param, rank, &from, &to);
            if (rank == fetch->asked->rank)
                continue;
            if (find_gpu(fetch->engine, rank))
                fetch->order->n_sent += (to - from) * elem_bytes;
            if (fetch->asker)
                fetch->order->n_received += (to - from) * elem_bytes;
        }
    }
}

/* ---- the order ------------------------------------------------------------------------------------------- */

/*
 * Streams of different GPUs are not ordered. So a GPU writes into the pool after the earlier work on the stream of the
 * pool's GPU, which may read the pool, and before the later work.
 */
static void join_asker(const struct fetch *fetch, bool asker_later)
{
    struct nccl_engine *engine = fetch->engine;

    for (unsigned i = 0; fetch->asker && i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];
        struct nccl_gpu *earlier = asker_later ? gpu : fetch->asker, *later = asker_later ? fetch->asker : gpu;

        if (gpu == fetch->asker || !writes_pool(fetch, gpu))
            continue;
        engine_use(engine, earlier);
        engine_check_cuda(engine, earlier, cudaEventRecord(earlier->main_event, earlier->main), "cudaEventRecord");
        engine_use(engine, later);
        engine_check_cuda(engine, later, cudaStreamWaitEvent(later->main, earlier->main_event, 0),
                          "cudaStreamWaitEvent");
    }
}

static void issue_round(const struct fetch *fetch)
{
    struct nccl_engine *engine = fetch->engine;
    size_t end = find_round_end(fetch);

    /* Waits until the last round's slices have left staging. */
    if (fetch->communicates)
        engine_join_all(engine, false);
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        engine_use(engine, &engine->gpus[i]);
        round_slices(fetch, &engine->gpus[i], end);
    }
    if (fetch->communicates)
        communicate(fetch, end);
    count_bytes(fetch, end);
    fetch->order->n_issued = end;
}

int fetch_issue(struct nccl_engine *engine, struct nccl_order *order)
{
    struct fetch fetch = fetch_of(engine, order);

    if (order->step == 0) {
        if (fetch.between_nodes)
            engine_count_collective(engine, fetch.asked->collective);
        join_asker(&fetch, false);
        order->step = 1;
    }
    while (collect_poll(engine) == 0) {
        if (order->n_issued == fetch.asked->n_params) {
            if (fetch.communicates)
                engine_join_all(engine, false);
            join_asker(&fetch, true);
            return 0;
        }
        issue_round(&fetch);
    }
    return NCCL_AGAIN;
}
