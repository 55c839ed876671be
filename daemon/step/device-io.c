/* SPDX-License-Identifier: Apache-2.0 */

/* What an executor on GPUs copies between them and this process's memory: initial weights, state that is read, windows.
 */

#include <string.h>

#include "core/base/base.h"
#include "core/base/segment.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/wire/wire-request.h"
#include "daemon/engines/devices.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/weights.h"
#include "daemon/step/device.h"
#include "daemon/step/host.h"
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
static bool find_slice(const struct executor *executor, uint32_t bucket, enum state_kind kind, unsigned rank,
                       struct devices_move *move)
{
    const struct device_keep *keep = devices_keep(executor->devices);
    const struct device_places *places = &keep->places[bucket];
    uint32_t piece = DEVICE_STATE;

    move->local_rank = rank - executor->first_rank;
    if (kind == STATE_MASTER)
        move->offset_bytes = device_master(&keep->plan, keep->places, bucket, rank, &piece);
    else
        move->offset_bytes = kind == STATE_EXP_AVG ? places->exp_avg : places->exp_avg_sq;
    move->kind = piece;
    return move->offset_bytes != DEVICE_NONE;
}

/* A range of a parameter's values, slice by slice of those who own it; host: of its first. */
static void add_values(const struct executor *executor, struct moves *moves, bool write, uint32_t param,
                       enum state_kind kind, uint64_t start, uint64_t n, float *host)
{
    const struct layout_param *p = &layout_of(executor)->params[param];
    uint64_t slice = layout_partition_elems(layout_of(executor), p->bucket);
    uint64_t begin = p->offset_elems + start;

    for (unsigned rank = executor->first_rank; rank < end_of(executor); rank++) {
        uint64_t from = MAX(begin, slice * rank), to = MIN(begin + n, slice * (rank + 1));
        struct devices_move move = {.write = write};

        if (from >= to || !find_slice(executor, p->bucket, kind, rank, &move))
            continue;
        move.offset_bytes += (from - slice * rank) * sizeof(float);
        move.host = host + (from - begin);
        move.n_bytes = (to - from) * sizeof(float);
        moves_add(moves, &move);
    }
}

/* Bytes of the weights: from the first local rank's copy, or to everybody's. Stage 3 has none. */
static void add_weights(const struct executor *executor, struct moves *moves, bool write, uint64_t offset_bytes,
                        uint64_t n_bytes, void *host)
{
    for (unsigned local = 0; !executor->gathers && local < (write ? executor->n_local : 1); local++)
        moves_add(moves, &(struct devices_move){.write = write,
                                                .local_rank = local,
                                                .kind = DEVICE_WEIGHTS,
                                                .offset_bytes = offset_bytes,
                                                .host = host,
                                                .n_bytes = n_bytes});
}

