/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The engine: a child process that moves bytes between nodes, and may die at any time. It maps segments of the daemon
 * that it is handed, and receives orders over a socketpair in the framing of frame.h, messages of proto/engine.proto.
 *
 * An order is a list of moves: bytes of a segment to a node, or from a node into a segment. The n-th send from node a
 * to node b within the order of one tag meets the n-th receive of node b from node a within the order of that tag; both
 * have one size. Orders of different tags are independent: any number may be under way, and nodes may give them in any
 * order, and before ready(), too.
 *
 * One engine lives in one generation: after a failure the caller closes it and starts another with the next generation.
 * Bytes that a failed engine has written into receiving segments are void.
 *
 * Rendezvous: the engine's store of keys and values is served over the socketpair. put() hands a value to the other
 * nodes' daemons, which pass it to their engines of the same generation (engine_value).
 *
 * The daemon never waits for it. All functions are for the loop's thread; callbacks come from the loop.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "core/base/segment.h"
#include "core/wire/engine-wire.h" /* struct engine_move, engine_order, engine_done, and their limits */

struct engine;

enum {
    ENGINE_GRACE_MS = 1000, /* past a deadline, before an engine that says nothing is killed */
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
    bool has_tag; /* many failures belong to no one order */
    uint64_t tag; /* of the order that failed */
};

struct engine_ops {
    /* Connected to all nodes of its generation. */
    void (*ready)(void *userdata);
    void (*done)(void *userdata, const struct engine_done *done);
    void (*put)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    /*
     * Called once; the process is dead or has been sent SIGKILL. Only ended() comes after it. The caller closes the
     * engine; within the callback is fine.
     */
    void (*failed)(void *userdata, const struct engine_failure *failure);
    /* After engine_close(), once: the process has ended, and writes nowhere any more. NULL: nobody waits for that. */
    void (*ended)(void *userdata);
    void *userdata;
};

struct engine_options {
    uv_loop_t *loop;
    /*
     * NULL: what the environment's ZEROD_ENGINE names, else zerod-engine-gloo beside the running program, where it is
     * installed, else the one on PATH.
     */
    const char *program;
    enum engine_kind kind;
    uint32_t generation;
    unsigned node, n_nodes;
    const char *address; /* host of this node: the interface that its connections are bound to */
    /* NULL entries: none of that number. Not consumed; may go when engine_new() has returned, as the engine has its
     * own. */
    const struct segment *const *segments;
    size_t n_segments;       /* at most ENGINE_SETUP_SEGMENTS */
    struct traffic *traffic; /* N_TRAFFIC, what its orders are counted in; until engine_close(); NULL: nowhere */
    uint32_t connect_timeout_ms;
    struct engine_ops ops;
};

/* Starts the process. Return: 0, or -errno with a sentence in why. */
int engine_new(struct engine **out, const struct engine_options *options, char *why, size_t why_size);

/* Kills the process; callbacks end at once but ended(), which comes from the loop or from within. NULL is fine. */
void engine_close(struct engine *engine);

/* Copies the moves. Return: 0, or -errno: then failed() comes, too, or has come. */
int engine_order(struct engine *engine, const struct engine_order *order);

/* A value that another node's engine of this generation has put. Return: as engine_order(). */
int engine_value(struct engine *engine, const char *key, const uint8_t *value, size_t n_bytes);

/* A further segment, or another in place of one of that number, with which earlier orders go on. Return: as
 * engine_order(). */
int engine_share(struct engine *engine, uint32_t number, const struct segment *segment);

int64_t engine_pid(const struct engine *engine);
