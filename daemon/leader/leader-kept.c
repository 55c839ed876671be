/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Nodes whose daemon was replaced. The new daemon has adopted the node's state, and reports the node's position in the
 * run (KEPT). If node 0's daemon was replaced, the leader is new, and all nodes report KEPT.
 *
 * A decided step is executed by all nodes, even if daemons die. The leader sends DECIDED and COMMIT again to a node
 * that missed them. A window that is being stored is treated likewise. An open step is aborted on all nodes, and
 * trainers begin it again, because the old daemon's messages about the step are lost. If there were no such messages,
 * the step continues.
 */

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

#include "core/base/base.h"
#include "daemon/leader/leader-inside.h"
#include "daemon/leader/leader.h"

static bool is_decided(enum node_stand stand)
{
    return stand == NODE_STANDS_DECIDED || stand == NODE_STANDS_UPDATED;
}

static bool is_storing(enum node_stand stand)
{
    return stand == NODE_STANDS_STORING || stand == NODE_STANDS_STORED;
}

/* Refuses all nodes, because they hold different steps, which the death of a daemon cannot explain. */
static void refuse_node(struct leader *leader, unsigned node)
{
    char text[128];

    snprintf(text, sizeof(text),
             "the daemon of node %u holds step %" PRIu64 " of a run, and node 0 is at step %" PRIu64, node,
             leader->nodes[node].kept.step, leader->step);
    leader_refuse(leader, 0, text);
}

static void abort_open(struct leader *leader, unsigned node)
{
    char why[128];

    snprintf(why, sizeof(why), "the daemon of node %u was replaced by another one in the midst of the step", node);
    leader->phase = LEADER_TRAINING; /* an open window and its writes are dropped like a step */
    leader_give_up(leader, node, why);
}

/* ---- what one node has missed -------------------------------------------------------------------------- */

/* Sends the node a COMMIT or CLOSED that the node missed. Return: false if its position does not fit the run. */
static bool catch_up(struct leader *leader, unsigned node)
{
    struct kept *kept = &leader->nodes[node].kept;

    if (kept->waits_to_train)
        leader_tell(leader, node, NODE_TRAIN, kept->step);
    if (kept->step == leader->step && kept->n_windows == leader->n_windows)
        return true;
    if (kept->step + 1 == leader->step && is_decided(kept->stand))
        leader_tell(leader, node, NODE_COMMIT, kept->step);
    else if (kept->step == leader->step && kept->n_windows + 1 == leader->n_windows &&
             kept->stand >= NODE_STANDS_WINDOW)
        leader_tell(leader, node, NODE_CLOSED, kept->step);
    else
        return false;
    kept->step = leader->step;
    kept->n_windows = leader->n_windows;
    kept->stand = NODE_STANDS_OPEN;
    kept->is_empty = true;
    return true;
}

static bool is_empty(const struct leader *leader, unsigned node)
{
    const struct kept *kept = &leader->nodes[node].kept;

    return kept->stand == NODE_STANDS_OPEN && kept->is_empty && kept->attempt == leader->attempt;
}

/* Makes the node execute what it still lacks of the decided step or window. */
static void carry_on(struct leader *leader, unsigned node)
{
    const struct kept *kept = &leader->nodes[node].kept;

    if (leader->phase == LEADER_UPDATING) {
        leader->nodes[node].step.updated = kept->stand == NODE_STANDS_UPDATED;
        if (!is_decided(kept->stand))
            leader->ops.decide_again(leader->ops.userdata, node);
    } else if (leader->phase == LEADER_STORING) {
        leader->nodes[node].step.stored = kept->stand == NODE_STANDS_STORED;
        if (!is_storing(kept->stand))
            leader_tell(leader, node, NODE_STORE, leader->step);
    } else { /* weights are moving, and the node may lack any of them */
        leader->weights.arrived &= ~(UINT64_C(1) << node);
        leader->weights.moved &= ~(UINT64_C(1) << node);
    }
}

/*
 * Lets the node join the open window, or rejoin it. The node's ranks then end the window again. Return: false if the
 * node's position does not allow that, or the node does not know that the window was aborted.
 */
static bool reopen(struct leader *leader, unsigned node)
{
    const struct kept *kept = &leader->nodes[node].kept;
    bool is_open = kept->stand == NODE_STANDS_WINDOW && kept->attempt == leader->attempt;

    if (!is_open && !is_empty(leader, node))
        return false;
    leader->nodes[node].step.ends_window = false;
    if (!is_open)
        leader_tell(leader, node, NODE_OPEN, leader->step);
    return true;
}

/* Continues the update or the window, if all nodes have reported it already. */
static void try_on(struct leader *leader)
{
    if (leader->phase == LEADER_UPDATING)
        leader_try_updated(leader);
    else
        leader_try_stored(leader);
}

/* ---- one node is back ---------------------------------------------------------------------------------- */

/*
 * Has any parcel of the open step been summed, or begun to move? A node without ranks would miss that, too, because it
 * owns parts of the parcel.
 */
static bool has_moved_any(const struct leader *leader)
{
    for (uint32_t p = 0; p < leader->layout->n_parcels; p++)
        if (leader->parcels[p].motion.tag || leader->parcels[p].has_moved)
            return true;
    return false;
}

/* Sends the last BACK of all ranks to the node, if its old daemon died before it received that BACK. */
static void expect_back(struct leader *leader, unsigned node)
{
    if (leader->nodes[node].kept.n_all_backs >= leader->n_all_backs)
        return;
    leader->ops.tell(leader->ops.userdata, node,
                     &(struct node_message){.kind = NODE_BACK,
                                            .step = leader->step,
                                            .attempt = leader->attempt,
                                            .node = node,
                                            .pass = leader->n_all_backs,
                                            .proceed = true});
}

