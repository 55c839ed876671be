/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A daemon that is told to stop first finishes the decided step or window, and the checkpoint that it wants or writes.
 * Then it reports ENDED, and stops when it receives node 0's MAY_STOP (leader-stop.c). By then each node knows whether
 * the checkpoint was made.
 */

#include <assert.h>

#include "core/base/base.h"
#include "daemon/job/model/model.h"
#include "daemon/job/state/save.h"
#include "daemon/job/state/window.h"
#include "daemon/nodes/nodes-inside.h"

static bool can_stop(const struct job *job)
{
    return !save_is_busy(job) && (job->phase == JOB_ABORTING || job_is_undecided(job));
}

static bool is_said(const struct nodes_stop *stop, const struct job *job)
{
    return stop->is_said && stop->step == job->ledger.step && stop->n_windows == job->state->progress.n_windows;
}

void nodes_report_end(struct nodes *nodes)
{
    const struct job *job = nodes->job;
    struct nodes_stop *stop = &nodes->stop;

    if (!(stop->is_told || stop->others_are) || !can_stop(job) || is_said(stop, job))
        return;
    stop->is_said = true;
    stop->step = job->ledger.step;
    stop->n_windows = job->state->progress.n_windows;
    nodes_report(nodes, (struct node_message){
                            .kind = NODE_ENDED, .parcel = (uint32_t)stop->n_windows, .proceed = stop->is_told});
}

void nodes_tell_to_stop(struct nodes *nodes)
{
    if (nodes->stop.is_told)
        return;
    nodes->stop.is_told = true;
    nodes->stop.is_said = false;
    nodes_report_end(nodes);
}

void nodes_hear_stop(struct nodes *nodes, enum node_kind kind)
{
    if (kind == NODE_MAY_STOP) {
        nodes->stop.may = true;
        return;
    }
    nodes->stop.others_are = true;
    nodes->stop.is_said = false;
    nodes_report_end(nodes);
}

void nodes_forget_stop(struct nodes *nodes)
{
    nodes->stop.may = nodes->stop.is_said = false;
}

bool nodes_may_stop(const struct nodes *nodes)
{
    return nodes->stop.may;
}

bool nodes_is_left_by(const struct nodes *nodes, unsigned node)
{
    assert(nodes->leader);
    return leader_is_left_by(nodes->leader, node);
}
