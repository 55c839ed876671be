/* SPDX-License-Identifier: Apache-2.0 */

/* The GPUs of this node: the queue of orders, copies in pieces, waits for trainers' GPUs, and the start of engines. */

#include "daemon/engines/child.h"
#include "daemon/engines/device-keep.h"
#include "daemon/engines/devices.h"

#include <assert.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/log.h"
#include "core/base/traffic.h"
#include "core/budget/step-sizes.h"
#include "core/wire/progress.h"
#include "kernels/kernels.h"

enum {
    FIRST_PAUSE_MS = 100,
    CONNECT_MS = 60 * 1000, /* contexts on eight GPUs and NCCL between them take seconds, ten and more the first time */
    ORDER_MS = 10 * 1000,   /* for an order with no other before it; a device that does nothing for longer hangs */
    ORDER_BYTES_PER_MS = 10000, /* a transfer below 10 MB/s counts as stopped; picked */
    LOST_MS = 5000,             /* time for the writes that a dead trainer's GPU had begun */
    PREDECESSOR_MS = 5,
    FIRST_TRIES = 3, /* several nodes: tries before an engine was ready; picked */
    BATCH_MOVES = 256,
    BOUNCE = 0, /* number of the segment for copies */
    /*
     * Several nodes: used instead of ORDER_MS, because an order may wait for slow GPUs of other nodes, which this node
     * does not see. Picked; replacing a slow engine loses nothing.
     */
    OTHERS_MS = 60 * 1000,
};

struct order {
    struct order *next;
    struct device_command command; /* the order owns its array */
    void *array;
    uint64_t tag; /* the order's tag in the present engine; 0: not submitted */
    uint64_t n_bytes;
    devices_done done;
    void *userdata;
};

struct copy {
    struct copy *next;
    size_t at; /* the next move, of which at_bytes are done */
    uint64_t at_bytes;
    devices_done done;
    void *userdata;
    size_t n_moves;
    struct devices_move moves[];
};

/* A part of a move, and its place in the bounce segment. */
struct part {
    const struct devices_move *move;
    uint64_t from_bytes, n_bytes; /* in the move */
    uint64_t bounce_at;
};

struct devices {
    struct devices_options options;
    struct device_keep keep;
    struct segment bounce;
    const struct segment *shared[DEVICES_N_SEGMENTS]; /* without bounce; NULL: not shared */
    bool closing;
    struct device *device;
    uv_timer_t pause, lost;
    unsigned n_timers;   /* not closed yet */
    uint32_t lost_ranks; /* local ranks whose process is gone, as a mask */
    uint32_t generation;
    uint32_t wanted; /* several nodes: the generation to start; 0: none */
    struct early {   /* a value that another node's engine has put before this node's engine was started */
        char key[DEVICE_MAX_KEY_BYTES + 1];
        uint8_t value[DEVICE_MAX_VALUE_BYTES];
        size_t n_bytes; /* 0: none */
    } early;
    bool ready, was_ready, cancelled;
    unsigned n_failures; /* since the last order that was done */
    uint64_t n_all_failures;
    struct traffic traffic[N_TRAFFIC];
    char versions[DEVICE_MAX_WHAT_BYTES + 1];
    uint64_t last_tag, n_collectives, n_waiting_bytes;
    struct order *orders, **last_order;
    struct copy *copies, **last_copy;
    bool copying; /* a batch of parts is being copied */
    bool working; /* workers are copying between host and bounce */
    bool filling; /* workers copy from host to bounce; else from bounce to host */
    struct work work;
    struct part parts[BATCH_MOVES];
    size_t n_parts;
};

_Static_assert(DEVICE_MAX_LOCAL <= 32, "devices.lost_ranks has a bit for each local rank");
_Static_assert(DEVICES_BOUNCE_BYTES % 64 == 0, "parts of a move end between elements");

/* ---- orders ---------------------------------------------------------------------------------------------- */

