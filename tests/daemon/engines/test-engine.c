/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Engines that move bytes: real processes over 127.0.0.1. Tests compare all of the segments, not only the received
 * bytes. test-engine-failures.c tests how engines end.
 */

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "tests/daemon/engines/engine-mesh.h"

enum { MIB = 1 << 20 };

/* A build with this test must have the engine. */
static void test_build(void **state)
{
    assert_true(config_build_own()->have_gloo);
}

/* Moves in both directions, at unaligned offsets, with gaps in between. */
static void check_sizes(bool lasting)
{
    static const size_t sizes[] = {1, 2, 7, 63, 64, 65, 4095, 4096, 4097, 65537, MIB + 3, 64 * MIB};
    struct mesh_move moves[ARRAY_SIZE(sizes)][2];
    struct mesh mesh;
    size_t at = 3;

    mesh_init(&mesh, 2, 72 * MIB);
    mesh.lasting = lasting;
    mesh_connect(&mesh);
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        for (unsigned from = 0; from < 2; from++)
            moves[i][from] = (struct mesh_move){from, 1 - from, at + 5 * from, at + 11 * from, sizes[i]};
        at += sizes[i] + 21;
        mesh_give_all(&mesh, i, moves[i], 2);
        mesh_expect(&mesh, moves[i], 2);
    }
    mesh_wait_done(&mesh, ARRAY_SIZE(sizes));
    mesh_check(&mesh);
    mesh_deinit(&mesh);
}

static void test_sizes(void **state)
{
    check_sizes(false);
}

static void test_sizes_lasting(void **state)
{
    check_sizes(true);
}

/* Stops the process. Returns when all its threads have stopped. */
static void stop(pid_t pid)
{
    siginfo_t info;

    assert_int_equal(kill(pid, SIGSTOP), 0);
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WSTOPPED), 0);
}

/*
 * Changes the sender's memory when the engine of node 0 has reported that it has sent, while the engine of node 1 is
 * stopped. Return: whether the changed bytes arrive, that is whether the engine sent the pages and not a copy.
 */
static bool changes_arrive(bool lasting)
{
    static const struct mesh_move first = {1, 0, 0, 0, 1}, move = {0, 1, 4096, 4096, 8 * 4096};
    struct mesh mesh;
    bool arrived;

    mesh_init(&mesh, 2, 64 * 4096);
    mesh.lasting = lasting;
    mesh_connect(&mesh);
    mesh_give(&mesh, 1, 1, &move, 1);
    mesh_give_all(&mesh, 2, &first, 1); /* done only when node 0 knows that node 1 receives */
    while (mesh.nodes[0].n_done + mesh.nodes[1].n_done < 2)
        mesh_turn(&mesh);
    stop(engine_pid(mesh.nodes[1].engine));
    mesh_give(&mesh, 0, 1, &move, 1);
    while (mesh.nodes[0].n_done < 2)
        mesh_turn(&mesh);
    mesh_expect(&mesh, &first, 1);
    mesh_expect(&mesh, &move, 1);
    memset(mesh.nodes[0].segments[MESH_SEND].map + move.from_offset, MESH_FILL, move.n_bytes);
    assert_int_equal(kill(engine_pid(mesh.nodes[1].engine), SIGCONT), 0);
    mesh_wait_done(&mesh, 2);
    arrived = mesh.nodes[1].segments[MESH_RECEIVE].map[move.to_offset] == MESH_FILL;
    if (arrived)
        mesh_expect(&mesh, &move, 1);
    mesh_check(&mesh);
    mesh_deinit(&mesh);
    return arrived;
}

/* The bytes change after the order is done. The changed bytes arrive only if the order said that its bytes last. */
static void test_lasting(void **state)
{
    assert_false(changes_arrive(false));
    assert_true(changes_arrive(true));
}

/* An order's report has the numbers of bytes. */
static void test_counts(void **state)
{
    static const struct mesh_move moves[] = {{0, 1, 0, 0, 100}, {1, 0, 0, 0, 30}, {0, 1, 200, 200, 1}};
    struct mesh mesh;

    mesh_init(&mesh, 2, 4096);
    mesh_connect(&mesh);
    mesh_give_all(&mesh, ENGINE_MAX_TAG, moves, ARRAY_SIZE(moves));
    mesh_wait_done(&mesh, 1);
    for (unsigned i = 0; i < 2; i++) {
        const struct engine_done *done = &mesh.nodes[i].last;

        assert_true(done->tag == ENGINE_MAX_TAG);
        assert_int_equal(done->n_bytes_sent, i == 0 ? 101 : 30);
        assert_int_equal(done->n_bytes_received, i == 0 ? 30 : 101);
        assert_int_equal(mesh.nodes[i].traffic[0].n_orders, 1);
        assert_int_equal(mesh.nodes[i].traffic[0].n_bytes_sent, done->n_bytes_sent);
        assert_int_equal(mesh.nodes[i].traffic[0].n_bytes_received, done->n_bytes_received);
        assert_in_range(mesh.nodes[i].traffic[0].busy_ns, 1, UINT64_C(20) * 1000 * 1000 * 1000);
    }
    mesh_deinit(&mesh);
}

