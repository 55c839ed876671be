/* SPDX-License-Identifier: Apache-2.0 */

/* Shared segments: sealed memfds, their mappings, and the pages in them. */

#include "core/base/segment.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "core/base/failpoint.h"
#include "core/base/huge-pages.h"
#include "core/base/keep.h"

size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

enum { N_SKEWS = 61 }; /* a prime, so that successive segments differ */

#define SKEW_BYTES HUGE_PAGE_BYTES /* the least that keeps huge pages aligned */
#define AREA_EXTRA_BYTES (SKEW_BYTES * N_SKEWS + HUGE_PAGE_BYTES)

/*
 * Maps the segment at an offset that depends on its descriptor, because mappings that follow each other tend to be a
 * multiple of 2^27 bytes apart: segments are large and alike. On Zen cores streams at such distances evict each other
 * from the first-level cache: an AdamW update over 64 Mi elements takes 137 ms instead of 22 ms.
 */
static int segment_map(struct segment *segment, int fd, size_t n_bytes)
{
    uint8_t *area =
        mmap(NULL, n_bytes + AREA_EXTRA_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uint8_t *map;

    assert(fd >= 0);
    if (area == MAP_FAILED)
        return -errno;
    map = (uint8_t *)round_up((uintptr_t)area, HUGE_PAGE_BYTES) + (size_t)(fd % N_SKEWS) * SKEW_BYTES;
    assert((size_t)(map - area) <= AREA_EXTRA_BYTES); /* MAP_FIXED replaces whatever lies beyond the area */
    if (mmap(map, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) == MAP_FAILED) {
        int r = -errno;

        munmap(area, n_bytes + AREA_EXTRA_BYTES);
        return r;
    }
    segment->area = area;
    segment->map = map;
    return 0;
}

static uint64_t mark;

void segments_mark(uint64_t number)
{
    mark = number;
}

/* Prints the name that /proc shows: "zerod.ring.0", followed by the mark if there is one. */
static void print_name(char *dst, size_t size, const char *name, bool marked)
{
    if (marked && mark)
        snprintf(dst, size, "zerod.%s.%016" PRIx64, name, mark);
    else
        snprintf(dst, size, "zerod.%s", name);
}

static int make_memfd(const char *name, size_t n_bytes, mode_t mode, bool marked)
{
    _cleanup_close_ int fd = -1;
    char full[128];

    print_name(full, sizeof(full), name, marked);
    fd = memfd_create(full, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -errno;
    /* Clients get descriptors that are opened through /proc, so the mode applies to them. */
    if (fchmod(fd, mode) < 0 || ftruncate(fd, (off_t)n_bytes) < 0)
        return -errno;
    return steal_fd(&fd);
}

/* Maps and seals a memfd, and takes over the descriptor. seals: seals to add to those against resizing. Sealing comes
 * last, because one of the seals forbids our own mapping. */
static int take_memory(struct segment *segment, int memfd, size_t n_bytes, int seals)
{
    _cleanup_close_ int fd = memfd;
    int r = segment_map(segment, fd, n_bytes);

    if (r < 0)
        return r;
    segment->n_bytes = n_bytes;
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | seals) < 0) {
        r = -errno;
        segment_deinit(segment);
        return r;
    }
    segment->fd = steal_fd(&fd);
    return 0;
}

static int make_sealed(struct segment *segment, const char *name, size_t n_bytes, int seals)
{
    int fd;

    *segment = SEGMENT_NULL;
    if (n_bytes == 0)
        return 0;
    if (n_bytes > PTRDIFF_MAX - page_size())
        return -EOVERFLOW;
    n_bytes = round_up(n_bytes, page_size());
    fd = make_memfd(name, n_bytes, 0600, false);
    return fd < 0 ? fd : take_memory(segment, fd, n_bytes, seals);
}

int segment_init(struct segment *segment, const char *name, size_t n_bytes)
{
    return make_sealed(segment, name, n_bytes, 0);
}

