/* SPDX-License-Identifier: Apache-2.0 */

/* Gathering on GPUs (stage 3): each rank's pool on its GPU, and the loads into it. */

#include "daemon/step/gather-device.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/budget/plan.h"
#include "daemon/engines/device-keep.h"
#include "daemon/engines/device-pool.h"
#include "daemon/engines/devices.h"
#include "daemon/step/executor-device.h"
#include "daemon/step/fetch.h"
#include "daemon/step/step-device.h"

enum { FETCH_PARAMS = 64 }; /* maximum number of parameters in one order; picked */

_Static_assert((int)FETCH_PARAMS <= (int)DEVICE_MAX_FETCHES, "they are one order");

struct rank_pool {
    struct device_pool *pool;
    bool loading; /* one load at a time, because two loads must not write to the same place */
    bool stale;   /* the weights changed during a load */
    bool lost;    /* the parameters that the rank waits for could not be loaded */
};

struct device_gather {
    struct pools base;
    unsigned n_loading, n_local;
    struct rank_pool ranks[]; /* one per local rank */
};

struct load {
    struct executor *executor;
    unsigned local_rank;
    bool hinted;
    int result;
    unsigned n_waiting; /* unfinished orders, plus 1 until all orders are made */
    size_t n_params;
    uint32_t params[];
};

static struct device_gather *gather_of(const struct executor *executor)
{
    return (struct device_gather *)executor->pools; /* base is the first member */
}

static struct rank_pool *pool_of(const struct executor *executor, unsigned local_rank)
{
    assert(local_rank < gather_of(executor)->n_local);
    return &gather_of(executor)->ranks[local_rank];
}

static const struct layout *layout_of(const struct executor *executor)
{
    return executor->options.layout;
}

static void device_free(struct pools *pools)
{
    struct device_gather *gather = (struct device_gather *)pools;

    for (unsigned local = 0; local < gather->n_local; local++)
        device_pool_free(gather->ranks[local].pool);
    free(gather);
}

static bool device_is_busy(const struct pools *pools)
{
    return gather_of(pools->executor)->n_loading > 0;
}

/* Return: 0, because pools are on the GPUs. */
static uint64_t device_held_bytes(const struct pools *pools)
{
    return 0;
}

static bool device_fits(const struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    return n_params <= WIRE_MAX_POOL_OFFSETS &&
           device_pool_fits(pool_of(pools->executor, local_rank)->pool, params, n_params);
}

/* Do nothing, because each rank has its own pool. */

static void device_hold(struct pools *pools, uint32_t param)
{
}

static void device_let_go(struct pools *pools)
{
}

/* ---- loading ------------------------------------------------------------------------------------------- */

/* Handles the end of one order of the load. Ends the load after its last order. */
static void load_done(void *userdata, int result)
{
    struct load *load = userdata;
    struct executor *executor = load->executor;
    const struct executor_events *events = &executor->options.events;
    struct rank_pool *to = pool_of(executor, load->local_rank);

    assert(load->n_waiting > 0);
    if (result < 0)
        load->result = result;
    if (--load->n_waiting > 0)
        return;
    assert(to->loading);
    assert(gather_of(executor)->n_loading > 0);
    result = load->result;
    to->loading = false;
    gather_of(executor)->n_loading--;
    if (result < 0 || to->stale)
        device_pool_forget(to->pool);
    to->stale = false;
    to->lost = result < 0 && !load->hinted;
    free(load);
    events->loaded(events->userdata, result);
}

/* One node: orders the engine to fetch the parameters into the pool. Return: 0 or -errno. */
static int order_fetch(struct load *load, const uint32_t *params, const uint64_t *offsets_bytes, size_t n_params)
{
    const struct executor *executor = load->executor;
    struct device_fetched fetched[FETCH_PARAMS];

    assert(n_params <= FETCH_PARAMS);
    for (size_t i = 0; i < n_params; i++)
        fetched[i] = (struct device_fetched){.param = params[i], .offset_bytes = offsets_bytes[i]};
    return step_device_fetch(executor->step,
                             &(struct device_order_fetch){.rank = executor->first_rank + load->local_rank,
                                                          .params = fetched,
                                                          .n_params = n_params},
                             load_done, load);
}

/* Calls events.fetch() and returns its result. */
static int fetch_elems(const struct load *load, struct fetch what)
{
    const struct executor_events *events = &load->executor->options.events;

    return events->fetch(events->userdata, &what);
}

/* Several nodes: asks node 0 to order the fetch on the engines of all nodes. Return: as for events.fetch(). */
static int ask_fetch(struct load *load, const uint32_t *params, const uint64_t *offsets_bytes, size_t n_params)
{
    return fetch_elems(load, (struct fetch){.kind = FETCH_GATHERED,
                                            .rank = load->executor->first_rank + load->local_rank,
                                            .params = params,
                                            .offsets_bytes = offsets_bytes,
                                            .n_params = n_params,
                                            .done = load_done,
                                            .userdata = load});
}

