/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * An output that may block: a terminal, a pipe to a slow reader, a file. A
 * thread of its own writes, so that the loop goes on forwarding signals while
 * nobody reads, and the descriptor, which others may share, is never made non-blocking.
 *
 * sink_put() only appends. Whoever feeds the sink stops when sink_is_full() and goes on after
 * on_drained. When the reader is gone (EPIPE) what is put is dropped: lost output must not end a training.
 * Everything but the thread inside runs on the loop.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/base.h" /* before uv.h, whose sys/param.h has a MIN of its own */

#include <uv.h>

enum {
    SINK_FULL_BYTES = 256 * 1024, /* picked, not measured */
};

struct sink_text {
    char *data; /* n_bytes of n_allocated, owned */
    size_t n_bytes, n_allocated;
};

struct sink {
    int fd;                            /* not owned */
    void (*on_drained)(void *context); /* the sink holds nothing any more */
    void *context;
    uv_async_t drained; /* thread to loop */
    uv_thread_t thread;
    _Atomic uint64_t n_written_bytes;
    uv_mutex_t mutex; /* guards what follows */
    uv_cond_t work;
    struct sink_text waiting;
    bool writing; /* the thread holds the rest */
    bool closing;
    bool broken; /* the reader is gone, the disk is full, or memory was short */
    int error;   /* negative errno of the write that failed, or 0 */
    bool abandoned;
};

/* Return: 0 or a negative errno. */
int sink_init(struct sink *sink, uv_loop_t *loop, int fd, void (*on_drained)(void *context), void *context);
/* Asserts that the sink is drained; waits for its thread. The loop must run once more before the memory goes
 * away. */
void sink_close(struct sink *sink);

/* Two pieces that stay together; the second may be empty. */
void sink_put(struct sink *sink, const char *a, size_t n_a_bytes, const char *b, size_t n_b_bytes);
void sink_printf(struct sink *sink, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Drops what waits and what is put from now on, and counts as drained. The thread may stand in write(2) for ever: a
 * sink that is abandoned cannot be closed, and its memory stays. */
void sink_abandon(struct sink *sink);

/* The negative errno of the write that failed; 0: none has. */
int sink_error(struct sink *sink);

/* Bytes that the output has taken so far. */
uint64_t sink_n_written_bytes(const struct sink *sink);
bool sink_is_full(struct sink *sink);
bool sink_is_drained(struct sink *sink);
