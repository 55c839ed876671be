/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The links between the nodes' daemons, over TCP. Messages arrive once and in order, whatever happens to connections.
 * Other tests: who may connect, what happens to others, and what each end learns about the other.
 */

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "core/base/base.h"
#include "core/base/log-limit.h"
#include "core/config/config.h"
#include "daemon/link/key-file.h"
#include "daemon/link/link-frame.h"
#include "tests/daemon/link/cluster-nodes.h"
#include "tests/tiers.h"

static struct node a, b, c;

#define SAYS(text, part)                                                                                               \
    do {                                                                                                               \
        const char *text_ = (text);                                                                                    \
        if (!strstr(text_, part))                                                                                      \
            fail_msg("\"%s\" does not say \"%s\"", text_, part);                                                       \
    } while (0)

static bool both_up(void)
{
    return node_is_up(&a, 1) && node_is_up(&b, 0);
}

static void start_two(void)
{
    node_start(&a, &(struct node_options){.node = 0});
    node_start(&b, &(struct node_options){.node = 1});
}

static void begin_up(bool through_proxy)
{
    harness_begin();
    proxy.on = through_proxy;
    start_two();
    WAIT_FOR(both_up(), 3000);
    log_forget();
}

static void end(void)
{
    node_stop(&b);
    node_stop(&a);
    harness_end();
}

/* Asserts that both links are still up, over the same connection, and carry messages. */
static void expect_undisturbed(void)
{
    uint32_t n_a = a.n_received[1], n_b = b.n_received[0];

    node_send(&a, 1, 10);
    node_send(&b, 0, 10);
    WAIT_FOR(a.n_received[1] == n_a + 1 && b.n_received[0] == n_b + 1, 2000);
    assert_int_equal(a.n_down[1], 0);
    assert_int_equal(b.n_down[0], 0);
}

/* ---- messages ------------------------------------------------------------------------------------------ */

static void test_in_order_both_ways(void **userdata)
{
    static const size_t sizes[] = {0, 1, 4, 1000, 100000, CLUSTER_MAX_MESSAGE_BYTES};

    (void)userdata;
    begin_up(false);
    for (unsigned i = 0; i < 300; i++) {
        node_send(&a, 1, sizes[i % (i % 25 ? 4 : ARRAY_SIZE(sizes))]);
        node_send(&b, 0, sizes[i % (i % 30 ? 4 : ARRAY_SIZE(sizes))]);
    }
    WAIT_FOR(a.n_received[1] == 300 && b.n_received[0] == 300, 10000);
    assert_int_equal(a.n_up[1], 1);
    assert_int_equal(a.n_reborn[1], 0);
    assert_true(cluster_silent_ms(a.cluster, 1) < 1000);
    end();
}

/* Messages that are sent before node 0 exists are kept for it. */
static void test_kept_for_the_first(void **userdata)
{
    (void)userdata;
    harness_begin();
    node_start(&b, &(struct node_options){.node = 1});
    assert_int_equal(cluster_silent_ms(b.cluster, 0), UINT64_MAX);
    SAYS(cluster_why_down(b.cluster, 0), "not heard of yet");
    for (unsigned i = 0; i < 10; i++)
        node_send(&b, 0, 50);
    turn_for(500);
    assert_false(cluster_is_up(b.cluster, 0));
    SAYS(cluster_why_down(b.cluster, 0), "nobody answers at 127.0.0.1:");
    SAYS(cluster_why_down(b.cluster, 0), "(connection refused)");
    assert_int_equal(n_logged("nobody answers"), 1); /* logged once, although tried several times */
    node_start(&a, &(struct node_options){.node = 0});
    assert_int_equal(cluster_silent_ms(a.cluster, 1), UINT64_MAX);
    WAIT_FOR(a.n_received[1] == 10, 3000);
    assert_int_equal(a.n_reborn[1], 0);
    assert_int_equal(b.n_reborn[0], 0);
    end();
}

static void test_three_nodes(void **userdata)
{
    (void)userdata;
    harness_begin();
    node_start(&a, &(struct node_options){.node = 0, .n_nodes = 3});
    node_start(&b, &(struct node_options){.node = 1, .n_nodes = 3});
    node_start(&c, &(struct node_options){.node = 2, .n_nodes = 3});
    for (unsigned i = 0; i < 50; i++) {
        node_send(&a, 1 + i % 2, 100);
        node_send(&b, 0, 100);
        node_send(&c, 0, 100);
    }
    WAIT_FOR(a.n_received[1] == 50 && a.n_received[2] == 50 && b.n_received[0] == 25 && c.n_received[0] == 25, 3000);
    node_stop(&c);
    WAIT_FOR(!node_is_up(&a, 2), 1000); /* at once, not after CLUSTER_SILENCE_MS */
    SAYS(cluster_why_down(a.cluster, 2), "the connection was lost");
    expect_undisturbed();
    end();
}

/* Return: the smallest number of messages that a link has carried. */
static uint32_t n_fewest(const struct node *nodes)
{
    uint32_t n = UINT32_MAX;

    for (unsigned i = 1; i < MAX_NODES; i++) {
        n = MIN(n, nodes[0].n_received[i]);
        n = MIN(n, nodes[i].n_received[0]);
    }
    return n;
}