/* Orders fetches of masters that are on GPUs. The engines round these masters into the pool. Return: 0 or -errno. */
static int order_fetches(struct load *load)
{
    const struct device_pool *pool = pool_of(load->executor, load->local_rank)->pool;
    uint64_t offsets_bytes[FETCH_PARAMS];
    int r = 0;

    for (size_t i = 0, n; r == 0 && i < load->n_params; i += n) {
        n = MIN(load->n_params - i, ARRAY_SIZE(offsets_bytes));
        for (size_t k = 0; k < n; k++)
            offsets_bytes[k] = device_pool_offset(pool, load->params[i + k]);
        r = (load->executor->several_nodes ? ask_fetch : order_fetch)(load, load->params + i, offsets_bytes, n);
        load->n_waiting += r == 0;
    }
    return r;
}

/* Return: a move of n elements of a parameter to the pool. The caller sets the move's source. */
static struct devices_move move_of(const struct load *load, uint32_t param, uint64_t start, uint64_t n)
{
    const struct executor *executor = load->executor;
    size_t elem_bytes = dtype_size(layout_of(executor)->params[param].dtype);

    return (struct devices_move){
        .write = true,
        .local_rank = load->local_rank,
        .kind = DEVICE_POOL,
        .offset_bytes = device_pool_offset(pool_of(executor, load->local_rank)->pool, param) + start * elem_bytes,
        .n_bytes = n * elem_bytes,
    };
}

/*
 * Return: a move to the pool of elements that this node has in host memory. The move rounds fp32 masters to 16-bit
 * weights. Masters of 24 bits contain the weights.
 */
static struct devices_move move_own(const struct load *load, uint32_t param, uint64_t start, uint64_t n)
{
    const struct executor *executor = load->executor;
    const struct layout_param *p = &layout_of(executor)->params[param];
    struct devices_move move = move_of(load, param, start, n);
    bool master24 = p->trainable && state_is_master24(executor->state, p->bucket);

    if (n > 0 && master24)
        move.host = state_master24(executor->state, p->bucket, p->offset_elems + start).weights;
    else if (n > 0 && p->trainable)
        move.host = state_master(executor->state, p->bucket, p->offset_elems + start);
    else if (n > 0)
        move.host = state_frozen(executor->state, param);
    move.rounds = p->trainable && p->dtype != DTYPE_F32 && !master24;
    move.dtype = p->dtype;
    return move;
}

/*
 * Return: a move to the pool of elements that other nodes own. fetch_others() must have fetched these elements to
 * `landing`.
 */
static struct devices_move move_others(const struct load *load, uint32_t param, uint64_t start, uint64_t n)
{
    const struct executor *executor = load->executor;
    struct devices_move move = move_of(load, param, start, n);

    if (n > 0)
        move.host = executor->landing->map + move.offset_bytes;
    return move;
}

/* Copies this node's elements, and the elements fetched from other nodes, to the pool. Return: 0 or -errno. */
static int copy_masters(struct load *load)
{
    const struct executor *executor = load->executor;
    _cleanup_free_ struct devices_move *moves = calloc(3 * load->n_params + 1, sizeof(*moves));

    if (!moves)
        return -ENOMEM;
    for (size_t i = 0; i < load->n_params; i++) {
        uint32_t param = load->params[i];
        uint64_t start = 0, all = layout_of(executor)->params[param].n_elems, n = all;

        if (executor->several_nodes && layout_of(executor)->params[param].trainable) /* frozen ones are on all nodes */
            n = device_find_owned(executor, param, &start);
        assert(start + n <= all);
        moves[3 * i] = move_own(load, param, start, n);
        moves[3 * i + 1] = move_others(load, param, 0, start);
        moves[3 * i + 2] = move_others(load, param, start + n, all - start - n);
    }
    return devices_copy(executor->devices, moves, 3 * load->n_params, load_done, load);
}

static void others_are_here(void *userdata, int result)
{
    struct load *load = userdata;

    if (result == 0)
        result = copy_masters(load);
    if (result < 0)
        load_done(load, result);
}

/* Fetches the load's elements that other nodes own to `landing`. Return: as for events.fetch(). */
static int fetch_others(struct load *load)
{
    const struct device_pool *pool = pool_of(load->executor, load->local_rank)->pool;
    _cleanup_free_ uint64_t *offsets_bytes = calloc(load->n_params + 1, sizeof(*offsets_bytes));

    if (!load->executor->several_nodes)
        return 1;
    if (!offsets_bytes)
        return -ENOMEM;
    for (size_t i = 0; i < load->n_params; i++)
        offsets_bytes[i] = device_pool_offset(pool, load->params[i]);
    return fetch_elems(load, (struct fetch){.kind = FETCH_PUBLISHED,
                                            .params = load->params,
                                            .offsets_bytes = offsets_bytes,
                                            .n_params = load->n_params,
                                            .done = others_are_here,
                                            .userdata = load});
}

/* Loads the parameters from masters that are in the host memory of all nodes. Return: 0 or -errno. */
static int bring_masters(struct load *load)
{
    int r = fetch_others(load);

    if (r > 0)
        r = copy_masters(load);
    load->n_waiting += r == 0;
    return r;
}

/*
 * Starts to load parameters that have places in the pool. Return: 0 or -errno. After -errno, the pool is empty and no
 * load runs.
 */
