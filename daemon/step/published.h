/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Says of an update under way which parameters it is through with (proto/published.h), so that a forward can begin with
 * the first ones while the last are written. For updates that write the weights of all ranks in this process's memory.
 *
 * It also has the order of the chunks: that of the declaration, in which a forward usually wants its parameters, but for
 * small ones, which are updated together with their neighbours in memory. Buckets are laid out the other way round, and
 * small parameters of all layers share one.
 */

#include <stdint.h>

struct layout;
struct published;
struct segment;

/* The page is kept for the next daemon. layout: not consumed, must outlive it. Return: 0 or -errno. */
int published_new(struct published **out, const struct layout *layout);
void published_free(struct published *published); /* NULL is fine */

/* The page, for ranks to map. */
const struct segment *published_segment(const struct published *published);

/* An update begins; with it n_steps steps are done. No other one is under way. */
void published_begin(struct published *published, uint64_t n_steps);

/* Return: the chunk to be updated as the i-th. */
uint32_t published_chunk(const struct published *published, uint32_t i);

/* On a worker: the chunk has its new weights, or needs none. Each chunk once in an update. */
void published_add(struct published *published, uint32_t chunk);
