/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Drives this node's GPUs: queues the orders of a job, and runs one engine at a time, which executes the orders
 * (gpu-engine.h). If an engine fails, the next engine gets the orders whose end was not reported, in the same sequence.
 * So the end of each order is reported to its caller once. After repeated failures the pause before the next engine
 * grows, up to DEVICES_MAX_PAUSE_MS.
 *
 * With several nodes, each engine belongs to a generation. The caller begins a generation (devices_next) and ends it
 * (devices_stop) on all nodes. The end of a generation cancels its orders that move data between ranks. The caller
 * submits them again, in one sequence on all nodes. All other orders go to the next engine, as on one node.
 *
 * Copies between the GPUs and the daemon's own memory go piece by piece through a small segment that engines share.
 * They are slow, and meant for rare work: initial weights, reading of state, write windows.
 *
 * All functions run on the loop's thread, except devices_reserve(); callbacks come from the loop.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "core/base/worker.h"
#include "daemon/engines/gpu-engine.h"

struct devices;

enum { DEVICES_MAX_PAUSE_MS = 2000 };

/* result: 0, or -ECANCELED after devices_free(), devices_cancel() or devices_stop(). In either case the caller may free
 * the memory that the order used. */
typedef void (*devices_done)(void *userdata, int result);

struct devices_ops {
    /*
     * An engine is ready. first: the GPUs' memory is newly allocated, and not initialised; false if an earlier daemon
     * has left the memory.
     */
    void (*ready)(void *userdata, bool first);
    /*
     * An engine has failed. why: a sentence without a full stop. generation: that of the next engine; on one node, the
     * next engine starts without a call. generation 0: no engine was ever ready, and no other engine is tried.
     */
    void (*failed)(void *userdata, uint32_t generation, const char *why);
    /* Several nodes: a value for the other nodes' engines. Their daemons pass it on with devices_value(). */
    void (*put)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    /* Called at the end of each event of an engine, after the other callbacks. */
    void (*after)(void *userdata);
    void *userdata;
};

struct devices_options {
    uv_loop_t *loop;
    struct worker_pool *pool; /* must outlive struct devices; so must the loop */
    const struct kernels *kernels;
    struct device_plan_options plan; /* plan.layout is used only by devices_new() */
    unsigned node, n_nodes;
    struct devices_ops ops;
};

/* Numbers of the segments of host memory that engines map. Number 0 is the segment for copies. */
enum devices_segment { DEVICES_STAGING = 1, DEVICES_WEIGHTS = 2, DEVICES_N_SEGMENTS };

/* Makes the devices, and finds memory that an earlier daemon has left. No engine runs yet. Return: 0 or -errno. */
int devices_new(struct devices **out, const struct devices_options *options);
/* Reserves the pages of the memory that engines share with the daemon. Any thread, once. Return: 0 or -errno. */
int devices_reserve(const struct devices *devices);
/*
 * Shares a segment with the engines. Call it before devices_start(). segment: borrowed; the segment and its pages must
 * outlive struct devices.
 */
void devices_share(struct devices *devices, enum devices_segment number, const struct segment *segment);
/* One node: starts the first engine. ready() or failed() follows. */
void devices_start(struct devices *devices);
/* Several nodes: starts the engine of that generation when the previous engine has ended. */
void devices_next(struct devices *devices, uint32_t generation);
/* Ends the engine. When its process has ended, its unfinished reductions, gatherings and fetches are cancelled. */
void devices_stop(struct devices *devices);
/* Passes to the engine a value that another node's engine of the same generation has put. */
void devices_value(struct devices *devices, const char *key, const uint8_t *value, size_t n_bytes);
/* Ends the engine, cancels all orders, and rejects later orders with -ECANCELED. */
void devices_cancel(struct devices *devices);
/* Kills the engine and cancels all orders. The loop frees *devices when the handles are closed. devices may be NULL. */
void devices_free(struct devices *devices);

bool devices_were_found(const struct devices *devices);
/* Return: the keep, which has the plan of device memory, and the inputs and results of orders. */
struct device_keep *devices_keep(struct devices *devices);

/* ---- orders ---------------------------------------------------------------------------------------------- */

/*
 * Queues DEVICE_COMMAND_REDUCE, _UPDATE, _GATHER, _FETCH or, with shared segments, _COPY. Sets the command's tag,
 * deadline and collective, and copies its array. n_bytes: the bytes that the order moves, from which the deadline is
 * computed. Return: 0, -ENOMEM, or -ECANCELED after devices_cancel().
 */
int devices_order(struct devices *devices, const struct device_command *command, uint64_t n_bytes, devices_done done,
                  void *userdata);

struct devices_move {
    bool write; /* to the device */
    unsigned local_rank;
    enum device_piece_kind kind;
    uint64_t offset_bytes; /* in the piece */
    void *host;            /* must stay valid until done(); NULL: zeroes are written */
    uint64_t n_bytes;      /* on the device */
    bool rounds;           /* write: host is fp32, and is rounded to dtype on the way */
    enum dtype dtype;      /* of the device's elements, if rounds */
    uint64_t point;        /* the move waits for this point of the local rank's trainer; 0: none */
};

/*
 * Carries out all moves in sequence, and copies moves[]. devices_copy() itself does not call done(). Return: as
 * devices_order().
 */
int devices_copy(struct devices *devices, const struct devices_move *moves, size_t n_moves, devices_done done,
                 void *userdata);

/* ---- trainers -------------------------------------------------------------------------------------------- */

/* Do orders wait until the local rank's GPU has reached this point (core/wire/progress.h)? */
bool devices_awaits(const struct devices *devices, unsigned local_rank, uint64_t point);
/*
 * Call it when the trainer's process or its connection is lost. If orders still wait for the trainer's points after
 * some seconds, all its points count as reached: these orders are executed, and later orders do not wait.
 */
void devices_lost_trainer(struct devices *devices, unsigned local_rank);
/* Call it when the trainer's process still runs, and only its connection was lost. */
void devices_found_trainer(struct devices *devices, unsigned local_rank);
/*
 * Call it when another process has the rank. Orders no longer wait for the old process, because its writes on the GPU
 * have ended, or never will.
 */
void devices_new_trainer(struct devices *devices, unsigned local_rank, uint64_t incarnation);

/* ---- for people ------------------------------------------------------------------------------------------ */

struct devices_status {
    bool ready;
    uint32_t generation;
    int64_t pid;                   /* of the engine; 0: none runs */
    const char *versions;          /* from the last engine that was ready; or "" */
    uint64_t n_failures;           /* since the beginning */
    const struct traffic *traffic; /* N_TRAFFIC, of all engines */
};

struct devices_status devices_status(const struct devices *devices);
