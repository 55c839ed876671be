/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Updates. One launch updates all parameters except the matrices of Muon (two launches if only some masters have 24
 * bits), because a GPU runs out of blocks between launches. Muon's launches follow:
 *
 *     for all matrices   updates the momentum with the gradient, and makes the accumulator the input matrix
 *     for each matrix    orthogonalises it into scratch memory, and updates the weights with the result
 *
 * If the process is killed, an order may be repeated. The repeated order has the same launches, because they follow
 * from the plan and the inputs. Each launch continues from its marks.
 */

#include "engine/nccl.h"

#include <string.h>

#include "core/base/base.h"

/* The list of one launch. ranges and blocks are in host memory. */
struct update_maker {
    struct device_update_range *ranges;
    struct device_chunk *blocks;
    struct device_update_list list;
    uint32_t n_ranges;
};

static bool is_matrix(const struct nccl_engine *engine, uint32_t param)
{
    return engine->plan.params[param].rows > 0;
}

/* Return: whether the rank owns the chunk and the chunk's parameter is in the step. */
static bool takes_part(const struct nccl_engine *engine, const struct nccl_gpu *gpu, uint32_t chunk)
{
    const struct layout_chunk *c = &engine->plan.chunks[chunk];

    return c->rank == gpu->rank && engine->inputs.contributed[c->param];
}

/* A list of at most n_chunks chunks. */
static struct update_maker maker_new(struct nccl_engine *engine, struct nccl_gpu *gpu, const struct nccl_order *order,
                                     uint32_t n_chunks, void *scalars, uint32_t marks)
{
    struct nccl_lists *lists = &gpu->lanes[order->lane].lists;
    size_t n_blocks = (size_t)n_chunks * device_chunks_count(CHUNK_ELEMS);
    void *ranges, *blocks;
    struct update_maker maker = {.n_ranges = 0};

    maker.ranges = lists_take(engine, lists, n_chunks * sizeof(*maker.ranges), &ranges);
    maker.blocks = lists_take(engine, lists, n_blocks * sizeof(*maker.blocks), &blocks);
    maker.list = (struct device_update_list){.ranges = ranges,
                                             .chunks = blocks,
                                             .scalars = scalars,
                                             .optimizer = engine->plan.head->optimizer,
                                             .moments = device_plan_moments(&engine->plan),
                                             .undo = undo_of_update(engine, gpu, order->command.update.step, marks)};
    return maker;
}

static void maker_add(struct update_maker *maker, const struct device_update_range *range)
{
    maker->ranges[maker->n_ranges] = *range;
    maker->list.n_chunks += device_chunks_fill(&maker->blocks[maker->list.n_chunks], maker->n_ranges++, range->n_elems);
}

/* Return: all arrays of an owned chunk. */
static struct device_update_range range_of(struct nccl_engine *engine, struct nccl_gpu *gpu, uint32_t chunk)
{
    const struct device_plan *plan = &engine->plan;
    const struct layout_chunk *c = &plan->chunks[chunk];
    const struct device_plan_param *param = &plan->params[c->param];
    const struct layout_bucket *b = &plan->buckets[param->bucket];
    const struct device_places *places = &gpu->places.buckets[param->bucket];
    uint64_t elem = param->offset_elems + c->start_elem, own = elem - places->start_elem;
    uint8_t *master = nccl_master(engine, gpu, param->bucket, elem);
    /* In stage 3 the fetch makes the 16-bit weights. */
    enum dtype w16 = plan->head->stage == 3 ? DTYPE_F32 : b->dtype;
    struct device_update_range range = {
        .p = (float *)master,
        .m = nccl_moment(engine, gpu, places->exp_avg, own),
        .v = nccl_moment(engine, gpu, places->exp_avg_sq, own),
        .acc = nccl_acc(gpu, param->bucket, elem),
        .w16 =
            w16 == DTYPE_F32 ? NULL : gpu->pieces[DEVICE_WEIGHTS].at + b->weight_offset_bytes + elem * dtype_size(w16),
        .n_elems = c->n_elems,
        .start_elem = c->start_elem,
        .scalars = c->param,
        .w16_dtype = w16,
    };

