/* SPDX-License-Identifier: Apache-2.0 */

/* Opens the exporter's listening socket. */

#include "client/exporter/address.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sysexits.h>
#include <unistd.h>

#include "core/base/base.h"

enum { BACKLOG = 64 };

struct place {
    char host[256], port[32];
};

/* Splits an address into host and port. Return: false if it is not an address. */
static bool split(const char *address, struct place *place)
{
    const char *colon = strrchr(address, ':');
    size_t n_host = colon ? (size_t)(colon - address) : 0;
    bool in_brackets = n_host > 2 && address[0] == '[' && colon[-1] == ']';

    if (!colon || !colon[1] || strspn(colon + 1, "0123456789") != strlen(colon + 1) || strlen(colon + 1) > 5 ||
        n_host >= sizeof(place->host) || (!in_brackets && memchr(address, ':', n_host)))
        return false;
    snprintf(place->host, sizeof(place->host), "%.*s", (int)n_host - 2 * in_brackets, address + in_brackets);
    snprintf(place->port, sizeof(place->port), "%s", colon + 1);
    return true;
}

static int listen_at(const struct addrinfo *info)
{
    _cleanup_close_ int fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int yes = 1;

    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) < 0 ||
        bind(fd, info->ai_addr, info->ai_addrlen) < 0 || listen(fd, BACKLOG) < 0)
        return -errno;
    return steal_fd(&fd);
}

/* Prints the socket's address on stderr. If the option has port 0, the kernel has chosen another port. */
static void say_where(int fd)
{
    struct sockaddr_storage address;
    socklen_t size = sizeof(address);
    char host[128], port[32];

    if (getsockname(fd, (struct sockaddr *)&address, &size) == 0 &&
        getnameinfo((struct sockaddr *)&address, size, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) == 0)
        fprintf(stderr,
                strchr(host, ':') ? "zerod-exporter: listening on http://[%s]:%s/metrics\n"
                                  : "zerod-exporter: listening on http://%s:%s/metrics\n",
                host, port);
}

int place_listen(const char *address)
{
    const struct addrinfo hints = {.ai_flags = AI_PASSIVE, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found;
    struct place place;
    int r, fd;

    if (!split(address, &place) || atoi(place.port) > 65535) {
        fprintf(stderr, "zerod-exporter: --listen: '%s' is no ADDRESS:PORT, such as 127.0.0.1:17700 or [::1]:17700\n",
                address);
        return -EX_USAGE;
    }
    r = getaddrinfo(place.host[0] ? place.host : NULL, place.port, &hints, &found);
    if (r != 0) {
        fprintf(stderr, "zerod-exporter: --listen: %s: %s\n", address, gai_strerror(r));
        return -EX_NOHOST;
    }
    fd = listen_at(found);
    freeaddrinfo(found);
    if (fd < 0) {
        fprintf(stderr, "zerod-exporter: cannot listen on %s: %s\n", address, strerror(-fd));
        return fd == -EACCES ? -EX_NOPERM : -EX_UNAVAILABLE;
    }
    say_where(fd);
    return fd;
}
