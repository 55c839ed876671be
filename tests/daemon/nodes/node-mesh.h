/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Jobs of several nodes in one process. Messages wait in queues, one for each direction between node 0 and another
 * node. Engines copy from one segment to another. The next event is random: a message arrives, an order is done,
 * workers are reaped, or an engine breaks. So a seed determines the order of events.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/job/model/model.h"
#include "daemon/nodes/nodes.h"

enum { MESH_MAX_NODES = 4 };

struct mesh;

/* n_breaks is the maximum number of times that an engine, with its peers, breaks. */
struct mesh *mesh_new(unsigned n_nodes, uint64_t seed, unsigned n_breaks);
void mesh_free(struct mesh *mesh);

/* Makes the job a node's. Call it before any rank attaches. The job and its pool are borrowed. */
void mesh_join(struct mesh *mesh, unsigned node, struct job *job, struct worker_pool *pool);

/* Lets one event happen. Return: false if none is possible. */
bool mesh_advance(void *mesh);

/* Allows invalid orders, which end an engine, and invalid messages. Without this call they fail the test. */
void mesh_allow_nonsense(struct mesh *mesh);

uint64_t mesh_draw(struct mesh *mesh, uint64_t n);
/* Return: how many engines have failed. */
unsigned mesh_n_failures(const struct mesh *mesh);
