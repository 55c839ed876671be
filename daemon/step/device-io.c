/* SPDX-License-Identifier: Apache-2.0 */

/* Copies initial weights, state and windows between GPUs and the memory of this process. */

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/segment.h"
#include "core/base/sequence.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/wire/wire-request.h"
#include "daemon/engines/device-keep.h"
#include "daemon/engines/devices.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/weights.h"
#include "daemon/step/executor-device.h"
#include "daemon/step/executor-host.h"
#include "daemon/step/step.h"
#include "kernels/kernels.h"

static const struct layout *layout_of(const struct executor *executor)
{
    return executor->options.layout;
}

static unsigned end_of(const struct executor *executor)
{
    return executor->first_rank + executor->n_local;
}

/* ---- places ---------------------------------------------------------------------------------------------- */

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

/*
 * The arrays of a bucket: the arrays of enum state_kind, and ARRAY_LOWER. For masters in 24 bits, STATE_MASTER has
 * their upper 16 bits (the weights), and ARRAY_LOWER their low bytes.
 */
enum {
    ARRAY_LOWER = STATE_N_KINDS,
    N_ARRAYS,
};

/* Return: the size in bytes of n elements of an array. */
static uint64_t array_bytes(const struct executor *executor, uint32_t bucket, unsigned array, uint64_t n)
{
    if (array == ARRAY_LOWER)
        return n;
    if (array == STATE_MASTER && state_is_master24(executor->state, bucket))
        return n * sizeof(uint16_t);
    return dtype_bytes(state_dtype(executor->state, (enum state_kind)array), n);
}

/* Return: an array in the staging copy. elem: counted from the bucket's start. */
static void *array_values(const struct executor *executor, uint32_t bucket, unsigned array, uint64_t elem)
{
    if (array == ARRAY_LOWER)
        return state_master24(executor->state, bucket, elem).lower;
    if (array == STATE_MASTER && state_is_master24(executor->state, bucket))
        return state_master24(executor->state, bucket, elem).weights;
    return state_values(executor->state, (enum state_kind)array, bucket, elem);
}

/* Return: whether the bucket's STATE_MASTER array is the published weights, so that add_weight_moves() copies it. */
static bool masters_are_weights(const struct executor *executor, uint32_t bucket)
{
    return !executor->gathers &&
           (layout_of(executor)->buckets[bucket].dtype == DTYPE_F32 || state_is_master24(executor->state, bucket));
}

/*
 * Writes to move the place on the GPU where a rank's slice of a bucket's array begins. Return: false if the bucket does
 * not have the array.
 */
static bool find_array_slice(const struct executor *executor, uint32_t bucket, unsigned array, unsigned rank,
                             struct devices_move *move)
{
    const struct device_keep *keep = devices_keep(executor->devices);
    const struct device_places *places = &keep->places[rank - executor->first_rank].buckets[bucket];
    uint32_t piece = DEVICE_STATE;

    move->local_rank = rank - executor->first_rank;
    if (array == STATE_MASTER)
        move->offset_bytes = device_master(&keep->plan, places, bucket, &piece);
    else if (array == ARRAY_LOWER)
        move->offset_bytes = places->lower;
    else
        move->offset_bytes = array == STATE_EXP_AVG ? places->exp_avg : places->exp_avg_sq;
    move->kind = piece;
    return move->offset_bytes != DEVICE_NONE;
}

/*
 * Adds moves for a range of a parameter's values, one move per owning rank. host: place of the first value, in the
 * array's type. In a grouped type the range must begin at the start of a group, and end at the end of a group or of the
 * parameter.
 */
static void add_values(const struct executor *executor, struct moves *moves, bool write, uint32_t param, unsigned array,
                       uint64_t start, uint64_t n, void *host)
{
    const struct layout_param *p = &layout_of(executor)->params[param];
    uint64_t begin = p->offset_elems + start;

    assert(p->trainable);
    assert(start + n <= p->n_elems);
    for (unsigned rank = executor->first_rank; rank < end_of(executor); rank++) {
        uint64_t own, slice = layout_owned_elems(layout_of(executor), p->bucket, rank, 1, &own);
        uint64_t from = MAX(begin, own), to = MIN(begin + n, own + slice);
        struct devices_move move = {.write = write};

        if (from >= to || !find_array_slice(executor, p->bucket, array, rank, &move))
            continue;
        move.offset_bytes += array_bytes(executor, p->bucket, array, from - own);
        move.host = (uint8_t *)host + array_bytes(executor, p->bucket, array, from - begin);
        move.n_bytes = array_bytes(executor, p->bucket, array, to - from);
        moves_add(moves, &move);
    }
}

