/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Exchanges of parcels. For each position of a parcel (a micro-batch and a pass), each node reports that it is ready or
 * has nothing. When all nodes have reported, the ready pieces move; when they have arrived at all nodes, the next
 * position follows. A parcel waits for another parcel only if too many are exchanged at a time. It never waits for a
 * node that has asked for the step.
 */

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "daemon/leader/leader-inside.h"

/* ---- places -------------------------------------------------------------------------------------------- */

bool leader_is_at(const struct place *place, const struct leader_parcel *parcel)
{
    return place->ready && place->micro_batch == parcel->micro_batch && place->pass == parcel->pass;
}

bool leader_is_settled(const struct leader *leader, const struct leader_parcel *parcel, unsigned node)
{
    const struct place *place = &parcel->places[node];

    return leader_is_at(place, parcel) || place->micro_batch > parcel->micro_batch ||
           (leader->nodes[node].step.asked && !place->ready);
}

/* ---- exchanges ----------------------------------------------------------------------------------------- */

/* Merges the masks of all nodes' pieces into exchange.masks. Return: the number of masks, or 0 if all are full. */
static size_t merge_masks(struct leader *leader, const struct leader_parcel *parcel, uint32_t n_parts)
{
    uint64_t *masks = leader->exchange.masks;
    bool whole = true;

    memset(masks, 0, n_parts * sizeof(*masks));
    for (unsigned i = 0; i < leader->n_nodes; i++) {
        const struct place *place = &parcel->places[i];
        uint64_t all = (UINT64_C(1) << leader->sources.n[i]) - 1;

        if (!leader_is_at(place, parcel) || place->masks)
            whole = false;
        for (uint32_t k = 0; leader_is_at(place, parcel) && k < n_parts; k++)
            masks[k] |= (place->masks ? place->masks[k] & all : all) << leader->sources.first[i];
    }
    return whole ? 0 : n_parts;
}

/*
 * Sends the EXCHANGE of a parcel. Call it when all nodes are connected, and once in a generation, because a node that
 * received EXCHANGE twice would begin the motion twice. leader_hear_connected() sends motions that have begun earlier.
 */
void leader_say_exchange(struct leader *leader, uint32_t index)
{
    struct leader_parcel *parcel = &leader->parcels[index];

    assert(parcel->motion.tag != 0);
    assert(leader_all_are_connected(leader));
    parcel->motion.said = true;
    leader_say(leader, (struct node_message){
                           .kind = NODE_EXCHANGE,
                           .tag = parcel->motion.tag,
                           .parcel = index,
                           .micro_batch = parcel->micro_batch,
                           .pass = parcel->pass,
                           .arrived = parcel->motion.arrived,
                           .numbers = leader->exchange.masks,
                           .n_numbers = merge_masks(leader, parcel, leader->layout->parcels[index].n_parts),
                       });
}

/*
 * Call it when no node has anything at the parcel's position. Moves the position to the next micro-batch in which a
 * node may have something. Return: false if there is no such micro-batch.
 */
static bool skip_ahead(struct leader *leader, struct leader_parcel *parcel)
{
    uint32_t next = UINT32_MAX;

    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (parcel->places[i].ready || !leader->nodes[i].step.asked)
            next = MIN(next, parcel->places[i].micro_batch);
    if (next == UINT32_MAX || next <= parcel->micro_batch)
        return false;
    parcel->micro_batch = next;
    parcel->pass = 0;
    return true;
}

static void queue(struct leader *leader, uint32_t index)
{
    struct leader_exchange *exchange = &leader->exchange;

    if (leader->parcels[index].queued)
        return;
    assert(exchange->n_queued < leader->layout->n_parcels);
    leader->parcels[index].queued = true;
    exchange->queue[(exchange->queue_first + exchange->n_queued++) % leader->layout->n_parcels] = index;
}

/* Tries the parcels that wait for a free motion. Checks each parcel again. */
static void try_queued(struct leader *leader)
{
    struct leader_exchange *exchange = &leader->exchange;

    while (exchange->n_queued > 0 && exchange->n_moving < NODE_MAX_MOVING) {
        uint32_t index = exchange->queue[exchange->queue_first];

        assert(leader->parcels[index].queued);
        exchange->queue_first = (exchange->queue_first + 1) % leader->layout->n_parcels;
        exchange->n_queued--;
        leader->parcels[index].queued = false;
        leader_try_parcel(leader, index);
    }
}

void leader_try_parcel(struct leader *leader, uint32_t index)
{
    struct leader_parcel *parcel = &leader->parcels[index];

    assert(index < leader->layout->n_parcels);
    assert(leader->exchange.n_moving <= NODE_MAX_MOVING);
    if (leader->phase != LEADER_TRAINING || parcel->motion.tag)
        return;
    do {
        bool any = false;

        for (unsigned i = 0; i < leader->n_nodes; i++) {
            if (!leader_is_settled(leader, parcel, i))
                return;
            any |= leader_is_at(&parcel->places[i], parcel);
        }
        if (any && leader->exchange.n_moving == NODE_MAX_MOVING) {
            queue(leader, index);
            return;
        }
        if (any) {
            leader_start_motion(leader, &parcel->motion, 1);
            leader->exchange.n_moving++;
            if (leader_all_are_connected(leader))
                leader_say_exchange(leader, index);
            return;
        }
    } while (skip_ahead(leader, parcel));
}

