/* SPDX-License-Identifier: Apache-2.0 */

#include "daemon/step/device-io.h"

#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "daemon/job/form.h"
#include "daemon/job/init.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/device-reach.h"
#include "daemon/job/model/journal.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/weights.h"
#include "daemon/nodes/nodes.h"
#include "daemon/step/gather-device.h"
#include "daemon/step/step-offload.h"
#include "daemon/step/step.h"

/* ---- what is where --------------------------------------------------------------------------------------- */

struct moves {
    struct devices_move *items; /* owned */
    size_t n, n_allocated;
    bool failed; /* no memory */
};

static void moves_add(struct moves *moves, const struct devices_move *move)
{
    size_t n = MAX(2 * moves->n_allocated, (size_t)16);
    struct devices_move *grown = moves->items;

    if (moves->failed || move->n_bytes == 0)
        return;
    if (moves->n == moves->n_allocated) {
        grown = reallocarray(moves->items, n, sizeof(*grown));
        if (!grown) {
            moves->failed = true;
            return;
        }
        moves->items = grown;
        moves->n_allocated = n;
    }
    moves->items[moves->n++] = *move;
}

/* Where a rank's slice of an array of a bucket begins; false: the optimizer has no such array. */
static bool find_slice(const struct job *job, uint32_t bucket, enum state_kind kind, unsigned rank,
                       struct devices_move *move)
{
    const struct device_keep *keep = devices_keep(job->devices);
    const struct device_places *places = &keep->places[bucket];
    uint32_t piece = DEVICE_STATE;

    move->local_rank = rank - job->world.first;
    if (kind == STATE_MASTER)
        move->offset_bytes = device_master(&keep->plan, keep->places, bucket, rank, &piece);
    else
        move->offset_bytes = kind == STATE_EXP_AVG ? places->exp_avg : places->exp_avg_sq;
    move->kind = piece;
    return move->offset_bytes != DEVICE_NONE;
}

/* A range of a parameter's values, slice by slice of those who own it; host: of its first. */
static void add_values(const struct job *job, struct moves *moves, bool write, uint32_t param, enum state_kind kind,
                       uint64_t start, uint64_t n, float *host)
{
    const struct layout_param *p = &job->layout->params[param];
    uint64_t slice = layout_partition_elems(job->layout, p->bucket);
    uint64_t begin = p->offset_elems + start;

    for (unsigned rank = job->world.first; rank < job->world.end; rank++) {
        uint64_t from = MAX(begin, slice * rank), to = MIN(begin + n, slice * (rank + 1));
        struct devices_move move = {.write = write};

        if (from >= to || !find_slice(job, p->bucket, kind, rank, &move))
            continue;
        move.offset_bytes += (from - slice * rank) * sizeof(float);
        move.host = host + (from - begin);
        move.n_bytes = (to - from) * sizeof(float);
        moves_add(moves, &move);
    }
}

static bool is_stage3(const struct job *job)
{
    return job->config->zero.stage == 3;
}

/* Bytes of the weights: from the first local rank's copy, or to everybody's. Stage 3 has none. */
static void add_weights(const struct job *job, struct moves *moves, bool write, uint64_t offset_bytes, uint64_t n_bytes,
                        void *host)
{
    for (unsigned local = 0; !is_stage3(job) && local < (write ? job_n_local(job) : 1); local++)
        moves_add(moves, &(struct devices_move){.write = write,
                                                .local_rank = local,
                                                .kind = DEVICE_WEIGHTS,
                                                .offset_bytes = offset_bytes,
                                                .host = host,
                                                .n_bytes = n_bytes});
}

/* Stage 3: some of a frozen parameter's bytes, slice by slice of those who own it; host: of its first. */
static void add_frozen(const struct job *job, struct moves *moves, bool write, uint32_t param, uint64_t start,
                       uint64_t n, uint8_t *host)
{
    const struct device_keep *keep = devices_keep(job->devices);
    size_t elem_bytes = dtype_size(job->layout->params[param].dtype);

    for (unsigned rank = job->world.first; rank < job->world.end; rank++) {
        uint64_t begin, end, from, to;

        device_param_slice(&keep->plan, param, rank, &begin, &end);
        from = MAX(begin, start);
        to = MIN(end, start + n);
        if (from < to)
            moves_add(moves, &(struct devices_move){.write = write,
                                                    .local_rank = rank - job->world.first,
                                                    .kind = DEVICE_STATE,
                                                    .offset_bytes = keep->frozen[param] + (from - begin) * elem_bytes,
                                                    .host = host + (from - start) * elem_bytes,
                                                    .n_bytes = (to - from) * elem_bytes});
    }
}

