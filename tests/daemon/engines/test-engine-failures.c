/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Engines end without harm to the daemon: they are killed or stopped, get connections from strangers, get invalid
 * commands, or are other programs. After each end the next generation works.
 */

#include <arpa/inet.h>
#include <ctype.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "core/base/base.h"
#include "core/wire/engine-wire.h"
#include "core/wire/wire-arena.h"
#include "tests/daemon/engines/engine-mesh.h"
#include "tests/tiers.h"

enum {
    MIB = 1 << 20,
    SOON_MS = 1500, /* all engines notice a death within this time */
};

static void assert_says(const struct mesh_node *node, const char *text)
{
    if (!strstr(node->what, text))
        fail_msg("node %u: \"%s\" does not say \"%s\"", node->node, node->what, text);
}

/* Asserts that the next generation of engines works. */
static void assert_next_works(struct mesh *mesh)
{
    static const struct mesh_move moves[] = {{0, 1, 1, 2, 3000}, {1, 0, 3, 4, 3000}};

    mesh_stop(mesh);
    mesh_connect(mesh);
    mesh_give_all(mesh, 1, moves, ARRAY_SIZE(moves));
    mesh_expect(mesh, moves, ARRAY_SIZE(moves));
    while (mesh->nodes[0].n_done + mesh->nodes[1].n_done < 2)
        mesh_turn(mesh);
    mesh_check(mesh);
    mesh_stop(mesh);
}

/* ---- deaths --------------------------------------------------------------------------------------------- */

static void give_much(struct mesh *mesh)
{
    struct mesh_move moves[6];
    size_t n = 0;

    for (unsigned from = 0; from < 3; from++)
        for (unsigned to = 0; to < 3; to++)
            if (from != to)
                moves[n++] = (struct mesh_move){from, to, 0, from * 16 * MIB, 16 * MIB};
    mesh_give_all(mesh, 1, moves, n);
}

static void test_killed(void **state)
{
    struct mesh mesh;

    srand(7);
    mesh_init(&mesh, 3, 48 * MIB);
    for (unsigned round = 0; round < tests_some(12); round++) {
        unsigned victim = round % 3;
        uint64_t killed_ms;

        if (round == 0) {
            mesh_start(&mesh); /* the kill happens while they connect */
        } else {
            mesh_connect(&mesh);
            give_much(&mesh);
        }
        mesh_run(&mesh, (unsigned)rand() % 60);
        killed_ms = mesh_now_ms();
        assert_int_equal(kill((pid_t)engine_pid(mesh.nodes[victim].engine), SIGKILL), 0);
        for (unsigned i = 0; i < 3; i++) {
            if (round == 0 && i != victim)
                continue; /* they may not know of the victim yet: see test_stopped */
            mesh_wait_failed(&mesh, i);
            assert_in_range(mesh.nodes[i].failed_ms, killed_ms, killed_ms + SOON_MS);
            assert_says(&mesh.nodes[i], i == victim ? "was killed by signal 9 (Killed)" : "127.0.0.1");
            assert_int_equal(mesh.nodes[i].traffic[0].n_under_way, 0);
        }
        mesh_stop(&mesh);
    }
    assert_next_works(&mesh);
    mesh_deinit(&mesh);
}

/* An engine dies while all are idle. The others notice its death. */
static void test_killed_idle(void **state)
{
    struct mesh mesh;
    uint64_t killed_ms;

    mesh_init(&mesh, 2, 4096);
    mesh_connect(&mesh);
    killed_ms = mesh_now_ms();
    kill((pid_t)engine_pid(mesh.nodes[1].engine), SIGKILL);
    mesh_wait_failed(&mesh, 0);
    assert_in_range(mesh.nodes[0].failed_ms, killed_ms, killed_ms + SOON_MS);
    /* "Connection closed by peer [127.0.0.1] (node 1)", or "reset" if node 1 had unread bytes. */
    assert_says(&mesh.nodes[0], " [127.0.0.1]");
    assert_says(&mesh.nodes[0], " (node 1)");
    for (const char *at = strstr(mesh.nodes[0].what, "]:"); at; at = strstr(at + 1, "]:"))
        assert_false(isdigit((unsigned char)at[2])); /* gloo's port numbers are wrong, so they are not printed */
    assert_true(mesh.nodes[0].what[0] != '[');
    assert_false(mesh.nodes[0].has_tag);
    mesh_wait_failed(&mesh, 1);
    assert_next_works(&mesh);
    mesh_deinit(&mesh);
}

