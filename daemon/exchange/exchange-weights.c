/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Weights between nodes: node 0 sends initial weights to all nodes, the owners send updated weights to all nodes, and
 * node 0 sends rank 0's edits of a write window, including edited state.
 */

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "daemon/exchange/exchange-inside.h"
#include "daemon/job/model/model.h"
#include "daemon/memory/state-edits.h"
#include "daemon/step/executor.h"

/* ---- weights ------------------------------------------------------------------------------------------- */

/* Return: a move of the weights of a bucket that a node owns. */
static struct engine_move bucket_weights(const struct exchange *exchange, enum exchange_segment segment, uint32_t b,
                                         unsigned node)
{
    const struct layout_bucket *bucket = &exchange->job->layout->buckets[b];
    const struct span *span = &exchange->spans[node];
    uint64_t start, n_elems = layout_owned_elems(exchange->job->layout, b, span->first, span->n, &start);
    size_t size = dtype_size(bucket->dtype);

    return (struct engine_move){
        .segment = segment, .offset_bytes = bucket->weight_offset_bytes + start * size, .n_bytes = n_elems * size};
}

/* Adds the move from node 0 to `node`, if `node` lacks the data. Node 0 adds a send, and `node` adds a receive. */
static void spread_to(struct exchange *exchange, const struct exchange_said *said, unsigned node,
                      struct engine_move move)
{
    if (exchange_has_arrived(said, node) || (exchange->self != 0 && exchange->self != node))
        return;
    move.send = exchange->self == 0;
    move.node = exchange->self == 0 ? node : 0;
    exchange_add_move(exchange, move);
}

/*
 * Call it when initial weights are sent again, because a daemon was replaced. Drops weights that have arrived, so that
 * they are not adopted twice. If they are already being adopted, the new weights wait (exchange_adopt()).
 */
static void forget_older(struct exchange *exchange)
{
    struct motion *next;

    for (struct motion *motion = exchange->motions; motion; motion = next) {
        next = motion->next;
        if (motion->kind == MOTION_SPREAD && motion->arrived && !motion->working)
            exchange_drop_motion(motion);
    }
}

/*
 * Stages 1 and 2: all nodes get all weights. Stage 3: each node gets the weights that it owns, and the frozen
 * parameters, which follow the buckets in memory.
 */
const char *exchange_spread(struct exchange *exchange, const struct exchange_said *said)
{
    const struct layout *layout = exchange->job->layout;
    struct motion *motion;
    bool owned_only = config_stage(exchange->job->config) == 3;
    enum exchange_segment segment = owned_only ? EXCHANGE_SPREADING : EXCHANGE_WEIGHTS;
    uint64_t start = owned_only ? layout_frozen_offset_bytes(layout) : 0;

    if (exchange_is_said_twice(exchange, said))
        return EXCHANGE_SAID_TWICE;
    forget_older(exchange);
    motion = exchange_add_said(exchange, MOTION_SPREAD, said);
    if (!motion)
        return EXCHANGE_NO_MEMORY;
    for (unsigned node = 1; node < exchange->n_nodes; node++)
        spread_to(
            exchange, said, node,
            (struct engine_move){.segment = segment, .offset_bytes = start, .n_bytes = layout->weight_bytes - start});
    exchange_post_motion(exchange, motion);
    for (uint32_t b = 0; owned_only && b < layout->n_buckets; b++) {
        for (unsigned node = 1; node < exchange->n_nodes; node++)
            spread_to(exchange, said, node, bucket_weights(exchange, segment, b, node));
        exchange_post_motion(exchange, motion);
    }
    exchange_progress(motion);
    return NULL;
}

const char *exchange_gather(struct exchange *exchange, const struct exchange_said *said)
{
    struct motion *motion;

    if (config_stage(exchange->job->config) == 3)
        return "GATHER: is not allowed in stage 3";
    if (exchange_is_said_twice(exchange, said))
        return EXCHANGE_SAID_TWICE;
    motion = exchange_add_said(exchange, MOTION_GATHER, said);
    if (!motion)
        return EXCHANGE_NO_MEMORY;
    if (exchange->job->executor->on_gpus && exchange->job->layout->n_buckets > 0)
        return exchange_give_to_devices(motion);
    for (uint32_t b = 0; b < exchange->job->layout->n_buckets; b++) {
        for (unsigned node = 0; node < exchange->n_nodes; node++) {
            struct engine_move move = bucket_weights(exchange, EXCHANGE_WEIGHTS, b, exchange->self);

            if (node == exchange->self)
                continue;
            move.node = node;
            move.send = true;
            if (!exchange_has_arrived(said, node))
                exchange_add_move(exchange, move);
            move = bucket_weights(exchange, EXCHANGE_WEIGHTS, b, node);
            move.node = node;
            if (!motion->serves)
                exchange_add_move(exchange, move);
        }
        exchange_post_motion(exchange, motion);
    }
    exchange_progress(motion);
    return NULL;
}

int exchange_init(struct exchange *exchange, const struct request_init *init, const void *weights)
{
    const struct layout_param *param = &exchange->job->layout->params[init->param];
    size_t size = dtype_size(param->dtype);
    uint64_t offset = param->weight_offset_bytes + init->start_elem * size, n_bytes = init->n_elems * size;
    uint64_t page = offset / page_size() * page_size();
    int r;

    if (config_stage(exchange->job->config) != 3 || n_bytes == 0)
        return 0;
    r = segment_reserve(&exchange->spreading, page, round_up(offset + n_bytes, page_size()) - page);
    assert(r < 0 || offset + n_bytes <= exchange->spreading.n_bytes);
    if (r == 0)
        memcpy(exchange->spreading.map + offset, weights, n_bytes);
    return r;
}

