/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs the data path of the daemon (daemon/step/step.c) over a golden case, in one process and without sockets:
 *
 *     golden-driver CASE.json HOWS.json FOLDER     a result file FOLDER/N for the N-th of the hows
 *     golden-driver --isas                         the instruction sets of this machine
 *
 * Each element of HOWS.json is an object with the keys stage, bucket_elems, threads, isa, order (the seed of the order
 * of pushes) and split. The result must not depend on any of these.
 *
 * If split is 0, there is one core (struct core). Otherwise there are two cores, as on two nodes, and the second core
 * has the ranks from `split` on. Each core owns the partitions of its ranks and sums the gradients of its ranks. It
 * gets copies of the other core's partial sums and published weights. Only the bytes that it may use are copied; the
 * rest of the copy is NaN.
 *
 * Everything runs on the main thread, except the kernels, which run on the workers.
 */

#include <errno.h>
#include <inttypes.h>
#include <json-c/json.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/worker.h"
#include "core/layout/layout.h"
#include "daemon/memory/state.h"
#include "daemon/memory/weights.h"
#include "daemon/step/step.h"
#include "tests/programs/golden-case.h"

enum { MAX_CORES = 2 };

struct how {
    unsigned stage, n_threads, split;
    uint64_t bucket_elems, order;
    const char *isa;
};

/* The state and step of one daemon. */
struct core {
    unsigned first, n; /* its ranks: first to first + n - 1 */
    struct state *state;
    struct step *step;
    float *received; /* the other core's partial sums, each at its arena offset */
};

/* The progress of a parcel in the micro-batch. */
struct cursor {
    unsigned pass;
    unsigned n_under_way; /* cores that are reducing or combining the parcel */
};

struct push {
    unsigned rank, param;
};

struct run {
    const struct golden_case *c;
    struct how how;
    const struct kernels *kernels;
    struct layout *layout;
    struct worker_pool *pool;
    struct core cores[MAX_CORES];
    unsigned n_cores;
    unsigned step, micro;

    unsigned n_slots;   /* per rank, the highest number of passes of any parameter */
    uint8_t *slots;     /* an arena per rank and pass */
    unsigned *n_passes; /* per rank and parameter, pushes of this micro-batch */
    unsigned *n_pushed; /* per rank and parameter, pushes already done */
    unsigned *n_left;   /* per rank, pushes still to do */
    struct push *pushes;
    struct cursor *cursors; /* one per parcel */
    unsigned n_under_way;
    FILE *out;
};

/* ---- a run's life -------------------------------------------------------------------------------------- */

static void ignore_notice(void *userdata)
{
    (void)userdata;
}

static int make_layout(struct run *run)
{
    const struct golden_case *c = run->c;
    _cleanup_free_ struct layout_decl *decls = calloc(c->n_params, sizeof(*decls));
    uint32_t bad;

    if (!decls)
        return -ENOMEM;
    for (unsigned i = 0; i < c->n_params; i++) {
        const struct golden_param *p = &c->params[i];

        decls[i] = (struct layout_decl){.name = p->name,
                                        .name_len = strlen(p->name),
                                        .dtype = p->dtype,
                                        .grad_dtype = p->grad_dtype,
                                        .group = p->group,
                                        .trainable = p->trainable,
                                        .n_dims = p->n_dims,
                                        .shape = p->shape};
    }
    return layout_new(&run->layout, decls, c->n_params, c->world_size, run->how.bucket_elems, &bad) == 0 ? 0 : -EINVAL;
}

