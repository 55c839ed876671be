/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The functions of executor.h as a table, implemented by executor-host.c, executor-device.c and executor-offload.c. The
 * comments in executor.h apply to the table's functions, too. An implementation embeds struct executor as its first
 * member.
 */

#include "core/base/worker.h"
#include "daemon/step/executor.h"

struct step_ops;

struct executor_ops {
    int (*reserve)(const struct executor *executor); /* reserves memory other than the state's */
    void (*start)(struct executor *executor, bool adopted);
    int (*repartition)(struct executor *executor, const struct layout *layout,
                       uint64_t gather_bytes); /* only executor-host.c has it */
    void (*free)(struct executor *executor);
    void (*segments)(const struct executor *executor, unsigned local_rank, const struct ring *ring,
                     struct executor_segments *segments);
    int (*init)(struct executor *executor, const struct executor_init *init);
    int (*adopt)(struct executor *executor, const uint8_t *weights, executor_done done, void *userdata);
    int (*verify)(struct executor *executor, const struct executor_verify *verify);
    int (*read)(struct executor *executor, const struct executor_read *read);
    int (*show)(struct executor *executor, const struct segment *segment, executor_done done, void *userdata);
    int (*load)(struct executor *executor, executor_done done, void *userdata);
    int (*store)(struct executor *executor, executor_done done, void *userdata);
};

/* Makes an executor. After an error *out may be incomplete, and the caller frees it. Return: 0 or -errno. */
int executor_host_new(struct executor **out, const struct executor_options *options);
int executor_device_new(struct executor **out, const struct executor_options *options);
int executor_offload_new(struct executor **out, const struct executor_options *options);

/* ---- shared ------------------------------------------------------------------------------------------------ */

void executor_set_up(struct executor *executor, const struct executor_ops *ops, const struct executor_options *options);
/*
 * Makes the state, and then the step. where: state options that neither the layout nor the configuration determines.
 * ops: the step's functions; NULL: the workers run the step. Return: 0 or -errno.
 */
int executor_make_step(struct executor *executor, const struct state_options *where, const struct step_ops *ops);
/*
 * Replaces the step by a step for the layout's number of ranks. Return: 0 or -errno. After an error, the step has not
 * changed.
 */
int executor_replace_step(struct executor *executor, const struct layout *layout);
void executor_deinit(struct executor *executor);

/*
 * Stores initial weights from `bytes` in the state. Call it on a worker, after the state's pages are reserved. Return:
 * 0 or -errno.
 */
int executor_store_initial(const struct executor *executor, const struct executor_init *init, const void *bytes);

/* Work that computes the 64-bit sum of a part that was pushed again. */
struct checksum {
    struct work work;
    const struct executor *executor;
    struct executor_verify verify;
    const uint8_t *bytes; /* the part in host memory, set before checksum_post() */
    uint8_t *copy;        /* owned; if not NULL, `bytes` points to it */
    uint64_t sum;
};

/* Makes a checksum for the request. Return: the checksum, or NULL without memory. */
struct checksum *checksum_new(const struct executor *executor, const struct executor_verify *verify);
void checksum_free(struct checksum *checksum);
/* Computes the sum on a worker, and then calls checksum_end(). */
void checksum_post(struct checksum *checksum);
/* Frees the checksum, and calls verify.done(). */
void checksum_end(struct checksum *checksum, int result);
