/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Checkpoints of several nodes. The leader sends SAVE while a step is open. So every node receives SAVE after the last
 * commit and before the open step's decision, and all nodes save the same step. Each node writes what it owns. When all
 * nodes have written, node 0 puts the parts together. A job begins with a checkpoint only if all nodes have loaded the
 * same one.
 */

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/diagnosis/diagnosis.h"
#include "daemon/leader/leader-inside.h"

/* ---- saving -------------------------------------------------------------------------------------------- */

static struct node_message save_end(const struct leader *leader, const char *why)
{
    return (struct node_message){.kind = NODE_SAVE_END,
                                 .tag = leader->save.token,
                                 .digest = leader->save.step,
                                 .parcel = leader->save.n_windows,
                                 .text = why};
}

static void end_save(struct leader *leader, const char *why)
{
    assert(leader->save.under_way);
    leader->save.under_way = false;
    leader->save.was_made = !*why;
    leader_say(leader, save_end(leader, why));
}

/*
 * Did the node ask for a save before it received the SAVE that is under way? A node that has already written its part
 * wants another save.
 */
static bool is_said(const struct leader *leader, unsigned node, const struct node_message *message)
{
    const struct leader_save *save = &leader->save;

    return save->under_way && save->step == message->step && save->n_windows == leader->n_windows &&
           !(save->saved >> node & 1);
}

/* Is the last committed step, with the windows closed since, on the disk? A new daemon may not know that yet. */
static bool is_made(const struct leader *leader)
{
    const struct leader_save *save = &leader->save;

    return save->was_made && save->step == leader->step && save->n_windows == leader->n_windows;
}

void leader_hear_want_save(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (!leader->layout || leader->phase < LEADER_TRAINING || message->tag == 0 || is_said(leader, node, message))
        return;
    leader->save.wanted = true;
    leader->save.wanted_token = message->tag;
}

void leader_try_save(struct leader *leader)
{
    struct leader_save *save = &leader->save;

    if (!save->wanted || save->under_way || leader->phase != LEADER_TRAINING)
        return;
    assert(save->wanted_token != 0); /* token 0 would mean a save of an earlier daemon */
    save->wanted = false;
    if (is_made(leader))
        return;
    save->under_way = true;
    save->was_made = false;
    save->token = save->wanted_token;
    save->saved = 0;
    save->step = leader->step;
    save->n_windows = leader->n_windows;
    leader_say(leader, (struct node_message){.kind = NODE_SAVE, .tag = save->token, .parcel = save->n_windows});
}

void leader_hear_saved(struct leader *leader, unsigned node, const struct node_message *message)
{
    struct leader_save *save = &leader->save;
    char why[640];

    if (!save->under_way || message->tag != save->token)
        return; /* the save has failed on another node */
    if (*message->text) {
        snprintf(why, sizeof(why), "node %u: %s", node, message->text);
        end_save(leader, why);
        return;
    }
    if (message->proceed && node > 0) {
        leader->ops.complain(leader->ops.userdata, node, "SAVED.proceed: node 0 publishes");
        return;
    }
    if (message->proceed) {
        end_save(leader, "");
        return;
    }
    save->saved |= UINT64_C(1) << node;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!(save->saved >> i & 1))
            return;
    leader->ops.tell(leader->ops.userdata, 0, &(struct node_message){.kind = NODE_PUBLISH, .tag = save->token});
}

void leader_lose_save(struct leader *leader, unsigned node)
{
    const struct node_message made = save_end(leader, "");
    char why[128];

    if (leader->save.was_made)
        leader->ops.tell(leader->ops.userdata, node, &made);
    if (!leader->save.under_way || (node > 0 && leader->save.saved >> node & 1))
        return; /* the node's written part stays valid */
    snprintf(why, sizeof(why), "the daemon of node %u was replaced by another one while it was written", node);
    end_save(leader, why);
}

void leader_forget_checkpoints(struct leader *leader)
{
    leader->save = (struct leader_save){0};
    leader->load.has_agreed = leader->load.has_loaded = false;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader->nodes[i].checkpoint.said = false;
}

/* ---- loading ------------------------------------------------------------------------------------------- */

/* Return: a node without a checkpoint, or else the node with the oldest one. */
static unsigned find_oldest(const struct leader *leader)
{
    unsigned oldest = 0;

    for (unsigned i = 1; i < leader->n_nodes; i++)
        if (leader->nodes[i].checkpoint.step < leader->nodes[oldest].checkpoint.step)
            oldest = i;
    return oldest;
}