static void add_all_frozen(const struct job *job, struct moves *moves, bool write)
{
    for (uint32_t p = 0; p < job->layout->n_params; p++)
        if (!job->layout->params[p].trainable)
            add_frozen(job, moves, write, p, 0, job->layout->params[p].n_elems, state_frozen(job->state, p));
}

/* What this node has of a parameter, from the parameter's start; in stage 3 of a frozen one, too. Return: how much. */
static uint64_t find_owned(const struct job *job, uint32_t param, uint64_t *start)
{
    const struct device_plan *plan = &devices_keep(job->devices)->plan;
    uint64_t begin, end, unused;

    device_param_slice(plan, param, job->world.first, &begin, &unused);
    device_param_slice(plan, param, job->world.end - 1, &unused, &end);
    *start = begin;
    return end - begin;
}

/* Masters that are not weights, and moments. */
static void add_bucket(const struct job *job, struct moves *moves, bool write, uint32_t bucket, enum state_kind kind)
{
    uint64_t slice = layout_partition_elems(job->layout, bucket);

    if (kind == STATE_MASTER && job->layout->buckets[bucket].dtype == DTYPE_F32 && !is_stage3(job))
        return;
    for (unsigned rank = job->world.first; rank < job->world.end; rank++) {
        struct devices_move move = {.write = write, .n_bytes = slice * sizeof(float)};

        if (!find_slice(job, bucket, kind, rank, &move))
            continue;
        move.host = state_values(job->state, kind, bucket, slice * rank);
        moves_add(moves, &move);
    }
}

static void add_all(const struct job *job, struct moves *moves, bool write)
{
    for (uint32_t b = 0; job->state->mirror && b < job->layout->n_buckets; b++)
        for (enum state_kind kind = 0; kind < STATE_N_KINDS; kind++)
            add_bucket(job, moves, write, b, kind);
    if (job->state->mirror && is_stage3(job))
        add_all_frozen(job, moves, write);
    add_weights(job, moves, write, 0, job->layout->weight_bytes, job->state->weights.map);
}

/* ---- something that takes several turns ------------------------------------------------------------------ */

struct device_io {
    struct job *job;
    struct work work;
    int result; /* of the work */
    struct moves moves;
    devices_done done;
    void *userdata;
    const struct segment *segment;
    bool write;
    /* Initial weights. */
    struct job_rank *rank;
    struct ring *ring;
    struct request_init request;
    uint8_t *bytes;         /* as pushed; owned */
    const uint8_t *weights; /* of other nodes, all of them; laid out as the weights */
    /* What is read of a parameter goes to bytes first, and is converted from there. */
    uint32_t param;
    uint64_t n_elems;
    void *dst;
};

static struct device_io *io_new(struct job *job, devices_done done, void *userdata)
{
    struct device_io *io = calloc(1, sizeof(*io));

    if (io)
        *io = (struct device_io){.job = job, .done = done, .userdata = userdata};
    return io;
}

static void io_free(struct device_io *io)
{
    free(io->moves.items);
    free(io->bytes);
    free(io);
}

static void io_end(void *userdata, int result)
{
    struct device_io *io = userdata;
    devices_done done = io->done;

    userdata = io->userdata;
    io_free(io);
    done(userdata, result);
}

static int io_copy(struct device_io *io, devices_done done)
{
    if (io->moves.failed)
        return -ENOMEM;
    return devices_copy(io->job->devices, io->moves.items, io->moves.n, done, io);
}

static void io_post(struct device_io *io, void (*run)(struct work *work, uint32_t item),
                    void (*done)(struct work *work))
{
    io->work = (struct work){.run = run, .done = done, .n_items = 1};
    worker_post(io->job->pool, &io->work);
}