static int order(struct mesh *mesh, unsigned node, uint64_t tag, uint32_t timeout_ms, struct engine_move move)
{
    return engine_order(mesh->nodes[node].engine,
                        &(struct engine_order){.tag = tag, .timeout_ms = timeout_ms, .moves = &move, .n_moves = 1});
}

/* One engine is stopped, and one waits for it. Both are reported, each after its own timeout. */
static void test_stopped(void **state)
{
    struct mesh mesh;
    uint64_t begun_ms;

    mesh_init(&mesh, 2, 4096);
    mesh_connect(&mesh);
    kill((pid_t)engine_pid(mesh.nodes[1].engine), SIGSTOP);
    begun_ms = mesh_now_ms();
    assert_int_equal(order(&mesh, 0, 41, 300, (struct engine_move){1, false, MESH_RECEIVE, 0, 100}), 0);
    assert_int_equal(order(&mesh, 1, 41, 300, (struct engine_move){0, true, MESH_SEND, 0, 100}), 0);
    mesh_wait_failed(&mesh, 0);
    assert_in_range(mesh.nodes[0].failed_ms, begun_ms + 300, begun_ms + 300 + ENGINE_GRACE_MS);
    assert_string_equal(mesh.nodes[0].what, "waited 300 ms for node 1 to send 100 bytes (move 1 of 1)");
    assert_true(mesh.nodes[0].has_tag && mesh.nodes[0].tag == 41);
    mesh_wait_failed(&mesh, 1);
    assert_in_range(mesh.nodes[1].failed_ms, begun_ms + 300 + ENGINE_GRACE_MS, begun_ms + 300 + 2 * ENGINE_GRACE_MS);
    assert_string_equal(mesh.nodes[1].what, "missed its deadline");
    assert_true(mesh.nodes[1].has_tag && mesh.nodes[1].tag == 41);
    assert_int_equal(order(&mesh, 1, 42, 300, (struct engine_move){0, true, MESH_SEND, 0, 100}), -EPIPE);
    assert_next_works(&mesh);
    mesh_deinit(&mesh);
}

static void test_stopped_connecting(void **state)
{
    struct mesh mesh;

    mesh_init(&mesh, 2, 4096);
    mesh.connect_timeout_ms = 400;
    mesh_start(&mesh);
    kill((pid_t)engine_pid(mesh.nodes[1].engine), SIGSTOP);
    mesh_wait_failed(&mesh, 0);
    assert_says(&mesh.nodes[0], "not connected to all nodes within 400 ms: ");
    mesh_wait_failed(&mesh, 1);
    assert_string_equal(mesh.nodes[1].what, "missed its deadline for connecting");
    mesh.connect_timeout_ms = 15000;
    assert_next_works(&mesh);
    mesh_deinit(&mesh);
}

/* A peer without the order does not take part, so the order times out. */
static void test_unmet(void **state)
{
    struct mesh mesh;

    mesh_init(&mesh, 2, 4096);
    mesh_connect(&mesh);
    assert_int_equal(order(&mesh, 0, 5, 200, (struct engine_move){1, true, MESH_SEND, 0, 64}), 0);
    mesh_wait_failed(&mesh, 0);
    assert_string_equal(mesh.nodes[0].what, "waited 200 ms for node 1 to take 64 bytes (move 1 of 1)");
    mesh_deinit(&mesh);
}

/* ---- orders that make no sense -------------------------------------------------------------------------- */

