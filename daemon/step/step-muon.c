/* SPDX-License-Identifier: Apache-2.0 */

/* Muon's update (step-muon.h). A work item is a matrix that Muon updates, or one chunk of another parameter. */

#include "daemon/step/step-muon.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/log.h"
#include "core/base/recorder.h"
#include "core/budget/muon-cost.h"
#include "core/budget/step-sizes.h"
#include "core/config/config.h"
#include "daemon/memory/snapshot.h"
#include "daemon/step/published.h"
#include "daemon/step/step-kept.h"
#include "daemon/step/step.h"
#include "kernels/muon.h"

#define PART_FLOPS 2e10 /* limit of one part of a matrix product, some seconds at most; picked */

struct muon {
    struct step *step;
    const struct gemm *gemm;
    struct segment scratch;
    uint64_t scratch_elems; /* size of one scratch memory; a matrix uses one while it is updated */
    pthread_mutex_t lock;
    pthread_cond_t returned;                     /* signalled when scratch memory is returned */
    unsigned unused[GEMM_MAX_CALLERS], n_unused; /* numbers of unused scratch memories */
    uint64_t momentum_op;                        /* operation of the first pass; step->update_op: of the second pass */
    uint32_t *items;      /* chunks; a matrix is listed by its first chunk */
    uint32_t n_items;
    struct work torn_work;
};

/* ---- life ---------------------------------------------------------------------------------------------- */

/* Lists the work items, except other nodes' matrices, in the order of published.h if weights are published. */
static void list_items(const struct step *step)
{
    const struct layout *layout = step->layout;
    struct muon *muon = step->muon;

    for (uint32_t i = 0; i < layout->n_chunks; i++) {
        uint32_t id = step->published ? published_chunk(step->published, i) : i;
        const struct layout_param *param = &layout->params[layout->chunks[id].param];

        if (!param->muon || (id == param->first_chunk && state_owns(step->state, layout->chunks[id].rank)))
            muon->items[muon->n_items++] = id;
    }
}

static void muon_unmake(struct step *step)
{
    if (!step->muon)
        return;
    segment_deinit(&step->muon->scratch);
    pthread_mutex_destroy(&step->muon->lock);
    pthread_cond_destroy(&step->muon->returned);
    free(step->muon->items);
    free(step->muon);
}

static int muon_make(struct step *step)
{
    struct muon *muon = calloc(1, sizeof(*muon));
    unsigned n_callers;
    char err[256];
    int r;

    if (!muon)
        return -ENOMEM;
    step->muon = muon;
    muon->step = step;
    muon->scratch = SEGMENT_NULL;
    pthread_mutex_init(&muon->lock, NULL);
    pthread_cond_init(&muon->returned, NULL);
    muon->items = calloc(step->layout->n_chunks + 1, sizeof(*muon->items));
    if (!muon->items)
        return -ENOMEM;
    r = gemm_load(&muon->gemm, err, sizeof(err));
    if (r < 0) {
        log_error("%s", err);
        return r;
    }
    list_items(step);
    muon->scratch_elems = step_muon_scratch_elems(step->layout, step->first_local, step->n_local);
    n_callers = step_muon_callers(step->layout, step->first_local, step->n_local, worker_pool_n_threads(step->pool));
    assert(n_callers <= GEMM_MAX_CALLERS);
    while (muon->n_unused < n_callers) {
        muon->unused[muon->n_unused] = muon->n_unused;
        muon->n_unused++;
    }
    return segment_init(&muon->scratch, "muon", muon->n_unused * muon->scratch_elems * sizeof(float));
}

void step_muon_announce(const struct step *step, const struct config *config)
{
    unsigned n_threads = worker_pool_n_threads(step->pool);
    struct muon_cost cost;
    double speed;

    muon_cost_count(step->layout, step->first_local, step->n_local, config->optimizer.hyper.ns_steps, &cost);
    speed = cost.n_matrices > 0 ? muon_cost_measure(step->muon->gemm) : 0;
    if (speed > 0)
        log_notice("Muon: %.4g Gflop for each step, for %" PRIu64 " matrices of %.4g million elements; about %.2g s "
                   "on %u threads of %.3g Gflop/s each, as just measured",
                   cost.flops / 1e9, cost.n_matrices, (double)cost.n_elems / 1e6,
                   muon_cost_seconds(&cost, speed, n_threads), n_threads, speed / 1e9);
    else if (cost.n_matrices == 0)
        log_notice("Muon: %s", layout_count_matrices(step->layout, 0, step->layout->world_size) > 0
                                   ? "this node owns none of the matrices"
                                   : "no parameter is a matrix, so AdamW updates all parameters");
}