/* Continues with a node whose daemon is new. Return: false if the step or window must be aborted. */
static bool take_in(struct leader *leader, unsigned node)
{
    switch (leader->phase) {
    case LEADER_TRAINING:
        leader_forget_request(&leader->nodes[node]); /* the node's ranks ask again */
        return is_empty(leader, node) && !has_moved_any(leader);
    case LEADER_MEASURING:
        return false;
    case LEADER_WINDOW:
        return reopen(leader, node);
    case LEADER_WRITING: /* the ranks may be dead, and only the old daemon knew that they had ended the window */
        leader->phase = LEADER_WINDOW;
        leader->weights = (struct motion){0};
        return reopen(leader, node);
    default:
        carry_on(leader, node);
        return true;
    }
}

static void come_back(struct leader *leader, unsigned node)
{
    if (!catch_up(leader, node)) {
        refuse_node(leader, node);
        return;
    }
    leader->nodes[node].connected = false;
    leader_lose_save(leader, node);
    leader_forget_stop(leader, node);
    leader_forget_fetches(leader, node);
    expect_back(leader, node);
    if (!take_in(leader, node))
        abort_open(leader, node);
    leader_answer_kept(leader, UINT64_C(1) << node);
    try_on(leader);
}

/* ---- the leader is new --------------------------------------------------------------------------------- */

static bool any_stands(const struct leader *leader, bool (*so)(enum node_stand stand))
{
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (so(leader->nodes[i].kept.stand))
            return true;
    return false;
}

static bool is_window(enum node_stand stand)
{
    return stand == NODE_STANDS_WINDOW;
}

/*
 * Sets the run's step, attempt and windows to those of the furthest node, and lets the other nodes catch up. Return:
 * false if a node cannot catch up. All nodes are then refused.
 */
static bool bring_to_one_place(struct leader *leader)
{
    leader->attempt = leader->n_windows = 0;
    for (unsigned i = 0; i < leader->n_nodes; i++) {
        leader->step = MAX(leader->step, leader->nodes[i].kept.step);
        leader->attempt = MAX(leader->attempt, leader->nodes[i].kept.attempt);
    }
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (leader->nodes[i].kept.step == leader->step)
            leader->n_windows = MAX(leader->n_windows, leader->nodes[i].kept.n_windows);
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!catch_up(leader, i)) {
            refuse_node(leader, i);
            return false;
        }
    return true;
}

/*
 * Return: the phase of the run. Only node 0's position tells whether the step is decided, because node 0 knows it
 * first. One node that stores the window is enough, because a node stores only when all nodes have what was written.
 */
static enum leader_phase find_phase(const struct leader *leader)
{
    if (is_decided(leader->nodes[0].kept.stand))
        return LEADER_UPDATING;
    if (any_stands(leader, is_storing))
        return LEADER_STORING;
    return any_stands(leader, is_window) ? LEADER_WINDOW : LEADER_TRAINING;
}

static void take_up(struct leader *leader)
{
    bool goes_on = true;

    leader->phase = find_phase(leader);
    leader->written.forgets = true; /* the window has nothing to store, until node 0 reports otherwise */
    for (unsigned i = 0; goes_on && i < leader->n_nodes; i++)
        goes_on = take_in(leader, i);
    if (!goes_on)
        abort_open(leader, 0);
}

static void all_have_said(struct leader *leader)
{
    if (!bring_to_one_place(leader))
        return;
    leader->save.n_windows = leader->nodes[0].kept.n_windows; /* for the save that leader_take_over() names */
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader->n_all_backs = MAX(leader->n_all_backs, leader->nodes[i].kept.n_all_backs);
    for (unsigned i = 0; i < leader->n_nodes; i++)
        expect_back(leader, i);
    take_up(leader);
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader_lose_save(leader, i);
    leader_answer_kept(leader, UINT64_MAX);
    leader->last_tag = (uint64_t)leader->generation << 32; /* nodes may still report tags of the old leader */
    try_on(leader);
}

void leader_take_over(struct leader *leader, uint64_t step, bool applies, bool is_saved)
{
    assert(leader->layout);
    leader->phase = LEADER_RETURNING;
    leader->step = step;
    leader->applies = applies;
    leader->has_weights = true;
    leader->save.was_made = is_saved;
    leader->save.step = step;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader->nodes[i].declared = leader->nodes[i].formed = true;
}

void leader_hear_kept(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (!leader->layout || leader->phase < LEADER_RETURNING)
        return; /* the run is over, and another message tells the node */
    if (message->pass >= NODE_N_STANDS || message->tag > UINT32_MAX || message->generation == UINT32_MAX) {
        leader->ops.complain(leader->ops.userdata, node, "KEPT: no such place");
        return;
    }
    leader->nodes[node].kept = (struct kept){.said = true,
                                             .stand = (enum node_stand)message->pass,
                                             .step = message->step,
                                             .attempt = (uint32_t)message->tag,
                                             .n_windows = message->parcel,
                                             .is_empty = message->proceed,
                                             .waits_to_train = message->forget,
                                             .n_all_backs = message->micro_batch};
    leader->generation = MAX(leader->generation, message->generation);
    if (leader->phase != LEADER_RETURNING) {
        come_back(leader, node);
        return;
    }
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!leader->nodes[i].kept.said)
            return;
    all_have_said(leader);
}

bool leader_is_returning(const struct leader *leader)
{
    return leader->phase == LEADER_RETURNING;
}