static int make_core(struct run *run, unsigned first, unsigned n)
{
    struct core *core = &run->cores[run->n_cores++];
    const struct subtree *last;
    int r;

    core->first = first;
    core->n = n;
    r = state_new(&core->state, &(struct state_options){.layout = run->layout,
                                                        .stage = run->how.stage,
                                                        .first_rank = first,
                                                        .n_ranks = n,
                                                        .moments = golden_case_moments(run->c)});
    if (r == 0)
        r = step_new(&core->step, &(struct step_options){.state = core->state,
                                                         .kernels = run->kernels,
                                                         .pool = run->pool,
                                                         .first_local = first,
                                                         .n_local = n,
                                                         .optimizer = run->c->optimizer});
    if (r < 0)
        return r;
    last = &core->step->pieces[core->step->n_pieces - 1];
    return core->step->pieces[0].first == first && last->first + last->n == first + n ? 0 : -EINVAL;
}

static int make_cores(struct run *run)
{
    unsigned split = run->how.split, world = run->c->world_size;
    int r = make_core(run, 0, split ? split : world);

    if (r == 0 && split)
        r = make_core(run, split, world - split);
    for (unsigned i = 0; r == 0 && run->n_cores == 2 && i < 2; i++) {
        run->cores[i].received =
            malloc(run->layout->padded_elems * run->cores[1 - i].step->n_pieces * sizeof(float) + 1);
        if (!run->cores[i].received)
            r = -ENOMEM;
    }
    return r;
}

/* Return: the highest number of pushes of one parameter in one micro-batch. */
static unsigned count_slots(const struct golden_case *c)
{
    struct golden_place at = {0};
    unsigned most = 1;

    for (at.step = 0; at.step < c->n_steps; at.step++)
        for (at.micro = 0; at.micro < golden_case_n_micro_batches(c, at.step); at.micro++)
            for (at.rank = 0; at.rank < c->world_size; at.rank++)
                for (at.param = 0; at.param < c->n_params; at.param++)
                    most = MAX(most, golden_case_n_passes(c, &at));
    return most;
}

static int make_pushers(struct run *run)
{
    size_t n = (size_t)run->c->world_size * run->c->n_params;

    run->n_slots = count_slots(run->c);
    run->slots = malloc(run->c->world_size * run->n_slots * run->layout->arena_bytes + 1);
    run->n_passes = calloc(n, sizeof(*run->n_passes));
    run->n_pushed = calloc(n, sizeof(*run->n_pushed));
    run->n_left = calloc(run->c->world_size, sizeof(*run->n_left));
    run->pushes = calloc(n * run->n_slots, sizeof(*run->pushes));
    run->cursors = calloc(run->layout->n_parcels + 1, sizeof(*run->cursors));
    return run->slots && run->n_passes && run->n_pushed && run->n_left && run->pushes && run->cursors ? 0 : -ENOMEM;
}

static void run_deinit(struct run *run)
{
    worker_pool_free(run->pool);
    for (unsigned i = 0; i < run->n_cores; i++) {
        step_free(run->cores[i].step);
        state_free(run->cores[i].state);
        free(run->cores[i].received);
    }
    free(run->slots);
    free(run->n_passes);
    free(run->n_pushed);
    free(run->n_left);
    free(run->pushes);
    free(run->cursors);
    layout_free(run->layout);
    if (run->out)
        fclose(run->out);
}

static int run_init(struct run *run, const struct golden_case *c, const struct how *how, const char *path)
{
    char why[128];
    int r;

    *run = (struct run){.c = c, .how = *how};
    r = kernels_select(&run->kernels, how->isa, why, sizeof(why));
    if (r == 0)
        r = make_layout(run);
    if (r == 0)
        r = worker_pool_new(&run->pool, how->n_threads, ignore_notice, NULL);
    if (r == 0)
        r = make_cores(run);
    if (r == 0)
        r = make_pushers(run);
    if (r < 0)
        return r;
    run->out = fopen(path, "we");
    return run->out ? 0 : -errno;
}

/* ---- initial weights ----------------------------------------------------------------------------------- */

static struct core *owner(struct run *run, const struct layout_chunk *chunk)
{
    return &run->cores[run->n_cores == 2 && chunk->rank >= run->how.split];
}

