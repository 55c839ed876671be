/* SPDX-License-Identifier: Apache-2.0 */

/* Reads the kernel's setting of huge pages for shared memory. */

#include "core/base/huge-pages.h"

#include <stdio.h>
#include <string.h>

#define MODE_FILE "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

/* Reads the word in brackets, as in "always within_size advise [never] deny force"; "" if there is none. */
static void read_mode(const char *path, char *mode, size_t size)
{
    char line[128] = "", *begin, *end;
    FILE *file = fopen(path, "re");

    *mode = '\0';
    if (!file)
        return;
    if (fgets(line, sizeof(line), file) && (begin = strchr(line, '[')) && (end = strchr(begin, ']')))
        snprintf(mode, size, "%.*s", (int)(end - begin - 1), begin + 1);
    fclose(file);
}

bool huge_pages_on_advice(void)
{
    char mode[16];

    read_mode(MODE_FILE, mode, sizeof(mode));
    return strcmp(mode, "advise") == 0;
}

void huge_pages_mode(char *mode, size_t size)
{
    read_mode(MODE_FILE, mode, size);
    if (!*mode)
        snprintf(mode, size, "unknown");
}

void huge_pages_describe(const char *mode_file, char *text, size_t size)
{
    const char *path = mode_file ? mode_file : MODE_FILE;
    char mode[16];

    read_mode(path, mode, sizeof(mode));
    if (!*mode)
        snprintf(text, size, "huge pages: none, this kernel has none for shared memory");
    else if (strcmp(mode, "never") == 0 || strcmp(mode, "deny") == 0)
        snprintf(text, size, "huge pages: none, %s is %s; with advise, shared memory has them (docs/cluster.md)",
                 path, mode);
    else
        snprintf(text, size, "huge pages: as many as are free, %s is %s", path, mode);
}
