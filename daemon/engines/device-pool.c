/* SPDX-License-Identifier: Apache-2.0 */

/* The places in a rank's pool: a ring that is filled from its head, over the oldest parameters. */

#include "daemon/engines/device-pool.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "core/base/base.h"
#include "core/wire/device-wire.h"

struct device_pool {
    const struct layout *layout;
    uint64_t n_bytes;
    uint64_t head;      /* the end of the parameter that was placed last */
    uint64_t *offsets;  /* per parameter, or DEVICE_POOL_NOWHERE */
    uint64_t *requests; /* per parameter: the number of the last request that named it */
    uint64_t n_requests;
    uint32_t *placed; /* a ring with room for all parameters, in the order of placing */
    uint32_t first, n_placed;
};

int device_pool_new(struct device_pool **out, const struct layout *layout, uint64_t n_bytes)
{
    struct device_pool *pool = calloc(1, sizeof(*pool));
    size_t n = (size_t)layout->n_params + 1;

    if (!pool)
        return -ENOMEM;
    pool->layout = layout;
    pool->n_bytes = n_bytes;
    pool->offsets = calloc(n, sizeof(*pool->offsets));
    pool->requests = calloc(n, sizeof(*pool->requests));
    pool->placed = calloc(n, sizeof(*pool->placed));
    if (!pool->offsets || !pool->requests || !pool->placed) {
        device_pool_free(pool);
        return -ENOMEM;
    }
    for (uint32_t p = 0; p < layout->n_params; p++)
        pool->offsets[p] = DEVICE_POOL_NOWHERE;
    *out = pool;
    return 0;
}

void device_pool_free(struct device_pool *pool)
{
    if (!pool)
        return;
    free(pool->offsets);
    free(pool->requests);
    free(pool->placed);
    free(pool);
}

static uint64_t place_bytes(const struct device_pool *pool, uint32_t param)
{
    const struct layout_param *p = &pool->layout->params[param];

    assert(param < pool->layout->n_params);
    return round_up(p->n_elems * dtype_size(p->dtype), (uint64_t)DEVICE_POOL_ALIGN);
}

bool device_pool_fits(const struct device_pool *pool, const uint32_t *params, size_t n_params)
{
    uint64_t n_left = pool->n_bytes;

    for (size_t i = 0; i < n_params; i++) {
        uint64_t n_bytes = place_bytes(pool, params[i]);

        if (n_bytes > n_left)
            return false;
        n_left -= n_bytes;
    }
    return true;
}

/* Removes the parameter that was placed first. Return: false if the request that is being served needs it. */
static bool drop_first(struct device_pool *pool)
{
    uint32_t param = pool->placed[pool->first];

    assert(pool->n_placed > 0);
    if (pool->requests[param] == pool->n_requests)
        return false;
    pool->offsets[param] = DEVICE_POOL_NOWHERE;
    pool->first = (pool->first + 1) % pool->layout->n_params;
    pool->n_placed--;
    return true;
}

/* Return: the offset of the parameter that was placed first, or DEVICE_POOL_NOWHERE if there is none. */
static uint64_t first_offset(const struct device_pool *pool)
{
    return pool->n_placed > 0 ? pool->offsets[pool->placed[pool->first]] : DEVICE_POOL_NOWHERE;
}

/*
 * Places a parameter at the head, and drops the parameters whose places it overlaps. Return: false if the request that
 * is being served needs one of the latter.
 */
static bool take_place(struct device_pool *pool, uint32_t param)
{
    uint64_t n_bytes = place_bytes(pool, param), at = pool->head;

    if (n_bytes > pool->n_bytes - at) {
        while (first_offset(pool) != DEVICE_POOL_NOWHERE && first_offset(pool) >= at)
            if (!drop_first(pool))
                return false;
        at = pool->head = 0;
    }
    while (first_offset(pool) != DEVICE_POOL_NOWHERE && first_offset(pool) >= at && first_offset(pool) < at + n_bytes)
        if (!drop_first(pool))
            return false;
    assert(at % DEVICE_POOL_ALIGN == 0);
    assert(at + n_bytes <= pool->n_bytes);
    assert(pool->offsets[param] == DEVICE_POOL_NOWHERE);
    assert(pool->n_placed < pool->layout->n_params);
    pool->offsets[param] = at;
    pool->placed[(pool->first + pool->n_placed++) % pool->layout->n_params] = param;
    pool->head = at + n_bytes;
    return true;
}

static bool place_absent(struct device_pool *pool, const uint32_t *params, size_t n_params, uint32_t *absent,
                         size_t *n_absent)
{
    *n_absent = 0;
    for (size_t i = 0; i < n_params; i++) {
        if (place_bytes(pool, params[i]) == 0 || pool->offsets[params[i]] != DEVICE_POOL_NOWHERE)
            continue;
        if (!take_place(pool, params[i]))
            return false;
        absent[(*n_absent)++] = params[i];
    }
    return true;
}

size_t device_pool_place(struct device_pool *pool, const uint32_t *params, size_t n_params, uint32_t *absent)
{
    size_t n_absent;
    bool placed;

    pool->n_requests++;
    for (size_t i = 0; i < n_params; i++)
        pool->requests[params[i]] = pool->n_requests;
    if (place_absent(pool, params, n_params, absent, &n_absent))
        return n_absent;
    /* A parameter that the request needs is in the way: empties the pool and places all of the request's parameters. */
    device_pool_forget(pool);
    placed = place_absent(pool, params, n_params, absent, &n_absent);
    assert(placed); /* the caller has checked that they fit */
    (void)placed;
    return n_absent;
}

uint64_t device_pool_offset(const struct device_pool *pool, uint32_t param)
{
    return place_bytes(pool, param) == 0 ? 0 : pool->offsets[param];
}

void device_pool_forget(struct device_pool *pool)
{
    for (; pool->n_placed > 0; pool->n_placed--, pool->first = (pool->first + 1) % pool->layout->n_params)
        pool->offsets[pool->placed[pool->first]] = DEVICE_POOL_NOWHERE;
    pool->head = 0;
}