/*
 * Adds moves for bytes of the weights, read from the first local rank or written to all local ranks. Does nothing in
 * stage 3.
 */
static void add_weight_moves(const struct executor *executor, struct moves *moves, bool write, uint64_t offset_bytes,
                             uint64_t n_bytes, void *host)
{
    assert(executor->gathers || offset_bytes + n_bytes <= layout_of(executor)->weight_bytes);
    for (unsigned local = 0; !executor->gathers && local < (write ? executor->n_local : 1); local++)
        moves_add(moves, &(struct devices_move){.write = write,
                                                .local_rank = local,
                                                .kind = DEVICE_WEIGHTS,
                                                .offset_bytes = offset_bytes,
                                                .host = host,
                                                .n_bytes = n_bytes});
}

/*
 * Stage 3: adds moves for some elements of a frozen parameter, one move per owning rank. host: place of the first
 * element.
 */
static void add_frozen(const struct executor *executor, struct moves *moves, bool write, uint32_t param, uint64_t start,
                       uint64_t n, uint8_t *host)
{
    const struct device_keep *keep = devices_keep(executor->devices);
    size_t elem_bytes = dtype_size(layout_of(executor)->params[param].dtype);

    assert(!layout_of(executor)->params[param].trainable);
    assert(start + n <= layout_of(executor)->params[param].n_elems);
    for (unsigned local = 0; local < executor->n_local; local++) {
        uint64_t at = keep->places[local].frozen[param], begin, end, from, to;

        device_param_slice(&keep->plan, param, executor->first_rank + local, &begin, &end);
        from = MAX(begin, start);
        to = MIN(end, start + n);
        if (from < to)
            moves_add(moves, &(struct devices_move){.write = write,
                                                    .local_rank = local,
                                                    .kind = DEVICE_STATE,
                                                    .offset_bytes = at + (from - begin) * elem_bytes,
                                                    .host = host + (from - start) * elem_bytes,
                                                    .n_bytes = (to - from) * elem_bytes});
    }
}

static void add_all_frozen(const struct executor *executor, struct moves *moves, bool write)
{
    for (uint32_t p = 0; p < layout_of(executor)->n_params; p++)
        if (!layout_of(executor)->params[p].trainable)
            add_frozen(executor, moves, write, p, 0, layout_of(executor)->params[p].n_elems,
                       state_frozen(executor->state, p));
}

uint64_t device_find_owned(const struct executor *executor, uint32_t param, uint64_t *start)
{
    const struct device_plan *plan = &devices_keep(executor->devices)->plan;
    uint64_t begin, end, n_elems = 0;

    *start = 0;
    for (unsigned rank = executor->first_rank; rank < end_of(executor); rank++) {
        device_param_slice(plan, param, rank, &begin, &end);
        if (begin < end && n_elems == 0)
            *start = begin;
        assert(begin >= end || begin == *start + n_elems); /* slices follow one another */
        n_elems += end - begin;
    }
    return n_elems;
}

/* Adds moves for one array of a bucket, unless add_weight_moves() copies the array. */
static void add_bucket(const struct executor *executor, struct moves *moves, bool write, uint32_t bucket,
                       unsigned array)
{
    if (array == STATE_MASTER && masters_are_weights(executor, bucket))
        return;
    for (unsigned rank = executor->first_rank; rank < end_of(executor); rank++) {
        uint64_t own, slice = layout_owned_elems(layout_of(executor), bucket, rank, 1, &own);
        struct devices_move move = {.write = write, .n_bytes = array_bytes(executor, bucket, array, slice)};

        if (slice == 0 || !find_array_slice(executor, bucket, array, rank, &move))
            continue;
        move.host = array_values(executor, bucket, array, own);
        moves_add(moves, &move);
    }
}