static void test_bad_moves(void **state)
{
    static const struct {
        struct engine_move move;
        const char *what;
    } cases[] = {
        {{0, true, MESH_SEND, 0, 1}, "move 0 is for node 0; this is node 0 of 2"},
        {{2, true, MESH_SEND, 0, 1}, "move 0 is for node 2; this is node 0 of 2"},
        {{511, false, MESH_RECEIVE, 0, 1}, "move 0 is for node 511"},
        {{1, false, 2, 0, 1}, "move 0 is for segment 2, which is not there"},
        {{1, false, UINT32_MAX, 0, 1}, "segment 4294967295, which is not there"},
        {{1, false, MESH_RECEIVE, 0, 0}, "has no such place"},
        {{1, false, MESH_RECEIVE, 0, 4097}, "move 0 is for 4097 bytes at 0 of segment 1, which has no such place"},
        {{1, false, MESH_RECEIVE, 4096, 1}, "has no such place"},
        {{1, true, MESH_SEND, 1, UINT64_MAX}, "has no such place"},
        {{1, true, MESH_SEND, UINT64_MAX - 1, 4}, "has no such place"},
    };
    struct mesh mesh;

    mesh_init(&mesh, 2, 4096);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        mesh_start(&mesh);
        assert_int_equal(order(&mesh, 0, i, 10000, cases[i].move), 0);
        mesh_wait_failed(&mesh, 0);
        assert_says(&mesh.nodes[0], cases[i].what);
        assert_true(mesh.nodes[0].has_tag && mesh.nodes[0].tag == i);
        mesh_stop(&mesh);
    }
    mesh_deinit(&mesh);
}

static void test_bad_orders(void **state)
{
    static struct engine_move moves[ENGINE_MAX_MOVES + 1];
    const struct engine_order orders[] = {
        {.tag = 1, .timeout_ms = 1000, .moves = moves, .n_moves = 0},
        {.tag = 1, .timeout_ms = 1000, .moves = moves, .n_moves = ARRAY_SIZE(moves)},
        {.tag = UINT64_MAX, .timeout_ms = 1000, .moves = moves, .n_moves = 1},
    };
    struct mesh mesh;

    mesh_init(&mesh, 2, 4096);
    for (size_t i = 0; i < ARRAY_SIZE(orders); i++) {
        mesh_start(&mesh);
        assert_int_equal(engine_order(mesh.nodes[0].engine, &orders[i]), -EINVAL);
        assert_false(mesh.nodes[0].failed); /* reported by the loop, not inside the call */
        mesh_wait_failed(&mesh, 0);
        assert_says(&mesh.nodes[0], "expected 1 to 4096");
        mesh_stop(&mesh);
    }
    mesh_deinit(&mesh);
}

/* ---- strangers ------------------------------------------------------------------------------------------ */

/* Connects to every port where an engine waits for another engine. Return: the number of connections. */
static size_t meet(struct mesh *mesh, int *fds)
{
    size_t n = 0;

    mesh->holds_addresses = true;
    mesh_start(mesh);
    while (mesh->n_ports < (size_t)mesh->n_nodes * (mesh->n_nodes - 1))
        mesh_turn(mesh);
    for (size_t i = 0; i < mesh->n_ports; i++) {
        struct sockaddr_in address = {
            .sin_family = AF_INET,
            .sin_port = htons(mesh->ports[i]),
            .sin_addr = {htonl(INADDR_LOOPBACK)},
        };

        fds[n] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        assert_true(fds[n] >= 0);
        assert_int_equal(connect(fds[n], (struct sockaddr *)&address, sizeof(address)), 0);
        n++;
    }
    return n;
}

static void part(int *fds, size_t n)
{
    for (size_t i = 0; i < n; i++)
        close(fds[i]);
}

/* Strangers send a message for which gloo has no receive, one of an unknown kind, one byte, or nothing. */
static void test_strangers(void **state)
{
    static const uint64_t killer[7] = {56, 1, 77, 0, 8, 0, 0};
    static const uint64_t odd[7] = {UINT64_MAX, 9, 1, UINT64_MAX, UINT64_MAX, 3, 3};
    static const struct {
        const void *data;
        size_t n_bytes;
        const char *what; /* what some engine says; NULL: any text */
    } cases[] = {
        {killer, sizeof(killer), "gloo gives up: "},
        {odd, sizeof(odd), NULL},
        {killer, 1, NULL},
        {NULL, 0, NULL},
    };
    int fds[MESH_MAX_PORTS];
    struct mesh mesh;

    mesh_init(&mesh, 2, 4096);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        size_t n;

        mesh.connect_timeout_ms = 1000;
        n = meet(&mesh, fds);
        for (size_t k = 0; k < n; k++)
            assert_int_equal(send(fds[k], cases[i].data, cases[i].n_bytes, MSG_NOSIGNAL), cases[i].n_bytes);
        mesh_run(&mesh, 100);
        mesh_release(&mesh);
        mesh_wait_failed(&mesh, 0);
        mesh_wait_failed(&mesh, 1);
        for (unsigned k = 0; k < 2; k++) {
            print_message("           node %u: %s\n", k, mesh.nodes[k].what);
            assert_true(mesh.nodes[k].what[0] != '\0' && !mesh.nodes[k].ready);
            if (cases[i].what)
                assert_says(&mesh.nodes[k], cases[i].what);
        }
        part(fds, n);
        mesh.connect_timeout_ms = 15000;
        assert_next_works(&mesh);
    }
    mesh_deinit(&mesh);
}

