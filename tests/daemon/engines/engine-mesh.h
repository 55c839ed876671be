/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Engines of several nodes in one loop: real processes that are connected over 127.0.0.1. The test takes the daemons'
 * part, and carries values between the engines. Each node has two segments: 0 is sent from, and has bytes that differ
 * between nodes; 1 is received into, and has MESH_FILL everywhere.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <uv.h>

#include "daemon/engines/engine.h"

enum {
    MESH_MAX_NODES = 3,
    MESH_FILL = 0xee,
    MESH_MAX_PORTS = 16,
    MESH_SEND = 0,
    MESH_RECEIVE = 1,
    MESH_PATIENCE_MS = 30 * 1000,       /* enough on a busy machine with sanitizers */
    MESH_TEST_PATIENCE_MS = 120 * 1000, /* for a whole test */
};

struct mesh_node {
    struct mesh *mesh;
    unsigned node;
    struct engine *engine;
    struct segment segments[2];
    uint8_t *expected; /* the expected bytes of the segment that receives */
    bool ready;
    size_t n_done;
    struct engine_done last;
    struct traffic traffic[N_TRAFFIC];
    bool failed;
    uint64_t failed_ms; /* when it failed, in ms of uv_hrtime() */
    char what[ENGINE_MAX_WHAT_BYTES + 1];
    bool has_tag;
    uint64_t tag;
};

struct mesh {
    uv_loop_t loop;
    uv_timer_t tick;
    unsigned n_nodes;
    size_t n_bytes; /* size of each segment */
    uint32_t generation, connect_timeout_ms;
    const char *address;    /* NULL means 127.0.0.1 */
    const char *program;    /* NULL means the engine of this build */
    bool lasting;           /* whether orders say that their bytes last */
    bool holds_addresses;   /* values with addresses are kept until mesh_release() */
    size_t n_address_bytes; /* size of the last address */
    struct mesh_held {
        char key[ENGINE_MAX_KEY_BYTES + 1];
        uint8_t value[1024];
        size_t n_bytes;
    } held[MESH_MAX_NODES];         /* [node that put the value] */
    uint64_t end_ms;                /* when the test has taken too long */
    uint16_t ports[MESH_MAX_PORTS]; /* where engines listen, from their addresses */
    size_t n_ports;
    struct mesh_node nodes[MESH_MAX_NODES];
};

/* Makes the segments, but no engines. */
void mesh_init(struct mesh *mesh, unsigned n_nodes, size_t n_bytes);
/* Closes the engines, and asserts that they leave no descriptor and no process. */
void mesh_deinit(struct mesh *mesh);

/* Starts new engines, the next generation, and refills the receiving segments. */
void mesh_start(struct mesh *mesh);
void mesh_stop(struct mesh *mesh);
/* mesh_start(), then waits until all engines are ready. */
void mesh_connect(struct mesh *mesh);

/* Forwards the values that were kept. */
void mesh_release(struct mesh *mesh);

/* Turns the loop once, for at most 10 ms. */
void mesh_turn(struct mesh *mesh);
void mesh_run(struct mesh *mesh, unsigned n_ms);
/* Wait. They fail the test after MESH_PATIENCE_MS, or when the awaited event can no longer happen. */
void mesh_wait_ready(struct mesh *mesh);
void mesh_wait_done(struct mesh *mesh, size_t n_done_each);
void mesh_wait_failed(struct mesh *mesh, unsigned node);

/* A send of one node, and the receive of another. */
struct mesh_move {
    unsigned from, to;
    size_t from_offset, to_offset, n_bytes;
};

/* Gives one node its sends and receives of the order, if it has any. */
void mesh_give(struct mesh *mesh, unsigned node, uint64_t tag, const struct mesh_move *moves, size_t n_moves);
/* Gives the order to all nodes. */
void mesh_give_all(struct mesh *mesh, uint64_t tag, const struct mesh_move *moves, size_t n_moves);
/* Notes the bytes that the moves must copy. */
void mesh_expect(struct mesh *mesh, const struct mesh_move *moves, size_t n_moves);
/* Asserts that all receiving segments have the expected bytes. */
void mesh_check(struct mesh *mesh);

uint64_t mesh_now_ms(void);