/* Stores the master weights that the core owns. Copies the other weights into its published weights, as a node does. */
static void store_weights(struct run *run, struct core *core, uint32_t param, const uint8_t *weights)
{
    const struct layout_param *p = &run->layout->params[param];
    size_t size = dtype_size(p->dtype);

    if (!p->trainable)
        weights_store(core->state, run->kernels, param, 0, p->n_elems, weights);
    for (uint32_t i = p->first_chunk; i < p->first_chunk + p->n_chunks; i++) {
        const struct layout_chunk *chunk = &run->layout->chunks[i];
        const uint8_t *from = weights + chunk->start_elem * size;

        if (state_owns(core->state, chunk->rank))
            weights_store(core->state, run->kernels, param, chunk->start_elem, chunk->n_elems, from);
        else if (run->how.stage != 3)
            memcpy(state_weights(core->state, param, chunk->start_elem), from, chunk->n_elems * size);
    }
}

static int init_weights(struct run *run)
{
    for (unsigned param = 0; param < run->c->n_params; param++) {
        _cleanup_free_ uint8_t *weights = malloc(run->c->params[param].n_elems * sizeof(float) + 1);

        if (!weights)
            return -ENOMEM;
        golden_case_weights(run->c, param, weights);
        for (unsigned i = 0; i < run->n_cores; i++)
            store_weights(run, &run->cores[i], param, weights);
    }
    return 0;
}

/* ---- reducing ------------------------------------------------------------------------------------------ */

static uint8_t *slot_of(const struct run *run, unsigned rank, unsigned pass)
{
    return run->slots + ((size_t)rank * run->n_slots + pass) * run->layout->arena_bytes;
}

static bool has_pushed(const struct run *run, unsigned rank, unsigned param, unsigned pass)
{
    return run->n_pushed[rank * run->c->n_params + param] > pass;
}

/* Return: how many parts of a parcel any of the ranks [first, first + n) has pushed in that pass. */
static uint32_t count_pushed(const struct run *run, uint32_t at, unsigned pass, unsigned first, unsigned n)
{
    const struct layout_parcel *parcel = &run->layout->parcels[at];
    uint32_t n_pushed = 0;

    for (uint32_t i = 0; i < parcel->n_parts; i++) {
        bool any = false;

        for (unsigned rank = first; rank < first + n; rank++)
            any |= has_pushed(run, rank, run->layout->parts[parcel->first_part + i].param, pass);
        n_pushed += any;
    }
    return n_pushed;
}

/*
 * Return: whether the pass can be reduced. Each rank has pushed all parts of the parcel or all its pushes, and at least
 * one part was pushed.
 */
static bool is_complete(const struct run *run, uint32_t at, unsigned pass)
{
    for (unsigned rank = 0; rank < run->c->world_size; rank++)
        if (run->n_left[rank] > 0 && count_pushed(run, at, pass, rank, 1) < run->layout->parcels[at].n_parts)
            return false;
    return count_pushed(run, at, pass, 0, run->c->world_size) > 0;
}

/* Sets bit `bit` in the masks of the parts that a rank of [first, first + n) has pushed. */
static void set_masks(const struct run *run, struct reduction *reduction, unsigned bit, unsigned first, unsigned n)
{
    const struct layout_parcel *parcel = &run->layout->parcels[reduction->parcel];

    for (uint32_t i = 0; i < parcel->n_parts; i++)
        for (unsigned rank = first; rank < first + n; rank++)
            if (has_pushed(run, rank, run->layout->parts[parcel->first_part + i].param, reduction->pass))
                reduction->masks[i] |= UINT64_C(1) << bit;
}