/* Numbers the orders that move data between ranks; each generation begins again at 0. */
static void set_collective(struct devices *devices, struct device_command *command)
{
    if (command->type == DEVICE_COMMAND_REDUCE)
        command->reduce.collective = devices->n_collectives++;
    else if (command->type == DEVICE_COMMAND_GATHER)
        command->gather.collective = devices->n_collectives++;
    else if (command->type == DEVICE_COMMAND_FETCH)
        command->fetch.collective = devices->n_collectives++;
}

static void set_tag(struct device_command *command, uint64_t tag, uint32_t timeout_ms)
{
    switch (command->type) {
    case DEVICE_COMMAND_REDUCE:
        command->reduce.tag = tag;
        command->reduce.timeout_ms = timeout_ms;
        return;
    case DEVICE_COMMAND_UPDATE:
        command->update.tag = tag;
        command->update.timeout_ms = timeout_ms;
        return;
    case DEVICE_COMMAND_GATHER:
        command->gather.tag = tag;
        command->gather.timeout_ms = timeout_ms;
        return;
    case DEVICE_COMMAND_FETCH:
        command->fetch.tag = tag;
        command->fetch.timeout_ms = timeout_ms;
        return;
    default:
        assert(command->type == DEVICE_COMMAND_COPY);
        command->copy.tag = tag;
        command->copy.timeout_ms = timeout_ms;
    }
}

/* Sets those points of the order to 0 that trainers have released since the order was made. */
static void drop_released(const struct devices *devices, const struct order *order)
{
    struct device_slot *slots = order->array;
    struct device_move *moves = order->array;

    if (order->command.type == DEVICE_COMMAND_REDUCE)
        for (size_t i = 0; i < order->command.reduce.n_slots; i++)
            if (!devices_awaits(devices, slots[i].local_rank, slots[i].point))
                slots[i].point = 0;
    if (order->command.type == DEVICE_COMMAND_COPY)
        for (size_t i = 0; i < order->command.copy.n_moves; i++)
            if (!devices_awaits(devices, moves[i].local_rank, moves[i].point))
                moves[i].point = 0;
}

/* Return: the last point of a lost local rank that the order waits for, or 0. */
static uint64_t lost_point(const struct devices *devices, const struct order *order, unsigned local_rank)
{
    const struct device_slot *slots = order->array;
    const struct device_move *moves = order->array;
    uint64_t last = 0;

    if (!(devices->lost_ranks >> local_rank & 1))
        return 0;
    for (size_t i = 0; order->command.type == DEVICE_COMMAND_REDUCE && i < order->command.reduce.n_slots; i++)
        if (slots[i].local_rank == local_rank)
            last = MAX(last, slots[i].point);
    for (size_t i = 0; order->command.type == DEVICE_COMMAND_COPY && i < order->command.copy.n_moves; i++)
        if (moves[i].local_rank == local_rank)
            last = MAX(last, moves[i].point);
    return devices_awaits(devices, local_rank, last) ? last : 0;
}

static bool names_lost(const struct devices *devices, const struct order *order)
{
    for (unsigned i = 0; i < DEVICE_MAX_LOCAL; i++)
        if (lost_point(devices, order, i) > 0)
            return true;
    return false;
}

static void on_lost(uv_timer_t *handle);

static void watch_lost(struct devices *devices)
{
    (void)uv_timer_start(&devices->lost, on_lost, LOST_MS, 0);
}

/* Submits the order to the engine. If that fails, the engine is failing, and the next engine gets the order. */
static void give(struct devices *devices, struct order *order)
{
    uint64_t base_ms = devices->options.n_nodes > 1 && failpoint("others") == 0 ? OTHERS_MS : ORDER_MS;
    uint64_t timeout_ms = base_ms + devices->n_waiting_bytes / ORDER_BYTES_PER_MS;

    assert(devices->ready);
    assert(order->tag == 0); /* it is not submitted yet */
    order->tag = ++devices->last_tag;
    drop_released(devices, order);
    /* A lost rank's gradients may be reduced long after its process ended, so the wait for its GPU begins here. */
    if (names_lost(devices, order) && !uv_is_active((uv_handle_t *)&devices->lost))
        watch_lost(devices);
    set_collective(devices, &order->command);
    set_tag(&order->command, order->tag, (uint32_t)MIN(timeout_ms, (uint64_t)INT32_MAX));
    (void)device_order(devices->device, &order->command);
}