/*
 * Seven nodes, whose connections are all cut after random numbers of bytes, also inside the handshake. Bytes that were
 * on their way are lost with the connection. Still no message may be lost, or arrive twice.
 */
static void test_cuts(void **userdata)
{
    static struct node nodes[MAX_NODES];
    const unsigned wanted_cuts = tests_some(300), wanted_messages = tests_some(50);
    uint64_t end_ms = now_ms() + 40000;
    unsigned n_ups = 0;

    (void)userdata;
    srand(7);
    harness_begin();
    proxy.on = proxy.cuts = true;
    for (unsigned i = 0; i < MAX_NODES; i++)
        node_start(&nodes[i], &(struct node_options){.node = i, .n_nodes = MAX_NODES});
    while ((proxy.n_cuts < wanted_cuts || n_fewest(nodes) < wanted_messages) && now_ms() < end_ms) {
        for (unsigned i = 1; i < MAX_NODES; i++) {
            if (nodes[0].n_sent[i] < nodes[i].n_received[0] + 20)
                node_send(&nodes[0], i, (size_t)(rand() % 3000));
            if (nodes[i].n_sent[0] < nodes[0].n_received[i] + 20)
                node_send(&nodes[i], 0, (size_t)(rand() % 3000));
        }
        turn();
    }
    assert_true(proxy.n_cuts >= wanted_cuts && n_fewest(nodes) >= wanted_messages);
    proxy.cuts = false;
    for (unsigned i = 1; i < MAX_NODES; i++) {
        WAIT_FOR(nodes[0].n_received[i] == nodes[i].n_sent[0] && nodes[i].n_received[0] == nodes[0].n_sent[i], 8000);
        assert_int_equal(nodes[0].n_reborn[i] + nodes[i].n_reborn[0], 0);
        n_ups += nodes[0].n_up[i];
    }
    assert_true(n_ups > wanted_cuts / 2); /* most connections got beyond the handshake before they were cut */
    assert_true(n_logged_in_all() < 8 * MAX_NODES * 5);
    for (unsigned i = MAX_NODES; i-- > 0;)
        node_stop(&nodes[i]);
    harness_end();
}

/* More bytes than the network takes at once, to a node that does not read for some time. */
static void test_backlog(void **userdata)
{
    (void)userdata;
    begin_up(false);
    b.frozen = true;
    for (unsigned i = 0; i < 40; i++)
        node_send(&a, 1, CLUSTER_MAX_MESSAGE_BYTES);
    turn_for(1000);
    assert_true(node_is_up(&a, 1));
    b.frozen = false;
    WAIT_FOR(b.n_received[0] == 40, 10000);
    assert_int_equal(a.n_down[1], 0);
    end();
}

/* ---- who is not there ---------------------------------------------------------------------------------- */

static void expect_noticed(struct node *frozen, struct node *other)
{
    uint64_t since_ms;

    begin_up(false);
    turn_for(700); /* time for some heartbeats */
    frozen->frozen = true;
    since_ms = now_ms();
    for (unsigned i = 0; i < 5; i++)
        node_send(other, frozen->node, 200);
    WAIT_FOR(!node_is_up(other, frozen->node), 3000);
    assert_true(now_ms() - since_ms >= CLUSTER_SILENCE_MS - CLUSTER_HEARTBEAT_MS - 100);
    SAYS(other->why[frozen->node], "has not been heard for 1.");
    assert_int_equal(n_logged("has not been heard for"), 1);
    turn_for(700);
    assert_true(cluster_silent_ms(other->cluster, frozen->node) >= 2000);
    if (other->node == 0) /* node 1 tries to connect again, which changes its reason */
        SAYS(cluster_why_down(other->cluster, frozen->node), "has not been heard for 2.");
    frozen->frozen = false;
    WAIT_FOR(frozen->n_received[other->node] == 5, 5000);
    WAIT_FOR(both_up(), 3000);
    assert_int_equal(other->n_reborn[frozen->node], 0);
    assert_int_equal(frozen->n_reborn[other->node], 0);
    end();
}

static void test_frozen_node(void **userdata)
{
    (void)userdata;
    expect_noticed(&b, &a);
}

static void test_frozen_node_0(void **userdata)
{
    (void)userdata;
    expect_noticed(&a, &b);
}

/* No bytes arrive, and the connection's end is not seen. Both nodes notice the silence, and connect again later. */
static void test_black_hole(void **userdata)
{
    (void)userdata;
    begin_up(true);
    proxy.hole = true;
    node_send(&a, 1, 10);
    node_send(&b, 0, 10);
    WAIT_FOR(!node_is_up(&a, 1) && !node_is_up(&b, 0), 3000);
    proxy.hole = false;
    proxy_cut();
    WAIT_FOR(both_up() && a.n_received[1] == 1 && b.n_received[0] == 1, 5000);
    end();
}

/* A node that slept must not count its own sleep as the silence of others. */
static void test_own_sleep(void **userdata)
{
    (void)userdata;
    begin_up(false);
    for (unsigned i = 0; i < tests_some(4); i++) {
        turn_for(300);
        usleep(1000 * 1000);
        turn();
    }
    usleep(1000 * (CLUSTER_SILENCE_MS + 300));
    turn_for(1000);
    expect_undisturbed();
    end();
}

