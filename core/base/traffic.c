/* SPDX-License-Identifier: Apache-2.0 */

/* Counts orders, and the time in which at least one is under way. */

#include "core/base/traffic.h"

#include <assert.h>
#include <stddef.h>

const char *traffic_name(enum traffic_kind kind)
{
    static const char *const names[N_TRAFFIC] = {
        [TRAFFIC_REDUCE_SCATTER] = "reduce-scatter",
        [TRAFFIC_ALL_GATHER] = "all-gather",
        [TRAFFIC_BROADCAST] = "broadcast",
        [TRAFFIC_FETCH] = "fetch",
    };

    assert(kind < N_TRAFFIC);
    return names[kind];
}

void traffic_begin(struct traffic *traffic, enum traffic_kind kind, uint64_t now_ns)
{
    assert(kind <= N_TRAFFIC);
    if (kind == N_TRAFFIC)
        return;
    if (traffic[kind].n_under_way++ == 0)
        traffic[kind].since_ns = now_ns;
}

void traffic_end(struct traffic *traffic, enum traffic_kind kind, uint64_t n_bytes_sent, uint64_t n_bytes_received,
                 uint64_t now_ns)
{
    struct traffic *t = &traffic[kind];

    if (kind == N_TRAFFIC)
        return;
    assert(kind < N_TRAFFIC);
    assert(t->n_under_way > 0);
    t->n_orders++;
    t->n_bytes_sent += n_bytes_sent;
    t->n_bytes_received += n_bytes_received;
    if (--t->n_under_way == 0)
        t->busy_ns += now_ns - t->since_ns;
}

void traffic_stop(struct traffic *traffic, uint64_t now_ns)
{
    for (struct traffic *t = traffic; t < traffic + N_TRAFFIC; t++) {
        if (t->n_under_way > 0)
            t->busy_ns += now_ns - t->since_ns;
        t->n_under_way = 0;
    }
}