/*
 * Queues a copy of the order, and submits it if an engine is ready. Takes ownership of order->array, even on failure.
 * Return: 0 or -ENOMEM.
 */
static int add_order(struct devices *devices, const struct order *order)
{
    struct order *copy = malloc(sizeof(*copy));

    if (!copy) {
        free(order->array);
        return -ENOMEM;
    }
    *copy = *order;
    *devices->last_order = copy;
    devices->last_order = &copy->next;
    devices->n_waiting_bytes += copy->n_bytes;
    if (devices->ready)
        give(devices, copy);
    return 0;
}

/* Return: the address of the pointer to the command's array, or NULL if it has none. *size: the bytes of the array. */
static const void **array_of(struct device_command *command, size_t *size)
{
    switch (command->type) {
    case DEVICE_COMMAND_REDUCE:
        *size = command->reduce.n_slots * sizeof(*command->reduce.slots);
        return (const void **)&command->reduce.slots;
    case DEVICE_COMMAND_COPY:
        *size = command->copy.n_moves * sizeof(*command->copy.moves);
        return (const void **)&command->copy.moves;
    case DEVICE_COMMAND_FETCH:
        *size = command->fetch.n_params * sizeof(*command->fetch.params);
        return (const void **)&command->fetch.params;
    default:
        *size = 0;
        return NULL;
    }
}

int devices_order(struct devices *devices, const struct device_command *command, uint64_t n_bytes, devices_done done,
                  void *userdata)
{
    struct order order = {.command = *command, .n_bytes = n_bytes, .done = done, .userdata = userdata};
    size_t size;
    const void **array = array_of(&order.command, &size);

    if (devices->cancelled)
        return -ECANCELED;
    if (size > 0) {
        order.array = malloc(size);
        if (!order.array)
            return -ENOMEM;
        memcpy(order.array, *array, size);
        *array = order.array;
    }
    return add_order(devices, &order);
}

static struct order *remove_order(struct devices *devices, uint64_t tag)
{
    for (struct order **link = &devices->orders; *link; link = &(*link)->next) {
        struct order *order = *link;

        if (order->tag != tag)
            continue;
        *link = order->next;
        if (devices->last_order == &order->next)
            devices->last_order = link;
        assert(devices->n_waiting_bytes >= order->n_bytes);
        devices->n_waiting_bytes -= order->n_bytes;
        return order;
    }
    return NULL;
}

static void end_order(struct order *order, int result)
{
    devices_done done = order->done;
    void *userdata = order->userdata;

    free(order->array);
    free(order);
    done(userdata, result);
}

/* ---- copies ---------------------------------------------------------------------------------------------- */

static void start_batch(struct devices *devices);

static void copy_run(struct work *work, uint32_t item)
{
    struct devices *devices = container_of(work, struct devices, work);
    const struct part *part = &devices->parts[item];
    uint8_t *host = part->move->host, *bounce = devices->bounce.map + part->bounce_at;
    size_t elem_bytes = dtype_size(part->move->dtype);

    assert(item < devices->n_parts);
    assert(part->bounce_at + part->n_bytes <= DEVICES_BOUNCE_BYTES);
    assert(part->from_bytes + part->n_bytes <= part->move->n_bytes);
    (void)failpoint("bounce");
    if (part->move->write != devices->filling)
        return;
    if (!part->move->write)
        memcpy(host + part->from_bytes, bounce, part->n_bytes);
    else if (part->move->rounds)
        devices->options.kernels->convert_from_f32(bounce,
                                                   (const float *)part->move->host + part->from_bytes / elem_bytes,
                                                   part->move->dtype, part->n_bytes / elem_bytes);
    else if (host)
        memcpy(bounce, host + part->from_bytes, part->n_bytes);
    else
        memset(bounce, 0, part->n_bytes);
}