/* ---- another process in its place ---------------------------------------------------------------------- */

static void test_reborn(void **userdata)
{
    (void)userdata;
    begin_up(false);
    a.talks_when_reborn = true;
    for (unsigned i = 0; i < 10; i++) {
        node_send(&a, 1, 10);
        node_send(&b, 0, 10);
    }
    WAIT_FOR(a.n_received[1] == 10 && b.n_received[0] == 10, 2000);
    node_stop(&b);
    WAIT_FOR(!node_is_up(&a, 1), 1000);
    for (unsigned i = 0; i < 10; i++)
        node_send(&a, 1, 10); /* for the process that has ended */
    node_start(&b, &(struct node_options){.node = 1});
    b.has_run = true;
    node_send(&b, 0, 10);
    WAIT_FOR(both_up() && a.n_received[1] == 11 && b.n_received[0] == 1, 3000);
    assert_true(a.others_have_run[1]);
    assert_false(b.others_have_run[0]);
    assert_int_equal(a.n_reborn[1], 1);
    assert_int_equal(a.n_reborn_at_up[1], 1); /* before up() */
    assert_int_equal(b.n_reborn[0], 0);
    turn_for(300);
    assert_int_equal(b.n_received[0], 1); /* only what was sent in reborn(), nothing from before */

    /* Now node 0 is the new process. */
    node_stop(&a);
    WAIT_FOR(!node_is_up(&b, 0), 1000);
    node_start(&a, &(struct node_options){.node = 0});
    WAIT_FOR(both_up(), 3000);
    assert_int_equal(b.n_reborn[0], 1);
    assert_int_equal(b.n_reborn_at_up[0], 1);
    assert_int_equal(a.n_reborn[1], 0);
    node_send(&b, 0, 10);
    WAIT_FOR(a.n_received[1] == 1, 2000);
    end();
}

/* Another process takes a frozen node's place. When the frozen process continues, it must not get the place back. */
static void test_one_that_was_replaced(void **userdata)
{
    (void)userdata;
    begin_up(false);
    for (unsigned i = 0; i < 3; i++)
        node_send(&b, 0, 10);
    WAIT_FOR(a.n_received[1] == 3, 2000);
    b.frozen = true;
    node_start(&c, &(struct node_options){.node = 1});
    WAIT_FOR(node_is_up(&c, 0), 3000); /* at once, because its connection replaces the old one */
    assert_int_equal(a.n_reborn[1], 1);
    SAYS(a.why[1], "made a new connection");
    node_stop(&c);
    WAIT_FOR(!node_is_up(&a, 1), 1000);
    b.frozen = false;
    turn_for(1500);
    assert_false(node_is_up(&a, 1));
    assert_false(node_is_up(&b, 0));
    SAYS(cluster_why_down(b.cluster, 0), "must be started anew");
    assert_true(n_logged("must be started anew") <= 2);
    end();
}

/* ---- who is not let in --------------------------------------------------------------------------------- */

static void test_wrong_key(void **userdata)
{
    (void)userdata;
    harness_begin();
    node_start(&a, &(struct node_options){.node = 0});
    node_start(&b, &(struct node_options){.node = 1, .key = "a key that is not the one all others hold"});
    turn_for(1500);
    assert_false(node_is_up(&a, 1));
    assert_false(node_is_up(&b, 0));
    assert_int_equal(a.n_up[1] + b.n_up[0], 0);
    SAYS(cluster_why_down(a.cluster, 1), "who says he is that node has another key");
    SAYS(cluster_why_down(b.cluster, 0), "is world.key_file the same there?");
    assert_int_equal(n_logged("could not be opened with our key"), 1);
    assert_int_equal(n_logged("is world.key_file the same there?"), 1);
    end();
}

static void expect_dropped_with(const void *bytes, size_t n_bytes, size_t n_answered, const char *line)
{
    int fd = knock();

    log_forget();
    assert_int_equal(send(fd, bytes, n_bytes, MSG_NOSIGNAL), n_bytes);
    assert_int_equal(wait_until_dropped(fd, 3000), n_answered);
    assert_int_equal(n_logged(line), 1);
    close(fd);
    expect_undisturbed();
}

static void test_replayed(void **userdata)
{
    (void)userdata;
    begin_up(true);
    for (unsigned i = 0; i < 20; i++)
        node_send(&b, 0, 500);
    WAIT_FOR(a.n_received[1] == 20, 2000);
    assert_true(proxy.n_recorded > 20 * 500);
    expect_dropped_with(proxy.recorded, proxy.n_recorded, SECURE_STREAM_HELLO_BYTES,
                        "could not be opened with our key");
    turn_for(200);
    assert_int_equal(a.n_received[1], 21); /* the message of expect_undisturbed() */
    end();
}

static void test_other_bytes(void **userdata)
{
    static uint8_t bytes[5000];

    (void)userdata;
    srand(11);
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (uint8_t)rand();
    begin_up(false);
    expect_dropped_with(bytes, sizeof(bytes), 0, "is not what a daemon says");
    end();
    begin_up(false);
    expect_dropped_with("GET / HTTP/1.0\r\n\r\n", 18, 0, "is not what a daemon says");
    end();
}