void exchange_spread_is_over(struct exchange *exchange)
{
    if (exchange->spreading.n_bytes > 0)
        segment_punch(&exchange->spreading, 0, exchange->spreading.n_bytes);
}

/* ---- adopting ------------------------------------------------------------------------------------------ */

static const uint8_t *initial_weights(const struct exchange *exchange)
{
    return config_stage(exchange->job->config) == 3 ? exchange->spreading.map : exchange->job->state->weights.map;
}

/* Return: whether weights are being adopted. Adoptions run one at a time, so that no other adoption still writes
 * weights when this node reports one. */
static bool is_adopting(const struct exchange *exchange)
{
    const struct motion *motion = exchange->motions;

    while (motion && !(motion->kind == MOTION_SPREAD && motion->working))
        motion = motion->next;
    return motion;
}

static void adopt_next(struct exchange *exchange)
{
    struct motion *motion = exchange->motions;

    while (motion && !(motion->kind == MOTION_SPREAD && motion->arrived))
        motion = motion->next;
    if (motion)
        exchange_adopt(motion);
}

static void adopted(void *userdata, int result)
{
    struct motion *motion = userdata;
    struct exchange *exchange = motion->exchange;
    struct job *job = exchange->job;

    assert(motion->working);
    assert(job->work.n_io > 0);
    job->work.n_io--;
    motion->working = false;
    if (result == 0) {
        exchange_finish(motion);
    } else if (result != -ECANCELED) { /* node 0 sends the weights again */
        motion->arrived = false;
        exchange->ops.wrong(exchange->ops.userdata, EXCHANGE_NO_MEMORY);
    }
    if (result != -ECANCELED)
        adopt_next(exchange);
    job_todo(job);
}

void exchange_adopt(struct motion *motion)
{
    struct job *job = motion->exchange->job;

    assert(motion->kind == MOTION_SPREAD && motion->arrived);
    if (is_adopting(motion->exchange))
        return;
    motion->working = true;
    job->work.n_io++;
    if (executor_adopt(job->executor, initial_weights(motion->exchange), adopted, motion) == 0)
        return;
    job->work.n_io--;
    motion->working = motion->arrived = false;
    motion->exchange->ops.wrong(motion->exchange->ops.userdata, EXCHANGE_NO_MEMORY);
}

/* ---- write windows ------------------------------------------------------------------------------------- */

void exchange_window(struct exchange *exchange, const struct segment *segment)
{
    exchange_share(exchange, EXCHANGE_SPREADING, segment);
    if (!segment)
        exchange_share(exchange, EXCHANGE_READING, NULL);
}

/* Return: a move of a parameter's elements that a node owns. offset_bytes: the parameter's place in the segment. */
static struct engine_move owned_elems(const struct exchange *exchange, uint32_t p, unsigned node, uint64_t offset_bytes,
                                      size_t elem_bytes)
{
    uint64_t start, n = exchange_owned(exchange, node, p, &start);

    return (struct engine_move){.offset_bytes = offset_bytes + start * elem_bytes, .n_bytes = n * elem_bytes};
}

static void write_weights(struct exchange *exchange, const struct exchange_said *said, uint32_t p)
{
    const struct layout_param *param = &exchange->job->layout->params[p];
    bool range = config_stage(exchange->job->config) == 3;

    for (unsigned node = 1; node < exchange->n_nodes; node++) {
        struct engine_move move =
            owned_elems(exchange, p, node, range ? param->range_offset_bytes : param->weight_offset_bytes,
                        dtype_size(param->dtype));

        move.segment = EXCHANGE_SPREADING;
        spread_to(exchange, said, node, move);
    }
}

static void write_state(struct exchange *exchange, const struct exchange_said *said, uint64_t written,
                        const struct state_edits *edits)
{
    uint32_t p = (uint32_t)(written >> 8);
    struct state_edits_place place = state_edits_place(edits, p, (enum state_kind)(written & 0xff));

    for (unsigned node = 1; node < exchange->n_nodes; node++) {
        struct engine_move move = owned_elems(exchange, p, node, place.offset_bytes, sizeof(float));

        move.segment = EXCHANGE_READING;
        spread_to(exchange, said, node, move);
    }
}

const char *exchange_write(struct exchange *exchange, const struct exchange_said *said, const uint64_t *written,
                           size_t n_written, const struct state_edits *edits)
{
    struct motion *motion = exchange_add_said(exchange, MOTION_WRITE, said);

    if (!motion)
        return EXCHANGE_NO_MEMORY;
    if (edits)
        exchange_share(exchange, EXCHANGE_READING, &edits->segment);
    for (uint32_t p = 0; p < exchange->job->layout->n_params; p++) {
        write_weights(exchange, said, p);
        exchange_post_motion(exchange, motion);
    }
    for (size_t i = 0; i < n_written; i++) {
        write_state(exchange, said, written[i], edits);
        exchange_post_motion(exchange, motion);
    }
    exchange_progress(motion);
    return NULL;
}
