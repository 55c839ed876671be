/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A stand-in for the daemon that tests a client on GPUs. It is a process that serves one connection, for a job of one
 * rank. It keeps the ring and the weights in memory of a simulated GPU. It waits only until the client's GPU has
 * reached the point of a push, and adds all gradients of a step to the weights. In stage 3 the next message overwrites
 * the pool. If the client does something forbidden, the stand-in prints a sentence and exits.
 */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* The possible faults of the answer to a Gather. */
enum cuda_daemon_fault {
    GATHERS_WELL,
    GATHERS_ONE_OFFSET_LESS,
    GATHERS_OUTSIDE,
    GATHERS_REFUSED,
    GATHERS_ABORTED,
};

struct cuda_daemon_options {
    int device; /* the device whose memory is used */
    int gpu;    /* the GPU that Welcome names; usually equal to device */
    uint64_t bucket_elems, ring_bytes;
    const char *sim; /* the value of ZEROD_SIM in the stand-in's process */
    /* 0 for stage 2, else the size of stage 3's pool as allocated, a multiple of 2 MiB. */
    uint64_t pool_bytes;
    uint64_t max_live_elems;
    bool hides_pool; /* sends no pool */
    enum cuda_daemon_fault fault;
    uint32_t fault_at; /* which Gather has the fault, from 1 */
};

/* Counts of the client's requests, in memory that both processes share. */
struct cuda_daemon_seen {
    uint32_t n_pushes, n_duplicates;
    uint64_t duplicate_sum;     /* the sum that the last duplicate was pushed with */
    uint32_t n_gathers, n_held; /* requests; gathered parameters, each as often as it is still held */
};

/* Starts the stand-in, which listens at path. Call it before using the simulated GPUs. Return: the stand-in's pid. */
pid_t cuda_daemon_start(const char *path, const struct cuda_daemon_options *options, struct cuda_daemon_seen *seen);

/* Waits until the stand-in exits, which it does when the connection ends. If it failed, ends the calling process. */
void cuda_daemon_wait(pid_t pid);