/* Makes a node's hello, which needs no key. */
static void make_hello(struct secure_stream *stream, unsigned node)
{
    struct secure_stream_key key;
    struct secure_stream_options options = {
        .role = SECURE_STREAM_CONNECTS, .key = &key, .job = "train", .node = node, .max_frame_bytes = 2 << 20};

    assert_int_equal(secure_stream_key_init(&key, "no key", 6), 0);
    randombytes_buf(options.nonce, sizeof(options.nonce));
    secure_stream_init(stream, &options);
}

static void test_hello_and_nonsense(void **userdata)
{
    static const uint8_t too_long[SECURE_STREAM_HEADER_BYTES + 4] = {
        [SECURE_STREAM_HEADER_BYTES] = 0xff, 0xff, 0xff, 0x7f};
    uint8_t bytes[SECURE_STREAM_HELLO_BYTES + 2000] = {0};
    struct secure_stream stream;

    (void)userdata;
    begin_up(false);
    make_hello(&stream, 1);
    memcpy(bytes, stream.hello, SECURE_STREAM_HELLO_BYTES);
    memcpy(bytes + SECURE_STREAM_HELLO_BYTES, too_long, sizeof(too_long));
    expect_dropped_with(bytes, SECURE_STREAM_HELLO_BYTES + sizeof(too_long), SECURE_STREAM_HELLO_BYTES,
                        "of an impossible length");
    secure_stream_deinit(&stream);
    end();

    for (unsigned i = 0; i < 2; i++) {
        begin_up(false);
        make_hello(&stream, i == 0 ? 0 : 7); /* node 0 cannot connect to itself; there is no node 7 */
        expect_dropped_with(stream.hello, SECURE_STREAM_HELLO_BYTES, 0,
                            i == 0 ? "it says it is node 0" : "it says it is node 7");
        secure_stream_deinit(&stream);
        end();
    }

    begin_up(false);
    make_hello(&stream, 1);
    stream.hello[8] = 9;
    expect_dropped_with(stream.hello, SECURE_STREAM_HELLO_BYTES, SECURE_STREAM_HELLO_BYTES, "it speaks version 9");
    secure_stream_deinit(&stream);
    end();
}

/* A stranger sends half a hello, and then is silent. */
static void test_half_and_silence(void **userdata)
{
    uint64_t since_ms;
    struct secure_stream stream;

    (void)userdata;
    begin_up(false);
    make_hello(&stream, 1);
    since_ms = now_ms();
    expect_dropped_with(stream.hello, SECURE_STREAM_HELLO_BYTES / 2, 0, "did not identify itself within 2 s");
    assert_in_range(now_ms() - since_ms, 1900, 3000);
    secure_stream_deinit(&stream);
    end();
}

/* A bit of a link that is up is flipped. The nodes connect again, and no message is lost. */
static void test_flipped_bit(void **userdata)
{
    (void)userdata;
    begin_up(true);
    for (unsigned round = 1; round <= 3; round++) {
        proxy.flip_at = 700;
        for (unsigned i = 0; i < 10; i++) {
            node_send(&b, 0, 300);
            node_send(&a, 1, 300);
        }
        WAIT_FOR(a.n_received[1] == 10 * round && b.n_received[0] == 10 * round, 3000);
        assert_int_equal(proxy.flip_at, 0);
        assert_int_equal(a.n_down[1], round);
        SAYS(a.why[1], "could not be opened with our key");
    }
    assert_int_equal(a.n_reborn[1], 0);
    end();
}

static void test_thousand_connections(void **userdata)
{
    enum { N = 1000 };
    static int fds[N];
    struct rlimit limit = {.rlim_cur = 4096, .rlim_max = 4096};
    unsigned n_dropped = 0;

    (void)userdata;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
    begin_up(false);
    for (unsigned i = 0; i < N; i++) {
        fds[i] = knock();
        if (i % 20 == 0)
            turn();
    }
    turn_for(200);
    for (unsigned i = 0; i < N; i++)
        n_dropped += is_dropped(fds[i]);
    assert_true(n_dropped >= N - 18); /* 16, and one for each node, may wait */
    assert_true(n_dropped < N);
    assert_int_equal(n_logged("have not identified themselves either"), 1);
    expect_undisturbed();

    /* A node can still connect at once, while more strangers connect. */
    node_stop(&b);
    WAIT_FOR(!node_is_up(&a, 1), 1000);
    node_start(&b, &(struct node_options){.node = 1});
    for (unsigned i = 100; i < N - 100 && !both_up(); i++) { /* these were dropped */
        close(fds[i]);
        fds[i] = knock();
        if (i % 3 == 0)
            turn();
    }
    assert_true(both_up());
    turn_for(2300);
    for (unsigned i = 0; i < N; i++) {
        assert_true(is_dropped(fds[i]));
        close(fds[i]);
    }
    assert_true(both_up());
    end();
}

/* ---- what must be alike -------------------------------------------------------------------------------- */

