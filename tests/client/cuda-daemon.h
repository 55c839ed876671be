/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A stand-in for the daemon that tests a client on GPUs: the other end of one connection, in a process of its own, for
 * a job of one rank. It holds ring and weights in memory of a stand-in's device, waits until the client's GPU has come
 * to the point of a push and for nothing else, and adds all gradients of a step to the weights. If the client does
 * something that it must not do, the stand-in prints a sentence and exits. In stage 3 the next message overwrites the
 * pool.
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
    int gpu;    /* the GPU that the client is told; usually equal to device */
    uint64_t bucket_elems, ring_bytes;
    const char *sim; /* ZEROD_SIM of the process */
    /* 0: stage 2, else stage 3. As allocated: rounded up to 2 MiB. */
    uint64_t pool_bytes;
    uint64_t max_live_elems;
    bool hides_pool; /* sends none */
    enum cuda_daemon_fault fault;
    uint32_t fault_at; /* which Gather, from 1; the others are answered well */
};

/* Counts of the client's requests, in memory that both processes share. */
struct cuda_daemon_seen {
    uint32_t n_pushes, n_duplicates;
    uint64_t duplicate_sum;     /* of the last duplicate */
    uint32_t n_gathers, n_held; /* requests; parameters, each as often as it was gathered and not released */
};

/* Starts the stand-in, listening at path. The caller must not have used the stand-in GPUs yet. Return: its pid. */
pid_t cuda_daemon_start(const char *path, const struct cuda_daemon_options *options, struct cuda_daemon_seen *seen);

/* Waits until the stand-in has exited, as it does when the connection ends. If it failed, ends the calling process. */
void cuda_daemon_wait(pid_t pid);
