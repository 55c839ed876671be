/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Publishes which parameters the running update has written (proto/published.h), so that a forward pass can begin while
 * the update still writes later parameters. For updates that write the weights of all ranks in this process's memory.
 *
 * It also has the update's order of chunks: the order of declaration, because a forward pass usually reads parameters
 * in that order. Small parameters are updated together with their neighbours in memory. Buckets are laid out in reverse
 * order, and small parameters of all layers share a bucket.
 */

#include <stdint.h>

struct layout;
struct published;
struct segment;

/* Makes the page, which is kept for the next daemon. layout: not consumed, must outlive it. Return: 0 or -errno. */
int published_new(struct published **out, const struct layout *layout);
void published_free(struct published *published); /* NULL is fine */

/* Return: the page, which ranks map. */
const struct segment *published_segment(const struct published *published);

/* Begins an update. n_steps: the number of steps including it. No other update may be running. */
void published_begin(struct published *published, uint64_t n_steps);

/* Return: the chunk that is updated as the i-th. */
uint32_t published_chunk(const struct published *published, uint32_t i);

/* On a worker, once per chunk in an update: records that the chunk has its new weights, or needs no update. */
void published_add(struct published *published, uint32_t chunk);
