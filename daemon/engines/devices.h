/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The GPUs of this node, as a job uses them: orders, and engine after engine that carries them out (device.h). Whoever
 * gives an order hears of its end once, however many engines it took: what an engine that failed has not reported is
 * given to the next one, in the same order. An engine that fails again and again is started ever later, up to every
 * DEVICES_MAX_PAUSE_MS.
 *
 * With several nodes an engine is one of a generation: the caller says when one begins (devices_next) and is over
 * (devices_stop), on all nodes alike, and gives what travels between ranks again itself, in the order that all nodes
 * have. Everything else is given to the next engine as on one node.
 *
 * Copies between the GPUs and the daemon's own memory go piece by piece through a small segment that engines share:
 * they are for what is rare (initial weights, reading of state, write windows), and slow.
 *
 * All functions are for the loop's thread, but devices_reserve(); callbacks come from the loop.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "core/base/worker.h"
#include "daemon/engines/device.h"

struct devices;

enum { DEVICES_MAX_PAUSE_MS = 2000 };

/* result: 0, or -ECANCELED: by devices_free(), _cancel() or _stop(); what the order used may go. */
typedef void (*devices_done)(void *userdata, int result);

struct devices_ops {
    /* An engine is ready. first: memory is there, and nothing in it. */
    void (*ready)(void *userdata, bool first);
    /*
     * An engine has failed. why: a sentence without a full stop. generation: of the next one, which is started by
     * itself, but with several nodes; 0: none has ever been ready, and none is started any more.
     */
    void (*failed)(void *userdata, uint32_t generation, const char *why);
    /*
     * The engine cannot open an event of a local rank. This comes some seconds after it was found, because a process
     * that is ending closes what it shares before its end can be seen. Afterwards nothing waits for such events any
     * more: if the rank is still there, what it has pushed must not be used. why: CUDA's error.
     */
    void (*unopened)(void *userdata, unsigned local_rank, const char *why);
    /* Several nodes: a value for the engines of the others, which their daemons pass on with devices_value(). */
    void (*put)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    /* After every callback from the loop. */
    void (*after)(void *userdata);
    void *userdata;
};

struct devices_options {
    uv_loop_t *loop;
    struct worker_pool *pool; /* must outlive it, as the loop must */
    const struct kernels *kernels;
    struct device_plan_options plan; /* its layout only until devices_reserve() has returned */
    unsigned node, n_nodes;
    struct devices_ops ops;
};

/* Host memory that engines are given, by number; 0 is what copies go through. */
enum devices_segment { DEVICES_STAGING = 1, DEVICES_WEIGHTS = 2, DEVICES_N_SEGMENTS };

/* Nothing runs yet. Return: 0 or -ENOMEM. */
int devices_new(struct devices **out, const struct devices_options *options);
/* What engines share with the daemon, with its pages. Any thread, once. Return: 0 or -errno. */
int devices_reserve(struct devices *devices);
/* Before devices_start(). segment: not consumed, must outlive it, with its pages. */
void devices_share(struct devices *devices, enum devices_segment number, const struct segment *segment);
/* One node. The first engine: ready() or failed(). */
void devices_start(struct devices *devices);
/* Several nodes. The engine of that generation, once the one before has ended. */
void devices_next(struct devices *devices, uint32_t generation);
/* Ends the engine. When it has ended, reductions and gatherings that it has not done are cancelled. */
void devices_stop(struct devices *devices);
/* What another node's engine of the generation has put. */
void devices_value(struct devices *devices, const char *key, const uint8_t *value, size_t n_bytes);
/* For good: the engine ends, all that is under way is cancelled, and so is what comes. */
void devices_cancel(struct devices *devices);
/* Kills the engine; what is under way is cancelled. The loop frees it when its handles are closed. NULL is fine. */
void devices_free(struct devices *devices);

/* What lies where; inputs and results of orders. After devices_reserve(). */
struct device_keep *devices_keep(struct devices *devices);

/* ---- orders ---------------------------------------------------------------------------------------------- */

/*
 * DEVICE_COMMAND_REDUCE, _UPDATE, _GATHER, _FETCH or, for what is shared, _COPY; tag, deadline and collective are set
 * here, arrays are copied. n_bytes: what it moves, for the deadline. Return: 0, -ENOMEM, or -ECANCELED after
 * devices_cancel().
 */
int devices_order(struct devices *devices, const struct device_command *command, uint64_t n_bytes, devices_done done,
                  void *userdata);

struct devices_move {
    bool write; /* to the device */
    unsigned local_rank;
    enum device_piece_kind kind;
    uint64_t offset_bytes; /* in the piece */
    void *host;            /* must stay until done; NULL: zeroes are written */
    uint64_t n_bytes;      /* over there */
    bool rounds;           /* written: what is here is fp32, and is rounded on its way */
    enum dtype dtype;      /* to this */
    bool has_event;        /* only when the trainer has come so far */
    uint32_t event;
};

/* All moves, one behind the other; moves are copied. done not from within. Return: as devices_order(). */
int devices_copy(struct devices *devices, const struct devices_move *moves, size_t n_moves, devices_done done,
                 void *userdata);

/* ---- events of trainers ---------------------------------------------------------------------------------- */

void devices_event(struct devices *devices, unsigned local_rank, uint32_t number, const uint8_t *handle);
bool devices_has_event(const struct devices *devices, unsigned local_rank, uint32_t number);
/* The process is gone: if orders still wait for its events after some seconds, those never come, and another engine
 * goes on without them. */
void devices_lost_trainer(struct devices *devices, unsigned local_rank);
/* It was only its connection. */
void devices_found_trainer(struct devices *devices, unsigned local_rank);
/* Its events are gone, and what it was writing is written or never will be: no later engine waits for them, and this
 * one not for those that it could not open. */
void devices_forget_events(struct devices *devices, unsigned local_rank);

/* ---- for people ------------------------------------------------------------------------------------------ */

struct devices_status {
    bool ready;
    uint32_t generation;
    int64_t pid;                   /* of the engine; 0: none runs */
    const char *versions;          /* as the last engine that was ready has said; "" */
    uint64_t n_failures;           /* since the beginning */
    const struct traffic *traffic; /* N_TRAFFIC, of all engines */
};

struct devices_status devices_status(const struct devices *devices);
