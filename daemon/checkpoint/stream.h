/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Writes a new file from its beginning to its end, and hashes it. Bytes are collected in a large buffer while a thread
 * of the stream writes earlier ones. After the first failure nothing more is written, and stream_close() returns the
 * failure. One thread uses a stream.
 */

#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/hash.h"

struct disk;
struct stream;

/* Memory for one stream at a time. Streams share it, because new pages cost more than the copies into them. */
struct stream_buffers;
/* Return: the buffers, or NULL without memory. */
struct stream_buffers *stream_buffers_new(void);
/* buffers: may be NULL. */
void stream_buffers_free(struct stream_buffers *buffers);

/* buffers: borrowed until stream_close(). n_bytes: the size of the file. Return: 0 or -errno. */
int stream_open(struct stream **out, struct stream_buffers *buffers, const struct disk *disk, int dir, const char *name,
                uint64_t n_bytes);
void stream_put(struct stream *stream, const void *bytes, size_t n_bytes);
/*
 * Puts bytes without a copy. Return: the place in the buffer for the next n_bytes, or NULL if the buffer has too little
 * room. The caller fills the place and then calls stream_placed(). After NULL it calls stream_put() instead.
 */
void *stream_place(struct stream *stream, size_t n_bytes);
void stream_placed(struct stream *stream, size_t n_bytes);
/* Ends the file after all n_bytes have been put, syncs it, and frees the stream. Return: 0 and *hash, or -errno. */
int stream_close(struct stream *stream, struct file_hash *hash);
