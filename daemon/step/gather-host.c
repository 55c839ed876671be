/* SPDX-License-Identifier: Apache-2.0 */

/* The pool of gathered weights in host memory (stage 3). All ranks of this node map its segment. */

#include "daemon/step/gather-host.h"

#include <assert.h>
#include <string.h>
#include <unistd.h>

#include "core/base/base.h"
#include "core/base/segment.h"
#include "core/layout/layout.h"
#include "daemon/memory/transfer.h"
#include "daemon/step/executor.h"
#include "daemon/step/fetch.h"
#include "daemon/step/step.h"
#include "kernels/dtype.h"

struct pool_param {
    uint32_t n_ranks; /* ranks that hold the parameter gathered */
    bool resident;    /* its pages are reserved */
    bool was_found;   /* resident since an earlier daemon, and held for that daemon's ranks */
    bool loading;
    bool fresh;        /* its pages have the committed weights */
    uint64_t released; /* `clock` at the last release; evict_released() frees the oldest */
};

struct host_pool {
    struct pools base;
    struct segment segment;
    struct pool_param *params;
    uint64_t resident_bytes, bound_bytes, clock;
    uint32_t n_loading;
    bool hinted[STEP_MAX_RANKS]; /* per local rank: a hint is being loaded, one at a time */
    void (*refreshed)(void *userdata);
    void *refreshed_userdata;
};

static struct host_pool *pool_of(const struct pools *pools)
{
    return (struct host_pool *)pools; /* base is the first member */
}

static const struct layout *layout_of_pool(const struct host_pool *pool)
{
    return pool->base.executor->options.layout;
}

static uint64_t param_bytes(const struct host_pool *pool, uint32_t param)
{
    const struct layout_param *p = &layout_of_pool(pool)->params[param];

    return round_up(p->n_elems * dtype_size(p->dtype), page_size());
}

/*
 * Finds parameters that are resident since an earlier daemon. Holds them until host_let_go(), because ranks may
 * read them.
 */
static void find_resident(struct host_pool *pool)
{
    for (uint32_t p = 0; p < layout_of_pool(pool)->n_params; p++) {
        off_t start = (off_t)layout_of_pool(pool)->params[p].range_offset_bytes, n_bytes = (off_t)param_bytes(pool, p);
        off_t data = n_bytes > 0 ? lseek(pool->segment.fd, start, SEEK_DATA) : -1;

        if (data < 0 || data >= start + n_bytes)
            continue;
        pool->params[p].resident = pool->params[p].was_found = true;
        pool->params[p].n_ranks = 1;
        pool->resident_bytes += (uint64_t)n_bytes;
    }
}

static void host_free(struct pools *pools)
{
    struct host_pool *pool = pool_of(pools);

    segment_deinit(&pool->segment);
    free(pool->params);
    free(pool);
}

const struct segment *host_pool_segment(const struct pools *pools)
{
    return &pool_of(pools)->segment;
}

static uint64_t host_held_bytes(const struct pools *pools)
{
    return pool_of(pools)->resident_bytes;
}

static bool host_is_busy(const struct pools *pools)
{
    return pool_of(pools)->n_loading > 0;
}

/* Frees the pages of released parameters, oldest release first, until n_bytes of new pages fit under the bound. */
static void evict_released(struct host_pool *pool, uint64_t n_bytes)
{
    while (pool->resident_bytes + n_bytes > pool->bound_bytes) {
        uint32_t oldest = UINT32_MAX;

        for (uint32_t p = 0; p < layout_of_pool(pool)->n_params; p++)
            if (pool->params[p].resident && !pool->params[p].n_ranks && !pool->params[p].loading &&
                (oldest == UINT32_MAX || pool->params[p].released < pool->params[oldest].released))
                oldest = p;
        if (oldest == UINT32_MAX)
            return;
        segment_punch(&pool->segment, layout_of_pool(pool)->params[oldest].range_offset_bytes,
                      param_bytes(pool, oldest));
        assert(pool->resident_bytes >= param_bytes(pool, oldest));
        pool->resident_bytes -= param_bytes(pool, oldest);
        pool->params[oldest].resident = pool->params[oldest].fresh = false;
    }
}

void host_pool_bound(struct pools *pools, uint64_t n_bytes)
{
    pool_of(pools)->bound_bytes = n_bytes;
    evict_released(pool_of(pools), 0);
}

/* ---- loading ------------------------------------------------------------------------------------------- */

