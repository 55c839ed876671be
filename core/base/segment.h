/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A shared segment: a named, sealed memfd and its read-write mapping in the
 * daemon. The daemon creates every segment; what is handed to a client is a
 * descriptor of it, read-only where the client must not write. A process can open such a descriptor again through
 * /proc/self/fd, for writing, if the mode of the memfd lets it:
 *
 *     another uid          cannot: the mode is 0600, and the memfd is the daemon's
 *     the daemon's uid     can, but not where the segment is published: segment_init_published()
 *     root                 the same; but it can write into the daemon's own memory (/proc/PID/mem)
 *
 * A process of the daemon's uid can open /proc/PID/fd of the daemon as well, so that only published segments are safe
 * from it. Sizes are
 * rounded up to pages. Pages come when they are reserved (segment_reserve), so that
 * a lack of memory is an error then and not SIGBUS later; reserving zeroes
 * pages and belongs on a worker, never on the loop.
 */

#include <stddef.h>
#include <stdint.h>

#include "core/base/base.h"

struct segment {
    int fd;
    uint8_t *map;
    size_t n_bytes; /* multiple of the page size; 0: an empty segment, fd -1 */
    uint8_t *area;  /* address space around map: see segment_map() */
};

#define SEGMENT_NULL ((struct segment){.fd = -1})

size_t page_size(void);

/* name without prefix: "ring.0" shows as "/memfd:zerod.ring.0" in smaps. Sparse until reserved. Return: 0 or -errno. */
int segment_init(struct segment *segment, const char *name, size_t n_bytes);
/*
 * segment_init(), then seals the segment (F_SEAL_FUTURE_WRITE): only this mapping writes to it. No process, this daemon
 * included, can map it for writing, write to it or punch holes into it again. It does not suit segments that engines
 * write, nor segments that a later daemon has to take over.
 */
int segment_init_published(struct segment *segment, const char *name, size_t n_bytes);
void segment_deinit(struct segment *segment);
/* Only the mapping is left: a segment of which no more descriptors are handed out. */
void segment_close_descriptor(struct segment *segment);

/* Any thread. Return: 0, -ENOMEM (memory or cgroup exhausted), other -errno. */
int segment_reserve(const struct segment *segment, size_t offset_bytes, size_t n_bytes);

/*
 * Reserves several segments, piece by piece in any order and on any threads: segments_n_pieces() calls of
 * segments_reserve(). NULL among them: none. Return: as segment_reserve().
 */
uint32_t segments_n_pieces(const struct segment *const *segments, size_t n_segments);
int segments_reserve(const struct segment *const *segments, size_t n_segments, uint32_t piece);

/* Gives whole pages back; they read as zeroes afterwards. Any thread. */
void segment_punch(const struct segment *segment, size_t offset_bytes, size_t n_bytes);

/* A new descriptor for a client, owned by the caller. Return: fd or -errno. */
int segment_open_ro(const struct segment *segment);
int segment_open_rw(const struct segment *segment);
