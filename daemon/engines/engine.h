/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The engine: a child process that moves bytes between nodes, and may die at any time. It receives segments of the
 * daemon, which it maps, and orders, over a socketpair in the framing of frame.h. The messages are those of
 * proto/engine.proto.
 *
 * An order is a list of moves: bytes of a segment to a node, or from a node into a segment. Within the orders of one
 * tag, the n-th send from node a to node b meets the n-th receive of node b from node a; both have one size. Orders of
 * different tags are independent: any number may run at once, and nodes may submit them in any sequence, even before
 * ready().
 *
 * One engine lives in one generation: after a failure the caller closes it and starts another with the next generation.
 * Bytes that a failed engine has written into receiving segments are void.
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
    bool has_tag; /* one order failed; many failures belong to no order */
    uint64_t tag; /* of the order that failed */
};

struct engine_ops {
    /* The engine is connected to all nodes of its generation. */
    void (*ready)(void *userdata);
    void (*done)(void *userdata, const struct engine_done *done);
    void (*put)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    /*
     * Called once; the process is dead or has been sent SIGKILL. Only ended() comes after it. The caller closes the
     * engine; within the callback is fine.
     */
    void (*failed)(void *userdata, const struct engine_failure *failure);
    /* Called once after engine_close(), when the process has ended and writes no more. NULL: not needed. */
    void (*ended)(void *userdata);
    void *userdata;
};

struct engine_options {
    uv_loop_t *loop;
    /*
     * The program. NULL: the value of ZEROD_ENGINE in the environment, else the installed zerod-engine-gloo in the
     * folder of the running program, else the one on PATH.
     */
    const char *program;
    enum engine_kind kind;
    uint32_t generation;
    unsigned node, n_nodes;
    const char *address; /* host of this node: the interface that its connections are bound to */
    /*
     * NULL entry: no segment of that number. Not consumed: not used after engine_new() returns, as the engine has its
     * own descriptors.
     */
    const struct segment *const *segments;
    size_t n_segments;       /* at most ENGINE_SETUP_SEGMENTS */
    struct traffic *traffic; /* N_TRAFFIC counters of its orders, used until engine_close(); NULL: none */
    uint32_t connect_timeout_ms;
    struct engine_ops ops;
};

/* Starts the process. Return: 0, or -errno with a sentence in why. */
int engine_new(struct engine **out, const struct engine_options *options, char *why, size_t why_size);

/* Kills the process. Of the callbacks only ended() still comes, from the loop or during this call. NULL is fine. */
void engine_close(struct engine *engine);

/* Submits an order, and copies its moves. Return: 0, or -errno; failed() then comes, or has come. */
int engine_order(struct engine *engine, const struct engine_order *order);

/* Passes to the engine a value that another node's engine of this generation has put. Return: as engine_order(). */
int engine_value(struct engine *engine, const char *key, const uint8_t *value, size_t n_bytes);

/*
 * Passes a segment to the engine. It replaces a segment of that number, which earlier orders still use. Return: as
 * engine_order().
 */
int engine_share(struct engine *engine, uint32_t number, const struct segment *segment);

int64_t engine_pid(const struct engine *engine);