static void cancel_copies(struct devices *devices)
{
    while (devices->copies) {
        struct copy *copy = devices->copies;

        devices->copies = copy->next;
        copy->done(copy->userdata, -ECANCELED);
        free(copy);
    }
}

/* Called when all parts of the batch are copied, and values that were read are in the daemon's memory. */
static void batch_done(struct devices *devices)
{
    struct copy *copy = devices->copies;
    devices_done done = copy->done;
    void *userdata = copy->userdata;

    assert(devices->copying);
    devices->copying = false;
    if (copy->at == copy->n_moves) {
        devices->copies = copy->next;
        if (!devices->copies)
            devices->last_copy = &devices->copies;
        free(copy);
        start_batch(devices);
        done(userdata, 0);
    } else {
        start_batch(devices);
    }
}

static void post_work(struct devices *devices)
{
    assert(!devices->working);
    devices->working = true;
    worker_post(devices->options.pool, &devices->work);
}

static void moves_done(void *userdata, int result)
{
    struct devices *devices = userdata;

    if (result < 0)
        return; /* devices_free() and devices_cancel() end the copies themselves */
    devices->filling = false;
    post_work(devices);
}

/* Makes an order for the parts of the batch. Return: 0 or -ENOMEM; after -ENOMEM copy_work_done() retries. */
static int order_moves(struct devices *devices)
{
    struct device_move *moves = calloc(devices->n_parts, sizeof(*moves));
    struct order order = {
        .command = {.type = DEVICE_COMMAND_COPY, .copy = {.moves = moves, .n_moves = devices->n_parts}},
        .array = moves,
        .done = moves_done,
        .userdata = devices};

    if (!moves)
        return -ENOMEM;
    for (size_t i = 0; i < devices->n_parts; i++) {
        const struct part *part = &devices->parts[i];
        const struct devices_move *move = part->move;

        order.n_bytes += part->n_bytes;
        moves[i] = (struct device_move){.write = move->write,
                                        .local_rank = move->local_rank,
                                        .kind = move->kind,
                                        .offset_bytes = move->offset_bytes + part->from_bytes,
                                        .segment = BOUNCE,
                                        .segment_offset_bytes = part->bounce_at,
                                        .n_bytes = part->n_bytes,
                                        .point = move->point};
    }
    return add_order(devices, &order);
}

static void copy_work_done(struct work *work)
{
    struct devices *devices = container_of(work, struct devices, work);

    devices->working = false;
    if (devices->cancelled)
        cancel_copies(devices);
    else if (!devices->filling || devices->n_parts == 0)
        batch_done(devices);
    else if (order_moves(devices) < 0)
        post_work(devices); /* a retry, because memory may be free later */
}

static void start_batch(struct devices *devices)
{
    struct copy *copy = devices->copies;
    uint64_t used = 0;

    if (!copy || devices->copying)
        return;
    devices->n_parts = 0;
    while (copy->at < copy->n_moves && devices->n_parts < BATCH_MOVES && used < DEVICES_BOUNCE_BYTES) {
        const struct devices_move *move = &copy->moves[copy->at];
        uint64_t n = MIN(move->n_bytes - copy->at_bytes, DEVICES_BOUNCE_BYTES - used);

        assert(move->local_rank < devices->keep.plan.head->n_local);
        assert((unsigned)move->kind < DEVICE_N_PIECES);
        assert(move->n_bytes <= devices->keep.facts->n_bytes[move->local_rank][move->kind]);
        assert(move->offset_bytes <= devices->keep.facts->n_bytes[move->local_rank][move->kind] - move->n_bytes);
        assert(!move->rounds || (move->write && move->n_bytes % dtype_size(move->dtype) == 0));
        devices->parts[devices->n_parts++] =
            (struct part){.move = move, .from_bytes = copy->at_bytes, .n_bytes = n, .bounce_at = used};
        used = MIN(round_up(used + n, 64), DEVICES_BOUNCE_BYTES);
        copy->at_bytes += n;
        if (copy->at_bytes == move->n_bytes) {
            copy->at++;
            copy->at_bytes = 0;
        }
    }
    devices->copying = devices->filling = true;
    devices->work = (struct work){.run = copy_run, .done = copy_work_done, .n_items = (uint32_t)devices->n_parts};
    post_work(devices);
}

