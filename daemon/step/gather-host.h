/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3 in host memory: the pool of whole parameters that ranks gather. The pool segment has the layout of the range.
 * A parameter's place in it never changes, but its pages are reserved and freed. Ranks that gather the same parameter
 * share its pages. Pages of released parameters stay until other parameters need the room, so gathering again within a
 * step costs nothing. A hint loads parameters that no rank holds, so it need not be undone. Loop thread. executor.h
 * describes the functions without comments.
 */

#include "daemon/step/executor.h"

struct host_pool;

/* The executor has its state, and must outlive the pool. Return: 0 or -errno. */
int host_pool_new(struct host_pool **out, struct executor *executor);
void host_pool_free(struct host_pool *pool); /* NULL is fine; must not be busy */
const struct segment *host_pool_segment(const struct host_pool *pool);
uint64_t host_pool_held_bytes(const struct host_pool *pool);
bool host_pool_is_busy(const struct host_pool *pool);
/* Changes the most bytes that gathered parameters may use. */
void host_pool_bound(struct host_pool *pool, uint64_t n_bytes);

/* Releases the parameters kept for ranks of an earlier daemon. The ranks that came back hold their own. */
void host_pool_let_go(struct host_pool *pool);
void host_pool_hold(struct host_pool *pool, uint32_t param);
void host_pool_release(struct host_pool *pool, uint32_t param);
void host_pool_gather(struct host_pool *pool, const uint32_t *params, size_t n_params);
enum gathered host_pool_find(const struct host_pool *pool, const uint32_t *params, size_t n_params);
void host_pool_hint(struct host_pool *pool, unsigned local_rank, const uint32_t *params, size_t n_params);
bool host_pool_refresh(struct host_pool *pool, void (*done)(void *userdata), void *userdata);
