/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Counts the system resources that a process holds, to check that none is left over. For tests with cmocka. */

#include <dirent.h>
#include <stdio.h>
#include <string.h>

/* Open descriptors, and a constant. */
static inline size_t count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    size_t n = 0;

    assert_non_null(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

/* Mappings of this process whose line in /proc/self/maps has the text. */
static inline unsigned count_maps(const char *text)
{
    FILE *file = fopen("/proc/self/maps", "re");
    char line[512];
    unsigned n = 0;

    assert_non_null(file);
    while (fgets(line, sizeof(line), file))
        n += strstr(line, text) != NULL;
    fclose(file);
    return n;
}
