/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The elements that each node owns, and the memory that a node holds to exchange them with the others. Pure. */

#include <stdbool.h>
#include <stdint.h>

struct config;
struct layout;
struct layout_parcel;

enum { SERVING_SLOTS = 2 }; /* one is sent while the next is rounded */

/* The ranks of a node. */
struct span {
    unsigned first, n;
};

/* Between GPUs each rank's gradient travels by itself. */
bool exchange_plan_on_devices(const struct config *config);

/* Pieces of all nodes, in rank order; and those of one node. */
unsigned exchange_plan_n_sources(const struct config *config);
unsigned exchange_plan_n_pieces(const struct config *config, unsigned node);

/* [*start, *start + n) of the bucket's elements that are in [from, from + n_elems) and owned by the span. Return: n. */
uint64_t exchange_plan_owned(const struct layout *layout, struct span span, uint32_t bucket, uint64_t from,
                             uint64_t n_elems, uint64_t *start);
uint64_t exchange_plan_owned_part(const struct layout *layout, const struct layout_parcel *parcel, struct span span,
                                  uint64_t *start);

/* The most elements that come in of one parcel. */
uint64_t exchange_plan_incoming_elems(const struct config *config, const struct layout *layout);

/* Bytes of what comes in of all parcels that move at one time. */
uint64_t exchange_plan_incoming_bytes(const struct config *config, const struct layout *layout);

/* Offloaded, stage 3: bytes in which what other nodes have waits on its way to a rank's pool. */
uint64_t exchange_plan_pool_bytes(const struct config *config, const struct layout *layout);

/* Bytes in which state and weights are rounded or copied for other nodes, in SERVING_SLOTS slots. */
uint64_t exchange_plan_serving_bytes(const struct config *config, const struct layout *layout);

/* Bytes of all: of the staging, of what comes in, and of what is served. */
uint64_t exchange_plan_bytes(const struct config *config, const struct layout *layout);