int devices_copy(struct devices *devices, const struct devices_move *moves, size_t n_moves, devices_done done,
                 void *userdata)
{
    struct copy *copy = devices->cancelled ? NULL : malloc(sizeof(*copy) + n_moves * sizeof(*moves));

    if (devices->cancelled)
        return -ECANCELED;
    if (!copy)
        return -ENOMEM;
    *copy = (struct copy){.done = done, .userdata = userdata};
    for (size_t i = 0; i < n_moves; i++)
        if (moves[i].n_bytes > 0)
            copy->moves[copy->n_moves++] = moves[i];
    *devices->last_copy = copy;
    devices->last_copy = &copy->next;
    start_batch(devices);
    return 0;
}

/* ---- trainers -------------------------------------------------------------------------------------------- */

bool devices_awaits(const struct devices *devices, unsigned local_rank, uint64_t point)
{
    assert(local_rank < DEVICE_MAX_LOCAL);
    return point > devices->keep.facts->released[local_rank];
}

static void release_point(struct devices *devices, unsigned local_rank, uint64_t point)
{
    if (!devices_awaits(devices, local_rank, point))
        return;
    devices->keep.facts->released[local_rank] = point;
    if (devices->ready)
        (void)device_release(devices->device, local_rank, point);
}

/* Return: the last point of a lost local rank for which orders wait, or 0. */
static uint64_t find_lost(const struct devices *devices, unsigned local_rank)
{
    uint64_t last = 0;

    for (const struct order *order = devices->orders; order; order = order->next)
        last = MAX(last, lost_point(devices, order, local_rank));
    return last;
}

static void on_lost(uv_timer_t *handle)
{
    struct devices *devices = handle->data;

    for (unsigned i = 0; i < DEVICE_MAX_LOCAL; i++) {
        uint64_t last = find_lost(devices, i);

        if (last == 0)
            continue;
        log_notice("the trainer of local rank %u is gone: orders no longer wait for its GPU's writes", i);
        release_point(devices, i, progress_last(last));
    }
}

void devices_lost_trainer(struct devices *devices, unsigned local_rank)
{
    assert(local_rank < devices->keep.plan.head->n_local);
    devices->lost_ranks |= UINT32_C(1) << local_rank;
    if (devices->ready)
        watch_lost(devices); /* else give() starts the timer */
}

void devices_found_trainer(struct devices *devices, unsigned local_rank)
{
    devices->lost_ranks &= ~(UINT32_C(1) << local_rank);
}

void devices_new_trainer(struct devices *devices, unsigned local_rank, uint64_t incarnation)
{
    devices_found_trainer(devices, local_rank);
    release_point(devices, local_rank, progress_first(incarnation));
}

/* ---- engines --------------------------------------------------------------------------------------------- */

static void engine_is_ready(void *userdata, const char *versions)
{
    struct devices *devices = userdata;
    bool first = !devices->was_ready;

    assert(!devices->ready);
    log_notice("the engine of the GPUs is ready: %s, generation %u, process %jd", versions, devices->generation,
               (intmax_t)device_pid(devices->device));
    snprintf(devices->versions, sizeof(devices->versions), "%s", versions);
    devices->ready = devices->was_ready = true;
    devices->n_collectives = 0;
    (void)device_share(devices->device, BOUNCE, &devices->bounce);
    for (uint32_t i = 0; i < DEVICES_N_SEGMENTS; i++)
        if (devices->shared[i] && devices->shared[i]->n_bytes > 0)
            (void)device_share(devices->device, i, devices->shared[i]);
    for (struct order *order = devices->orders; order; order = order->next)
        give(devices, order);
    devices->options.ops.ready(devices->options.ops.userdata, first);
    devices->options.ops.after(devices->options.ops.userdata);
}

