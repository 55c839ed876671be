/* SPDX-License-Identifier: Apache-2.0 */

/* The system calls of a checkpoint. */

#include "daemon/checkpoint/disk.h"

#include <assert.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"

/* The action "error" of a failpoint means a full disk. */
static int fails(const char *name)
{
    return failpoint(name) < 0 ? -ENOSPC : 0;
}

static int make_folder(const struct disk *disk, int dir, const char *name)
{
    int r = fails("disk.make_folder");

    (void)disk;
    return r < 0 ? r : mkdirat(dir, name, 0777) < 0 ? -errno : 0;
}

static int open_folder(const struct disk *disk, int dir, const char *name)
{
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    (void)disk;
    return fd < 0 ? -errno : fd;
}

static int create(const struct disk *disk, int dir, const char *name)
{
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, r = fails("disk.create"), fd;

    (void)disk;
    if (r < 0)
        return r;
    fd = openat(dir, name, flags | O_DIRECT, 0666);
    if (fd < 0 && errno == EINVAL) { /* the failed call may have created the file */
        (void)unlinkat(dir, name, 0);
        fd = openat(dir, name, flags, 0666);
    }
    return fd < 0 ? -errno : fd;
}

static int write_all(const struct disk *disk, int fd, const void *bytes, size_t n_bytes, uint64_t offset)
{
    const uint8_t *at = bytes;
    int r = fails("disk.write");

    assert((uintptr_t)bytes % DISK_ALIGN_BYTES == 0);
    assert(n_bytes % DISK_ALIGN_BYTES == 0);
    assert(offset % DISK_ALIGN_BYTES == 0);
    (void)disk;
    if (r < 0)
        return r;
    while (n_bytes > 0) {
        ssize_t n = pwrite(fd, at, n_bytes, (off_t)offset);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        at += n;
        offset += (uint64_t)n;
        n_bytes -= (size_t)n;
    }
    return 0;
}

static int truncate_to(const struct disk *disk, int fd, uint64_t n_bytes)
{
    int r = fails("disk.truncate");

    (void)disk;
    return r < 0 ? r : ftruncate(fd, (off_t)n_bytes) < 0 ? -errno : 0;
}

static int sync_to_disk(const struct disk *disk, int fd)
{
    int r = fails("disk.sync");

    (void)disk;
    return r < 0 ? r : fsync(fd) < 0 ? -errno : 0;
}

static int rename_in(const struct disk *disk, int dir, const char *from, const char *to)
{
    int r = fails("disk.rename");

    (void)disk;
    return r < 0 ? r : renameat(dir, from, dir, to) < 0 ? -errno : 0;
}

static int exchange(const struct disk *disk, int dir, const char *one, const char *other)
{
    int r = fails("disk.exchange");

    (void)disk;
    return r < 0 ? r : renameat2(dir, one, dir, other, RENAME_EXCHANGE) < 0 ? -errno : 0;
}

/* Removes all files of a folder, and closes its stream. Return: 0 or -errno. */
static int remove_files(DIR *stream)
{
    const struct dirent *entry;
    int r = 0;

    while (r == 0 && (errno = 0, entry = readdir(stream)))
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
            unlinkat(dirfd(stream), entry->d_name, 0) < 0)
            r = -errno;
    closedir(stream);
    return r;
}

static int remove_folder(const struct disk *disk, int dir, const char *name)
{
    int r = fails("disk.remove_folder"), fd = r < 0 ? r : open_folder(disk, dir, name);
    DIR *stream;

    if (fd < 0)
        return fd;
    stream = fdopendir(fd);
    if (!stream) {
        r = -errno;
        close(fd);
        return r;
    }
    r = remove_files(stream);
    return r < 0 ? r : unlinkat(dir, name, AT_REMOVEDIR) < 0 ? -errno : 0;
}

const struct disk disk_system = {
    .make_folder = make_folder,
    .open_folder = open_folder,
    .create = create,
    .write = write_all,
    .truncate = truncate_to,
    .sync = sync_to_disk,
    .rename = rename_in,
    .exchange = exchange,
    .remove_folder = remove_folder,
};
