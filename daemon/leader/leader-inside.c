/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The functions that the leader's other files share. They send a message to all nodes, start a motion, forget requests
 * and the step, and abort the step.
 */

#include "daemon/leader/leader-inside.h"

#include <assert.h>
#include <stdlib.h>

#include "core/base/base.h"

bool leader_all_are_connected(const struct leader *leader)
{
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!leader->nodes[i].connected)
            return false;
    return true;
}

void leader_say(struct leader *leader, struct node_message message)
{
    message.step = leader->step;
    message.attempt = leader->attempt;
    leader->ops.say(leader->ops.userdata, &message);
}

void leader_tell(struct leader *leader, unsigned node, enum node_kind kind, uint64_t step)
{
    assert(node < leader->n_nodes);
    leader->ops.tell(leader->ops.userdata, node,
                     &(struct node_message){.kind = kind, .step = step, .attempt = leader->attempt});
}

bool leader_is_gone(const struct node *node)
{
    return node->step.asked && !node->step.has_args;
}

void leader_start_motion(struct leader *leader, struct motion *motion, uint64_t n_tags)
{
    assert(motion->tag == 0); /* a running motion would be forgotten */
    assert(n_tags > 0);
    *motion = (struct motion){.tag = leader->last_tag + 1};
    leader->last_tag += n_tags;
}

void leader_forget_request(struct node *node)
{
    free((void *)node->step.args.groups);
    free(node->step.pushed_any);
    free(node->step.pushed_all);
    node->step = (struct node_step){0};
}

void leader_forget_step(struct leader *leader)
{
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader_forget_request(&leader->nodes[i]);
    for (uint32_t p = 0; leader->layout && p < leader->layout->n_parcels; p++) {
        struct leader_parcel *parcel = &leader->parcels[p];

        for (unsigned i = 0; i < leader->n_nodes; i++) {
            free(parcel->places[i].masks);
            parcel->places[i] = (struct place){0};
        }
        parcel->micro_batch = parcel->pass = 0;
        parcel->motion = (struct motion){0};
        parcel->queued = parcel->has_moved = false;
    }
    leader->exchange.n_moving = leader->exchange.n_queued = 0;
}

void leader_abort_step(struct leader *leader, const struct node_message *message)
{
    if (leader->phase != LEADER_TRAINING && leader->phase != LEADER_MEASURING && leader->phase != LEADER_WINDOW)
        return;
    leader_forget_step(leader);
    leader->weights = (struct motion){0};
    leader->attempt++;
    leader->phase = LEADER_TRAINING;
    leader_say(leader, (struct node_message){.kind = NODE_ABORTED,
                                             .has_rank = message->has_rank,
                                             .rank = message->rank,
                                             .node = message->node,
                                             .text = message->text,
                                             .reason = message->reason,
                                             .cause_class = message->cause_class});
}

void leader_give_up(struct leader *leader, unsigned node, const char *why)
{
    leader_abort_step(leader, &(struct node_message){.node = node, .reason = why});
}
