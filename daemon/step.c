/* SPDX-License-Identifier: Apache-2.0 */

#include "daemon/step.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "daemon/base.h"
#include "daemon/failpoint.h"
#include "daemon/config.h"

_Static_assert((int)STEP_MAX_RANKS == (int)CONFIG_MAX_LOCAL_RANKS, "what config admits, a mask must hold");

/* ---- the tree over ranks ------------------------------------------------------------------------------- */

static unsigned find_pieces(unsigned lo, unsigned n, unsigned first, unsigned end, struct step_piece *pieces,
                            unsigned n_pieces)
{
    unsigned left = 1;

    if (n == 0 || lo + n <= first || lo >= end)
        return n_pieces;
    if (lo >= first && lo + n <= end) {
        assert(n_pieces < STEP_MAX_PIECES);
        pieces[n_pieces] = (struct step_piece){.first = lo, .n = n};
        return n_pieces + 1;
    }
    while (left * 2 < n)
        left *= 2;
    n_pieces = find_pieces(lo, left, first, end, pieces, n_pieces);
    return find_pieces(lo + left, n - left, first, end, pieces, n_pieces);
}

unsigned step_find_pieces(unsigned world, unsigned first, unsigned n, struct step_piece *pieces)
{
    return find_pieces(0, world, first, first + n, pieces, 0);
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static void reduction_run(struct work *work, uint32_t item);
static void reduction_done(struct work *work);

static int make_reductions(struct step *step)
{
    const struct layout *layout = step->layout;
    uint64_t before = 0;

    step->reductions = calloc(layout->n_buckets + 1, sizeof(*step->reductions));
    if (!step->reductions)
        return -ENOMEM;
    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        struct reduction *reduction = &step->reductions[b];

        reduction->step = step;
        reduction->bucket = b;
        reduction->staging_elems = before * step->n_pieces;
        before += layout->buckets[b].n_elems;
        reduction->work = (struct work){.run = reduction_run, .done = reduction_done};
        reduction->masks = calloc(layout->buckets[b].n_params, sizeof(*reduction->masks));
        reduction->sources = calloc(STEP_MAX_RANKS, sizeof(*reduction->sources));
        if (!reduction->masks || !reduction->sources)
            return -ENOMEM;
    }
    return 0;
}

static int make_staging(struct step *step)
{
    if (step->n_local == step->layout->world_size)
        return 0;
    step->staging = calloc(step->layout->padded_elems * step->n_pieces + 1, sizeof(float));
    return step->staging ? 0 : -ENOMEM;
}

int step_new(struct step **out, const struct step_options *options)
{
    const struct layout *layout = options->state->layout;
    struct step *step = calloc(1, sizeof(*step));

    if (!step)
        return -ENOMEM;
    assert(options->n_local <= STEP_MAX_RANKS && layout->world_size <= STEP_MAX_WORLD);
    pthread_mutex_init(&step->finding_lock, NULL);
    step->layout = layout;
    step->state = options->state;
    step->kernels = options->kernels;
    step->pool = options->pool;
    step->first_local = options->first_local;
    step->n_local = options->n_local;
    step->optimizer = options->optimizer;
    step->n_pieces = step_find_pieces(layout->world_size, step->first_local, step->n_local, step->pieces);
    step->results = calloc(layout->n_chunks + 1, sizeof(*step->results));
    step->sums = calloc((size_t)layout->n_chunks * options->n_local + 1, sizeof(*step->sums));
    step->contributed = calloc(layout->n_params, 1);
    step->norms = calloc(layout->n_params, sizeof(*step->norms));
    step->scalars = calloc(layout->n_params, sizeof(*step->scalars));
    if (!step->results || !step->sums || !step->contributed || !step->norms || !step->scalars ||
        make_reductions(step) < 0 || make_staging(step) < 0) {
        step_free(step);
        return -ENOMEM;
    }
    *out = step;
    return 0;
}

void step_free(struct step *step)
{
    if (!step)
        return;
    for (uint32_t b = 0; step->reductions && b < step->layout->n_buckets; b++) {
        assert(!step->reductions[b].busy);
        free(step->reductions[b].masks);
        free(step->reductions[b].sources);
    }
    free(step->reductions);
    free(step->results);
    free(step->sums);
    free(step->contributed);
    free(step->norms);
    free(step->scalars);
    free(step->staging);
    pthread_mutex_destroy(&step->finding_lock);
    free(step);
}

