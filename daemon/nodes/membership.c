/* SPDX-License-Identifier: Apache-2.0 */

/* The links to other nodes' daemons, behind struct nodes_ops. */

#include "daemon/nodes/membership-inside.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "daemon/engines/engine.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/link/cluster.h"
#include "daemon/nodes/nodes.h"

enum {
    AWAY_MS = 5000,
};

_Static_assert((int)NODE_MESSAGE_MAX_BYTES <= (int)CLUSTER_MAX_MESSAGE_BYTES, "cluster_send() takes any message");

void membership_drop_handle(struct membership *m)
{
    assert(m->n_handles > 0);
    assert(m->n_handles > 1 || m->closing); /* the timer stays open until membership_close() */
    if (--m->n_handles == 0)
        free(m);
}

void membership_after(struct membership *m)
{
    if (!m->closing)
        m->after(m->userdata);
}

/* ---- links --------------------------------------------------------------------------------------------- */

static void link_says(void *userdata, unsigned node, const uint8_t *data, size_t n_bytes)
{
    struct membership *m = userdata;
    const char *wrong = nodes_hear(m->nodes, node, data, n_bytes);

    if (wrong)
        log_error("node %u: %s", node, wrong);
    membership_after(m);
}

/* An engine connects to all nodes, so new engines start when the last link is up. */
static void reconnect_if_all_are_up(struct membership *m)
{
    const struct config *config = m->job->config;

    for (unsigned i = 1; i < config->world.nodes.n_items; i++)
        if (!cluster_is_up(m->cluster, i))
            return;
    nodes_reconnect(m->nodes);
    membership_after(m);
}

static void link_is_up(void *userdata, unsigned node)
{
    struct membership *m = userdata;

    assert(node < m->job->config->world.nodes.n_items);
    log_notice("node %u (%s) is here", node, m->job->config->world.nodes.items[node].address);
    membership_hurry_engine(m);
    if (m->job->config->world.node == 0)
        reconnect_if_all_are_up(m);
}

/*
 * Is the node missed when its link is down? Daemons stop one after the other, so a node with MAY_STOP is not missed,
 * unless this daemon was not told to stop and has ranks that have not left. Before there is a run, a node is missed if
 * ranks are attached to this daemon, because they may wait for that node.
 */
static bool is_missed(const struct membership *m, unsigned node)
{
    bool was_free;

    if (!nodes_has_run(m->nodes))
        return job_anybody_is_here(m->job);
    was_free = m->job->config->world.node == 0 ? nodes_is_left_by(m->nodes, node) : nodes_may_stop(m->nodes);
    return !was_free || (!m->told_ms && !job_all_left(m->job));
}

static void link_is_down(void *userdata, unsigned node, const char *why)
{
    struct membership *m = userdata;
    struct job *job = m->job;
    const struct config *config = job->config;
    struct nodes_status status = nodes_status(m->nodes);
    char waits[128] = "this node, for all that node 0 decides";

    assert(node < config->world.nodes.n_items);
    if (!is_missed(m, node))
        return;
    if (config->world.node == 0 && status.waits_for >> node & 1)
        snprintf(waits, sizeof(waits), "node 0, for it %s", status.waits_to);
    else if (config->world.node == 0)
        snprintf(waits, sizeof(waits), "nobody at this moment");
    job_keep(job, cause_node_silent(&(struct evidence_node){
                      .at = {.rank = -1, .step = job->layout ? (int64_t)job->ledger.step : -1, .micro_batch = -1},
                      .node = node,
                      .first_rank = config_first_rank_of(config, node),
                      .n_ranks = config->world.nodes.items[node].ranks,
                      .address = config->world.nodes.items[node].address,
                      .waits = waits,
                      .why = why,
                  }));
}

static bool has_run(void *userdata)
{
    const struct membership *m = userdata;

    return nodes_has_run(m->nodes);
}

