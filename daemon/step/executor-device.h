/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The executor on GPUs, and the functions that executor-device.c and device-io.c share with executor-offload.c. */

#include "core/base/segment.h"
#include "core/base/worker.h"
#include "daemon/step/executor-ops.h"

struct offload;

struct device_executor {
    struct executor base;
    struct offload *offload;      /* set if the optimizer is offloaded */
    struct segment landing;       /* offloaded, stage 3, several nodes: receives other nodes' weights */
    struct work confirmation;     /* waits until the new memory is kept */
    int confirmed;                /* result of `confirmation`: 0 or -errno */
    bool reporting, freed;        /* in an engine's report; the executor was freed in the report */
};

static inline struct device_executor *device_of(const struct executor *executor)
{
    return (struct device_executor *)executor; /* base is the first member */
}

/*
 * executor-device.c: makes an executor with ops, but without a state. Return: 0 or -errno. After an error *out may be
 * incomplete, and the caller frees it.
 */
int device_make(struct executor **out, const struct executor_ops *ops, const struct executor_options *options);
void device_start(struct executor *executor, bool adopted);
void device_free_executor(struct executor *executor);
void device_segments(const struct executor *executor, unsigned local_rank, const struct ring *ring,
                     struct executor_segments *out);

/* device-io.c */
/* Several nodes: reserves the staging copy's pages for initial weights. Any thread. Return: 0 or -errno. */
int device_reserve_copy(const struct executor *executor);
int device_init(struct executor *executor, const struct executor_init *init);
int device_adopt(struct executor *executor, const uint8_t *weights, executor_done done, void *userdata);
int device_verify(struct executor *executor, const struct executor_verify *verify);
int device_read(struct executor *executor, const struct executor_read *read);
/* Stages 1 and 2: copies all weights from a GPU to the segment. */
int device_show_weights(struct executor *executor, const struct segment *segment, executor_done done, void *userdata);
/* Stage 3: copies the weights from masters to the segment, through the staging copy. */
int device_show_masters(struct executor *executor, const struct segment *segment, executor_done done, void *userdata);
int device_load(struct executor *executor, executor_done done, void *userdata);
int device_store(struct executor *executor, executor_done done, void *userdata);
/*
 * Finds the elements [*start, *start + n) of a parameter that this node owns. In stage 3 frozen parameters are
 * partitioned, too. Return: n.
 */
uint64_t device_find_owned(const struct executor *executor, uint32_t param, uint64_t *start);