uint64_t step_fixed_bytes(const struct layout *layout, unsigned n_local)
{
    uint64_t per_chunk = sizeof(struct reduce_result) + n_local * sizeof(struct position_sum);
    uint64_t per_param = 1 + sizeof(double) + sizeof(struct update_scalars) + sizeof(uint64_t);
    uint64_t per_bucket = sizeof(struct reduction) + STEP_MAX_RANKS * sizeof(void *);

    return layout->n_chunks * per_chunk + layout->n_params * per_param + layout->n_buckets * per_bucket;
}

void step_open(struct step *step)
{
    memset(step->contributed, 0, step->layout->n_params);
    step->finding = (struct step_finding){0};
    step->n_reduced_bytes = 0;
}

/* ---- reduce -------------------------------------------------------------------------------------------- */

/* The leaves of one chunk: who takes part, where its data lies, how the tree joins them. */
struct leaves {
    const void *data[STEP_MAX_RANKS];
    unsigned source[STEP_MAX_RANKS]; /* index into reduction->sources */
    struct reduce_join joins[STEP_MAX_RANKS];
    unsigned n;
};

/* Sources [first, first + n) that are in mask. */
static void find_leaves(const struct reduction *reduction, const struct layout_param *param, uint64_t start_elem,
                        uint64_t mask, unsigned first, unsigned n, struct leaves *leaves)
{
    const struct step *step = reduction->step;
    size_t elem_bytes = reduction->combining ? sizeof(float) : dtype_size(param->grad_dtype);
    bool present[STEP_MAX_WORLD];

    leaves->n = 0;
    memset(present, 0, step->layout->world_size);
    for (unsigned i = first; i < first + n; i++) {
        unsigned rank = reduction->combining ? reduction->source_ranks[i] : step->first_local + i;

        if (!(mask >> i & 1))
            continue;
        leaves->data[leaves->n] = reduction->sources[i] + (param->offset_elems + start_elem) * elem_bytes;
        leaves->source[leaves->n] = i;
        leaves->n++;
        present[rank] = true;
    }
    if (leaves->n > 0)
        reduce_joins(present, step->layout->world_size, leaves->joins);
}

static bool finding_is_before(const struct step_finding *a, const struct step_finding *b)
{
    if (a->micro_batch != b->micro_batch)
        return a->micro_batch < b->micro_batch;
    if (a->param != b->param)
        return a->param < b->param;
    return a->elem < b->elem;
}

static void keep_finding(struct step *step, const struct step_finding *finding)
{
    pthread_mutex_lock(&step->finding_lock);
    if (!step->finding.found || finding_is_before(finding, &step->finding))
        step->finding = *finding;
    pthread_mutex_unlock(&step->finding_lock);
}

/* Only when a chunk's accumulator is not finite: whose gradient was it? Slots are still held here. */
static void blame(struct reduction *reduction, const struct reduce_args *args, const struct leaves *leaves,
                  uint32_t param)
{
    struct step *step = reduction->step;
    struct reduce_finding findings[STEP_MAX_RANKS], overflow;

    reduce_find_nonfinite(args, findings, &overflow);
    for (unsigned i = 0; i <= leaves->n; i++) {
        const struct reduce_finding *f = i < leaves->n ? &findings[i] : &overflow;
        unsigned source = i < leaves->n ? leaves->source[i] : 0;

        if (f->n_nan + f->n_inf == 0)
            continue;
        /* Which of a piece's ranks it was, the node knows that has reduced them. */
        if (reduction->combining && i < leaves->n)
            continue;
        keep_finding(step, &(struct step_finding){
                               .found = true,
                               .overflowed = i == leaves->n,
                               .micro_batch = reduction->micro_batch,
                               .param = param,
                               .rank = step->first_local + source,
                               .elem = f->first_elem,
                               .value = f->first_value,
                               .n_nan = f->n_nan,
                               .n_inf = f->n_inf,
                           });
    }
}