static void link_has_appeared(void *userdata, unsigned node, bool first, bool its_has_run)
{
    struct membership *m = userdata;

    nodes_meet(m->nodes, node, first, its_has_run);
    membership_after(m);
}

static void link_is_different(void *userdata, unsigned node, const char *difference)
{
    struct membership *m = userdata;

    nodes_hear_difference(m->nodes, node, difference);
    membership_after(m);
}

static int send_to(void *userdata, unsigned node, const void *data, size_t n_bytes)
{
    struct membership *m = userdata;

    return m->cluster ? cluster_send(m->cluster, node, data, n_bytes) : 0; /* without links there is no run */
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static void mark_node(void *userdata, unsigned node)
{
    struct membership *m = userdata;

    if (m->cluster)
        cluster_mark(m->cluster, node);
}

void membership_tell_to_stop(struct membership *m)
{
    if (!m || !m->cluster)
        return;
    m->told_ms = uv_now(m->loop);
    nodes_tell_to_stop(m->nodes);
}

/*
 * Has the node's link been down for longer than the replacement of a dead daemon takes? A node that has sent nothing
 * yet may still be starting, so its time counts from the order to stop.
 */
static bool is_away(const struct membership *m, unsigned node)
{
    uint64_t silent_ms = cluster_silent_ms(m->cluster, node);

    if (silent_ms == UINT64_MAX)
        silent_ms = uv_now(m->loop) - m->told_ms;
    return !cluster_is_up(m->cluster, node) && silent_ms > AWAY_MS;
}

/*
 * Have all ranks of this node left, but not all ranks of other nodes? The remaining ranks may read weights and state
 * that this node owns. If one of them dies, its successor needs all nodes to form the job.
 */
static bool is_needed(const struct job *job)
{
    bool needed = false;

    for (unsigned r = 0; r < job->world.size; r++) {
        if (job->ranks[r].kept.left)
            continue;
        if (r >= job->world.first && r < job->world.end)
            return false;
        needed = true;
    }
    return needed;
}

enum membership_stop membership_stop(const struct membership *m)
{
    bool waits = false, in_vain = false, may;

    if (!m || !m->cluster || !nodes_has_run(m->nodes))
        return MEMBERSHIP_MAY_STOP;
    may = nodes_may_stop(m->nodes) && !is_needed(m->job);
    if (m->job->config->world.node != 0)
        return may ? MEMBERSHIP_MAY_STOP : is_away(m, 0) ? MEMBERSHIP_WAITS_IN_VAIN : MEMBERSHIP_WAITS;
    for (unsigned i = 1; i < m->job->config->world.nodes.n_items; i++) {
        /* Node 0 may stop only after the other nodes have received MAY_STOP. */
        bool is_awaited = may ? !cluster_has_marked(m->cluster, i) : !nodes_is_left_by(m->nodes, i);

        waits |= is_awaited;
        in_vain |= is_awaited && is_away(m, i);
    }
    return in_vain ? MEMBERSHIP_WAITS_IN_VAIN : waits || !may ? MEMBERSHIP_WAITS : MEMBERSHIP_MAY_STOP;
}

static void wake(void *userdata)
{
    struct membership *m = userdata;

    uv_async_send(&m->wake);
}

static void on_wake(uv_async_t *handle)
{
    struct membership *m = handle->data;

    nodes_serve(m->nodes);
    membership_after(m);
}

/* Copies the host of an address such as "10.0.0.1:7700" or "[fe80::1]:7700". */
static void copy_host(char *dst, size_t size, const char *address)
{
    const char *colon = strrchr(address, ':');
    size_t n = colon ? (size_t)(colon - address) : strlen(address);

    if (n >= 2 && address[0] == '[' && address[n - 1] == ']') {
        address++;
        n -= 2;
    }
    snprintf(dst, size, "%.*s", (int)MIN(n, size - 1), address);
}

static int link_up(struct membership *m, char *why, size_t why_size)
{
    struct cluster_options options = {
        .loop = m->loop,
        .config = m->job->config,
        .ops = {.message = link_says,
                .up = link_is_up,
                .down = link_is_down,
                .has_run = has_run,
                .appeared = link_has_appeared,
                .different = link_is_different,
                .userdata = m},
    };

    while (options.incarnation == 0)
        if (getrandom(&options.incarnation, sizeof(options.incarnation), 0) < 0)
            return -errno;
    return cluster_new(&m->cluster, &options, why, why_size);
}

static bool reaches(void *userdata, unsigned node)
{
    const struct membership *m = userdata;

    return m->cluster && cluster_is_up(m->cluster, node); /* a daemon that stays apart has no links */
}

static int join_nodes(struct membership *m, char *why, size_t why_size)
{
    const struct nodes_ops ops = {.send = send_to,
                                  .reaches = reaches,
                                  .mark = mark_node,
                                  .wake = wake,
                                  .start_engine = membership_start_engine,
                                  .order = membership_order,
                                  .value = membership_give_value,
                                  .share = membership_share,
                                  .stop_engine = membership_stop_engine,
                                  .userdata = m};
    int r;

    snprintf(why, why_size, "out of memory");
    r = nodes_join(&m->nodes, m->job, &ops);
    return r < 0 ? r : link_up(m, why, why_size);
}

int membership_new(struct membership **out, const struct membership_options *options, char *why, size_t why_size)
{
    const struct config *config = options->job->config;
    struct membership *m = calloc(1, sizeof(*m));
    int r;

    if (!m) {
        snprintf(why, why_size, "out of memory");
        return -ENOMEM;
    }
    m->loop = options->loop;
    m->job = options->job;
    m->after = options->after;
    m->userdata = options->userdata;
    m->last_early = &m->early;
    copy_host(m->host, sizeof(m->host), config->world.nodes.items[config->world.node].address);
    m->wake.data = m->pause.data = m;
    r = uv_async_init(m->loop, &m->wake, on_wake);
    if (r < 0) {
        free(m);
        return r;
    }
    uv_timer_init(m->loop, &m->pause);
    m->n_handles = 2;
    r = join_nodes(m, why, why_size);
    if (r < 0) {
        membership_close(m);
        return r;
    }
    *out = m;
    return 0;
}

static void on_closed(uv_handle_t *handle)
{
    membership_drop_handle(handle->data);
}

void membership_close(struct membership *m)
{
    if (!m || m->closing)
        return;
    m->closing = true;
    membership_end_engine(m);
    membership_forget_values(m);
    cluster_close(steal_ptr(m->cluster));
    uv_close((uv_handle_t *)&m->wake, on_closed);
    uv_close((uv_handle_t *)&m->pause, on_closed);
}

void membership_stay_apart(struct membership *m, bool apart)
{
    char why[256];

    if (!m || apart == !m->cluster)
        return;
    if (apart)
        cluster_close(steal_ptr(m->cluster));
    else if (link_up(m, why, sizeof(why)) < 0)
        log_error("this daemon cannot join the other nodes, and must be started anew: %s", why);
}

struct membership_node membership_node(const struct membership *m, unsigned node)
{
    const struct config *config = m->job->config;
    bool self = node == config->world.node;

    assert(node < config->world.nodes.n_items);
    return (struct membership_node){
        .address = config->world.nodes.items[node].address,
        .up = self || (m->cluster && cluster_is_up(m->cluster, node)),
        .why = self         ? NULL
               : m->cluster ? cluster_why_down(m->cluster, node)
                            : "this daemon holds a run, and stays apart",
        .silent_ms = self         ? 0
                     : m->cluster ? cluster_silent_ms(m->cluster, node)
                                  : UINT64_MAX,
    };
}

const struct traffic *membership_traffic(const struct membership *m)
{
    return m->traffic;
}
