/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The GPUs of this node: the orders of a job, and the engines that execute them one after the other (gpu-engine.h).
 * Orders that a failed engine has not reported go to the next engine, in their old sequence. So the end of an order is
 * reported to its caller once. After repeated failures the pause before the next engine grows, up to
 * DEVICES_MAX_PAUSE_MS.
 *
 * With several nodes, each engine belongs to a generation. The caller begins it (devices_next) and ends it
 * (devices_stop), on all nodes alike. Orders that move data between ranks are cancelled with their generation, and the
 * caller submits them again, in one sequence on all nodes. All other orders go to the next engine, as on one node.
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

/* result: 0, or -ECANCELED: by devices_free(), _cancel() or _stop(). The memory that the order used may be freed. */
typedef void (*devices_done)(void *userdata, int result);

struct devices_ops {
    /*
     * An engine is ready. first: its memory is newly allocated, and not initialised; never true if the memory was
     * found.
     */
    void (*ready)(void *userdata, bool first);
    /*
     * An engine has failed. why: a sentence without a full stop. generation: that of the next engine, which on one node
     * starts without a call. 0: no engine was ever ready, and no other one is tried.
     */
    void (*failed)(void *userdata, uint32_t generation, const char *why);
    /* Several nodes: a value for the other nodes' engines. Their daemons pass it on with devices_value(). */
    void (*put)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    /* After every callback from the loop. */
    void (*after)(void *userdata);
    void *userdata;
};

struct devices_options {
    uv_loop_t *loop;
    struct worker_pool *pool; /* must outlive struct devices; so must the loop */
    const struct kernels *kernels;
    struct device_plan_options plan; /* its layout is used only by devices_new() */
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
 * Shares a segment with the engines. Called before devices_start(). segment: not consumed; it and its pages must
 * outlive struct devices.
 */
void devices_share(struct devices *devices, enum devices_segment number, const struct segment *segment);
/* One node: starts the first engine. ready() or failed() follows. */
void devices_start(struct devices *devices);
/* Several nodes: starts the engine of that generation when the previous one has ended. */
void devices_next(struct devices *devices, uint32_t generation);
/* Ends the engine. When it has ended, its unfinished reductions, gatherings and fetches are cancelled. */
void devices_stop(struct devices *devices);
/* Passes on a value that another node's engine of the generation has put. */
void devices_value(struct devices *devices, const char *key, const uint8_t *value, size_t n_bytes);
/* Ends the engine, and cancels all orders: those that run, and later ones. */
void devices_cancel(struct devices *devices);
/* Kills the engine and cancels all orders. The loop frees *devices when its handles are closed. NULL is fine. */
void devices_free(struct devices *devices);

bool devices_were_found(const struct devices *devices);
/* The plan of device memory; inputs and results of orders. */
struct device_keep *devices_keep(struct devices *devices);

/* ---- orders ---------------------------------------------------------------------------------------------- */

/*
 * Orders DEVICE_COMMAND_REDUCE, _UPDATE, _GATHER, _FETCH or, with shared segments, _COPY. Tag, deadline and collective
 * are set here, arrays are copied. n_bytes: the bytes that the order moves, for the deadline. Return: 0, -ENOMEM, or
 * -ECANCELED after devices_cancel().
 */
int devices_order(struct devices *devices, const struct device_command *command, uint64_t n_bytes, devices_done done,
                  void *userdata);

struct devices_move {
    bool write; /* to the device */
    unsigned local_rank;
    enum device_piece_kind kind;
    uint64_t offset_bytes; /* in the piece */
    void *host;            /* must stay until done; NULL: zeroes are written */
    uint64_t n_bytes;      /* on the device */
    bool rounds;           /* write: host is fp32, and is rounded to dtype on the way */
    enum dtype dtype;      /* of the device's elements, if rounds */
    uint64_t point;        /* the move waits for this point of the local rank's trainer; 0: none */
};

/*
 * Carries out all moves in sequence; moves[] is copied. done() is not called from within. Return: as devices_order().
 */
int devices_copy(struct devices *devices, const struct devices_move *moves, size_t n_moves, devices_done done,
                 void *userdata);

/* ---- trainers -------------------------------------------------------------------------------------------- */

/* Do orders wait until the local rank's GPU has reached this point (core/wire/progress.h)? */
bool devices_awaits(const struct devices *devices, unsigned local_rank, uint64_t point);
/*
 * Called when the trainer's process or its connection is lost. If orders still wait for its points after some seconds,
 * they are executed as if it had reached all of them, and no order waits for its points any longer.
 */
void devices_lost_trainer(struct devices *devices, unsigned local_rank);
/* Called when the trainer's process still runs, and only its connection was lost. */
void devices_found_trainer(struct devices *devices, unsigned local_rank);
/*
 * Called when another process has the rank. No order waits for the old process: its GPU has finished writing, or never
 * will.
 */
void devices_new_trainer(struct devices *devices, unsigned local_rank, uint64_t incarnation);

/* ---- for people ------------------------------------------------------------------------------------------ */

struct devices_status {
    bool ready;
    uint32_t generation;
    int64_t pid;                   /* of the engine; 0: none runs */
    const char *versions;          /* as reported by the last engine that was ready; or "" */
    uint64_t n_failures;           /* since the beginning */
    const struct traffic *traffic; /* N_TRAFFIC, of all engines */
};

struct devices_status devices_status(const struct devices *devices);