    if (places->lower != DEVICE_NONE) {
        range.p = NULL;
        range.w16 = master;
        range.w16_dtype = DTYPE_BF16;
        range.lower = (int8_t *)gpu->pieces[DEVICE_STATE].at + places->lower + own;
    }
    return range;
}

/* Return: the arrays of a chunk for Muon's first pass. */
static struct device_update_range momentum_range_of(struct nccl_engine *engine, struct nccl_gpu *gpu, uint32_t chunk)
{
    struct device_update_range range = range_of(engine, gpu, chunk);

    range.p = (float *)(uintptr_t)range.acc;
    range.v = range.w16 = NULL;
    range.lower = NULL;
    range.w16_dtype = DTYPE_F32;
    return range;
}

static void launch(struct nccl_engine *engine, struct nccl_gpu *gpu, const struct nccl_order *order,
                   const struct update_maker *maker)
{
    lists_upload(engine, gpu, (unsigned)order->lane);
    engine_launch(engine, gpu, device_update(gpu->main, &maker->list), "device_update");
}

/* Return: the marks (DEVICE_MARKS_*) of the launch that begins the parameter's update. */
static uint32_t first_launch(const struct nccl_engine *engine, uint32_t param)
{
    if (is_matrix(engine, param))
        return DEVICE_MARKS_MOMENTUM;
    return device_is_master24(&engine->plan, engine->plan.params[param].bucket) ? DEVICE_MARKS_UPDATE24
                                                                                : DEVICE_MARKS_UPDATE;
}

static bool is_listed(const struct nccl_engine *engine, const struct nccl_gpu *gpu, uint32_t chunk, uint32_t marks)
{
    return takes_part(engine, gpu, chunk) && first_launch(engine, engine->plan.chunks[chunk].param) == marks;
}

/* Makes one launch for all parameters whose update begins with it, if there are any: Muon's first pass for all
 * matrices, or a whole update. */
static void update_all(struct nccl_engine *engine, struct nccl_gpu *gpu, const struct nccl_order *order, void *scalars,
                       uint32_t marks)
{
    uint32_t n_chunks = engine->plan.head->n_chunks, n_listed = 0;
    bool matrices = marks == DEVICE_MARKS_MOMENTUM;
    struct update_maker maker;

    for (uint32_t c = 0; c < n_chunks; c++)
        n_listed += is_listed(engine, gpu, c, marks);
    if (n_listed == 0)
        return;
    maker = maker_new(engine, gpu, order, n_listed, scalars, marks);
    maker.list.optimizer =
        matrices ? (enum optimizer)DEVICE_MUON_MOMENTUM : optimizer_of_param(engine->plan.head->optimizer, false);
    maker.list.master24 = marks == DEVICE_MARKS_UPDATE24;
    for (uint32_t c = 0; c < n_chunks; c++) {
        struct device_update_range range;

        if (!is_listed(engine, gpu, c, marks))
            continue;
        range = matrices ? momentum_range_of(engine, gpu, c) : range_of(engine, gpu, c);
        maker_add(&maker, &range);
    }
    launch(engine, gpu, order, &maker);
}

/* ---- matrices -------------------------------------------------------------------------------------------- */

static struct muon_shape shape_of(const struct device_plan_param *param)
{
    return (struct muon_shape){.rows = param->rows, .cols = param->cols};
}

static bool owns_matrix(const struct nccl_engine *engine, const struct nccl_gpu *gpu, uint32_t param)
{
    return is_matrix(engine, param) && engine->plan.buckets[engine->plan.params[param].bucket].owner == gpu->rank;
}

static bool is_first_of_shape(const struct nccl_engine *engine, const struct nccl_gpu *gpu, uint32_t param)
{
    const struct device_plan_param *params = engine->plan.params;

    for (uint32_t i = 0; i < param; i++)
        if (owns_matrix(engine, gpu, i) && params[i].rows == params[param].rows && params[i].cols == params[param].cols)
            return false;
    return true;
}

