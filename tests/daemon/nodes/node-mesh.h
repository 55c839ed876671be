/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Jobs of several nodes in one process. Messages between them wait in queues, one for each direction of each pair, and
 * their engines are copies from one segment to another. What happens next is drawn: whose message comes in, whose order
 * is done, whose workers are looked after, whose engine breaks. So a seed is an order of events.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/job/model/model.h"
#include "daemon/nodes/nodes.h"

enum { MESH_MAX_NODES = 4 };

struct mesh;

/* n_breaks: how often an engine will break at most, and its peers with it. */
struct mesh *mesh_new(unsigned n_nodes, uint64_t seed, unsigned n_breaks);
void mesh_free(struct mesh *mesh);

/* Joins the job; before anybody attaches. Borrowed, as is its pool. */
void mesh_join(struct mesh *mesh, unsigned node, struct job *job, struct worker_pool *pool);

/* Lets one thing happen. Return: false when there is nothing that could. */
bool mesh_advance(void *mesh);

/* From now on a node may send nonsense: orders that do not fit end an engine, and senseless messages are allowed.
 * Without this call they fail the test. */
void mesh_allow_nonsense(struct mesh *mesh);

uint64_t mesh_draw(struct mesh *mesh, uint64_t n);
/* How many engines have failed so far. */
unsigned mesh_n_failures(const struct mesh *mesh);
