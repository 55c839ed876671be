/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * An output that may block: a terminal, a pipe to a slow reader, or a file. A thread of the sink writes, so the loop
 * continues to forward signals while no reader reads. The descriptor is not made non-blocking, because other processes
 * may share it.
 *
 * sink_put() only appends. The caller must stop when sink_is_full() returns true, and continue after on_drained(). If
 * the reader has closed the pipe (EPIPE), further text is dropped, because lost output must not end a training.
 * Everything except the sink's thread runs on the loop.
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
    void (*on_drained)(void *context); /* called when the sink is empty */
    void *context;
    uv_async_t drained; /* wakes the loop from the thread */
    uv_thread_t thread;
    _Atomic uint64_t n_written_bytes;
    uv_mutex_t mutex; /* guards the fields below */
    uv_cond_t work;
    struct sink_text waiting;
    bool writing; /* the thread is writing a text */
    bool closing;
    bool broken; /* a write has failed, or the sink is abandoned: text is dropped */
    int error;   /* negative errno of the write that failed, or 0 */
    bool abandoned;
};

/* Return: 0 or a negative errno. */
int sink_init(struct sink *sink, uv_loop_t *loop, int fd, void (*on_drained)(void *context), void *context);
/* Waits for the thread and closes the sink, which must be drained. The loop must run once more before the memory is
 * freed. */
void sink_close(struct sink *sink);

/* Appends two pieces without other text between them; the second may be empty. */
void sink_put(struct sink *sink, const char *a, size_t n_a_bytes, const char *b, size_t n_b_bytes);
void sink_printf(struct sink *sink, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Drops the waiting text and all later text, so that the sink counts as drained. The sink cannot be closed or freed
 * afterwards, because its thread may hang in write(2). */
void sink_abandon(struct sink *sink);

/* Return: the negative errno of the failed write, or 0. */
int sink_error(struct sink *sink);

/* The number of bytes written so far. */
uint64_t sink_n_written_bytes(const struct sink *sink);
bool sink_is_full(struct sink *sink);
bool sink_is_drained(struct sink *sink);
