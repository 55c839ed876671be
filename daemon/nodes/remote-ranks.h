/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Other nodes' ranks, as far as judging and telling needs them: whether they are here, have left, what they wait for,
 * how far they are in the step and what they have pushed in it, with what they ask for it. They lie in job->ranks and
 * the ledger beside this node's own, so that a text about all ranks is made by the same code on one node and on
 * several.
 *
 * What decides (ended micro-batches, requests, leaving) is told when it happens, and before this node reports that it
 * is through; what only texts need is told within a tick. What a rank's client says of gradients that are missing is
 * told when the rank asks for the step, and once: it stands on the other nodes until it says something else.
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

/* Reports what has changed of this node's ranks; tick: also what only texts need. */
void remote_ranks_tell(struct remote_ranks *remote, bool tick);
/* All that there is to tell is told again: others may hold it for something else. */
void remote_ranks_repeat(struct remote_ranks *remote);
/* A RANK message of another node's rank. */
void remote_ranks_hear(struct remote_ranks *remote, const struct node_message *message);
/* Is that parameter still to come in the backward that another node's rank is inside of? */
bool remote_ranks_awaits(const struct remote_ranks *remote, unsigned rank, uint32_t param);
/* What another node's rank says; NULL: nothing any more. */
void remote_ranks_hear_evidence(struct remote_ranks *remote, unsigned rank, const struct request_evidence *evidence);
/* The layout is dropped: ids of parameters mean nothing any more. */
void remote_ranks_forget(struct remote_ranks *remote);
