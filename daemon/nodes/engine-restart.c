/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The engine between nodes. When it fails, or when node 0 orders a new generation, the engine is killed and the next
 * engine starts. The first failure causes no pause before that start; each further failure doubles the pause.
 */

#include "daemon/nodes/membership-inside.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "daemon/engines/engine.h"
#include "daemon/job/model/model.h"
#include "daemon/nodes/nodes.h"

enum {
    FIRST_PAUSE_MS = 100,
    FIRST_CONNECT_MS = 5000, /* long enough that no slow node causes a complaint at the common start */
    CONNECT_MS = 2000,       /* after the first order; with ENGINE_GRACE_MS, a frozen engine is noticed within 3 s */
    MAX_CONNECT_MS = 20000,
};

_Static_assert((int)EXCHANGE_N_SEGMENTS <= (int)ENGINE_SETUP_SEGMENTS &&
                   (int)EXCHANGE_OVERFLOW < (int)ENGINE_MAX_SEGMENTS,
               "the engine has room for all segments of the exchange");

static void engine_is_ready(void *userdata)
{
    struct membership *m = userdata;

    nodes_engine_ready(m->nodes);
    membership_after(m);
}

static void engine_has_done(void *userdata, const struct engine_done *done)
{
    struct membership *m = userdata;

    m->n_failures = 0;
    m->has_worked = true;
    nodes_engine_done(m->nodes, done);
    membership_after(m);
}

static void engine_puts(void *userdata, const char *key, const uint8_t *value, size_t n_bytes)
{
    struct membership *m = userdata;

    nodes_engine_put(m->nodes, key, value, n_bytes);
    membership_after(m);
}

static void engine_has_failed(void *userdata, const struct engine_failure *failure)
{
    struct membership *m = userdata;

    m->n_failures++;
    nodes_engine_failed(m->nodes, failure);
    membership_after(m);
}

void membership_forget_values(struct membership *m)
{
    while (m->early) {
        struct early_value *value = m->early;

        m->early = value->next;
        free(value);
    }
    m->last_early = &m->early;
}

static int keep_value(struct membership *m, const char *key, const uint8_t *bytes, size_t n_bytes)
{
    struct early_value *value = malloc(sizeof(*value) + n_bytes);

    if (!value)
        return -ENOMEM; /* the engine then misses its deadline for connecting, and the next generation begins */
    value->next = NULL;
    snprintf(value->key, sizeof(value->key), "%s", key);
    value->n_bytes = n_bytes;
    if (n_bytes > 0)
        memcpy(value->bytes, bytes, n_bytes);
    *m->last_early = value;
    m->last_early = &value->next;
    return 0;
}

/* Doubles the time after each failure except the first, so that a slow machine connects in the end. */
static uint32_t connect_timeout_ms(const struct membership *m)
{
    uint32_t base_ms = m->has_worked ? CONNECT_MS : FIRST_CONNECT_MS;
    uint32_t n_doublings = m->n_failures ? MIN(m->n_failures - 1, 8u) : 0;

    return MIN(base_ms << n_doublings, (uint32_t)MAX_CONNECT_MS);
}

static void engine_has_ended(void *userdata);

static void start_now(struct membership *m)
{
    char why[256];
    int r;

    assert(!m->engine);
    assert(!m->closing);
    m->starts = false;
    r = engine_new(&m->engine,
                   &(struct engine_options){
                       .loop = m->loop,
                       .kind = ENGINE_GLOO,
                       .generation = m->generation,
                       .node = m->job->config->world.node,
                       .n_nodes = (unsigned)m->job->config->world.nodes.n_items,
                       .address = m->host,
                       .segments = m->segments,
                       .traffic = m->traffic,
                       .n_segments = EXCHANGE_N_SEGMENTS,
                       .connect_timeout_ms = connect_timeout_ms(m),
                       .ops = {.ready = engine_is_ready,
                               .done = engine_has_done,
                               .put = engine_puts,
                               .failed = engine_has_failed,
                               .ended = engine_has_ended,
                               .userdata = m},
                   },
                   why, sizeof(why));
    for (struct early_value *value = m->early; r == 0 && value; value = value->next)
        r = engine_value(m->engine, value->key, value->bytes, value->n_bytes) < 0 ? 1 : 0; /* failed() reports it */
    membership_forget_values(m);
    if (r < 0)
        engine_has_failed(m, &(struct engine_failure){.kind = ENGINE_NOT_STARTED, .what = why});
}

static void start_if_ready(struct membership *m)
{
    if (m->starts && m->n_ending == 0 && !uv_is_active((uv_handle_t *)&m->pause))
        start_now(m);
}

static void on_pause(uv_timer_t *handle)
{
    start_if_ready(handle->data);
}

static void engine_has_ended(void *userdata)
{
    struct membership *m = userdata;

    assert(m->n_ending > 0);
    m->n_ending--;
    if (!m->closing)
        start_if_ready(m);
    membership_drop_handle(m);
}

void membership_end_engine(struct membership *m)
{
    if (!m->engine)
        return;
    m->n_ending++;
    m->n_handles++;
    engine_close(steal_ptr(m->engine));
}

int membership_start_engine(void *userdata, uint32_t generation, const struct segment *const *segments, char *why,
                            size_t why_size)
{
    struct membership *m = userdata;
    unsigned shift = MIN(m->n_failures, 16u);
    uint64_t pause_ms =
        m->n_failures < 2 ? 0 : MIN((uint64_t)FIRST_PAUSE_MS << (shift - 2), (uint64_t)MEMBERSHIP_MAX_PAUSE_MS);

    assert(generation > m->generation);
    membership_end_engine(m);
    membership_forget_values(m);
    m->generation = generation;
    m->segments = segments;
    m->starts = true;
    /* The loop starts the engine, so that a start that fails at once is handled like any other failure. */
    if (uv_timer_start(&m->pause, on_pause, pause_ms, 0) == 0)
        return 0;
    snprintf(why, why_size, "the engine cannot be started");
    return -EINVAL;
}

int membership_order(void *userdata, const struct engine_order *o)
{
    struct membership *m = userdata;

    return m->engine ? engine_order(m->engine, o) : -ENOTCONN;
}

int membership_give_value(void *userdata, const char *key, const uint8_t *value, size_t n_bytes)
{
    struct membership *m = userdata;

    if (m->engine)
        return engine_value(m->engine, key, value, n_bytes);
    /* Another node's engine of this generation may start while this node's engine still waits for the pause. */
    return m->starts ? keep_value(m, key, value, n_bytes) : -ENOTCONN;
}

int membership_share(void *userdata, unsigned number, const struct segment *segment)
{
    struct membership *m = userdata;

    return m->engine ? engine_share(m->engine, number, segment) : -ENOTCONN;
}

void membership_stop_engine(void *userdata)
{
    struct membership *m = userdata;

    membership_end_engine(m);
    m->starts = false;
    uv_timer_stop(&m->pause);
    membership_forget_values(m);
    m->has_worked = false;
}

void membership_hurry_engine(struct membership *m)
{
    m->n_failures = 0;
    if (uv_is_active((uv_handle_t *)&m->pause))
        (void)uv_timer_start(&m->pause, on_pause, 0, 0);
}