/* Copies the partitions that this core owns from another core's piece (a partial sum). The rest of the copy is NaN. */
static const float *receive(struct run *run, struct core *core, const struct core *from, uint32_t at, unsigned piece)
{
    const float *sent = (const float *)(const void *)step_piece(from->step, at, piece);
    const struct layout_parcel *parcel = &run->layout->parcels[at];
    float *received = core->received + run->layout->padded_elems * piece + parcel->offset_elems;
    uint64_t slice = layout_partition_elems(run->layout, parcel->bucket), first = slice * core->first;
    uint64_t start = MAX(first, parcel->offset_elems), whole_end = parcel->offset_elems + parcel->n_elems;
    uint64_t end = MIN(first + slice * core->n, whole_end);

    for (uint32_t b = 0; b < parcel->bucket; b++)
        received += run->layout->buckets[b].n_elems;
    memset(received, 0xff, parcel->n_elems * sizeof(float)); /* NaN */
    if (sent && start < end)
        memcpy(received + start - parcel->offset_elems, sent + start - parcel->offset_elems,
               (end - start) * sizeof(float));
    return received;
}

static void post_parcel(struct run *run, uint32_t at);

static void parcel_is_done(struct run *run, uint32_t at)
{
    run->cursors[at].pass++;
    post_parcel(run, at);
}

static void combine_is_done(void *userdata, struct reduction *reduction)
{
    struct run *run = userdata;

    run->n_under_way--;
    if (--run->cursors[reduction->parcel].n_under_way == 0)
        parcel_is_done(run, reduction->parcel);
}

static void combine_parcel(struct run *run, uint32_t at)
{
    for (unsigned i = 0; i < run->n_cores; i++) {
        struct core *core = &run->cores[i];
        struct reduction *reduction = step_combine(core->step, at, run->micro, run->cursors[at].pass);

        for (unsigned k = 0; k < run->n_cores; k++) {
            const struct core *from = &run->cores[k];

            for (unsigned piece = 0; piece < from->step->n_pieces; piece++) {
                const struct subtree *ranks = &from->step->pieces[piece];
                unsigned source = reduction->n_sources++;

                set_masks(run, reduction, source, ranks->first, ranks->n);
                reduction->source_ranks[source] = ranks->first;
                reduction->sources[source] =
                    k == i ? step_piece(core->step, at, piece) : (const uint8_t *)receive(run, core, from, at, piece);
                if (step_gets_slots(core->step, from->step->n_local, at))
                    reduction->slots |= UINT64_C(1) << source;
            }
        }
        run->n_under_way++;
        run->cursors[at].n_under_way++;
        step_post(reduction, combine_is_done, run);
    }
}

static void reduction_is_done(void *userdata, struct reduction *reduction)
{
    struct run *run = userdata;
    uint32_t at = reduction->parcel;

    run->n_under_way--;
    if (--run->cursors[at].n_under_way > 0)
        return;
    if (run->n_cores == 1)
        parcel_is_done(run, at);
    else
        combine_parcel(run, at);
}

static void post_parcel(struct run *run, uint32_t at)
{
    const struct layout_parcel *parcel = &run->layout->parcels[at];
    const struct layout_bucket *bucket = &run->layout->buckets[parcel->bucket];
    uint64_t offset_bytes = bucket->arena_offset_bytes + parcel->offset_elems * dtype_size(bucket->grad_dtype);
    struct cursor *cursor = &run->cursors[at];

    if (cursor->n_under_way > 0 || !is_complete(run, at, cursor->pass))
        return;
    for (unsigned i = 0; i < run->n_cores; i++) {
        struct core *core = &run->cores[i];
        struct reduction *reduction = step_prepare(core->step, at, run->micro, cursor->pass);

        for (unsigned local = 0; local < core->n; local++) {
            unsigned rank = core->first + local;
            bool any = count_pushed(run, at, cursor->pass, rank, 1) > 0;

            reduction->sources[local] = any ? slot_of(run, rank, cursor->pass) + offset_bytes : NULL;
            set_masks(run, reduction, local, rank, 1);
        }
        run->n_under_way++;
        cursor->n_under_way++;
        step_post(reduction, reduction_is_done, run);
    }
}

