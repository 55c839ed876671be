/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3 in host memory: the pool of whole parameters that ranks gather. The pool segment has the layout of the range.
 * The offset of a parameter in the segment never changes, but the parameter's pages are reserved and freed. Ranks that
 * gather the same parameter share its pages. Pages of released parameters stay until other parameters need the room, so
 * gathering again within a step costs nothing. A hint loads parameters without holding them for a rank, so a hint need
 * not be undone. Loop thread. executor.h describes the functions that have no comment.
 */

#include "daemon/step/executor.h"

struct host_pool;

/* executor: must already have its state, and must outlive the pool. Return: 0 or -errno. */
int host_pool_new(struct host_pool **out, struct executor *executor);
void host_pool_free(struct host_pool *pool); /* NULL is fine; must not be busy */
const struct segment *host_pool_segment(const struct host_pool *pool);
uint64_t host_pool_held_bytes(const struct host_pool *pool);
bool host_pool_is_busy(const struct host_pool *pool);
/* Changes the bound for the pages of gathered parameters. */
void host_pool_bound(struct host_pool *pool, uint64_t n_bytes);

/*
 * Releases the parameters that were held for ranks of an earlier daemon. Ranks that have resumed hold theirs by
 * host_pool_hold().
 */
void host_pool_let_go(struct host_pool *pool);
void host_pool_hold(struct host_pool *pool, uint32_t param);
void host_pool_release(struct host_pool *pool, uint32_t param);
void host_pool_gather(struct host_pool *pool, const uint32_t *params, size_t n_params);
enum gathered host_pool_find(const struct host_pool *pool, const uint32_t *params, size_t n_params);
void host_pool_hint(struct host_pool *pool, unsigned local_rank, const uint32_t *params, size_t n_params);
bool host_pool_refresh(struct host_pool *pool, void (*done)(void *userdata), void *userdata);
