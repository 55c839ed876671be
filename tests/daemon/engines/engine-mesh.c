/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/daemon/engines/engine-mesh.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "core/base/base.h"

enum { TICK_MS = 10, ORDER_TIMEOUT_MS = 20 * 1000 };

uint64_t mesh_now_ms(void)
{
    return uv_hrtime() / 1000000;
}

/* ---- what engines say ----------------------------------------------------------------------------------- */

static void on_ready(void *userdata)
{
    struct mesh_node *node = userdata;

    assert_false(node->ready || node->failed);
    node->ready = true;
}

static void on_done(void *userdata, const struct engine_done *done)
{
    struct mesh_node *node = userdata;

    assert_true(node->ready && !node->failed);
    node->n_done++;
    node->last = *done;
}

/* gloo puts an address for each other node. It begins like a socket's address. */
static void note_ports(struct mesh *mesh, const uint8_t *value, size_t n_bytes)
{
    struct sockaddr_in address;

    mesh->n_address_bytes = n_bytes / (mesh->n_nodes - 1);
    for (size_t i = 0; i + 1 < mesh->n_nodes && mesh->n_ports < MESH_MAX_PORTS; i++) {
        assert_true(mesh->n_address_bytes >= sizeof(address));
        memcpy(&address, value + i * mesh->n_address_bytes, sizeof(address));
        assert_int_equal(address.sin_family, AF_INET);
        mesh->ports[mesh->n_ports++] = ntohs(address.sin_port);
    }
}

static void hold(struct mesh_held *held, const char *key, const uint8_t *value, size_t n_bytes)
{
    assert_true(n_bytes <= sizeof(held->value));
    snprintf(held->key, sizeof(held->key), "%s", key);
    memcpy(held->value, value, n_bytes);
    held->n_bytes = n_bytes;
}

static void hand_on(struct mesh *mesh, unsigned from, const char *key, const uint8_t *value, size_t n_bytes)
{
    for (unsigned i = 0; i < mesh->n_nodes; i++)
        if (i != from && mesh->nodes[i].engine)
            (void)engine_value(mesh->nodes[i].engine, key, value, n_bytes);
}

void mesh_release(struct mesh *mesh)
{
    mesh->holds_addresses = false;
    for (unsigned i = 0; i < mesh->n_nodes; i++)
        hand_on(mesh, i, mesh->held[i].key, mesh->held[i].value, mesh->held[i].n_bytes);
}

static void on_put(void *userdata, const char *key, const uint8_t *value, size_t n_bytes)
{
    struct mesh_node *node = userdata;
    struct mesh *mesh = node->mesh;
    bool is_address = strchr(key, '/') && isdigit((unsigned char)strchr(key, '/')[1]); /* "g1/0", not "g1/rank_0" */

    assert_false(node->failed);
    if (is_address && mesh->n_nodes > 1)
        note_ports(mesh, value, n_bytes);
    if (is_address && mesh->holds_addresses)
        hold(&mesh->held[node->node], key, value, n_bytes);
    else
        hand_on(mesh, node->node, key, value, n_bytes);
}

static void on_failed(void *userdata, const struct engine_failure *failure)
{
    struct mesh_node *node = userdata;

    assert_false(node->failed);
    node->failed = true;
    node->failed_ms = mesh_now_ms();
    snprintf(node->what, sizeof(node->what), "%s", failure->what);
    node->has_tag = failure->has_tag;
    node->tag = failure->tag;
}

/* ---- life ----------------------------------------------------------------------------------------------- */

static void on_tick(uv_timer_t *tick)
{
    (void)tick;
}

