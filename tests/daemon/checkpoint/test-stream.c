/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A file that is written as a stream. Tests sizes near the buffer size and the alignment, and a failure of each call.
 */

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "daemon/checkpoint/disk.h"
#include "daemon/checkpoint/stream.h"
#include "tests/daemon/checkpoint/sample.h"
#include "tests/group.h"
#include "tests/programs/held.h"
#include "tests/tiers.h"

enum { BUFFER_BYTES = 4 << 20, N_BUFFERS = 4, MAX_BYTES = 2 * N_BUFFERS * BUFFER_BYTES };

static char scratch[64];
static int dir;
static size_t n_open;
static uint8_t *bytes;
static struct stream_buffers *buffers;

static int setup(void **state)
{
    (void)state;
    n_open = count_fds();
    scratch_new(scratch);
    dir = open(scratch, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bytes = malloc(MAX_BYTES);
    for (size_t i = 0; i < MAX_BYTES; i++)
        bytes[i] = (uint8_t)(i * 2654435761u >> 13);
    buffers = stream_buffers_new();
    return dir < 0 || !buffers ? -1 : 0;
}

static int teardown(void **state)
{
    (void)state;
    free(bytes);
    stream_buffers_free(buffers);
    close(dir);
    scratch_remove(scratch);
    return count_fds() == n_open ? 0 : -1;
}

static void check_file(const char *name, size_t n_bytes, const struct file_hash *hash)
{
    uint8_t *read_bytes = malloc(n_bytes + 1);
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC);
    char text[HASH_TEXT_BYTES];

    assert_int_equal(read(fd, read_bytes, n_bytes + 1), n_bytes);
    assert_memory_equal(read_bytes, bytes, n_bytes);
    hash_text(text, bytes, n_bytes);
    assert_string_equal(hash->whole, text);
    assert_int_equal(hash->n_blocks, div_round_up(n_bytes, HASH_BLOCK_BYTES));
    close(fd);
    free(read_bytes);
}

/* Writes a file of n_bytes, in pieces of `piece` bytes. */
static int write_file(const struct disk *disk, size_t n_bytes, size_t piece, struct file_hash *hash)
{
    struct stream *stream = NULL;
    int r = stream_open(&stream, buffers, disk, dir, "file", n_bytes);

    if (r < 0)
        return r;
    for (size_t at = 0; at < n_bytes; at += piece)
        stream_put(stream, bytes + at, MIN(piece, n_bytes - at));
    return stream_close(stream, hash);
}

static void check_size(const struct disk *disk, size_t n_bytes, size_t piece)
{
    struct file_hash hash = {0};

    assert_int_equal(write_file(disk, n_bytes, piece, &hash), 0);
    check_file("file", n_bytes, &hash);
    file_hash_deinit(&hash);
    assert_int_equal(unlinkat(dir, "file", 0), 0);
}

static void test_sizes(void **state)
{
    static const size_t sizes[] = {0,
                                   1,
                                   DISK_ALIGN_BYTES - 1,
                                   DISK_ALIGN_BYTES,
                                   DISK_ALIGN_BYTES + 1,
                                   BUFFER_BYTES - 1,
                                   BUFFER_BYTES,
                                   BUFFER_BYTES + 1,
                                   BUFFER_BYTES + DISK_ALIGN_BYTES,
                                   2 * BUFFER_BYTES,
                                   N_BUFFERS * BUFFER_BYTES - 1,
                                   N_BUFFERS * BUFFER_BYTES,
                                   N_BUFFERS * BUFFER_BYTES + 1,
                                   MAX_BYTES};
    static const size_t pieces[] = {MAX_BYTES, 1000003, BUFFER_BYTES / 2};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
        for (size_t k = 0; k < tests_some(ARRAY_SIZE(pieces)); k++)
            check_size(&disk_hasty, sizes[i], pieces[k]);
    check_size(&disk_hasty, 3000, 1);
    check_size(&disk_system, 0, 1);
    check_size(&disk_system, 5000, 77);
    check_size(&disk_system, BUFFER_BYTES + 1, MAX_BYTES);
}

/* The caller gives up: it closes the stream before all bytes were put. */
static void test_too_few(void **state)
{
    struct file_hash hash = {0};
    struct stream *stream = NULL;

    (void)state;
    assert_int_equal(stream_open(&stream, buffers, &disk_hasty, dir, "file", BUFFER_BYTES + 5), 0);
    stream_put(stream, bytes, BUFFER_BYTES + 4);
    assert_int_equal(stream_close(stream, &hash), -EPIPE);
    assert_null(hash.blocks);
}

