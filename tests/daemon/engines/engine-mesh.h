/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Engines of several nodes, driven from one loop: real processes that talk over 127.0.0.1. The test stands in for the
 * daemons and carries what one engine puts to the others. Each node has two segments, 0 to send from, full of bytes
 * of its own, and 1 to receive into, full of MESH_FILL.
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
    MESH_PATIENCE_MS = 30 * 1000,       /* a machine with sanitizers and others at work */
    MESH_TEST_PATIENCE_MS = 120 * 1000, /* a whole test */
};

struct mesh_node {
    struct mesh *mesh;
    unsigned node;
    struct engine *engine;
    struct segment segments[2];
    uint8_t *expected; /* what the segment that receives shall hold */
    bool ready;
    size_t n_done;
    struct engine_done last;
    struct traffic traffic[N_TRAFFIC];
    bool failed;
    uint64_t failed_ms; /* of uv_hrtime() */
    char what[ENGINE_MAX_WHAT_BYTES + 1];
    bool has_tag;
    uint64_t tag;
};

struct mesh {
    uv_loop_t loop;
    uv_timer_t tick;
    unsigned n_nodes;
    size_t n_bytes; /* of each segment */
    uint32_t generation, connect_timeout_ms;
    const char *address;    /* NULL: 127.0.0.1 */
    const char *program;    /* NULL: the engine of this build */
    bool lasting;           /* the orders that are given */
    bool holds_addresses;   /* nobody gets those that the others put, until mesh_release() */
    size_t n_address_bytes; /* of the last one */
    struct mesh_held {
        char key[ENGINE_MAX_KEY_BYTES + 1];
        uint8_t value[1024];
        size_t n_bytes;
    } held[MESH_MAX_NODES];         /* by the node that has put them */
    uint64_t end_ms;                /* of everybody's patience */
    uint16_t ports[MESH_MAX_PORTS]; /* where engines listen, as seen in what they put */
    size_t n_ports;
    struct mesh_node nodes[MESH_MAX_NODES];
};

/* Segments, no engines. */
void mesh_init(struct mesh *mesh, unsigned n_nodes, size_t n_bytes);
/* Closes engines that there are, and checks that nothing is left of them. */
void mesh_deinit(struct mesh *mesh);

/* The next generation: new engines, receiving segments as they were at first. */
void mesh_start(struct mesh *mesh);
void mesh_stop(struct mesh *mesh);
/* mesh_start(), and waits until all are ready. */
void mesh_connect(struct mesh *mesh);

/* Forwards the values that were held. */
void mesh_release(struct mesh *mesh);

/* One round of the loop, of 10 ms at most. */
void mesh_turn(struct mesh *mesh);
void mesh_run(struct mesh *mesh, unsigned n_ms);
/* Each of these waits. It fails the test after MESH_PATIENCE_MS, or when the awaited event cannot come. */
void mesh_wait_ready(struct mesh *mesh);
void mesh_wait_done(struct mesh *mesh, size_t n_done_each);
void mesh_wait_failed(struct mesh *mesh, unsigned node);

/* A move of a send and its receive, which are put down as expected. */
struct mesh_move {
    unsigned from, to;
    size_t from_offset, to_offset, n_bytes;
};

/* Gives one node its part of an order, if it has one. */
void mesh_give(struct mesh *mesh, unsigned node, uint64_t tag, const struct mesh_move *moves, size_t n_moves);
/* Gives it to all nodes. */
void mesh_give_all(struct mesh *mesh, uint64_t tag, const struct mesh_move *moves, size_t n_moves);
/* Notes what the moves shall have done. */
void mesh_expect(struct mesh *mesh, const struct mesh_move *moves, size_t n_moves);
/* Every byte of every receiving segment is as expected. */
void mesh_check(struct mesh *mesh);

uint64_t mesh_now_ms(void);