static void add_all(const struct executor *executor, struct moves *moves, bool write)
{
    for (uint32_t b = 0; executor->state->staging_copy && b < layout_of(executor)->n_buckets; b++)
        for (unsigned array = 0; array < N_ARRAYS; array++)
            add_bucket(executor, moves, write, b, array);
    if (executor->state->staging_copy && executor->gathers)
        add_all_frozen(executor, moves, write);
    add_weight_moves(executor, moves, write, 0, layout_of(executor)->weight_bytes, executor->state->weights.map);
}

/* ---- copies in several stages ---------------------------------------------------------------------------- */

struct device_io {
    struct executor *executor;
    struct sequence sequence; /* the stages; workers or the engine carry out each stage */
    struct work work;
    int result; /* result of the work */
    struct moves moves;
    executor_done done;
    void *userdata;
    const struct segment *segment;
    struct executor_init init;
    uint8_t *bytes;         /* pushed initial weights, or values before conversion; owned */
    const uint8_t *weights; /* initial weights from node 0, laid out as the weights */
    uint32_t param;
    enum dtype dtype; /* of the values in bytes */
    uint64_t n_elems;
    void *dst;
    bool empties; /* frees the staging copy's pages at the end */
};

static void io_free(struct device_io *io)
{
    free(io->moves.items);
    free(io->bytes);
    free(io);
}

static void io_ended(void *userdata, int result)
{
    struct device_io *io = userdata;
    executor_done done = io->done;

    userdata = io->userdata;
    if (io->empties)
        executor_empty(io->executor);
    io_free(io);
    done(userdata, result);
}

static struct device_io *io_new(struct executor *executor, const sequence_stage *stages, executor_done done,
                                void *userdata)
{
    struct device_io *io = calloc(1, sizeof(*io));

    if (!io)
        return NULL;
    *io = (struct device_io){.executor = executor, .done = done, .userdata = userdata};
    io->sequence = (struct sequence){.stages = stages, .ended = io_ended, .userdata = io};
    return io;
}

/* Starts the stages. Return: 0 or -errno. After 0, done() follows. After -errno, io is freed. */
static int io_start(struct device_io *io)
{
    int r = io->moves.failed ? -ENOMEM : sequence_start(&io->sequence);

    if (r < 0)
        io_free(io);
    return r;
}

/* A stage: carries out the moves. */
static int io_copy(void *userdata)
{
    struct device_io *io = userdata;

    if (io->moves.failed)
        return -ENOMEM;
    return devices_copy(io->executor->devices, io->moves.items, io->moves.n, sequence_done, &io->sequence);
}

static void io_worked(struct work *work)
{
    struct device_io *io = container_of(work, struct device_io, work);

    sequence_advance(&io->sequence, io->result < 0 ? -ENOMEM : 0);
}

static int io_post(struct device_io *io, void (*run)(struct work *work, uint32_t item), uint32_t n_items)
{
    io->result = 0;
    io->work = (struct work){.run = run, .done = io_worked, .n_items = n_items};
    worker_post(io->executor->options.pool, &io->work);
    return SEQUENCE_WAITS;
}

/* ---- the staging copy ------------------------------------------------------------------------------------ */

static void reserve_run(struct work *work, uint32_t item)
{
    struct device_io *io = container_of(work, struct device_io, work);
    const struct state *state = io->executor->state;

    (void)item;
    (void)failpoint("staging");
    io->result = segment_reserve(&state->state, 0, state->state.n_bytes);
    if (io->result == 0)
        io->result = segment_reserve(&state->weights, 0, state->weights.n_bytes);
}

static int reserve_all(void *userdata)
{
    return io_post(userdata, reserve_run, 1);
}

int device_load(struct executor *executor, executor_done done, void *userdata)
{
    static const sequence_stage stages[] = {reserve_all, io_copy, NULL};
    struct device_io *io = io_new(executor, stages, done, userdata);

    if (!io)
        return -ENOMEM;
    add_all(executor, &io->moves, false);
    return io_start(io);
}

