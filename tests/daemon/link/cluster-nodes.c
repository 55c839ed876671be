/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/daemon/link/cluster-nodes.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/config/config.h"

enum { LOG_LINES = 4096, LINE_BYTES = 800, MAX_MESSAGE = CLUSTER_MAX_MESSAGE_BYTES };

struct proxy proxy;
uint16_t node_port;

static struct node *nodes[16];
static size_t n_nodes;
static char lines[LOG_LINES][LINE_BYTES];
static size_t n_lines;
static char key_path[32];
static uint64_t last_incarnation;
static uint8_t payload[MAX_MESSAGE];

/* ---- what is wrapped ----------------------------------------------------------------------------------- */

void __wrap_log_line(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));
int __wrap_uv_tcp_connect(uv_connect_t *request, uv_tcp_t *tcp, const struct sockaddr *address, uv_connect_cb callback);
int __real_uv_tcp_connect(uv_connect_t *request, uv_tcp_t *tcp, const struct sockaddr *address, uv_connect_cb callback);

void __wrap_log_line(int level, const char *format, ...)
{
    va_list args;

    (void)level;
    assert_true(n_lines < LOG_LINES);
    va_start(args, format);
    vsnprintf(lines[n_lines++], LINE_BYTES, format, args);
    va_end(args);
}

/* Redirects connections to the proxy. Its address cannot be in the configuration, which is equal on all nodes. */
int __wrap_uv_tcp_connect(uv_connect_t *request, uv_tcp_t *tcp, const struct sockaddr *address, uv_connect_cb callback)
{
    struct sockaddr_in there = *(const struct sockaddr_in *)address;

    if (proxy.on && there.sin_port == htons(node_port))
        there.sin_port = htons(proxy.port);
    return __real_uv_tcp_connect(request, tcp, (struct sockaddr *)&there, callback);
}

unsigned n_logged(const char *part)
{
    unsigned n = 0;

    for (size_t i = 0; i < n_lines; i++)
        n += strstr(lines[i], part) != NULL;
    return n;
}

unsigned n_logged_in_all(void)
{
    return (unsigned)n_lines;
}

void log_forget(void)
{
    n_lines = 0;
}

/* ---- sockets ------------------------------------------------------------------------------------------- */

static struct sockaddr_in local(uint16_t port)
{
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
}

/* Return: a socket that is bound to the port, or to any if it is 0; or -1. */
static int bind_at(uint16_t port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    struct sockaddr_in address = local(port);

    assert_true(fd >= 0);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)), 0);
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0)
        return fd;
    close(fd);
    return -1;
}

/* Return: a free port. It is below 32768, where the kernel does not choose ports, so it stays free for some time. */
static uint16_t find_port(void)
{
    for (unsigned i = 0;; i++) {
        uint16_t port = (uint16_t)(16384 + ((unsigned)getpid() + i) % 16384);
        int fd = bind_at(port);

        if (fd >= 0) {
            close(fd);
            return port;
        }
    }
}

/* Return: a listening socket. Sets its port. */
static int listen_somewhere(uint16_t *port)
{
    struct sockaddr_in address;
    socklen_t size = sizeof(address);
    int fd = bind_at(0);

    assert_true(fd >= 0);
    assert_int_equal(listen(fd, 64), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &size), 0);
    *port = ntohs(address.sin_port);
    return fd;
}

int knock(void)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = local(node_port);

    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    return fd;
}

bool is_dropped(int fd)
{
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK);

    return n == 0 || (n < 0 && errno != EAGAIN);
}

size_t wait_until_dropped(int fd, unsigned ms)
{
    uint64_t end_ms = now_ms() + ms;
    char bytes[4096];
    size_t n_bytes = 0;
    ssize_t n;

    for (;;) {
        n = recv(fd, bytes, sizeof(bytes), 0);
        if (n == 0 || (n < 0 && errno != EAGAIN))
            return n_bytes;
        n_bytes += n > 0 ? (size_t)n : 0;
        if (now_ms() > end_ms)
            fail_msg("the connection still stands after %u ms", ms);
        turn();
    }
}

/* ---- the proxy ----------------------------------------------------------------------------------------- */