static void engine_has_done(void *userdata, const struct device_done *done)
{
    struct devices *devices = userdata;
    const struct devices_ops ops = devices->options.ops;
    struct order *order = remove_order(devices, done->tag);

    assert(order); /* gpu-engine.c accepts no other reports */
    devices->n_failures = 0;
    end_order(order, 0);
    ops.after(ops.userdata);
}

static void engine_puts(void *userdata, const char *key, const uint8_t *value, size_t n_bytes)
{
    struct devices *devices = userdata;
    const struct devices_ops ops = devices->options.ops;

    ops.put(ops.userdata, key, value, n_bytes);
    ops.after(ops.userdata);
}

/* Return: true if a failed engine is replaced. With several nodes, the first engines may have failed only because
 * another node's daemon was killed with its engine. */
static bool may_be_replaced(const struct devices *devices)
{
    return devices->was_ready || (devices->options.n_nodes > 1 && devices->n_failures < FIRST_TRIES);
}

static void has_failed(struct devices *devices, const char *why)
{
    const struct devices_ops ops = devices->options.ops;

    devices->ready = false;
    devices->wanted = 0;
    devices->n_failures++;
    devices->n_all_failures++;
    ops.failed(ops.userdata, may_be_replaced(devices) ? devices->generation + 1 : 0, why);
    ops.after(ops.userdata);
}

static void engine_has_failed(void *userdata, const struct device_failure *failure)
{
    struct devices *devices = userdata;
    char why[2 * DEVICE_MAX_WHAT_BYTES];

    snprintf(why, sizeof(why), failure->said ? "the engine of the GPUs says: %s" : "the engine of the GPUs %s",
             failure->what);
    device_close(steal_ptr(devices->device)); /* engine_has_ended() starts the next engine */
    has_failed(devices, why);
}

static void start_engine(struct devices *devices);

static void on_pause(uv_timer_t *handle)
{
    start_engine(handle->data);
}

static void start_later(struct devices *devices)
{
    unsigned shift = MIN(devices->n_failures, 16u);
    uint64_t pause_ms =
        devices->n_failures < 2 ? 0 : MIN((uint64_t)FIRST_PAUSE_MS << (shift - 2), (uint64_t)DEVICES_MAX_PAUSE_MS);

    /* The loop starts the engine, so that a start that fails at once is handled like any other failure. */
    (void)uv_timer_start(&devices->pause, on_pause, pause_ms, 0);
}

static void free_now(struct devices *devices)
{
    if (devices->keep.in_use || devices->n_timers > 0)
        return;
    assert(devices->closing);
    assert(!devices->device);
    assert(!devices->working);
    device_keep_deinit(&devices->keep);
    segment_deinit(&devices->bounce);
    free(devices);
}

static bool is_collective(const struct order *order)
{
    return order->command.type == DEVICE_COMMAND_REDUCE || order->command.type == DEVICE_COMMAND_GATHER ||
           order->command.type == DEVICE_COMMAND_FETCH;
}

/* Cancels the orders that move data between ranks. Their callers submit them again. */
static void cancel_collectives(struct devices *devices)
{
    struct order *ended = NULL, **link = &devices->orders;

    devices->last_order = &devices->orders;
    while (*link) {
        struct order *order = *link;

        if (is_collective(order)) {
            *link = order->next;
            assert(devices->n_waiting_bytes >= order->n_bytes);
            devices->n_waiting_bytes -= order->n_bytes;
            order->next = ended;
            ended = order;
        } else {
            link = devices->last_order = &order->next;
        }
    }
    while (ended) {
        struct order *order = ended;

        ended = order->next;
        end_order(order, -ECANCELED);
    }
}

/* Ends an order whose end the engine had reported, if the report was read only after the engine was killed. */
static void engine_had_done(void *userdata, const struct device_done *done)
{
    struct devices *devices = userdata;
    struct order *order = remove_order(devices, done->tag);

    if (order)
        end_order(order, 0);
}