/* A silent stranger connects before the other node. It is not taken for the node, so no engine becomes ready. */
static void test_stranger_first(void **state)
{
    struct mesh mesh;
    int fds[MESH_MAX_PORTS];
    struct sockaddr_in elsewhere = {
        .sin_family = AF_INET,
        .sin_port = htons(9),
        .sin_addr = {htonl(INADDR_LOOPBACK + 1)},
    };
    uint8_t address[256] = {0};
    uint8_t received[512];
    size_t n;

    memcpy(address, &elsewhere, sizeof(elsewhere));
    mesh_init(&mesh, 2, 4096);
    mesh.connect_timeout_ms = 1000;
    n = meet(&mesh, fds);
    /* Each engine learns that its peer has a higher address, so it waits for a connection, and gets the stranger's. */
    for (unsigned i = 0; i < 2; i++) {
        char key[32];

        snprintf(key, sizeof(key), "g%u/%u", mesh.generation, 1 - i);
        assert_int_equal(engine_value(mesh.nodes[i].engine, key, address, mesh.n_address_bytes), 0);
    }
    mesh_run(&mesh, 400);
    for (unsigned i = 0; i < 2; i++) {
        assert_false(mesh.nodes[i].ready);
        /* The engine asked the stranger to prove that it is the node. */
        assert_true(recv(fds[i], received, sizeof(received), MSG_DONTWAIT) >= 48);
        mesh_wait_failed(&mesh, i);
        assert_says(&mesh.nodes[i], "not connected to all nodes within 1000 ms: ");
    }
    part(fds, n);
    mesh.holds_addresses = false;
    mesh_deinit(&mesh);
}

/* ---- programs that are no engines ----------------------------------------------------------------------- */

static void test_no_program(void **state)
{
    struct engine *engine = NULL;
    char why[256] = "";
    uv_loop_t loop;
    int r;

    assert_int_equal(uv_loop_init(&loop), 0);
    r = engine_new(&engine,
                   &(struct engine_options){.loop = &loop,
                                            .program = "/nowhere/zerod-engine",
                                            .n_nodes = 1,
                                            .address = "127.0.0.1",
                                            .connect_timeout_ms = 1000},
                   why, sizeof(why));
    assert_int_equal(r, -ENOENT);
    assert_null(engine);
    assert_string_equal(why, "the engine /nowhere/zerod-engine cannot be started: No such file or directory");
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
    engine_close(NULL);
}

/* Return: the path of an executable script with this body. It is valid until the next call. */
static const char *make_script(const char *body)
{
    static char path[64];
    FILE *file;
    int fd;

    if (path[0] != '\0')
        unlink(path);
    snprintf(path, sizeof(path), "/tmp/zerod-test-XXXXXX");
    fd = mkstemp(path);
    assert_true(fd >= 0 && fchmod(fd, 0700) == 0);
    file = fdopen(fd, "w");
    assert_non_null(file);
    fprintf(file, "#!/bin/sh\n%s\n", body);
    assert_int_equal(fclose(file), 0);
    return path;
}