static void shuffle(size_t *order, size_t n)
{
    for (size_t i = n - 1; i > 0; i--) {
        size_t k = (size_t)rand() % (i + 1), other = order[k];

        order[k] = order[i];
        order[i] = other;
    }
}

/*
 * Many orders of several moves each, in a different sequence on each node. Half of them are given before the nodes are
 * connected.
 */
static void test_many_orders(void **state)
{
    enum { N_ORDERS = 300, N_MOVES = 6, ROOM = 8192 };
    static struct mesh_move moves[N_ORDERS][N_MOVES];
    size_t order[N_ORDERS];
    struct mesh mesh;

    srand(1);
    mesh_init(&mesh, 3, (size_t)N_ORDERS * N_MOVES * ROOM);
    mesh_start(&mesh);
    for (size_t i = 0; i < N_ORDERS; i++) {
        order[i] = i;
        for (size_t k = 0; k < N_MOVES; k++) {
            size_t at = (i * N_MOVES + k) * ROOM;
            unsigned from = k % 3; /* each node sends and receives in each order */

            moves[i][k] = (struct mesh_move){from, (from + 1 + i % 2) % 3, at + (size_t)rand() % 100,
                                             at + (size_t)rand() % 100, 1 + (size_t)rand() % (ROOM - 200)};
        }
        mesh_expect(&mesh, moves[i], N_MOVES);
    }
    for (unsigned half = 0; half < 2; half++) {
        for (unsigned node = 0; node < 3; node++) {
            shuffle(order + half * N_ORDERS / 2, N_ORDERS / 2);
            for (size_t i = 0; i < N_ORDERS / 2; i++) {
                size_t number = order[half * N_ORDERS / 2 + i];

                mesh_give(&mesh, node, (uint64_t)number << 40, moves[number], N_MOVES);
            }
        }
        if (half == 0)
            mesh_wait_ready(&mesh);
    }
    mesh_wait_done(&mesh, N_ORDERS);
    mesh_check(&mesh);
    mesh_deinit(&mesh);
}

/* An order that waits for another node does not delay later orders, not even their reports. */
static void test_independent(void **state)
{
    static const struct mesh_move first = {0, 1, 0, 0, 100}, second = {1, 0, 500, 700, 1000};
    struct mesh mesh;

    mesh_init(&mesh, 2, 4096);
    mesh_connect(&mesh);
    mesh_expect(&mesh, &first, 1);
    mesh_expect(&mesh, &second, 1);
    mesh_give(&mesh, 0, 1, &first, 1);
    mesh_give_all(&mesh, 2, &second, 1);
    mesh_wait_done(&mesh, 1);
    assert_int_equal(mesh.nodes[0].last.tag, 2);
    mesh_give(&mesh, 1, 1, &first, 1);
    while (mesh.nodes[0].n_done + mesh.nodes[1].n_done < 4)
        mesh_turn(&mesh);
    mesh_check(&mesh);
    mesh_deinit(&mesh);
}

/*
 * One node sends to all; all send to all. Between two nodes the n-th send goes to the n-th receive, whatever the sizes.
 */
static void test_shapes(void **state)
{
    struct mesh_move broadcast[2], all[6], row[5];
    struct mesh mesh;
    size_t n = 0;

    mesh_init(&mesh, 3, 4 * MIB);
    mesh_connect(&mesh);
    for (unsigned to = 1; to < 3; to++)
        broadcast[to - 1] = (struct mesh_move){0, to, 17, 1000 + to, MIB};
    for (unsigned from = 0; from < 3; from++)
        for (unsigned to = 0; to < 3; to++)
            if (from != to)
                all[n++] =
                    (struct mesh_move){from, to, to * 100000 + 1, 2 * MIB + from * 200001, 100000 + from * 10 + to};
    for (size_t i = 0; i < ARRAY_SIZE(row); i++)
        row[i] = (struct mesh_move){2, 1, i * 5000, 3 * MIB + i * 5000, i % 2 ? 4999 : 1 + i};
    mesh_give_all(&mesh, 1, broadcast, ARRAY_SIZE(broadcast));
    mesh_give_all(&mesh, 2, all, ARRAY_SIZE(all));
    mesh_give_all(&mesh, 3, row, ARRAY_SIZE(row));
    mesh_expect(&mesh, broadcast, ARRAY_SIZE(broadcast));
    mesh_expect(&mesh, all, ARRAY_SIZE(all));
    mesh_expect(&mesh, row, ARRAY_SIZE(row));
    while (mesh.nodes[0].n_done < 2 || mesh.nodes[1].n_done < 3 || mesh.nodes[2].n_done < 3) {
        mesh_turn(&mesh);
        assert_false(mesh.nodes[0].failed || mesh.nodes[1].failed || mesh.nodes[2].failed);
    }
    mesh_check(&mesh);
    mesh_deinit(&mesh);
}

