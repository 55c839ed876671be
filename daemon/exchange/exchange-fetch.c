/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fetches elements that other nodes own: state that a rank reads, and in stage 3 weights that ranks gather. A node asks
 * node 0 for a fetch, and node 0 announces all fetches to all nodes in one sequence. Then the owners send each
 * parameter under its own tag. fp32 values are sent from the state. Other values are first made in one of two slots:
 * 16-bit weights are rounded from the masters, narrow state is widened, and values on GPUs are copied. If ranks on GPUs
 * gather, the engines of the GPUs do all of this instead (exchange-device.c).
 *
 * State and weights do not change during a fetch, because a node that fetches has not asked for the step.
 */

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/budget/exchange-plan.h"
#include "core/config/config.h"
#include "core/wire/device-wire.h"
#include "daemon/exchange/exchange-inside.h"
#include "daemon/job/model/model.h"
#include "daemon/step/executor.h"
#include "daemon/step/fetch.h"

_Static_assert(SERVING_SLOTS == 2, "start_waiting() looks at two");
_Static_assert((int)FETCH_MASTER == (int)STATE_MASTER && (int)FETCH_EXP_AVG == (int)STATE_EXP_AVG &&
                   (int)FETCH_EXP_AVG_SQ == (int)STATE_EXP_AVG_SQ && (int)FETCH_PUBLISHED == (int)STATE_N_KINDS,
               "kinds of state have the same numbers");

/* ---- slots --------------------------------------------------------------------------------------------- */

int exchange_form_serving(struct exchange *exchange)
{
    const struct job *job = exchange->job;
    uint64_t n_bytes = exchange_plan_serving_bytes(job->config, job->layout);
    int r = segment_init(&exchange->serving, "serving", n_bytes);

    exchange->slot_bytes = n_bytes / SERVING_SLOTS;
    return r;
}

static struct serving *unlink_serving(struct exchange *exchange, struct serving **link)
{
    struct serving *serving = *link;

    assert(serving->slot < 0 || exchange->slots_taken[serving->slot]);
    if (serving->slot >= 0)
        exchange->slots_taken[serving->slot] = false;
    *link = serving->next;
    return serving;
}

void exchange_drop_serving(struct exchange *exchange)
{
    while (exchange->servings) {
        assert(!exchange->servings->working);
        free(unlink_serving(exchange, &exchange->servings));
    }
    exchange_cancel(exchange);
    segment_deinit(&exchange->serving);
    exchange->serving = SEGMENT_NULL;
}

void exchange_break_serving(struct exchange *exchange)
{
    struct serving **link = &exchange->servings;

    while (*link) {
        (*link)->dead = true; /* send_served() frees a dead serving that is working */
        if ((*link)->working)
            link = &(*link)->next;
        else
            free(unlink_serving(exchange, link));
    }
}

/* ---- serving ------------------------------------------------------------------------------------------- */

static bool is_rounded(const struct exchange *exchange, const struct serving *serving, enum fetch_kind kind)
{
    return kind == FETCH_PUBLISHED && exchange->job->layout->params[serving->param].dtype != DTYPE_F32;
}

/* Return: the owned elements of fp32 state, or NULL if this optimizer has no such moment. */
static const uint8_t *state_bytes(const struct exchange *exchange, enum fetch_kind kind, uint32_t bucket,
                                  uint64_t start)
{
    enum state_kind state_kind = kind == FETCH_PUBLISHED ? STATE_MASTER : (enum state_kind)kind;

    return (const uint8_t *)state_values(exchange->job->state, state_kind, bucket, start);
}

static bool is_widened(const struct exchange *exchange, const struct serving *serving, enum fetch_kind kind)
{
    uint32_t bucket = exchange->job->layout->params[serving->param].bucket;

    return kind != FETCH_PUBLISHED && !state_is_f32(exchange->job->state, (enum state_kind)kind, bucket);
}

/* Return: whether the elements are rounded, widened, or copied from GPUs into a slot before they are sent. Otherwise
 * they are sent from the state. */
