/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A decided step, or a window that is stored, on this node. The node executes it, reports that, and ends it when it
 * receives COMMIT or CLOSED. If this node's daemon or node 0's daemon is new, the node reports to the leader its
 * position in the run (KEPT).
 */

#include <assert.h>

#include "core/base/base.h"
#include "daemon/exchange/exchange.h"
#include "daemon/job/model/model.h"
#include "daemon/job/state/save.h"
#include "daemon/job/state/window.h"
#include "daemon/job/transaction/commit.h"
#include "daemon/nodes/nodes-inside.h"

/* ---- what is decided ----------------------------------------------------------------------------------- */

void nodes_commit(struct nodes *nodes)
{
    assert(nodes->job->phase == JOB_UPDATING);
    assert(!nodes->ends); /* a second COMMIT of the step is not obeyed */
    nodes->commits = nodes->updated = false;
    nodes->ends = true;
    nodes_end_request(nodes);
    exchange_end_loans(nodes->exchange);
    job_commit(nodes->job);
}

void nodes_close(struct nodes *nodes)
{
    nodes->closes = nodes->stored = false;
    nodes->ends = true;
    nodes_end_request(nodes);
    job_window_closed(nodes->job);
}

void nodes_stored(struct nodes *nodes)
{
    nodes->stored = true;
    nodes_report(nodes, (struct node_message){.kind = NODE_STORED});
    if (nodes->closes)
        nodes_close(nodes);
}

void nodes_updated(struct nodes *nodes)
{
    nodes->updated = true;
    nodes_report(nodes, (struct node_message){.kind = NODE_UPDATED});
    if (nodes->commits)
        nodes_commit(nodes);
}

/* ---- where this node stands ---------------------------------------------------------------------------- */

static enum node_stand find_stand(const struct nodes *nodes)
{
    switch (nodes->job->phase) {
    case JOB_UPDATING:
        return nodes->ends ? NODE_STANDS_OPEN : nodes->updated ? NODE_STANDS_UPDATED : NODE_STANDS_DECIDED;
    case JOB_WINDOW:
        return window_stores(nodes->job) ? NODE_STANDS_STORING : NODE_STANDS_WINDOW;
    case JOB_COMMITTING_WINDOW:
        return nodes->ends ? NODE_STANDS_OPEN : nodes->stored ? NODE_STANDS_STORED : NODE_STANDS_STORING;
    default:
        return NODE_STANDS_OPEN;
    }
}

/*
 * Return: the highest attempt that this node knows. A running abort leads to the next attempt, or to the attempt that
 * node 0 has sent.
 */
static uint32_t highest_attempt(const struct job *job)
{
    if (job->phase != JOB_ABORTING && !job->abort.next)
        return job->ledger.attempt;
    return MAX(job->ledger.attempt + 1, job->abort.said_attempt);
}

/* Return: the number of windows since the last commit that this node has closed or is closing. */
static uint32_t n_windows(const struct nodes *nodes)
{
    const struct job *job = nodes->job;

    return (uint32_t)job->state->progress.n_windows + (job->phase == JOB_COMMITTING_WINDOW && nodes->ends);
}

/* Does this node have nothing of the open step: no gradient, no request and no running abort? */
static bool is_empty(const struct nodes *nodes)
{
    const struct job *job = nodes->job;

    if (nodes->withdraws || nodes->holds_back || job->phase == JOB_ABORTING || job->abort.next)
        return false;
    for (unsigned r = job->world.first; job->phase == JOB_TRAINING && r < job->world.end; r++)
        if (job->ledger.ranks[r].n_pushed > 0 || job->ledger.ranks[r].n_ended > 0 || job->ledger.ranks[r].asked)
            return false;
    return true;
}

void nodes_stand(struct nodes *nodes)
{
    nodes->said_kept = true;
    nodes->said_want_save = false;
    save_lose(nodes->job);
    nodes_forget_stop(nodes);
    nodes_report(nodes, (struct node_message){.kind = NODE_KEPT,
                                              .step = nodes->job->state->progress.epoch,
                                              .generation = nodes->generation,
                                              .pass = find_stand(nodes),
                                              .tag = highest_attempt(nodes->job),
                                              .parcel = n_windows(nodes),
                                              .micro_batch = nodes->job->kept.n_all_backs,
                                              .proceed = is_empty(nodes),
                                              .forget = !nodes->job->kept.has_weights});
}

/*
 * Makes the job ask again after ENGINE, together with the rank that is back. Node 0 has no request of this node,
 * because it forgot earlier requests at KEPT, and this node has reported none since.
 */
static void begin_requests_again(struct nodes *nodes)
{
    bool is_asked = nodes->holds_back && !nodes->back_waits;

    nodes_end_request(nodes);
    nodes->holds_back = is_asked;
}

/* Reports the BACK of all ranks again, because it may have been lost with a replaced daemon. Node 0 counts it once. */
static void ask_all_back_again(struct nodes *nodes)
{
    if (!nodes->job->kept.asks_all_back)
        return;
    nodes->holds_back = false;
    nodes_back(nodes, nodes->back, true, false);
}

void nodes_ask_again(struct nodes *nodes)
{
    if (!nodes->said_kept)
        return;
    nodes->said_kept = false;
    exchange_ask_again(nodes->exchange);
    if (nodes->job->phase == JOB_WINDOW || nodes->job->phase == JOB_TRAINING)
        begin_requests_again(nodes);
    ask_all_back_again(nodes);
    nodes_abort_again(nodes);
}