static void expect_different(const char *yaml, const char *difference_at_1, const char *difference_at_0)
{
    char line[600];

    harness_begin();
    node_start(&a, &(struct node_options){.node = 0});
    node_start(&b, &(struct node_options){.node = 1, .yaml = yaml});
    turn_for(900);
    assert_int_equal(a.n_up[1] + b.n_up[0], 0);
    snprintf(line, sizeof(line), "node 1 is configured differently: %s", difference_at_0);
    assert_int_equal(n_logged(line), 1);
    SAYS(cluster_why_down(a.cluster, 1), difference_at_0);
    snprintf(line, sizeof(line), "node 0 is configured differently: %s", difference_at_1);
    assert_int_equal(n_logged(line), 1);
    SAYS(cluster_why_down(b.cluster, 0), difference_at_1);
    end();
}

static void test_different(void **userdata)
{
    (void)userdata;
    expect_different("zero_optimization: {stage: 3}\n", "zero_optimization.stage is 2 there and 3 here",
                     "zero_optimization.stage is 3 there and 2 here");
    expect_different("job: other\n", "job is \"train\" there and \"other\" here",
                     "job is \"other\" there and \"train\" here");
}

/* These keys may differ between nodes. */
static void test_own_keys_may_differ(void **userdata)
{
    (void)userdata;
    harness_begin();
    node_start(&a, &(struct node_options){.node = 0, .yaml = "threads: 3\n"});
    node_start(&b, &(struct node_options){.node = 1, .yaml = "threads: 2\nlog_level: debug\nlimits: {clients: 7}\n"});
    WAIT_FOR(both_up(), 3000);
    end();
}

/* A peer that the test plays. It has the key. */
struct peer {
    int fd;
    struct secure_stream stream;
};

static void peer_read(struct peer *peer, int expected, struct secure_stream_frame *frame)
{
    uint64_t end_ms = now_ms() + 2000;
    uint8_t bytes[4096];
    int r;

    while ((r = secure_stream_next(&peer->stream, frame)) == SECURE_STREAM_AGAIN && now_ms() < end_ms) {
        ssize_t n = recv(peer->fd, bytes, sizeof(bytes), 0);

        if (n > 0)
            assert_int_equal(secure_stream_feed(&peer->stream, bytes, (size_t)n), 0);
        turn();
    }
    assert_int_equal(r, expected);
}

static void peer_say(struct peer *peer, const struct link_frame *frame)
{
    size_t n_bytes = link_frame_packed_bytes(frame);
    uint8_t bytes[4096], sealed[8192];

    link_frame_pack(frame, bytes);
    size_t n_sealed = secure_stream_pushed_bytes(&peer->stream, n_bytes);
    secure_stream_push(&peer->stream, bytes, n_bytes, sealed);
    assert_int_equal(send(peer->fd, sealed, n_sealed, MSG_NOSIGNAL), n_sealed);
}

static void peer_meet(struct peer *peer)
{
    struct secure_stream_key key;
    struct secure_stream_options options = {
        .role = SECURE_STREAM_CONNECTS, .key = &key, .job = "train", .node = 1, .max_frame_bytes = 2 << 20};
    const char text[] = "the key that all nodes of this test hold";

    assert_int_equal(secure_stream_key_init(&key, text, sizeof(text) - 1), 0);
    randombytes_buf(options.nonce, sizeof(options.nonce));
    secure_stream_init(&peer->stream, &options);
    peer->fd = knock();
    assert_int_equal(send(peer->fd, peer->stream.hello, SECURE_STREAM_HELLO_BYTES, MSG_NOSIGNAL),
                     SECURE_STREAM_HELLO_BYTES);
    peer_read(peer, SECURE_STREAM_MET, &(struct secure_stream_frame){0});
}

static void peer_end(struct peer *peer)
{
    close(peer->fd);
    secure_stream_deinit(&peer->stream);
}

static struct link_frame introduction(uint64_t incarnation, const char *text)
{
    return (struct link_frame){.kind = LINK_FRAME_INTRODUCTION,
                               .introduction = {.incarnation = incarnation},
                               .data = (const uint8_t *)text,
                               .n_bytes = strlen(text)};
}

/* Writes the text that must be equal on all nodes, as node 0 sends it, but with this version. */
static void alike_text(char *text, size_t size, const char *version)
{
    _cleanup_free_ char *shared = config_shared_text(a.config);

    snprintf(text, size, "zerod version: %s\n%s", version, shared);
}

static void test_other_version(void **userdata)
{
    struct link_frame said, frame;
    struct secure_stream_frame sealed;
    struct peer peer;
    char text[4096];

    (void)userdata;
    harness_begin();
    node_start(&a, &(struct node_options){.node = 0});
    alike_text(text, sizeof(text), "9.9.9");
    said = introduction(77, text);
    peer_meet(&peer);
    peer_say(&peer, &said);
    /* Node 0 sends its own text, so that the peer can report the difference. */
    peer_read(&peer, 0, &sealed);
    assert_int_equal(link_frame_unpack(&frame, sealed.data, sealed.n_bytes), 0);
    assert_int_equal(frame.kind, LINK_FRAME_INTRODUCTION);
    assert_non_null(memmem(frame.data, frame.n_bytes, "zerod version: ", 15));
    assert_int_equal(wait_until_dropped(peer.fd, 1000), 0);
    assert_int_equal(n_logged("node 1 is configured differently: zerod version is 9.9.9 there and "), 1);
    assert_int_equal(a.n_up[1], 0);
    peer_end(&peer);
    node_stop(&a);
    harness_end();
}

