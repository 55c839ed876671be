/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Write windows. A window opens when all nodes want one, and ends when all nodes have ended it. What rank 0 wrote is
 * sent to its owners and stored there. Then, except in stage 3, the owners send the weights to all nodes.
 */

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "daemon/leader/leader-inside.h"

/* ---- opening ------------------------------------------------------------------------------------------- */

static bool all_say(const struct leader *leader, bool (*says)(const struct node *))
{
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!says(&leader->nodes[i]))
            return false;
    return true;
}

static bool wants_window(const struct node *node)
{
    return node->step.wants_window || leader_is_gone(node);
}

void leader_hear_window(struct leader *leader, unsigned node, const struct node_message *message)
{
    leader->nodes[node].step.wants_window = true;
    if (leader->phase != LEADER_TRAINING || leader_ends(leader) || !all_say(leader, wants_window))
        return;
    leader->phase = LEADER_WINDOW;
    leader->written.forgets = true; /* until node 0 reports otherwise, because without rank 0 nothing is written */
    leader_say(leader, (struct node_message){.kind = NODE_OPEN});
}

/* ---- what was written ---------------------------------------------------------------------------------- */

/* Keeps node 0's list of what was written. Only rank 0 can write. Return: false if memory is out. */
static bool keep_written(struct leader *leader, const struct node_message *message)
{
    free(leader->written.arrays);
    leader->written.n_arrays = message->n_numbers;
    leader->written.forgets = message->forget;
    leader->written.arrays = malloc((message->n_numbers + 1) * sizeof(*leader->written.arrays));
    if (leader->written.arrays && message->n_numbers > 0)
        memcpy(leader->written.arrays, message->numbers, message->n_numbers * sizeof(*leader->written.arrays));
    return leader->written.arrays;
}

void leader_say_write(struct leader *leader)
{
    assert(leader->phase == LEADER_WRITING);
    leader_say(leader, (struct node_message){.kind = NODE_WRITE,
                                             .tag = leader->weights.tag,
                                             .arrived = leader->weights.arrived,
                                             .numbers = leader->written.arrays,
                                             .n_numbers = leader->written.n_arrays});
}

static bool ends_window(const struct node *node)
{
    return node->step.ends_window || leader_is_gone(node);
}

void leader_hear_window_end(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (leader->phase != LEADER_WINDOW)
        return;
    if (node == 0 && !keep_written(leader, message)) {
        leader_give_up(leader, 0, "node 0 is out of memory");
        return;
    }
    leader->nodes[node].step.ends_window = true;
    if (!all_say(leader, ends_window))
        return;
    if (leader->written.forgets) {
        leader_close_window(leader);
        return;
    }
    leader->phase = LEADER_WRITING;
    leader_start_motion(leader, &leader->weights, leader->layout->n_params + leader->written.n_arrays + 1);
    if (leader_all_are_connected(leader))
        leader_say_write(leader);
}

static bool has_stored(const struct node *node)
{
    return node->step.stored;
}

void leader_hear_stored(struct leader *leader, unsigned node, const struct node_message *message)
{
    leader->nodes[node].step.stored = true;
    leader_try_stored(leader);
}

void leader_try_stored(struct leader *leader)
{
    if (leader->phase != LEADER_STORING || !all_say(leader, has_stored))
        return;
    if (leader->stage == 3) {
        leader_close_window(leader);
        return;
    }
    leader->phase = LEADER_CLOSING;
    leader_start_motion(leader, &leader->weights, MAX(leader->layout->n_buckets, 1u));
    if (leader_all_are_connected(leader))
        leader_say(leader, (struct node_message){.kind = NODE_GATHER, .tag = leader->weights.tag});
}

/* ---- closing ------------------------------------------------------------------------------------------- */

void leader_close_window(struct leader *leader)
{
    assert(leader->phase == LEADER_WINDOW || leader->phase == LEADER_STORING || leader->phase == LEADER_CLOSING);
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader_forget_request(&leader->nodes[i]);
    leader->weights = (struct motion){0};
    leader->phase = LEADER_TRAINING;
    leader->n_windows++;
    leader_say(leader, (struct node_message){.kind = NODE_CLOSED});
}