static void channel_cut(struct channel *channel)
{
    static const struct linger at_once = {.l_onoff = 1};

    if (channel->from < 0)
        return;
    /* Unsent bytes are lost, as when a machine or a cable fails. */
    setsockopt(channel->from, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    setsockopt(channel->to, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    close(steal_fd(&channel->from));
    close(steal_fd(&channel->to));
}

void proxy_cut(void)
{
    for (size_t i = 0; i < MAX_CHANNELS; i++)
        channel_cut(&proxy.channels[i]);
}

static void proxy_accept(void)
{
    int fd = accept4(proxy.listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0)
        return;
    for (size_t i = 0; i < MAX_CHANNELS; i++) {
        struct channel *channel = &proxy.channels[i];

        if (channel->from >= 0)
            continue;
        /* The cut is mostly inside messages, and sometimes inside the handshake. */
        *channel =
            (struct channel){.from = fd, .to = knock(), .budget = (size_t)(rand() % (rand() % 4 ? 60000 : 1000))};
        return;
    }
    fail_msg("more than %d connections through the proxy", MAX_CHANNELS);
}

static void spoil(uint8_t *bytes, ssize_t n_bytes)
{
    if (proxy.flip_at == 0)
        return;
    if (proxy.flip_at <= (size_t)n_bytes) {
        bytes[proxy.flip_at - 1] ^= 0x10;
        proxy.flip_at = 0;
    } else {
        proxy.flip_at -= (size_t)n_bytes;
    }
}

static void record(const struct channel *channel, const uint8_t *bytes, ssize_t n_bytes)
{
    size_t n = MIN((size_t)n_bytes, RECORDED_BYTES - proxy.n_recorded);

    if (channel != proxy.channels)
        return;
    memcpy(proxy.recorded + proxy.n_recorded, bytes, n);
    proxy.n_recorded += n;
}

/* Return: false if the connection has ended. */
static bool pass_on(struct channel *channel, int from, int to)
{
    uint8_t bytes[16 * 1024];
    ssize_t n = recv(from, bytes, sizeof(bytes), 0), n_passed = 0;

    if (n < 0 && errno == EAGAIN)
        return true;
    if (n <= 0)
        return false;
    if (proxy.cuts && channel->n_passed + (size_t)n > channel->budget)
        n = (ssize_t)(channel->budget - channel->n_passed);
    if (to == channel->to) {
        spoil(bytes, n);
        record(channel, bytes, n);
    }
    while (n_passed < n) {
        ssize_t m = send(to, bytes + n_passed, (size_t)(n - n_passed), MSG_NOSIGNAL);

        if (m < 0 && errno == EAGAIN) {
            /* The socket is full, so the nodes must read. Runs their loops, but not the proxy. */
            for (size_t i = 0; i < n_nodes; i++)
                (void)uv_run(&nodes[i]->loop, UV_RUN_NOWAIT);
            continue;
        }
        if (m < 0)
            return false;
        n_passed += m;
    }
    channel->n_passed += (size_t)n;
    if (!proxy.cuts || channel->n_passed < channel->budget)
        return true;
    proxy.n_cuts++;
    return false;
}

static void proxy_turn(void)
{
    proxy_accept();
    for (size_t i = 0; i < MAX_CHANNELS && !proxy.hole; i++) {
        struct channel *channel = &proxy.channels[i];

        if (channel->from >= 0 &&
            (!pass_on(channel, channel->from, channel->to) || !pass_on(channel, channel->to, channel->from)))
            channel_cut(channel);
    }
}

/* ---- nodes --------------------------------------------------------------------------------------------- */

static void fill(uint8_t *data, uint32_t number, size_t n_bytes)
{
    for (size_t i = sizeof(number); i < n_bytes; i++)
        data[i] = (uint8_t)(number * 31 + i * 7);
    memcpy(data, &number, MIN(n_bytes, sizeof(number)));
}

static void on_message(void *userdata, unsigned from, const uint8_t *data, size_t n_bytes)
{
    static uint8_t wanted[MAX_MESSAGE];
    struct node *node = userdata;

    fill(wanted, node->expected[from]++, n_bytes);
    assert_memory_equal(data, wanted, n_bytes);
    node->n_received[from]++;
    assert_true(node->n_up[from] == node->n_down[from] + 1); /* only while the link is up */
}

static void on_up(void *userdata, unsigned other)
{
    struct node *node = userdata;

    assert_int_equal(node->n_up[other], node->n_down[other]);
    node->n_up[other]++;
    node->n_reborn_at_up[other] = node->n_reborn[other];
    if (node->closes_when_up)
        cluster_close(steal_ptr(node->cluster));
}

static void on_down(void *userdata, unsigned other, const char *why)
{
    struct node *node = userdata;

    node->n_down[other]++;
    assert_int_equal(node->n_up[other], node->n_down[other]);
    snprintf(node->why[other], sizeof(node->why[other]), "%s", why);
    if (node->closes_when_down)
        cluster_close(steal_ptr(node->cluster));
}

static bool has_run(void *userdata)
{
    const struct node *node = userdata;

    return node->has_run;
}

static void on_appeared(void *userdata, unsigned other, bool first, bool has_run)
{
    struct node *node = userdata;

    assert_int_equal(node->n_up[other], node->n_down[other]); /* before up() */
    node->others_have_run[other] = has_run;
    if (first)
        return;
    node->n_reborn[other]++;
    node->expected[other] = 0;
    node->n_sent[other] = 0;
    if (node->talks_when_reborn)
        node_send(node, other, 100);
}

static void write_key(const char *key)
{
    int fd = open(key_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, key, strlen(key)), strlen(key));
    close(fd);
}

static struct config *configure(const struct node_options *options)
{
    static const struct config_build build = {.have_gloo = true};
    unsigned n = options->n_nodes ? options->n_nodes : 2;
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config = NULL;
    char text[4096];
    int at;

    at = snprintf(text, sizeof(text),
                  "listen: {socket: /run/zerod/%u.sock}\ncollective: gloo\n"
                  "world: {size: %u, node: %u, key_file: %s, nodes: [{address: \"127.0.0.1:%u\", ranks: 1}",
                  options->node, n, options->node, key_path, node_port);
    for (unsigned i = 1; i < n; i++)
        at += snprintf(text + at, sizeof(text) - (size_t)at, ", {address: \"127.0.0.%u:1\", ranks: 1}", i + 1);
    snprintf(text + at, sizeof(text) - (size_t)at, "]}\n%s", options->yaml ? options->yaml : "");
    struct config_source source = {.text = {.name = "f.yaml", .text = text, .n_bytes = strlen(text)}, .build = &build};
    if (config_load_string(&config, &source, &problems) != 0) {
        config_problems_print(stderr, &problems);
        fail();
    }
    config_problems_deinit(&problems);
    return config;
}

int node_try(struct node *node, const struct node_options *options, char *why, size_t why_size)
{
    struct cluster_options cluster = {.loop = &node->loop,
                                      .incarnation = options->incarnation ? options->incarnation : ++last_incarnation,
                                      .ops = {.message = on_message,
                                              .up = on_up,
                                              .down = on_down,
                                              .has_run = has_run,
                                              .appeared = on_appeared,
                                              .userdata = node}};

    *node = (struct node){.node = options->node};
    assert_int_equal(uv_loop_init(&node->loop), 0);
    node->config = configure(options);
    cluster.config = node->config;
    nodes[n_nodes++] = node;
    return cluster_new(&node->cluster, &cluster, why, why_size);
}

void node_start(struct node *node, const struct node_options *options)
{
    char why[512];

    write_key(options->key ? options->key : "the key that all nodes of this test hold\n");
    if (node_try(node, options, why, sizeof(why)) != 0)
        fail_msg("%s", why);
}

void node_stop(struct node *node)
{
    cluster_close(steal_ptr(node->cluster));
    assert_int_equal(uv_run(&node->loop, UV_RUN_DEFAULT), 0);
    assert_int_equal(uv_loop_close(&node->loop), 0);
    config_free(node->config);
    for (size_t i = 0; i < n_nodes; i++) {
        if (nodes[i] == node)
            nodes[i] = nodes[--n_nodes];
    }
}

void node_send(struct node *node, unsigned to, size_t n_bytes)
{
    fill(payload, node->n_sent[to]++, n_bytes);
    assert_int_equal(cluster_send(node->cluster, to, payload, n_bytes), 0);
}

bool node_is_up(const struct node *node, unsigned other)
{
    assert_true(cluster_is_up(node->cluster, other) == (node->n_up[other] > node->n_down[other]));
    return cluster_is_up(node->cluster, other);
}

/* ---- time ---------------------------------------------------------------------------------------------- */

uint64_t now_ms(void)
{
    return uv_hrtime() / 1000000;
}

void turn(void)
{
    for (size_t i = 0; i < n_nodes; i++) {
        if (!nodes[i]->frozen)
            (void)uv_run(&nodes[i]->loop, UV_RUN_NOWAIT);
    }
    proxy_turn();
    usleep(300);
}

void turn_for(unsigned ms)
{
    uint64_t end_ms = now_ms() + ms;

    while (now_ms() < end_ms)
        turn();
}

void harness_begin(void)
{
    int fd;

    strcpy(key_path, "/tmp/zerod-key-XXXXXX");
    fd = mkstemp(key_path);
    assert_true(fd >= 0);
    close(fd);
    n_nodes = 0; /* an earlier test that failed has left some */
    node_port = find_port();
    proxy = (struct proxy){.on = false};
    proxy.listener = listen_somewhere(&proxy.port);
    for (size_t i = 0; i < MAX_CHANNELS; i++)
        proxy.channels[i].from = proxy.channels[i].to = -1;
    log_forget();
}

void harness_end(void)
{
    assert_int_equal(n_nodes, 0);
    proxy_cut();
    close(proxy.listener);
    (void)unlink(key_path);
}
