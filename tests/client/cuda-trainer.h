/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A trainer on a GPU, the only rank of a job of tests/client/cuda-daemon.c. What cannot be ends the process with a sentence
 * (CHECK of tests/sim/sim-child.h).
 */

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "tests/example/gpu.h"
#include "tests/client/cuda-daemon.h"
#include "zerod/client.h"

struct trainer {
    const uint64_t *sizes; /* of its parameters, in elements; the caller's */
    unsigned n_params;
    pid_t daemon;
    struct cuda_daemon_seen *seen;
    struct gpu *gpu; /* NULL: none is open */
    struct zerod *c;
    float *grads; /* on the GPU, one parameter behind the other; until the job is formed, the initial weights */
    float *host;  /* what the weights should be, likewise */
};

/* Elements before those of a parameter, which may be n_params. */
size_t trainer_offset(const struct trainer *trainer, unsigned param);

/* A multiple of 0.25 under 256, so that sums of some thousands are exact. Of round 0: initial weights. */
float trainer_value(unsigned param, uint64_t elem, unsigned round);

/* Starts the other end and attaches as rank. own: the GPU that this process takes, -1: none. */
struct trainer trainer_begin(const struct cuda_daemon_options *options, const uint64_t *sizes, unsigned n_params,
                             int own, int rank);

/* Declares p0, p1, ..., fp32 and trainable; fills host. */
void trainer_declare(struct trainer *trainer);

/* Is what the daemon shows on the GPU what it should be? */
void trainer_check_weight(struct trainer *trainer, unsigned param);

/* Closes the handle if it is open, and waits until the other end is gone. */
void trainer_end(struct trainer *trainer);

/* Lets the client find the stand-ins' driver, which ZEROD_LIBCUDA_SIM names. Ends the process where nothing does. */
void trainer_find_driver(void);