int device_store(struct executor *executor, executor_done done, void *userdata)
{
    static const sequence_stage stages[] = {io_copy, NULL};
    struct device_io *io = io_new(executor, stages, done, userdata);

    if (!io)
        return -ENOMEM;
    add_all(executor, &io->moves, true);
    return io_start(io);
}

/* ---- initial weights ------------------------------------------------------------------------------------- */

static int reserve_range(const struct segment *segment, const void *from, uint64_t n_bytes)
{
    uint64_t offset = (uint64_t)((const uint8_t *)from - segment->map), begin = offset / page_size() * page_size();

    assert(offset <= segment->n_bytes && n_bytes <= segment->n_bytes - offset);
    return segment_reserve(segment, begin, round_up(offset + n_bytes, page_size()) - begin);
}

/* Return: whether the parameter has masters apart from its published weights. */
static bool has_master(const struct executor *executor, const struct layout_param *p)
{
    return p->trainable && (p->dtype != DTYPE_F32 || executor->gathers);
}

/* Reserves the staging copy's pages for owned masters [first, end) of a bucket. Return: 0 or -errno. */
static int reserve_masters(const struct executor *executor, uint32_t bucket, uint64_t first, uint64_t end)
{
    static const unsigned arrays[] = {STATE_MASTER, ARRAY_LOWER};
    const struct state *state = executor->state;
    const struct state_bucket *b = &state->buckets[bucket];
    int r = 0;

    first = MAX(first, b->owned_start);
    end = MIN(end, b->owned_start + b->owned_elems);
    for (size_t i = 0; r == 0 && first < end && i < ARRAY_SIZE(arrays); i++)
        if (arrays[i] == STATE_MASTER ? !masters_are_weights(executor, bucket) : state_is_master24(state, bucket))
            r = reserve_range(&state->state, array_values(executor, bucket, arrays[i], first),
                              array_bytes(executor, bucket, arrays[i], end - first));
    return r;
}

/* Reserves the staging copy's pages for the request's weights, and for masters apart from the weights. */
static int reserve_init(const struct executor *executor, const struct request_init *request)
{
    const struct state *state = executor->state;
    const struct layout_param *p = &layout_of(executor)->params[request->param];
    uint64_t elem_bytes = dtype_size(p->dtype), first = p->offset_elems + request->start_elem;
    int r = 0;

    if (!executor->gathers)
        r = reserve_range(&state->weights, state_weights(state, request->param, request->start_elem),
                          request->n_elems * elem_bytes);
    else if (!p->trainable)
        r = reserve_range(&state->state, state_frozen(state, request->param) + request->start_elem * elem_bytes,
                          request->n_elems * elem_bytes);
    return r == 0 && has_master(executor, p) ? reserve_masters(executor, p->bucket, first, first + request->n_elems)
                                             : r;
}

static void store_run(struct work *work, uint32_t item)
{
    struct device_io *io = container_of(work, struct device_io, work);

    (void)item;
    io->result = io->executor->state->staging_copy ? reserve_init(io->executor, &io->init.request) : 0;
    if (io->result == 0)
        io->result = executor_store_initial(io->executor, &io->init, io->bytes);
}

/* A stage: sets weights and masters to the pushed values. */
static int store_pushed(void *userdata)
{
    return io_post(userdata, store_run, 1);
}

/* Adds moves that write a parameter's masters from the staging copy to the GPUs. */
static void add_masters(const struct executor *executor, struct moves *moves, uint32_t param, uint64_t start,
                        uint64_t n)
{
    const struct layout_param *p = &layout_of(executor)->params[param];
    uint64_t first = p->offset_elems + start;

    if (!masters_are_weights(executor, p->bucket))
        add_values(executor, moves, true, param, STATE_MASTER, start, n,
                   array_values(executor, p->bucket, STATE_MASTER, first));
    if (state_is_master24(executor->state, p->bucket))
        add_values(executor, moves, true, param, ARRAY_LOWER, start, n,
                   array_values(executor, p->bucket, ARRAY_LOWER, first));
}