void mesh_init(struct mesh *mesh, unsigned n_nodes, size_t n_bytes)
{
    *mesh = (struct mesh){
        .n_nodes = n_nodes,
        .connect_timeout_ms = 15 * 1000,
        .end_ms = mesh_now_ms() + MESH_TEST_PATIENCE_MS,
    };
    assert_int_equal(uv_loop_init(&mesh->loop), 0);
    assert_int_equal(uv_timer_init(&mesh->loop, &mesh->tick), 0);
    assert_int_equal(uv_timer_start(&mesh->tick, on_tick, TICK_MS, TICK_MS), 0);
    for (unsigned i = 0; i < n_nodes; i++) {
        struct mesh_node *node = &mesh->nodes[i];
        uint32_t x = 2463534242u + i;

        node->mesh = mesh;
        node->node = i;
        for (size_t s = 0; s < ARRAY_SIZE(node->segments); s++)
            assert_int_equal(segment_init(&node->segments[s], "test", n_bytes), 0);
        mesh->n_bytes = node->segments[0].n_bytes;
        node->expected = malloc(mesh->n_bytes);
        assert_non_null(node->expected);
        for (size_t k = 0; k < mesh->n_bytes / sizeof(x); k++) {
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            memcpy(node->segments[MESH_SEND].map + k * sizeof(x), &x, sizeof(x));
        }
    }
}

void mesh_deinit(struct mesh *mesh)
{
    mesh_stop(mesh);
    uv_close((uv_handle_t *)&mesh->tick, NULL);
    uv_run(&mesh->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&mesh->loop), 0);
    for (unsigned i = 0; i < mesh->n_nodes; i++) {
        free(mesh->nodes[i].expected);
        for (size_t s = 0; s < ARRAY_SIZE(mesh->nodes[i].segments); s++)
            segment_deinit(&mesh->nodes[i].segments[s]);
    }
}

static void start_node(struct mesh *mesh, struct mesh_node *node)
{
    const struct segment *segments[] = {&node->segments[0], &node->segments[1], NULL};
    struct engine_options options = {
        .loop = &mesh->loop,
        .program = mesh->program,
        .kind = ENGINE_GLOO,
        .generation = mesh->generation,
        .node = node->node,
        .n_nodes = mesh->n_nodes,
        .address = mesh->address ? mesh->address : "127.0.0.1",
        .segments = segments,
        .n_segments = ARRAY_SIZE(segments),
        .connect_timeout_ms = mesh->connect_timeout_ms,
        .traffic = node->traffic,
        .ops = {.ready = on_ready, .done = on_done, .put = on_put, .failed = on_failed, .userdata = node},
    };
    char why[256] = "";

    node->ready = node->failed = false;
    node->n_done = 0;
    memset(node->segments[MESH_RECEIVE].map, MESH_FILL, mesh->n_bytes);
    memset(node->expected, MESH_FILL, mesh->n_bytes);
    if (engine_new(&node->engine, &options, why, sizeof(why)) != 0)
        fail_msg("%s", why);
    assert_true(engine_pid(node->engine) > 0);
}

void mesh_start(struct mesh *mesh)
{
    mesh->generation++;
    mesh->n_ports = 0;
    for (unsigned i = 0; i < mesh->n_nodes; i++)
        start_node(mesh, &mesh->nodes[i]);
}

void mesh_stop(struct mesh *mesh)
{
    for (unsigned i = 0; i < mesh->n_nodes; i++)
        engine_close(steal_ptr(mesh->nodes[i].engine));
}

void mesh_connect(struct mesh *mesh)
{
    mesh_start(mesh);
    mesh_wait_ready(mesh);
}

/* ---- waiting -------------------------------------------------------------------------------------------- */

void mesh_turn(struct mesh *mesh)
{
    if (mesh_now_ms() > mesh->end_ms)
        fail_msg("what is waited for does not come");
    uv_run(&mesh->loop, UV_RUN_ONCE);
}

void mesh_run(struct mesh *mesh, unsigned n_ms)
{
    uint64_t end = mesh_now_ms() + n_ms;

    while (mesh_now_ms() < end)
        mesh_turn(mesh);
}

