/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Stage 3: whole parameters on request. The pool segment has the layout of the
 * range: a parameter's place in it never changes, what changes is whether its
 * pages are there. Ranks that gather the same parameter share its pages. Pages of
 * released parameters stay until others need the room, so gathering again within a step costs nothing. A hint
 * (Prefetch) loads parameters as if they had been gathered and released: it is nobody's, so nothing has to be undone.
 *
 * Of a job on GPUs each rank has a pool on its own GPU instead, where things are as in gather-device.h.
 */

#include "daemon/job/state/gather.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/segment.h"
#include "core/diagnosis/cause.h"
#include "core/layout/layout.h"
#include "core/wire/wire.h"
#include "daemon/exchange/exchange.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/memory/transfer.h"
#include "daemon/nodes/nodes.h"
#include "daemon/step/fetch.h"
#include "daemon/step/gather-device.h"
#include "kernels/dtype.h"

struct pool_param {
    uint32_t n_ranks; /* that have it gathered */
    bool resident;    /* its pages are reserved */
    bool loading;
    bool fresh;        /* shows the committed weights */
    uint64_t released; /* when, for choosing what goes first */
};

struct pool {
    struct segment segment;
    struct pool_param *params;
    uint64_t resident_bytes, bound_bytes, clock;
    uint32_t n_loading;
    void (*refreshed)(struct job *job);
};

int pool_new(struct pool **out, struct job *job)
{
    struct pool *pool = calloc(1, sizeof(*pool));
    int r;

    if (!pool)
        return -ENOMEM;
    pool->segment = SEGMENT_NULL;
    pool->bound_bytes = job->memory.planned.pool;
    pool->params = calloc(job->layout->n_params, sizeof(*pool->params));
    r = pool->params ? segment_init(&pool->segment, "pool", job->layout->range_bytes) : -ENOMEM;
    if (r < 0) {
        pool_free(pool);
        return r;
    }
    *out = pool;
    return 0;
}

void pool_free(struct pool *pool)
{
    if (!pool)
        return;
    assert(pool->n_loading == 0);
    segment_deinit(&pool->segment);
    free(pool->params);
    free(pool);
}

const struct segment *pool_segment(const struct pool *pool)
{
    return &pool->segment;
}

uint64_t pool_held_bytes(const struct pool *pool)
{
    return pool->resident_bytes;
}

bool gather_is_busy(const struct job *job)
{
    return (job->gathered && job->gathered->n_loading > 0) || device_gather_is_busy(job->device_gathered);
}

static uint64_t param_bytes(const struct job *job, uint32_t param)
{
    const struct layout_param *p = &job->layout->params[param];

    return round_up(p->n_elems * dtype_size(p->dtype), page_size());
}

/* Gives pages of released parameters back, the longest released first, until n_bytes more fit under the bound. */
static void make_room(struct job *job, uint64_t n_bytes)
{
    struct pool *pool = job->gathered;

    while (pool->resident_bytes + n_bytes > pool->bound_bytes) {
        uint32_t oldest = UINT32_MAX;

        for (uint32_t p = 0; p < job->layout->n_params; p++)
            if (pool->params[p].resident && !pool->params[p].n_ranks && !pool->params[p].loading &&
                (oldest == UINT32_MAX || pool->params[p].released < pool->params[oldest].released))
                oldest = p;
        if (oldest == UINT32_MAX)
            return;
        segment_punch(&pool->segment, job->layout->params[oldest].range_offset_bytes, param_bytes(job, oldest));
        pool->resident_bytes -= param_bytes(job, oldest);
        pool->params[oldest].resident = pool->params[oldest].fresh = false;
    }
}

/* ---- loading ------------------------------------------------------------------------------------------- */

struct load {
    struct job *job;
    struct job_rank *hinted_by; /* NULL: a gather, a refresh */
    unsigned n_waiting;         /* for what is here, and for what other nodes have */
    int result;
    uint32_t n;
    uint32_t params[];
};