/* Moves the scratch memory from a step for another number of ranks. Both steps have the same matrices and workers. */
static void muon_go_on_from(struct step *step, struct step *before)
{
    struct segment none = step->muon->scratch;

    assert(step->muon->scratch.n_bytes == before->muon->scratch.n_bytes);
    step->muon->scratch = before->muon->scratch;
    before->muon->scratch = none;
}

int step_muon_reserve(const struct step *step)
{
    return step->muon ? segment_reserve(&step->muon->scratch, 0, step->muon->scratch.n_bytes) : 0;
}

/* ---- passes over chunks -------------------------------------------------------------------------------- */

static void add_momentum(const struct step *step, uint32_t id, struct step_slot *slot)
{
    struct update_args args = step_update_args(step, id, NULL);

    args.p = step_acc_here(step, id);
    args.lower = NULL;
    args.acc = args.p;
    args.v = args.w16 = NULL;
    args.w16_dtype = DTYPE_F32;
    step_update_in_slot(slot, step->kernels->muon_momentum, &args);
}

/* Updates masters and weights of a chunk. matrix: the orthogonalised matrix of the chunk's parameter. */
static void change_weights(const struct step *step, uint32_t id, const float *matrix, struct step_slot *slot)
{
    struct update_args args = step_update_args(step, id, matrix + step->layout->chunks[id].start_elem);

    args.m = args.v = NULL;
    step_update_in_slot(slot, step->kernels->update[OPTIMIZER_MUON], &args);
}

/* ---- orthogonalising --------------------------------------------------------------------------------- */

/*
 * Reserves a scratch memory, and waits while other workers use all of them. On a worker. Return: the number of the
 * scratch memory.
 */
static unsigned take_scratch(struct muon *muon)
{
    unsigned which;

    pthread_mutex_lock(&muon->lock);
    while (muon->n_unused == 0)
        pthread_cond_wait(&muon->returned, &muon->lock);
    which = muon->unused[--muon->n_unused];
    pthread_mutex_unlock(&muon->lock);
    return which;
}

static void return_scratch(struct muon *muon, unsigned which)
{
    pthread_mutex_lock(&muon->lock);
    assert(muon->n_unused < GEMM_MAX_CALLERS);
    muon->unused[muon->n_unused++] = which;
    pthread_cond_signal(&muon->returned);
    pthread_mutex_unlock(&muon->lock);
}

/*
 * Orthogonalises a parameter's matrix. scratch: the number of a scratch memory. Return: the result, which is in the
 * scratch memory.
 */
static const float *orthogonalize(const struct step *step, uint32_t param, unsigned scratch)
{
    const struct layout_param *p = &step->layout->params[param];
    const struct muon_parts parts = {.most = PART_FLOPS, .n_ended = worker_progress(step->pool)};
    const struct muon *muon = step->muon;

    assert(state_owns(step->state, step->layout->chunks[p->first_chunk].rank));
    assert(muon_scratch_elems((struct muon_shape){.rows = p->shape[0], .cols = p->shape[1]}) <= muon->scratch_elems);
    (void)failpoint("orthogonalize");
    return muon_orthogonalize(muon->gemm, (struct muon_shape){.rows = p->shape[0], .cols = p->shape[1]},
                              step_acc_here(step, p->first_chunk), &step->groups[p->group],
                              (float *)(void *)muon->scratch.map + scratch * muon->scratch_elems, &parts);
}

/* ---- a matrix ------------------------------------------------------------------------------------------ */

/* The first pass: updates the momentum buffer. */
static void add_momenta(struct step *step, const struct layout_param *p)
{
    struct step_slot *slot;

    for (uint32_t id = p->first_chunk; id < p->first_chunk + p->n_chunks; id++) {
        (void)failpoint("update");
        if (step_is_done(step, step->update_op, id) || !step_begin_chunk(step, step->muon->momentum_op, id, &slot))
            continue;
        if (step->state->snapshot)
            snapshot_put_aside(step->state->snapshot, id);
        add_momentum(step, id, slot);
        step_end_chunk(step, step->muon->momentum_op, id, slot);
    }
}

/*
 * The second pass: updates masters and weights. Skips chunks that an earlier daemon has finished. Calls
 * snapshot_put_aside() again, because add_momenta() skips chunks whose first pass an earlier daemon has finished.
 */