/* Stage 3: some of a frozen parameter's bytes, slice by slice of those who own it; host: of its first. */
static void add_frozen(const struct executor *executor, struct moves *moves, bool write, uint32_t param, uint64_t start,
                       uint64_t n, uint8_t *host)
{
    const struct device_keep *keep = devices_keep(executor->devices);
    size_t elem_bytes = dtype_size(layout_of(executor)->params[param].dtype);

    for (unsigned rank = executor->first_rank; rank < end_of(executor); rank++) {
        uint64_t begin, end, from, to;

        device_param_slice(&keep->plan, param, rank, &begin, &end);
        from = MAX(begin, start);
        to = MIN(end, start + n);
        if (from < to)
            moves_add(moves, &(struct devices_move){.write = write,
                                                    .local_rank = rank - executor->first_rank,
                                                    .kind = DEVICE_STATE,
                                                    .offset_bytes = keep->frozen[param] + (from - begin) * elem_bytes,
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

/* What this node has of a parameter, from the parameter's start; in stage 3 of a frozen one, too. Return: how much. */
uint64_t device_find_owned(const struct executor *executor, uint32_t param, uint64_t *start)
{
    const struct device_plan *plan = &devices_keep(executor->devices)->plan;
    uint64_t begin, end, unused;

    device_param_slice(plan, param, executor->first_rank, &begin, &unused);
    device_param_slice(plan, param, end_of(executor) - 1, &unused, &end);
    *start = begin;
    return end - begin;
}

/* Masters that are not weights, and moments. */
static void add_bucket(const struct executor *executor, struct moves *moves, bool write, uint32_t bucket,
                       enum state_kind kind)
{
    uint64_t slice = layout_partition_elems(layout_of(executor), bucket);

    if (kind == STATE_MASTER && layout_of(executor)->buckets[bucket].dtype == DTYPE_F32 && !executor->gathers)
        return;
    for (unsigned rank = executor->first_rank; rank < end_of(executor); rank++) {
        struct devices_move move = {.write = write, .n_bytes = slice * sizeof(float)};

        if (!find_slice(executor, bucket, kind, rank, &move))
            continue;
        move.host = state_values(executor->state, kind, bucket, slice * rank);
        moves_add(moves, &move);
    }
}

static void add_all(const struct executor *executor, struct moves *moves, bool write)
{
    for (uint32_t b = 0; executor->state->staging_copy && b < layout_of(executor)->n_buckets; b++)
        for (enum state_kind kind = 0; kind < STATE_N_KINDS; kind++)
            add_bucket(executor, moves, write, b, kind);
    if (executor->state->staging_copy && executor->gathers)
        add_all_frozen(executor, moves, write);
    add_weights(executor, moves, write, 0, layout_of(executor)->weight_bytes, executor->state->weights.map);
}

/* ---- something that takes several turns ------------------------------------------------------------------ */

struct device_io {
    struct executor *executor;
    struct work work;
    int result; /* of the work */
    struct moves moves;
    executor_done done;
    void *userdata;
    const struct segment *segment;
    struct executor_init init;
    uint8_t *bytes;         /* initial weights, as pushed; what is read, before it is converted; owned */
    const uint8_t *weights; /* of other nodes, all of them; laid out as the weights */
    uint32_t param;
    uint64_t n_elems;
    void *dst;
};

static struct device_io *io_new(struct executor *executor, executor_done done, void *userdata)
{
    struct device_io *io = calloc(1, sizeof(*io));

    if (io)
        *io = (struct device_io){.executor = executor, .done = done, .userdata = userdata};
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
    executor_done done = io->done;

    userdata = io->userdata;
    io_free(io);
    done(userdata, result);
}

static int io_copy(struct device_io *io, devices_done done)
{
    if (io->moves.failed)
        return -ENOMEM;
    return devices_copy(io->executor->devices, io->moves.items, io->moves.n, done, io);
}

/* The copy that is all there is to do. Return: 0, or -errno and io is gone. */
static int io_start(struct device_io *io, devices_done done)
{
    int r = io_copy(io, done);

    if (r < 0)
        io_free(io);
    return r;
}

static void io_post(struct device_io *io, void (*run)(struct work *work, uint32_t item),
                    void (*done)(struct work *work), uint32_t n_items)
{
    io->work = (struct work){.run = run, .done = done, .n_items = n_items};
    worker_post(io->executor->options.pool, &io->work);
}

/* ---- the staging copy ------------------------------------------------------------------------------------ */

void device_empty(struct executor *executor)
{
    segment_punch(&executor->state->state, 0, executor->state->state.n_bytes);
    segment_punch(&executor->state->weights, 0, executor->state->weights.n_bytes);
}

static void reserve_all(struct work *work, uint32_t item)
{
    struct device_io *io = container_of(work, struct device_io, work);
    const struct state *state = io->executor->state;

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

int device_load(struct executor *executor, executor_done done, void *userdata)
{
    struct device_io *io = io_new(executor, done, userdata);

    if (!io)
        return -ENOMEM;
    add_all(executor, &io->moves, false);
    if (io->moves.failed) {
        io_free(io);
        return -ENOMEM;
    }
    io_post(io, reserve_all, load_reserved, 1);
    return 0;
}

int device_store(struct executor *executor, executor_done done, void *userdata)
{
    struct device_io *io = io_new(executor, done, userdata);

    if (!io)
        return -ENOMEM;
    add_all(executor, &io->moves, true);
    return io_start(io, io_end);
}

/* ---- initial weights ------------------------------------------------------------------------------------- */

static void init_end(void *userdata, int result)
{
    struct device_io *io = userdata;
    const struct executor *executor = io->executor;

    if (executor->state->staging_copy && (!executor->several_nodes || executor->gathers)) /* else it is sent from there */
        device_empty(io->executor);
    io_end(io, result);
}

static int reserve_range(const struct segment *segment, const void *from, uint64_t n_bytes)
{
    uint64_t offset = (uint64_t)((const uint8_t *)from - segment->map), begin = offset / page_size() * page_size();

    return segment_reserve(segment, begin, round_up(offset + n_bytes, page_size()) - begin);
}

/* Does a parameter have a master that is not its weight? */
static bool has_master(const struct executor *executor, const struct layout_param *p)
{
    return p->trainable && (p->dtype != DTYPE_F32 || executor->gathers);
}

/* The pages of the staging copy that the weights, and masters that are not weights, lie in. */
static int reserve_init(const struct executor *executor, const struct request_init *request)
{
    const struct state *state = executor->state;
    const struct layout_param *p = &layout_of(executor)->params[request->param];
    uint64_t elem_bytes = dtype_size(p->dtype);
    int r = 0;

    if (!executor->gathers)
        r = reserve_range(&state->weights, state_weights(state, request->param, request->start_elem),
                          request->n_elems * elem_bytes);
    else if (!p->trainable)
        r = reserve_range(&state->state, state_frozen(state, request->param) + request->start_elem * elem_bytes,
                          request->n_elems * elem_bytes);
    if (r < 0 || !has_master(executor, p))
        return r;
    return reserve_range(&state->state, state_master(state, p->bucket, p->offset_elems + request->start_elem),
                         request->n_elems * sizeof(float));
}

static void init_store(struct work *work, uint32_t item)
{
    struct device_io *io = container_of(work, struct device_io, work);

    (void)item;
    io->result = io->executor->state->staging_copy ? reserve_init(io->executor, &io->init.request) : 0;
    if (io->result == 0)
        io->result = executor_store_initial(io->executor, &io->init, io->bytes);
}

static void init_stored(struct work *work)
{
    struct device_io *io = container_of(work, struct device_io, work);
    const struct executor *executor = io->executor;
    const struct request_init *request = &io->init.request;
    const struct layout_param *p = &layout_of(executor)->params[request->param];
    uint64_t elem_bytes = dtype_size(p->dtype);

    io->moves.n = 0;
    add_weights(executor, &io->moves, true, p->weight_offset_bytes + request->start_elem * elem_bytes,
                request->n_elems * elem_bytes, state_weights(executor->state, request->param, request->start_elem));
    if (executor->state->staging_copy && executor->gathers && !p->trainable)
        add_frozen(executor, &io->moves, true, request->param, request->start_elem, request->n_elems,
                   state_frozen(executor->state, request->param) + request->start_elem * elem_bytes);
    if (executor->state->staging_copy && has_master(executor, p))
        add_values(executor, &io->moves, true, request->param, STATE_MASTER, request->start_elem, request->n_elems,
                   state_master(executor->state, p->bucket, p->offset_elems + request->start_elem));
    if (io->result < 0 || io_copy(io, init_end) < 0)
        init_end(io, -ENOMEM);
}

static void init_read(void *userdata, int result)
{
    struct device_io *io = userdata;

    if (result == 0)
        io_post(io, init_store, init_stored, 1);
    else
        init_end(io, result);
}

int device_init(struct executor *executor, const struct executor_init *init)
{
    const struct request_init *request = &init->request;
    uint64_t n_bytes = request->n_elems * dtype_size(layout_of(executor)->params[request->param].dtype);
    struct device_io *io = io_new(executor, init->done, init->userdata);

    if (!io)
        return -ENOMEM;
    io->init = *init;
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
    return io_start(io, init_read);
}

int device_reserve_copy(const struct executor *executor)
{
    const struct state *state = executor->state;
    int r = segment_reserve(&state->weights, 0, state->weights.n_bytes);

    for (uint32_t b = 0; r == 0 && b < layout_of(executor)->n_buckets; b++) {
        uint64_t slice = layout_partition_elems(layout_of(executor), b);

        if ((layout_of(executor)->buckets[b].dtype != DTYPE_F32 || executor->gathers) && slice > 0)
            r = reserve_range(&state->state, state_master(state, b, slice * executor->first_rank),
                              slice * executor->n_local * sizeof(float));
    }
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

static void adopt_done(struct work *work)
{
    struct device_io *io = container_of(work, struct device_io, work);

    if (io_copy(io, io_end) < 0)
        io_end(io, -ENOMEM);
}

/* Frozen parameters go from where they have come in: they have no place of their own here but in the staging copy. */
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
    struct device_io *io = io_new(executor, done, userdata);

    if (!io)
        return -ENOMEM;
    io->weights = weights;
    for (uint32_t b = 0; executor->state->staging_copy && b < layout_of(executor)->n_buckets; b++)
        add_bucket(executor, &io->moves, true, b, STATE_MASTER);
    if (config_partitions_all(executor->options.config))
        add_frozen_weights(executor, &io->moves, weights);
    add_weights(executor, &io->moves, true, 0, layout_of(executor)->weight_bytes, executor->state->weights.map);
    if (io->moves.failed) {
        io_free(io);
        return -ENOMEM;
    }
    io_post(io, adopt_run, adopt_done, layout_of(executor)->n_params);
    return 0;
}

/* ---- reading --------------------------------------------------------------------------------------------- */

static void frozen_read(void *userdata, int result)
{
    struct device_io *io = userdata;

    if (result == 0)
        io->executor->options.kernels->convert_to_f32(io->dst, io->bytes,
                                                      layout_of(io->executor)->params[io->param].dtype, io->n_elems);
    io_end(io, result);
}

static void masters_read(void *userdata, int result)
{
    struct device_io *io = userdata;

    if (result == 0)
        io->executor->options.kernels->convert_from_f32(io->dst, (const float *)(const void *)io->bytes,
                                                        layout_of(io->executor)->params[io->param].dtype, io->n_elems);
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

static struct device_io *io_new_read(struct executor *executor, uint32_t param, void *dst, executor_done done,
                                     void *userdata)
{
    struct device_io *io = io_new(executor, done, userdata);

    if (!io)
        return NULL;
    io->param = param;
    io->n_elems = layout_of(executor)->params[param].n_elems;
    io->dst = dst;
    return io;
}

int device_read(struct executor *executor, uint32_t param, enum state_kind kind, float *dst, executor_done done,
                void *userdata)
{
    const struct layout_param *p = &layout_of(executor)->params[param];
    struct device_io *io = io_new_read(executor, param, dst, done, userdata);
    uint64_t start = 0;

    if (!io)
        return -ENOMEM;
    if (p->trainable) {
        add_values(executor, &io->moves, false, param, kind, 0, p->n_elems, dst);
        return read_moves(io, NULL);
    }
    if (executor->gathers)
        io->n_elems = device_find_owned(executor, param, &start);
    io->dst = dst + start;
    io->bytes = malloc(io->n_elems * dtype_size(p->dtype) + 1);
    if (io->bytes && executor->gathers)
        add_frozen(executor, &io->moves, false, param, start, io->n_elems, io->bytes);
    else if (io->bytes)
        add_weights(executor, &io->moves, false, p->weight_offset_bytes, io->n_elems * dtype_size(p->dtype), io->bytes);
    return read_moves(io, frozen_read);
}

int device_read_weights(struct executor *executor, uint32_t param, uint8_t *dst, executor_done done, void *userdata)
{
    const struct layout_param *p = &layout_of(executor)->params[param];
    struct device_io *io = io_new_read(executor, param, dst, done, userdata);
    bool rounds = p->trainable && p->dtype != DTYPE_F32;
    uint64_t start;

    if (!io)
        return -ENOMEM;
    io->n_elems = device_find_owned(executor, param, &start);
    if (rounds)
        io->bytes = malloc(io->n_elems * sizeof(float) + 1);
    if (!p->trainable)
        add_frozen(executor, &io->moves, false, param, start, io->n_elems, dst);
    else if (!rounds || io->bytes)
        add_values(executor, &io->moves, false, param, STATE_MASTER, start, io->n_elems,
                   (float *)(void *)(rounds ? io->bytes : dst));
    return read_moves(io, rounds ? masters_read : NULL);
}

static void reserve_segment(struct work *work, uint32_t item)
{
    struct device_io *io = container_of(work, struct device_io, work);

    (void)item;
    io->result = segment_reserve(io->segment, 0, io->segment->n_bytes);
}

int device_show_weights(struct executor *executor, const struct segment *segment, executor_done done, void *userdata)
{
    struct device_io *io = io_new(executor, done, userdata);

    if (!io)
        return -ENOMEM;
    io->segment = segment;
    add_weights(executor, &io->moves, false, 0, layout_of(executor)->weight_bytes, segment->map);
    io_post(io, reserve_segment, load_reserved, 1);
    return 0;
}

static void masters_shown(void *userdata, int result)
{
    struct device_io *io = userdata;

    device_empty(io->executor);
    io_end(io, result);
}

/* The staging copy has the masters. */
static void masters_loaded(void *userdata, int result)
{
    struct device_io *io = userdata;

    if (result == 0)
        result = host_show(io->executor, io->segment, masters_shown, io);
    if (result < 0)
        masters_shown(io, result);
}

int device_show_masters(struct executor *executor, const struct segment *segment, executor_done done, void *userdata)
{
    struct device_io *io = io_new(executor, done, userdata);
    int r;

    if (!io)
        return -ENOMEM;
    io->segment = segment;
    r = device_load(executor, masters_loaded, io);
    if (r < 0)
        io_free(io);
    return r;
}

/* ---- what a successor pushes again ------------------------------------------------------------------------ */

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
                                .has_event = slot->event_plus_one > 0};
    int r = -ENOMEM;

    if (!checksum)
        return -ENOMEM;
    checksum->bytes = move.host = checksum->copy = malloc(n_bytes + 1);
    if (move.has_event)
        move.event = slot->event_plus_one - 1;
    if (checksum->copy)
        r = devices_copy(executor->devices, &move, 1, part_read, checksum);
    if (r < 0)
        checksum_free(checksum);
    return r;
}