/* The largest order, at offsets that are encoded in many bytes. */
static void test_largest_order(void **state)
{
    static struct mesh_move moves[ENGINE_MAX_MOVES];
    struct mesh mesh;

    mesh_init(&mesh, 2, 40 * MIB);
    mesh_connect(&mesh);
    for (size_t i = 0; i < ARRAY_SIZE(moves); i++)
        moves[i] = (struct mesh_move){i % 2, 1 - i % 2, 39 * MIB + i * 9, 38 * MIB + i * 10, 1 + i % 9};
    mesh_give_all(&mesh, 77, moves, ARRAY_SIZE(moves));
    mesh_expect(&mesh, moves, ARRAY_SIZE(moves));
    mesh_wait_done(&mesh, 1);
    mesh_check(&mesh);
    mesh_deinit(&mesh);
}

static void give_move(struct mesh *mesh, unsigned node, uint64_t tag, struct engine_move move)
{
    assert_int_equal(
        engine_order(mesh->nodes[node].engine,
                     &(struct engine_order){.tag = tag, .timeout_ms = 10000, .moves = &move, .n_moves = 1}),
        0);
}

/* A segment is shared after the start, then another one with the same number. */
static void test_share(void **state)
{
    struct segment further[2];
    struct mesh mesh;

    mesh_init(&mesh, 2, 4096);
    for (size_t i = 0; i < 2; i++)
        assert_int_equal(segment_init(&further[i], "further", 8192), 0);
    mesh_connect(&mesh);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(engine_share(mesh.nodes[1].engine, 3, &further[i]), 0);
        give_move(&mesh, 0, i, (struct engine_move){1, true, MESH_SEND, 10 * i, 1000});
        give_move(&mesh, 1, i, (struct engine_move){0, false, 3, 5000, 1000});
        mesh_wait_done(&mesh, i + 1);
    }
    for (size_t i = 0; i < 2; i++) {
        assert_memory_equal(further[i].map + 5000, mesh.nodes[0].segments[MESH_SEND].map + 10 * i, 1000);
        for (size_t k = 0; k < further[i].n_bytes; k++)
            assert_true(further[i].map[k] == 0 || (k >= 5000 && k < 6000));
        segment_deinit(&further[i]);
    }
    mesh_check(&mesh);
    mesh_deinit(&mesh);
}

/* A single node connects to no other, so its engine is ready at once. */
static void test_alone(void **state)
{
    struct mesh mesh;

    mesh_init(&mesh, 1, 4096);
    mesh_connect(&mesh);
    mesh_deinit(&mesh);
}

/* Engines are closed at different times while they move bytes. */
static void test_close(void **state)
{
    static const unsigned delays_ms[] = {0, 1, 5, 20, 60};
    struct mesh mesh;

    mesh_init(&mesh, 2, 16 * MIB);
    for (size_t i = 0; i < ARRAY_SIZE(delays_ms); i++) {
        struct mesh_move moves[] = {{0, 1, 0, 0, mesh.n_bytes}, {1, 0, 0, 0, mesh.n_bytes}};

        mesh_start(&mesh);
        mesh_give_all(&mesh, 1, moves, 2);
        mesh_run(&mesh, delays_ms[i]);
        mesh_stop(&mesh);
    }
    mesh_deinit(&mesh);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes_lasting), cmocka_unit_test(test_lasting), cmocka_unit_test(test_build),
        cmocka_unit_test(test_sizes),         cmocka_unit_test(test_counts),  cmocka_unit_test(test_many_orders),
        cmocka_unit_test(test_independent),   cmocka_unit_test(test_shapes),  cmocka_unit_test(test_largest_order),
        cmocka_unit_test(test_share),         cmocka_unit_test(test_alone),   cmocka_unit_test(test_close),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
