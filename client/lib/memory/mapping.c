/* SPDX-License-Identifier: Apache-2.0 */

/* Mappings of the daemon's shared memory, each with the descriptor that it was made from. */

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/lib/memory/mapping.h"

int mapping_init(struct mapping *mapping, int fd, size_t n_bytes, int protection)
{
    void *base = mmap(NULL, n_bytes, protection, MAP_SHARED, fd, 0);

    if (base == MAP_FAILED) {
        int r = -errno;

        close(fd);
        return r;
    }
    *mapping = (struct mapping){.base = base, .n_bytes = n_bytes, .fd = fd};
    return 0;
}

int mapping_reserve(struct mapping *mapping, int fd, size_t n_bytes)
{
    void *base = mmap(NULL, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    mapping->fd = fd;
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