/* One chunk, the sources [first, first + n), into target. */
static void reduce_into(struct reduction *reduction, const struct layout_chunk *chunk, uint32_t chunk_id,
                        unsigned first, unsigned n, float *target, bool first_contribution)
{
    struct step *step = reduction->step;
    const struct layout_param *param = &step->layout->params[chunk->param];
    struct position_sum sums[STEP_MAX_RANKS];
    struct reduce_result *result = &step->results[chunk_id];
    struct leaves leaves;
    struct reduce_args args;

    find_leaves(reduction, param, chunk->start_elem, reduction->masks[param->index_in_bucket], first, n, &leaves);
    if (leaves.n == 0)
        return;
    args = (struct reduce_args){
        .dtype = reduction->combining ? DTYPE_F32 : param->grad_dtype,
        .n_leaves = leaves.n,
        .leaves = leaves.data,
        .joins = leaves.joins,
        .acc = target,
        .first = first_contribution,
        .n_elems = chunk->n_elems,
        .start_elem = chunk->start_elem,
    };
    result->sums = reduction->combining ? NULL : sums;
    step->kernels->reduce(&args, result);
    if (result->nonfinite)
        blame(reduction, &args, &leaves, chunk->param);
    for (unsigned i = 0; !reduction->combining && i < leaves.n; i++)
        step->sums[(size_t)chunk_id * step->n_local + leaves.source[i]] = sums[i];
}

static void reduction_run(struct work *work, uint32_t item)
{
    struct reduction *reduction = container_of(work, struct reduction, work);
    struct step *step = reduction->step;
    uint32_t chunk_id = step->layout->buckets[reduction->bucket].first_chunk + item;
    const struct layout_chunk *chunk = &step->layout->chunks[chunk_id];
    const struct layout_param *param = &step->layout->params[chunk->param];
    uint64_t elem = param->offset_elems + chunk->start_elem;
    bool direct = !step->staging; /* all ranks are local: no partial sums */
    bool kept = step->state->stage == 1 || state_owns(step->state, chunk->rank); /* the accumulator is here */

    (void)failpoint("reduce");
    if (direct || reduction->combining) {
        if (kept)
            reduce_into(reduction, chunk, chunk_id, 0, reduction->n_sources,
                        state_acc(step->state, reduction->bucket, elem), !step->contributed[chunk->param]);
        return;
    }
    for (unsigned i = 0; i < step->n_pieces; i++)
        reduce_into(reduction, chunk, chunk_id, step->pieces[i].first - step->first_local, step->pieces[i].n,
                    step_staging(step, reduction->bucket, i) + elem, true);
}

static void reduction_done(struct work *work)
{
    struct reduction *reduction = container_of(work, struct reduction, work);
    struct step *step = reduction->step;
    const struct layout_bucket *bucket = &step->layout->buckets[reduction->bucket];

    reduction->busy = false;
    for (uint32_t i = 0; i < bucket->n_params; i++) {
        uint32_t param = step->layout->bucket_params[bucket->first_param + i];
        unsigned n = (unsigned)__builtin_popcountll(reduction->masks[i]);

        if (n == 0)
            continue;
        if (!step->staging || reduction->combining)
            step->contributed[param] = 1;
        if (!reduction->combining)
            step->n_reduced_bytes +=
                n * step->layout->params[param].n_elems * dtype_size(step->layout->params[param].grad_dtype);
    }
    reduction->done(reduction->userdata, reduction);
}

struct reduction *step_prepare(struct step *step, uint32_t bucket, uint32_t micro_batch, uint32_t pass)
{
    struct reduction *reduction = &step->reductions[bucket];

    assert(!reduction->busy);
    reduction->micro_batch = micro_batch;
    reduction->pass = pass;
    reduction->combining = false;
    reduction->n_sources = step->n_local;
    reduction->work.n_items = step->layout->buckets[bucket].n_chunks;
    memset(reduction->masks, 0, step->layout->buckets[bucket].n_params * sizeof(*reduction->masks));
    return reduction;
}

struct reduction *step_combine(struct step *step, uint32_t bucket, uint32_t micro_batch, uint32_t pass)
{
    struct reduction *reduction = step_prepare(step, bucket, micro_batch, pass);

    assert(step->staging);
    reduction->combining = true;
    reduction->n_sources = 0;
    return reduction;
}

