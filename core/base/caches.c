/* SPDX-License-Identifier: Apache-2.0 */

/* How large the CPU's caches are. The C library's sysconf() says 320 MiB on a guest whose kernel says 32. */

#include "core/base/caches.h"

#include <limits.h>
#include <stdio.h>

#include "core/base/base.h"

#define USUAL_BYTES ((size_t)16 << 20)

/* Bytes of the cache that a folder describes; 0: none, or one of instructions alone. */
static size_t bytes_of(const char *folder, unsigned index)
{
    char path[PATH_MAX], type[16] = "", unit = 0;
    size_t n = 0;
    FILE *file;

    snprintf(path, sizeof(path), "%s/index%u/type", folder, index);
    file = fopen(path, "re");
    if (!file)
        return 0;
    if (fscanf(file, "%15s", type) != 1)
        *type = '\0';
    fclose(file);
    snprintf(path, sizeof(path), "%s/index%u/size", folder, index);
    file = fopen(path, "re");
    if (!file)
        return 0;
    if (fscanf(file, "%zu%c", &n, &unit) < 1)
        n = 0;
    fclose(file);
    if (*type == 'I')
        return 0;
    return unit == 'K' ? n << 10 : unit == 'M' ? n << 20 : n;
}

size_t caches_bytes_in(const char *folder)
{
    enum { MAX_CACHES = 16 };
    size_t largest = 0;

    for (unsigned i = 0; i < MAX_CACHES; i++)
        largest = MAX(largest, bytes_of(folder, i));
    return largest;
}

size_t caches_last_level_bytes(void)
{
    size_t n_bytes = caches_bytes_in("/sys/devices/system/cpu/cpu0/cache");

    return n_bytes > 0 ? n_bytes : USUAL_BYTES;
}