static void change_matrix(struct step *step, const struct layout_param *p, const float *matrix)
{
    struct step_slot *slot;

    for (uint32_t id = p->first_chunk; id < p->first_chunk + p->n_chunks; id++) {
        (void)failpoint("update");
        if (!step_begin_chunk(step, step->update_op, id, &slot))
            continue;
        if (step->state->snapshot)
            snapshot_put_aside(step->state->snapshot, id);
        change_weights(step, id, matrix, slot);
        step_end_chunk(step, step->update_op, id, slot);
    }
}

static bool is_done(const struct step *step, const struct layout_param *p)
{
    for (uint32_t id = p->first_chunk; id < p->first_chunk + p->n_chunks; id++)
        if (!step_is_done(step, step->update_op, id))
            return false;
    return true;
}

static void update_matrix(struct step *step, uint32_t param)
{
    const struct layout_param *p = &step->layout->params[param];
    unsigned scratch;

    if (is_done(step, p))
        return;
    add_momenta(step, p);
    scratch = take_scratch(step->muon);
    change_matrix(step, p, orthogonalize(step, param, scratch));
    return_scratch(step->muon, scratch);
}

/* ---- the update ---------------------------------------------------------------------------------------- */

static void publish_chunks(struct step *step, uint32_t first, uint32_t n)
{
    for (uint32_t id = first; step->published && id < first + n; id++)
        published_add(step->published, id);
}

static void muon_update_run(struct work *work, uint32_t item)
{
    struct step *step = container_of(work, struct step, update_work);
    uint32_t id = step->muon->items[item], param = step->layout->chunks[id].param;

    if (!step->layout->params[param].muon) {
        step_update_chunk(step, id, step_acc_here(step, id));
        publish_chunks(step, id, 1);
        return;
    }
    recorder_work(RECORD_WORK_UPDATE, step->layout->parts[step->layout->chunks[id].part].parcel, 0);
    if (step->contributed[param])
        update_matrix(step, param);
    publish_chunks(step, id, step->layout->params[param].n_chunks);
}

static void post_items(struct step *step)
{
    if (step->published)
        published_begin(step->published, step->state->progress.epoch + 1);
    step->update_work.run = muon_update_run;
    step->update_work.n_items = step->muon->n_items;
    worker_post(step->pool, &step->update_work);
}

/* ---- after a kill -------------------------------------------------------------------------------------- */

/*
 * Finishes a chunk that a worker of a killed daemon was changing in the second pass. First orthogonalises the chunk's
 * matrix again.
 */
static void torn_run(struct work *work, uint32_t item)
{
    struct step *step = container_of(work, struct muon, torn_work)->step;
    struct step_slot *slot;
    unsigned i = item, scratch;
    uint32_t id, param;

    if (!step_find_torn(step, step->update_op, &i, &slot, &id) || i != item + 1)
        return;
    param = step->layout->chunks[id].param;
    if (!step->layout->params[param].muon) {
        step_finish_chunk(step, id, step_acc_here(step, id), slot);
        return;
    }
    scratch = take_scratch(step->muon);
    change_weights(step, id, orthogonalize(step, param, scratch), slot);
    return_scratch(step->muon, scratch);
    step_end_chunk(step, step->update_op, id, slot);
}

static void torn_done(struct work *work)
{
    post_items(container_of(work, struct muon, torn_work)->step);
}

static void finish_torn_momentum(struct step *step)
{
    struct step_slot *slot;
    uint32_t id;

    for (unsigned i = 0; step_find_torn(step, step->muon->momentum_op, &i, &slot, &id);) {
        add_momentum(step, id, slot);
        step_end_chunk(step, step->muon->momentum_op, id, slot);
    }
}

static void muon_update(struct step *step)
{
    struct muon *muon = step->muon;
    struct step_slot *slot;
    unsigned i = 0;
    uint32_t id;

    muon->momentum_op = step->update_op;
    step->update_op = ++step->n_ops;
    finish_torn_momentum(step);
    if (!step_find_torn(step, step->update_op, &i, &slot, &id)) {
        post_items(step);
        return;
    }
    muon->torn_work = (struct work){.run = torn_run, .done = torn_done, .n_items = CONFIG_MAX_THREADS};
    worker_post(step->pool, &muon->torn_work);
}

const struct step_ops step_muon_ops = {.reduce = step_reduce_here,
                                       .update = muon_update,
                                       .make = muon_make,
                                       .unmake = muon_unmake,
                                       .go_on_from = muon_go_on_from};