static void test_odd_programs(void **state)
{
    static const struct {
        const char *script, *what;
    } cases[] = {
        {"exit 0", "exited with status 0"},
        {"exit 3", "exited with status 3"},
        {"kill -SEGV $$", "was killed by signal 11 (Segmentation fault)"},
        /* standard error is passed on, even if it is more than a pipe holds; the loader's message is also reported */
        {"head -c 100000 /dev/zero | tr '\\000' ' ' >&2; exit 3", "exited with status 3"},
        {"echo one >&2; printf 'engine: error while loading shared libraries: libx.so.2: no such file\\n' >&2; exit "
         "127",
         "could not be loaded (engine: error while loading shared libraries: libx.so.2: no such file): if a library is "
         "not "
         "found, install it, or set LD_LIBRARY_PATH of zerod to its folder"},
        {"exit 127", "exited with status 127"},
        {"printf garbage >&3; exec sleep 30", "has sent an invalid report: EngineReport: 7 bytes that are not"},
        {"printf '\\172\\000' >&3; exec sleep 30", "has sent an invalid report: EngineReport: message of kind 15"},
        /* ready twice */
        {"printf '\\022\\000' >&3; printf '\\022\\000' >&3; exec sleep 30", "has reported twice that it is ready"},
        /* done before ready; another order; without numbers of bytes */
        {"printf '\\032\\002\\010\\005' >&3; exec sleep 30", "has reported the end of order 5, which is not under way"},
        {"printf '\\022\\000' >&3; printf '\\032\\002\\010\\006' >&3; exec sleep 30",
         "has reported the end of order 6, which is not under way"},
        {"printf '\\022\\000' >&3; printf '\\032\\002\\010\\005' >&3; exec sleep 30",
         "has reported 0 bytes sent and 0 received, expected 100 and 0"},
        /* failed without a text, and with one */
        {"printf '\\042\\000' >&3; exec sleep 30", "has sent an invalid report: EngineFailed.what: 0 bytes"},
        {"printf '\\042\\005\\012\\003abc' >&3; exit 1", "abc"},
        /* a value without a key */
        {"printf '\\012\\000' >&3; exec sleep 30", "has sent an invalid report: EngineValue.key: 0 bytes"},
        {"exec dd if=/dev/zero of=/proc/self/fd/3 bs=131072 count=1 2>/dev/null", "exited with status"},
        {"head -c 131072 /dev/zero | dd bs=131072 iflag=fullblock >&3 2>/dev/null; exec sleep 30",
         "has sent an invalid report: a packet of more than 131071 bytes"},
        {"exec python3 -c 'import array, os, socket, time; s = socket.socket(fileno=3); "
         "s.sendmsg([b\"x\"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array(\"i\", [0]))]); time.sleep(30)'",
         "has sent an invalid report: a descriptor"},
        {"exec 3>&-; exec sleep 30", "has closed its socket and not ended"},
        {"exec sleep 30", "missed its deadline for connecting"},
    };
    struct mesh mesh;

    mesh_init(&mesh, 1, 4096);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        mesh.program = make_script(cases[i].script);
        mesh.connect_timeout_ms = strstr(cases[i].what, "deadline") ? 100 : 20000;
        mesh_start(&mesh);
        /* the program may have ended already */
        (void)order(&mesh, 0, 5, 20000, (struct engine_move){1, true, MESH_SEND, 0, 100});
        mesh_wait_failed(&mesh, 0);
        assert_says(&mesh.nodes[0], cases[i].what);
        mesh_stop(&mesh);
    }
    unlink(mesh.program);
    mesh_deinit(&mesh);
}

/* The daemon limits the queue for an engine that does not read its commands. */
static void test_deaf(void **state)
{
    static struct engine_move moves[ENGINE_MAX_MOVES];
    struct engine_order large = {.timeout_ms = 20000, .moves = moves, .n_moves = ARRAY_SIZE(moves)};
    struct mesh mesh;
    int r = 0;

    for (size_t i = 0; i < ARRAY_SIZE(moves); i++)
        moves[i] = (struct engine_move){1, true, MESH_SEND, UINT64_C(1) << 47, UINT64_C(1) << 47};
    mesh_init(&mesh, 1, 4096);
    mesh.program = make_script("exec sleep 30");
    mesh_start(&mesh);
    for (; large.tag < 2000 && r == 0; large.tag++)
        r = engine_order(mesh.nodes[0].engine, &large);
    assert_int_equal(r, -ENOBUFS);
    mesh_wait_failed(&mesh, 0);
    assert_string_equal(mesh.nodes[0].what, "does not read its commands");
    unlink(mesh.program);
    mesh_deinit(&mesh);
}

