/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A new file, written from its beginning to its end and hashed in passing. Bytes gather in a large buffer while a
 * thread of the stream writes those before. The first failure is remembered and ends all that follows. One thread.
 */

#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/hash.h"

struct disk;
struct stream;

/* Memory for one stream at a time. Streams share it, because new pages cost more than the copies into them. */
struct stream_buffers;
/* Return: NULL without memory. */
struct stream_buffers *stream_buffers_new(void);
/* NULL is fine. */
void stream_buffers_free(struct stream_buffers *buffers);

/* buffers: borrowed until stream_close(). n_bytes: of the whole file. Return: 0 or -errno. */
int stream_open(struct stream **out, struct stream_buffers *buffers, const struct disk *disk, int dir, const char *name,
                uint64_t n_bytes);
void stream_put(struct stream *stream, const void *bytes, size_t n_bytes);
/*
 * Puts bytes without a copy. Return: the place in the buffer for the next n_bytes, which the caller fills and then
 * calls stream_placed(); or NULL: the buffer has not enough room left, and stream_put() must be used.
 */
void *stream_place(struct stream *stream, size_t n_bytes);
void stream_placed(struct stream *stream, size_t n_bytes);
/* All n_bytes have been put: they are on the disk when this returns. Frees the stream. Return: 0 and *hash, or -errno.
 */
int stream_close(struct stream *stream, struct file_hash *hash);