/* ---- forming --------------------------------------------------------------------------------------------- */

static void after(void *userdata)
{
    struct job *job = userdata;

    if (job->nodes)
        job_todo(job); /* an abort may have waited for what is cancelled */
    if (job->ops.after)
        job->ops.after(job->ops.userdata);
}

static void is_cleared(void *userdata, int result)
{
    struct job *job = userdata;

    job->work.n_io--;
    if (result < 0) {
        job_todo(job); /* a job that is given up has waited for it */
        return;
    }
    job_formed(job);
    if (job->nodes && devices_status(job->devices).ready)
        nodes_devices_ready(job->nodes);
}

/* Fresh memory has something in it: moments begin with zero, and so does what lies between the weights. */
static void clear(struct job *job)
{
    static const enum device_piece_kind kinds[] = {DEVICE_STATE, DEVICE_WEIGHTS};
    struct moves moves = {.items = NULL};

    moves.failed = is_stage3(job) && device_gather_new(&job->device_gathered, job) < 0;
    for (unsigned local = 0; local < job_n_local(job); local++)
        for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
            moves_add(&moves, &(struct devices_move){.write = true,
                                                     .local_rank = local,
                                                     .kind = kinds[i],
                                                     .n_bytes = devices_keep(job->devices)->piece_bytes[kinds[i]]});
    job->work.n_io++;
    if (moves.failed || devices_copy(job->devices, moves.items, moves.n, is_cleared, job) < 0) {
        job->work.n_io--;
        job_unformed(job, cause_device_unformed(&(struct evidence_at){.rank = -1, .step = -1, .micro_batch = -1},
                                                "out of memory"));
    }
    free(moves.items);
}

/* Of several nodes the engines are ready when all are. */
static void on_ready(void *userdata, bool first)
{
    struct job *job = userdata;

    if (first)
        clear(job);
    else if (job->nodes && job->phase != JOB_RESERVING)
        nodes_devices_ready(job->nodes);
}

static void on_put(void *userdata, const char *key, const uint8_t *value, size_t n_bytes)
{
    struct job *job = userdata;

    nodes_devices_put(job->nodes, key, value, n_bytes);
}

static void on_failed(void *userdata, uint32_t generation, const char *why)
{
    struct job *job = userdata;
    struct evidence_at at = {.rank = -1, .step = job->run.has_weights ? (int64_t)job->ledger.step : -1, .micro_batch = -1};

    if (generation == 0)
        job_unformed(job, cause_device_unformed(&at, why));
    else if (job->nodes)
        nodes_devices_failed(job->nodes, why); /* node 0 says what becomes of it */
    else
        job_keep(job, cause_device(&(struct evidence_node){.at = at, .generation = generation, .why = why}));
}

/* Without its events nobody knows when its gradients are written. If the process is gone, its successor is compared. */
static void on_unopened(void *userdata, unsigned local_rank, const char *why)
{
    struct job *job = userdata;
    struct job_rank *rank = &job->ranks[job->world.first + local_rank];
    struct diagnostic *diagnostic;

    if (!rank->peer)
        return;
    diagnostic = cause_unopened(&(struct evidence_unopened){.at = job_at(job, rank),
                                                            .pid = rank->pid,
                                                            .uid = rank->uid,
                                                            .own_uid = geteuid(),
                                                            .reach = device_reach(rank->pid, rank->uid),
                                                            .why = why});
    diagnostic = job_keep(job, diagnostic);
    job_abort(job, rank->rank, diagnostic_ref(diagnostic));
    job->ops.drop(job->ops.userdata, rank->peer, diagnostic);
}