static bool is_made(const struct exchange *exchange, const struct serving *serving, enum fetch_kind kind)
{
    return !exchange->job->executor->holds_state || is_rounded(exchange, serving, kind) ||
           is_widened(exchange, serving, kind);
}

static void send_state(struct exchange *exchange, const struct serving *serving, enum fetch_kind kind)
{
    const struct job *job = exchange->job;
    const struct layout_param *param = &job->layout->params[serving->param];
    uint64_t start, n = exchange_owned(exchange, exchange->self, serving->param, &start);
    const uint8_t *bytes = state_bytes(exchange, kind, param->bucket, param->offset_elems + start);
    const struct segment *state = &job->state->state, *weights = &job->state->weights;
    bool published = weights->n_bytes > 0 && bytes >= weights->map && bytes < weights->map + weights->n_bytes;

    if (!bytes)
        return;
    exchange_add_move(exchange, (struct engine_move){
                                    .node = serving->node,
                                    .send = true,
                                    .segment = published ? EXCHANGE_WEIGHTS : EXCHANGE_STATE,
                                    .offset_bytes = (uint64_t)(bytes - (published ? weights->map : state->map)),
                                    .n_bytes = n * sizeof(float),
                                });
}

static void start_waiting(struct exchange *exchange);

/* Sends the elements from their slot, unless the engine failed meanwhile. */
static void send_served(struct serving *serving)
{
    struct serving **link;
    struct exchange *exchange = serving->exchange;
    size_t elem_bytes = serving->kind == FETCH_PUBLISHED
                            ? dtype_size(exchange->job->layout->params[serving->param].dtype)
                            : sizeof(float);
    uint64_t start, n = exchange_owned(exchange, exchange->self, serving->param, &start);

    assert(serving->working && serving->slot >= 0);
    assert(exchange->job->work.n_io > 0);
    assert(n * elem_bytes <= exchange->slot_bytes);
    exchange->job->work.n_io--;
    serving->working = false;
    if (!serving->dead) {
        exchange_add_move(exchange, (struct engine_move){.node = serving->node,
                                                         .send = true,
                                                         .segment = EXCHANGE_SERVING,
                                                         .offset_bytes = exchange->slot_bytes * (uint64_t)serving->slot,
                                                         .n_bytes = n * elem_bytes});
        exchange_post(exchange, serving->tag, TRAFFIC_FETCH);
        return;
    }
    for (link = &exchange->servings; *link != serving; link = &(*link)->next)
        ;
    free(unlink_serving(exchange, link));
    start_waiting(exchange);
    job_todo(exchange->job);
}

static void has_come(void *userdata, int result)
{
    struct serving *serving = userdata;

    serving->dead |= result < 0; /* the job is being dropped, and no rank waits for the elements */
    send_served(serving);
}

/* Starts to make the elements in the serving's slot. Return: 0 or -ENOMEM. */
static int fill_slot(struct serving *serving)
{
    const struct exchange *exchange = serving->exchange;
    struct executor *executor = exchange->job->executor;
    uint8_t *slot = exchange->serving.map + exchange->slot_bytes * (uint64_t)serving->slot;
    struct executor_read read = {.param = serving->param, .dst = slot, .done = has_come, .userdata = serving};
    uint64_t start;

    read.weights = serving->kind == FETCH_PUBLISHED;
    if (!read.weights) {
        /* executor_read() counts from the parameter's start, but writes only the owned elements. */
        exchange_owned(exchange, exchange->self, serving->param, &start);
        read.kind = (enum state_kind)serving->kind;
        read.dst = slot - start * sizeof(float);
    }
    return executor_read(executor, &read);
}

/* Ends a serving for lack of memory. The node that waits for its elements, and node 0, then miss a deadline. */
static void cannot_make(struct work *work)
{
    has_come(container_of(work, struct serving, work), -ENOMEM);
}

/* Makes the elements of servings that wait for a slot, while a slot is free. */
static void start_waiting(struct exchange *exchange)
{
    struct job *job = exchange->job;

    for (struct serving *serving = exchange->servings; serving; serving = serving->next) {
        int slot = exchange->slots_taken[0] ? 1 : 0;

        if (serving->slot >= 0 || serving->dead || !serving->made)
            continue;
        if (exchange->slots_taken[slot])
            return;
        assert(!serving->working);
        exchange->slots_taken[slot] = true;
        serving->slot = slot;
        serving->working = true;
        job->work.n_io++;
        if (fill_slot(serving) < 0)
            executor_post_nothing(job->executor, &serving->work, cannot_make);
    }
}

