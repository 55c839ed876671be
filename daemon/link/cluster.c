/* SPDX-License-Identifier: Apache-2.0 */

/* Listens for other nodes, checks the connections at each tick, and implements the functions of cluster.h. */

#include "daemon/link/cluster-internal.h"

#include <assert.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/config/config.h"
#include "daemon/link/key-file.h"

enum {
    TICK_MS = 100,
    LATE_MS = 500,       /* after so long without a tick, this process was stopped, and received frames may be unread */
    HANDSHAKE_MS = 2000, /* limit from the start of a connection to the peer's introduction */
    CONNECT_MS = 300,    /* limit until TCP to node 0 is established; the kernel's first retry is after 1 s */
    MAX_UNPROVED = 16,   /* waiting connections, plus one per node; picked, not measured */
    BACKLOG = 128,       /* connections that wait to be accepted; picked, not measured */
};

/* ---- life ---------------------------------------------------------------------------------------------- */

DEFINE_CLEANUP(struct cluster *, cluster_free);

static void on_handle_closed(uv_handle_t *handle)
{
    cluster_one_less(handle->data);
}

void cluster_close(struct cluster *cluster)
{
    if (!cluster || cluster->closing)
        return;
    cluster->closing = true;
    while (cluster->waiting)
        cluster_let_go(cluster->waiting);
    for (unsigned i = 0; i < cluster->n_nodes; i++) {
        if (cluster->peers[i].connection)
            connection_close(steal_ptr(cluster->peers[i].connection));
    }
    (void)uv_cancel((uv_req_t *)&cluster->lookup); /* fails if no lookup is queued, or the lookup runs already */
    uv_close((uv_handle_t *)&cluster->tick, on_handle_closed);
    if (cluster->listener.data) /* the listener was made */
        uv_close((uv_handle_t *)&cluster->listener, on_handle_closed);
}

/* ---- listening: node 0 --------------------------------------------------------------------------------- */

/*
 * If there are too many waiting connections, closes the oldest. A real node finishes its handshake in a millisecond, so
 * it gets through a flood of silent connections. If the newest were closed, the flood would keep the node out.
 */
static void close_oldest_unproved(struct cluster *cluster)
{
    struct connection *oldest = NULL;
    unsigned n_waiting = 0;

    for (struct connection *c = cluster->waiting; c; c = c->next) {
        n_waiting++;
        oldest = c; /* each new connection is put in front */
    }
    if (n_waiting < MAX_UNPROVED + cluster->n_nodes)
        return;
    if (oldest->is_finishing)
        cluster_let_go(oldest);
    else
        cluster_refuse(oldest, CLUSTER_CROWDED,
                       "was dropped: %u newer connections have not identified themselves either", n_waiting);
}

static void on_connection(uv_stream_t *listener, int status)
{
    struct cluster *cluster = listener->data;
    struct connection_options options = cluster_connection_options(cluster);
    struct connection *connection = NULL;

    if (status == 0) {
        close_oldest_unproved(cluster);
        status = connection_accept(&connection, &options, listener);
        cluster->n_open += connection != NULL;
    }
    if (status == 0)
        cluster_link(cluster, connection);
    else
        log_limited(&cluster->limits[CLUSTER_NO_MEMORY], uv_now(cluster->loop), LOG_WARNING,
                    "a connection of another node could not be accepted: %s", uv_strerror(status));
}

/* Listens. Takes ownership of the socket, even on failure. */
static int listen_on(struct cluster *cluster, int fd)
{
    int r = uv_tcp_init(cluster->loop, &cluster->listener);

    if (r < 0) {
        close(fd);
        return r;
    }
    cluster->n_open++;
    cluster->listener.data = cluster;
    r = uv_tcp_open(&cluster->listener, fd);
    if (r < 0)
        close(fd);
    return r < 0 ? r : uv_listen((uv_stream_t *)&cluster->listener, BACKLOG, on_connection);
}

/* ---- time ---------------------------------------------------------------------------------------------- */

