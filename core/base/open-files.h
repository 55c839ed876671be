/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * File descriptors (RLIMIT_NOFILE): what a job needs is kept free of connections, so that an answer which promises
 * memory can bring its descriptor. And epoll's memory, without which libuv aborts the process.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/base.h" /* before uv.h, whose sys/param.h has a MIN of its own */

#include <uv.h>

enum {
    OPEN_FILES_AT_START = 20, /* 14 of a daemon that listens [M], and its threads and configuration */
    OPEN_FILES_FOR_JOB = 16,  /* state, gradients, weights, journal, staging, a window, a reading, a pool */
    OPEN_FILES_PER_RANK = 10, /* connection, pidfd, ring, overflow, credit, and what an answer carries */
};

/* Raises the soft limit; a soft limit of 1024 is usual. */
void open_files_raise(void);
/* Return: the limit. */
uint64_t open_files_limit(void);
/* Is there room for a daemon with a job of so many ranks here? Return: 0, or -EMFILE and why. */
int open_files_check(unsigned n_ranks, char *why, size_t why_size);

/*
 * epoll needs memory for each descriptor that is added to it. libuv adds those of what was started in the loop's next
 * round, and aborts when there is no memory; but what is there already it only changes, which needs none. So each
 * descriptor is added here, after the start and before that round: an error can still be told.
 */

/*
 * uv_poll_start(), which first takes the descriptor out of epoll, also when it is watched already. On failure the handle
 * is stopped. Return: 0 or -ENOMEM, -ENOSPC.
 */
int open_files_watch(uv_poll_t *poll, int events, uv_poll_cb callback);

/* For a stream that was told to connect, or is about to be read; later starts do not take it out. Return: the same. */
int open_files_watch_stream(uv_stream_t *stream);