static int start_load(struct executor *executor, unsigned local_rank, bool hinted, const uint32_t *params,
                      size_t n_params)
{
    struct rank_pool *to = pool_of(executor, local_rank);
    struct load *load = malloc(sizeof(*load) + n_params * sizeof(load->params[0]));
    int r;

    assert(!to->loading);
    if (!load) {
        device_pool_forget(to->pool);
        return -ENOMEM;
    }
    *load = (struct load){
        .executor = executor, .local_rank = local_rank, .hinted = hinted, .n_waiting = 1, .n_params = n_params};
    memcpy(load->params, params, n_params * sizeof(*params));
    r = executor->state->staging_copy ? order_fetches(load) : bring_masters(load);
    if (r < 0 && load->n_waiting == 1) {
        free(load);
        device_pool_forget(to->pool);
        return r;
    }
    to->loading = true;
    gather_of(executor)->n_loading++;
    load->result = r; /* < 0: some orders could not be made */
    load->n_waiting--;
    return 0;
}

/* Return: whether `landing` is in use. Only one local rank's load may use `landing` at a time. */
static bool is_taken(const struct executor *executor)
{
    return executor->several_nodes && !executor->state->staging_copy && gather_of(executor)->n_loading > 0;
}

/* ---- verbs --------------------------------------------------------------------------------------------- */

static void device_gather(struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    pool_of(pools->executor, local_rank)->lost = false; /* the previous request may have set `lost` */
}

/* Also starts to load absent parameters, unless another load must end first. */
static enum gathered device_find(struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    struct executor *executor = pools->executor;
    struct rank_pool *to = pool_of(executor, local_rank);
    _cleanup_free_ uint32_t *absent = NULL;
    bool lost = to->lost;
    size_t n_absent;

    if (to->loading || is_taken(executor))
        return GATHER_LOADS;
    to->lost = false;
    if (lost)
        return GATHER_LOST;
    absent = calloc(n_params + 1, sizeof(*absent));
    if (!absent)
        return GATHER_LOST;
    n_absent = device_pool_place(to->pool, params, n_params, absent);
    if (n_absent == 0)
        return GATHER_THERE;
    return start_load(executor, local_rank, false, absent, n_absent) == 0 ? GATHER_LOADS : GATHER_LOST;
}

static bool device_places(const struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params,
                   uint64_t *offsets_bytes)
{
    const struct device_pool *pool = pool_of(pools->executor, local_rank)->pool;

    for (size_t i = 0; i < n_params; i++)
        offsets_bytes[i] = device_pool_offset(pool, params[i]);
    return true;
}

static void device_hint(struct pools *pools, unsigned local_rank, const uint32_t *params, size_t n_params)
{
    struct executor *executor = pools->executor;
    struct rank_pool *to = pool_of(executor, local_rank);
    _cleanup_free_ uint32_t *absent = calloc(n_params + 1, sizeof(*absent));
    size_t n_absent;

    if (!absent || to->loading || is_taken(executor) || !device_pool_fits(to->pool, params, n_params))
        return;
    n_absent = device_pool_place(to->pool, params, n_params, absent);
    if (n_absent > 0)
        (void)start_load(executor, local_rank, true, absent, n_absent);
}

/* Empties the pools. Parameters that are being loaded are dropped when their load ends. Return: false. */
static bool device_refresh(struct pools *pools, void (*done)(void *userdata), void *userdata)
{
    struct device_gather *gather = gather_of(pools->executor);

    for (unsigned local = 0; local < gather->n_local; local++) {
        struct rank_pool *pool = &gather->ranks[local];

        pool->stale = pool->loading; /* possible: a successor may gather while all other ranks wait for the step */
        if (!pool->loading)
            device_pool_forget(pool->pool);
    }
    return false;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static const struct pools_ops ops = {
    .fits = device_fits,
    .hold = device_hold,
    .release = device_hold,
    .gather = device_gather,
    .find = device_find,
    .places = device_places,
    .hint = device_hint,
    .refresh = device_refresh,
    .is_busy = device_is_busy,
    .held_bytes = device_held_bytes,
    .let_go = device_let_go,
    .free = device_free,
};

int device_gather_new(struct executor *executor)
{
    unsigned n_local = executor->n_local;
    struct device_gather *gather = calloc(1, sizeof(*gather) + n_local * sizeof(gather->ranks[0]));
    int r = 0;

    if (!gather)
        return -ENOMEM;
    gather->base = (struct pools){.ops = &ops, .executor = executor};
    gather->n_local = n_local;
    for (unsigned local = 0; r == 0 && local < n_local; local++)
        /* The GPU's memory is rounded up. Limits the pool to the planned size, because `landing` has no more. */
        r = device_pool_new(&gather->ranks[local].pool, layout_of(executor),
                            MIN(devices_keep(executor->devices)->facts->n_bytes[local][DEVICE_POOL],
                                plan_device_pool_bytes(layout_of(executor))));
    if (r < 0) {
        device_free(&gather->base);
        return r;
    }
    executor->pools = &gather->base;
    return 0;
}
