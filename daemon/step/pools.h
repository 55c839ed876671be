/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3: the pools of whole parameters that ranks gather. In host memory (gather-host.c) all ranks of this node share
 * one pool. On GPUs (gather-device.c) each rank has its own. An implementation embeds struct pools as its first member.
 * Loop thread only. When a load has ended, the executor reports loaded().
 */

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct executor;
struct pools;

enum gathered {
    GATHER_LOADS, /* the load is running; loaded() follows */
    GATHER_THERE,
    GATHER_LOST, /* the load failed, or there is no memory */
};

struct pools_ops {
    /* Return: whether all of these parameters can be gathered for the rank at the same time. */
    bool (*fits)(const struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params);
    /* Record that a rank has gathered the parameter, and that a rank has released it. */
    void (*hold)(struct pools *pools, uint32_t param);
    void (*release)(struct pools *pools, uint32_t param);
    /* Starts to load those of the parameters that are absent. Call it when a rank waits for them. */
    void (*gather)(struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params);
    /* Return: whether the parameters that the rank waits for are loaded. Call it after gather() and loaded(). */
    enum gathered (*find)(struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params);
    /* Finds the parameters' offsets in the rank's pool. Return: false if the layout already determines the offsets. */
    bool (*places)(const struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params,
                   uint64_t *offsets_bytes);
    /* Starts to load parameters that a rank will gather next, unless this load would delay another load or gather. */
    void (*hint)(struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params);
    /*
     * Call it when the weights have changed. Loads the gathered parameters again, or drops them so that ranks must
     * gather again. Return: whether done() follows.
     */
    bool (*refresh)(struct pools *pools, void (*done)(void *userdata), void *userdata);
    /* Return: whether a parameter is being loaded. */
    bool (*is_busy)(const struct pools *pools);
    /* Return: the size of the pages of gathered parameters in host memory. */
    uint64_t (*held_bytes)(const struct pools *pools);
    /*
     * Releases the parameters that were held for ranks of an earlier daemon. Ranks that have resumed hold theirs by
     * hold().
     */
    void (*let_go)(struct pools *pools);
    void (*free)(struct pools *pools); /* must not be busy */
};

struct pools {
    const struct pools_ops *ops;
    struct executor *executor; /* outlives the pools */
};

static inline bool pools_fits(const struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    return pools->ops->fits(pools, local_rank, params, n_params);
}

static inline void pools_hold(struct pools *pools, uint32_t param)
{
    pools->ops->hold(pools, param);
}

static inline void pools_release(struct pools *pools, uint32_t param)
{
    pools->ops->release(pools, param);
}

static inline void pools_gather(struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    pools->ops->gather(pools, local_rank, params, n_params);
}

static inline enum gathered pools_find(struct pools *pools, unsigned local_rank, const uint32_t *params,
                                       size_t n_params)
{
    return pools->ops->find(pools, local_rank, params, n_params);
}

static inline bool pools_places(const struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params,
                                uint64_t *offsets_bytes)
{
    return pools->ops->places(pools, local_rank, params, n_params, offsets_bytes);
}

static inline void pools_hint(struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    pools->ops->hint(pools, local_rank, params, n_params);
}

/* These do nothing without pools: in stages 1 and 2, and until the memory of the GPUs is allocated. */

static inline bool pools_refresh(struct pools *pools, void (*done)(void *userdata), void *userdata)
{
    return pools && pools->ops->refresh(pools, done, userdata);
}

static inline bool pools_are_busy(const struct pools *pools)
{
    return pools && pools->ops->is_busy(pools);
}

static inline uint64_t pools_held_bytes(const struct pools *pools)
{
    return pools ? pools->ops->held_bytes(pools) : 0;
}

static inline void pools_let_go(struct pools *pools)
{
    if (pools)
        pools->ops->let_go(pools);
}

static inline void pools_free(struct pools *pools)
{
    assert(!pools_are_busy(pools));
    if (pools)
        pools->ops->free(pools);
}
