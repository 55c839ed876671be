/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The daemon's side of zerod-engine-nccl, the child process that drives the GPUs of a node and may die at any time
 * (proto/device.proto). This module starts and kills the process, submits orders and watches deadlines. device-keep.h
 * has the data that outlives an engine.
 *
 * One engine lives in one generation. After a failure the caller closes it and, after ended(), starts the next one with
 * the same keep. An order whose end was not reported has changed nothing, except reductions that are done according to
 * the results, and the buckets of an update that are marked as updated. The next engine restores what a killed engine
 * tore before it is ready. All such orders may be submitted again.
 *
 * The daemon never waits for the engine. All functions run on the loop's thread; callbacks come from the loop.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "core/base/segment.h"
#include "core/wire/device-plan.h"
#include "core/wire/device-wire.h"

struct device;
struct device_keep;

enum { DEVICE_TRAINER_MS = 10 * 60 * 1000 }; /* a backward that is queued on a GPU takes minutes at the most; picked */

struct device_failure {
    bool said;        /* `what` is the engine's own text; else a predicate, printed after the engine's name */
    const char *what; /* borrowed during the call */
    bool has_tag;     /* one order failed; many failures belong to no order */
    uint64_t tag;
};

struct device_ops {
    /* The engine is connected to all nodes of its generation, and all memory is as it was left. */
    void (*ready)(void *userdata, const char *versions);
    void (*done)(void *userdata, const struct device_done *done);
    /* A value for the other nodes' engines. Their daemons pass it on with device_value(). */
    void (*put)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    /* Called once; the process is dead or has been sent SIGKILL. Only late() and ended() come after it. */
    void (*failed)(void *userdata, const struct device_failure *failure);
    /* Called after device_close(), before ended(), with the end of an order that was reported, but not read before. */
    void (*late)(void *userdata, const struct device_done *done);
    /* The last callback, after device_close(): the process has ended, and the next engine may use the keep. */
    void (*ended)(void *userdata);
    void *userdata;
};

struct device_options {
    uv_loop_t *loop;
    /*
     * The program. NULL: the value of ZEROD_DEVICE_ENGINE in the environment, else the installed zerod-engine-nccl in
     * the folder of the running program, else the one on PATH.
     */
    const char *program;
    uint32_t generation;
    unsigned node, n_nodes;
    uint32_t connect_timeout_ms;
    struct device_keep *keep;
    struct traffic *traffic; /* N_TRAFFIC counters of its orders, used until device_close(); NULL: none */
    struct device_ops ops;
};

/*
 * Starts the process. Return: 0, or -errno with a sentence in why; ended() does not come then. -EBUSY: the last engine
 * of the keep has not ended.
 */
int device_new(struct device **out, const struct device_options *options, char *why, size_t why_size);

/* Kills the process. Of the callbacks only late() and ended() still come, from the loop. NULL is fine. */
void device_close(struct device *device);

/*
 * Submits one of the five orders, DEVICE_COMMAND_REDUCE to _FETCH. A tag is used only once with one keep. Return: 0, or
 * -errno; failed() then comes, or has come.
 */
int device_order(struct device *device, const struct device_command *command);

/* Passes to the engine a value that another node's engine of this generation has put. Return: as device_order(). */
int device_value(struct device *device, const char *key, const uint8_t *value, size_t n_bytes);

/* Passes host memory for orders of type COPY, which replaces the memory of that number. Return: as device_order(). */
int device_share(struct device *device, uint32_t number, const struct segment *segment);

/* Ends the wait of orders for the local rank's points up to this one. Return: as device_order(). */
int device_release(struct device *device, uint32_t local_rank, uint64_t point);

int64_t device_pid(const struct device *device);