static void post_all(struct run *run)
{
    for (uint32_t at = 0; at < run->layout->n_parcels; at++)
        post_parcel(run, at);
}

/* ---- a micro-batch ------------------------------------------------------------------------------------- */

/* Makes all pushes of the micro-batch and shuffles them by *random. Return: their number. */
static unsigned make_pushes(struct run *run, uint64_t *random)
{
    unsigned n = 0;

    for (unsigned rank = 0; rank < run->c->world_size; rank++) {
        run->n_left[rank] = 0;
        for (unsigned param = 0; param < run->c->n_params; param++) {
            unsigned passes = golden_case_n_passes(
                run->c, &(struct golden_place){.step = run->step, .micro = run->micro, .rank = rank, .param = param});

            run->n_left[rank] += passes;
            while (passes-- > 0)
                run->pushes[n++] = (struct push){rank, param};
        }
    }
    for (unsigned i = n; i > 1; i--) {
        unsigned k = (unsigned)golden_random(random, i);
        struct push push = run->pushes[i - 1];

        run->pushes[i - 1] = run->pushes[k];
        run->pushes[k] = push;
    }
    return n;
}

static void do_push(struct run *run, const struct push *push)
{
    const struct layout_param *p = &run->layout->params[push->param];
    const struct layout_bucket *bucket = &run->layout->buckets[p->bucket];
    unsigned *n_pushed = &run->n_pushed[push->rank * run->c->n_params + push->param];

    golden_case_gradient(run->c, &(struct golden_place){run->step, run->micro, *n_pushed, push->rank, push->param},
                         slot_of(run, push->rank, *n_pushed) + bucket->arena_offset_bytes +
                             p->offset_elems * dtype_size(p->grad_dtype));
    ++*n_pushed;
    if (--run->n_left[push->rank] == 0)
        post_all(run); /* this was the rank's last push */
    else
        for (uint32_t i = 0; i < p->n_parts; i++)
            post_parcel(run, run->layout->parts[p->first_part + i].parcel);
}

static void run_micro_batch(struct run *run, uint64_t *random)
{
    unsigned n = make_pushes(run, random);

    /* Fills the slots with NaN (0xff bytes are a NaN in all dtypes). */
    memset(run->slots, 0xff, run->c->world_size * run->n_slots * run->layout->arena_bytes);
    memset(run->n_pushed, 0, (size_t)run->c->world_size * run->c->n_params * sizeof(*run->n_pushed));
    memset(run->cursors, 0, run->layout->n_parcels * sizeof(*run->cursors));
    for (unsigned i = 0; i < n; i++) {
        do_push(run, &run->pushes[i]);
        if (golden_random(random, 4) == 0)
            worker_pool_reap(run->pool);
    }
    while (run->n_under_way > 0)
        worker_pool_wait(run->pool);
}

/* ---- the step ------------------------------------------------------------------------------------------ */

static void update_is_done(void *userdata, int result)
{
    struct run *run = userdata;

    run->n_under_way--;
}

/* Copies the weights that each core has updated into the published weights of the other core. */
static void exchange_weights(struct run *run)
{
    for (uint32_t b = 0; run->how.stage != 3 && b < run->layout->n_buckets; b++) {
        const struct layout_bucket *bucket = &run->layout->buckets[b];
        uint64_t slice_bytes = layout_partition_elems(run->layout, b) * dtype_size(bucket->dtype);

        for (unsigned i = 0; i < run->n_cores; i++)
            for (unsigned k = 0; k < run->n_cores; k++) {
                const struct core *from = &run->cores[k];
                uint64_t offset = bucket->weight_offset_bytes + slice_bytes * from->first;

                if (i != k)
                    memcpy(run->cores[i].state->weights.map + offset, from->state->weights.map + offset,
                           slice_bytes * from->n);
            }
    }
}