/* A message that arrives again is not delivered again. A peer resends it if it does not know that it has arrived. */
static void test_told_once(void **userdata)
{
    const struct link_frame first = {.kind = LINK_FRAME_MESSAGE, .number = 1},
                            second = {LINK_FRAME_MESSAGE, {.number = 2}};
    struct link_frame hello, frame = {.kind = LINK_FRAME_INTRODUCTION};
    struct secure_stream_frame sealed;
    struct peer peer;
    char text[4096];

    (void)userdata;
    harness_begin();
    node_start(&a, &(struct node_options){.node = 0});
    alike_text(text, sizeof(text), ZEROD_VERSION);
    hello = introduction(33, text);
    peer_meet(&peer);
    peer_say(&peer, &hello);
    peer_say(&peer, &first);
    peer_say(&peer, &first);
    peer_say(&peer, &second);
    peer_say(&peer, &first);
    while (frame.kind != LINK_FRAME_HEARTBEAT || frame.n_received < 2) { /* peer_read() fails after a while */
        peer_read(&peer, 0, &sealed);
        assert_int_equal(link_frame_unpack(&frame, sealed.data, sealed.n_bytes), 0);
    }
    turn_for(50);
    assert_int_equal(a.n_received[1], 2);
    assert_true(node_is_up(&a, 1));
    peer_end(&peer);
    node_stop(&a);
    harness_end();
}

/* A peer that has the key but breaks the protocol is dropped, and harms no node. */
static void test_broken_rules(void **userdata)
{
    const struct link_frame sins[] = {
        {.kind = LINK_FRAME_MESSAGE, .number = 2},       /* message 1 is missing */
        {.kind = LINK_FRAME_HEARTBEAT, .n_received = 1}, /* no message was sent */
        {.kind = LINK_FRAME_INTRODUCTION, .introduction = {.incarnation = 5}},
    };
    const struct link_frame heartbeat = {.kind = LINK_FRAME_HEARTBEAT}, farewell = {.kind = LINK_FRAME_FAREWELL};
    struct link_frame hello;
    struct peer peer;
    char text[4096];

    (void)userdata;
    harness_begin();
    node_start(&a, &(struct node_options){.node = 0});
    alike_text(text, sizeof(text), ZEROD_VERSION);
    for (unsigned i = 0; i < ARRAY_SIZE(sins); i++) {
        hello = introduction(100 + i, text);
        peer_meet(&peer);
        peer_say(&peer, &hello);
        peer_read(&peer, 0, &(struct secure_stream_frame){0});
        assert_true(node_is_up(&a, 1));
        peer_say(&peer, &sins[i]);
        (void)wait_until_dropped(peer.fd, 1000);
        SAYS(a.why[1], "a frame came that cannot come now");
        peer_end(&peer);
    }
    for (unsigned i = 0; i < 2; i++) { /* peer has not introduced itself yet */
        peer_meet(&peer);
        peer_say(&peer, i == 0 ? &heartbeat : &farewell);
        (void)wait_until_dropped(peer.fd, 1000);
        peer_end(&peer);
    }
    assert_int_equal(n_logged("does not introduce itself"), 1);
    assert_int_equal(a.n_up[1], ARRAY_SIZE(sins));
    node_stop(&a);
    harness_end();
}

static void test_shared_text(void **userdata)
{
    static const char here[] = "a: 1\nb: 2\nc: 3\nd: 4\ne: 5\n";
    static const struct {
        const char *there;
        size_t n;
        const char *sentence;
    } cases[] = {
        {here, 0, ""},
        {"b: 2\na: 1\nc: 3\nd: 4\ne: 5\n", 0, ""},
        {"a: 1\nb: 2\nc: 3\nd: 4\ne: 5", 0, ""},
        {"a: 7\nb: 2\nc: 3\nd: 4\ne: 5\n", 1, "a is 7 there and 1 here"},
        {"a: 1\nb: 2\nc: 3\nd: 4\n", 1, "e is not known there and 5 here"},
        {"a: 1\nb: 2\nc: 3\nd: 4\ne: 5\nf: 6\n", 1, "f is 6 there and not known here"},
        {"a: 10\nb: \nc: 3\nd: 4\ne: \x01\n", 3,
         "a is 10 there and 1 here, b is  there and 2 here, e is \\x01 there and 5 here"},
        {"", 5,
         "a is not known there and 1 here, b is not known there and 2 here, c is not known there and 3 here, "
         "and 2 more"},
    };
    char sentence[400], a_long[300], b_long[300];

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        assert_int_equal(config_shared_difference(here, cases[i].there, sentence, sizeof(sentence)), cases[i].n);
        assert_string_equal(sentence, cases[i].sentence);
    }
    /* Of long values, only the part that differs is shown. */
    snprintf(a_long, sizeof(a_long), "nodes: %0150d1 tail of mine\n", 0);
    snprintf(b_long, sizeof(b_long), "nodes: %0150d2 tail of his\n", 0);
    assert_int_equal(config_shared_difference(a_long, b_long, sentence, sizeof(sentence)), 1);
    assert_string_equal(sentence,
                        "nodes is ...00000000000000002 tail of his there and ...00000000000000001 tail of mine here");
}