struct load {
    struct host_pool *pool;
    bool *hinted;       /* the hinting rank's flag; NULL: a gather or refresh */
    unsigned n_waiting; /* unfinished operations: copy of this node's elements, fetch from other nodes */
    int result;
    uint32_t n;
    uint32_t params[];
};

static void load_done(void *userdata, int result)
{
    struct load *load = userdata;
    struct host_pool *pool = load->pool;
    const struct executor_events *events = &pool->base.executor->options.events;
    void (*refreshed)(void *userdata) = NULL;

    assert(load->n_waiting > 0);
    if (result < 0)
        load->result = result;
    if (--load->n_waiting > 0)
        return;
    for (uint32_t i = 0; i < load->n; i++) {
        pool->params[load->params[i]].loading = false;
        pool->params[load->params[i]].fresh = load->result == 0;
    }
    assert(pool->n_loading >= load->n);
    pool->n_loading -= load->n;
    if (load->hinted)
        *load->hinted = false;
    result = load->result;
    free(load);
    if (pool->n_loading == 0) {
        refreshed = pool->refreshed;
        pool->refreshed = NULL;
    }
    events->loaded(events->userdata, result);
    if (refreshed)
        refreshed(pool->refreshed_userdata);
}

/* Starts to fetch the load's elements that other nodes own. */
static void load_remote(struct load *load)
{
    const struct executor *executor = load->pool->base.executor;
    const struct executor_events *events = &executor->options.events;
    int r = executor->several_nodes ? events->fetch(events->userdata, &(struct fetch){.kind = FETCH_PUBLISHED,
                                                                                      .params = load->params,
                                                                                      .n_params = load->n,
                                                                                      .done = load_done,
                                                                                      .userdata = load})
                                    : 1;

    if (r == 0)
        load->n_waiting++;
    else if (r < 0)
        load->result = r;
}

/*
 * Starts to load the parameters. hinted: the hinting rank's flag, which the end of the load clears, or NULL. Return: 0
 * or -ENOMEM.
 */
static int start_load(struct host_pool *pool, bool *hinted, const uint32_t *params, uint32_t n)
{
    struct load *load = malloc(sizeof(*load) + n * sizeof(load->params[0]));
    int r;

    assert(n > 0);
    if (!load)
        return -ENOMEM;
    load->pool = pool;
    load->hinted = hinted;
    load->n = n;
    load->n_waiting = 1;
    load->result = 0;
    memcpy(load->params, params, n * sizeof(*params));
    r = transfer_start(pool->base.executor->options.pool, &(struct transfer_options){
                                                         .state = pool->base.executor->state,
                                                         .kernels = pool->base.executor->options.kernels,
                                                         .segment = &pool->segment,
                                                         .params = load->params,
                                                         .n_params = n,
                                                         .range = true,
                                                         .direction = TRANSFER_FETCH,
                                                         .done = load_done,
                                                         .userdata = load,
                                                     });
    if (r < 0) {
        free(load);
        return r;
    }
    load_remote(load);
    for (uint32_t i = 0; i < n; i++) {
        struct pool_param *p = &pool->params[params[i]];

        if (!p->resident)
            pool->resident_bytes += param_bytes(pool, params[i]);
        p->resident = p->loading = true;
    }
    pool->n_loading += n;
    return 0;
}

static bool host_refresh(struct pools *pools, void (*done)(void *userdata), void *userdata)
{
    struct host_pool *pool = pool_of(pools);
    _cleanup_free_ uint32_t *params = calloc(layout_of_pool(pool)->n_params, sizeof(*params));
    uint32_t n = 0;

    for (uint32_t p = 0; p < layout_of_pool(pool)->n_params; p++) {
        pool->params[p].fresh = false;
        if (params && pool->params[p].n_ranks > 0 && layout_of_pool(pool)->params[p].n_elems > 0)
            params[n++] = p;
    }
    if (n == 0 || start_load(pool, NULL, params, n) < 0)
        return false;
    pool->refreshed = done;
    pool->refreshed_userdata = userdata;
    return true;
}

/* ---- gather and release -------------------------------------------------------------------------------- */

/* A gather beyond the bound is allowed, and fails only without memory. */
static bool host_fits(const struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    return true;
}

static void host_hold(struct pools *pools, uint32_t param)
{
    struct host_pool *pool = pool_of(pools);

    assert(param < layout_of_pool(pool)->n_params);
    pool->params[param].n_ranks++;
}

