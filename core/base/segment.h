/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A shared segment is a named, sealed memfd and its read-write mapping in the daemon. The daemon creates every segment,
 * and gives a client a descriptor of it, read-only if the client must not write. A process can open such a descriptor
 * again for writing, through /proc/self/fd, if the mode of the memfd allows it:
 *
 *     another uid          cannot: the mode is 0600, and the memfd is the daemon's
 *     the daemon's uid     can, unless the segment is published: segment_init_published()
 *     root                 like the daemon's uid; root can also write the daemon's own memory (/proc/PID/mem)
 *
 * A process of the daemon's uid can also open /proc/PID/fd of the daemon, so only published segments are safe from it.
 *
 * A kept segment can outlive the daemon. The service manager keeps its descriptor (keep.h) and passes it to the next
 * daemon, where segment_init_kept() finds the segment with its contents.
 *
 * Sizes are rounded up to pages. Pages are allocated when they are reserved (segment_reserve), so that a lack of memory
 * is an error at that time and not SIGBUS later. Reserving zeroes pages, so it runs on a worker, never on the loop.
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
    char kept[SEGMENT_NAME_BYTES]; /* the name under which the segment is kept; "": not kept */
    bool found;                    /* made by an earlier daemon */
};

#define SEGMENT_NULL ((struct segment){.fd = -1})

size_t page_size(void);

/* Makes a segment, sparse until reserved. name: without prefix; "ring.0" is "/memfd:zerod.ring.0" in smaps. Return: 0
 * or -errno. */
int segment_init(struct segment *segment, const char *name, size_t n_bytes);
/*
 * As segment_init(), but also seals the segment (F_SEAL_FUTURE_WRITE): only this mapping writes to it. No process, this
 * daemon included, can map it for writing, write to it or punch holes into it again. Segments that engines write must
 * not be sealed like this.
 */
int segment_init_published(struct segment *segment, const char *name, size_t n_bytes);
/*
 * Calls segment_init(), and sends the descriptor to the service manager; keep_confirm() confirms that it has arrived.
 * If an earlier daemon has left a segment of that name, uses that segment instead. Return: as segment_init(); -EBADFD
 * if that segment has another size; -EUCLEAN if the stamp behind its contents was overwritten (older daemons left no
 * stamps). segment_init_published_kept(): without a service manager, as segment_init_published(). With one, only the
 * mode prevents writes by other processes, because the next daemon must write.
 */
int segment_init_kept(struct segment *segment, const char *name, size_t n_bytes);
/* As segment_init_kept(), but without a stamp. For segments that clients write, because a client that overwrites the
 * stamp could keep the next daemon from adopting the whole job. */
int segment_init_written_kept(struct segment *segment, const char *name, size_t n_bytes);
int segment_init_published_kept(struct segment *segment, const char *name, size_t n_bytes);
/*
 * As segment_init_published_kept(), but makes a missing segment even after segments_must_be_found(). For segments that
 * a later version introduced, and that may begin empty.
 */
int segment_init_published_later(struct segment *segment, const char *name, size_t n_bytes);
/*
 * Frees a segment. A freed segment stays kept until segments_forget(), because the next daemon may have to repeat the
 * work that needed it.
 */
void segment_deinit(struct segment *segment);
/* Call it before segment_deinit() to let another segment be kept under the name. */
void segment_release_name(struct segment *segment);
void segments_forget(void);
/*
 * For a descriptor that is kept like a segment. segment_keep() sends a copy of it to the service manager.
 * segment_find() finds the descriptor that an earlier daemon has left (-ENODATA if there is none). After
 * segment_unkeep() the descriptor stays kept until segments_forget(). Return: 0 (segment_find(): a descriptor that the
 * caller owns), or -errno.
 */
int segment_keep(const char *name, int fd);
int segment_find(const char *name);
void segment_unkeep(const char *name);
/* Makes segments_forget() keep the segments that were freed before this call. */
void segments_stay_kept(void);
/*
 * must: from now on a missing or different segment is an error (-ENODATA, -EBADFD, -EUCLEAN), and no new segment is
 * made in its place. segment_missing(): the name of the first such segment, or "".
 */
void segments_must_be_found(bool must);
/*
 * Sets a number that becomes a part of the names of a job's kept segments, as /proc shows them. So a segment of another
 * job is not used by mistake. 0: no number.
 */
void segments_mark(uint64_t mark);
const char *segment_missing(void);
/* Closes the descriptor and leaves the mapping, for a segment whose descriptor clients no longer get. */
void segment_close_descriptor(struct segment *segment);

/* Allocates pages. Any thread. Return: 0, -ENOMEM (memory or cgroup exhausted), or another -errno. */
int segment_reserve(const struct segment *segment, size_t offset_bytes, size_t n_bytes);

/*
 * segments_reserve() reserves one piece of several segments. There are segments_n_pieces() pieces; reserve them in any
 * order, on any threads. segments may contain NULL. Return: as segment_reserve().
 */
uint32_t segments_n_pieces(const struct segment *const *segments, size_t n_segments);
int segments_reserve(const struct segment *const *segments, size_t n_segments, uint32_t piece);

/* Frees whole pages, which then read as zeroes. Any thread. */
void segment_punch(const struct segment *segment, size_t offset_bytes, size_t n_bytes);

/* Return: a new descriptor for a client, owned by the caller, or -errno. */
int segment_open_ro(const struct segment *segment);
int segment_open_rw(const struct segment *segment);
