/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/daemon/nodes/node-mesh.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <syslog.h>

#include <cmocka.h>

#include "tests/example/random.h"
#include "core/base/base.h"
#include "daemon/job/job.h"
#include "daemon/job/model/model.h"

struct packet {
    struct packet *next;
    size_t n_bytes;
    uint8_t data[];
};

struct queue {
    struct packet *first, *last;
};

/*
 * The memory of a segment that an engine got after its start. Orders use their mapping even after a new segment came.
 */
struct mapping {
    unsigned n_users;
    uint8_t *map;
    size_t n_bytes;
};

enum { N_LATE = 2 /* EXCHANGE_RING, EXCHANGE_OVERFLOW */ };

/* Bytes that a lasting order has sent and that are not received yet. They are in the sender's memory. */
struct on_way {
    const uint8_t *from; /* NULL if there are none */
    struct mapping *late;
};

struct order {
    struct order *next;
    struct mapping *late[N_LATE];
    uint64_t tag;
    bool lasting;
    size_t n_moves, n_done;
    uint64_t n_sent, n_received;
    bool *done;            /* [move] */
    struct on_way *on_way; /* [move that receives] */
    struct engine_move moves[];
};

struct mesh_engine {
    uint32_t generation;
    bool started, put, ready, failing;
    unsigned n_values; /* how many other engines' values have arrived */
    const struct segment *segments[EXCHANGE_N_SEGMENTS];
    struct mapping *late[N_LATE];
    struct order *orders;
};

struct mesh_node {
    struct mesh *mesh;
    unsigned number;
    struct job *job;
    struct worker_pool *pool;
    bool woken;
    struct queue to_leader, from_leader;
    struct mesh_engine engine;
};

struct mesh {
    unsigned n_nodes, n_breaks, n_failures;
    unsigned slow; /* the node whose engine and workers work only when nothing else can; n_nodes: none */
    bool nonsense; /* whether mesh_allow_nonsense() was called */
    uint64_t seed, n_drawn;
    struct mesh_node nodes[MESH_MAX_NODES];
};

/* ---- the log ------------------------------------------------------------------------------------------- */

static bool may_complain;