/* Applies the step as daemon/job/boundary.c does. */
static int apply(struct run *run, double norm, double scale)
{
    double max_norm = golden_case_max_norm(run->c, run->step);
    double coef = max_norm > 0 ? fmin(1.0, max_norm / (norm + 1e-6)) : 1.0;
    _cleanup_free_ struct hyper *groups = calloc(run->layout->n_groups, sizeof(*groups));

    if (!groups)
        return -ENOMEM;
    for (unsigned g = 0; g < run->layout->n_groups; g++)
        groups[g] = golden_case_hyper(run->c, g, run->step);
    for (unsigned i = 0; i < run->n_cores; i++) {
        run->n_under_way++;
        step_update(run->cores[i].step, &(struct step_update){.groups = groups, .s = coef / scale}, update_is_done,
                    run);
    }
    while (run->n_under_way > 0)
        worker_pool_wait(run->pool);
    exchange_weights(run);
    for (unsigned i = 0; i < run->n_cores; i++)
        step_commit(run->cores[i].step);
    return 0;
}

static int run_step(struct run *run, uint64_t *random)
{
    double scale = run->c->divisor * golden_case_loss_scale(run->c, run->step), norm;
    struct exact_sum total;
    int r = 0;

    for (unsigned i = 0; i < run->n_cores; i++)
        step_open(run->cores[i].step);
    for (run->micro = 0; run->micro < golden_case_n_micro_batches(run->c, run->step); run->micro++)
        run_micro_batch(run, random);

    exact_sum_reset(&total);
    for (unsigned i = 0; i < run->n_cores; i++)
        step_norm(run->cores[i].step, &total);
    norm = sqrt(exact_sum_round(&total)) / scale;
    if (isfinite(norm))
        r = apply(run, norm, scale);
    if (r == 0)
        r = golden_write(run->out, "norm", run->step, &norm, sizeof(norm));
    for (unsigned i = 0; r == 0 && i < run->n_cores; i++)
        r = golden_write(run->out, i == 0 ? "counts" : "other_counts", run->step,
                         run->cores[i].state->progress.counts, run->layout->n_params * sizeof(uint64_t));
    return r;
}

/* ---- results ------------------------------------------------------------------------------------------- */

/* Writes one state of a parameter in fp32. */
static int write_state(struct run *run, const char *name, uint32_t param, enum state_kind kind)
{
    const struct layout_param *p = &run->layout->params[param];
    _cleanup_free_ float *whole = malloc(p->n_elems * sizeof(*whole) + 1);

    if (!whole)
        return -ENOMEM;
    for (uint32_t i = p->first_chunk; i < p->first_chunk + p->n_chunks; i++) {
        const struct layout_chunk *chunk = &run->layout->chunks[i];
        const struct state *state = owner(run, chunk)->state;

        weights_widen(state, run->kernels, i, kind, whole + chunk->start_elem);
    }
    return golden_write(run->out, name, param, whole, p->n_elems * sizeof(*whole));
}

/*
 * Writes a parameter's weights. In stages 1 and 2 they are the core's published weights, in stage 3 they are gathered
 * from the owners.
 */
static int write_weights(struct run *run, const char *name, uint32_t param, const struct core *core)
{
    const struct layout_param *p = &run->layout->params[param];
    size_t size = dtype_size(p->dtype);
    _cleanup_free_ uint8_t *whole = malloc(p->n_elems * size + 1);

    if (!whole)
        return -ENOMEM;
    if (run->how.stage != 3 || !p->trainable)
        weights_fetch(core->state, run->kernels, param, 0, p->n_elems, whole);
    for (uint32_t i = p->first_chunk; run->how.stage == 3 && i < p->first_chunk + p->n_chunks; i++) {
        const struct layout_chunk *chunk = &run->layout->chunks[i];

        weights_fetch(owner(run, chunk)->state, run->kernels, param, chunk->start_elem, chunk->n_elems,
                      whole + chunk->start_elem * size);
    }
    return golden_write(run->out, name, param, whole, p->n_elems * size);
}