static void test_what_is_shared(void **userdata)
{
    static const char *const own[] = {"listen.", "world.node:", "world.key_file", "threads", "limits.", "log_level"};
    static const char *const shared[] = {"job: \"train\"\n",
                                         "\nworld.size: 2\n",
                                         "\nworld.nodes: [{address: ",
                                         "\nzero_optimization.stage: 2\n",
                                         "\noptimizer.type: AdamW\n",
                                         "\nscheduler: null\n",
                                         "\nbf16.bf16_optimizer_states: false\n",
                                         "\nbf16.stochastic_rounding: false\n",
                                         "\ndiagnostics.stall_timeout: 10min\n"};
    _cleanup_free_ char *text = NULL;

    (void)userdata;
    harness_begin();
    node_start(&a, &(struct node_options){.node = 0});
    text = config_shared_text(a.config);
    assert_non_null(text);
    for (size_t i = 0; i < ARRAY_SIZE(own); i++)
        assert_null(strstr(text, own[i]));
    for (size_t i = 0; i < ARRAY_SIZE(shared); i++)
        SAYS(text, shared[i]);
    node_stop(&a);
    harness_end();
}

/* ---- limits and ends ----------------------------------------------------------------------------------- */

/*
 * When too many messages wait for a peer, it is given up, and cannot continue. A new process in its place can connect.
 */
static void test_given_up(void **userdata)
{
    static uint8_t data[CLUSTER_MAX_MESSAGE_BYTES];
    unsigned n = 0;

    (void)userdata;
    begin_up(true);
    node_send(&b, 0, 10);
    WAIT_FOR(a.n_received[1] == 1, 1000);
    proxy.hole = true; /* silent, but not long enough to be noticed */
    while (cluster_send(a.cluster, 1, data, sizeof(data)) == 0)
        n++;
    assert_in_range(n, 62, 64);
    assert_int_equal(cluster_send(a.cluster, 1, data, 1), -ENOMEM);
    assert_false(cluster_is_up(a.cluster, 1));
    assert_int_equal(a.n_down[1], 0); /* not called inside cluster_send() */
    turn_for(300);
    assert_int_equal(a.n_down[1], 1);
    SAYS(a.why[1], "is given up");
    proxy.hole = false;
    proxy_cut();
    turn_for(1000);
    assert_false(node_is_up(&a, 1));
    SAYS(cluster_why_down(a.cluster, 1), "is given up");
    SAYS(cluster_why_down(b.cluster, 0), "must be started anew");
    node_stop(&b);
    node_start(&b, &(struct node_options){.node = 1});
    WAIT_FOR(both_up(), 3000);
    assert_int_equal(a.n_reborn[1], 1);
    node_send(&a, 1, 10);
    WAIT_FOR(b.n_received[0] == 1, 1000);
    end();
}

static void expect_no_start(const struct node_options *options, int error, const char *part)
{
    char why[512] = "";

    assert_int_equal(node_try(&a, options, why, sizeof(why)), error);
    assert_null(a.cluster);
    SAYS(why, part);
    node_stop(&a);
}

static void write_file(const char *path, mode_t mode, const void *data, size_t n_bytes)
{
    int fd;

    (void)chmod(path, 0600); /* for a file that an earlier test left */
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, n_bytes), n_bytes);
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

static void test_key_files(void **userdata)
{
    static const uint8_t large[KEY_FILE_MAX_BYTES + 1] = {1};
    static const struct {
        const char *data;
        size_t n_bytes;
        mode_t mode;
        int r;
        const char *why;
    } cases[] = {
        {"0123456789012345678901234567890\n", 32, 0600, -EINVAL, "has 31 bytes, a key has at least 32"},
        {"01234567890123456789012345678901\n", 33, 0600, 0, ""},
        {"01234567890123456789012345678901", 32, 0400, 0, ""},
        {"01234567890123456789012345678901", 32, 0640, -EPERM, "mode 0640; the daemon's user has to own it"},
        {"01234567890123456789012345678901", 32, 0604, -EPERM, "&& chmod 0400 /tmp/zerod-key-"},
        {"01234567890123456789012345678901", 32, 0602, -EPERM, "mode 0602"},
        {"01234567890123456789012345678901", 32, 0420, -EPERM, "mode 0420"},
        {"", 0, 0600, -EINVAL, "has 0 bytes"},
        {(const char *)large, sizeof(large), 0600, -EFBIG, "which is no key"},
    };
    char path[] = "/tmp/zerod-key-XXXXXX", why[400];
    struct secure_stream_key key, first;

    (void)userdata;
    close(mkstemp(path));
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        write_file(path, cases[i].mode, cases[i].data, cases[i].n_bytes);
        assert_int_equal(key_file_read(&key, path, why, sizeof(why)), cases[i].r);
        SAYS(why, cases[i].why);
        if (i == 1)
            first = key;
        if (i == 2)
            assert_memory_equal(&key, &first, sizeof(key)); /* without the newline */
    }
    if (geteuid() == 0) {
        write_file(path, 0400, cases[1].data, cases[1].n_bytes);
        assert_int_equal(chown(path, 54321, 0), 0);
        assert_int_equal(key_file_read(&key, path, why, sizeof(why)), -EPERM);
        SAYS(why, "it belongs to 54321, mode 0400; the daemon's user has to own it");
        SAYS(why, "chown root /tmp/zerod-key-");
    }
    assert_int_equal(unlink(path), 0);
    assert_int_equal(key_file_read(&key, path, why, sizeof(why)), -ENOENT);
    SAYS(why, "No such file");
    assert_int_equal(key_file_read(&key, "/tmp", why, sizeof(why)), -EINVAL);
}