/* A stage: copies weights and masters to the GPUs. */
static int copy_initial(void *userdata)
{
    struct device_io *io = userdata;
    const struct executor *executor = io->executor;
    const struct request_init *request = &io->init.request;
    const struct layout_param *p = &layout_of(executor)->params[request->param];
    uint64_t elem_bytes = dtype_size(p->dtype);

    io->moves.n = 0;
    add_weight_moves(executor, &io->moves, true, p->weight_offset_bytes + request->start_elem * elem_bytes,
                     request->n_elems * elem_bytes,
                     state_weights(executor->state, request->param, request->start_elem));
    if (executor->state->staging_copy && executor->gathers && !p->trainable)
        add_frozen(executor, &io->moves, true, request->param, request->start_elem, request->n_elems,
                   state_frozen(executor->state, request->param) + request->start_elem * elem_bytes);
    if (executor->state->staging_copy && has_master(executor, p))
        add_masters(executor, &io->moves, request->param, request->start_elem, request->n_elems);
    return io_copy(io);
}

int device_init(struct executor *executor, const struct executor_init *init)
{
    static const sequence_stage stages[] = {io_copy, store_pushed, copy_initial, NULL};
    const struct request_init *request = &init->request;
    uint64_t n_bytes = request->n_elems * dtype_size(layout_of(executor)->params[request->param].dtype);
    struct device_io *io = io_new(executor, stages, init->done, init->userdata);

    if (!io)
        return -ENOMEM;
    io->init = *init;
    /*
     * On several nodes in stages 1 and 2, keeps the pages, because the exchange sends the weights from the staging
     * copy.
     */
    io->empties = executor->state->staging_copy && (!executor->several_nodes || executor->gathers);
    io->bytes = malloc(n_bytes + 1);
    if (!io->bytes) {
        io_free(io);
        return -ENOMEM;
    }
    moves_add(&io->moves, &(struct devices_move){.local_rank = init->local_rank,
                                                 .kind = DEVICE_RING,
                                                 .offset_bytes = request->offset_bytes,
                                                 .host = io->bytes,
                                                 .n_bytes = n_bytes});
    return io_start(io);
}

int device_reserve_copy(const struct executor *executor)
{
    const struct state *state = executor->state;
    int r = segment_reserve(&state->weights, 0, state->weights.n_bytes);

    for (uint32_t b = 0; r == 0 && b < layout_of(executor)->n_buckets; b++)
        r = reserve_masters(executor, b, 0, layout_of(executor)->buckets[b].n_elems);
    return r;
}

static void adopt_run(struct work *work, uint32_t item)
{
    struct device_io *io = container_of(work, struct device_io, work);
    const struct executor *executor = io->executor;
    const struct layout_param *p = &layout_of(executor)->params[item];

    if (has_master(executor, p) || (executor->gathers && !executor->state->staging_copy))
        weights_adopt(executor->state, executor->options.kernels, item, io->weights + p->weight_offset_bytes);
}

/* A stage: sets masters in struct state to the values of the weights that node 0 sent. */
static int adopt_weights(void *userdata)
{
    struct device_io *io = userdata;

    return io_post(io, adopt_run, layout_of(io->executor)->n_params);
}

/*
 * Adds moves that write frozen parameters to the GPUs from `weights`, because adopt_weights() does not store them in a
 * staging copy.
 */
static void add_frozen_weights(const struct executor *executor, struct moves *moves, const uint8_t *weights)
{
    for (uint32_t i = 0; i < layout_of(executor)->n_params; i++) {
        const struct layout_param *p = &layout_of(executor)->params[i];

        if (!p->trainable)
            add_frozen(executor, moves, true, i, 0, p->n_elems, (uint8_t *)weights + p->weight_offset_bytes);
    }
}

int device_adopt(struct executor *executor, const uint8_t *weights, executor_done done, void *userdata)
{
    static const sequence_stage stages[] = {adopt_weights, io_copy, NULL};
    struct device_io *io = io_new(executor, stages, done, userdata);

    if (!io)
        return -ENOMEM;
    io->weights = weights;
    for (uint32_t b = 0; executor->state->staging_copy && b < layout_of(executor)->n_buckets; b++) {
        add_bucket(executor, &io->moves, true, b, STATE_MASTER);
        add_bucket(executor, &io->moves, true, b, ARRAY_LOWER);
    }
    if (config_partitions_all(executor->options.config))
        add_frozen_weights(executor, &io->moves, weights);
    add_weight_moves(executor, &io->moves, true, 0, layout_of(executor)->weight_bytes, executor->state->weights.map);
    return io_start(io);
}

