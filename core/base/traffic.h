/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the engines of a job have moved, by collective, and in what time: that in which at least one order of a kind was
 * under way, so that bytes by time is what the job got, however many orders share the network. An order is under way
 * from when the engine is given it: where GPUs are slow to write what it sends, that counts.
 */

#include <stdint.h>

enum traffic_kind {
    TRAFFIC_REDUCE_SCATTER, /* of gradients, to those who own them */
    TRAFFIC_ALL_GATHER,     /* of updated weights; stages 1 and 2 */
    TRAFFIC_BROADCAST,      /* of initial weights, and of what a write window has changed */
    TRAFFIC_FETCH,          /* of parameters and state that somebody else owns */
    N_TRAFFIC,              /* none of them: not counted */
};

/* Of one kind. Zeroed: nothing yet. Times: of one monotonic clock. */
struct traffic {
    uint64_t n_orders, n_bytes_sent, n_bytes_received; /* of orders that have ended */
    uint64_t busy_ns;
    uint64_t since_ns; /* while n_under_way > 0: when that began */
    unsigned n_under_way;
};

/* "reduce-scatter" */
const char *traffic_name(enum traffic_kind kind);

/* The functions take an array of N_TRAFFIC. */
void traffic_begin(struct traffic *traffic, enum traffic_kind kind, uint64_t now_ns);
void traffic_end(struct traffic *traffic, enum traffic_kind kind, uint64_t n_bytes_sent, uint64_t n_bytes_received,
                 uint64_t now_ns);
/* What is under way will not end. */
void traffic_stop(struct traffic *traffic, uint64_t now_ns);
