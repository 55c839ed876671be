/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The elements that each node owns, and the memory that a node needs to exchange them with other nodes. Pure. */

#include <stdbool.h>
#include <stdint.h>

struct config;
struct layout;
struct layout_parcel;

enum { SERVING_SLOTS = 2 }; /* one slot is sent while the next is rounded */

/* The ranks of a node. */
struct span {
    unsigned first, n;
};

/* Return: true if GPUs exchange gradients, each rank's gradient separately. */
bool exchange_plan_on_devices(const struct config *config);

/* exchange_plan_n_sources(): the number of pieces of all nodes, in rank order. exchange_plan_n_pieces(): of one
 * node. */
unsigned exchange_plan_n_sources(const struct config *config);
unsigned exchange_plan_n_pieces(const struct config *config, unsigned node);

/* Return: n, where [*start, *start + n) are the bucket's elements in [from, from + n_elems) that the span owns. */
uint64_t exchange_plan_owned(const struct layout *layout, struct span span, uint32_t bucket, uint64_t from,
                             uint64_t n_elems, uint64_t *start);
uint64_t exchange_plan_owned_part(const struct layout *layout, const struct layout_parcel *parcel, struct span span,
                                  uint64_t *start);

/* Return: the most elements that this node receives of one parcel. */
uint64_t exchange_plan_incoming_elems(const struct config *config, const struct layout *layout);

/* Return: the bytes that this node receives of all parcels that are exchanged at one time. */
uint64_t exchange_plan_incoming_bytes(const struct config *config, const struct layout *layout);

/* Return: the bytes for parameters of other nodes on their way to a rank's pool, in stage 3 with offloading. */
uint64_t exchange_plan_pool_bytes(const struct config *config, const struct layout *layout);

/* Return: the bytes of the SERVING_SLOTS slots in which state and weights are rounded or copied for other nodes. */
uint64_t exchange_plan_serving_bytes(const struct config *config, const struct layout *layout);

/* Return: the bytes of the whole exchange: staging, received data, and served data. */
uint64_t exchange_plan_bytes(const struct config *config, const struct layout *layout);