void __wrap_log_line(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Fails the test when a node logs a complaint, unless that is allowed. */
void __wrap_log_line(int level, const char *format, ...)
{
    char text[512];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (level <= LOG_ERR && !may_complain)
        fail_msg("%s", text);
}

uint64_t mesh_draw(struct mesh *mesh, uint64_t n)
{
    return random_mix(mesh->seed << 32 ^ mesh->n_drawn++) % n;
}

void mesh_allow_nonsense(struct mesh *mesh)
{
    mesh->nonsense = may_complain = true;
}

unsigned mesh_n_failures(const struct mesh *mesh)
{
    return mesh->n_failures;
}

/* ---- messages ------------------------------------------------------------------------------------------ */

static void append(struct queue *queue, const void *data, size_t n_bytes)
{
    struct packet *packet = malloc(sizeof(*packet) + n_bytes);

    assert_non_null(packet);
    packet->next = NULL;
    packet->n_bytes = n_bytes;
    memcpy(packet->data, data, n_bytes);
    if (queue->first)
        queue->last->next = packet;
    else
        queue->first = packet;
    queue->last = packet;
}

static int on_send(void *userdata, unsigned node, const void *data, size_t n_bytes)
{
    struct mesh_node *self = userdata;

    assert_true(node != self->number && (node == 0 || self->number == 0)); /* all messages are to or from node 0 */
    append(self->number == 0 ? &self->mesh->nodes[node].from_leader : &self->to_leader, data, n_bytes);
    return 0;
}

static void on_wake(void *userdata)
{
    ((struct mesh_node *)userdata)->woken = true;
}

/* Delivers the next message between node 0 and this node. */
static bool deliver(struct mesh_node *node, bool to_leader)
{
    struct queue *queue = to_leader ? &node->to_leader : &node->from_leader;
    struct packet *packet = queue->first;
    const char *wrong;

    if (!packet)
        return false;
    queue->first = packet->next;
    wrong = nodes_hear(nodes_of((to_leader ? &node->mesh->nodes[0] : node)->job), to_leader ? node->number : 0,
                       packet->data, packet->n_bytes);
    if (wrong && !node->mesh->nonsense)
        fail_msg("seed %llu: node %u: %s", (unsigned long long)node->mesh->seed, node->number, wrong);
    free(packet);
    return true;
}

/* ---- orders -------------------------------------------------------------------------------------------- */

static struct mapping *map_late(const struct segment *segment)
{
    struct mapping *mapping = malloc(sizeof(*mapping));

    assert_non_null(mapping);
    *mapping = (struct mapping){.n_users = 1, .n_bytes = segment->n_bytes};
    mapping->map = mmap(NULL, segment->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd, 0);
    assert_true(mapping->map != MAP_FAILED);
    return mapping;
}

static void mapping_unref(struct mapping *mapping)
{
    if (!mapping || --mapping->n_users > 0)
        return;
    munmap(mapping->map, mapping->n_bytes);
    free(mapping);
}

/* Return: the move's bytes, or NULL if it is out of range and nonsense is allowed. */
static uint8_t *bytes_of(const struct mesh_node *node, const struct order *order, const struct engine_move *move)
{
    const struct segment *segment = move->segment < EXCHANGE_N_SEGMENTS ? node->engine.segments[move->segment] : NULL;
    bool is_late = move->segment >= EXCHANGE_N_SEGMENTS && move->segment < EXCHANGE_N_SEGMENTS + N_LATE;
    const struct mapping *late = is_late ? order->late[move->segment - EXCHANGE_N_SEGMENTS] : NULL;
    size_t n_bytes = segment ? segment->n_bytes : late ? late->n_bytes : 0;

    if (n_bytes > 0 && move->offset_bytes <= n_bytes && move->n_bytes <= n_bytes - move->offset_bytes)
        return (segment ? segment->map : late->map) + move->offset_bytes;
    if (!node->mesh->nonsense)
        fail_msg("node %u: an order for segment %u, beyond what is there", node->number, move->segment);
    return NULL;
}

/* Return: the index of the k-th send to that node, or n_moves if there is none and nonsense is allowed. */
static size_t find_send(const struct mesh *mesh, const struct order *order, unsigned node, unsigned k)
{
    for (size_t i = 0; i < order->n_moves; i++)
        if (order->moves[i].send && order->moves[i].node == node && k-- == 0)
            return i;
    if (!mesh->nonsense)
        fail_msg("tag %llu: more is received than is sent", (unsigned long long)order->tag);
    return order->n_moves;
}

static void finish_move(struct order *order, size_t i)
{
    order->done[i] = true;
    order->n_done++;
    *(order->moves[i].send ? &order->n_sent : &order->n_received) += order->moves[i].n_bytes;
}

/* Ends the send of a lasting order. Its bytes are read later. */
static void send_lasting(struct order *order, size_t i, struct order *theirs, size_t send, const uint8_t *from)
{
    uint32_t segment = theirs->moves[send].segment;
    struct mapping *late = segment >= EXCHANGE_N_SEGMENTS ? theirs->late[segment - EXCHANGE_N_SEGMENTS] : NULL;

    if (late)
        late->n_users++;
    order->on_way[i] = (struct on_way){from, late};
    finish_move(theirs, send);
}

static void end_way(struct order *order, size_t i)
{
    mapping_unref(order->on_way[i].late);
    order->on_way[i] = (struct on_way){0};
}

/* Return: whether something has moved. */
static bool receive(struct mesh_node *node, struct order *order, size_t i)
{
    const struct engine_move *move = &order->moves[i];
    struct mesh_node *peer = &node->mesh->nodes[move->node];
    struct order *theirs = peer->engine.orders;
    uint8_t *to = bytes_of(node, order, move), *from;
    unsigned k = 0;
    size_t send;

    assert_true(move->node < node->mesh->n_nodes && peer != node);
    if (!peer->engine.ready || peer->engine.generation != node->engine.generation)
        return false;
    if (order->on_way[i].from) {
        if (!to || mesh_draw(node->mesh, 3) > 0)
            return to; /* later */
        memcpy(to, order->on_way[i].from, move->n_bytes);
        end_way(order, i);
        finish_move(order, i);
        return true;
    }
    for (size_t j = 0; j < i; j++)
        k += !order->moves[j].send && order->moves[j].node == move->node;
    while (theirs && theirs->tag != order->tag)
        theirs = theirs->next;
    if (!theirs)
        return false;
    send = find_send(node->mesh, theirs, node->number, k);
    from = send < theirs->n_moves ? bytes_of(peer, theirs, &theirs->moves[send]) : NULL;
    if (!to || !from || theirs->done[send] || theirs->moves[send].n_bytes != move->n_bytes) {
        assert_true(node->mesh->nonsense);
        node->engine.failing = peer->engine.failing = true;
        return false;
    }
    if (theirs->lasting && mesh_draw(node->mesh, 2) > 0) {
        send_lasting(order, i, theirs, send, from);
        return true;
    }
    memcpy(to, from, move->n_bytes);
    finish_move(order, i);
    finish_move(theirs, send);
    return true;
}

static struct order *unlink_order(struct mesh_engine *engine, struct order *order)
{
    struct order **link = &engine->orders;

    while (*link != order)
        link = &(*link)->next;
    *link = order->next;
    return order;
}

static void free_order(struct order *order)
{
    for (size_t i = 0; i < N_LATE; i++)
        mapping_unref(order->late[i]);
    for (size_t i = 0; i < order->n_moves; i++)
        end_way(order, i);
    free(order->done);
    free(order->on_way);
    free(order);
}

/* Moves bytes of the node's orders, beginning with a random one. */
static bool move_bytes(struct mesh_node *node)
{
    struct order *order = node->engine.orders;
    unsigned n = 0;

    for (const struct order *o = node->engine.orders; o; o = o->next)
        n++;
    if (n == 0)
        return false;
    for (n = (unsigned)mesh_draw(node->mesh, n); n > 0; n--)
        order = order->next;
    for (struct order *o = order; o; o = o->next) {
        bool moved = false;

        for (size_t i = 0; i < o->n_moves; i++)
            if (!o->moves[i].send && !o->done[i])
                moved |= receive(node, o, i);
        if (o->n_done == o->n_moves) {
            const struct engine_done done = {
                .tag = o->tag, .n_bytes_sent = o->n_sent, .n_bytes_received = o->n_received};

            free_order(unlink_order(&node->engine, o));
            nodes_engine_done(nodes_of(node->job), &done);
            return true;
        }
        if (moved)
            return true;
    }
    return order != node->engine.orders && mesh_draw(node->mesh, 4); /* perhaps of an order before it */
}

/* Overwrites the targets of a failed engine's orders, because their contents are undefined. */
static void spoil(struct mesh_node *node)
{
    while (node->engine.orders) {
        struct order *order = unlink_order(&node->engine, node->engine.orders);

        for (size_t i = 0; i < order->n_moves; i++)
            if (!order->moves[i].send && bytes_of(node, order, &order->moves[i]))
                memset(bytes_of(node, order, &order->moves[i]), 0xee, order->moves[i].n_bytes);
        free_order(order);
    }
}

static int on_order(void *userdata, const struct engine_order *order)
{
    struct mesh_node *node = userdata;
    struct order *copy = calloc(1, sizeof(*copy) + order->n_moves * sizeof(copy->moves[0])), **last;

    assert_true(copy && order->n_moves > 0 && order->timeout_ms > 0);
    if (!node->engine.started) {
        free(copy);
        return -ENOTCONN;
    }
    copy->tag = order->tag;
    copy->lasting = order->lasting;
    copy->n_moves = order->n_moves;
    copy->done = calloc(order->n_moves, sizeof(*copy->done));
    copy->on_way = calloc(order->n_moves, sizeof(*copy->on_way));
    assert_true(copy->done && copy->on_way);
    memcpy(copy->moves, order->moves, order->n_moves * sizeof(copy->moves[0]));
    for (size_t i = 0; i < N_LATE; i++) {
        copy->late[i] = node->engine.late[i];
        if (copy->late[i])
            copy->late[i]->n_users++;
    }
    for (last = &node->engine.orders; *last; last = &(*last)->next)
        assert_true((*last)->tag != order->tag || node->mesh->nonsense); /* tags are unique */
    *last = copy;
    return 0;
}

/* ---- engines ------------------------------------------------------------------------------------------- */

static void forget_late(struct mesh_node *node)
{
    for (size_t i = 0; i < N_LATE; i++)
        mapping_unref(steal_ptr(node->engine.late[i]));
}

static int on_start_engine(void *userdata, uint32_t generation, const struct segment *const *segments, char *why,
                           size_t why_size)
{
    struct mesh_node *node = userdata;

    assert_true(generation > node->engine.generation || !node->engine.started || node->mesh->nonsense);
    spoil(node);
    forget_late(node);
    node->engine = (struct mesh_engine){.generation = generation, .started = true};
    memcpy(node->engine.segments, segments, sizeof(node->engine.segments));
    return 0;
}

static void on_stop_engine(void *userdata)
{
    struct mesh_node *node = userdata;

    while (node->engine.orders)
        free_order(unlink_order(&node->engine, node->engine.orders));
    forget_late(node);
    node->engine.started = node->engine.ready = false;
}

static int on_value(void *userdata, const char *key, const uint8_t *value, size_t n_bytes)
{
    struct mesh_node *node = userdata;
    char expected[32];

    if (node->mesh->nonsense) {
        node->engine.n_values = node->mesh->n_nodes - 1;
        return 0;
    }
    snprintf(expected, sizeof(expected), "g%u/%u", node->engine.generation, *value);
    assert_string_equal(key, expected);
    assert_int_equal(n_bytes, 1);
    node->engine.n_values++;
    return 0;
}

static int on_share(void *userdata, unsigned number, const struct segment *segment)
{
    struct mesh_node *node = userdata;

    assert_true(number < EXCHANGE_N_SEGMENTS + N_LATE);
    if (number < EXCHANGE_N_SEGMENTS) {
        node->engine.segments[number] = segment;
        return 0;
    }
    if (!node->engine.started)
        return -ENOTCONN;
    mapping_unref(node->engine.late[number - EXCHANGE_N_SEGMENTS]);
    node->engine.late[number - EXCHANGE_N_SEGMENTS] = map_late(segment);
    return 0;
}

/* Breaks the node's engine. All engines of its generation will notice that at different times. */
static void break_engines(struct mesh_node *node)
{
    struct mesh *mesh = node->mesh;

    mesh->n_breaks--;
    for (unsigned i = 0; i < mesh->n_nodes; i++)
        if (mesh->nodes[i].engine.started && mesh->nodes[i].engine.generation == node->engine.generation)
            mesh->nodes[i].engine.failing = true;
}

static bool run_engine(struct mesh_node *node)
{
    struct mesh_engine *engine = &node->engine;
    struct mesh *mesh = node->mesh;
    const uint8_t value = (uint8_t)node->number;
    char key[32];

    if (!engine->started)
        return false;
    if (mesh->n_breaks > 0 && !engine->failing && mesh_draw(mesh, 40) == 0)
        break_engines(node);
    if (engine->failing && mesh_draw(mesh, 3) == 0) {
        spoil(node);
        engine->started = engine->ready = false;
        mesh->n_failures++;
        nodes_engine_failed(nodes_of(node->job), &(struct engine_failure){.what = "was broken by the test"});
        return true;
    }
    if (engine->failing)
        return true; /* the engine will notice the break */
    if (!engine->put) {
        engine->put = true;
        snprintf(key, sizeof(key), "g%u/%u", engine->generation, node->number);
        nodes_engine_put(nodes_of(node->job), key, &value, 1);
        return true;
    }
    if (!engine->ready && engine->n_values == mesh->n_nodes - 1) {
        engine->ready = true;
        nodes_engine_ready(nodes_of(node->job));
        return true;
    }
    return engine->ready && move_bytes(node);
}

/* ---- what happens -------------------------------------------------------------------------------------- */

static bool serve(struct mesh_node *node)
{
    if (!node->woken)
        return false;
    node->woken = false;
    nodes_serve(nodes_of(node->job));
    return true;
}

enum { ENGINE = 3, ACTS = 5 }; /* acts from ENGINE on move bytes or do work */

static bool act_once(struct mesh_node *node, unsigned number)
{
    switch (number) {
    case 0:
    case 1:
        return deliver(node, number == 0);
    case 2:
        return serve(node);
    case ENGINE:
        return run_engine(node);
    default:
        return worker_pool_wait(node->pool) > 0;
    }
}

static bool act(struct mesh_node *node, unsigned number)
{
    bool any;

    if (!node->job)
        return false;
    job_settle(node->job);
    any = act_once(node, number);
    job_settle(node->job);
    return any;
}

bool mesh_advance(void *userdata)
{
    struct mesh *mesh = userdata;
    unsigned n = mesh->n_nodes * ACTS, first = (unsigned)mesh_draw(mesh, n);

    if (mesh_draw(mesh, 64) == 0)
        mesh->slow = (unsigned)mesh_draw(mesh, mesh->n_nodes + 1);
    /*
     * The slow node's engine and workers have their turn in the second round. The third is for events that the second
     * round made possible.
     */
    for (unsigned i = 0; i < 3 * n; i++) {
        unsigned k = (first + i) % n;

        if (i < n && k / ACTS == mesh->slow && k % ACTS >= ENGINE)
            continue;
        if (act(&mesh->nodes[k / ACTS], k % ACTS))
            return true;
    }
    return false;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

struct mesh *mesh_new(unsigned n_nodes, uint64_t seed, unsigned n_breaks)
{
    struct mesh *mesh = calloc(1, sizeof(*mesh));

    assert_true(mesh && n_nodes <= MESH_MAX_NODES);
    mesh->n_nodes = n_nodes;
    mesh->seed = seed;
    mesh->n_breaks = n_breaks;
    mesh->slow = n_nodes;
    may_complain = false;
    return mesh;
}

void mesh_join(struct mesh *mesh, unsigned node, struct job *job, struct worker_pool *pool)
{
    struct mesh_node *n = &mesh->nodes[node];
    const struct nodes_ops ops = {.send = on_send,
                                  .wake = on_wake,
                                  .start_engine = on_start_engine,
                                  .order = on_order,
                                  .value = on_value,
                                  .share = on_share,
                                  .stop_engine = on_stop_engine,
                                  .userdata = n};

    n->mesh = mesh;
    n->number = node;
    n->job = job;
    n->pool = pool;
    assert_int_equal(nodes_join(&(struct nodes *){NULL}, job, &ops), 0);
}

static void queue_free(struct queue *queue)
{
    while (queue->first) {
        struct packet *packet = queue->first;

        queue->first = packet->next;
        free(packet);
    }
}

void mesh_free(struct mesh *mesh)
{
    for (unsigned i = 0; i < mesh->n_nodes; i++) {
        queue_free(&mesh->nodes[i].to_leader);
        queue_free(&mesh->nodes[i].from_leader);
        forget_late(&mesh->nodes[i]);
    }
    free(mesh);
}