static bool all_ready(const struct mesh *mesh, size_t unused)
{
    for (unsigned i = 0; i < mesh->n_nodes; i++)
        if (!mesh->nodes[i].ready)
            return false;
    return true;
}

static bool all_done(const struct mesh *mesh, size_t n_done)
{
    for (unsigned i = 0; i < mesh->n_nodes; i++)
        if (mesh->nodes[i].n_done < n_done)
            return false;
    return true;
}

static void wait_until(struct mesh *mesh, bool (*holds)(const struct mesh *, size_t), size_t n)
{
    uint64_t end = mesh_now_ms() + MESH_PATIENCE_MS;

    while (!holds(mesh, n)) {
        mesh_turn(mesh);
        for (unsigned i = 0; i < mesh->n_nodes; i++)
            if (mesh->nodes[i].failed)
                fail_msg("the engine of node %u %s", i, mesh->nodes[i].what);
        if (mesh_now_ms() > end)
            fail_msg("what is waited for does not come");
    }
}

void mesh_wait_ready(struct mesh *mesh)
{
    wait_until(mesh, all_ready, 0);
}

void mesh_wait_done(struct mesh *mesh, size_t n_done_each)
{
    wait_until(mesh, all_done, n_done_each);
    mesh_run(mesh, 1);
    for (unsigned i = 0; i < mesh->n_nodes; i++)
        assert_int_equal(mesh->nodes[i].n_done, n_done_each);
}

void mesh_wait_failed(struct mesh *mesh, unsigned node)
{
    uint64_t end = mesh_now_ms() + MESH_PATIENCE_MS;

    while (!mesh->nodes[node].failed) {
        mesh_turn(mesh);
        if (mesh_now_ms() > end)
            fail_msg("the engine of node %u does not fail", node);
    }
}

/* ---- orders --------------------------------------------------------------------------------------------- */

void mesh_give(struct mesh *mesh, unsigned node, uint64_t tag, const struct mesh_move *moves, size_t n_moves)
{
    struct engine_move *ours = calloc(n_moves, sizeof(*ours));
    size_t n = 0;

    assert_non_null(ours);
    for (size_t i = 0; i < n_moves; i++) {
        const struct mesh_move *m = &moves[i];

        if (m->from == node)
            ours[n++] = (struct engine_move){m->to, true, MESH_SEND, m->from_offset, m->n_bytes};
        if (m->to == node)
            ours[n++] = (struct engine_move){m->from, false, MESH_RECEIVE, m->to_offset, m->n_bytes};
    }
    if (n > 0)
        (void)engine_order(
            mesh->nodes[node].engine,
            &(struct engine_order){
                .tag = tag, .timeout_ms = ORDER_TIMEOUT_MS, .moves = ours, .n_moves = n, .lasting = mesh->lasting});
    free(ours);
}

void mesh_give_all(struct mesh *mesh, uint64_t tag, const struct mesh_move *moves, size_t n_moves)
{
    for (unsigned i = 0; i < mesh->n_nodes; i++)
        mesh_give(mesh, i, tag, moves, n_moves);
}

void mesh_expect(struct mesh *mesh, const struct mesh_move *moves, size_t n_moves)
{
    for (size_t i = 0; i < n_moves; i++)
        memcpy(mesh->nodes[moves[i].to].expected + moves[i].to_offset,
               mesh->nodes[moves[i].from].segments[MESH_SEND].map + moves[i].from_offset, moves[i].n_bytes);
}

void mesh_check(struct mesh *mesh)
{
    for (unsigned i = 0; i < mesh->n_nodes; i++) {
        const uint8_t *a = mesh->nodes[i].segments[MESH_RECEIVE].map, *b = mesh->nodes[i].expected;
        bool differ = memcmp(a, b, mesh->n_bytes) != 0;

        for (size_t k = 0; differ && k < mesh->n_bytes; k++)
            if (a[k] != b[k])
                fail_msg("node %u: byte %zu is %02x, expected %02x", i, k, a[k], b[k]);
    }
}