static void test_exists(void **state)
{
    struct stream *stream = NULL;

    (void)state;
    close(openat(dir, "file", O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
    assert_int_equal(stream_open(&stream, buffers, &disk_system, dir, "file", 1), -EEXIST);
    assert_int_equal(unlinkat(dir, "file", 0), 0);
    assert_int_equal(symlinkat("other", dir, "file"), 0);
    assert_int_equal(stream_open(&stream, buffers, &disk_system, dir, "file", 1), -EEXIST);
    assert_null(stream);
}

/* ---- failures ------------------------------------------------------------------------------------------ */

/* A disk like disk_hasty. One call fails, and the calls after it are counted. */
struct failing {
    struct disk disk;
    unsigned n_calls, fails_at;
    int result;
    unsigned n_after;
};

static bool fails(const struct disk *disk)
{
    struct failing *f = (struct failing *)(uintptr_t)container_of(disk, const struct failing, disk);

    f->n_after += f->n_calls > f->fails_at;
    return f->n_calls++ == f->fails_at;
}

static int failing_create(const struct disk *disk, int folder, const char *name)
{
    return fails(disk) ? -EIO : disk_hasty.create(disk, folder, name);
}

static int failing_write(const struct disk *disk, int fd, const void *data, size_t n_bytes, uint64_t offset)
{
    return fails(disk) ? -ENOSPC : disk_hasty.write(disk, fd, data, n_bytes, offset);
}

static int failing_truncate(const struct disk *disk, int fd, uint64_t n_bytes)
{
    return fails(disk) ? -EFBIG : disk_hasty.truncate(disk, fd, n_bytes);
}

static int failing_sync(const struct disk *disk, int fd)
{
    return fails(disk) ? -EDQUOT : disk_hasty.sync(disk, fd);
}

/* Each call fails in turn: create, three writes, truncate, sync. The first failure is returned, and no call follows. */
static void test_failures(void **state)
{
    static const int results[] = {-EIO, -ENOSPC, -ENOSPC, -ENOSPC, -EFBIG, -EDQUOT, 0};

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(results); i++) {
        struct failing f = {.disk = disk_hasty, .fails_at = i};
        struct file_hash hash = {0};

        f.disk.create = failing_create;
        f.disk.write = failing_write;
        f.disk.truncate = failing_truncate;
        f.disk.sync = failing_sync;
        assert_int_equal(write_file(&f.disk, 2 * BUFFER_BYTES + 5, 1 << 20, &hash), results[i]);
        assert_int_equal(f.n_after, 0);
        assert_int_equal(hash.n_blocks > 0, results[i] == 0);
        file_hash_deinit(&hash);
        (void)unlinkat(dir, "file", 0);
    }
}

/* ---- the system's calls -------------------------------------------------------------------------------- */

static void test_disk_system(void **state)
{
    const struct disk *disk = &disk_system;
    int fd;

    (void)state;
    assert_int_equal(disk->make_folder(disk, dir, "a"), 0);
    assert_int_equal(disk->make_folder(disk, dir, "a"), -EEXIST);
    assert_int_equal(symlinkat("a", dir, "link"), 0);
    assert_int_equal(disk->open_folder(disk, dir, "link"), -ENOTDIR);
    assert_int_equal(disk->open_folder(disk, dir, "none"), -ENOENT);
    assert_int_equal(disk->remove_folder(disk, dir, "link"), -ENOTDIR);
    assert_int_equal(disk->remove_folder(disk, dir, "none"), -ENOENT);
    fd = disk->open_folder(disk, dir, "a");
    assert_true(fd >= 0);
    close(openat(fd, "file", O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
    assert_int_equal(disk->sync(disk, fd), 0);
    assert_int_equal(disk->make_folder(disk, dir, "b"), 0);
    assert_int_equal(disk->rename(disk, dir, "b", "a"), -ENOTEMPTY);
    assert_int_equal(disk->exchange(disk, dir, "b", "a"), 0);
    assert_int_equal(disk->exchange(disk, dir, "b", "none"), -ENOENT);
    assert_int_equal(faccessat(dir, "b/file", F_OK, 0), 0);
    assert_int_equal(disk->rename(disk, dir, "b", "a"), 0);
    assert_int_equal(mkdirat(fd, "inside", 0777), 0);
    assert_int_equal(disk->remove_folder(disk, dir, "a"), -EISDIR); /* the folder has a folder inside */
    assert_int_equal(unlinkat(fd, "inside", AT_REMOVEDIR), 0);
    assert_int_equal(disk->remove_folder(disk, dir, "a"), 0);
    close(fd);
}

TEST_GROUP(stream)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_sizes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_too_few, setup, teardown),
        cmocka_unit_test_setup_teardown(test_exists, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failures, setup, teardown),
        cmocka_unit_test_setup_teardown(test_disk_system, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
