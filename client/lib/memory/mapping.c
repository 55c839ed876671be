/* SPDX-License-Identifier: Apache-2.0 */

/* Mappings of the daemon's shared memory. Each mapping keeps its descriptor. */

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/lib/memory/mapping.h"
#include "core/base/base.h"
#include "core/base/huge-pages.h"

int mapping_check(int fd, uint64_t offset_bytes, uint64_t n_bytes)
{
    int seals = fcntl(fd, F_GET_SEALS);
    struct stat st;

    if (seals < 0 || fstat(fd, &st) < 0)
        return -errno;
    if (!(seals & F_SEAL_SHRINK) || offset_bytes > (uint64_t)st.st_size ||
        n_bytes > (uint64_t)st.st_size - offset_bytes)
        return -EPROTO;
    return 0;
}

/*
 * Finds addresses for n_bytes (a multiple of the page size) that start at a multiple of HUGE_PAGE_BYTES. Return:
 * MAP_FAILED if there are no such addresses.
 */
static uint8_t *find_addresses(size_t n_bytes)
{
    uint8_t *area =
        mmap(NULL, n_bytes + HUGE_PAGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t before;

    if (area == MAP_FAILED)
        return MAP_FAILED;
    before = round_up((uintptr_t)area, HUGE_PAGE_BYTES) - (uintptr_t)area;
    if (before > 0)
        munmap(area, before);
    munmap(area + before + n_bytes, HUGE_PAGE_BYTES - before);
    return area + before;
}

/* Aligns the mapping, so that the daemon's huge pages are huge in this process too. */
int mapping_init(struct mapping *mapping, int fd, size_t n_bytes, int protection)
{
    size_t whole = round_up(n_bytes, (size_t)sysconf(_SC_PAGESIZE));
    uint8_t *place = n_bytes < HUGE_PAGE_BYTES ? NULL : find_addresses(whole);
    void *base = MAP_FAILED;
    int r = place == MAP_FAILED ? -ENOMEM : mapping_check(fd, 0, n_bytes);

    if (r == 0) {
        base = mmap(place, n_bytes, protection, MAP_SHARED | (place ? MAP_FIXED : 0), fd, 0);
        r = base == MAP_FAILED ? -errno : 0;
    }
    if (r < 0) {
        if (place && place != MAP_FAILED)
            munmap(place, whole);
        close(fd);
        return r;
    }
    *mapping = (struct mapping){.base = base, .n_bytes = n_bytes, .fd = fd};
    return 0;
}

int mapping_reserve(struct mapping *mapping, int fd, size_t n_bytes)
{
    int r = mapping_check(fd, 0, n_bytes);
    void *base;

    mapping->fd = fd;
    if (r < 0)
        return r;
    base = mmap(NULL, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return -errno;
    mapping->base = base;
    mapping->n_bytes = n_bytes;
    return 0;
}

void mapping_deinit(struct mapping *mapping)
{
    if (mapping->base)
        munmap(mapping->base, mapping->n_bytes);
    if (mapping->fd >= 0)
        close(mapping->fd);
    *mapping = MAPPING_NULL;
}