static void check_waiting(struct cluster *cluster, struct connection *connection)
{
    uint64_t limit_ms = connection->outgoing && !connection->connected ? CONNECT_MS : HANDSHAKE_MS;

    if (uv_now(cluster->loop) - connection->since_ms < limit_ms) {
        connection_check(connection);
        return;
    }
    if (connection->is_finishing)
        cluster_let_go(connection);
    else if (connection->outgoing)
        cluster_outgoing_failed(connection, CONNECTION_LOST, "timed out");
    else
        cluster_refuse(connection, CLUSTER_SLOW, "was dropped: it did not identify itself within %d s",
                       HANDSHAKE_MS / 1000);
}

static void check_up(struct cluster_peer *peer, bool late)
{
    uint64_t silent_ms = peer_silent_ms(peer);
    bool was_doubted = peer->is_doubted;

    peer->is_doubted = silent_ms > CLUSTER_SILENCE_MS && !late;
    if (peer->given_up) {
        cluster_part_from(peer);
    } else if (peer->is_doubted && was_doubted) {
        peer_explain(peer, PEER_SILENT, "has not been heard for %.1f s", (double)silent_ms / 1000);
        cluster_lose(peer);
    } else {
        peer_beat(peer);
        connection_check(peer->connection);
    }
}

static void flush_limits(struct cluster *cluster)
{
    uint64_t now_ms = uv_now(cluster->loop);

    for (unsigned i = 0; i < N_CLUSTER_REASONS; i++)
        log_limit_flush(&cluster->limits[i], now_ms);
    for (unsigned node = 0; node < cluster->n_nodes; node++) {
        for (unsigned i = 0; i < N_PEER_REASONS; i++)
            log_limit_flush(&cluster->peers[node].limits[i], now_ms);
    }
}

static void on_tick(uv_timer_t *timer)
{
    struct cluster *cluster = timer->data;
    uint64_t now_ms = uv_now(cluster->loop);
    bool late = now_ms - cluster->ticked_ms > LATE_MS;

    cluster->ticked_ms = now_ms;
    for (struct connection *c = cluster->waiting, *next; c && !cluster->closing; c = next) {
        next = c->next;
        check_waiting(cluster, c);
    }
    for (unsigned node = 0; node < cluster->n_nodes && !cluster->closing; node++) {
        if (cluster->peers[node].connection)
            check_up(&cluster->peers[node], late);
    }
    if (cluster->closing)
        return;
    if (cluster->node != 0 && !cluster->is_connecting && !cluster->peers[0].connection &&
        now_ms >= cluster->retry_at_ms)
        cluster_look_up(cluster);
    flush_limits(cluster);
}

/* ---- the interface ------------------------------------------------------------------------------------- */

/*
 * Makes the text of the settings that must be equal. The version is its first line, because daemons of different
 * versions may differ in many settings.
 */
static int set_alike(struct cluster *cluster, char *why, size_t why_size)
{
    _cleanup_free_ char *shared = config_shared_text(cluster->config);
    int n_bytes = shared ? asprintf(&cluster->alike, "zerod version: %s\n%s", ZEROD_VERSION, shared) : -1;

    if (n_bytes < 0) {
        cluster->alike = NULL;
        return -ENOMEM;
    }
    if (n_bytes > CLUSTER_MAX_MESSAGE_BYTES) {
        snprintf(why, why_size, "the configuration is too long to be told to another node");
        return -E2BIG;
    }
    return 0;
}

static int prepare_cluster(struct cluster *cluster, char *why, size_t why_size)
{
    int r = key_file_read(&cluster->key, cluster->config->world.key_file, why, why_size);

    if (r == 0)
        r = set_alike(cluster, why, why_size);
    if (r < 0)
        return r;
    cluster->peers = calloc(cluster->n_nodes, sizeof(*cluster->peers));
    if (!cluster->peers)
        return -ENOMEM;
    for (unsigned i = 0; i < cluster->n_nodes; i++)
        peer_init(&cluster->peers[i], &cluster->ops, cluster->loop, i);
    return 0;
}

