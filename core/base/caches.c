/* SPDX-License-Identifier: Apache-2.0 */

/* Reads the sizes of the CPU's caches from the kernel, because sysconf() of the C library can be wrong: it returns 320
 * MiB on a guest whose kernel says 32 MiB. */

#include "core/base/caches.h"

#include <limits.h>
#include <stdio.h>

#include "core/base/base.h"

#define USUAL_BYTES ((size_t)16 << 20)

enum { WORD_BYTES = 32 };

/* Reads the first word of a file that describes a cache. word is "" if the file has none. */
static void read_word(const char *folder, unsigned index, const char *name, char word[WORD_BYTES])
{
    char path[PATH_MAX];
    FILE *file;

    *word = '\0';
    snprintf(path, sizeof(path), "%s/index%u/%s", folder, index, name);
    file = fopen(path, "re");
    if (!file)
        return;
    if (fscanf(file, "%31s", word) != 1)
        *word = '\0';
    fclose(file);
}

/* Return: the size of the cache in bytes; 0 if it does not exist or caches only instructions. */
static size_t bytes_of(const char *folder, unsigned index)
{
    char type[WORD_BYTES], size[WORD_BYTES], unit = 0;
    size_t n = 0;

    read_word(folder, index, "type", type);
    read_word(folder, index, "size", size);
    if (*type == 'I' || sscanf(size, "%zu%c", &n, &unit) < 1)
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