int segment_init_published(struct segment *segment, const char *name, size_t n_bytes)
{
    return make_sealed(segment, name, n_bytes, F_SEAL_FUTURE_WRITE);
}

/* ---- kept ---------------------------------------------------------------------------------------------- */

/* Names of freed segments that are still kept. */
static char (*freed)[SEGMENT_NAME_BYTES];
static size_t n_freed;

void segments_forget(void)
{
    for (size_t i = 0; i < n_freed; i++)
        keep_forget(freed[i]);
    free(freed);
    freed = NULL;
    n_freed = 0;
}

void segments_stay_kept(void)
{
    free(freed);
    freed = NULL;
    n_freed = 0;
}

void segment_unkeep(const char *name)
{
    char(*more)[SEGMENT_NAME_BYTES] = realloc(freed, (n_freed + 1) * sizeof(*freed));

    assert(strlen(name) < SEGMENT_NAME_BYTES); /* a name that is cut could equal another segment's */
    if (!more) {
        keep_forget(name);
        return;
    }
    freed = more;
    snprintf(freed[n_freed++], sizeof(*freed), "%s", name);
}

static bool has_name(int fd, const char *name)
{
    char path[32], link[160] = "", full[128], expected[160];

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    print_name(full, sizeof(full), name, true);
    snprintf(expected, sizeof(expected), "/memfd:%s (deleted)", full);
    return readlink(path, link, sizeof(link) - 1) > 0 && strcmp(link, expected) == 0;
}

/* A page after the contents identifies the segment. The format is fixed, because later daemons read it. */
struct stamp {
    uint64_t mark, n_bytes, name; /* name: hash of the segment's name */
    uint64_t sum;                 /* hash of the fields above */
};
_Static_assert(sizeof(struct stamp) == 4 * sizeof(uint64_t), "no padding is hashed, and later daemons read the same");

static struct stamp make_stamp(const char *name, size_t n_bytes)
{
    struct stamp stamp = {.mark = mark, .n_bytes = n_bytes, .name = XXH3_64bits(name, strlen(name))};

    stamp.sum = XXH3_64bits(&stamp, offsetof(struct stamp, sum));
    return stamp;
}

static int put_stamp(int fd, const char *name, size_t n_bytes)
{
    struct stamp stamp = make_stamp(name, n_bytes);
    ssize_t n = pwrite(fd, &stamp, sizeof(stamp), (off_t)n_bytes);

    return n == sizeof(stamp) ? 0 : n < 0 && errno != ENOSPC ? -errno : -ENOMEM;
}

static bool has_stamp(int fd, const char *name, size_t n_bytes)
{
    struct stamp stamp = make_stamp(name, n_bytes), found;

    return pread(fd, &found, sizeof(found), (off_t)n_bytes) == sizeof(found) &&
           memcmp(&found, &stamp, sizeof(stamp)) == 0;
}

/* Maps the memory of an earlier daemon, and takes over the descriptor. */
static int take_found_memory(struct segment *segment, const char *name, int memfd, size_t n_bytes)
{
    enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };
    _cleanup_close_ int fd = memfd;
    int seals = fcntl(fd, F_GET_SEALS), r;
    bool stamped;
    struct stat st;

    if (fstat(fd, &st) < 0)
        return -errno;
    stamped = (size_t)st.st_size == n_bytes + page_size();
    if ((!stamped && (size_t)st.st_size != n_bytes) || seals != SEALS || !has_name(fd, name))
        return -EBADFD;
    if (stamped && !has_stamp(fd, name, n_bytes))
        return -EUCLEAN;
    r = segment_map(segment, fd, n_bytes);
    if (r < 0)
        return r;
    segment->n_bytes = n_bytes;
    segment->fd = steal_fd(&fd);
    segment->found = true;
    return 0;
}

