/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The executor on GPUs; and its parts, of which executor-offload.c has some, too. */

#include "core/base/segment.h"
#include "core/base/worker.h"
#include "daemon/step/executor-ops.h"

struct device_gather;
struct offload;

struct device_executor {
    struct executor base;
    struct device_gather *gather; /* stage 3, from when GPUs have their memory */
    struct offload *offload;      /* offloaded */
    struct segment landing;   /* offloaded, stage 3, several nodes: weights of other nodes, on their way to a pool */
    bool clearing;            /* fresh memory, or waiting until it is kept */
    struct work confirmation; /* that it is kept */
    int confirmed;            /* 0 or -errno */
    bool reporting, freed;    /* a report of an engine is under way; and it has led to the end of the executor */
};

static inline struct device_executor *device_of(const struct executor *executor)
{
    return (struct device_executor *)executor; /* it is its first member */
}

/* executor-device.c: with ops, but without a state. As executor_device_new(). */
int device_make(struct executor **out, const struct executor_ops *ops, const struct executor_options *options);
void device_start(struct executor *executor);
void device_go_on(struct executor *executor);
void device_cancel(struct executor *executor);
void device_stop(struct executor *executor);
void device_free_executor(struct executor *executor);
void device_segments(const struct executor *executor, unsigned local_rank, const struct ring *ring,
                     struct executor_segments *out);
void device_attend(struct executor *executor, unsigned local_rank, enum executor_attendance what, uint64_t incarnation);
bool device_awaits(const struct executor *executor, unsigned local_rank, uint64_t point);
bool device_is_busy(const struct executor *executor);
uint64_t device_held_bytes(const struct executor *executor);

/* device-io.c */
/* Pages of the staging copy that initial weights of several nodes need. Any thread. Return: 0 or -errno. */
int device_reserve_copy(const struct executor *executor);
int device_init(struct executor *executor, const struct executor_init *init);
int device_adopt(struct executor *executor, const uint8_t *weights, executor_done done, void *userdata);
int device_verify(struct executor *executor, const struct executor_verify *verify);
int device_read(struct executor *executor, uint32_t param, enum state_kind kind, float *dst, executor_done done,
                void *userdata);
int device_read_weights(struct executor *executor, uint32_t param, uint8_t *dst, executor_done done, void *userdata);
/* Stages 1 and 2: the weights of a GPU, all of them. */
int device_show_weights(struct executor *executor, const struct segment *segment, executor_done done, void *userdata);
/* Stage 3: masters, by way of the staging copy. */
int device_show_masters(struct executor *executor, const struct segment *segment, executor_done done, void *userdata);
int device_load(struct executor *executor, executor_done done, void *userdata);
int device_store(struct executor *executor, executor_done done, void *userdata);
void device_empty(struct executor *executor);
/* [*start, *start + n) of a parameter's elements that this node owns; frozen ones are partitioned, too. Return: n. */
uint64_t device_find_owned(const struct executor *executor, uint32_t param, uint64_t *start);
