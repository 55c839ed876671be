/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The calls by which a checkpoint gets to a disk. disk_system makes the system calls; tests have implementations that
 * fail, and one that records the calls, so that a loss of power after any of them can be laid out.
 *
 * dir: a descriptor of a folder; names in it are not followed if they are links. Return: 0 or -errno, opening: a
 * descriptor or -errno. Any thread.
 */

#include <stddef.h>
#include <stdint.h>

struct disk {
    int (*make_folder)(const struct disk *disk, int dir, const char *name);
    int (*open_folder)(const struct disk *disk, int dir, const char *name);
    /* A new file, past the page cache where the file system can do that. */
    int (*create)(const struct disk *disk, int dir, const char *name);
    /* bytes and offset: aligned to DISK_ALIGN_BYTES, and n_bytes a multiple of it. All of it is written. */
    int (*write)(const struct disk *disk, int fd, const void *bytes, size_t n_bytes, uint64_t offset);
    int (*truncate)(const struct disk *disk, int fd, uint64_t n_bytes);
    int (*sync)(const struct disk *disk, int fd); /* of a file or a folder */
    int (*rename)(const struct disk *disk, int dir, const char *from, const char *to);
    int (*exchange)(const struct disk *disk, int dir, const char *one, const char *other);
    /* A folder and the files in it. -ENOENT: there is none. */
    int (*remove_folder)(const struct disk *disk, int dir, const char *name);
};

enum { DISK_ALIGN_BYTES = 4096 };

extern const struct disk disk_system;
