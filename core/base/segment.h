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
 * from it. A segment that is kept can outlive the daemon: whoever keeps its descriptor (keep.h) hands it to the next
 * daemon, for which segment_init_kept() finds it with all that is in it. Sizes are
 * rounded up to pages. Pages come when they are reserved (segment_reserve), so that
 * a lack of memory is an error then and not SIGBUS later; reserving zeroes
 * pages and belongs on a worker, never on the loop.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/base.h"

enum { SEGMENT_NAME_BYTES = 48 };

struct segment {
    int fd;
    uint8_t *map;
    size_t n_bytes; /* multiple of the page size; 0: an empty segment, fd -1 */
    uint8_t *area;  /* address space around map: see segment_map() */
    char kept[SEGMENT_NAME_BYTES]; /* under which it is kept; "": it is not */
    bool found;                    /* an earlier daemon made it */
};

#define SEGMENT_NULL ((struct segment){.fd = -1})

size_t page_size(void);

/* name without prefix: "ring.0" shows as "/memfd:zerod.ring.0" in smaps. Sparse until reserved. Return: 0 or -errno. */
int segment_init(struct segment *segment, const char *name, size_t n_bytes);
/*
 * segment_init(), then seals the segment (F_SEAL_FUTURE_WRITE): only this mapping writes to it. No process, this daemon
 * included, can map it for writing, write to it or punch holes into it again. It does not suit segments that engines
 * write.
 */
int segment_init_published(struct segment *segment, const char *name, size_t n_bytes);
/*
 * segment_init(), and the descriptor is given to whoever keeps descriptors; keep_confirm() says that it has arrived. If
 * an earlier daemon has left a segment of that name, it is found instead: -EBADFD when its size is another, -EUCLEAN
 * when the stamp behind its contents is not what it was, because something has overwritten it (earlier daemons
 * left no stamps). published: as segment_init_published() if nobody keeps descriptors; else only the mode keeps others
 * from writing to it, because the next daemon must.
 */
int segment_init_kept(struct segment *segment, const char *name, size_t n_bytes);
/* As segment_init_kept(), without a stamp: for what clients write to, because one of them could make the next daemon
 * hold the whole job. */
int segment_init_written_kept(struct segment *segment, const char *name, size_t n_bytes);
int segment_init_published_kept(struct segment *segment, const char *name, size_t n_bytes);
/*
 * As segment_init_published_kept(), but one that the earlier daemon did not have is made anew even after
 * segments_must_be_found(): for what began with a later version, and may begin empty.
 */
int segment_init_published_later(struct segment *segment, const char *name, size_t n_bytes);
/*
 * Segments that were freed stay kept until segments_forget(), because the next daemon may have to repeat what they were
 * needed for.
 */
void segment_deinit(struct segment *segment);
/* Before segment_deinit(): from now on another segment may be kept under the name. */
void segment_release_name(struct segment *segment);
void segments_forget(void);
/*
 * For a descriptor that is no segment, but is kept like one. segment_keep() gives a copy of it to whoever keeps
 * descriptors. segment_find() takes back what an earlier daemon has left (-ENODATA: nothing). After segment_unkeep() it
 * stays kept until segments_forget(). Return: 0 or a descriptor, which is the caller's; or -errno.
 */
int segment_keep(const char *name, int fd);
int segment_find(const char *name);
void segment_unkeep(const char *name);
/* segments_forget() forgets nothing that was freed before this call. */
void segments_stay_kept(void);
/*
 * A segment that was not kept, or is another, becomes an error (-ENODATA, -EBADFD, -EUCLEAN) instead of a new one.
 * segment_missing(): its name; "": there was none.
 */
void segments_must_be_found(bool must);
/*
 * A number that all kept segments of a job have in the name that /proc shows: one of another job, or one that was
 * confused with another, is not found. 0: none.
 */
void segments_mark(uint64_t mark);
const char *segment_missing(void);
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
