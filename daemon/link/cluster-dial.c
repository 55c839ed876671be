/* SPDX-License-Identifier: Apache-2.0 */

/* Looks up the address of node 0. Node 0 binds its socket to it. The other nodes connect to it, and retry. */

#include "daemon/link/cluster-internal.h"

#include <assert.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "core/base/base.h"
#include "core/config/config.h"

enum {
    BACKLOG = 128, /* connections that wait to be accepted; picked, not measured */
    MAX_HOST_BYTES = 256,
};

/* ---- addresses ----------------------------------------------------------------------------------------- */

/* Splits an address into host and port. The configuration reader has checked the address. */
static void split_address(const char *address, char *host, char *port)
{
    const char *colon = strrchr(address, ':');
    bool brackets = *address == '[';

    snprintf(host, MAX_HOST_BYTES, "%.*s", (int)(colon - address) - 2 * brackets, address + brackets);
    snprintf(port, 8, "%s", colon + 1);
}

static const struct addrinfo *lookup_hints(void)
{
    static const struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};

    return &hints;
}

static int bind_to(const struct addrinfo *address)
{
    _cleanup_close_ int fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int on = 1;

    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) < 0 ||
        bind(fd, address->ai_addr, address->ai_addrlen) < 0 || listen(fd, BACKLOG) < 0)
        return -errno;
    return steal_fd(&fd);
}

int cluster_bind(struct cluster *cluster, char *why, size_t why_size)
{
    const char *address = cluster->config->world.nodes.items[0].address;
    char host[MAX_HOST_BYTES], port[8];
    int r;

    split_address(address, host, port);
    r = uv_getaddrinfo(cluster->loop, &cluster->lookup, NULL, host, port, lookup_hints());
    if (r < 0) {
        snprintf(why, why_size, "world.nodes: the address of node 0, %s, is not known: %s", address, uv_strerror(r));
        return -EADDRNOTAVAIL;
    }
    for (const struct addrinfo *a = cluster->lookup.addrinfo; a; a = a->ai_next) {
        r = bind_to(a);
        if (r >= 0)
            break;
    }
    uv_freeaddrinfo(cluster->lookup.addrinfo);
    cluster->lookup = (uv_getaddrinfo_t){0};
    if (r < 0)
        snprintf(why, why_size, "world.nodes: this daemon is node 0 and cannot listen at %s: %s", address,
                 strerror(-r));
    return r;
}

/* ---- the way to node 0 --------------------------------------------------------------------------------- */

void cluster_retry(struct cluster *cluster, struct connection *connection)
{
    cluster->retry_at_ms = uv_now(cluster->loop) + CLUSTER_RETRY_MS;
    if (connection)
        cluster_let_go(connection);
}

void cluster_try_next_address(struct cluster *cluster)
{
    struct connection_options options = cluster_connection_options(cluster);
    struct addrinfo *address = cluster->next_address;
    struct connection *connection = NULL;
    int r;

    assert(!cluster->closing);
    assert(!cluster->is_connecting);
    cluster->next_address = address->ai_next;
    r = connection_open(&connection, &options, address->ai_addr);
    cluster->n_open += connection != NULL;
    if (r == 0) {
        cluster->is_connecting = true;
        cluster_link(cluster, connection);
        return;
    }
    peer_explain(&cluster->peers[0], PEER_UNREACHABLE, "nobody answers at %s (%s)",
                 cluster->config->world.nodes.items[0].address, uv_strerror(r));
    cluster_retry(cluster, NULL);
}

static void on_looked_up(uv_getaddrinfo_t *lookup, int status, struct addrinfo *addresses)
{
    struct cluster *cluster = container_of(lookup, struct cluster, lookup);

    cluster->is_connecting = false;
    uv_freeaddrinfo(cluster->addresses);
    cluster->addresses = cluster->next_address = addresses;
    if (!cluster->closing && status == 0) {
        cluster_try_next_address(cluster);
    } else if (!cluster->closing) {
        peer_explain(&cluster->peers[0], PEER_UNREACHABLE, "the address %s is not known: %s",
                     cluster->config->world.nodes.items[0].address, uv_strerror(status));
        cluster_retry(cluster, NULL);
    }
    cluster_one_less(cluster);
}

void cluster_look_up(struct cluster *cluster)
{
    char host[MAX_HOST_BYTES], port[8];
    int r;

    assert(cluster->node != 0);
    assert(!cluster->is_connecting); /* a running lookup still uses cluster->lookup */
    split_address(cluster->config->world.nodes.items[0].address, host, port);
    r = uv_getaddrinfo(cluster->loop, &cluster->lookup, on_looked_up, host, port, lookup_hints());
    cluster->is_connecting = r == 0;
    cluster->n_open += r == 0;
    if (r < 0)
        cluster_retry(cluster, NULL);
}