static int write_param(struct run *run, uint32_t param)
{
    struct optimizer_moments moments = golden_case_moments(run->c);
    bool trainable = run->layout->params[param].trainable;
    int r = write_weights(run, "weights", param, &run->cores[0]);

    if (r == 0 && run->n_cores == 2)
        r = write_weights(run, "other_weights", param, &run->cores[1]);
    if (r == 0 && trainable)
        r = write_state(run, "master", param, STATE_MASTER);
    if (r == 0 && trainable && moments.m)
        r = write_state(run, "exp_avg", param, STATE_EXP_AVG);
    if (r == 0 && trainable && moments.v)
        r = write_state(run, "exp_avg_sq", param, STATE_EXP_AVG_SQ);
    return r;
}

/* Writes the sizes of a core's memory. */
static int write_sizes(struct run *run, unsigned core)
{
    const struct state *state = run->cores[core].state;
    uint64_t sizes[] = {state->state.n_bytes, state->gradient.n_bytes, state->weights.n_bytes};

    return golden_write(run->out, "sizes", core, sizes, sizeof(sizes));
}

static int run_case(struct run *run)
{
    uint64_t random = run->how.order;
    int r = init_weights(run);

    for (run->step = 0; r == 0 && run->step < run->c->n_steps; run->step++)
        r = run_step(run, &random);
    for (uint32_t param = 0; r == 0 && param < run->layout->n_params; param++)
        r = write_param(run, param);
    for (unsigned i = 0; r == 0 && i < run->n_cores; i++)
        r = write_sizes(run, i);
    if (r == 0 && fclose(steal_ptr(run->out)) != 0)
        r = -errno;
    return r;
}

/* ---- the program --------------------------------------------------------------------------------------- */

static uint64_t get(struct json_object *object, const char *name)
{
    struct json_object *value;

    return json_object_object_get_ex(object, name, &value) ? json_object_get_uint64(value) : 0;
}

static struct how read_how(struct json_object *object)
{
    struct json_object *isa = NULL;

    json_object_object_get_ex(object, "isa", &isa);
    return (struct how){.stage = (unsigned)get(object, "stage"),
                        .bucket_elems = get(object, "bucket_elems"),
                        .n_threads = (unsigned)get(object, "threads"),
                        .isa = isa ? json_object_get_string(isa) : NULL,
                        .order = get(object, "order"),
                        .split = (unsigned)get(object, "split")};
}

static int run_hows(const struct golden_case *c, struct json_object *hows, const char *folder)
{
    for (size_t i = 0; i < json_object_array_length(hows); i++) {
        struct how how = read_how(json_object_array_get_idx(hows, i));
        struct run run;
        char path[4096];
        int r;

        snprintf(path, sizeof(path), "%s/%zu", folder, i);
        r = run_init(&run, c, &how, path);
        if (r == 0)
            r = run_case(&run);
        run_deinit(&run);
        if (r < 0) {
            fprintf(stderr, "golden-driver: how %zu: %s\n", i, strerror(-r));
            return r;
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct golden_case *c;
    struct json_object *hows;
    int r = -EINVAL;

    if (argc == 2 && strcmp(argv[1], "--isas") == 0) {
        for (unsigned i = 0; kernels_nth(i); i++)
            puts(kernels_nth(i)->isa);
        return 0;
    }
    if (argc != 4) {
        fputs("usage: golden-driver CASE.json HOWS.json FOLDER\n       golden-driver --isas\n", stderr);
        return 2;
    }
    c = golden_case_read(argv[1]);
    hows = json_object_from_file(argv[2]);
    if (c && hows)
        r = run_hows(c, hows, argv[3]);
    json_object_put(hows);
    golden_case_free(c);
    return r < 0;
}