static void test_cannot_start(void **userdata)
{
    (void)userdata;
    harness_begin();
    expect_no_start(&(struct node_options){.node = 0}, -EINVAL, "has 0 bytes"); /* as if the key was not written yet */
    node_start(&c, &(struct node_options){.node = 0});
    expect_no_start(&(struct node_options){.node = 0}, -EADDRINUSE, "cannot listen at 127.0.0.1:");
    node_stop(&c);
    harness_end();
}

/* The owner may close the cluster inside each of its callbacks. */
static void test_closed_in_callbacks(void **userdata)
{
    (void)userdata;
    for (unsigned i = 0; i < 4; i++) {
        harness_begin();
        start_two();
        (i % 2 ? &a : &b)->closes_when_up = i < 2;
        (i % 2 ? &a : &b)->closes_when_down = i >= 2;
        WAIT_FOR(a.n_up[1] == 1 || b.n_up[0] == 1, 3000);
        if (i >= 2) {
            WAIT_FOR(both_up(), 3000);
            node_stop(i % 2 ? &b : &a);
            WAIT_FOR(!(i % 2 ? &a : &b)->cluster, 1000);
            node_stop(i % 2 ? &a : &b);
        } else {
            WAIT_FOR(!(i % 2 ? &a : &b)->cluster, 1000);
            node_stop(&b);
            node_stop(&a);
        }
        harness_end();
    }
    cluster_close(NULL);
}

static void test_log_limit(void **userdata)
{
    struct log_limit limit = {0};

    (void)userdata;
    log_forget();
    log_limited(&limit, 5000, 4, "line %d", 1);
    assert_int_equal(n_logged("line 1"), 1);
    assert_true(log_limit_until_ms(&limit) == UINT64_MAX); /* no line is held back */
    for (int i = 2; i <= 9; i++)
        log_limited(&limit, 5000 + LOG_LIMIT_MS - 1, 4, "line %d", i);
    log_limit_flush(&limit, 5000 + LOG_LIMIT_MS - 1);
    assert_int_equal(n_logged_in_all(), 1);
    assert_int_equal(log_limit_until_ms(&limit), 5000 + LOG_LIMIT_MS);
    log_limit_flush(&limit, 5000 + LOG_LIMIT_MS);
    assert_int_equal(n_logged("line 9 (the last of 8 such in 10 s)"), 1);
    log_limited(&limit, 5000 + LOG_LIMIT_MS + 1, 4, "line %d", 10);
    assert_int_equal(n_logged_in_all(), 2);
    log_limited(&limit, 5000 + 3 * LOG_LIMIT_MS, 4, "line %d", 11);
    assert_int_equal(n_logged_in_all(), 3); /* the line about 10 came last, 11 waits */
    log_limit_flush(&limit, 5000 + 4 * LOG_LIMIT_MS);
    assert_int_equal(n_logged("line 11"), 1);
    log_limit_flush(&limit, 5000 + 9 * LOG_LIMIT_MS);
    assert_int_equal(n_logged_in_all(), 4);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_log_limit),
        cmocka_unit_test(test_key_files),
        cmocka_unit_test(test_shared_text),
        cmocka_unit_test(test_what_is_shared),
        cmocka_unit_test(test_in_order_both_ways),
        cmocka_unit_test(test_kept_for_the_first),
        cmocka_unit_test(test_three_nodes),
        cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_backlog),
        cmocka_unit_test(test_frozen_node),
        cmocka_unit_test(test_frozen_node_0),
        cmocka_unit_test(test_black_hole),
        cmocka_unit_test(test_own_sleep),
        cmocka_unit_test(test_reborn),
        cmocka_unit_test(test_one_that_was_replaced),
        cmocka_unit_test(test_wrong_key),
        cmocka_unit_test(test_replayed),
        cmocka_unit_test(test_other_bytes),
        cmocka_unit_test(test_hello_and_nonsense),
        cmocka_unit_test(test_half_and_silence),
        cmocka_unit_test(test_flipped_bit),
        cmocka_unit_test(test_thousand_connections),
        cmocka_unit_test(test_different),
        cmocka_unit_test(test_own_keys_may_differ),
        cmocka_unit_test(test_other_version),
        cmocka_unit_test(test_told_once),
        cmocka_unit_test(test_broken_rules),
        cmocka_unit_test(test_given_up),
        cmocka_unit_test(test_cannot_start),
        cmocka_unit_test(test_closed_in_callbacks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