/* ---- reading --------------------------------------------------------------------------------------------- */

/* A stage: converts the values of a frozen parameter or a moment to fp32. */
static int widen(void *userdata)
{
    struct device_io *io = userdata;

    io->executor->options.kernels->convert_to_f32(io->dst, io->bytes, io->dtype, io->n_elems);
    return SEQUENCE_OVER;
}

/* A stage: converts masters in 24 bits to fp32. io->bytes has first the weights, and then the low bytes. */
static int widen_masters(void *userdata)
{
    struct device_io *io = userdata;
    struct master24 masters = {.weights = (uint16_t *)(void *)io->bytes,
                               .lower = (int8_t *)io->bytes + io->n_elems * sizeof(uint16_t)};

    master24_to_f32(io->dst, masters, io->n_elems);
    return SEQUENCE_OVER;
}

/* A stage: rounds masters to the weights' type. */
static int narrow(void *userdata)
{
    struct device_io *io = userdata;

    io->executor->options.kernels->convert_from_f32(io->dst, (const float *)(const void *)io->bytes,
                                                    layout_of(io->executor)->params[io->param].dtype, io->n_elems);
    return SEQUENCE_OVER;
}

static struct device_io *io_new_read(struct executor *executor, const sequence_stage *stages,
                                     const struct executor_read *read)
{
    struct device_io *io = io_new(executor, stages, read->done, read->userdata);

    if (!io)
        return NULL;
    io->param = read->param;
    io->n_elems = layout_of(executor)->params[read->param].n_elems;
    io->dst = read->dst;
    return io;
}

/* Allocates io->bytes for values that are read and then converted. */
static void make_bytes(struct device_io *io, uint64_t n_bytes)
{
    io->bytes = malloc(n_bytes + 1);
    io->moves.failed |= !io->bytes;
}

/* Adds moves that read masters in 24 bits to io->bytes. widen_masters() is the next stage. */
static void add_masters24(struct device_io *io, uint64_t start)
{
    make_bytes(io, io->n_elems * (sizeof(uint16_t) + 1));
    add_values(io->executor, &io->moves, false, io->param, STATE_MASTER, start, io->n_elems, io->bytes);
    add_values(io->executor, &io->moves, false, io->param, ARRAY_LOWER, start, io->n_elems,
               io->bytes + io->n_elems * sizeof(uint16_t));
}

/* Adds moves that read the values of a frozen parameter or a moment to io->bytes. widen() is the next stage. */
static void add_narrow(struct device_io *io, enum state_kind kind, uint64_t start)
{
    const struct executor *executor = io->executor;
    const struct layout_param *p = &layout_of(executor)->params[io->param];

    io->dtype = p->trainable ? state_dtype(executor->state, kind) : p->dtype;
    make_bytes(io, dtype_bytes(io->dtype, io->n_elems));
    if (p->trainable)
        add_values(executor, &io->moves, false, io->param, kind, start, io->n_elems, io->bytes);
    else if (executor->gathers)
        add_frozen(executor, &io->moves, false, io->param, start, io->n_elems, io->bytes);
    else
        add_weight_moves(executor, &io->moves, false, p->weight_offset_bytes, io->n_elems * dtype_size(p->dtype),
                         io->bytes);
}

static int read_values(struct executor *executor, const struct executor_read *read)
{
    static const sequence_stage as_they_are[] = {io_copy, NULL}, widened[] = {io_copy, widen, NULL},
                                masters[] = {io_copy, widen_masters, NULL};
    const struct layout_param *p = &layout_of(executor)->params[read->param];
    bool widens = !p->trainable || !state_is_f32(executor->state, read->kind, p->bucket);
    bool master24 = p->trainable && widens && read->kind == STATE_MASTER;
    const sequence_stage *stages = master24 ? masters : widened;
    struct device_io *io = io_new_read(executor, widens ? stages : as_they_are, read);
    uint64_t start = 0;

    if (!io)
        return -ENOMEM;
    if (widens && (p->trainable || executor->gathers))
        io->n_elems = device_find_owned(executor, read->param, &start);
    io->dst = (float *)read->dst + start;
    if (master24)
        add_masters24(io, start);
    else if (widens)
        add_narrow(io, read->kind, start);
    else
        add_values(executor, &io->moves, false, read->param, read->kind, 0, p->n_elems, read->dst);
    return io_start(io) < 0 ? -ENOMEM : 0;
}

