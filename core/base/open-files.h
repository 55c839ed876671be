/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * File descriptors (RLIMIT_NOFILE). The daemon refuses connections that would use up the descriptors that a job needs,
 * because an answer that promises memory carries a descriptor. open_files_watch() returns an error if epoll has no
 * memory; libuv alone aborts the process.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/base.h" /* before uv.h, whose sys/param.h also defines MIN */

#include <uv.h>

enum {
    OPEN_FILES_AT_START = 20, /* a daemon that listens has 14 (measured); its threads and configuration need more */
    OPEN_FILES_FOR_JOB = 16,  /* state, gradients, weights, journal, staging, a window, a reading, a pool */
    OPEN_FILES_PER_RANK = 10, /* connection, pidfd, ring, overflow, credit, and the descriptors in an answer */
};

/* Raises the soft limit, which is often 1024. */
void open_files_raise(void);
/* Return: the soft limit; 0 if it cannot be read. */
uint64_t open_files_limit(void);
/* Checks the limit for a daemon with n_ranks ranks on this node. Return: 0, or -EMFILE with a message in why. */
int open_files_check(unsigned n_ranks, char *why, size_t why_size);

/*
 * epoll needs memory for each descriptor that is added. libuv adds the descriptors of started handles in the loop's
 * next round, and aborts if memory has run out. libuv only modifies a descriptor that epoll already has, which needs no
 * memory. So these functions add each descriptor right after the start, and can return an error.
 */

/*
 * Calls uv_poll_start(), which removes a watched descriptor from epoll, then adds the descriptor to epoll. On failure
 * the handle is stopped. Return: 0, -ENOMEM or -ENOSPC.
 */
int open_files_watch(uv_poll_t *poll, int events, uv_poll_cb callback);

/* Adds the descriptor of a stream that connects or will be read. Later starts of the stream leave it in epoll. Return:
 * as open_files_watch(). */
int open_files_watch_stream(uv_stream_t *stream);