/* loaded_step: of the oldest checkpoint. Return: a node with a newer checkpoint, or n_nodes if no node has one. */
static unsigned find_newer(const struct leader *leader, uint64_t loaded_step)
{
    unsigned i = 0;

    while (i < leader->n_nodes && leader->nodes[i].checkpoint.step == loaded_step)
        i++;
    return i;
}

static void refuse_lack(struct leader *leader, unsigned without, unsigned with)
{
    char text[256];

    snprintf(text, sizeof(text),
             "node %u finds no checkpoint in checkpoint.dir, and node %u has found that of step %" PRIu64
             ": the folder must be one that all nodes see, such as one of NFS",
             without, with, leader->nodes[with].checkpoint.step - 1);
    leader_refuse_with(leader, E_NOT_LOADED, text);
}

/* Compares the nodes' checkpoints of one step. Return: true if all are the same. Otherwise refuses all nodes and
 * returns false. */
static bool check_digests(struct leader *leader)
{
    unsigned first = 0;
    char text[256];

    while (first < leader->n_nodes && !leader->nodes[first].checkpoint.digest)
        first++;
    for (unsigned i = first + 1; i < leader->n_nodes; i++) {
        uint64_t digest = leader->nodes[i].checkpoint.digest;

        if (!digest || digest == leader->nodes[first].checkpoint.digest)
            continue;
        snprintf(text, sizeof(text),
                 "node %u has found another checkpoint of step %" PRIu64
                 " in checkpoint.dir than node %u: the folder must be one that all nodes see, such as one of NFS",
                 i, leader->nodes[i].checkpoint.step - 1, first);
        leader_refuse_with(leader, E_NOT_LOADED, text);
        return false;
    }
    return true;
}

/* Makes the nodes load the older checkpoint, because some nodes could not read the newest one. */
static void load_older(struct leader *leader, uint64_t loaded_step)
{
    assert(loaded_step > 0); /* it is the step plus 1 */
    for (unsigned i = 0; i < leader->n_nodes; i++)
        leader->nodes[i].checkpoint.said = leader->nodes[i].checkpoint.step == loaded_step;
    leader_say(leader, (struct node_message){.kind = NODE_LOAD, .forget = true, .digest = loaded_step - 1});
}

static void agree(struct leader *leader, uint64_t loaded_step)
{
    struct node_message message = {.kind = NODE_LOAD, .proceed = loaded_step > 0};

    leader->load.has_agreed = true;
    if (loaded_step > 0) {
        leader->load.has_loaded = true;
        leader->step = loaded_step - 1;
        leader->phase = LEADER_SPREADING;
        leader_start_motion(leader, &leader->weights, 1);
        message.tag = leader->weights.tag;
    }
    leader_say(leader, message);
}

void leader_try_load(struct leader *leader)
{
    unsigned oldest, newer;

    if (!leader_is_loading(leader) || leader->phase != LEADER_STARTING || !leader_all_are_connected(leader))
        return;
    for (unsigned i = 0; i < leader->n_nodes; i++)
        if (!leader->nodes[i].checkpoint.said)
            return;
    oldest = find_oldest(leader);
    newer = find_newer(leader, leader->nodes[oldest].checkpoint.step);
    if (newer == leader->n_nodes) {
        if (check_digests(leader))
            agree(leader, leader->nodes[oldest].checkpoint.step);
        return;
    }
    if (leader->nodes[oldest].checkpoint.step == 0)
        refuse_lack(leader, oldest, newer);
    else
        load_older(leader, leader->nodes[oldest].checkpoint.step);
}

void leader_hear_loaded(struct leader *leader, unsigned node, const struct node_message *message)
{
    if (leader->phase < LEADER_FORMING)
        return; /* too early; in FORMING it is valid, even before node 0 itself has obeyed FORM */
    if (message->proceed && message->tag == UINT64_MAX) {
        leader->ops.complain(leader->ops.userdata, node, "LOADED.tag: no such step");
        return;
    }
    leader->nodes[node].checkpoint.said = true;
    leader->nodes[node].checkpoint.step = message->proceed ? message->tag + 1 : 0;
    leader->nodes[node].checkpoint.digest = message->proceed ? message->digest : 0;
    leader_try_load(leader);
    leader_try_spread(leader);
}