static void load_done(void *userdata, int result)
{
    struct load *load = userdata;
    struct job *job = load->job;
    struct pool *pool = job->gathered;
    void (*refreshed)(struct job * job) = NULL;

    if (result < 0)
        load->result = result;
    if (--load->n_waiting > 0)
        return;
    for (uint32_t i = 0; i < load->n; i++) {
        pool->params[load->params[i]].loading = false;
        pool->params[load->params[i]].fresh = load->result == 0;
    }
    pool->n_loading -= load->n;
    if (load->hinted_by)
        load->hinted_by->prefetching = false;
    free(load);
    if (pool->n_loading == 0) {
        refreshed = pool->refreshed;
        pool->refreshed = NULL;
    }
    gather_settle(job);
    if (refreshed)
        refreshed(job);
    else
        job_todo(job);
}

/* What other nodes own of it. */
static void load_remote(struct load *load)
{
    struct job *job = load->job;
    int r = job->nodes ? exchange_fetch(nodes_exchange(job->nodes), &(struct fetch){.kind = FETCH_PUBLISHED,
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

/* Return: 0 or -ENOMEM. */
static int start_load(struct job *job, struct job_rank *hinted_by, const uint32_t *params, uint32_t n)
{
    struct load *load = malloc(sizeof(*load) + n * sizeof(load->params[0]));
    struct pool *pool = job->gathered;
    int r;

    if (!load)
        return -ENOMEM;
    load->job = job;
    load->hinted_by = hinted_by;
    load->n = n;
    load->n_waiting = 1;
    load->result = 0;
    memcpy(load->params, params, n * sizeof(*params));
    r = transfer_start(job->pool, &(struct transfer_options){
                                      .state = job->state,
                                      .kernels = job->kernels,
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
            pool->resident_bytes += param_bytes(job, params[i]);
        p->resident = p->loading = true;
    }
    pool->n_loading += n;
    return 0;
}

bool gather_refresh(struct job *job, void (*done)(struct job *job))
{
    struct pool *pool = job->gathered;
    _cleanup_free_ uint32_t *params = NULL;
    uint32_t n = 0;

    if (job->device_gathered) /* what ranks have gathered they gather again */
        device_gather_forget(job);
    if (!pool)
        return false;
    params = calloc(job->layout->n_params, sizeof(*params));
    for (uint32_t p = 0; p < job->layout->n_params; p++) {
        pool->params[p].fresh = false;
        if (params && pool->params[p].n_ranks > 0 && job->layout->params[p].n_elems > 0)
            params[n++] = p;
    }
    if (n == 0 || start_load(job, NULL, params, n) < 0)
        return false;
    pool->refreshed = done;
    return true;
}

/* ---- gather and release -------------------------------------------------------------------------------- */

/* Else weights are published as a whole. */
static bool has_pools(const struct job *job)
{
    return job->gathered || job->device_gathered;
}

static void let_go(struct job *job, struct job_rank *rank, uint32_t param)
{
    rank->gathered[param] = 0;
    rank->live_elems -= job->layout->params[param].n_elems;
    if (!job->gathered)
        return;
    job->gathered->params[param].n_ranks--;
    job->gathered->params[param].released = ++job->gathered->clock;
}

static void undo_gather(struct job *job, struct job_rank *rank)
{
    for (uint32_t i = 0; i < rank->n_gathering; i++)
        if (--rank->gathered[rank->gathering[i]] == 0)
            let_go(job, rank, rank->gathering[i]);
    rank->n_gathering = 0;
}

static void refuse_lost(struct job *job, struct job_rank *rank)
{
    struct evidence_quota evidence = {.at = job_at(job, rank),
                                      .what = "pool of gathered weights",
                                      .unit = "bytes",
                                      .held = job->gathered ? job->gathered->resident_bytes : 0,
                                      .allowed = job->memory.planned.pool,
                                      .fix = "free memory on this machine"};

    undo_gather(job, rank);
    job_fault(job, rank, cause_quota(&evidence));
    job_is_held(job, rank);
}

/* Is what the rank waits for there? As far as another load of it has to begin first, it begins. */
static enum gathered look(struct job *job, struct job_rank *rank)
{
    enum gathered found = GATHER_THERE;

    if (job->device_gathered)
        return device_gather_look(job, rank);
    for (uint32_t i = 0; i < rank->n_gathering; i++) {
        const struct pool_param *p = &job->gathered->params[rank->gathering[i]];

        if (p->loading)
            return GATHER_LOADS;
        if (!p->fresh && job->layout->params[rank->gathering[i]].n_elems > 0)
            found = GATHER_LOST;
    }
    return found;
}

static int answer(struct job *job, struct job_rank *rank)
{
    if (job->device_gathered)
        return device_gather_answer(job, rank);
    job_answer_done(job, rank);
    return 0;
}

void gather_settle(struct job *job)
{
    for (unsigned r = job->world.first; r < job->world.end; r++) {
        struct job_rank *rank = &job->ranks[r];
        enum gathered found = rank->wait == WAIT_GATHER ? look(job, rank) : GATHER_LOADS;

        if (found == GATHER_LOADS)
            continue;
        if (found == GATHER_THERE && answer(job, rank) == 0)
            rank->n_gathering = 0;
        else
            refuse_lost(job, rank);
    }
}

/* Return: false when the rank's quota does not allow it. */
static bool charge_gather(struct job *job, struct job_rank *rank, const struct request_gather *request)
{
    uint64_t asked = 0, allowed = job->config->zero.stage3_max_live_parameters;

    for (size_t i = 0; i < request->n_params; i++)
        if (rank->gathered[request->params[i]]++ == 0) {
            asked += job->layout->params[request->params[i]].n_elems;
            rank->live_elems += job->layout->params[request->params[i]].n_elems;
            if (job->gathered)
                job->gathered->params[request->params[i]].n_ranks++;
        }
    for (size_t i = 0; i < request->n_params; i++)
        rank->gathering[rank->n_gathering++] = request->params[i];
    if (rank->live_elems <= allowed)
        return true;
    undo_gather(job, rank);
    job_fault(
        job, rank,
        cause_quota(&(struct evidence_quota){
            .at = job_at(job, rank),
            .what = "live parameters (stage3_max_live_parameters)",
            .unit = "elements",
            .asked = asked,
            .held = rank->live_elems,
            .allowed = allowed,
            .fix = "release modules before gathering others, or raise zero_optimization.stage3_max_live_parameters"}));
    return false;
}

/* What is neither there nor on its way, once each, and the bytes that its pages will take. Return: how many. */
static uint32_t find_absent(struct job *job, const uint32_t *params, size_t n_params, uint32_t *absent,
                            uint64_t *n_bytes)
{
    struct pool *pool = job->gathered;
    uint32_t n = 0;

    *n_bytes = 0;
    for (size_t i = 0; i < n_params; i++) {
        struct pool_param *p = &pool->params[params[i]];

        if (p->fresh || p->loading || job->layout->params[params[i]].n_elems == 0)
            continue;
        p->loading = true; /* so that a parameter named twice is loaded once */
        if (!p->resident)
            *n_bytes += param_bytes(job, params[i]);
        absent[n++] = params[i];
    }
    for (uint32_t i = 0; i < n; i++)
        pool->params[absent[i]].loading = false;
    return n;
}

/* A push of the backward that is running was refused. Refusing its gathers would cut it off, and show one fault of
 * many: the boundary tells. */
static bool is_told_later(const struct job *job, const struct job_rank *rank)
{
    return rank->fault.code && !rank->fault.told && !rank->abort_notice && job->ledger.ranks[rank->rank].open;
}

/* Begins to copy what is neither there nor on its way. */
static void load_absent(struct job *job, const struct job_rank *rank)
{
    _cleanup_free_ uint32_t *absent = calloc(rank->n_gathering + 1, sizeof(*absent));
    uint64_t n_bytes;
    uint32_t n;

    if (!absent)
        return; /* out of memory shows as "neither fresh nor loading", here and below */
    n = find_absent(job, rank->gathering, rank->n_gathering, absent, &n_bytes);
    make_room(job, n_bytes);
    if (n > 0)
        (void)start_load(job, NULL, absent, n);
}

/* Return: NULL, or why the request is none. */
static const char *check_gather(const struct job *job, const struct job_rank *rank,
                                const struct request_gather *request)
{
    if (!job->run.has_weights) /* what would be loaded now would be taken for the weights later */
        return "Gather: before Ready was answered";
    for (size_t i = 0; i < request->n_params; i++)
        if (request->params[i] >= job->layout->n_params)
            return "Gather.params: no such parameter";
    if (job->device_gathered && !device_gather_fits(job, rank, request->params, request->n_params))
        return "Gather.params: more than fits into the rank's pool";
    return NULL;
}

void job_gather(struct job *job, struct job_rank *rank, const struct request_gather *request)
{
    const char *wrong;
    uint32_t *gathering;

    if (!is_told_later(job, rank) && job_is_held(job, rank))
        return;
    wrong = check_gather(job, rank, request);
    if (wrong) {
        job_drop_peer(job, rank, wrong);
        return;
    }
    if (!has_pools(job)) {
        job_answer_done(job, rank);
        return;
    }
    rank->n_gathering = 0;
    gathering = realloc(rank->gathering, (request->n_params + 1) * sizeof(*gathering));
    if (!gathering) {
        refuse_lost(job, rank);
        return;
    }
    rank->gathering = gathering;
    if (!charge_gather(job, rank, request)) {
        job_is_held(job, rank);
        return;
    }
    if (job->gathered)
        load_absent(job, rank);
    job_wait(job, rank, WAIT_GATHER);
    gather_settle(job);
}

void job_release(struct job *job, struct job_rank *rank, const struct request_release *request)
{
    for (size_t i = 0; i < request->n_params; i++) {
        uint32_t param = request->params[i];

        if (param >= job->layout->n_params || (has_pools(job) && rank->gathered[param] == 0)) {
            job_drop_peer(job, rank, "Release.params: not gathered by this rank");
            return;
        }
        if (has_pools(job) && --rank->gathered[param] == 0)
            let_go(job, rank, param);
    }
}

/* A load while weights change would be a mixture: outside of training a hint is dropped. So are all but one at a time.
 */
static bool takes_hints(const struct job *job, const struct job_rank *rank)
{
    return has_pools(job) && job->run.has_weights && job->phase == JOB_TRAINING && !rank->prefetching;
}

void job_prefetch(struct job *job, struct job_rank *rank, const struct request_prefetch *request)
{
    _cleanup_free_ uint32_t *absent = calloc(request->n_params + 1, sizeof(*absent));
    uint64_t n_bytes;
    uint32_t n;

    for (size_t i = 0; i < request->n_params; i++) {
        if (request->params[i] >= job->layout->n_params) {
            job_drop_peer(job, rank, "Prefetch.params: no such parameter");
            return;
        }
    }
    if (!absent || !takes_hints(job, rank))
        return;
    if (job->device_gathered) {
        device_gather_hint(job, rank, request->params, request->n_params);
        return;
    }
    n = find_absent(job, request->params, request->n_params, absent, &n_bytes);
    make_room(job, n_bytes);
    if (n == 0 || job->gathered->resident_bytes + n_bytes > job->gathered->bound_bytes)
        return;
    for (uint32_t i = 0; i < n; i++)
        job->gathered->params[absent[i]].released = ++job->gathered->clock; /* as if it had just been in use */
    rank->prefetching = start_load(job, rank, absent, n) == 0;
}

void gather_detach(struct job *job, struct job_rank *rank)
{
    if (!has_pools(job) || !rank->gathered)
        return;
    for (uint32_t p = 0; p < job->layout->n_params; p++)
        if (rank->gathered[p] > 0)
            let_go(job, rank, p);
    rank->n_gathering = 0;
}
