/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Traffic: the bytes that the engines of a job have moved, by collective, and the time for it. Time counts while at
 * least one order of a kind is under way, so that bytes divided by time is the job's rate, even if several orders share
 * the network. An order is under way from the time that the engine receives it, so waiting for GPUs that still write
 * its data counts, too.
 */

#include <stdint.h>

enum traffic_kind {
    TRAFFIC_REDUCE_SCATTER, /* of gradients, to their owners */
    TRAFFIC_ALL_GATHER,     /* of updated weights; stages 1 and 2 */
    TRAFFIC_BROADCAST,      /* of initial weights, and of changes in a write window */
    TRAFFIC_FETCH,          /* of parameters and state that another node owns */
    N_TRAFFIC,              /* orders of this kind are not counted */
};

/* The traffic of one kind; all fields are 0 at first. Times are of one monotonic clock. */
struct traffic {
    uint64_t n_orders, n_bytes_sent, n_bytes_received; /* counts of orders that have ended */
    uint64_t busy_ns;
    uint64_t since_ns; /* the time when n_under_way was last raised from 0 */
    unsigned n_under_way;
};

/* Return: the name of the kind, such as "reduce-scatter". */
const char *traffic_name(enum traffic_kind kind);

/* The functions below take an array of N_TRAFFIC elements. */
void traffic_begin(struct traffic *traffic, enum traffic_kind kind, uint64_t now_ns);
void traffic_end(struct traffic *traffic, enum traffic_kind kind, uint64_t n_bytes_sent, uint64_t n_bytes_received,
                 uint64_t now_ns);
/* Stops the clocks of orders that are under way and will not end. */
void traffic_stop(struct traffic *traffic, uint64_t now_ns);
