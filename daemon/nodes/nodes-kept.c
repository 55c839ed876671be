/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A node whose own daemon, or node 0's daemon, was replaced. The new daemon of a node first replays node 0's messages
 * from its journal (nodes-record.c), and then reports the node's position in the run (leader-kept.c). If node 0's
 * daemon is new, every node reports its position.
 */

#include <assert.h>
#include <stdio.h>

#include "core/base/base.h"
#include "daemon/job/drop.h"
#include "daemon/job/model/model.h"
#include "daemon/job/state/save.h"
#include "daemon/nodes/nodes-inside.h"
#include "daemon/nodes/remote-ranks.h"

/* ---- replay --------------------------------------------------------------------------------------------- */

int nodes_repeat(struct nodes *nodes, const void *packed, size_t n_bytes)
{
    struct node_message message;
    const char *wrong;

    assert(nodes->job->run.survival.replay); /* else nodes_obey() would report and record again */
    if (node_unpack(&nodes->heard, packed, n_bytes, &message, nodes->why, sizeof(nodes->why)) != 0 ||
        !nodes_records(message.kind))
        return -EINVAL;
    if (message.kind == NODE_DECIDED && nodes->leader)
        nodes_keep_packed(nodes, packed, n_bytes);
    if (message.kind == NODE_TRAIN) {
        nodes->trains = true; /* obeyed after all other records, because it begins another journal */
        return 0;
    }
    if (message.kind == NODE_SAVE_END) {
        if (!*message.text)
            save_was_made(nodes->job, message.digest, message.parcel);
        return 0;
    }
    wrong = nodes_obey(nodes, &message, NULL, 0);
    return wrong ? -EINVAL : 0;
}

/* ---- the run ------------------------------------------------------------------------------------------- */

bool nodes_has_run(const struct nodes *nodes)
{
    const struct job *job = nodes->job;

    return (job->kept.has_weights || (job->run.was_spread && !nodes->leader)) && !job->run.drop_why;
}

void nodes_go_on(struct nodes *nodes)
{
    const struct job *job = nodes->job;
    struct save_view save;

    assert(!job->run.survival.replay); /* else nodes_report() would not report KEPT */
    nodes->n_passed = 0;
    if (nodes->trains)
        nodes_train(nodes);
    if (!nodes_has_run(nodes)) {
        nodes_form_anew(nodes, "");
        return;
    }
    save_describe(job, &save);
    if (nodes->leader)
        leader_take_over(nodes->leader, job->ledger.step, job->kept.applied, save.is_saved);
    nodes_stand(nodes);
    remote_ranks_repeat(nodes->remote_ranks);
}

/* ---- a job that has no weights yet ----------------------------------------------------------------------- */

void nodes_form_anew(struct nodes *nodes, const char *why)
{
    struct job *job = nodes->job;

    nodes->said_declared = nodes->said_formed = nodes->said_kept = job->run.was_spread = false;
    if (job->phase == JOB_RESERVING)
        drop_forming(job, why);
    else if (job->phase == JOB_INITIALISING)
        nodes_declared(nodes, true);
    remote_ranks_repeat(nodes->remote_ranks);
    job_todo(job);
}

/* ---- other nodes' daemons ------------------------------------------------------------------------------ */

static void lose(struct nodes *nodes, unsigned node)
{
    snprintf(nodes->why, sizeof(nodes->why),
             "the daemon of node %u (%s) was started anew, and what the one before it held of the run is gone", node,
             nodes_address_of(nodes, node));
    if (nodes->leader) {
        leader_lose(nodes->leader, node, nodes->why);
        return;
    }
    if (!nodes->job->kept.has_weights) {
        nodes_form_anew(nodes, nodes->why);
        return;
    }
    nodes->said_declared = false;
    drop_begin(nodes->job, 0, nodes->why);
    job_todo(nodes->job);
}

void nodes_meet(struct nodes *nodes, unsigned node, bool first, bool has_run)
{
    assert(node < nodes->n);
    assert(node != nodes->self);
    if (has_run && nodes_has_run(nodes)) {
        if (nodes->leader)
            leader_meet(nodes->leader, node);
        else if (!first) /* a daemon that has adopted a run reports KEPT without this call */
            nodes_stand(nodes);
        return;
    }
    if (!first || nodes_has_run(nodes))
        lose(nodes, node);
}
