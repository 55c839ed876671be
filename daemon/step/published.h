/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Publishes which parameters the running update has written (proto/published.h), so that a forward pass can begin while
 * the update still writes later parameters. Used only if the update writes the weights of all ranks into memory of this
 * process.
 *
 * Also computes the update's order of chunks. This is the order of declaration, because a forward pass usually reads
 * parameters in declaration order. But small parameters are updated together with their neighbours in memory, because
 * buckets are laid out in reverse order, and small parameters of all layers share a bucket.
 */

#include <stdint.h>

struct layout;
struct published;
struct segment;

/* Makes the page, which is kept for the next daemon. layout: must outlive the result. Return: 0 or -errno. */
int published_new(struct published **out, const struct layout *layout);
void published_free(struct published *published); /* NULL is fine */

/* Return: the page, which ranks map. */
const struct segment *published_segment(const struct published *published);

/* Begins an update. n_steps: the number of steps including this update. No other update may be running. */
void published_begin(struct published *published, uint64_t n_steps);

/* Return: the i-th chunk in the update's order. */
uint32_t published_chunk(const struct published *published, uint32_t i);

/* Records that a chunk has its new weights, or needs no update. A worker calls it once per chunk in each update. */
void published_add(struct published *published, uint32_t chunk);