static void update_matrix(struct nccl_engine *engine, struct nccl_gpu *gpu, const struct nccl_order *order,
                          uint32_t param, void *scalars)
{
    const struct device_plan_param *p = &engine->plan.params[param];
    struct update_maker maker = maker_new(engine, gpu, order, p->n_chunks, scalars, DEVICE_MARKS_MATRIX + p->matrix);
    const float *matrix = muon_orthogonalize_on(engine, gpu, shape_of(p), nccl_acc(gpu, p->bucket, p->offset_elems),
                                                &engine->inputs.groups[p->group], gpu->scratch);

    maker.list.master24 = device_is_master24(&engine->plan, p->bucket);
    for (uint32_t c = p->first_chunk; c < p->first_chunk + p->n_chunks; c++) {
        struct device_update_range range = range_of(engine, gpu, c);

        range.m = range.v = NULL;
        range.acc = matrix + range.start_elem;
        maker_add(&maker, &range);
    }
    launch(engine, gpu, order, &maker);
}

static void update_matrices(struct nccl_engine *engine, struct nccl_gpu *gpu, const struct nccl_order *order,
                            void *scalars)
{
    update_all(engine, gpu, order, scalars, DEVICE_MARKS_MOMENTUM);
    for (uint32_t param = 0; param < engine->plan.head->n_params; param++)
        if (owns_matrix(engine, gpu, param) && engine->inputs.contributed[param])
            update_matrix(engine, gpu, order, param, scalars);
}

static void make_scratch(struct nccl_engine *engine, struct nccl_gpu *gpu)
{
    const struct device_plan *plan = &engine->plan;
    uint64_t n_elems = 0;

    for (uint32_t i = 0; i < plan->head->n_params; i++)
        if (owns_matrix(engine, gpu, i))
            n_elems = MAX(n_elems, muon_scratch_elems(shape_of(&plan->params[i])));
    engine_use(engine, gpu);
    if (n_elems > 0)
        gpu->scratch = (float *)(void *)memory_scratch(engine, gpu, n_elems * sizeof(float));
}

/* Makes the products of each shape once, so that the GPU loads their code. */
static void warm(struct nccl_engine *engine, struct nccl_gpu *gpu)
{
    const struct device_plan *plan = &engine->plan;

    engine_use(engine, gpu);
    for (uint32_t i = 0; i < plan->head->n_params; i++)
        if (owns_matrix(engine, gpu, i) && is_first_of_shape(engine, gpu, i))
            muon_warm(engine, gpu, shape_of(&plan->params[i]), gpu->scratch);
    engine_check_cuda(engine, gpu, cudaEventRecord(gpu->main_event, gpu->main), "cudaEventRecord");
}

void update_prepare(struct nccl_engine *engine)
{
    for (unsigned i = 0; i < engine->n_gpus; i++)
        make_scratch(engine, &engine->gpus[i]);
}

void update_warm(struct nccl_engine *engine)
{
    for (unsigned i = 0; i < engine->n_gpus; i++)
        warm(engine, &engine->gpus[i]);
}

/* ---- the order ------------------------------------------------------------------------------------------- */

int update_issue(struct nccl_engine *engine, struct nccl_order *order)
{
    size_t n_bytes = engine->plan.head->n_params * sizeof(struct update_scalars);

    for (unsigned i = 0; i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];
        void *scalars;

        engine_use(engine, gpu);
        memcpy(lists_take(engine, &gpu->lanes[order->lane].lists, n_bytes, &scalars), engine->inputs.scalars, n_bytes);
        update_all(engine, gpu, order, scalars, DEVICE_MARKS_UPDATE);
        update_all(engine, gpu, order, scalars, DEVICE_MARKS_UPDATE24);
        if (engine->plan.head->n_matrices > 0)
            update_matrices(engine, gpu, order, scalars);
    }
    return 0;
}