static const char *serve_param(struct exchange *exchange, const struct exchange_service *service, size_t i)
{
    struct serving *serving = calloc(1, sizeof(*serving)), **last = &exchange->servings;

    assert(service->node != exchange->self);
    if (!serving)
        return "out of memory";
    *serving = (struct serving){.exchange = exchange,
                                .tag = service->tag + i,
                                .param = (uint32_t)service->params[i],
                                .kind = service->kind,
                                .node = service->node,
                                .slot = -1};
    while (*last)
        last = &(*last)->next;
    *last = serving;
    serving->made = is_made(exchange, serving, service->kind);
    if (serving->made) {
        start_waiting(exchange);
    } else {
        send_state(exchange, serving, service->kind);
        exchange_post(exchange, serving->tag, TRAFFIC_FETCH);
    }
    return NULL;
}

void exchange_served(struct exchange *exchange, uint64_t tag)
{
    struct serving **link = &exchange->servings;

    while (*link && ((*link)->tag != tag || (*link)->dead)) /* a dead serving may have this tag and still be working */
        link = &(*link)->next;
    if (!*link || (*link)->working)
        return;
    free(unlink_serving(exchange, link));
    start_waiting(exchange);
}

/* ---- fetching ------------------------------------------------------------------------------------------ */

/* Return: whether fp32 state is fetched, which goes to a segment of the rank that asks. */
static bool is_state(enum fetch_kind kind)
{
    return kind < FETCH_PUBLISHED;
}

/* Return: whether the parameter is fetched, because another node owns a part of it, or GPUs gather. */
static bool is_wanted(const struct exchange *exchange, enum fetch_kind kind, uint32_t p)
{
    uint64_t start;

    return kind == FETCH_GATHERED ||
           exchange->job->layout->params[p].n_elems > exchange_owned(exchange, exchange->self, p, &start);
}

static void ask_others(struct exchange *exchange, struct pending_fetch *fetch)
{
    fetch->asked = true;
    exchange->ops.fetch(exchange->ops.userdata, &(struct exchange_service){.id = fetch->id,
                                                                           .kind = fetch->what.kind,
                                                                           .rank = fetch->what.rank,
                                                                           .params = fetch->ids,
                                                                           .n_params = fetch->what.n_params});
}

/* Asks node 0 for fetches: for state one at a time, because each has its own segment; for weights all at once. */
static void ask_next(struct exchange *exchange)
{
    bool reading = false;

    for (struct pending_fetch *fetch = exchange->fetches, *next; fetch; fetch = next) {
        next = fetch->next;
        if (!fetch->asked && (!is_state(fetch->what.kind) || !reading)) {
            if (is_state(fetch->what.kind)) {
                exchange->segments[EXCHANGE_READING] = fetch->what.segment;
                (void)exchange->ops.share(exchange->ops.userdata, EXCHANGE_READING, fetch->what.segment);
                reading = true;
            }
            ask_others(exchange, fetch);
            continue;
        }
        reading |= is_state(fetch->what.kind);
    }
}

void exchange_ask_again(struct exchange *exchange)
{
    for (struct pending_fetch *fetch = exchange->fetches, *next; fetch; fetch = next) {
        next = fetch->next;
        if (fetch->asked)
            ask_others(exchange, fetch);
    }
}

static void free_fetch(struct pending_fetch *fetch)
{
    free((void *)fetch->what.params);
    free((void *)fetch->what.offsets_bytes);
    free(fetch->ids);
    free(fetch);
}