/* Forgets a freed segment when its name is used again, because only names distinguish kept segments. */
static void forget_now(const char *name)
{
    for (size_t i = 0; i < n_freed; i++)
        if (strcmp(freed[i], name) == 0) {
            keep_forget(name);
            memmove(&freed[i], &freed[i + 1], (--n_freed - i) * sizeof(*freed));
            return;
        }
}

static bool must_be_found;
static char missing[SEGMENT_NAME_BYTES];

void segments_must_be_found(bool must)
{
    must_be_found = must;
    *missing = '\0';
}

const char *segment_missing(void)
{
    return missing;
}

static void note_missing(const char *name)
{
    if (must_be_found && !*missing)
        snprintf(missing, sizeof(missing), "%s", name);
}

int segment_keep(const char *name, int fd)
{
    forget_now(name);
    return keep_put(name, fd);
}

int segment_find(const char *name)
{
    int fd = keep_take(name);

    if (fd < 0)
        note_missing(name);
    return fd < 0 ? -ENODATA : fd;
}

struct kept_options {
    mode_t mode;
    bool must; /* a missing segment is an error, and no new one is made */
    bool stamped;
};

static int make_anew(struct segment *segment, const char *name, size_t n_bytes, const struct kept_options *options)
{
    int fd = make_memfd(name, n_bytes + (options->stamped ? page_size() : 0), options->mode, true);
    int r = fd < 0 ? fd : take_memory(segment, fd, n_bytes, 0);

    if (r == 0 && options->stamped)
        r = put_stamp(segment->fd, name, n_bytes);
    return r == 0 ? segment_keep(name, segment->fd) : r;
}

static int make_kept(struct segment *segment, const char *name, size_t n_bytes, const struct kept_options *options)
{
    int fd, r;

    assert(strlen(name) < sizeof(segment->kept));
    *segment = SEGMENT_NULL;
    if (n_bytes == 0)
        return 0;
    if (n_bytes > PTRDIFF_MAX - 2 * page_size())
        return -EOVERFLOW;
    n_bytes = round_up(n_bytes, page_size());
    fd = keep_take(name);
    if (fd >= 0)
        r = take_found_memory(segment, name, fd, n_bytes);
    else
        r = options->must ? -ENODATA : make_anew(segment, name, n_bytes, options);
    if (r < 0) {
        note_missing(name);
        segment_deinit(segment);
        return r;
    }
    snprintf(segment->kept, sizeof(segment->kept), "%s", name);
    return 0;
}

int segment_init_kept(struct segment *segment, const char *name, size_t n_bytes)
{
    const struct kept_options options = {.mode = 0600, .must = must_be_found, .stamped = true};

    return keep_is_on() ? make_kept(segment, name, n_bytes, &options) : segment_init(segment, name, n_bytes);
}

int segment_init_written_kept(struct segment *segment, const char *name, size_t n_bytes)
{
    const struct kept_options options = {.mode = 0600, .must = must_be_found};

    return keep_is_on() ? make_kept(segment, name, n_bytes, &options) : segment_init(segment, name, n_bytes);
}

int segment_init_published_kept(struct segment *segment, const char *name, size_t n_bytes)
{
    const struct kept_options options = {.mode = 0400, .must = must_be_found, .stamped = true};

    return keep_is_on() ? make_kept(segment, name, n_bytes, &options) : segment_init_published(segment, name, n_bytes);
}

int segment_init_published_later(struct segment *segment, const char *name, size_t n_bytes)
{
    const struct kept_options options = {.mode = 0400, .stamped = true};

    return keep_is_on() ? make_kept(segment, name, n_bytes, &options) : segment_init_published(segment, name, n_bytes);
}

void segment_release_name(struct segment *segment)
{
    if (*segment->kept)
        segment_unkeep(segment->kept);
    *segment->kept = '\0';
}

