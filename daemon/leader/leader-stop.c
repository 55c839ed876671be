/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Daemons that are told to stop. A decided step or window needs all nodes until the last node has ended it. So a daemon
 * that is told to stop reports ENDED, and node 0 answers MAY_STOP when all nodes have reported ENDED for the same step
 * and windows.
 */

#include <assert.h>

#include "daemon/leader/leader-inside.h"

static bool anybody_wants(const struct leader *leader)
{
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (leader->nodes[i].wants_to_stop)
            return true;
    return false;
}

static bool all_have_ended(const struct leader *leader)
{
    if (leader->phase != LEADER_TRAINING && leader->phase != LEADER_WINDOW)
        return false;
    for (unsigned i = 0; i < leader->n_nodes; i++) {
        const struct ended *ended = &leader->nodes[i].ended;

        if (!ended->said || ended->step != leader->step || ended->n_windows != leader->n_windows)
            return false;
    }
    return true;
}

void leader_hear_ended(struct leader *leader, unsigned node, const struct node_message *message)
{
    bool is_first = message->proceed && !anybody_wants(leader);

    if (!leader->layout || leader->phase < LEADER_TRAINING)
        return; /* without a run the daemon does not wait for an answer */
    leader->nodes[node].ended = (struct ended){.said = true, .step = message->step, .n_windows = message->parcel};
    leader->nodes[node].wants_to_stop |= message->proceed;
    if (is_first)
        leader_say(leader, (struct node_message){.kind = NODE_WANT_ENDED});
}

void leader_try_stop(struct leader *leader)
{
    bool all = leader->nodes[0].wants_to_stop; /* without node 0, no node would receive MAY_STOP later */

    if (!anybody_wants(leader) || leader->save.wanted || leader->save.under_way || leader->fetches ||
        !all_have_ended(leader))
        return;
    for (unsigned i = 0; i < leader->n_nodes; i++) {
        struct node *node = &leader->nodes[i];

        if (node->may_stop || !(node->wants_to_stop || all))
            continue;
        node->may_stop = true;
        leader_tell(leader, i, NODE_MAY_STOP, leader->step);
    }
}

bool leader_ends(const struct leader *leader)
{
    return leader->nodes[0].may_stop;
}

bool leader_is_left_by(const struct leader *leader, unsigned node)
{
    assert(node < leader->n_nodes);
    return leader->nodes[node].wants_to_stop && leader->nodes[node].may_stop;
}

static void forget_ended(struct leader *leader, unsigned node)
{
    assert(node < leader->n_nodes);
    leader->nodes[node].ended.said = false;
    leader->nodes[node].wants_to_stop = leader->nodes[node].may_stop = false;
}

void leader_meet(struct leader *leader, unsigned node)
{
    forget_ended(leader, node);
}

void leader_forget_stop(struct leader *leader, unsigned node)
{
    forget_ended(leader, node);
    if (anybody_wants(leader))
        leader_tell(leader, node, NODE_WANT_ENDED, leader->step);
}
