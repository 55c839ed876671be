/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The daemon's side of zerod-engine-nccl, the child process that drives the GPUs of a node and may die at any time: see
 * proto/device.proto. It starts and kills, gives orders and watches deadlines. What outlives an engine is in
 * device-keep.h.
 *
 * One engine lives in one generation. After a failure the caller closes it and, once ended() has come, starts the next
 * one with the same keep. Orders whose end was not reported have changed nothing, but for reductions that the results
 * say are done, and the buckets of an update that are marked as updated: what a killed engine tore, the next one puts
 * back before it is ready. All may be given again.
 *
 * The daemon never waits for it. All functions are for the loop's thread; callbacks come from the loop.
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
    bool said;        /* what are the engine's own words; else it ends a sentence that begins with the engine */
    const char *what; /* borrowed during the call */
    bool has_tag;     /* of the order that failed; often it is not one order */
    uint64_t tag;
};

struct device_ops {
    /* Connected to all nodes of its generation, and all memory is as it was left. */
    void (*ready)(void *userdata, const char *versions);
    void (*done)(void *userdata, const struct device_done *done);
    /* A value for the engines of the other nodes, which their daemons pass on with device_value(). */
    void (*put)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    /* Called once; the process is dead or has been sent SIGKILL. Only late() and ended() come after it. */
    void (*failed)(void *userdata, const struct device_failure *failure);
    /* After device_close(), before ended(): the end of an order that was reported and not heard before. */
    void (*late)(void *userdata, const struct device_done *done);
    /* After device_close(), the last one: the process has ended, and the keep is free for the next. */
    void (*ended)(void *userdata);
    void *userdata;
};

struct device_options {
    uv_loop_t *loop;
    /* NULL: what the environment's ZEROD_DEVICE_ENGINE names, else zerod-engine-nccl beside the running program, where
     * it is installed, else the one on PATH. */
    const char *program;
    uint32_t generation;
    unsigned node, n_nodes;
    uint32_t connect_timeout_ms;
    struct device_keep *keep;
    struct traffic *traffic; /* N_TRAFFIC, what its orders are counted in; until device_close(); NULL: nowhere */
    struct device_ops ops;
};

/* Starts the process. Return: 0, or -errno with a sentence in why; ended() does not come then. -EBUSY: the last engine
 * of the keep has not ended. */
int device_new(struct device **out, const struct device_options *options, char *why, size_t why_size);

/* Kills the process; callbacks end at once but ended(), which comes from the loop. NULL is fine. */
void device_close(struct device *device);

/* Any of the five orders, DEVICE_COMMAND_REDUCE to _FETCH; tags are not used twice with one keep. Return: 0, or -errno:
 * then failed() comes, too, or has come. */
int device_order(struct device *device, const struct device_command *command);

/* A value that another node's engine of this generation has put. Return: as device_order(). */
int device_value(struct device *device, const char *key, const uint8_t *value, size_t n_bytes);

/* Host memory for orders of type COPY, or another in place of that of its number. Return: as device_order(). */
int device_share(struct device *device, uint32_t number, const struct segment *segment);

/* No order waits any longer for the local rank's points up to this one. Return: as device_order(). */
int device_release(struct device *device, uint32_t local_rank, uint64_t point);

int64_t device_pid(const struct device *device);
