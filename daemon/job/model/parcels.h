/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The coordinator's second table, with its verbs for parcels. Among nodes, a parcel goes through these events:
 *
 *     complete            all ranks of this node have pushed the parcel: it is promised, and can be withdrawn
 *     collect_take()      node 0 awaits the parcel: the job posts it, and it belongs to the sum. The sum begins when no
 *                         other sum of the parcel is under way
 *     summed              this node's sum is made
 *     collect_settled()   all nodes have the elements that they own
 *
 * A job of one node takes a parcel as soon as it is complete, and settles it when it is summed.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/job/model/coordinator.h"

struct reduction;
struct ring;

struct parcels_ops {
    /* All ranks of this node have pushed the parcel. reduction: prepared, with the gradients that it will sum. */
    void (*complete)(struct coordinator *c, const struct reduction *reduction);
    /* The ranks of this node push nothing more of the parcel in that micro-batch. */
    void (*passed)(struct coordinator *c, uint32_t parcel, uint32_t micro_batch);
    void (*summed)(struct coordinator *c, uint32_t parcel);
    /*
     * Withdraws the promised parcels that node 0 does not await. job_withdrawn() follows. Until then, no parcel becomes
     * complete.
     */
    void (*withdraw)(struct coordinator *c);
    bool (*withdraws)(const struct coordinator *c);
    /*
     * sends_slots(): are the parcel's slots themselves sent to other nodes? owns_any(): does this node own, and so add,
     * any elements of the parcel?
     */
    bool (*sends_slots)(const struct coordinator *c, uint32_t parcel);
    bool (*owns_any)(const struct coordinator *c, uint32_t parcel);
    /* Holds the ring, from which slots of the parcel are sent, until all nodes have the parcel. */
    void (*lend)(struct coordinator *c, uint32_t parcel, struct ring *ring);
    /* Called before a ring is freed. */
    void (*ring_is_gone)(struct coordinator *c, const struct ring *ring);
    /* Is work of the open attempt under way between nodes? */
    bool (*is_busy)(const struct coordinator *c);
};

static inline void parcels_complete(struct coordinator *c, const struct reduction *reduction)
{
    if (c->parcels->complete)
        c->parcels->complete(c, reduction);
}

static inline void parcels_passed(struct coordinator *c, uint32_t parcel, uint32_t micro_batch)
{
    if (c->parcels->passed)
        c->parcels->passed(c, parcel, micro_batch);
}

static inline void parcels_summed(struct coordinator *c, uint32_t parcel)
{
    if (c->parcels->summed)
        c->parcels->summed(c, parcel);
}

static inline void parcels_withdraw(struct coordinator *c)
{
    if (c->parcels->withdraw)
        c->parcels->withdraw(c);
}

static inline bool parcels_withdraws(const struct coordinator *c)
{
    return c->parcels->withdraws ? c->parcels->withdraws(c) : false;
}

static inline bool parcels_sends_slots(const struct coordinator *c, uint32_t parcel)
{
    return c->parcels->sends_slots ? c->parcels->sends_slots(c, parcel) : false;
}

static inline bool parcels_owns_any(const struct coordinator *c, uint32_t parcel)
{
    return c->parcels->owns_any ? c->parcels->owns_any(c, parcel) : false;
}

static inline void parcels_lend(struct coordinator *c, uint32_t parcel, struct ring *ring)
{
    if (c->parcels->lend)
        c->parcels->lend(c, parcel, ring);
}

static inline void parcels_ring_is_gone(struct coordinator *c, const struct ring *ring)
{
    if (c->parcels->ring_is_gone)
        c->parcels->ring_is_gone(c, ring);
}

static inline bool parcels_is_busy(const struct coordinator *c)
{
    return c->parcels->is_busy ? c->parcels->is_busy(c) : false;
}
