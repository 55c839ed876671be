/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A trainer on a GPU, the only rank of a job with tests/client/cuda-daemon.c. If an expectation fails, the process
 * prints a sentence and ends (CHECK of tests/sim/sim-child.h).
 */

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "tests/example/gpu.h"
#include "tests/client/cuda-daemon.h"
#include "zerod/client.h"

struct trainer {
    const uint64_t *sizes; /* [parameter]: its number of elements; owned by the caller */
    unsigned n_params;
    pid_t daemon;
    struct cuda_daemon_seen *seen;
    struct gpu *gpu; /* NULL if no GPU is open */
    struct zerod *c;
    float *grads; /* on the GPU, all parameters without gaps; until the job is formed, the initial weights */
    float *host;  /* the expected weights, in the same layout */
};

/* Return: how many elements precede a parameter. param may be n_params. */
size_t trainer_offset(const struct trainer *trainer, unsigned param);

/*
 * Return: a multiple of 0.25 below 256, so that sums of some thousand values are exact. Round 0 has the initial
 * weights.
 */
float trainer_value(unsigned param, uint64_t elem, unsigned round);

/* Starts the stand-in and attaches as rank. own is the GPU that this process uses, or -1 for none. */
struct trainer trainer_begin(const struct cuda_daemon_options *options, const uint64_t *sizes, unsigned n_params,
                             int own, int rank);

/* Declares trainable fp32 parameters p0, p1, ..., and fills host. */
void trainer_declare(struct trainer *trainer);

/* Asserts that the weights that the daemon shows on the GPU are the expected ones. */
void trainer_check_weight(struct trainer *trainer, unsigned param);

/* Closes the handle if it is open, and waits until the stand-in has ended. */
void trainer_end(struct trainer *trainer);

/*
 * Makes the client find the simulated driver, which ZEROD_LIBCUDA_SIM names. If the variable is not set, ends the
 * process.
 */
void trainer_find_driver(void);