/*
 * Call it when the engine has ended. Leaves the engine's unfinished orders to the next engine. With several nodes,
 * cancels orders that move data between ranks; their callers submit them again.
 */
static void forget_engine(struct devices *devices)
{
    for (struct order *order = devices->orders; order; order = order->next)
        order->tag = 0;
    if (devices->options.n_nodes > 1)
        cancel_collectives(devices);
}

static void engine_has_ended(void *userdata)
{
    struct devices *devices = userdata;
    const struct devices_ops ops = devices->options.ops;

    if (devices->closing) {
        free_now(devices);
        return;
    }
    forget_engine(devices);
    if (!devices->cancelled && (devices->options.n_nodes > 1 ? devices->wanted > 0 : devices->was_ready))
        start_later(devices);
    ops.after(ops.userdata);
}

/* Kills the engine of an earlier daemon if it still runs. Return: true if it was running, so it has not ended yet. */
static bool predecessor_runs(const struct devices *devices)
{
    const struct device_facts *facts = devices->keep.facts;

    if (devices->generation > 0 || facts->pid <= 0 || child_start_time(facts->pid) != facts->start_time)
        return false;
    (void)kill((pid_t)facts->pid, SIGKILL);
    return true;
}

static void note_engine(struct devices *devices)
{
    struct device_facts *facts = devices->keep.facts;

    facts->pid = device_pid(devices->device);
    facts->start_time = child_start_time(facts->pid);
}

static void start_engine(struct devices *devices)
{
    const struct device_options options = {
        .loop = devices->options.loop,
        .generation = devices->wanted > 0 ? devices->wanted : devices->generation + 1,
        .node = devices->options.node,
        .n_nodes = devices->options.n_nodes,
        .connect_timeout_ms = CONNECT_MS,
        .keep = &devices->keep,
        .traffic = devices->traffic,
        .ops = {.ready = engine_is_ready,
                .done = engine_has_done,
                .put = engine_puts,
                .failed = engine_has_failed,
                .late = engine_had_done,
                .ended = engine_has_ended,
                .userdata = devices},
    };
    bool again = devices->was_ready && devices->options.n_nodes == 1;
    char why[256];

    assert(!devices->device);
    assert(devices->options.n_nodes == 1 || devices->wanted > 0);
    assert(options.generation > devices->generation);
    if (predecessor_runs(devices)) {
        (void)uv_timer_start(&devices->pause, on_pause, PREDECESSOR_MS, 0);
        return;
    }
    if (devices->generation == 0 && devices->options.n_nodes > 1)
        device_keep_forget_ops(&devices->keep);
    devices->generation = options.generation;
    if (device_new(&devices->device, &options, why, sizeof(why)) == 0) {
        note_engine(devices);
        if (devices->early.n_bytes > 0)
            (void)device_value(devices->device, devices->early.key, devices->early.value, devices->early.n_bytes);
        devices->early.n_bytes = 0;
        return;
    }
    devices->device = NULL;
    if (again)
        start_later(devices); /* before has_failed(), whose callback may free devices */
    has_failed(devices, why);
}

/* ---- life ------------------------------------------------------------------------------------------------ */

int devices_new(struct devices **out, const struct devices_options *options)
{
    struct devices *devices = calloc(1, sizeof(*devices));
    int r = devices ? device_keep_init(&devices->keep, &options->plan) : -ENOMEM;

    if (r == 0) {
        r = segment_init(&devices->bounce, "device.bounce", DEVICES_BOUNCE_BYTES);
        if (r < 0)
            device_keep_deinit(&devices->keep);
    }
    if (r < 0) {
        free(devices);
        return r;
    }
    devices->options = *options;
    devices->options.plan.layout = NULL; /* it may be freed after this call */
    devices->was_ready = device_keep_was_found(&devices->keep);
    devices->last_order = &devices->orders;
    devices->last_copy = &devices->copies;
    devices->pause.data = devices->lost.data = devices;
    *out = devices;
    return 0;
}