void segment_deinit(struct segment *segment)
{
    segment_release_name(segment);
    assert(!segment->area || segment->n_bytes > 0);
    if (segment->area)
        munmap(segment->area, segment->n_bytes + AREA_EXTRA_BYTES);
    if (segment->fd >= 0)
        close(segment->fd);
    *segment = SEGMENT_NULL;
}

void segment_close_descriptor(struct segment *segment)
{
    if (segment->fd >= 0)
        close(steal_fd(&segment->fd));
}

/*
 * Touches the part's whole huge pages before fallocate(), which ignores madvise(). Leaves out huge pages that the part
 * covers only partly, so that the part has no more memory than it asks for.
 */
static void touch_huge(const struct segment *segment, size_t offset_bytes, size_t n_bytes)
{
    size_t begin = round_up(offset_bytes, HUGE_PAGE_BYTES);
    size_t end = (offset_bytes + n_bytes) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;

    if (begin < end && huge_pages_on_advice() && madvise(segment->map + begin, end - begin, MADV_HUGEPAGE) == 0)
        (void)madvise(segment->map + begin, end - begin, MADV_POPULATE_WRITE);
}

int segment_reserve(const struct segment *segment, size_t offset_bytes, size_t n_bytes)
{
    int r;

    if (n_bytes == 0)
        return 0;
    r = failpoint("reserve");
    if (r < 0)
        return r;
    touch_huge(segment, offset_bytes, n_bytes);
    do
        r = fallocate(segment->fd, 0, (off_t)offset_bytes, (off_t)n_bytes);
    while (r < 0 && errno == EINTR);
    if (r < 0)
        return errno == ENOSPC ? -ENOMEM : -errno;
    /* Maps the pages now, on a worker, because the first step would otherwise have a page fault for each. Kernels
     * before 5.14 cannot do this. */
    (void)madvise(segment->map + offset_bytes, n_bytes, MADV_POPULATE_WRITE);
    return 0;
}

/* A worker zeroes this much in about 20 ms: short enough to share a core, long enough for few pieces. */
#define RESERVE_PIECE_BYTES (UINT64_C(64) << 20)

uint32_t segments_n_pieces(const struct segment *const *segments, size_t n_segments)
{
    uint64_t n = 0;

    for (size_t i = 0; i < n_segments; i++)
        n += segments[i] ? div_round_up(segments[i]->n_bytes, RESERVE_PIECE_BYTES) : 0;
    return (uint32_t)n;
}

int segments_reserve(const struct segment *const *segments, size_t n_segments, uint32_t piece)
{
    for (size_t i = 0; i < n_segments; i++) {
        uint64_t n = segments[i] ? div_round_up(segments[i]->n_bytes, RESERVE_PIECE_BYTES) : 0;

        if (piece < n) {
            uint64_t offset = piece * RESERVE_PIECE_BYTES;

            return segment_reserve(segments[i], offset, MIN(RESERVE_PIECE_BYTES, segments[i]->n_bytes - offset));
        }
        piece -= (uint32_t)n;
    }
    return 0;
}

void segment_punch(const struct segment *segment, size_t offset_bytes, size_t n_bytes)
{
    assert(offset_bytes <= segment->n_bytes);
    assert(n_bytes <= segment->n_bytes - offset_bytes); /* what follows the segment is other memory */
    if (n_bytes > 0 && segment->fd < 0)
        (void)madvise(segment->map + offset_bytes, n_bytes, MADV_REMOVE);
    else if (n_bytes > 0)
        (void)fallocate(segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset_bytes, (off_t)n_bytes);
}

static int segment_open(const struct segment *segment, int flags)
{
    char path[32];
    int fd;

    snprintf(path, sizeof(path), "/proc/self/fd/%d", segment->fd);
    fd = open(path, flags | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

int segment_open_ro(const struct segment *segment)
{
    return segment_open(segment, O_RDONLY);
}

int segment_open_rw(const struct segment *segment)
{
    return segment_open(segment, O_RDWR);
}