/* An engine's environment has only what it needs. */
static void test_environment(void **state)
{
    struct mesh mesh;
    char line[512], out[80];
    FILE *file;

    setenv("ZEROD_TEST_SECRET", "x", 1);
    mesh_init(&mesh, 1, 4096);
    mesh.program = make_script("tr '\\000' '\\n' </proc/$$/environ >$0.env; exit 0");
    mesh_start(&mesh);
    mesh_wait_failed(&mesh, 0);
    snprintf(out, sizeof(out), "%s.env", mesh.program);
    file = fopen(out, "r");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file))
        if (strncmp(line, "PATH=", 5) != 0 && strncmp(line, "LD_LIBRARY_PATH=", 16) != 0 &&
            !strstr(line, "SAN_OPTIONS="))
            fail_msg("the engine has %s", line);
    fclose(file);
    unlink(out);
    unlink(mesh.program);
    mesh_deinit(&mesh);
}

/* An address that this machine does not have. */
static void test_foreign_address(void **state)
{
    struct mesh mesh;

    mesh_init(&mesh, 2, 4096);
    mesh.address = "203.0.113.7";
    mesh_start(&mesh);
    mesh_wait_failed(&mesh, 0);
    assert_says(&mesh.nodes[0], "Unable to find address for 203.0.113.7; bind(2)");
    mesh_deinit(&mesh);
}

/* ---- closing from within a callback --------------------------------------------------------------------- */

struct closer {
    struct engine *engine;
    char when; /* at which callback: p(ut), r(eady) or f(ailed) */
    bool closed;
};

static void close_when(struct closer *closer, char now)
{
    assert_false(closer->closed);
    if (closer->when != now)
        return;
    closer->closed = true;
    engine_close(closer->engine);
}

static void close_at_put(void *userdata, const char *key, const uint8_t *value, size_t n_bytes)
{
    close_when(userdata, 'p');
}

static void close_at_ready(void *userdata)
{
    close_when(userdata, 'r');
}

static void close_at_failed(void *userdata, const struct engine_failure *failure)
{
    close_when(userdata, 'f');
}

/* An engine can be closed in each of its callbacks, and then calls none of them. */
static void test_close_within(void **state)
{
    static const char whens[] = {'p', 'r', 'f'};

    for (size_t i = 0; i < ARRAY_SIZE(whens); i++) {
        struct closer closer = {.when = whens[i]};
        struct engine_options options = {
            .program = closer.when == 'f' ? "/bin/false" : NULL,
            .n_nodes = 1,
            .address = "127.0.0.1",
            .connect_timeout_ms = 10000,
            .ops = {.put = close_at_put, .ready = close_at_ready, .failed = close_at_failed, .userdata = &closer},
        };
        char why[256];
        uv_loop_t loop;

        assert_int_equal(uv_loop_init(&loop), 0);
        options.loop = &loop;
        assert_int_equal(engine_new(&closer.engine, &options, why, sizeof(why)), 0);
        uv_run(&loop, UV_RUN_DEFAULT);
        assert_true(closer.closed);
        assert_int_equal(uv_loop_close(&loop), 0);
    }
}

/* ---- the end of the daemon ------------------------------------------------------------------------------ */

/* Runs the engine's program as a child, with one end of the socket pair as its descriptor 3. Return: its pid. */
static pid_t run_engine(const int pair[2])
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        if (dup2(pair[1], 3) < 0 || (pair[1] != 3 && pair[0] != 3 && close(pair[0]) < 0))
            _exit(99);
        if (getenv("ZEROD_ENGINE"))
            execl(getenv("ZEROD_ENGINE"), "zerod-engine-gloo", NULL);
        _exit(98);
    }
    return pid;
}

static void make_pair(int pair[2])
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    for (int i = 0; i < 2; i++) { /* move them away from descriptor 3 */
        int fd = fcntl(pair[i], F_DUPFD_CLOEXEC, 10);

        assert_true(fd >= 10);
        close(pair[i]);
        pair[i] = fd;
    }
}

static void send_setup(int fd)
{
    struct wire_arena arena;
    uint8_t packet[256];
    int n;

    assert_int_equal(wire_arena_init(&arena), 0);
    n = engine_pack_command(&arena,
                            &(struct engine_command){.type = ENGINE_COMMAND_SETUP,
                                                     .setup = {.version = ENGINE_WIRE_VERSION,
                                                               .n_nodes = 2,
                                                               .address = "127.0.0.1",
                                                               .connect_timeout_ms = 60000}},
                            packet, sizeof(packet));
    assert_true(n > 0);
    assert_int_equal(send(fd, packet, (size_t)n, 0), n);
    wire_arena_deinit(&arena);
}

