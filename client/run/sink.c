/* SPDX-License-Identifier: Apache-2.0 */

/* Writes an output of zerodrun in a thread. */

#include "client/run/sink.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/base/base.h"

/* Return: 0 when all is written, or a negative errno. */
static int write_to_sink(struct sink *sink, const char *data, size_t n_bytes)
{
    ssize_t n;

    while (n_bytes > 0) {
        n = write(sink->fd, data, n_bytes);
        if (n >= 0) {
            data += n;
            n_bytes -= n;
            sink->n_written_bytes += n;
        } else if (errno == EAGAIN) {
            /* Another process has made the descriptor non-blocking. */
            poll(&(struct pollfd){.fd = sink->fd, .events = POLLOUT}, 1, -1);
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

static void sink_write(void *arg)
{
    struct sink *sink = arg;
    struct sink_text text = {}, full;
    int r = 0;

    uv_mutex_lock(&sink->mutex);
    for (;;) {
        sink->writing = false;
        sink->error = r;
        if (r < 0)
            sink->broken = true;
        if (sink->waiting.n_bytes == 0) {
            uv_async_send(&sink->drained);
            while (sink->waiting.n_bytes == 0 && !sink->closing)
                uv_cond_wait(&sink->work, &sink->mutex);
            if (sink->closing)
                break;
        }
        /* Swaps the two texts, so that the memory of the written text is reused for appending. */
        full = sink->waiting;
        sink->waiting = (struct sink_text){.data = text.data, .n_allocated = text.n_allocated};
        text = full;
        sink->writing = true;
        uv_mutex_unlock(&sink->mutex);
        r = r < 0 ? r : write_to_sink(sink, text.data, text.n_bytes);
        uv_mutex_lock(&sink->mutex);
    }
    uv_mutex_unlock(&sink->mutex);
    free(text.data);
}

static void sink_drained(uv_async_t *async)
{
    struct sink *sink = async->data;

    if (sink_is_drained(sink))
        sink->on_drained(sink->context);
}

int sink_init(struct sink *sink, uv_loop_t *loop, int fd, void (*on_drained)(void *context), void *context)
{
    int r;

    *sink = (struct sink){.fd = fd, .on_drained = on_drained, .context = context};
    r = uv_mutex_init(&sink->mutex);
    if (r < 0)
        return r;
    r = uv_cond_init(&sink->work);
    if (r < 0)
        goto no_cond;
    r = uv_async_init(loop, &sink->drained, sink_drained);
    if (r < 0)
        goto no_async;
    sink->drained.data = sink;
    r = uv_thread_create(&sink->thread, sink_write, sink);
    if (r == 0)
        return 0;
    uv_close((uv_handle_t *)&sink->drained, NULL);
no_async:
    uv_cond_destroy(&sink->work);
no_cond:
    uv_mutex_destroy(&sink->mutex);
    return r;
}

void sink_close(struct sink *sink)
{
    uv_mutex_lock(&sink->mutex);
    assert(sink->waiting.n_bytes == 0 && !sink->writing);
    sink->closing = true;
    uv_cond_signal(&sink->work);
    uv_mutex_unlock(&sink->mutex);
    uv_thread_join(&sink->thread);
    uv_close((uv_handle_t *)&sink->drained, NULL);
    uv_cond_destroy(&sink->work);
    uv_mutex_destroy(&sink->mutex);
    free(sink->waiting.data);
}

/* Return: false if memory is short. */
static bool text_reserve(struct sink_text *text, size_t n_more)
{
    size_t n_needed = text->n_bytes + n_more, n = MAX(text->n_allocated, (size_t)4096);
    char *data;

    if (n_needed <= text->n_allocated)
        return true;
    while (n < n_needed)
        n *= 2;
    data = realloc(text->data, n);
    if (!data)
        return false;
    text->data = data;
    text->n_allocated = n;
    return true;
}

void sink_put(struct sink *sink, const char *a, size_t n_a_bytes, const char *b, size_t n_b_bytes)
{
    struct sink_text *text = &sink->waiting;

    uv_mutex_lock(&sink->mutex);
    if (!sink->broken && text_reserve(text, n_a_bytes + n_b_bytes)) {
        memcpy(text->data + text->n_bytes, a, n_a_bytes);
        if (n_b_bytes > 0)
            memcpy(text->data + text->n_bytes + n_a_bytes, b, n_b_bytes);
        text->n_bytes += n_a_bytes + n_b_bytes;
        uv_cond_signal(&sink->work);
    }
    uv_mutex_unlock(&sink->mutex);
}

void sink_printf(struct sink *sink, const char *format, ...)
{
    _cleanup_free_ char *text = NULL;
    va_list args;
    int n;

    va_start(args, format);
    n = vasprintf(&text, format, args);
    va_end(args);
    if (n < 0)
        text = NULL;
    else
        sink_put(sink, text, n, NULL, 0);
}

void sink_abandon(struct sink *sink)
{
    uv_mutex_lock(&sink->mutex);
    sink->abandoned = true;
    sink->broken = true;
    sink->waiting.n_bytes = 0;
    uv_mutex_unlock(&sink->mutex);
}

int sink_error(struct sink *sink)
{
    int error;

    uv_mutex_lock(&sink->mutex);
    error = sink->error;
    uv_mutex_unlock(&sink->mutex);
    return error;
}

uint64_t sink_n_written_bytes(const struct sink *sink)
{
    return sink->n_written_bytes;
}

bool sink_is_full(struct sink *sink)
{
    bool full;

    uv_mutex_lock(&sink->mutex);
    full = sink->waiting.n_bytes >= SINK_FULL_BYTES;
    uv_mutex_unlock(&sink->mutex);
    return full;
}

bool sink_is_drained(struct sink *sink)
{
    bool drained;

    uv_mutex_lock(&sink->mutex);
    drained = sink->abandoned || (sink->waiting.n_bytes == 0 && !sink->writing);
    uv_mutex_unlock(&sink->mutex);
    return drained;
}
