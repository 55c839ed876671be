/* SPDX-License-Identifier: Apache-2.0 */

/* The exchange between nodes: its life, its orders to the engine, and the motions of parcels. */

#include "daemon/exchange/exchange.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/budget/exchange-plan.h"
#include "core/config/config.h"
#include "daemon/exchange/exchange-inside.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/memory/ring.h"
#include "daemon/step/executor.h"

_Static_assert((int)NODE_MAX_NODES == (int)CONFIG_MAX_NODES && (int)STEP_MAX_RANKS == (int)CONFIG_MAX_PIECES,
               "what config admits, a mask must hold");
_Static_assert((int)SUBTREE_MAX *(int)NODE_MAX_NODES + (int)STEP_MAX_RANKS <= (int)ENGINE_MAX_MOVES,
               "a parcel is one order: each own piece to each node, and each other piece");

enum {
    MOVE_BASE_MS = 1800,       /* with ENGINE_GRACE_MS, a frozen engine is detected within 3 s */
    MOVE_BYTES_PER_MS = 10000, /* a link slower than 10 MB/s counts as frozen; picked */
};

/* ---- who has what -------------------------------------------------------------------------------------- */

uint64_t exchange_owned(const struct exchange *exchange, unsigned node, uint32_t param, uint64_t *start)
{
    const struct layout *layout = exchange->job->layout;
    const struct layout_param *p = &layout->params[param];
    uint64_t n = p->n_elems, slice;

    assert(node < exchange->n_nodes);
    *start = 0;
    if (p->trainable) {
        n = exchange_plan_owned(layout, exchange->spans[node], p->bucket, p->offset_elems, p->n_elems, start);
        *start = n > 0 ? *start - p->offset_elems : 0;
    } else if (config_partitions_all(exchange->job->config)) {
        slice = layout_frozen_slice_elems(p->n_elems, layout->world_size);
        *start = MIN(slice * exchange->spans[node].first, p->n_elems);
        n = MIN(slice * (exchange->spans[node].first + exchange->spans[node].n), p->n_elems) - *start;
    }
    assert(*start + n <= p->n_elems);
    return n;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static void find_sources(struct exchange *exchange, const struct config *config)
{
    for (unsigned i = 0; i < exchange->n_nodes; i++) {
        struct subtree pieces[SUBTREE_MAX];
        unsigned n;

        exchange->spans[i] = (struct span){config_first_rank_of(config, i), config->world.nodes.items[i].ranks};
        for (unsigned k = 0; exchange_plan_on_devices(config) && k < exchange->spans[i].n; k++)
            exchange->sources[exchange->n_sources++] =
                (struct source){.node = i, .first_rank = exchange->spans[i].first + k, .piece = k};
        if (exchange_plan_on_devices(config))
            continue;
        n = subtree_find(config->world.size, exchange->spans[i].first, exchange->spans[i].n, pieces);
        for (unsigned k = 0; k < n; k++)
            exchange->sources[exchange->n_sources++] =
                (struct source){.node = i, .first_rank = pieces[k].first, .piece = k};
    }
}

int exchange_new(struct exchange **out, struct job *job, const struct exchange_ops *ops)
{
    struct exchange *exchange = calloc(1, sizeof(*exchange));

    assert(exchange_plan_n_sources(job->config) <= STEP_MAX_RANKS); /* config rejects more */
    if (!exchange)
        return -ENOMEM;
    exchange->job = job;
    exchange->ops = *ops;
    exchange->incoming = exchange->serving = exchange->spreading = exchange->nothing = SEGMENT_NULL;
    exchange->n_nodes = (unsigned)job->config->world.nodes.n_items;
    exchange->self = job->config->world.node;
    assert(exchange->n_nodes <= NODE_MAX_NODES);
    assert(exchange->self < exchange->n_nodes);
    exchange->spans = calloc(exchange->n_nodes, sizeof(*exchange->spans));
    exchange->moves = calloc(ENGINE_MAX_MOVES, sizeof(*exchange->moves));
    if (!exchange->spans || !exchange->moves) {
        exchange_free(exchange);
        return -ENOMEM;
    }
    find_sources(exchange, job->config);
    assert(exchange->n_sources == exchange_plan_n_sources(job->config));
    *out = exchange;
    return 0;
}

static void motion_free(struct motion *motion)
{
    assert(!motion->working); /* else workers or GPUs still use the motion */
    assert(!motion->ring);
    assert(motion->incoming < 0 || motion->exchange->incoming_taken[motion->incoming]);
    if (motion->incoming >= 0)
        motion->exchange->incoming_taken[motion->incoming] = false;
    free(motion->masks);
    free(motion->gathered);
    free(motion);
}

void exchange_free(struct exchange *exchange)
{
    if (!exchange)
        return;
    exchange_drop(exchange);
    free(exchange->spans);
    free(exchange->moves);
    free(exchange);
}

/* Sets an empty segment to NULL, because it has no descriptor. */
static void set_segment(struct exchange *exchange, enum exchange_segment number, const struct segment *segment)
{
    exchange->segments[number] = segment && segment->n_bytes > 0 ? segment : NULL;
}

int exchange_form(struct exchange *exchange)
{
    const struct job *job = exchange->job;
    const struct layout *layout = job->layout;
    uint64_t start;
    int r;

    assert(!exchange->parcels); /* exchange_drop() has freed the parcels of the last job */
    assert(!exchange->motions);
    exchange->parcels = calloc(layout->n_parcels + 1, sizeof(*exchange->parcels));
    if (!exchange->parcels)
        return -ENOMEM;
    for (uint32_t p = 0; p < layout->n_parcels; p++) {
        struct moving_parcel *parcel = &exchange->parcels[p];

        parcel->n_elems =
            exchange_plan_owned_part(layout, &layout->parcels[p], exchange->spans[exchange->self], &start);
        assert(parcel->n_elems == 0 || start >= layout->parcels[p].offset_elems);
        parcel->start = start - layout->parcels[p].offset_elems;
    }
    exchange->incoming_elems = exchange_plan_incoming_elems(job->config, layout);
    /* Pieces that move between GPUs do not arrive in this memory. */
    r = segment_init(&exchange->incoming, "incoming",
                     job->executor->on_gpus ? 0 : exchange_plan_incoming_bytes(job->config, layout));
    if (r == 0 && config_stage(job->config) == 3)
        r = segment_init_kept(&exchange->spreading, "spreading",
                              layout->weight_bytes); /* no pages until exchange_init() or the engine writes */
    if (r == 0)
        r = segment_init(&exchange->nothing, "nothing", 1);
    if (r == 0)
        r = exchange_form_serving(exchange);
    set_segment(exchange, EXCHANGE_STAGING, &job->step->staging_segment);
    set_segment(exchange, EXCHANGE_INCOMING, &exchange->incoming);
    set_segment(exchange, EXCHANGE_WEIGHTS, &job->state->weights);
    set_segment(exchange, EXCHANGE_STATE, &job->state->state);
    set_segment(exchange, EXCHANGE_POOL, job->executor->landing);
    set_segment(exchange, EXCHANGE_SERVING, &exchange->serving);
    set_segment(exchange, EXCHANGE_SPREADING, &exchange->spreading);
    return r;
}

/* Ends the loan of the parcel's slot, if it is lent. */
static void end_loan(struct moving_parcel *parcel)
{
    struct ring *ring = steal_ptr(parcel->ring);

    if (ring)
        ring_unhold(ring);
}

void exchange_drop(struct exchange *exchange)
{
    for (uint32_t p = 0; exchange->parcels && p < exchange->job->layout->n_parcels; p++)
        end_loan(&exchange->parcels[p]);
    exchange->shared_ring = NULL;
    while (exchange->motions) {
        struct motion *motion = exchange->motions;

        assert(!motion->working);
        exchange->motions = motion->next;
        motion_free(motion);
    }
    exchange_drop_serving(exchange);
    segment_deinit(&exchange->incoming);
    segment_deinit(&exchange->spreading);
    segment_deinit(&exchange->nothing);
    exchange->incoming = exchange->spreading = exchange->nothing = SEGMENT_NULL;
    memset(exchange->segments, 0, sizeof(exchange->segments));
    free(steal_ptr(exchange->parcels));
    exchange->n_waiting_bytes = 0;
}

const struct segment *const *exchange_segments(const struct exchange *exchange)
{
    return exchange->segments;
}

/* ---- orders -------------------------------------------------------------------------------------------- */

void exchange_add_move(struct exchange *exchange, struct engine_move move)
{
    assert(move.node < exchange->n_nodes && move.node != exchange->self);
    assert(exchange->n_moves < ENGINE_MAX_MOVES);
    if (move.n_bytes > 0)
        exchange->moves[exchange->n_moves++] = move;
}

struct motion *exchange_add_motion(struct exchange *exchange, enum motion_kind kind, uint64_t tag)
{
    struct motion *motion = calloc(1, sizeof(*motion));

    if (!motion)
        return NULL;
    motion->kind = kind;
    motion->exchange = exchange;
    motion->tag = tag;
    motion->attempt = exchange->job->ledger.attempt;
    motion->incoming = -1;
    motion->next = exchange->motions;
    exchange->motions = motion;
    return motion;
}

struct motion *exchange_add_said(struct exchange *exchange, enum motion_kind kind, const struct exchange_said *said)
{
    struct motion *motion = exchange_add_motion(exchange, kind, said->tag);

    if (!motion)
        return NULL;
    motion->parcel = said->parcel;
    motion->micro_batch = said->micro_batch;
    motion->pass = said->pass;
    motion->serves = said->arrived >> exchange->self & 1;
    return motion;
}

bool exchange_post(struct exchange *exchange, uint64_t tag, enum traffic_kind traffic)
{
    struct engine_order order = {.tag = tag, .kind = traffic, .moves = exchange->moves, .n_moves = exchange->n_moves};

    exchange->n_moves = 0;
    if (order.n_moves == 0)
        return false;
    for (size_t i = 0; i < order.n_moves; i++)
        exchange->n_waiting_bytes += exchange->moves[i].n_bytes;
    /* Orders wait for each other, so the timeout of each order covers the bytes of all unfinished orders. */
    order.timeout_ms = (uint32_t)MIN(MOVE_BASE_MS + exchange->n_waiting_bytes / MOVE_BYTES_PER_MS, (uint64_t)INT32_MAX);
    /* A slot of `serving` is reused when the engine has done the order. Other data stay until they have arrived. */
    order.lasting = order.moves[0].segment != EXCHANGE_SERVING;
    (void)failpoint("order");
    (void)exchange->ops.order(exchange->ops.userdata, &order);
    return true;
}

void exchange_post_motion(struct exchange *exchange, struct motion *motion)
{
    static const enum traffic_kind traffic[] = {
        [MOTION_PARCEL] = TRAFFIC_REDUCE_SCATTER, [MOTION_SPREAD] = TRAFFIC_BROADCAST,
        [MOTION_GATHER] = TRAFFIC_ALL_GATHER,     [MOTION_FETCH] = TRAFFIC_FETCH,
        [MOTION_WRITE] = TRAFFIC_BROADCAST,
    };

    if (!exchange_post(exchange, motion->tag + motion->n_orders++, traffic[motion->kind]))
        motion->n_done++;
}

bool exchange_is_said_twice(const struct exchange *exchange, const struct exchange_said *said)
{
    for (const struct motion *motion = exchange->motions; motion; motion = motion->next)
        if (motion->tag == said->tag && !motion->serves && !exchange_has_arrived(said, exchange->self))
            return true;
    return false;
}

/* ---- a parcel ------------------------------------------------------------------------------------------ */

static bool is_present(const struct exchange_said *said, unsigned source)
{
    bool present = said->n_masks == 0;

    for (size_t k = 0; !present && k < said->n_masks; k++)
        present = said->masks[k] >> source & 1;
    return present;
}

/* Return: the first element in `incoming` of another node's piece. index: the piece's number among these pieces. */
static uint64_t incoming_elem(const struct motion *motion, unsigned index)
{
    const struct exchange *exchange = motion->exchange;

    assert(motion->incoming >= 0);
    return exchange->incoming_elems * (unsigned)motion->incoming + exchange->parcels[motion->parcel].n_elems * index;
}

/* Uses the first free slot, because it is likeliest still in a cache. Return: false if no slot is free. */
static bool take_incoming(struct motion *motion)
{
    struct exchange *exchange = motion->exchange;

    assert(motion->incoming < 0);
    for (int i = 0; i < NODE_MAX_MOVING; i++)
        if (!exchange->incoming_taken[i]) {
            exchange->incoming_taken[i] = true;
            motion->incoming = i;
            return true;
        }
    return false;
}

static unsigned index_among_others(const struct exchange *exchange, unsigned source)
{
    unsigned index = 0;

    for (unsigned i = 0; i < source; i++)
        index += exchange->sources[i].node != exchange->self;
    return index;
}

/* Shares a segment under that number with the engine. NULL or an empty segment: the engine unmaps its old segment. */
static void share_segment(struct exchange *exchange, enum exchange_segment number, const struct segment *segment)
{
    (void)exchange->ops.share(exchange->ops.userdata, number,
                              segment && segment->n_bytes > 0 ? segment : &exchange->nothing);
}

void exchange_share(struct exchange *exchange, enum exchange_segment number, const struct segment *segment)
{
    set_segment(exchange, number, segment);
    share_segment(exchange, number, segment);
}

static void share_ring(struct exchange *exchange, const struct ring *ring)
{
    if (exchange->shared_ring == ring)
        return;
    exchange->shared_ring = ring;
    share_segment(exchange, EXCHANGE_RING, ring ? &ring->ring : NULL);
    share_segment(exchange, EXCHANGE_OVERFLOW, ring ? &ring->overflow : NULL);
}

static bool lies_in(const struct segment *segment, const uint8_t *data)
{
    return data >= segment->map && data < segment->map + segment->n_bytes;
}

/* Return: a move with the segment and offset_bytes of this node's piece of a parcel. */
static struct engine_move locate_piece(struct exchange *exchange, uint32_t parcel, unsigned piece)
{
    const struct step *step = exchange->job->step;
    const uint8_t *data = step_piece(step, parcel, piece);
    const struct ring *ring = exchange->parcels[parcel].ring;

    if (!step_sends_slots(step, parcel))
        return (struct engine_move){.segment = EXCHANGE_STAGING, .offset_bytes = (uint64_t)(data - step->staging)};
    share_ring(exchange, ring);
    if (lies_in(&ring->ring, data))
        return (struct engine_move){.segment = EXCHANGE_RING, .offset_bytes = (uint64_t)(data - ring->ring.map)};
    assert(lies_in(&ring->overflow, data));
    return (struct engine_move){.segment = EXCHANGE_OVERFLOW, .offset_bytes = (uint64_t)(data - ring->overflow.map)};
}

/* Sends each owner its slice of this node's piece. */
static void send_piece(struct exchange *exchange, const struct exchange_said *said, const struct source *source)
{
    const struct step *step = exchange->job->step;
    const struct layout_parcel *parcel = &step->layout->parcels[said->parcel];
    const struct engine_move piece = locate_piece(exchange, said->parcel, source->piece);
    size_t size = dtype_size(step->wire);
    uint64_t start;

    for (unsigned node = 0; node < exchange->n_nodes; node++) {
        uint64_t n = exchange_plan_owned_part(step->layout, parcel, exchange->spans[node], &start);

        if (node == exchange->self || exchange_has_arrived(said, node))
            continue;
        exchange_add_move(
            exchange, (struct engine_move){.node = node,
                                           .send = true,
                                           .segment = piece.segment,
                                           .offset_bytes = piece.offset_bytes + (start - parcel->offset_elems) * size,
                                           .n_bytes = n * size});
    }
}

static void receive_piece(const struct motion *motion, unsigned source)
{
    struct exchange *exchange = motion->exchange;
    size_t size = dtype_size(exchange->job->step->wire);

    if (motion->incoming < 0)
        return;
    exchange_add_move(exchange, (struct engine_move){
                                    .node = exchange->sources[source].node,
                                    .segment = EXCHANGE_INCOMING,
                                    .offset_bytes = incoming_elem(motion, index_among_others(exchange, source)) * size,
                                    .n_bytes = exchange->parcels[motion->parcel].n_elems * size,
                                });
}

/* Orders a parcel: sends this node's pieces to the owners, and receives other nodes' pieces of the owned elements. */
static void order_parcel(struct motion *motion)
{
    struct exchange *exchange = motion->exchange;
    const struct exchange_said said = {
        .tag = motion->tag,
        .arrived = motion->elsewhere,
        .parcel = motion->parcel,
        .masks = motion->masks,
        .n_masks = exchange->job->layout->parcels[motion->parcel].n_parts,
    };

    for (unsigned s = 0; s < exchange->n_sources; s++) {
        if (!is_present(&said, s))
            continue;
        if (exchange->sources[s].node == exchange->self)
            send_piece(exchange, &said, &exchange->sources[s]);
        else
            receive_piece(motion, s);
    }
    exchange_post_motion(exchange, motion);
    exchange_progress(motion);
}

static void note_contributions(struct exchange *exchange, const struct exchange_said *said)
{
    const struct layout_parcel *parcel = &exchange->job->layout->parcels[said->parcel];

    for (uint32_t k = 0; k < parcel->n_parts; k++)
        if (said->n_masks == 0 || said->masks[k])
            step_contribute(exchange->job->step, exchange->job->layout->parts[parcel->first_part + k].param);
}

static bool copy_masks(const struct exchange *exchange, struct motion *motion, const struct exchange_said *said)
{
    uint32_t n_parts = exchange->job->layout->parcels[said->parcel].n_parts;
    uint64_t all = exchange->n_sources == 64 ? UINT64_MAX : (UINT64_C(1) << exchange->n_sources) - 1;

    assert(!motion->masks);
    assert(said->n_masks == 0 || said->n_masks == n_parts);
    motion->masks = malloc((n_parts + 1) * sizeof(*motion->masks));
    for (uint32_t k = 0; motion->masks && k < n_parts; k++)
        motion->masks[k] = said->n_masks ? said->masks[k] & all : all;
    return motion->masks != NULL;
}

/* Return: whether this node must send a slot that it does not have. */
static bool lacks_slot(const struct exchange *exchange, const struct exchange_said *said)
{
    const struct parcel *parcel = &exchange->job->work.parcels[said->parcel];
    bool keeps = parcel_keeps(parcel, said->micro_batch, said->pass);
    bool lacks = exchange->job->executor->on_gpus ? !keeps || parcel->state == PARCEL_PROMISED
                                                  : step_sends_slots(exchange->job->step, said->parcel) &&
                                                        !(exchange->parcels[said->parcel].ring && keeps);
    bool sends = false;

    for (unsigned s = 0; lacks && s < exchange->n_sources; s++)
        sends |= exchange->sources[s].node == exchange->self && is_present(said, s);
    return sends;
}

const char *exchange_parcel(struct exchange *exchange, const struct exchange_said *said)
{
    const struct layout *layout = exchange->job->layout;
    const struct parcel *parcel = job_parcel(exchange->job, said->parcel);
    struct motion *motion;

    if (!parcel)
        return "EXCHANGE.parcel: no such parcel";
    if (said->n_masks != 0 && said->n_masks != layout->parcels[said->parcel].n_parts)
        return "EXCHANGE.numbers: the number of masks differs from the number of parts";
    if (exchange_is_said_twice(exchange, said))
        return EXCHANGE_SAID_TWICE;
    if (lacks_slot(exchange, said))
        return "EXCHANGE: this node does not have the slot that it must send";
    motion = exchange_add_said(exchange, MOTION_PARCEL, said);
    if (!motion || !copy_masks(exchange, motion, said))
        return EXCHANGE_NO_MEMORY;
    motion->elsewhere = said->arrived;
    if (exchange->job->executor->on_gpus) {
        if (!motion->serves)
            note_contributions(exchange, said);
        return exchange_give_to_devices(motion);
    }
    /*
     * Node 0 announces at most as many parcels at a time as there are slots. If it announces more, the generation ends,
     * and node 0 announces them again.
     */
    if (!motion->serves && exchange->parcels[said->parcel].n_elems > 0 && !take_incoming(motion)) {
        exchange_drop_motion(motion);
        return "EXCHANGE: too many parcels at a time";
    }
    motion->waits = parcel->state != PARCEL_SUMMED && parcel_keeps(parcel, said->micro_batch, said->pass);
    if (!motion->serves)
        note_contributions(exchange, said);
    if (!motion->waits || step_sends_slots(exchange->job->step, said->parcel))
        order_parcel(motion);
    return NULL;
}

/* ---- what has arrived ---------------------------------------------------------------------------------- */

static void unlink_motion(struct motion *motion)
{
    struct motion **link = &motion->exchange->motions;

    while (*link != motion)
        link = &(*link)->next;
    *link = motion->next;
}

void exchange_drop_motion(struct motion *motion)
{
    unlink_motion(motion);
    motion_free(motion);
}

void exchange_finish(struct motion *motion)
{
    struct exchange *exchange = motion->exchange;
    struct pending_fetch *fetch = motion->fetch;
    uint64_t tag = motion->tag;
    uint32_t parcel = motion->parcel;
    bool tell = !motion->serves && (motion->kind != MOTION_PARCEL || motion->attempt == exchange->job->ledger.attempt);

    unlink_motion(motion);
    motion_free(motion);
    if (fetch)
        exchange_finish_fetch(exchange, fetch, 0);
    if (tell)
        exchange->ops.moved(exchange->ops.userdata, tag, parcel);
}

/* Starts the parcel's next sum, of this node's ranks or of pieces. Call it when the last sum is done. */
static void go_on_with_parcel(struct exchange *exchange, uint32_t parcel)
{
    collect_parcel(exchange->job, parcel);
    for (struct motion *motion = exchange->motions; motion; motion = motion->next)
        if (motion->kind == MOTION_PARCEL && motion->parcel == parcel && motion->arrived && !motion->working) {
            exchange_progress(motion);
            return;
        }
}

static void combine_is_done(void *userdata, struct reduction *reduction)
{
    struct motion *motion = userdata;
    struct exchange *exchange = motion->exchange;
    uint32_t parcel = reduction->parcel;

    assert(motion->working && motion->parcel == parcel);
    assert(exchange->job->work.n_under_way > 0);
    exchange->job->work.n_under_way--;
    parcel_end_combining(&exchange->job->work.parcels[parcel]);
    motion->working = false;
    if (motion->ring)
        ring_unhold(steal_ptr(motion->ring));
    if (exchange->parcels[parcel].ring &&
        parcel_keeps(&exchange->job->work.parcels[parcel], reduction->micro_batch, reduction->pass))
        collect_combined(exchange->job, parcel);
    exchange_finish(motion);
    go_on_with_parcel(exchange, parcel);
    job_todo(exchange->job);
}

static const uint8_t *source_data(const struct motion *motion, unsigned s)
{
    const struct exchange *exchange = motion->exchange;
    const struct source *source = &exchange->sources[s];
    uint32_t parcel = motion->parcel;
    const struct step *step = exchange->job->step;
    size_t size = dtype_size(step->wire);

    if (source->node == exchange->self)
        return step_piece(step, parcel, source->piece);
    /* The reduction counts from the parcel's start, but reads only the owned elements, which `incoming` has. */
    return exchange->incoming.map + incoming_elem(motion, index_among_others(exchange, s)) * size -
           exchange->parcels[parcel].start * size;
}

static void combine(struct motion *motion)
{
    struct exchange *exchange = motion->exchange;
    struct job *job = exchange->job;
    uint32_t n_parts = job->layout->parcels[motion->parcel].n_parts;
    struct reduction *reduction = step_combine(job->step, motion->parcel, motion->micro_batch, motion->pass);

    for (unsigned s = 0; s < exchange->n_sources; s++) {
        unsigned i = reduction->n_sources++;

        assert(i < STEP_MAX_RANKS);
        reduction->sources[i] = source_data(motion, s);
        reduction->source_ranks[i] = exchange->sources[s].first_rank;
        if (step_gets_slots(job->step, exchange->spans[exchange->sources[s].node].n, motion->parcel))
            reduction->slots |= UINT64_C(1) << i;
        for (uint32_t k = 0; k < n_parts; k++)
            reduction->masks[k] |= (motion->masks[k] >> s & 1) << i;
    }
    assert(!motion->working && !motion->ring);
    motion->ring = exchange->parcels[motion->parcel].ring;
    if (motion->ring) /* because an abort may end the loan before the sum is done */
        ring_hold(motion->ring);
    motion->working = true;
    job->work.n_under_way++;
    step_post(reduction, combine_is_done, motion);
}

void exchange_progress(struct motion *motion)
{
    struct exchange *exchange = motion->exchange;
    struct job *job = exchange->job;

    if (motion->waits || motion->n_done < motion->n_orders || motion->working)
        return;
    motion->arrived = true;
    if (motion->serves || motion->kind == MOTION_GATHER || motion->kind == MOTION_FETCH ||
        motion->kind == MOTION_WRITE ||
        (motion->kind == MOTION_PARCEL && (motion->attempt != job->ledger.attempt || job->phase == JOB_ABORTING ||
                                           exchange->parcels[motion->parcel].n_elems == 0)) ||
        (motion->kind == MOTION_SPREAD && exchange->self == 0)) {
        exchange_finish(motion);
        return;
    }
    if (motion->kind == MOTION_SPREAD)
        exchange_adopt(motion);
    else if (parcel_begin_combining(&job->work.parcels[motion->parcel]))
        combine(motion);
}

void exchange_done(struct exchange *exchange, const struct engine_done *done)
{
    uint64_t n_bytes = done->n_bytes_sent + done->n_bytes_received;

    exchange->n_waiting_bytes -= MIN(n_bytes, exchange->n_waiting_bytes);
    for (struct motion *motion = exchange->motions; motion; motion = motion->next) {
        if (motion->arrived || done->tag < motion->tag || done->tag >= motion->tag + motion->n_orders)
            continue;
        motion->n_done++;
        exchange_progress(motion);
        return;
    }
    exchange_served(exchange, done->tag);
}

void exchange_summed(struct exchange *exchange, uint32_t parcel)
{
    struct motion *next;

    for (struct motion *motion = exchange->motions; motion; motion = next) {
        next = motion->next; /* because an empty motion ends here and is freed */
        if (motion->kind == MOTION_PARCEL && motion->parcel == parcel && motion->waits) {
            motion->waits = false;
            if (step_sends_slots(exchange->job->step, parcel))
                exchange_progress(motion);
            else
                order_parcel(motion);
        }
    }
    go_on_with_parcel(exchange, parcel);
}

void exchange_broken(struct exchange *exchange)
{
    struct motion **link = &exchange->motions;

    while (*link) {
        struct motion *motion = *link;

        /* The engine of the GPUs reports its motions as done or cancelled when it ends. */
        if (motion->arrived || (motion->on_devices && motion->working)) {
            link = &motion->next;
            continue;
        }
        *link = motion->next;
        motion_free(motion); /* a fetch stays pending, and node 0 announces it again */
    }
    exchange_break_serving(exchange);
    exchange->n_waiting_bytes = 0;
    exchange->shared_ring = NULL; /* the next engine maps no ring yet */
}

size_t exchange_list_arrived(const struct exchange *exchange, uint64_t *tags, size_t max)
{
    size_t n = 0;

    for (const struct motion *motion = exchange->motions; motion; motion = motion->next) {
        if (motion->serves)
            continue;
        if (n < max)
            tags[n] = motion->tag;
        n++;
    }
    return n;
}

/* ---- slots that are lent -------------------------------------------------------------------------------- */

void exchange_lend(struct exchange *exchange, uint32_t parcel, struct ring *ring)
{
    struct moving_parcel *moving = &exchange->parcels[parcel];

    assert(parcel < exchange->job->layout->n_parcels);
    assert(!moving->ring);
    ring_hold(ring);
    moving->ring = ring;
}

void exchange_end_loan(struct exchange *exchange, uint32_t parcel)
{
    end_loan(&exchange->parcels[parcel]);
}

void exchange_end_loans(struct exchange *exchange)
{
    for (uint32_t p = 0; p < exchange->job->layout->n_parcels; p++)
        end_loan(&exchange->parcels[p]);
}

void exchange_ring_is_gone(struct exchange *exchange, const struct ring *ring)
{
    if (exchange->shared_ring == ring)
        share_ring(exchange, NULL);
}

bool exchange_owns_any(const struct exchange *exchange, uint32_t parcel)
{
    return exchange->parcels[parcel].n_elems > 0;
}

bool exchange_is_busy(const struct exchange *exchange)
{
    for (const struct motion *motion = exchange->motions; motion; motion = motion->next)
        if (motion->kind == MOTION_PARCEL)
            return true;
    return false;
}