/* Copies the fetch, without the parameters that need no fetching. Return: the copy, or NULL if there is no memory. */
static struct pending_fetch *new_fetch(const struct exchange *exchange, const struct fetch *what)
{
    uint32_t *params = calloc(what->n_params + 1, sizeof(*params));
    uint64_t *offsets = what->offsets_bytes ? calloc(what->n_params + 1, sizeof(*offsets)) : NULL;
    uint64_t *ids = calloc(what->n_params + 1, sizeof(*ids));
    struct pending_fetch *fetch = calloc(1, sizeof(*fetch));
    size_t n = 0;

    if (!params || !ids || !fetch || (what->offsets_bytes && !offsets)) {
        free(params);
        free(offsets);
        free(ids);
        free(fetch);
        return NULL;
    }
    for (size_t i = 0; i < what->n_params; i++) {
        if (!is_wanted(exchange, what->kind, what->params[i]))
            continue;
        if (offsets)
            offsets[n] = what->offsets_bytes[i];
        ids[n] = what->params[i];
        params[n++] = what->params[i];
    }
    fetch->ids = ids;
    fetch->what = *what;
    fetch->what.params = params;
    fetch->what.offsets_bytes = offsets;
    fetch->what.n_params = n;
    return fetch;
}

int exchange_fetch(struct exchange *exchange, const struct fetch *what)
{
    struct pending_fetch *fetch = new_fetch(exchange, what), **last = &exchange->fetches;

    assert(what->kind < FETCH_N_KINDS);
    assert(!is_state(what->kind) || what->segment);
    assert(what->kind != FETCH_GATHERED || what->offsets_bytes);
    if (!fetch)
        return -ENOMEM;
    if (fetch->what.n_params == 0) {
        free_fetch(fetch);
        return 1;
    }
    fetch->id = ++exchange->last_fetch;
    while (*last)
        last = &(*last)->next;
    *last = fetch;
    ask_next(exchange);
    return 0;
}

void exchange_finish_fetch(struct exchange *exchange, struct pending_fetch *fetch, int result)
{
    struct pending_fetch **link = &exchange->fetches;
    struct fetch what = fetch->what;

    while (*link != fetch)
        link = &(*link)->next;
    *link = fetch->next;
    free_fetch(fetch);
    if (is_state(what.kind))
        exchange->segments[EXCHANGE_READING] = NULL;
    if (result != -ECANCELED)
        ask_next(exchange);
    what.done(what.userdata, result);
}

void exchange_cancel(struct exchange *exchange)
{
    for (struct motion *motion = exchange->motions; motion; motion = motion->next)
        motion->fetch = NULL;
    while (exchange->fetches)
        exchange_finish_fetch(exchange, exchange->fetches, -ECANCELED);
}

/* Return: where parameter i of the fetch begins, in the destination's segment. */
static uint64_t find_destination(const struct exchange *exchange, const struct fetch *what, size_t i)
{
    if (is_state(what->kind))
        return 0;
    return what->offsets_bytes ? what->offsets_bytes[i]
                               : exchange->job->layout->params[what->params[i]].range_offset_bytes;
}

/* Adds a move from each other node, for the elements of the parameter that the other node owns. */
static void receive_param(struct exchange *exchange, const struct fetch *what, size_t i)
{
    const struct layout_param *param = &exchange->job->layout->params[what->params[i]];
    bool published = what->kind == FETCH_PUBLISHED;
    size_t size = published ? dtype_size(param->dtype) : sizeof(float);
    enum exchange_segment destination = what->window ? EXCHANGE_SPREADING
                                        : published  ? EXCHANGE_POOL
                                                     : EXCHANGE_READING;
    uint64_t base = find_destination(exchange, what, i), start;

    for (unsigned node = 0; node < exchange->n_nodes; node++) {
        uint64_t n = exchange_owned(exchange, node, what->params[i], &start);

        if (node != exchange->self && n > 0)
            exchange_add_move(exchange, (struct engine_move){.node = node,
                                                             .segment = destination,
                                                             .offset_bytes = base + start * size,
                                                             .n_bytes = n * size});
    }
}

/* Return: the fetch, or NULL if it was cancelled. Node 0 and the sending nodes detect that by their deadlines. */
static struct pending_fetch *find_fetch(const struct exchange *exchange, const struct exchange_service *service)
{
    struct pending_fetch *fetch = exchange->fetches;