void step_post(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction), void *userdata)
{
    reduction->busy = true;
    reduction->done = done;
    reduction->userdata = userdata;
    worker_post(reduction->step->pool, &reduction->work);
}

uint64_t step_sum(const struct step *step, const struct reduction *reduction, unsigned local_rank, uint32_t param)
{
    const struct layout_param *p = &step->layout->params[param];
    struct position_sum total = {0};

    assert(reduction->masks[p->index_in_bucket] >> local_rank & 1);
    for (uint32_t c = p->first_chunk; c < p->first_chunk + p->n_chunks; c++)
        position_sum_add(&total, &step->sums[(size_t)c * step->n_local + local_rank]);
    return position_sum_finish(&total, p->n_elems * dtype_size(p->grad_dtype));
}

float *step_staging(const struct step *step, uint32_t bucket, unsigned piece)
{
    return step->staging + step->reductions[bucket].staging_elems + step->layout->buckets[bucket].n_elems * piece;
}

/* ---- norm ---------------------------------------------------------------------------------------------- */

void step_norm(struct step *step, struct exact_sum *total)
{
    const struct layout *layout = step->layout;

    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];
        struct exact_sum sum;

        step->norms[p] = 0;
        if (!step->contributed[p])
            continue;
        exact_sum_reset(&sum);
        for (uint32_t c = param->first_chunk; c < param->first_chunk + param->n_chunks; c++)
            if (state_owns(step->state, layout->chunks[c].rank))
                exact_sum_merge(&sum, &step->results[c].squares);
        step->norms[p] = sqrt(exact_sum_round(&sum));
        exact_sum_merge(total, &sum);
    }
}

/* ---- update -------------------------------------------------------------------------------------------- */

static void update_run(struct work *work, uint32_t item)
{
    struct step *step = container_of(work, struct step, update_work);
    const struct layout_chunk *chunk = &step->layout->chunks[item];
    const struct layout_param *param = &step->layout->params[chunk->param];
    uint64_t elem = param->offset_elems + chunk->start_elem;
    bool publish = step->state->stage != 3 && param->dtype != DTYPE_F32;
    struct update_args args;

    (void)failpoint("update");
    if (!step->contributed[chunk->param] || !state_owns(step->state, chunk->rank))
        return;
    args = (struct update_args){
        .p = state_master(step->state, param->bucket, elem),
        .m = state_exp_avg(step->state, param->bucket, elem),
        .v = state_exp_avg_sq(step->state, param->bucket, elem),
        .acc = state_acc(step->state, param->bucket, elem),
        .w16 = publish ? state_weights(step->state, chunk->param, chunk->start_elem) : NULL,
        .w16_dtype = publish ? param->dtype : DTYPE_F32,
        .n_elems = chunk->n_elems,
        .k = &step->scalars[chunk->param],
    };
    step->kernels->update[step->optimizer](&args);
}

static void update_done(struct work *work)
{
    struct step *step = container_of(work, struct step, update_work);

    step->update_done(step->update_userdata);
}

void step_update(struct step *step, const struct step_update *update, void (*done)(void *userdata), void *userdata)
{
    const struct state_journal *journal = state_journal(step->state);
    const struct update_scalars *last = NULL;
    uint64_t last_count = 0;
    uint32_t last_group = 0;

    for (uint32_t p = 0; p < step->layout->n_params; p++) {
        uint32_t group = step->layout->params[p].group;

        if (!step->contributed[p])
            continue;
        step->norms[p] *= update->norm_scale;
        /* pow() is what costs here; neighbours nearly always share group and count. */
        if (last && last_group == group && last_count == journal->counts[p])
            step->scalars[p] = *last;
        else
            update_scalars_compute(step->optimizer, &update->groups[group], update->s, journal->counts[p] + 1,
                                   &step->scalars[p]);
        last = &step->scalars[p];
        last_group = group;
        last_count = journal->counts[p];
    }
    step->update_done = done;
    step->update_userdata = userdata;
    step->update_work = (struct work){.run = update_run, .done = update_done, .n_items = step->layout->n_chunks};
    worker_post(step->pool, &step->update_work);
}

void step_commit(struct step *step)
{
    struct state_journal *journal = state_journal(step->state);

    for (uint32_t p = 0; p < step->layout->n_params; p++)
        journal->counts[p] += step->contributed[p];
}