/* Waits until the engine puts values into the store, because it has all its threads then. */
static void wait_for_report(int fd)
{
    struct pollfd input = {.fd = fd, .events = POLLIN};

    assert_int_equal(poll(&input, 1, MESH_PATIENCE_MS), 1);
    assert_true(input.revents & POLLIN);
}

/*
 * An engine ends with its socket, before its setup and after it. The signals that end the daemon do not end the engine.
 */
static void test_ends_with_socket(void **state)
{
    for (unsigned round = 0; round < 2; round++) {
        int pair[2], status = -1;
        pid_t pid;

        make_pair(pair);
        pid = run_engine(pair);
        close(pair[1]);
        if (round == 1) {
            send_setup(pair[0]);
            wait_for_report(pair[0]);
            kill(pid, SIGTERM);
            kill(pid, SIGINT);
            usleep(50 * 1000);
            assert_int_equal(waitpid(pid, &status, WNOHANG), 0);
        }
        close(pair[0]);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

/* A stopped engine, which does not notice the end of its socket, ends with the daemon. */
static void test_ends_with_parent(void **state)
{
    int pair[2], status;
    pid_t parent, pid = -1;
    int pids[2];

    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    make_pair(pair);
    assert_int_equal(pipe(pids), 0);
    parent = fork();
    assert_true(parent >= 0);
    if (parent == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* ends with the test */
        pid = run_engine(pair);
        if (write(pids[1], &pid, sizeof(pid)) != sizeof(pid))
            _exit(1);
        for (;;)
            pause();
    }
    assert_int_equal(read(pids[0], &pid, sizeof(pid)), sizeof(pid));
    send_setup(pair[0]);
    wait_for_report(pair[0]);
    assert_int_equal(kill(pid, SIGSTOP), 0);
    assert_int_equal(kill(parent, SIGKILL), 0);
    assert_int_equal(waitpid(parent, &status, 0), parent);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    for (int i = 0; i < 2; i++) {
        close(pair[i]);
        close(pids[i]);
    }
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
}

/* Invalid commands, which the daemon does not send. The engine names the fault and ends. */
static void test_bad_commands(void **state)
{
    static const struct {
        const char *bytes;
        size_t n_bytes;
        const char *what;
    } cases[] = {
        {"garbage", 7, "a command that is not understood"},
        {"\032\000", 2, "a command out of place"},
        {"\012\000", 2, "this engine speaks version 1, the daemon 0: they are not of one build"},
        {"\012\004\010\001\040\000", 6, "node 0 of 0"},
        {"\012\006\010\001\040\001\072\000", 8, "1 segments with 0 descriptors"},
    };
    struct wire_arena arena;
    struct engine_report report;
    uint8_t packet[1024];
    char why[256];

    assert_int_equal(wire_arena_init(&arena), 0);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        int pair[2], status = -1;
        ssize_t n;
        pid_t pid;

        make_pair(pair);
        pid = run_engine(pair);
        close(pair[1]);
        assert_int_equal(send(pair[0], cases[i].bytes, cases[i].n_bytes, 0), cases[i].n_bytes);
        n = recv(pair[0], packet, sizeof(packet), 0);
        assert_true(n > 0);
        assert_int_equal(engine_unpack_report(&arena, packet, (size_t)n, &report, why, sizeof(why)), 0);
        assert_int_equal(report.type, ENGINE_REPORT_FAILED);
        assert_string_equal(report.failed.what, cases[i].what);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
        close(pair[0]);
    }
    wire_arena_deinit(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_killed_idle),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_stopped_connecting),
        cmocka_unit_test(test_unmet),
        cmocka_unit_test(test_bad_moves),
        cmocka_unit_test(test_bad_orders),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_stranger_first),
        cmocka_unit_test(test_no_program),
        cmocka_unit_test(test_odd_programs),
        cmocka_unit_test(test_deaf),
        cmocka_unit_test(test_environment),
        cmocka_unit_test(test_foreign_address),
        cmocka_unit_test(test_close_within),
        cmocka_unit_test(test_ends_with_socket),
        cmocka_unit_test(test_ends_with_parent),
        cmocka_unit_test(test_bad_commands),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