int device_job_new(struct job *job)
{
    const struct config *config = job->config;

    return devices_new(
        &job->devices,
        &(struct devices_options){
            .loop = job->ops.loop,
            .pool = job->pool,
            .kernels = job->kernels,
            .plan = {.layout = job->layout,
                     .stage = (unsigned)config->zero.stage,
                     .first_local = job->world.first,
                     .n_local = job_n_local(job),
                     .optimizer = config->optimizer.type,
                     .moments = optimizer_moments(config->optimizer.type, &config->optimizer.hyper),
                     .deterministic = config->deterministic,
                     .offload = config_offloads(config),
                     .ring_bytes = plan_device_ring_bytes(job->layout, config->zero.overlap_comm),
                     .pool_bytes = config->zero.stage == 3 ? plan_device_pool_bytes(job->layout) : 0},
            .node = config->world.node,
            .n_nodes = (unsigned)MAX(config->world.nodes.n_items, (size_t)1),
            .ops = {.ready = on_ready, .failed = on_failed, .unopened = on_unopened, .put = on_put, .after = after, .userdata = job},
        });
}

void device_job_start(struct job *job)
{
    if (job->step->offload) {
        devices_share(job->devices, DEVICES_STAGING, offload_staging(job->step->offload));
        devices_share(job->devices, DEVICES_WEIGHTS, &job->state->weights);
    }
    if (job->nodes)
        nodes_formed(job->nodes);
    else
        devices_start(job->devices);
}

/* ---- the mirror ------------------------------------------------------------------------------------------ */

uint64_t device_job_mirror_bytes(const struct job *job)
{
    return job->state->state.n_bytes + job->state->weights.n_bytes;
}

void device_job_empty(struct job *job)
{
    if (!job->state->mirror)
        return;
    segment_punch(&job->state->state, 0, job->state->state.n_bytes);
    segment_punch(&job->state->weights, 0, job->state->weights.n_bytes);
}

static void reserve_all(struct work *work, uint32_t item)
{
    struct device_io *io = container_of(work, struct device_io, work);
    const struct state *state = io->job->state;

    (void)item;
    io->result = segment_reserve(&state->state, 0, state->state.n_bytes);
    if (io->result == 0)
        io->result = segment_reserve(&state->weights, 0, state->weights.n_bytes);
}

static void load_reserved(struct work *work)
{
    struct device_io *io = container_of(work, struct device_io, work);
    int r = io->result;

    if (r == 0)
        r = io_copy(io, io_end);
    if (r < 0)
        io_end(io, -ENOMEM);
}

int device_job_load(struct job *job, devices_done done, void *userdata)
{
    struct device_io *io = io_new(job, done, userdata);

    if (!io)
        return -ENOMEM;
    add_all(job, &io->moves, false);
    if (io->moves.failed) {
        io_free(io);
        return -ENOMEM;
    }
    io_post(io, reserve_all, load_reserved);
    return 0;
}

int device_job_store(struct job *job, devices_done done, void *userdata)
{
    struct device_io *io = io_new(job, done, userdata);
    int r;

    if (!io)
        return -ENOMEM;
    add_all(job, &io->moves, true);
    r = io_copy(io, io_end);
    if (r < 0)
        io_free(io);
    return r;
}

/* ---- initial weights ------------------------------------------------------------------------------------- */

static void init_end(struct device_io *io, bool ok)
{
    struct job *job = io->job;
    struct job_rank *rank = io->rank;

    if (!job->nodes || is_stage3(job)) /* else it is sent from there */
        device_job_empty(job);
    job->work.n_io--;
    job->work.n_inits--;
    if (rank->wait == WAIT_INIT && rank->rings[0] == io->ring) {
        if (ok)
            job_answer_done(job, rank);
        else
            job_refuse_init(job, rank, &io->request);
    }
    ring_unhold(io->ring);
    io_free(io);
    job_todo(job);
}

static bool init_is_over(struct device_io *io, int result)
{
    if (result != -ECANCELED || io->job->run.drop_why)
        return false;
    ring_unhold(io->ring);
    io_free(io);
    return true;
}

static void init_written(void *userdata, int result)
{
    struct device_io *io = userdata;

    if (!init_is_over(io, result))
        init_end(io, result == 0);
}

static int reserve_range(const struct segment *segment, const void *from, uint64_t n_bytes)
{
    uint64_t offset = (uint64_t)((const uint8_t *)from - segment->map), begin = offset / page_size() * page_size();

    return segment_reserve(segment, begin, round_up(offset + n_bytes, page_size()) - begin);
}

