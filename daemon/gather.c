/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Stage 3: whole parameters on request. The pool segment has the layout of the
 * range: a parameter's place in it never changes, what changes is whether its
 * pages are there. Ranks that gather the same parameter share its pages. Pages of
 * released parameters stay until others need the room, so gathering again within a step costs nothing. A hint
 * (Prefetch) loads parameters as if they had been gathered and released: it is nobody's, so nothing has to be undone.
 *
 * Also here: reading a parameter's state.
 */

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base.h"
#include "daemon/device-job.h"
#include "daemon/job.h"
#include "daemon/nodes.h"
#include "daemon/param-norm.h"
#include "daemon/transfer.h"

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
    pool->bound_bytes = job->planned.pool;
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

bool pool_is_busy(const struct pool *pool)
{
    return pool && pool->n_loading > 0;
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

static void answer_gathers(struct job *job);

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
    answer_gathers(job);
    if (refreshed)
        refreshed(job);
    else
        job_settle(job);
}

/* What other nodes own of it. */
static void load_remote(struct load *load)
{
    struct job *job = load->job;
    int r = job->nodes ? exchange_fetch(nodes_exchange(job->nodes), &(struct exchange_fetch){.kind = EXCHANGE_PUBLISHED,
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

bool pool_refresh(struct job *job, void (*done)(struct job *job))
{
    struct pool *pool = job->gathered;
    _cleanup_free_ uint32_t *params = NULL;
    uint32_t n = 0;

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

static void let_go(struct job *job, struct job_rank *rank, uint32_t param)
{
    struct pool_param *p = &job->gathered->params[param];

    rank->gathered[param] = 0;
    rank->live_elems -= job->layout->params[param].n_elems;
    p->n_ranks--;
    p->released = ++job->gathered->clock;
}

static void undo_gather(struct job *job, struct job_rank *rank)
{
    for (uint32_t i = 0; i < rank->n_gathering; i++)
        if (--rank->gathered[rank->gathering[i]] == 0)
            let_go(job, rank, rank->gathering[i]);
    rank->n_gathering = 0;
}

static void answer_gathers(struct job *job)
{
    for (unsigned r = job->first_rank; r < job->end_rank; r++) {
        struct job_rank *rank = &job->ranks[r];
        bool loading = false, lost = false;

        if (rank->wait != WAIT_GATHER)
            continue;
        for (uint32_t i = 0; i < rank->n_gathering; i++) {
            const struct pool_param *p = &job->gathered->params[rank->gathering[i]];

            loading |= p->loading;
            lost |= !p->loading && !p->fresh && job->layout->params[rank->gathering[i]].n_elems > 0;
        }
        if (loading)
            continue;
        if (lost) {
            undo_gather(job, rank);
            job_fault(job, rank,
                      cause_quota(&(struct evidence_quota){.at = job_at(job, rank),
                                                           .what = "pool of gathered weights",
                                                           .unit = "bytes",
                                                           .held = job->gathered->resident_bytes,
                                                           .allowed = job->gathered->bound_bytes,
                                                           .fix = "free memory on this machine"}));
            job_is_held(job, rank);
            continue;
        }
        rank->n_gathering = 0;
        job_answer_done(job, rank);
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

void job_gather(struct job *job, struct job_rank *rank, const struct request_gather *request)
{
    _cleanup_free_ uint32_t *absent = calloc(request->n_params + 1, sizeof(*absent));
    uint32_t *gathering, n;
    uint64_t n_bytes;

    if (!is_told_later(job, rank) && job_is_held(job, rank))
        return;
    if (!job->has_weights) { /* what would be loaded now would be taken for the weights later */
        job_drop_peer(job, rank, "Gather: before Ready was answered");
        return;
    }
    for (size_t i = 0; i < request->n_params; i++) {
        if (request->params[i] >= job->layout->n_params) {
            job_drop_peer(job, rank, "Gather.params: no such parameter");
            return;
        }
    }
    gathering = realloc(rank->gathering, (request->n_params + 1) * sizeof(*gathering));
    if (gathering)
        rank->gathering = gathering;
    if (!job->gathered || !gathering || !absent) {
        job_answer_done(job, rank);
        return;
    }
    rank->n_gathering = 0;
    if (!charge_gather(job, rank, request)) {
        job_is_held(job, rank);
        return;
    }
    n = find_absent(job, rank->gathering, rank->n_gathering, absent, &n_bytes);
    make_room(job, n_bytes);
    job_wait(job, rank, WAIT_GATHER);
    if (n > 0)
        (void)start_load(job, NULL, absent, n); /* out of memory shows as "neither fresh nor loading" */
    answer_gathers(job);
}

void job_release(struct job *job, struct job_rank *rank, const struct request_release *request)
{
    for (size_t i = 0; i < request->n_params; i++) {
        uint32_t param = request->params[i];

        if (param >= job->layout->n_params || (job->gathered && rank->gathered[param] == 0)) {
            job_drop_peer(job, rank, "Release.params: not gathered by this rank");
            return;
        }
        if (job->gathered && --rank->gathered[param] == 0)
            let_go(job, rank, param);
    }
}

/* A load while weights change would be a mixture: outside of training a hint is dropped. So are all but one at a time.
 */
static bool takes_hints(const struct job *job, const struct job_rank *rank)
{
    return job->gathered && job->has_weights && job->phase == JOB_TRAINING && !rank->prefetching;
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
    if (!job->gathered || !rank->gathered)
        return;
    for (uint32_t p = 0; p < job->layout->n_params; p++)
        if (rank->gathered[p] > 0)
            let_go(job, rank, p);
    rank->n_gathering = 0;
}

/* ---- reading state ------------------------------------------------------------------------------------- */

struct reading {
    struct work work;
    struct job *job;
    struct job_rank *rank;
    void *peer;
    uint64_t incarnation; /* another session may get the address of one that is gone */
    struct segment segment;
    uint32_t param;
    enum wire_state_kind kind;
    unsigned n_waiting; /* for what is here, and for what other nodes have */
    int result;
};

/* The wire's kinds of state that are arrays, by the state's own numbers. */
_Static_assert((int)EXCHANGE_MASTER == (int)STATE_MASTER && (int)EXCHANGE_EXP_AVG == (int)STATE_EXP_AVG &&
                   (int)EXCHANGE_EXP_AVG_SQ == (int)STATE_EXP_AVG_SQ,
               "and of what is fetched");
_Static_assert((int)WIRE_STATE_MASTER == (int)STATE_MASTER && (int)WIRE_STATE_EXP_AVG == (int)STATE_EXP_AVG &&
                   (int)WIRE_STATE_EXP_AVG_SQ == (int)STATE_EXP_AVG_SQ,
               "kinds of state are numbered alike");

static const float *array_of(const struct job *job, uint32_t bucket, uint64_t elem, enum wire_state_kind kind)
{
    return state_values(job->state, (enum state_kind)kind, bucket, elem);
}

static void reading_run(struct work *work, uint32_t item)
{
    struct reading *reading = container_of(work, struct reading, work);
    const struct job *job = reading->job;
    const struct layout_param *p = &job->layout->params[reading->param];
    float *dst = (float *)reading->segment.map;

    (void)item;
    if (segment_reserve(&reading->segment, 0, reading->segment.n_bytes) < 0) {
        reading->result = -ENOMEM;
        return;
    }
    if (job->state->mirror)
        return; /* it is copied there */
    if (!p->trainable)
        job->kernels->convert_to_f32(dst, state_frozen(job->state, reading->param), p->dtype, p->n_elems);
    for (uint32_t c = p->first_chunk; p->trainable && c < p->first_chunk + p->n_chunks; c++) {
        const struct layout_chunk *chunk = &job->layout->chunks[c];

        if (!state_owns(job->state, chunk->rank))
            continue; /* it comes from its owner */
        memcpy(dst + chunk->start_elem, array_of(job, p->bucket, p->offset_elems + chunk->start_elem, reading->kind),
               chunk->n_elems * sizeof(float));
    }
}

static void refuse_reading(struct job *job, struct job_rank *rank, uint64_t n_bytes)
{
    struct evidence_quota evidence = {.at = job_at(job, rank),
                                      .what = "state to be read",
                                      .unit = "bytes",
                                      .asked = n_bytes,
                                      .fix = "free memory on this machine"};

    job_refuse(job, rank, job_keep(job, cause_quota(&evidence)), false);
}

static void finish_reading(struct reading *reading)
{
    struct job *job = reading->job;
    struct job_rank *rank = reading->rank;
    struct wire_segment segment = {.kind = WIRE_SEGMENT_STATE, .n_bytes = reading->segment.n_bytes};
    int fd = reading->result < 0 || reading->segment.n_bytes == 0 ? -1 : segment_open_ro(&reading->segment);
    size_t n = fd >= 0;
    bool asks = rank->wait == WAIT_READ && rank->peer == reading->peer && rank->incarnation == reading->incarnation;

    job->n_io--;
    if (asks && reading->result == 0) {
        job_answer(job, rank,
                   &(struct reply){
                       .type = REPLY_STATE_IS,
                       .state_is = {.segments = &segment,
                                    .n_segments = n,
                                    .n_elems = job->layout->params[reading->param].n_elems,
                                    .count = state_journal(job->state)->counts[reading->param]},
                   },
                   &fd, n);
    } else if (asks) {
        refuse_reading(job, rank, reading->segment.n_bytes);
    } else if (fd >= 0) {
        close(fd);
    }
    segment_deinit(&reading->segment);
    free(reading);
    job_settle(job);
}

static void reading_fetched(void *userdata, int result);

static void reading_done(struct work *work)
{
    struct reading *reading = container_of(work, struct reading, work);
    struct job *job = reading->job;

    if (job->state->mirror && reading->result == 0 &&
        device_job_read(job, reading->param, reading->kind, (float *)(void *)reading->segment.map, reading_fetched,
                        reading) == 0)
        return;
    if (job->state->mirror)
        reading->result = -ENOMEM;
    if (--reading->n_waiting == 0)
        finish_reading(reading);
}

static void reading_fetched(void *userdata, int result)
{
    struct reading *reading = userdata;

    if (result == -ECANCELED && reading->job->state->mirror && !reading->job->doom) { /* with the job */
        if (--reading->n_waiting > 0)
            return;
        segment_deinit(&reading->segment);
        free(reading);
        return;
    }
    if (result < 0)
        reading->result = result;
    if (--reading->n_waiting == 0)
        finish_reading(reading);
}

/* What other nodes own of it. */
static void read_remote(struct reading *reading)
{
    struct job *job = reading->job;
    int r = job->nodes && job->layout->params[reading->param].trainable
                ? exchange_fetch(nodes_exchange(job->nodes),
                                 &(struct exchange_fetch){.kind = (enum exchange_kind)reading->kind,
                                                          .params = &reading->param,
                                                          .n_params = 1,
                                                          .segment = &reading->segment,
                                                          .done = reading_fetched,
                                                          .userdata = reading})
                : 1;

    if (r == 0)
        reading->n_waiting++;
    else if (r < 0)
        reading->result = r;
}

static bool has_array(enum wire_state_kind kind)
{
    return kind != WIRE_STATE_GRAD_NORM && kind != WIRE_STATE_STEP_COUNT;
}

static const char *check_read(const struct job *job, const struct request_read_state *request)
{
    const struct layout_param *p;

    if (request->param >= job->layout->n_params)
        return "ReadState.param: no such parameter";
    p = &job->layout->params[request->param];
    if (request->kind == WIRE_STATE_MASTER)
        return NULL;
    if (!p->trainable)
        return "ReadState.kind: a frozen parameter has no optimizer state";
    if (has_array(request->kind) && p->n_elems > 0 && !array_of(job, p->bucket, p->offset_elems, request->kind))
        return "ReadState.kind: this optimizer has no such moment";
    return NULL;
}

/* Answers that a client does not take hold memory which belongs to no class: never so much that we are killed for it.
 */
static bool has_room(uint64_t n_bytes)
{
    struct memory_headroom headroom;

    memory_headroom_read(&headroom, "/proc", "/sys/fs/cgroup");
    return n_bytes <= headroom.available_bytes && n_bytes <= headroom.cgroup_bytes;
}

/* Norms and counts. Return: 0 or -ENOMEM. */
static int read_figure(struct job *job, struct job_rank *rank, const struct request_read_state *request)
{
    uint32_t param = request->param;

    if (request->kind == WIRE_STATE_GRAD_NORM && !param_norm_is_here(job, param))
        return param_norm_ask(job, rank, param);
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_STATE_IS,
                   .state_is = {.norm = step_param_norm(job->step, step_squares(job->step, param)),
                                .count = state_journal(job->state)->counts[param]},
               },
               NULL, 0);
    return 0;
}

void job_read_state(struct job *job, struct job_rank *rank, const struct request_read_state *request)
{
    const char *wrong = check_read(job, request);
    struct evidence_at at = job_at(job, rank);
    struct reading *reading;
    uint64_t n_bytes;

    if (job_is_held(job, rank))
        return;
    if (wrong) { /* a question, not an act: refused, and nothing sticks */
        job_refuse(job, rank, job_keep(job, cause_bad_message(&at, wrong)), false);
        return;
    }
    if (!has_array(request->kind)) {
        if (read_figure(job, rank, request) < 0)
            refuse_reading(job, rank, 0);
        return;
    }
    n_bytes = job->layout->params[request->param].n_elems * sizeof(float);
    reading = has_room(n_bytes) ? calloc(1, sizeof(*reading)) : NULL;
    if (!reading || segment_init(&reading->segment, "read", n_bytes) < 0) {
        free(reading);
        refuse_reading(job, rank, n_bytes);
        return;
    }
    reading->job = job;
    reading->rank = rank;
    reading->peer = rank->peer;
    reading->incarnation = rank->incarnation;
    reading->param = request->param;
    reading->kind = request->kind;
    reading->work = (struct work){.run = reading_run, .done = reading_done, .n_items = 1};
    reading->n_waiting = 1;
    job->n_io++;
    job_wait(job, rank, WAIT_READ);
    read_remote(reading);
    worker_post(job->pool, &reading->work);
}
