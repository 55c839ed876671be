/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The engine: a child process that moves bytes between nodes, and may die at any time. The daemon sends it orders, and
 * segments that it maps, over a socketpair in the framing of frame.h. proto/engine.proto has the messages.
 *
 * An order is a list of moves. A move sends bytes of a segment to a node, or receives bytes from a node into a segment.
 * Within the orders of one tag, the n-th send from node a to node b belongs to the n-th receive of node b from node a;
 * both have the same size. Orders of different tags are independent. Any number of them may run at once, and nodes may
 * submit them in any sequence, even before ready().
 *
 * An engine belongs to one generation. After a failure the caller closes the engine and starts another one with the
 * next generation. Bytes that a failed engine has written into receiving segments are void.
 *
 * Rendezvous: the daemon serves the engine's store of keys and values over the socketpair. put() hands a value to the
 * other nodes' daemons, which pass it to their engines of the same generation (engine_value).
 *
 * The daemon never waits for the engine. All functions run on the loop's thread; callbacks come from the loop.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "core/base/segment.h"
#include "core/wire/engine-wire.h" /* struct engine_move, engine_order, engine_done, and their limits */

struct engine;

enum {
    ENGINE_GRACE_MS = 1000, /* time past a deadline before a silent engine is killed */
};

enum engine_kind { ENGINE_GLOO };

enum engine_failure_kind {
    ENGINE_BEHAVED,     /* `what` ends a sentence that begins with the engine: "was killed by signal 9 (Killed)",
                           "exited with status 1", "missed its deadline" */
    ENGINE_SAID,        /* `what` is the engine's own text: "Connection closed by peer [10.0.0.2] (node 1)" */
    ENGINE_NOT_STARTED, /* `what` is a sentence from engine_new() */
};

/* Why an engine is no longer of use. Texts are borrowed during the call. */
struct engine_failure {
    enum engine_failure_kind kind;
    const char *what;
    bool has_tag; /* an order failed; many failures belong to no order */
    uint64_t tag; /* of the order that failed */
};

struct engine_ops {
    /* The engine is connected to all nodes of its generation. */
    void (*ready)(void *userdata);
    void (*done)(void *userdata, const struct engine_done *done);
    void (*put)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    /*
     * Called once, when the process is dead or has been sent SIGKILL. Only ended() is called afterwards. The caller
     * closes the engine, in this callback or later.
     */
    void (*failed)(void *userdata, const struct engine_failure *failure);
    /* Called once after engine_close(), when the process has ended and no longer writes. May be NULL. */
    void (*ended)(void *userdata);
    void *userdata;
};

struct engine_options {
    uv_loop_t *loop;
    /*
     * The program. NULL: the value of ZEROD_ENGINE in the environment, else the installed zerod-engine-gloo in the
     * folder of the running program, else zerod-engine-gloo on PATH.
     */
    const char *program;
    enum engine_kind kind;
    uint32_t generation;
    unsigned node, n_nodes;
    const char *address; /* this node's host: the engine binds its connections to this interface */
    /*
     * The segments by number; NULL: no segment has that number. They may be freed when engine_new() has returned,
     * because the engine has its own descriptors.
     */
    const struct segment *const *segments;
    size_t n_segments;       /* at most ENGINE_SETUP_SEGMENTS */
    struct traffic *traffic; /* N_TRAFFIC counters of the engine's orders, used until engine_close(); NULL: none */
    uint32_t connect_timeout_ms;
    struct engine_ops ops;
};

/* Starts the process. Return: 0, or -errno with a sentence in why. */
int engine_new(struct engine **out, const struct engine_options *options, char *why, size_t why_size);

/* Kills the process. Afterwards the loop, or engine_close() itself, calls ended(), and no other callback. engine: may
 * be NULL. */
void engine_close(struct engine *engine);

/* Submits an order, and copies its moves. Return: 0, or -errno if failed() is called soon, or has been called. */
int engine_order(struct engine *engine, const struct engine_order *order);

/* Passes to the engine a value that another node's engine of this generation has put. Return: as engine_order(). */
int engine_value(struct engine *engine, const char *key, const uint8_t *value, size_t n_bytes);

/*
 * Passes a segment to the engine. For later orders it replaces an earlier segment of that number. Return: as
 * engine_order().
 */
int engine_share(struct engine *engine, uint32_t number, const struct segment *segment);

int64_t engine_pid(const struct engine *engine);