/* Does a parameter have a master that is not its weight? */
static bool has_master(const struct job *job, const struct layout_param *p)
{
    return p->trainable && (p->dtype != DTYPE_F32 || is_stage3(job));
}

/* The pages of the mirror that the weights, and masters that are not weights, lie in. */
static int reserve_init(const struct job *job, const struct request_init *request)
{
    const struct state *state = job->state;
    const struct layout_param *p = &job->layout->params[request->param];
    uint64_t elem_bytes = dtype_size(p->dtype);
    int r = 0;

    if (!is_stage3(job))
        r = reserve_range(&state->weights, state_weights(state, request->param, request->start_elem),
                          request->n_elems * elem_bytes);
    else if (!p->trainable)
        r = reserve_range(&state->state, state_frozen(state, request->param) + request->start_elem * elem_bytes,
                          request->n_elems * elem_bytes);
    if (r < 0 || !has_master(job, p))
        return r;
    return reserve_range(&state->state, state_master(state, p->bucket, p->offset_elems + request->start_elem),
                         request->n_elems * sizeof(float));
}

static void init_store(struct work *work, uint32_t item)
{
    struct device_io *io = container_of(work, struct device_io, work);
    const struct request_init *request = &io->request;

    (void)item;
    io->result = io->job->state->mirror ? reserve_init(io->job, request) : 0;
    if (io->result == 0)
        weights_store(io->job->state, io->job->kernels, request->param, request->start_elem, request->n_elems,
                      io->bytes);
    if (io->result == 0 && io->job->nodes)
        io->result = exchange_init(nodes_exchange(io->job->nodes), request, io->bytes);
}

static void init_stored(struct work *work)
{
    struct device_io *io = container_of(work, struct device_io, work);
    const struct job *job = io->job;
    const struct request_init *request = &io->request;
    const struct layout_param *p = &job->layout->params[request->param];
    uint64_t elem_bytes = dtype_size(p->dtype);

    io->moves.n = 0;
    add_weights(job, &io->moves, true, p->weight_offset_bytes + request->start_elem * elem_bytes,
                request->n_elems * elem_bytes, state_weights(job->state, request->param, request->start_elem));
    if (job->state->mirror && is_stage3(job) && !p->trainable)
        add_frozen(job, &io->moves, true, request->param, request->start_elem, request->n_elems,
                   state_frozen(job->state, request->param) + request->start_elem * elem_bytes);
    if (job->state->mirror && has_master(job, p))
        add_values(job, &io->moves, true, request->param, STATE_MASTER, request->start_elem, request->n_elems,
                   state_master(job->state, p->bucket, p->offset_elems + request->start_elem));
    if (io->result < 0 || io_copy(io, init_written) < 0)
        init_end(io, false);
}

static void init_read(void *userdata, int result)
{
    struct device_io *io = userdata;

    if (init_is_over(io, result))
        return;
    if (result == 0)
        io_post(io, init_store, init_stored);
    else
        init_end(io, false);
}

void device_job_init(struct job *job, struct job_rank *rank, const struct request_init *request)
{
    uint64_t n_bytes = request->n_elems * dtype_size(job->layout->params[request->param].dtype);
    struct device_io *io = io_new(job, NULL, NULL);

    if (io)
        io->bytes = malloc(n_bytes + 1);
    if (!io || !io->bytes) {
        free(io);
        job_refuse_init(job, rank, request);
        return;
    }
    io->rank = rank;
    io->ring = rank->rings[0];
    io->request = *request;
    ring_hold(io->ring);
    job->work.n_io++;
    job->work.n_inits++;
    job_wait(job, rank, WAIT_INIT);
    moves_add(&io->moves, &(struct devices_move){.local_rank = rank->rank - job->world.first,
                                                 .kind = DEVICE_RING,
                                                 .offset_bytes = request->offset_bytes,
                                                 .host = io->bytes,
                                                 .n_bytes = n_bytes});
    if (io_copy(io, init_read) < 0)
        init_end(io, false);
}

