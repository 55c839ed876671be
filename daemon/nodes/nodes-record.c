/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The journal records those messages of node 0 that change the job. The next daemon replays them among the requests of
 * its ranks (nodes-kept.c).
 */

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/survival.h"
#include "daemon/nodes/nodes-inside.h"

/* Other messages are not recorded, because they move bytes, or the job records their results (as the end of a step). */
bool nodes_records(enum node_kind kind)
{
    return kind == NODE_TRAIN || kind == NODE_SETTLED || kind == NODE_WITHDRAWN || kind == NODE_NORM ||
           kind == NODE_DECIDED || kind == NODE_HOLD || kind == NODE_BACK || kind == NODE_SAVE_END;
}

/* Node 0 records these messages before any node receives them. */
static bool is_recorded_when_said(enum node_kind kind)
{
    return kind == NODE_TRAIN || kind == NODE_DECIDED || kind == NODE_SAVE_END;
}

void nodes_record(struct nodes *nodes, const struct node_message *message, const uint8_t *packed, size_t n_bytes)
{
    assert(packed || nodes->job->run.survival.replay); /* a replay records nothing */
    if (nodes->leader && is_recorded_when_said(message->kind))
        return;
    if (nodes_records(message->kind))
        job_record(nodes->job, NULL, JOURNAL_NODE, packed, n_bytes, NULL, 0);
}

void nodes_keep_packed(struct nodes *nodes, const uint8_t *packed, size_t n_bytes)
{
    uint8_t *copy = malloc(n_bytes);

    assert(packed != nodes->decided);
    assert(n_bytes > 0); /* malloc(0) could look like a lack of memory */
    free(nodes->decided);
    nodes->decided = copy;
    nodes->n_decided_bytes = copy ? n_bytes : 0;
    if (copy)
        memcpy(copy, packed, n_bytes);
}

void nodes_record_said(struct nodes *nodes, enum node_kind kind, const uint8_t *packed, size_t n_bytes)
{
    if (!is_recorded_when_said(kind))
        return;
    if (kind == NODE_DECIDED)
        nodes_keep_packed(nodes, packed, n_bytes);
    job_record(nodes->job, NULL, JOURNAL_NODE, packed, n_bytes, NULL, 0);
    (void)failpoint("verdict");
}
