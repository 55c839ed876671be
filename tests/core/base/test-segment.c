/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A client cannot resize a segment, nor write to one that it opened read-only. If memory is short, segment_reserve()
 * returns an error. The test replaces fallocate(), because a real shortage would kill a process instead of returning an
 * error.
 */

#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/segment.h"
#include "tests/group.h"
#include "tests/programs/held.h"

static int fallocate_error;         /* what the next calls fail with */
static unsigned n_fallocate_errors; /* how many calls fail */

/* The linker takes this one instead of libc's. */
int fallocate(int fd, int mode, off_t offset, off_t n_bytes)
{
    if (n_fallocate_errors > 0) {
        n_fallocate_errors--;
        errno = fallocate_error;
        return -1;
    }
    return (int)syscall(SYS_fallocate, fd, mode, offset, n_bytes);
}

static uint64_t held_bytes(const struct segment *segment)
{
    struct stat st;

    assert_int_equal(fstat(segment->fd, &st), 0);
    return (uint64_t)st.st_blocks * 512;
}

/* The number of open descriptors before a test. Each test must close its descriptors and mappings. */
static size_t n_open;

static int setup(void **state)
{
    (void)state;
    n_fallocate_errors = 0;
    n_open = count_fds();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return count_fds() == n_open && count_maps("memfd:zerod.") == 0 ? 0 : -1;
}

static struct segment make(const char *name, size_t n_bytes)
{
    struct segment segment;

    assert_int_equal(segment_init(&segment, name, n_bytes), 0);
    return segment;
}

static void assert_all(const uint8_t *bytes, size_t n_bytes, uint8_t value)
{
    for (size_t i = 0; i < n_bytes; i++)
        assert_int_equal(bytes[i], value);
}

/* ---- making one ---------------------------------------------------------------------------------------- */