static int reserve_mirror(struct job *job)
{
    const struct state *state = job->state;
    int r = segment_reserve(&state->weights, 0, state->weights.n_bytes);

    for (uint32_t b = 0; r == 0 && b < job->layout->n_buckets; b++) {
        uint64_t slice = layout_partition_elems(job->layout, b);

        if ((job->layout->buckets[b].dtype != DTYPE_F32 || is_stage3(job)) && slice > 0)
            r = reserve_range(&state->state, state_master(state, b, slice * job->world.first),
                              slice * job_n_local(job) * sizeof(float));
    }
    return r;
}

int device_job_reserve(struct job *job)
{
    int r = devices_reserve(job->devices);

    if (r == 0 && job->step->offload)
        r = offload_reserve(job->step->offload);
    if (r == 0 && job->nodes && job->state->mirror)
        r = reserve_mirror(job);
    if (r == 0 && job->nodes && !job->state->mirror) {
        const struct segment *pool = exchange_pool(nodes_exchange(job->nodes));

        r = segment_reserve(pool, 0, pool->n_bytes);
    }
    return r;
}

static void adopt_run(struct work *work, uint32_t item)
{
    struct device_io *io = container_of(work, struct device_io, work);
    const struct job *job = io->job;
    const struct layout_param *p = &job->layout->params[item];

    if (has_master(job, p) || (is_stage3(job) && !job->state->mirror))
        weights_adopt(job->state, job->kernels, item, io->weights + p->weight_offset_bytes);
}

static void adopt_done(struct work *work)
{
    struct device_io *io = container_of(work, struct device_io, work);

    if (io_copy(io, io_end) < 0)
        io_end(io, -ENOMEM);
}

/* Frozen parameters go from where they have come in: they have no place of their own here but in the mirror. */
static void add_frozen_weights(const struct job *job, struct moves *moves, const uint8_t *weights)
{
    for (uint32_t i = 0; i < job->layout->n_params; i++) {
        const struct layout_param *p = &job->layout->params[i];

        if (!p->trainable)
            add_frozen(job, moves, true, i, 0, p->n_elems, (uint8_t *)weights + p->weight_offset_bytes);
    }
}

int device_job_adopt(struct job *job, const uint8_t *weights, devices_done done, void *userdata)
{
    struct device_io *io = io_new(job, done, userdata);

    if (!io)
        return -ENOMEM;
    io->weights = weights;
    for (uint32_t b = 0; job->state->mirror && b < job->layout->n_buckets; b++)
        add_bucket(job, &io->moves, true, b, STATE_MASTER);
    if (config_partitions_all(job->config))
        add_frozen_weights(job, &io->moves, weights);
    add_weights(job, &io->moves, true, 0, job->layout->weight_bytes, job->state->weights.map);
    if (io->moves.failed) {
        io_free(io);
        return -ENOMEM;
    }
    io->work = (struct work){.run = adopt_run, .done = adopt_done, .n_items = job->layout->n_params};
    worker_post(job->pool, &io->work);
    return 0;
}

/* ---- reading --------------------------------------------------------------------------------------------- */

static void frozen_read(void *userdata, int result)
{
    struct device_io *io = userdata;

    if (result == 0)
        io->job->kernels->convert_to_f32(io->dst, io->bytes, io->job->layout->params[io->param].dtype, io->n_elems);
    io_end(io, result);
}

static void masters_read(void *userdata, int result)
{
    struct device_io *io = userdata;

    if (result == 0)
        io->job->kernels->convert_from_f32(io->dst, (const float *)(const void *)io->bytes,
                                           io->job->layout->params[io->param].dtype, io->n_elems);
    io_end(io, result);
}

/* read: with what is in io->bytes, in the end; NULL: it went to dst at once. Return: 0, or -ENOMEM and io is gone. */
static int read_moves(struct device_io *io, devices_done read)
{
    if ((!read || io->bytes) && io_copy(io, read ? read : io_end) == 0)
        return 0;
    io_free(io);
    return -ENOMEM;
}

static struct device_io *io_new_read(struct job *job, uint32_t param, void *dst, devices_done done, void *userdata)
{
    struct device_io *io = io_new(job, done, userdata);

    if (!io)
        return NULL;
    io->param = param;
    io->n_elems = job->layout->params[param].n_elems;
    io->dst = dst;
    return io;
}