/*
 * Opens the first handles. Afterwards only cluster_close() may end the cluster. Takes ownership of the socket, even on
 * failure.
 */
static int start_cluster(struct cluster *cluster, int fd)
{
    int r = uv_timer_init(cluster->loop, &cluster->tick);

    assert(r == 0); /* uv_timer_init() only fills a struct */
    cluster->n_open++;
    cluster->tick.data = cluster;
    cluster->ticked_ms = uv_now(cluster->loop);
    r = uv_timer_start(&cluster->tick, on_tick, cluster->node == 0 ? TICK_MS : 0, TICK_MS);
    if (r == 0 && cluster->node == 0)
        r = listen_on(cluster, fd);
    return r;
}

/*
 * Ignores SIGPIPE if no handler is set, because libuv writes to sockets without MSG_NOSIGNAL, and a peer that closes
 * its connection must not end this process.
 */
static void ignore_sigpipe(void)
{
    struct sigaction action;

    if (sigaction(SIGPIPE, NULL, &action) == 0 && action.sa_handler == SIG_DFL) {
        action.sa_handler = SIG_IGN;
        (void)sigaction(SIGPIPE, &action, NULL);
    }
}

int cluster_new(struct cluster **out, const struct cluster_options *options, char *why, size_t why_size)
{
    _cleanup_(cluster_freep) struct cluster *cluster = calloc(1, sizeof(*cluster));
    int fd = -1, r;

    *out = NULL;
    *why = '\0';
    assert(options->incarnation != 0 && options->config->world.nodes.n_items >= 2);
    if (!cluster)
        return -ENOMEM;
    ignore_sigpipe();
    cluster->loop = options->loop;
    cluster->config = options->config;
    cluster->ops = options->ops;
    cluster->connection_ops = &cluster_connection_ops;
    cluster->incarnation = options->incarnation;
    cluster->node = options->config->world.node;
    cluster->n_nodes = (unsigned)options->config->world.nodes.n_items;

    r = prepare_cluster(cluster, why, why_size);
    if (r == 0 && cluster->node == 0)
        r = fd = cluster_bind(cluster, why, why_size);
    if (r >= 0)
        r = start_cluster(cluster, fd);
    if (r < 0 && !*why)
        snprintf(why, why_size, "the links between the nodes cannot be made: %s", strerror(-r));
    if (r < 0 && cluster->n_open > 0)
        cluster_close(steal_ptr(cluster)); /* the last close callback frees the cluster */
    else if (r == 0)
        *out = steal_ptr(cluster);
    return r;
}

int cluster_send(struct cluster *cluster, unsigned node, const void *data, size_t n_bytes)
{
    assert(node < cluster->n_nodes && node != cluster->node && (node == 0 || cluster->node == 0));
    assert(n_bytes <= CLUSTER_MAX_MESSAGE_BYTES);
    return peer_send(&cluster->peers[node], data, n_bytes);
}

void cluster_mark(struct cluster *cluster, unsigned node)
{
    assert(node < cluster->n_nodes);
    peer_mark(&cluster->peers[node]);
}

bool cluster_has_marked(const struct cluster *cluster, unsigned node)
{
    assert(node < cluster->n_nodes);
    return peer_has_marked(&cluster->peers[node]);
}

bool cluster_is_up(const struct cluster *cluster, unsigned node)
{
    return node < cluster->n_nodes && cluster->peers[node].connection && !cluster->peers[node].given_up;
}

const char *cluster_why_down(const struct cluster *cluster, unsigned node)
{
    struct cluster_peer *peer = &cluster->peers[node];

    assert(node < cluster->n_nodes);
    if (peer->is_silent && !peer->connection)
        snprintf(peer->why, sizeof(peer->why), "has not been heard for %.1f s", (double)peer_silent_ms(peer) / 1000);
    return peer->why;
}

uint64_t cluster_silent_ms(const struct cluster *cluster, unsigned node)
{
    assert(node < cluster->n_nodes);
    return peer_silent_ms(&cluster->peers[node]);
}
