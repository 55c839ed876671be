/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The daemon's side of zerod-engine-nccl, the child process that drives the GPUs of a node and may die at any time
 * (proto/device.proto). This module starts and kills the process, submits orders and watches deadlines. device-keep.h
 * has the data that outlives an engine.
 *
 * An engine belongs to one generation. After a failure the caller closes the engine and, after ended(), starts the next
 * one with the same keep. Before the next engine is ready, it restores data that a killed engine left incomplete. Then
 * an order whose end was not reported has changed nothing, except reductions that are done according to the results,
 * and the buckets of an update that are marked as updated. All such orders may be submitted again.
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

enum { DEVICE_TRAINER_MS = 10 * 60 * 1000 }; /* picked: a backward that is queued on a GPU takes less */

struct device_failure {
    bool said;        /* `what` is the engine's own text; else a predicate, printed after the engine's name */
    const char *what; /* borrowed during the call */
    bool has_tag;     /* the order `tag` failed; many failures belong to no order */
    uint64_t tag;
};

struct device_ops {
    /* The engine is connected to all nodes of its generation, and has restored incomplete data. */
    void (*ready)(void *userdata, const char *versions);
    void (*done)(void *userdata, const struct device_done *done);
    /* A value for the other nodes' engines. Their daemons pass it on with device_value(). */
    void (*put)(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
    /* Called once, when the process is dead or has been sent SIGKILL. Only late() and ended() are called afterwards. */
    void (*failed)(void *userdata, const struct device_failure *failure);
    /* Called after device_close() and before ended(), for each end of an order whose report was not read before. */
    void (*late)(void *userdata, const struct device_done *done);
    /* The last callback, after device_close(): the process has ended, and the next engine may use the keep. */
    void (*ended)(void *userdata);
    void *userdata;
};

struct device_options {
    uv_loop_t *loop;
    /*
     * The program. NULL: the value of ZEROD_DEVICE_ENGINE in the environment, else the installed zerod-engine-nccl in
     * the folder of the running program, else zerod-engine-nccl on PATH.
     */
    const char *program;
    uint32_t generation;
    unsigned node, n_nodes;
    uint32_t connect_timeout_ms;
    struct device_keep *keep;
    struct traffic *traffic; /* N_TRAFFIC counters of the engine's orders, used until device_close(); NULL: none */
    struct device_ops ops;
};

/*
 * Starts the process. Return: 0, or -errno with a sentence in why; -EBUSY if the last engine of the keep has not ended.
 * After a failure ended() is not called.
 */
int device_new(struct device **out, const struct device_options *options, char *why, size_t why_size);

/* Kills the process. Afterwards the loop calls late() and ended(), and no other callback. device: may be NULL. */
void device_close(struct device *device);

/*
 * Submits one of the five orders, DEVICE_COMMAND_REDUCE to _FETCH. All orders of a keep must have different tags.
 * Return: 0, or -errno if failed() is called soon, or has been called.
 */
int device_order(struct device *device, const struct device_command *command);

/* Passes to the engine a value that another node's engine of this generation has put. Return: as device_order(). */
int device_value(struct device *device, const char *key, const uint8_t *value, size_t n_bytes);

/* Passes host memory for orders of type COPY to the engine. It replaces earlier memory of that number. Return: as
 * device_order(). */
int device_share(struct device *device, uint32_t number, const struct segment *segment);

/* Ends the wait of orders for the local rank's points up to this one. Return: as device_order(). */
int device_release(struct device *device, uint32_t local_rank, uint64_t point);

int64_t device_pid(const struct device *device);
