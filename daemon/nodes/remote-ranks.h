/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Remote ranks are other nodes' ranks. This node needs data about them to judge requests and to make diagnostics:
 * whether they are attached or have left, what they wait for, how far they are in the step, what they have pushed in
 * it, and their arguments for it. The data is kept in job->ranks and the ledger, like the data of this node's own
 * ranks, so the same code makes diagnostics on one node and on several.
 *
 * Deciding events (ended micro-batches, requests, leaving) are reported when they happen, and before this node asks for
 * the step. Data that only diagnostics need is reported within a tick. The evidence of a rank's client about missing
 * gradients is reported once, when the rank asks for the step; other nodes keep it until it changes.
 */

#include <stdbool.h>
#include <stdint.h>

struct nodes;
struct remote_ranks;
struct node_message;
struct request_evidence;

/* Return: 0 or -ENOMEM. */
int remote_ranks_new(struct remote_ranks **out, struct nodes *nodes);
void remote_ranks_free(struct remote_ranks *remote);

/* Reports changes of this node's ranks. tick: includes changes of data that only diagnostics need. */
void remote_ranks_tell(struct remote_ranks *remote, bool tick);
/* Makes this node report all its ranks again, because other nodes may have lost or ignored the last reports. */
void remote_ranks_repeat(struct remote_ranks *remote);
/* Keeps a RANK message of another node's rank. */
void remote_ranks_hear(struct remote_ranks *remote, const struct node_message *message);
/* Is another node's rank inside a backward in which it has not pushed that parameter yet? */
bool remote_ranks_awaits(const struct remote_ranks *remote, unsigned rank, uint32_t param);
/* Keeps the evidence of another node's rank. evidence: NULL to forget earlier evidence. */
void remote_ranks_hear_evidence(struct remote_ranks *remote, unsigned rank, const struct request_evidence *evidence);
/* Forgets all data with ids of parameters. Call it when the layout has been dropped. */
void remote_ranks_forget(struct remote_ranks *remote);