static void test_name_and_size(void **state)
{
    const size_t page = page_size();
    struct segment one = make("ring.0", 1), whole = make("ring.1", 3 * page), more = make("ring.10", 3 * page + 1);
    struct stat st;

    (void)state;
    assert_int_equal(count_maps("/memfd:zerod.ring.0 "), 1);
    assert_int_equal(count_maps("/memfd:zerod.ring.1 "), 1);
    assert_int_equal(count_maps("/memfd:zerod.ring.10 "), 1);
    assert_int_equal(one.n_bytes, page);
    assert_int_equal(whole.n_bytes, 3 * page);
    assert_int_equal(more.n_bytes, 4 * page);
    assert_int_equal(fstat(more.fd, &st), 0);
    assert_int_equal(st.st_size, 4 * page);
    assert_int_equal(st.st_mode & 07777, 0600); /* no other user opens it through /proc */
    assert_int_equal(fcntl(more.fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    assert_int_equal(held_bytes(&more), 0);
    more.map[4 * page - 1] = 1; /* the last byte exists */
    segment_deinit(&one);
    segment_deinit(&whole);
    segment_deinit(&more);
}

static void test_empty(void **state)
{
    struct segment segment = make("weights", 0);

    (void)state;
    assert_int_equal(segment.fd, -1);
    assert_int_equal(segment.n_bytes, 0);
    assert_null(segment.map);
    assert_int_equal(segment_reserve(&segment, 0, 0), 0);
    segment_punch(&segment, 0, 0);
    segment_deinit(&segment);
    segment_deinit(&segment); /* a second call does nothing */
    assert_int_equal(segment.fd, -1);
}

static void test_deinit(void **state)
{
    struct segment segment = make("state", 1 << 20);
    int fd = segment.fd;

    (void)state;
    segment_deinit(&segment);
    assert_int_equal(fcntl(fd, F_GETFD), -1);
    assert_int_equal(segment.fd, -1);
    assert_null(segment.map);
    assert_null(segment.area);
    assert_int_equal(segment.n_bytes, 0);
}

static void test_seals(void **state)
{
    struct segment segment = make("state", 2 * page_size());
    int client = segment_open_rw(&segment), fds[] = {segment.fd, client};

    (void)state;
    assert_true(client >= 0);
    assert_int_equal(fcntl(segment.fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
        assert_int_equal(ftruncate(fds[i], (off_t)page_size()), -1);
        assert_int_equal(errno, EPERM);
        assert_int_equal(ftruncate(fds[i], (off_t)(3 * page_size())), -1);
        assert_int_equal(errno, EPERM);
        assert_int_equal(fcntl(fds[i], F_ADD_SEALS, F_SEAL_WRITE), -1); /* or a client could stop the daemon's writes */
        assert_int_equal(errno, EPERM);
    }
    close(client);
    segment_deinit(&segment);
}

/* Only the first mapping can write to a published segment. */
static void test_published(void **state)
{
    const size_t page = page_size();
    struct segment segment;
    uint8_t byte = 1;
    int client;

    (void)state;
    assert_int_equal(segment_init_published(&segment, "weights", 2 * page), 0);
    assert_int_equal(fcntl(segment.fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE);
    assert_int_equal(segment_reserve(&segment, 0, 2 * page), 0);
    assert_int_equal(held_bytes(&segment), 2 * page);
    memset(segment.map, 0x5a, 2 * page);

    client = segment_open_rw(&segment); /* which any process of the same uid can do */
    assert_true(client >= 0);
    assert_int_equal(pwrite(client, &byte, 1, 0), -1);
    assert_int_equal(errno, EPERM);
    assert_ptr_equal(mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, client, 0), MAP_FAILED);
    assert_int_equal(errno, EPERM);
    segment_punch(&segment, 0, page);
    assert_all(segment.map, 2 * page, 0x5a);
    close(client);
    segment_deinit(&segment);
}

static void test_init_fails(void **state)
{
    struct rlimit before, none = {0};
    struct segment segment;
    int r;

    (void)state;
    assert_int_equal(segment_init(&segment, "huge", SIZE_MAX), -EOVERFLOW);
    assert_int_equal(segment.fd, -1);
    assert_int_equal(segment_init(&segment, "huge", PTRDIFF_MAX), -EOVERFLOW);
    /* The file can have this size, but there are not enough addresses for the mapping. */
    assert_int_equal(segment_init(&segment, "huge", SIZE_MAX / 4), -ENOMEM);
    assert_int_equal(segment.fd, -1);
    assert_null(segment.map);
    segment_deinit(&segment);

    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none.rlim_max = before.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    r = segment_init(&segment, "state", 1);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(r, -EMFILE);
    assert_int_equal(segment.fd, -1);
}

/* ---- where it is mapped -------------------------------------------------------------------------------- */

/*
 * Streams that are a multiple of 2^27 bytes apart evict each other from the first-level cache, so each segment starts
 * at another offset.
 */
static void test_skew(void **state)
{
    const size_t n_bytes = (size_t)1 << 27;
    struct segment segments[8];

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(segments); i++) {
        segments[i] = make("state", n_bytes);
        assert_int_equal((uintptr_t)segments[i].map % page_size(), 0);
        assert_true(segments[i].map >= segments[i].area);
        for (size_t k = 0; k < i; k++) {
            uint64_t distance = (uintptr_t)segments[i].map - (uintptr_t)segments[k].map;

            assert_true(distance % n_bytes >= page_size());
            assert_true(segments[i].map - segments[i].area != segments[k].map - segments[k].area);
        }
    }
    for (size_t i = 0; i < ARRAY_SIZE(segments); i++)
        segment_deinit(&segments[i]);
}

static uint64_t address_space_bytes(void)
{
    FILE *file = fopen("/proc/self/statm", "re");
    uint64_t n_pages;

    assert_non_null(file);
    assert_int_equal(fscanf(file, "%" SCNu64, &n_pages), 1);
    fclose(file);
    return n_pages * page_size();
}

/* segment_deinit() also unmaps the addresses around the mapping. */
static void test_addresses_come_back(void **state)
{
    uint64_t before = address_space_bytes();
    struct segment segment;

    (void)state;
    for (unsigned i = 0; i < 200; i++) {
        segment = make("state", 1);
        segment_deinit(&segment);
    }
    assert_true(address_space_bytes() < before + (64 << 20));
}

/* ---- pages --------------------------------------------------------------------------------------------- */

static void test_reserve(void **state)
{
    const size_t page = page_size();
    struct segment segment = make("state", 8 * page);

    (void)state;
    assert_int_equal(segment_reserve(&segment, 2 * page, 3 * page), 0);
    assert_int_equal(held_bytes(&segment), 3 * page);
    assert_all(segment.map + 2 * page, 3 * page, 0);
    memset(segment.map + 2 * page, 0x5a, 3 * page);

    /* The next call keeps the written bytes. */
    assert_int_equal(segment_reserve(&segment, 0, 8 * page), 0);
    assert_int_equal(held_bytes(&segment), 8 * page);
    assert_all(segment.map, 2 * page, 0);
    assert_all(segment.map + 2 * page, 3 * page, 0x5a);
    assert_all(segment.map + 5 * page, 3 * page, 0);
    segment_deinit(&segment);
}

/* Huge pages must not make the reserved part larger than asked. */
static void test_reserve_whole_huge_pages(void **state)
{
    const size_t huge = (size_t)2 << 20, page = page_size();
    struct segment segment = make("state", 3 * huge + 5 * page);

    (void)state;
    assert_int_equal((uintptr_t)segment.map % huge, 0);
    assert_int_equal(segment_reserve(&segment, page, 2 * huge), 0);
    assert_int_equal(held_bytes(&segment), 2 * huge);
    assert_int_equal(segment_reserve(&segment, 0, segment.n_bytes), 0);
    assert_int_equal(held_bytes(&segment), segment.n_bytes);
    assert_all(segment.map, segment.n_bytes, 0);
    segment_deinit(&segment);
}

static void test_reserve_nothing(void **state)
{
    struct segment segment = make("state", page_size());

    (void)state;
    fallocate_error = EIO;
    n_fallocate_errors = 1;
    assert_int_equal(segment_reserve(&segment, 0, 0), 0); /* the kernel would return EINVAL */
    segment_punch(&segment, 0, 0);
    assert_int_equal(n_fallocate_errors, 1);
    segment_deinit(&segment);
}

static void test_reserve_fails(void **state)
{
    const size_t page = page_size();
    struct segment segment = make("state", 4 * page);
    static const int errors[][2] = {{ENOSPC, -ENOMEM}, {ENOMEM, -ENOMEM}, {EIO, -EIO}};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(errors); i++) {
        fallocate_error = errors[i][0];
        n_fallocate_errors = 1;
        assert_int_equal(segment_reserve(&segment, 0, 4 * page), errors[i][1]);
        assert_int_equal(held_bytes(&segment), 0); /* no page was allocated */
    }
    /* The segment is sealed, so a range beyond its end is refused. */
    assert_int_equal(segment_reserve(&segment, 3 * page, 2 * page), -EPERM);
    assert_int_equal(segment_reserve(&segment, 0, 4 * page), 0);
    assert_int_equal(held_bytes(&segment), 4 * page);
    segment_deinit(&segment);
}

static void test_reserve_is_interrupted(void **state)
{
    struct segment segment = make("state", 4 * page_size());

    (void)state;
    fallocate_error = EINTR;
    n_fallocate_errors = 3;
    assert_int_equal(segment_reserve(&segment, 0, segment.n_bytes), 0);
    assert_int_equal(n_fallocate_errors, 0);
    assert_int_equal(held_bytes(&segment), segment.n_bytes);
    segment_deinit(&segment);
}

static void test_punch(void **state)
{
    const size_t page = page_size();
    struct segment segment = make("overflow.0", 8 * page);
    struct stat st;

    (void)state;
    assert_int_equal(segment_reserve(&segment, 0, 8 * page), 0);
    memset(segment.map, 0x5a, 8 * page);
    segment_punch(&segment, 3 * page, 2 * page);
    assert_int_equal(held_bytes(&segment), 6 * page);
    segment_punch(&segment, 7 * page, page);
    assert_int_equal(held_bytes(&segment), 5 * page);
    assert_int_equal(fstat(segment.fd, &st), 0);
    assert_int_equal(st.st_size, 8 * page);

    assert_all(segment.map, 3 * page, 0x5a);
    assert_all(segment.map + 3 * page, 2 * page, 0);
    assert_all(segment.map + 5 * page, 2 * page, 0x5a);
    assert_all(segment.map + 7 * page, page, 0);
    segment_deinit(&segment);
}

/* ---- descriptors for clients --------------------------------------------------------------------------- */

static void test_read_only(void **state)
{
    const size_t page = page_size();
    struct segment segment = make("weights", 2 * page);
    int fd = segment_open_ro(&segment);
    uint8_t *map;

    (void)state;
    assert_true(fd >= 0 && fd != segment.fd);
    assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    assert_int_equal(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
    assert_ptr_equal(mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    assert_int_equal(errno, EACCES);
    assert_int_equal(pwrite(fd, "x", 1, 0), -1);
    assert_int_equal(errno, EBADF);
    assert_int_equal(syscall(SYS_fallocate, fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)page), -1);
    assert_int_equal(errno, EBADF);

    map = mmap(NULL, 2 * page, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(map, MAP_FAILED);
    assert_int_equal(mprotect(map, page, PROT_READ | PROT_WRITE), -1);
    assert_int_equal(errno, EACCES);
    segment.map[page + 7] = 42; /* the client maps the same pages, not a copy */
    assert_int_equal(map[page + 7], 42);

    /* The client's mapping outlives the segment. */
    segment_deinit(&segment);
    assert_int_equal(map[page + 7], 42);
    munmap(map, 2 * page);
    close(fd);
}

static void test_read_write(void **state)
{
    const size_t page = page_size();
    struct segment segment = make("ring.0", page);
    int fd = segment_open_rw(&segment);
    uint8_t *map;

    (void)state;
    assert_true(fd >= 0 && fd != segment.fd);
    assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    map = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(map, MAP_FAILED);
    map[5] = 17;
    assert_int_equal(segment.map[5], 17);
    munmap(map, page);
    close(fd);
    segment.map[5] = 18; /* closing the client's descriptor leaves the segment */
    segment_deinit(&segment);
}

static void test_no_descriptor_left(void **state)
{
    struct segment segment = make("ring.0", 1);
    struct rlimit before, none = {0};
    int ro, rw;

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none.rlim_max = before.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    ro = segment_open_ro(&segment);
    rw = segment_open_rw(&segment);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(ro, -EMFILE);
    assert_int_equal(rw, -EMFILE);
    segment_deinit(&segment);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

TEST_GROUP(segment)
{
    const struct CMUnitTest tests[] = {
        TEST(test_name_and_size),
        TEST(test_empty),
        TEST(test_deinit),
        TEST(test_seals),
        TEST(test_published),
        TEST(test_init_fails),
        TEST(test_skew),
        TEST(test_addresses_come_back),
        TEST(test_reserve),
        TEST(test_reserve_whole_huge_pages),
        TEST(test_reserve_nothing),
        TEST(test_reserve_fails),
        TEST(test_reserve_is_interrupted),
        TEST(test_punch),
        TEST(test_read_only),
        TEST(test_read_write),
        TEST(test_no_descriptor_left),
    };

    return cmocka_run_group_tests_name("segment", tests, NULL, NULL);
}