void leader_parcel_is_settled(struct leader *leader, uint32_t index)
{
    struct leader_parcel *parcel = &leader->parcels[index];

    assert(parcel->motion.tag != 0);
    assert(leader->exchange.n_moving > 0);
    leader_say(leader, (struct node_message){.kind = NODE_SETTLED,
                                             .tag = parcel->motion.tag,
                                             .parcel = index,
                                             .micro_batch = parcel->micro_batch,
                                             .pass = parcel->pass});
    for (unsigned i = 0; i < leader->n_nodes; i++) {
        struct place *place = &parcel->places[i];

        if (!leader_is_at(place, parcel))
            continue;
        free(steal_ptr(place->masks));
        place->ready = false;
        place->pass++;
    }
    parcel->pass++;
    parcel->has_moved = true;
    parcel->motion = (struct motion){0};
    leader->exchange.n_moving--;
    try_queued(leader);
    leader_try_parcel(leader, index);
}

/* ---- reports ------------------------------------------------------------------------------------------- */

/* Is the message about the next position that the node has of the parcel? */
static bool is_next(const struct place *place, const struct node_message *message)
{
    return !place->ready && place->micro_batch == message->micro_batch && place->pass == message->pass;
}

/*
 * Has the position been summed without the node, or is it being summed? That happens if the node has asked for the
 * step, and the successor of a rank that left then pushes. No sum can include these gradients.
 */
static bool is_too_late(const struct leader *leader, const struct leader_parcel *parcel, const struct place *place)
{
    if (place->micro_batch != parcel->micro_batch)
        return place->micro_batch < parcel->micro_batch;
    return place->pass < parcel->pass || (place->pass == parcel->pass && parcel->motion.tag) ||
           leader->phase != LEADER_TRAINING;
}

void leader_hear_ready(struct leader *leader, unsigned node, const struct node_message *message)
{
    struct place *place;
    uint32_t n_parts;

    if (message->parcel >= leader->layout->n_parcels) {
        leader->ops.complain(leader->ops.userdata, node, "READY.parcel: no such parcel");
        return;
    }
    place = &leader->parcels[message->parcel].places[node];
    n_parts = leader->layout->parcels[message->parcel].n_parts;
    if (!is_next(place, message) || (message->n_numbers > 0 && message->n_numbers != n_parts)) {
        leader->ops.complain(leader->ops.userdata, node, "READY: not the parcel's next position");
        return;
    }
    if (is_too_late(leader, &leader->parcels[message->parcel], place)) {
        leader_give_up(leader, node, "gradients came after their sum was made");
        return;
    }
    if (message->n_numbers > 0) {
        place->masks = malloc(n_parts * sizeof(*place->masks));
        if (!place->masks) {
            leader_give_up(leader, 0, "node 0 is out of memory");
            return;
        }
        memcpy(place->masks, message->numbers, n_parts * sizeof(*place->masks));
    }
    place->ready = true;
    leader_try_parcel(leader, message->parcel);
}

void leader_hear_passed(struct leader *leader, unsigned node, const struct node_message *message)
{
    for (size_t k = 0; k < message->n_numbers; k++) {
        uint64_t index = message->numbers[k];
        struct place *place = index < leader->layout->n_parcels ? &leader->parcels[index].places[node] : NULL;

        if (!place || place->ready || place->micro_batch != message->micro_batch ||
            message->micro_batch == UINT32_MAX) {
            leader->ops.complain(leader->ops.userdata, node, "PASSED: not the parcel's position");
            return;
        }
        place->micro_batch = message->micro_batch + 1;
        place->pass = 0;
        leader_try_parcel(leader, (uint32_t)index);
    }
}

/* Forgets all parcels that the node has ready, except those whose EXCHANGE was sent. */
void leader_hear_withdraw(struct leader *leader, unsigned node, const struct node_message *message)
{
    for (uint32_t p = 0; p < leader->layout->n_parcels; p++) {
        struct leader_parcel *parcel = &leader->parcels[p];
        struct place *place = &parcel->places[node];

        if (!place->ready || (leader_is_at(place, parcel) && parcel->motion.said))
            continue;
        if (leader_is_at(place, parcel)) {
            assert(parcel->motion.tag == 0 || leader->exchange.n_moving > 0);
            leader->exchange.n_moving -= parcel->motion.tag != 0;
            parcel->motion = (struct motion){0};
        }
        place->ready = false;
        free(steal_ptr(place->masks));
    }
    try_queued(leader);
    leader_say(leader, (struct node_message){.kind = NODE_WITHDRAWN, .node = node});
}