static int read_weights(struct executor *executor, const struct executor_read *read)
{
    static const sequence_stage as_they_are[] = {io_copy, NULL}, rounded[] = {io_copy, narrow, NULL};
    const struct layout_param *p = &layout_of(executor)->params[read->param];
    bool rounds = p->trainable && p->dtype != DTYPE_F32 && !state_is_master24(executor->state, p->bucket);
    struct device_io *io = io_new_read(executor, rounds ? rounded : as_they_are, read);
    uint64_t start;

    if (!io)
        return -ENOMEM;
    io->n_elems = device_find_owned(executor, read->param, &start);
    if (rounds)
        make_bytes(io, io->n_elems * sizeof(float));
    if (!p->trainable)
        add_frozen(executor, &io->moves, false, read->param, start, io->n_elems, read->dst);
    else
        add_values(executor, &io->moves, false, read->param, STATE_MASTER, start, io->n_elems,
                   rounds ? io->bytes : read->dst);
    return io_start(io) < 0 ? -ENOMEM : 0;
}

int device_read(struct executor *executor, const struct executor_read *read)
{
    return read->weights ? read_weights(executor, read) : read_values(executor, read);
}

static void reserve_segment_run(struct work *work, uint32_t item)
{
    struct device_io *io = container_of(work, struct device_io, work);

    (void)item;
    io->result = segment_reserve(io->segment, 0, io->segment->n_bytes);
}

static int reserve_segment(void *userdata)
{
    return io_post(userdata, reserve_segment_run, 1);
}

int device_show_weights(struct executor *executor, const struct segment *segment, executor_done done, void *userdata)
{
    static const sequence_stage stages[] = {reserve_segment, io_copy, NULL};
    struct device_io *io = io_new(executor, stages, done, userdata);

    if (!io)
        return -ENOMEM;
    io->segment = segment;
    add_weight_moves(executor, &io->moves, false, 0, layout_of(executor)->weight_bytes, segment->map);
    return io_start(io);
}

/* A stage: copies state and weights into the staging copy. */
static int load_staging(void *userdata)
{
    struct device_io *io = userdata;

    return device_load(io->executor, sequence_done, &io->sequence);
}

static int show_staging(void *userdata)
{
    struct device_io *io = userdata;

    return host_show(io->executor, io->segment, sequence_done, &io->sequence);
}

int device_show_masters(struct executor *executor, const struct segment *segment, executor_done done, void *userdata)
{
    static const sequence_stage stages[] = {load_staging, show_staging, NULL};
    struct device_io *io = io_new(executor, stages, done, userdata);

    if (!io)
        return -ENOMEM;
    io->segment = segment;
    io->empties = true;
    return io_start(io);
}

/* ---- repeated pushes -------------------------------------------------------------------------------------- */

static void part_read(void *userdata, int result)
{
    struct checksum *checksum = userdata;

    if (result == 0)
        checksum_post(checksum);
    else
        checksum_end(checksum, result);
}

int device_verify(struct executor *executor, const struct executor_verify *verify)
{
    const struct ring_slot *slot = verify->slot;
    uint64_t n_bytes = layout_part_bytes(layout_of(executor), verify->part);
    struct checksum *checksum = checksum_new(executor, verify);
    struct devices_move move = {.local_rank = verify->local_rank,
                                .kind = DEVICE_RING,
                                .offset_bytes =
                                    slot->offset_bytes + layout_part_offset_bytes(layout_of(executor), verify->part),
                                .n_bytes = n_bytes,
                                .point = slot->point};
    int r = -ENOMEM;

    if (!checksum)
        return -ENOMEM;
    checksum->bytes = move.host = checksum->copy = malloc(n_bytes + 1);
    if (checksum->copy)
        r = devices_copy(executor->devices, &move, 1, part_read, checksum);
    if (r < 0)
        checksum_free(checksum);
    return r;
}
