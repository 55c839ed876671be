/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The calls that write a checkpoint to disk. disk_system makes system calls. Tests have implementations that fail, and
 * one that records the calls, to simulate a power loss after each of them.
 *
 * dir: a descriptor of a folder. Symbolic links in that folder are not followed. Return: 0 or -errno. open_folder() and
 * create() return a descriptor or -errno. Any thread may make the calls.
 */

#include <stddef.h>
#include <stdint.h>

struct disk {
    int (*make_folder)(const struct disk *disk, int dir, const char *name);
    int (*open_folder)(const struct disk *disk, int dir, const char *name);
    /* Makes a file that bypasses the page cache, if the file system can do that. */
    int (*create)(const struct disk *disk, int dir, const char *name);
    /* Writes all bytes. bytes, offset and n_bytes: aligned to DISK_ALIGN_BYTES. */
    int (*write)(const struct disk *disk, int fd, const void *bytes, size_t n_bytes, uint64_t offset);
    int (*truncate)(const struct disk *disk, int fd, uint64_t n_bytes);
    int (*sync)(const struct disk *disk, int fd); /* fd: a file or a folder */
    int (*rename)(const struct disk *disk, int dir, const char *from, const char *to);
    int (*exchange)(const struct disk *disk, int dir, const char *one, const char *other);
    /* Removes a folder and its files. Return: 0, -ENOENT if the folder does not exist, or another -errno. */
    int (*remove_folder)(const struct disk *disk, int dir, const char *name);
};

enum { DISK_ALIGN_BYTES = 4096 };

extern const struct disk disk_system;