    while (fetch && (fetch->id != service->id || fetch->what.n_params != service->n_params))
        fetch = fetch->next;
    return fetch;
}

static bool is_under_way(const struct exchange *exchange, const struct pending_fetch *fetch)
{
    for (const struct motion *motion = exchange->motions; motion; motion = motion->next)
        if (motion->fetch == fetch)
            return true;
    return false;
}

static const char *receive(struct exchange *exchange, const struct exchange_service *service)
{
    struct pending_fetch *fetch = find_fetch(exchange, service);
    struct motion *motion;

    if (!fetch)
        return NULL;
    if (is_under_way(exchange, fetch))
        return EXCHANGE_SAID_TWICE;
    motion = exchange_add_motion(exchange, MOTION_FETCH, service->tag);
    if (!motion)
        return EXCHANGE_NO_MEMORY;
    motion->fetch = fetch;
    for (size_t i = 0; i < service->n_params; i++) {
        receive_param(exchange, &fetch->what, i);
        exchange_post_motion(exchange, motion);
    }
    exchange_progress(motion);
    return NULL;
}

/* Return: whether this node owns a part of the parameter. */
static bool owns_any(const struct exchange *exchange, uint32_t param)
{
    uint64_t start;

    return exchange_owned(exchange, exchange->self, param, &start) > 0;
}

/* Orders a gather between GPUs, if this node has asked for it or owns a part of the parameters. */
static const char *order_gather(struct exchange *exchange, const struct exchange_service *service)
{
    bool asks = service->node == exchange->self, has_part = asks;
    struct pending_fetch *fetch = asks ? find_fetch(exchange, service) : NULL;
    struct motion *motion;

    for (size_t i = 0; i < service->n_params; i++)
        has_part |= owns_any(exchange, (uint32_t)service->params[i]);
    if (!has_part || (asks && !fetch))
        return NULL;
    if (fetch && is_under_way(exchange, fetch))
        return EXCHANGE_SAID_TWICE;
    motion = exchange_add_motion(exchange, MOTION_FETCH, service->tag);
    if (motion)
        motion->gathered = calloc(service->n_params, sizeof(*motion->gathered));
    if (!motion || !motion->gathered)
        return EXCHANGE_NO_MEMORY;
    motion->fetch = fetch;
    motion->serves = !asks;
    motion->rank = service->rank;
    motion->n_gathered = service->n_params;
    for (size_t i = 0; i < service->n_params; i++)
        motion->gathered[i] = (struct device_fetched){.param = (uint32_t)service->params[i],
                                                      .offset_bytes = fetch ? fetch->what.offsets_bytes[i] : 0};
    return exchange_give_to_devices(motion);
}

/* Return: NULL, or why the service is not valid. */
static const char *check_service(const struct exchange *exchange, const struct exchange_service *service)
{
    const struct job *job = exchange->job;
    bool partitions_all = config_partitions_all(job->config);

    if (service->node >= exchange->n_nodes)
        return "SERVE.node: no such node";
    if (service->kind >= FETCH_N_KINDS || (service->kind == FETCH_PUBLISHED && config_stage(job->config) != 3) ||
        (service->kind == FETCH_GATHERED && (!partitions_all || service->n_params > DEVICE_MAX_FETCHES)))
        return "SERVE.pass: no such kind";
    for (size_t i = 0; i < service->n_params; i++)
        if (service->params[i] >= job->layout->n_params ||
            !(job->layout->params[service->params[i]].trainable || partitions_all))
            return "SERVE.numbers: no such parameter";
    return NULL;
}

const char *exchange_serve(struct exchange *exchange, const struct exchange_service *service)
{
    const char *wrong = check_service(exchange, service);

    if (wrong)
        return wrong;
    if (service->kind == FETCH_GATHERED)
        return order_gather(exchange, service);
    for (size_t i = 0; i < service->n_params; i++) {
        if (service->node != exchange->self && owns_any(exchange, (uint32_t)service->params[i]))
            wrong = serve_param(exchange, service, i);
        if (wrong)
            return wrong;
    }
    return service->node == exchange->self ? receive(exchange, service) : NULL;
}