static void host_release(struct pools *pools, uint32_t param)
{
    struct host_pool *pool = pool_of(pools);

    assert(param < layout_of_pool(pool)->n_params);
    assert(pool->params[param].n_ranks > 0);
    pool->params[param].n_ranks--;
    pool->params[param].released = ++pool->clock;
}

static void host_let_go(struct pools *pools)
{
    struct host_pool *pool = pool_of(pools);

    for (uint32_t p = 0; p < layout_of_pool(pool)->n_params; p++) {
        if (pool->params[p].was_found)
            host_release(pools, p);
        pool->params[p].was_found = false;
    }
}

/*
 * Lists in `absent` the parameters that are neither loaded nor being loaded, each parameter once. *n_bytes: the size of
 * the pages to reserve for these parameters. Return: the number of parameters in `absent`.
 */
static uint32_t find_absent(struct host_pool *pool, const uint32_t *params, size_t n_params, uint32_t *absent,
                            uint64_t *n_bytes)
{
    uint32_t n = 0;

    *n_bytes = 0;
    for (size_t i = 0; i < n_params; i++) {
        struct pool_param *p = &pool->params[params[i]];

        if (p->fresh || p->loading || layout_of_pool(pool)->params[params[i]].n_elems == 0)
            continue;
        p->loading = true; /* so that a repeated parameter is listed once */
        if (!p->resident)
            *n_bytes += param_bytes(pool, params[i]);
        absent[n++] = params[i];
    }
    for (uint32_t i = 0; i < n; i++)
        pool->params[absent[i]].loading = false;
    return n;
}

static void host_gather(struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    struct host_pool *pool = pool_of(pools);
    _cleanup_free_ uint32_t *absent = calloc(n_params + 1, sizeof(*absent));
    uint64_t n_bytes;
    uint32_t n;

    if (!absent)
        return; /* host_find() then returns GATHER_LOST, also after a failure below */
    n = find_absent(pool, params, n_params, absent, &n_bytes);
    evict_released(pool, n_bytes);
    if (n > 0)
        (void)start_load(pool, NULL, absent, n);
}

static enum gathered host_find(struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    const struct host_pool *pool = pool_of(pools);
    enum gathered found = GATHER_THERE;

    for (size_t i = 0; i < n_params; i++) {
        const struct pool_param *p = &pool->params[params[i]];

        if (p->loading)
            return GATHER_LOADS;
        if (!p->fresh && layout_of_pool(pool)->params[params[i]].n_elems > 0)
            found = GATHER_LOST;
    }
    return found;
}

/* The layout determines the places. */
static bool host_places(const struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params,
                   uint64_t *offsets_bytes)
{
    return false;
}

static void host_hint(struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    struct host_pool *pool = pool_of(pools);
    _cleanup_free_ uint32_t *absent = calloc(n_params + 1, sizeof(*absent));
    bool *hinted = &pool->hinted[local_rank];
    uint64_t n_bytes;
    uint32_t n;

    assert(local_rank < STEP_MAX_RANKS);
    if (!absent || *hinted)
        return;
    n = find_absent(pool, params, n_params, absent, &n_bytes);
    evict_released(pool, n_bytes);
    if (n == 0 || pool->resident_bytes + n_bytes > pool->bound_bytes)
        return;
    for (uint32_t i = 0; i < n; i++)
        pool->params[absent[i]].released = ++pool->clock; /* so that it is evicted last */
    *hinted = start_load(pool, hinted, absent, n) == 0;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static const struct pools_ops ops = {
    .fits = host_fits,
    .hold = host_hold,
    .release = host_release,
    .gather = host_gather,
    .find = host_find,
    .places = host_places,
    .hint = host_hint,
    .refresh = host_refresh,
    .is_busy = host_is_busy,
    .held_bytes = host_held_bytes,
    .let_go = host_let_go,
    .free = host_free,
};

int host_pool_new(struct executor *executor)
{
    struct host_pool *pool = calloc(1, sizeof(*pool));
    int r;

    if (!pool)
        return -ENOMEM;
    pool->base = (struct pools){.ops = &ops, .executor = executor};
    pool->segment = SEGMENT_NULL;
    pool->bound_bytes = executor->options.gather_bytes;
    pool->params = calloc(layout_of_pool(pool)->n_params, sizeof(*pool->params));
    r = pool->params ? segment_init_kept(&pool->segment, "pool", layout_of_pool(pool)->range_bytes) : -ENOMEM;
    if (r < 0) {
        host_free(&pool->base);
        return r;
    }
    if (pool->segment.found)
        find_resident(pool);
    executor->pools = &pool->base;
    return 0;
}
