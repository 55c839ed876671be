/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Generations of engines: after a failed engine or a broken link all nodes start new engines together, and node 0 sends
 * again the motions that have not arrived at all nodes.
 */

#include <assert.h>

#include "daemon/leader/leader-inside.h"
#include "daemon/leader/leader.h"

static void next_generation(struct leader *leader, const char *why, uint64_t kept)
{
    leader->generation++;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader->nodes[i].connected = false;
    leader_say(leader, (struct node_message){
                           .kind = NODE_ENGINE, .generation = leader->generation, .text = why, .arrived = kept});
}

void leader_next_generation(struct leader *leader, const char *why)
{
    next_generation(leader, why, 0);
}

void leader_answer_kept(struct leader *leader, uint64_t nodes)
{
    next_generation(leader, "", nodes);
}

void leader_try_start(struct leader *leader)
{
    assert(leader->phase == LEADER_FORMING);
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!leader->nodes[i].formed)
            return;
    leader->phase = LEADER_STARTING;
    leader_next_generation(leader, "");
}

void leader_try_spread(struct leader *leader)
{
    if (leader->phase != LEADER_STARTING || !leader->has_weights || !leader_all_are_connected(leader) ||
        leader_is_loading(leader))
        return;
    leader->phase = LEADER_SPREADING;
    leader_start_motion(leader, &leader->weights, (uint64_t)leader->layout->n_buckets + 1);
    leader_say(leader, (struct node_message){.kind = NODE_SPREAD, .tag = leader->weights.tag});
}

/* Call it when all engines of a generation are connected. Repeats motions that have not arrived at all nodes. */
static void resume(struct leader *leader)
{
    for (uint32_t p = 0; leader->layout && p < leader->layout->n_parcels; p++)
        if (leader->parcels[p].motion.tag)
            leader_say_exchange(leader, p);
    for (const struct leader_fetch *fetch = leader->fetches; fetch; fetch = fetch->next)
        leader_say_serve(leader, fetch);
    if (leader->phase == LEADER_WRITING)
        leader_say_write(leader);
    if ((leader->phase == LEADER_SPREADING && !leader->load.has_loaded) || leader->phase == LEADER_GATHERING ||
        leader->phase == LEADER_CLOSING)
        leader_say(leader, (struct node_message){.kind = leader->phase == LEADER_SPREADING ? NODE_SPREAD : NODE_GATHER,
                                                 .tag = leader->weights.tag,
                                                 .arrived = leader->weights.arrived});
    leader_try_load(leader);
    leader_try_spread(leader);
}

void leader_hear_connected(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (message->generation != leader->generation || leader->phase < LEADER_STARTING)
        return;
    if (leader->nodes[node].connected) {
        leader->ops.complain(leader->ops.userdata, node, "CONNECTED: the node is already connected in this generation");
        return;
    }
    leader->nodes[node].connected = true;
    for (size_t k = 0; k < message->n_numbers; k++) {
        if (message->numbers[k] == 0)
            continue; /* tag 0 means that nothing moves */
        if (leader->weights.tag == message->numbers[k])
            leader->weights.arrived |= UINT64_C(1) << node;
        for (uint32_t p = 0; leader->layout && p < leader->layout->n_parcels; p++)
            if (leader->parcels[p].motion.tag == message->numbers[k])
                leader->parcels[p].motion.arrived |= UINT64_C(1) << node;
    }
    if (leader_all_are_connected(leader))
        resume(leader);
}

void leader_hear_broken(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (message->generation != leader->generation || leader->phase < LEADER_STARTING)
        return;
    leader->nodes[node].connected = false;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (leader_is_left_by(leader, i))
            return; /* node i's engine has ended with its daemon; the next generation begins when node i is back */
    leader_next_generation(leader, message->text);
}

void leader_reconnect(struct leader *leader)
{
    if (leader->phase >= LEADER_STARTING)
        leader_next_generation(leader, "");
}