int devices_reserve(const struct devices *devices)
{
    int r = device_keep_reserve(&devices->keep);

    return r < 0 ? r : segment_reserve(&devices->bounce, 0, devices->bounce.n_bytes);
}

void devices_share(struct devices *devices, enum devices_segment number, const struct segment *segment)
{
    assert((unsigned)number > BOUNCE && number < DEVICES_N_SEGMENTS);
    devices->shared[number] = segment;
}

static void init_timers(struct devices *devices)
{
    uv_timer_init(devices->options.loop, &devices->pause);
    uv_timer_init(devices->options.loop, &devices->lost);
    devices->n_timers = 2;
}

void devices_start(struct devices *devices)
{
    assert(devices->options.n_nodes == 1);
    assert(devices->n_timers == 0);
    init_timers(devices);
    (void)uv_timer_start(&devices->pause, on_pause, 0, 0);
}

void devices_next(struct devices *devices, uint32_t generation)
{
    assert(devices->options.n_nodes > 1);
    assert(generation > devices->generation);
    if (devices->n_timers == 0)
        init_timers(devices);
    devices_stop(devices);
    devices->wanted = generation;
    if (!devices->keep.in_use && !devices->cancelled)
        start_later(devices); /* else engine_has_ended() starts the engine */
}

void devices_value(struct devices *devices, const char *key, const uint8_t *value, size_t n_bytes)
{
    struct early *early = &devices->early;

    if (devices->device) {
        (void)device_value(devices->device, key, value, n_bytes);
        return;
    }
    if (devices->wanted == 0 || n_bytes > sizeof(early->value) || strlen(key) >= sizeof(early->key))
        return;
    strcpy(early->key, key);
    memcpy(early->value, value, n_bytes);
    early->n_bytes = n_bytes;
}

static void on_timer_closed(uv_handle_t *handle)
{
    struct devices *devices = handle->data;

    assert(devices->n_timers > 0);
    if (--devices->n_timers == 0)
        free_now(devices);
}

static void cancel_orders(struct devices *devices)
{
    while (devices->orders) {
        struct order *order = devices->orders;

        devices->orders = order->next;
        end_order(order, -ECANCELED);
    }
    devices->last_order = &devices->orders;
}

void devices_stop(struct devices *devices)
{
    devices->ready = false;
    devices->wanted = 0;
    devices->early.n_bytes = 0;
    if (devices->n_timers == 0)
        return; /* nothing was started, and a worker may still be reserving the keep */
    (void)uv_timer_stop(&devices->pause);
    device_close(steal_ptr(devices->device));
    if (!devices->keep.in_use) /* else engine_has_ended() does it, when all reports have been read */
        forget_engine(devices);
}

void devices_cancel(struct devices *devices)
{
    devices->cancelled = true;
    devices_stop(devices);
    cancel_orders(devices);
    if (!devices->working) /* else copy_work_done() does it, because workers still use the copies */
        cancel_copies(devices);
}

void devices_free(struct devices *devices)
{
    if (!devices)
        return;
    devices->closing = true;
    devices->ready = false;
    cancel_orders(devices);
    cancel_copies(devices);
    device_close(steal_ptr(devices->device));
    device_keep_let_go(&devices->keep);
    if (devices->n_timers == 0) {
        free_now(devices);
        return;
    }
    uv_close((uv_handle_t *)&devices->pause, on_timer_closed);
    uv_close((uv_handle_t *)&devices->lost, on_timer_closed);
}

bool devices_were_found(const struct devices *devices)
{
    return device_keep_was_found(&devices->keep);
}

struct device_keep *devices_keep(struct devices *devices)
{
    return &devices->keep;
}

struct devices_status devices_status(const struct devices *devices)
{
    return (struct devices_status){
        .ready = devices->ready,
        .generation = devices->generation,
        .pid = devices->device ? device_pid(devices->device) : 0,
        .versions = devices->versions,
        .n_failures = devices->n_all_failures,
        .traffic = devices->traffic,
    };
}