int device_job_read(struct job *job, uint32_t param, enum wire_state_kind kind, float *dst, devices_done done,
                    void *userdata)
{
    const struct layout_param *p = &job->layout->params[param];
    struct device_io *io = io_new_read(job, param, dst, done, userdata);
    uint64_t start = 0;

    if (!io)
        return -ENOMEM;
    if (p->trainable) {
        add_values(job, &io->moves, false, param, (enum state_kind)kind, 0, p->n_elems, dst);
        return read_moves(io, NULL);
    }
    if (is_stage3(job))
        io->n_elems = find_owned(job, param, &start);
    io->dst = dst + start;
    io->bytes = malloc(io->n_elems * dtype_size(p->dtype) + 1);
    if (io->bytes && is_stage3(job))
        add_frozen(job, &io->moves, false, param, start, io->n_elems, io->bytes);
    else if (io->bytes)
        add_weights(job, &io->moves, false, p->weight_offset_bytes, io->n_elems * dtype_size(p->dtype), io->bytes);
    return read_moves(io, frozen_read);
}

int device_job_read_weights(struct job *job, uint32_t param, uint8_t *dst, devices_done done, void *userdata)
{
    const struct layout_param *p = &job->layout->params[param];
    struct device_io *io = io_new_read(job, param, dst, done, userdata);
    bool rounds = p->trainable && p->dtype != DTYPE_F32;
    uint64_t start;

    if (!io)
        return -ENOMEM;
    io->n_elems = find_owned(job, param, &start);
    if (rounds)
        io->bytes = malloc(io->n_elems * sizeof(float) + 1);
    if (!p->trainable)
        add_frozen(job, &io->moves, false, param, start, io->n_elems, dst);
    else if (!rounds || io->bytes)
        add_values(job, &io->moves, false, param, STATE_MASTER, start, io->n_elems,
                   (float *)(void *)(rounds ? io->bytes : dst));
    return read_moves(io, rounds ? masters_read : NULL);
}

static void reserve_segment(struct work *work, uint32_t item)
{
    struct device_io *io = container_of(work, struct device_io, work);

    (void)item;
    io->result = segment_reserve(io->segment, 0, io->segment->n_bytes);
}

int device_job_fill(struct job *job, const struct segment *segment, devices_done done, void *userdata)
{
    struct device_io *io = io_new(job, done, userdata);

    if (!io)
        return -ENOMEM;
    io->segment = segment;
    add_weights(job, &io->moves, false, 0, job->layout->weight_bytes, segment->map);
    io_post(io, reserve_segment, load_reserved);
    return 0;
}

/* ---- what a successor pushes again ------------------------------------------------------------------------ */

static void verify_read(void *userdata, int result)
{
    struct verification *v = userdata;
    struct verification **link = &v->job->work.verifications;

    if (result == 0) {
        worker_post(v->job->pool, &v->work);
        return;
    }
    if (v->job->run.drop_why) { /* nobody waits for it any more, but the end of the job */
        v->summed = true;
        v->attempt = v->job->ledger.attempt - 1;
        collect_settle(v->job);
        return;
    }
    while (*link != v)
        link = &(*link)->next;
    *link = v->next;
    ring_unhold(v->ring);
    free(v->copy);
    free(v);
}

void device_job_verify(struct verification *v)
{
    struct job *job = v->job;
    uint64_t at = layout_part_offset_bytes(job->layout, v->part);
    struct devices_move move = {.local_rank = v->rank - job->world.first,
                                .kind = DEVICE_RING,
                                .offset_bytes = v->slot->offset_bytes + at,
                                .host = v->copy,
                                .n_bytes = layout_part_bytes(job->layout, v->part),
                                .has_event = v->slot->event_plus_one > 0};

    if (move.has_event)
        move.event = v->slot->event_plus_one - 1;
    if (devices_copy(job->devices, &move, 1, verify_read, v) == 0)
        return;
    /* It cannot be compared: rather redo the step than trust it. */
    v->summed = true;
    v->attempt = job->ledger.attempt - 1;
    job_abort(job, v->rank, NULL);
}
