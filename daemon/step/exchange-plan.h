/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What moves between nodes, as the configuration and the layout say: in how many pieces, who owns what, and what memory
 * a node needs for it. Pure.
 */

#include <stdbool.h>
#include <stdint.h>

struct config;
struct layout;
struct layout_parcel;

/* Of slots for weights that are rounded, or values that are copied, for other nodes. */
enum { EXCHANGE_SERVING_SLOTS = 2 }; /* one is sent while the next is rounded */

/* Ranks of a node. */
struct span {
    unsigned first, n;
};

/* Between GPUs each rank's gradient travels by itself: a piece is one rank. */
bool exchange_moves_ranks(const struct config *config);

/* Pieces of all nodes, in rank order; and those of one node. */
unsigned exchange_n_sources(const struct config *config);
unsigned exchange_n_pieces(const struct config *config, unsigned node);

/* [*start, *start + n) of the bucket's elements that are in [from, from + n_elems) and owned by the span. Return: n. */
uint64_t exchange_owned_range(const struct layout *layout, struct span span, uint32_t bucket, uint64_t from,
                              uint64_t n_elems, uint64_t *start);
uint64_t exchange_owned_part(const struct layout *layout, const struct layout_parcel *parcel, struct span span,
                             uint64_t *start);

/* The most that comes in of one parcel; and of all that may be under way. */
uint64_t exchange_incoming_elems(const struct config *config, const struct layout *layout);
uint64_t exchange_incoming_bytes(const struct config *config, const struct layout *layout);

uint64_t exchange_serving_bytes(const struct config *config, const struct layout *layout);

/* All of it: staging, what comes in, what is served. */
uint64_t exchange_bytes(const struct config *config, const struct layout *layout);
